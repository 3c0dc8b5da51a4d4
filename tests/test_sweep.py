"""sweep.py: the paper's tables against the scripts, the selection rule by hand, and real sweeps of tiny trials."""

import csv
import dataclasses
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tyro

import sweep


def script_args(algorithm: str) -> type:
    script, subcommand, _ = sweep.ALGORITHMS[algorithm]
    module = importlib.import_module(script.removesuffix(".py"))
    names = {
        "sac": "SACArgs",
        "sacfd": "SACfDArgs",
        "gail": "GAILArgs",
        "bc": "BCArgs",
        "mdn": "MDNArgs",
    }
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
                assert (
                    defaults[argument] in choice.values
                )  # the paper selects none: any that it tried


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
    trials = [
        trial(1, 0.9, other=1),
        trial(1, 0.1, other=2),
        trial(2, 0.3, other=1),
        trial(2, 0.8, other=2),
    ]
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

    rows = [
        row("a", "done", 0.9),
        row("a", "failed", 0.9),
        row("a", "failed", None),
    ]  # better half: 0.9 and 0
    rows += [
        row("b", "done", 0.5),
        row("b", "started", 1.0),
        row("b", "waiting", None),
        row("b", "stopped", 0.7),
    ]
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
    plan = sweep.make_plan(search_args(num_samples=300), ["--learning-rate", "0.5"])
    assert "learning_rate" not in plan["searched"]
    assert "candidate_learning_rate" in plan["searched"]
    for name, values in plan["searched"].items():
        drawn = [each["values"][name] for each in plan["trials"]]
        assert set(drawn) == set(values)
        assert min(drawn.count(value) for value in values) > 0.6 * 300 / len(values)


def test_the_command_of_a_trial():
    values = {"dropout": 0.3, "temperature": 1e-4}
    words = sweep.trial_words("aquaplay", "stack", values, ["--seed", "2"])
    dropout = ["--input-dropout", "0.3", "--hidden-dropout", "0.3"]
    assert words == [
        "aquaplay.py",
        "--task",
        "stack",
        *dropout,
        "--temperature",
        "0.0001",
        "--seed",
        "2",
        "--quiet",
    ]
    words = sweep.trial_words(
        "gail", "Env-v0", {"normalize_observations": False, "min_demo_reward": None}, []
    )
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


# ------------------------------------------------------------------------------------------------- real sweeps

ROOT = Path(__file__).parents[1]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=sweep.INSTALL_RAY)
TINY = """--dataset-id tiny/reach/expert-v0 --candidate-steps 1500 --total-timesteps 600 --eval-every 200
 --eval-episodes 3 --learning-starts 50 --checkpoint-every 100 --num-actions 4 --batch-size 32""".split()


