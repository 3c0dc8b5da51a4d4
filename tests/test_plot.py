import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboardX import SummaryWriter

import plot

PLOT = Path(plot.__file__)
HEADER = "step,success_rate,episodic_return,wasserstein," + ",".join(plot.HUMAN)


def write_run(folder: Path, env_id: str, algorithm: str, seed: int, successes: list[float]) -> Path:
    run = folder / f"{env_id}__{algorithm}__{seed}__1700000000"
    run.mkdir()
    rows = [
        f"{1000 * i},{value},{10 * value},{5 - i},3.0,3.5,4.0" for i, value in enumerate(successes)
    ]
    (run / "evaluations.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return run


def test_median_and_quartiles_over_seeds_at_the_steps_that_all_have(tmp_path):
    runs = [
        write_run(tmp_path, "Door", "sac", s, v)
        for s, v in enumerate([[0, 0.2], [0, 0.4], [0.3, 0.9, 1.0]])
    ]
    steps, (low, median, high) = plot.quartiles(
        [plot.read_curve(run, "success_rate") for run in runs]
    )
    assert list(steps) == [0, 1000]
    np.testing.assert_allclose(median, [0, 0.4])
    np.testing.assert_allclose(low, [0, 0.3])
    np.testing.assert_allclose(high, [0.15, 0.65])


def test_a_file_of_docs_results_is_read_like_its_run(tmp_path):
    run = write_run(tmp_path, "Door", "sac", 1, [0.1, 0.5])
    kept = tmp_path / "Door__sac__1.csv"
    kept.write_bytes((run / "evaluations.csv").read_bytes())
    first, second = plot.read_curve(run, "wasserstein"), plot.read_curve(kept, "wasserstein")
    assert first[:2] == second[:2] == ("Door", "sac")
    for a, b in zip(first[2:], second[2:]):
        np.testing.assert_array_equal(a, b)
    assert list(first.human) == [3.0, 3.5, 4.0]


def test_tensorboard_events_give_the_same_curve_and_a_repeated_step_counts_once(tmp_path):
    run = tmp_path / "Door__sac__1__1700000000"
    resumed = {
        "a": [(0, 0.1), (1000, 0.7)],
        "b": [(1000, 0.5), (2000, 0.75)],
    }  # the second process resumed the first
    for process, steps in resumed.items():
        with SummaryWriter(str(run), filename_suffix=process) as log:
            log.add_scalar("losses/q", 3.0, steps[0][0])
            for step, value in steps:
                log.add_scalar("eval/success_rate", value, step)
    curve = plot.read_curve(run, "success_rate")
    assert list(curve.steps) == [0, 1000, 2000]
    np.testing.assert_allclose(curve.values, [0.1, 0.5, 0.75], rtol=1e-6)
    assert plot.read_curve(run, "wasserstein") is None


def test_the_loss_of_the_candidates_comes_from_the_events_beside_the_evaluations(tmp_path):
    run = write_run(tmp_path, "Door", "aquadqn", 1, [0.1, 0.5])
    with SummaryWriter(str(run)) as log:
        log.add_scalar("candidates/loss", 2.0, 500)
        log.add_scalar("candidates/loss", 1.5, 1000)
    curve = plot.read_curve(run, "candidate_loss")
    assert list(curve.steps) == [500, 1000] and list(curve.values) == [2.0, 1.5]
    assert list(plot.read_curve(run, "success_rate").steps) == [0, 1000]
    (axis,) = plot.draw([curve], "candidate-loss").axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("gradient steps", "candidate loss")


def test_evaluations_without_the_metric_are_left_out(tmp_path):
    run = write_run(tmp_path, "Door", "sac", 1, [float("nan"), 0.5])
    assert list(plot.read_curve(run, "success_rate").steps) == [1000]
    assert plot.read_curve(run, "normalized_score") is None
    assert plot.read_curve(tmp_path, "success_rate") is None
    assert plot.read_curve(tmp_path / "Door__sac__1.csv", "success_rate") is None


def test_an_algorithm_looks_the_same_in_every_figure_and_no_two_look_alike():
    looks = [tuple(plot.style(name, ["bc"]).values()) for name in plot.LEGEND]
    assert len(set(looks)) == len(looks)
    assert plot.style("sac", ["mine", "sac"]) == plot.style("sac", ["sac"])
    assert tuple(plot.style("mine", ["mine", "sac"]).values()) not in looks


def test_panels_lines_and_the_human(tmp_path):
    runs = [write_run(tmp_path, env, "aquagail", 1, [0.1, 0.2, 0.3]) for env in ("Door", "Pen")]
    runs.append(write_run(tmp_path, "Door", "bc", 1, [0.5, 0.6, 0.7, 0.8, 0.9]))
    figure = plot.draw([plot.read_curve(run, "wasserstein") for run in runs], "wasserstein")
    door, pen = figure.axes
    assert [axis.get_title() for axis in figure.axes] == ["Door", "Pen"]
    lines = {line.get_label(): line.get_data() for line in door.get_lines()}
    assert set(lines) == {"AQuaGAIL (1 seed)", "BC (1 seed)", "demonstrator"}
    # Five evaluations of BC, the last at distance 1: a horizontal line as long as the agent's.
    np.testing.assert_array_equal(lines["BC (1 seed)"], [[0, 2000], [1, 1]])
    np.testing.assert_array_equal(lines["AQuaGAIL (1 seed)"], [[0, 1000, 2000], [5, 4, 3]])
    assert set(lines["demonstrator"][1]) == {3.5}
    assert pen.get_xlabel() == "environment steps"


def test_the_legend_has_the_papers_names_and_a_name_of_yours_as_it_is(tmp_path):
    runs = [write_run(tmp_path, "Door", name, 1, [0.1, 0.2]) for name in ("sacfd", "mine")]
    (axis,) = plot.draw([plot.read_curve(run, "success_rate") for run in runs], "success").axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        "mine (1 seed)",
        "SACfD (1 seed)",
    ]
    assert len(set(plot.LEGEND.values())) == len(plot.LEGEND)


