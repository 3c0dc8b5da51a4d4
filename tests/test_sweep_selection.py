"""sweep.py's searches over other values and other scores than the paper's, and what counts as an end of a trial."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboardX import SummaryWriter

import sweep

TAG = "candidates/held_out_distance"


def search_args(**changes) -> sweep.SearchArgs:
    return sweep.SearchArgs("aquadqn", ["Env-v0"], num_samples=40, **changes)


def test_a_search_over_values_of_ones_own():
    values = ("temperature-start=None,1e-3,1", "candidates=learned,kmeans", "num-actions=10,20")
    plan = sweep.make_plan(search_args(values=values), ["--num-actions", "5"])
    assert plan["searched"] == {
        "temperature_start": (None, 0.001, 1),
        "candidates": ("learned", "kmeans"),
    }
    words = plan["trials"][0]["words"]
    assert words[words.index("--num-actions") + 1] == "5"
    assert words[words.index("--temperature-start") + 1] in ("None", "0.001", "1")


def test_a_value_can_be_that_of_another_hyperparameter():
    """As a start temperature equal to the temperature: it is constant."""
    values = ("temperature=0.001,0.01", "temperature-start=temperature,None")
    plan = sweep.make_plan(search_args(values=values), [])
    assert plan["searched"]["temperature_start"] == ("temperature", None)
    for trial in plan["trials"]:
        words = trial["words"]
        temperature = words[words.index("--temperature") + 1]
        start = words[words.index("--temperature-start") + 1]
        constant = trial["values"]["temperature_start"] == "temperature"
        assert start == (temperature if constant else "None")


@pytest.mark.parametrize("values", ["temperature", "temperature=", "=1,2"])
def test_values_that_are_none_are_refused(values):
    with pytest.raises(sweep.UserError, match="give name=value"):
        sweep.make_plan(search_args(values=(values,)), [])


def test_lower_can_be_better():
    trials = [sweep.Trial({"rate": "a"}, score) for score in (1.0, 2.0, 9.0)]
    trials += [sweep.Trial({"rate": "b"}, score) for score in (1.2, 1.4, 1.6, 1.8)]
    judgements = sweep.judge(trials, "rate", ["a", "b"], "min")
    assert [judgement.average for judgement in judgements] == pytest.approx([1.5, 1.3])
    value, average, margin = sweep.select(judgements, "min")
    assert (value, average, margin) == ("b", pytest.approx(1.3), pytest.approx(0.2))


@pytest.mark.parametrize(("mode", "worst"), [("max", -300.0), ("min", -100.0)])
def test_a_failed_trial_is_the_worst_of_all(mode, worst):
    """A return can be negative: zero would be the best score of all."""
    ends = [("done", -100.0), ("done", -300.0), ("done", float("nan")), ("failed", None)]
    rows = [sweep.Row(0, "E-v0", {"rate": 1}, *end, 0, 1, "", "") for end in ends]
    settings = {"metric": "episodic_return", "mode": mode}
    assert sweep.worst_score(rows, settings) == worst
    assert sweep.counted(rows[-1], worst).score == worst
    assert sweep.worst_score(rows[2:], settings) is None
    assert sweep.worst_score(rows, {"metric": "success_rate", "mode": "max"}) == 0.0


@pytest.mark.parametrize(
    ("exit_code", "message", "final"),
    [
        (0, "", True),
        (2, "error: Nowhere-v0 is not registered", True),
        (1, "error: not finite at step 8; lower --learning-rate", True),
        (1, "error: No space left on device; free some space, then --resume the run", False),
        (1, "MemoryError", False),
        (-9, "", False),
        (143, "stopped; continue with: python aquadqn.py --resume runs/x", False),
    ],
)
def test_what_is_not_tried_again(exit_code, message, final):
    assert sweep.is_final(exit_code, message) == final


def test_a_wrong_argument_is_named(tmp_path):
    box = "╭─ Unrecognized options ─╮\n│ Unrecognized options: --bad, 1   │\n│ For full helptext, ... │\n╰──╯\n"
    (tmp_path / "log.txt").write_text("a warning\n" + box)
    assert sweep.last_words(tmp_path) == "Unrecognized options: --bad, 1"


def test_a_death_is_told_in_one_line(tmp_path):
    written = tmp_path / "error.txt"
    written.write_text("Failure # 1\nTraceback ...\n  File ...\nRuntimeError: exit code -9: \n")
    assert sweep.cause_of_death(SimpleNamespace(error_file=written)) == "RuntimeError: exit code -9"
    with written.open("a") as file:
        file.write("Failure # 2\nThe actor is dead because its worker process has died. And so on.")
    died = "The actor is dead because its worker process has died"
    assert sweep.cause_of_death(SimpleNamespace(error_file=written)) == died
    assert sweep.cause_of_death(SimpleNamespace(error_file=None)) == "unknown"


def make_ended_trial(folder: Path, index: int, distance: float, plan: dict) -> None:
    """What a trial leaves behind, a resumed one: two files of events."""
    trial = sweep.trial_folder(folder, index)
    run = trial / "runs" / "a"
    run.mkdir(parents=True)
    for step, logged in enumerate([9.0, distance]):
        with SummaryWriter(str(run), filename_suffix=f".{step}") as log:
            log.add_scalar("candidates/in_use", 7, step)
            log.add_scalar(TAG, logged, step)
    (run / "evaluations.csv").write_text("step,success_rate\n8,0.5\n")
    (trial / "attempts.txt").write_text("0.0 here 1\n0.1 here 2\n")
    sweep.write_outcome(trial, 0, plan)


def test_a_tensorboard_tag_is_the_score(tmp_path, capsys):
    args = search_args(
        values=("num_actions=10,20",), metric=TAG, mode="min", columns=("candidates/in_use",)
    )
    plan = json.loads(json.dumps(sweep.make_plan(args, [])))
    sweep.write_json(tmp_path / "sweep.json", plan)
    for index, trial in enumerate(plan["trials"][:30]):
        make_ended_trial(tmp_path, index, trial["values"]["num_actions"] / 100, plan)
    sweep.report(tmp_path)
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    for row in rows[:30]:
        assert float(row["score"]) == pytest.approx(int(row["num_actions"]) / 100)
        assert float(row["candidates/in_use"]) == 7
        assert (row["status"], row["step"], row["attempts"]) == ("done", "8", "2")
    assert {row["status"] for row in rows[30:]} == {"waiting"}
    assert {row["score"] for row in rows[30:]} == {""}
    assert "| num_actions | 10 | 0.100 | 10 |" in (tmp_path / "selection.md").read_text()
    assert "best 0.100" in capsys.readouterr().out


def test_asha_needs_a_curve():
    with pytest.raises(sweep.UserError, match="asha needs a column"):
        sweep.check_run_args(search_args(metric=TAG, scheduler="asha"))


def test_a_line_of_the_live_table():
    progress = sweep.Progress(
        total=12,
        mode="min",
        ended={0: "done", 1: "failed", 2: "stopped"},
        scores={0: 0.5, 2: float("nan"), 3: 0.25},
        seconds=[500.0, 700.0],
    )
    progress.line(running=2, given_up=1)
    left = "about 40 min left"  # 8 trials of 10 minutes, two at a time, though one has just ended
    assert progress.line(running=1, given_up=1) == (
        f"1 running, 7 waiting, 2 done, 1 failed, 1 given up; best 0.250 (trial 00003); {left}"
    )


def test_a_trial_is_held_to_its_cores(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    plan = sweep.make_plan(search_args(), [])
    variables = sweep.trial_environment(plan)
    assert {variables[name] for name in sweep.THREAD_LIMITS} == {"1"}
    assert variables["XLA_FLAGS"] == "--xla_one=1 --xla_cpu_multi_thread_eigen=false"
    assert variables["JAX_PLATFORMS"] == "cpu"
    assert variables["PYTHONPATH"] == "/elsewhere"
    four_cores = sweep.make_plan(search_args(cpus_per_trial=4, gpus_per_trial=0.5), [])
    variables = sweep.trial_environment(four_cores)
    assert {variables[name] for name in sweep.THREAD_LIMITS} == {"4"}
    assert variables["XLA_FLAGS"] == "--xla_one=1"
    assert "JAX_PLATFORMS" not in variables
    assert variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.45"


@pytest.mark.parametrize("kind", ["seeds", "search"])
def test_only_seeds_are_averaged_in_a_plot(kind, tmp_path, capsys):
    """plot.py draws the median over runs that differ in nothing but their seed."""
    args = sweep.SeedsArgs("aquadqn", ["Env-v0"], num_seeds=2)
    if kind == "search":
        args = search_args()
    sweep.write_json(tmp_path / "sweep.json", sweep.make_plan(args, []))
    sweep.report(tmp_path)
    assert ("plot.py" in capsys.readouterr().out) == (kind == "seeds")