def start_sweep(folder: Path, *words: str, **variables: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), **variables}
    environment.setdefault("RAY_worker_niceness", "0")
    return subprocess.Popen(
        [sys.executable, str(ROOT / "sweep.py"), *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C in a terminal reaches all of them, but not pytest
    )


def read_table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def wait_for_a_checkpoint(trial: Path, driver: subprocess.Popen) -> None:
    deadline = time.monotonic() + 900
    while not list(trial.glob("runs/*/state.npz")):
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline, "the trial wrote no checkpoint"
        time.sleep(0.01)


def pid_of(trial: Path) -> int:
    return int((trial / "attempts.txt").read_text().split()[-1])


def tiny_seeds(folder: Path) -> list[str]:
    where = ["--env-id", "tiny_env:Reach-v0", "--storage-path", str(folder)]
    return ["seeds", "aquadqn", *where, "--num-seeds", "2"]


@needs_ray
def test_a_sweep_with_a_killed_trial_loses_nothing(datasets, tmp_path):
    folder = tmp_path / "sweep"
    driver = start_sweep(tmp_path, *tiny_seeds(folder), "--max-concurrent", "2", "--", *TINY)
    killed = sweep.trial_folder(folder, 0)
    wait_for_a_checkpoint(killed, driver)
    os.kill(pid_of(killed), signal.SIGKILL)
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode == 0, output
    rows = read_table(folder)
    assert [row["status"] for row in rows] == ["done", "done"]
    assert [row["seed"] for row in rows] == ["1", "2"]
    assert [row["step"] for row in rows] == ["600", "600"]
    assert [row["attempts"] for row in rows] == ["2", "1"]

    plan = sweep.load_plan(folder)
    uninterrupted = tmp_path / "uninterrupted"
    uninterrupted.mkdir()
    assert sweep.start_trial(uninterrupted, plan["trials"][0]["words"], plan).wait(timeout=900) == 0
    ours = sweep.find_run(killed)
    theirs = sweep.find_run(uninterrupted)
    for name in ("evaluations.csv", "replay.f32"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    for name in ("agent.npz", "candidates.npz", "state.npz"):
        with np.load(ours / name) as our_arrays, np.load(theirs / name) as their_arrays:
            assert our_arrays.files == their_arrays.files
            for key in our_arrays.files:
                np.testing.assert_array_equal(our_arrays[key], their_arrays[key])


@needs_ray
def test_after_ctrl_c_nothing_is_lost_and_nothing_repeated(datasets, tmp_path):
    folder = tmp_path / "sweep"
    driver = start_sweep(tmp_path, *tiny_seeds(folder), "--max-concurrent", "1", "--", *TINY)
    first, second = (sweep.trial_folder(folder, index) for index in range(2))
    wait_for_a_checkpoint(second, driver)
    os.killpg(driver.pid, signal.SIGINT)
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode == 130, output
    continued = f"1 trials have not ended; continue with: python sweep.py restore {folder}\n"
    assert output.endswith(continued)
    assert [row["status"] for row in read_table(folder)] == ["done", "started"]
    ended = (first / "outcome.json").stat().st_mtime_ns

    driver = start_sweep(tmp_path, "restore", str(folder))
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode == 0, output
    rows = read_table(folder)
    assert [row["status"] for row in rows] == ["done", "done"]
    assert [row["step"] for row in rows] == ["600", "600"]
    assert [row["attempts"] for row in rows] == ["1", "2"]
    assert (first / "outcome.json").stat().st_mtime_ns == ended


@needs_ray
def test_asha_stops_the_worse_trial_after_the_grace_period(datasets, tmp_path):
    """The second trial has shorter episodes, where longer ones count as better."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    args = sweep.SeedsArgs(
        "aquadqn",
        ["tiny_env:Reach-v0"],
        num_seeds=2,
        max_concurrent=1,
        scheduler="asha",
        grace_period=400,  # the command line refuses one as short as this
        metric="episodic_length",
    )
    plan = sweep.make_plan(args, TINY)
    endless = ["--max-episode-steps", "2", "--total-timesteps", "1000000"]
    plan["trials"][1]["words"] += endless
    plan["environment"]["PYTHONPATH"] = str(ROOT / "tests")
    sweep.write_json(folder / "sweep.json", plan)
    driver = start_sweep(tmp_path, "restore", str(folder))
    output, _ = driver.communicate(timeout=900)
    assert driver.returncode == 0, output
    rows = read_table(folder)
    assert [row["status"] for row in rows] == ["done", "stopped"], output
    assert rows[0]["step"] == "600"
    assert int(rows[1]["step"]) >= 400
    assert rows[1]["error"] == "stopped by asha"
    assert not Path(f"/proc/{pid_of(sweep.trial_folder(folder, 1))}").exists()


@needs_ray
def test_bad_input_is_not_tried_again_and_shows_its_line(datasets, tmp_path):
    folder = tmp_path / "sweep"
    words = ["--env-id", "Nowhere-v0", "--num-samples", "1", "--storage-path", str(folder)]
    driver = start_sweep(tmp_path, "search", "bc", *words)
    output, _ = driver.communicate(timeout=900)
    (row,) = read_table(folder)
    assert row["status"] == "failed", output
    assert row["attempts"] == "1"
    assert row["error"].startswith("error: ")
    assert "Nowhere" in row["error"]
    assert row["error"] in output
    assert "0 of" not in (folder / "selection.md").read_text()
    assert len(list((folder / "histograms").iterdir())) == len(sweep.TABLES["bc"])


def run_here(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        sweep.main()
    return stopped.value.code, capsys.readouterr().err


def test_without_ray_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["seeds", "aquadqn", "--env-id", "Env-v0", "--storage-path", tmp_path / "sweep"]
    assert run_here(monkeypatch, capsys, *words) == (2, f"error: {sweep.INSTALL_RAY}\n")
    assert not (tmp_path / "sweep").exists()


def test_ctrl_c_while_ray_starts_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "import_ray", lambda: SimpleNamespace(shutdown=lambda: None))
    monkeypatch.setattr(sweep, "connect", interrupted)
    code, error = run_here(monkeypatch, capsys, *tiny_seeds(tmp_path / "sweep"))
    assert code == 130
    assert f"continue with: python sweep.py restore {tmp_path / 'sweep'}" in error


def test_jax_is_imported_in_the_trials_process_only(tmp_path):
    """Not by what the driver and its workers do: importing Ray, reading TensorBoard's files."""
    program = ["import sys", "from pathlib import Path", "import sweep"]
    if importlib.util.find_spec("ray"):
        program += ["sweep.import_ray()"]
    program += ["sweep.last_scalars(Path(sys.argv[1]), ['a/b'])", "sys.exit('jax' in sys.modules)"]
    command = [sys.executable, "-c", "\n".join(program), str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT).returncode == 0


def test_what_is_wrong_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "import_ray", lambda: None)
    search = ["search", "aquadqn", "--env-id", "Env-v0", "--storage-path", tmp_path]
    cases = {
        "no sweep.json": ["report", tmp_path],
        "no table for aquacql": ["search", "aquacql", "--env-id", "Env-v0"],
        "at least 50000": [*search, "--scheduler", "asha", "--grace-period", "100"],
        "at least 1": [*search, "--num-samples", "0"],
    }
    for message, words in cases.items():
        code, error = run_here(monkeypatch, capsys, *words)
        assert code == 2
        assert error.startswith("error: ") and error.count("\n") == 1
        assert message in error
    (tmp_path / "sweep.json").write_text("{}")
    assert "has a sweep already" in run_here(monkeypatch, capsys, *search)[1]