def test_a_fourth_task_begins_a_second_row(tmp_path):
    runs = [write_run(tmp_path, f"Task{i}", "sac", 1, [0.1, 0.2]) for i in range(4)]
    axes = plot.draw([plot.read_curve(run, "success_rate") for run in runs], "success").axes
    places = [axis.get_subplotspec() for axis in axes]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]


def test_bc_alone_is_drawn_against_gradient_steps(tmp_path):
    run = write_run(tmp_path, "Door", "bc", 1, [0.5, 0.6, 0.7])
    (axis,) = plot.draw([plot.read_curve(run, "success_rate")], "success", human_success=0.32).axes
    np.testing.assert_array_equal(
        axis.get_lines()[0].get_data(), [[0, 1000, 2000], [0.5, 0.6, 0.7]]
    )
    assert set(axis.get_lines()[1].get_ydata()) == {0.32}
    assert axis.get_xlabel() == "gradient steps"


def test_offline_agents_are_drawn_against_gradient_steps_too(tmp_path):
    runs = [
        write_run(tmp_path, "Hopper", name, 1, [0.5, 0.6, 0.7])
        for name in ("aquacql", "bc", "bc10")
    ]
    (axis,) = plot.draw([plot.read_curve(run, "episodic_return") for run in runs], "return").axes
    assert axis.get_xlabel() == "gradient steps"
    assert [len(line.get_xdata()) for line in axis.get_lines()] == [
        3,
        2,
        2,
    ]  # a curve, and BC's horizontal lines


def call(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plot.py", *words])
    plot.main()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command_writes_a_picture(tmp_path, monkeypatch, suffix):
    run, out = write_run(tmp_path, "Door", "sac", 1, [0.1, 0.5]), tmp_path / f"figure.{suffix}"
    call(monkeypatch, str(run), "--out", str(out))
    assert out.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere", "--metric", "success"], "none of the 1 paths is a run with success"),
        (["{run}", "--out", "figure.pdf"], "name a .png or .svg file"),
        (["{broken}"], "not one of ours"),
        (["{wide}"], "not one of ours"),
        (["{run}", "--out", "no/folder/figure.png"], "cannot write no/folder/figure.png"),
        (["{run}", "{later}"], "the seeds of sac have no step in common"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, words, message):
    run, broken = write_run(tmp_path, "Door", "sac", 1, [0.1]), tmp_path / "a__b__1.csv"
    broken.write_text("step,success_rate\nzero,one\n")
    wide, later = tmp_path / "a__wide__1.csv", tmp_path / "Door__sac__2.csv"
    wide.write_text("step,success_rate\n0,1,2\n")
    later.write_text("step,success_rate\n7,1\n")
    with pytest.raises(SystemExit) as stopped:
        monkeypatch.chdir(tmp_path)
        call(
            monkeypatch,
            *(word.format(run=run, broken=broken, wide=wide, later=later) for word in words),
        )
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and error.count("\n") == 1


def test_help_reads_like_documentation():
    shown = subprocess.run(
        [sys.executable, str(PLOT), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "median" in shown.lower() and "--metric" in shown


def write_candidates(run: Path) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    candidates, actions = generator.normal(size=(9, 5, 3)), generator.normal(size=(9, 3))
    run.mkdir()
    np.savez(run / "candidates_along.npz", candidates=candidates, actions=actions)
    return candidates, actions


def test_candidates_have_a_panel_per_step_and_the_demonstration_in_black(tmp_path):
    candidates, actions = write_candidates(tmp_path / "run")
    steps = [0, 3, 6, 8]
    figure = plot.candidate_figure(candidates[steps], actions[steps], steps)
    assert [axis.get_title() for axis in figure.axes if axis.lines] == [f"step {t}" for t in steps]
    for axis, step in zip(figure.axes, steps):
        *heads, demonstrated = axis.lines
        np.testing.assert_array_equal([line.get_ydata() for line in heads], candidates[step])
        np.testing.assert_array_equal(demonstrated.get_ydata(), actions[step])
        assert demonstrated.get_color() == "black"


def test_candidates_of_a_run_as_a_picture_and_a_video(tmp_path):
    write_candidates(tmp_path / "run")
    command = [sys.executable, str(PLOT), "candidates", str(tmp_path / "run"), "--video"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("candidates.png", "candidates.mp4"):
        assert (tmp_path / "run" / name).stat().st_size > 1000
    nowhere = subprocess.run([*command[:3], "nowhere"], capture_output=True, text=True)
    assert nowhere.returncode == 2 and nowhere.stderr.count("\n") == 1
    assert "nowhere/candidates_along.npz" in nowhere.stderr
