"""sweep.py: the paper's tables against the scripts, the selection rule by hand, and real sweeps of tiny trials."""

import dataclasses
import importlib

import pytest
import tyro

import sweep


def script_args(algorithm: str) -> type:
    script, subcommand, _ = sweep.ALGORITHMS[algorithm]
    module = importlib.import_module(script.removesuffix(".py"))
    names = {"sac": "SACArgs", "sacfd": "SACfDArgs", "gail": "GAILArgs", "bc": "BCArgs", "mdn": "MDNArgs"}
    return getattr(module, names[subcommand[0]] if subcommand else "Args")


def script_defaults(algorithm: str) -> dict:
    return {field.name: field.default for field in dataclasses.fields(script_args(algorithm))}


@pytest.mark.parametrize("algorithm", sweep.TABLES)
def test_every_name_is_an_argument_and_every_bold_value_its_default(algorithm):
    defaults = script_defaults(algorithm)
    for name, choice in sweep.TABLES[algorithm].items():
        assert set(choice.bold) <= set(choice.values)
        assert len(set(choice.values)) == len(choice.values)
        for argument in choice.arguments or (name,):
            assert argument in defaults
            if choice.bold:
                same = defaults[argument] in choice.bold
                assert same != ((algorithm, name) in sweep.DIFFERENCES), f"{algorithm}: {argument}"
            else:
                assert defaults[argument] in choice.values  # the paper selects none: any that it tried


def test_the_tables_have_the_papers_size():
    sizes = {algorithm: len(table) for algorithm, table in sweep.TABLES.items()}
    assert sizes == {
        "aquadqn": 10,
        "sac": 4,
        "sacfd": 6,
        "aquagail": 17,
        "gail": 13,
        "bc": 8,
        "mdn": 5,
        "sac-robodesk": 4,
        "aquaplay": 4,
    }
    assert all(reason for reason in sweep.DIFFERENCES.values())


def trial(value, score: float | None, other: int = 0) -> sweep.Trial:
    return sweep.Trial({"rate": value, "other": other}, score)


def test_a_value_is_judged_by_the_better_half_of_its_configurations():
    trials = [trial("a", score) for score in (0.0, 0.2, 0.6, 1.0)]  # better half: 1.0 and 0.6
    trials += [trial("b", score) for score in (0.7, 0.7, 0.7)]  # two of three
    trials += [trial("c", 0.5)]
    judgements = sweep.judge(trials, "rate", ["a", "b", "c", "d"])
    assert [judgement[0] for judgement in judgements] == ["a", "b", "c", "d"]
    assert [judgement.trials for judgement in judgements] == [4, 3, 1, 0]
    assert [judgement.average for judgement in judgements[:3]] == pytest.approx([0.8, 0.7, 0.5])
    value, average, margin = sweep.select(judgements)
    assert value == "a"
    assert average == pytest.approx(0.8)
    assert margin == pytest.approx(0.1)


def test_hyperparameters_are_selected_independently():
    trials = [trial(1, 0.9, other=1), trial(1, 0.1, other=2), trial(2, 0.3, other=1), trial(2, 0.8, other=2)]
    assert sweep.select(sweep.judge(trials, "rate", [1, 2])).value == 1  # 0.9 against 0.8
    assert sweep.select(sweep.judge(trials, "other", [1, 2])).value == 1  # 0.9 against 0.8
    assert sweep.better_half_average([0.9, 0.3]) == 0.9


def test_of_equals_the_one_listed_first_is_taken():
    trials = [trial(None, 0.5), trial(0.01, 0.5), trial(0.1, 0.25)]
    assert sweep.select(sweep.judge(trials, "rate", [0.01, None, 0.1])) == (0.01, 0.5, 0.0)
    assert sweep.select(sweep.judge(trials, "rate", [None, 0.01, 0.1])) == (None, 0.5, 0.0)


def test_failed_trials_count_as_zero_and_unfinished_ones_not_at_all():
    def row(value: str, status: str, score: float | None) -> sweep.Row:
        return sweep.Row(0, "Env-v0", {"rate": value}, status, score, 0, 1, "", "")

    rows = [row("a", "done", 0.9), row("a", "failed", 0.9), row("a", "failed", None)]  # better half: 0.9 and 0
    rows += [row("b", "done", 0.5), row("b", "started", 1.0), row("b", "waiting", None), row("b", "stopped", 0.7)]
    rows += [row("b", "done", float("nan"))]
    trials = [sweep.counted(each) for each in rows]
    judgements = sweep.judge(trials, "rate", ["a", "b"])
    assert [judgement.trials for judgement in judgements] == [3, 2]
    assert [judgement.average for judgement in judgements] == pytest.approx([0.45, 0.7])
    assert sweep.select(judgements).value == "b"


def test_nothing_tried_selects_nothing():
    assert sweep.select(sweep.judge([trial(1, None)], "rate", [1, 2])) is None
    assert sweep.select(sweep.judge([trial(1, 0.5)], "rate", [1, 2])).value == 1


def search_args(algorithm: str = "aquadqn", **changes) -> sweep.SearchArgs:
    return sweep.SearchArgs(algorithm, ["Env-v0"], **changes)


def test_configurations_are_drawn_from_the_table_and_what_is_given_is_not_searched():
    plan = sweep.make_plan(search_args(num_samples=300), ["--learning-rate", "0.5", "--total-timesteps", "200000"])
    assert "learning_rate" not in plan["searched"]
    assert "candidate_learning_rate" in plan["searched"]
    assert plan["last_step"] == 200_000
    for name, values in plan["searched"].items():
        drawn = [each["values"][name] for each in plan["trials"]]
        assert set(drawn) == set(values)
        assert min(drawn.count(value) for value in values) > 0.6 * 300 / len(values)


def test_the_command_of_a_trial():
    values = {"dropout": 0.3, "temperature": 1e-4}
    words = sweep.trial_words("aquaplay", "stack", values, ["--seed", "2"])
    dropout = ["--input-dropout", "0.3", "--hidden-dropout", "0.3"]
    assert words == ["aquaplay.py", "--task", "stack", *dropout, "--temperature", "0.0001", "--seed", "2", "--quiet"]
    words = sweep.trial_words("gail", "Env-v0", {"normalize_observations": False, "min_demo_reward": None}, [])
    start = ["sac_baselines.py", "gail", "--env-id", "Env-v0"]
    assert words == [*start, "--no-normalize-observations", "--min-demo-reward", "None", "--quiet"]


@pytest.mark.parametrize("algorithm", sweep.ALGORITHMS)
def test_the_scripts_understand_the_command(algorithm):
    """Every value of every table, through the script's own parser."""
    subcommand = sweep.ALGORITHMS[algorithm].subcommand
    table = sweep.TABLES.get(algorithm, {"seed": sweep.Choice((3,), ())})
    for i in range(max(len(choice.values) for choice in table.values())):
        values = {name: choice.values[i % len(choice.values)] for name, choice in table.items()}
        words = sweep.trial_words(algorithm, "thing", values, [])
        parsed = tyro.cli(script_args(algorithm), args=words[1 + len(subcommand) :])
        for name, choice in table.items():
            for argument in choice.arguments or (name,):
                assert getattr(parsed, argument) == values[name]
