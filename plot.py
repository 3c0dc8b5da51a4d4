# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy", "matplotlib", "tensorboard", "tyro"]
# ///
"""Learning curves of finished or running trainings, in the manner of the paper's figures.

Median over seeds with the interquartile range, one panel per task, one line per algorithm, the human score as a band
where the runs know it. Reads run folders (their evaluations.csv, else their TensorBoard events) and CSV files named as
in docs/results/curves: {env_id}__{exp_name}__{seed}.csv. BC and MDN take no environment steps: in a panel with
algorithms that do, their last score is a horizontal line, as in the paper. The metric candidate-loss is equation 1
while the candidates are trained; of a run folder only TensorBoard's events have it.

    python plot.py runs/* --metric success --out success.png
    python plot.py docs/results/curves/AdroitHandDoor-v1__*.csv --human-success 0.32 --out door.svg
    python plot.py runs/*gail* --metric wasserstein --title "Imitation on Door"

The candidates of a run along its first demonstration (appendix C), as a picture and, if asked for, as a video:

    python plot.py candidates runs/AdroitHandDoor-v1__aquadqn__1__1700000000 --video
"""

import csv
import dataclasses
import io
import sys
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

METRICS = {
    "success": "success_rate",
    "return": "episodic_return",
    "wasserstein": "wasserstein",
    "normalized": "normalized_score",
    "candidate-loss": "candidate_loss",
}
HUMAN = [f"human_wasserstein_{name}" for name in ("q25", "median", "q75")]
# Okabe and Ito's palette, told apart by every kind of colour vision. The same algorithm always has the same colour and
# dash; dashed lines begin where the colours are used up.
PALETTE = [
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#F0E442",
    "#999999",
    "#000000",
]
# What the legend calls a run with this exp_name; others are called by their exp_name.
LEGEND = {
    "aquadqn": "AQuaDQN",
    "sac": "SAC",
    "sacfd": "SACfD",
    "bc": "BC",
    "mdn": "MDN",
    "aquagail": "AQuaGAIL",
    "gail": "GAIL",
    "kmeans": "K-means",
    "random": "untrained candidates",
    "aquaplay": "AQuaPlay",
    "aquacql": "AQuaCQL",
    "bb2": "BB-2",
    "bb3": "BB-3",
    "bb5": "BB-5",
    "sbx": "SBX",
    "bc10": "10-percent BC",
    "aquadqn_nodropout": "AQuaDQN without dropout",
    "aquadqn_bundled": "AQuaDQN, bundled demonstrations",
    "aquagail_action": "AQuaGAIL, state-action",
    "aquagail_next": "AQuaGAIL, state-next-state",
    "aquadqn_k10_t0.001": "AQuaDQN, K = 10",
    "aquadqn_k15_t0.001": "AQuaDQN, K = 15",
    "aquadqn_k20_t0.001": "AQuaDQN, K = 20",
    "aquadqn_annealed": "AQuaDQN, our defaults",
}
WITHOUT_ENVIRONMENT_STEPS = (
    "bc",
    "bc10",
    "mdn",
)  # drawn as horizontal lines beside other algorithms
OFFLINE = {*WITHOUT_ENVIRONMENT_STEPS, "aquacql"}


@dataclasses.dataclass
class Args:
    paths: Annotated[list[Path], tyro.conf.Positional]
    """run folders, or CSV files named as in docs/results/curves"""
    metric: Literal["success", "return", "wasserstein", "normalized", "candidate-loss"] = "success"
    """what is drawn against the steps"""
    out: Path = Path("curves.png")
    """picture to write; .png and .svg are known"""
    title: str = ""
    """headline over all panels"""
    human_success: float | None = None
    """success rate of the demonstrations, drawn as a line in every panel"""


@dataclasses.dataclass
class CandidateArgs:
    run: Annotated[Path, tyro.conf.Positional]
    """run folder; the picture is written there, as candidates.png"""
    video: bool = False
    """candidates.mp4 too: a frame for every step of the demonstration"""


class Curve(NamedTuple):
    env_id: str
    algorithm: str
    steps: np.ndarray
    values: np.ndarray
    human: np.ndarray | None  # quartiles of the human's Wasserstein distance


def table_scores(path: Path) -> dict[int, dict[str, float]]:
    """Step -> the scores of that evaluation."""
    with path.open() as file:
        rows = [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
    return {int(row["step"]): row for row in rows}


def event_scores(run: Path) -> dict[int, dict[str, float]]:
    """The same from TensorBoard's files; where a resumed run logged a step again, the later one counts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    scores: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        if tag.startswith("eval/") or tag == "candidates/loss":
            for event in events.Scalars(tag):
                name = tag.removeprefix("eval/").replace("candidates/", "candidate_")
                scores.setdefault(event.step, {})[name] = event.value
    return dict(sorted(scores.items()))


def read_curve(path: Path, column: str) -> Curve | None:
    """None for whatever is not a run with this column."""
    table, name = (path / "evaluations.csv", path.name) if path.is_dir() else (path, path.stem)
    parts = name.split("__")
    if len(parts) < 3:
        return None
    scores = table_scores(table) if table.suffix == ".csv" and table.is_file() else {}
    if not any(column in row for row in scores.values()) and any(path.glob("events.out.tfevents*")):
        scores = event_scores(path)
    scores = {step: row for step, row in scores.items() if np.isfinite(row.get(column, np.nan))}
    if not scores:
        return None
    rows = list(scores.values())
    human = np.array([rows[-1][key] for key in HUMAN]) if HUMAN[0] in rows[-1] else None
    return Curve(
        parts[0], parts[1], np.array(list(scores)), np.array([row[column] for row in rows]), human
    )


def quartiles(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all seeds have, and the three quartiles of their values: (S,), (3, S)."""
    steps = sorted(set.intersection(*(set(curve.steps) for curve in curves)))
    if not steps:
        sys.exit(
            fail(f"the seeds of {curves[0].algorithm} have no step in common: draw them one by one")
        )
    values = [[dict(zip(curve.steps, curve.values))[step] for step in steps] for curve in curves]
    return np.array(steps), np.percentile(values, [25, 50, 75], axis=0)


def style(algorithm: str, seen: list[str]) -> dict[str, str]:
    known = [*LEGEND, *(name for name in seen if name not in LEGEND)]
    cycle, index = divmod(known.index(algorithm), len(PALETTE))
    return {"color": PALETTE[index], "linestyle": ("-", "--", ":", "-.")[cycle % 4]}


def draw_human(axis: Axes, curves: list[Curve], metric: str, human_success: float | None) -> None:
    bands = [curve.human for curve in curves if curve.human is not None]
    if metric == "wasserstein" and bands:
        axis.axhspan(bands[0][0], bands[0][2], color="black", alpha=0.15, lw=0)
        axis.axhline(bands[0][1], color="black", lw=1, label="demonstrator")
    if metric == "success" and human_success is not None:
        axis.axhline(human_success, color="black", lw=1, label="human")


def draw_panel(axis: Axes, curves: list[Curve], algorithms: list[str], metric: str) -> None:
    present = [name for name in algorithms if any(curve.algorithm == name for curve in curves)]
    with_steps = [name for name in present if name not in WITHOUT_ENVIRONMENT_STEPS]
    last = max(curve.steps[-1] for curve in curves if curve.algorithm in (with_steps or present))
    for name in present:
        same = [curve for curve in curves if curve.algorithm == name]
        steps, (low, median, high) = quartiles(same)
        marker = "o" if len(steps) <= 50 else ""
        if with_steps and name not in with_steps:
            steps, marker = np.array([0, last]), ""
            low, median, high = (np.repeat(values[-1], 2) for values in (low, median, high))
        look = style(name, algorithms)
        label = f"{LEGEND.get(name, name)} ({len(same)} seed{'s' * (len(same) > 1)})"
        axis.plot(steps, median, marker=marker, ms=3, label=label, **look)
        axis.fill_between(steps, low, high, color=look["color"], alpha=0.2, lw=0)
    in_gradient_steps = metric == "candidate-loss" or OFFLINE.issuperset(present)
    axis.set_xlabel("gradient steps" if in_gradient_steps else "environment steps")


def draw(
    curves: list[Curve], metric: str, title: str = "", human_success: float | None = None
) -> Figure:
    tasks, algorithms = sorted({c.env_id for c in curves}), sorted({c.algorithm for c in curves})
    columns, rows = min(len(tasks), 3), -(-len(tasks) // 3)
    figure = Figure(figsize=(1 + 5 * columns, 3.6 * rows), dpi=120, layout="constrained")
    for place, task in enumerate(tasks, start=1):
        axis = figure.add_subplot(rows, columns, place)
        own = [curve for curve in curves if curve.env_id == task]
        draw_panel(axis, own, algorithms, metric)
        draw_human(axis, own, metric, human_success)
        axis.set(title=task, ylabel=metric.replace("-", " "))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
        if metric == "success":
            axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small", framealpha=0.5)
    figure.suptitle(title)
    return figure


def candidate_figure(
    candidates: np.ndarray,  # (P, K, D)
    actions: np.ndarray,  # (P, D)
    steps: list[int],
) -> Figure:
    """A panel per step: action dimension on x, value on y, the demonstrated action in black."""
    columns = min(len(steps), 3)
    rows = -(-len(steps) // columns)
    size = (3 + 4 * columns, 1 + 3 * rows)
    figure = Figure(figsize=size, dpi=80, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colours = colormaps["turbo"](np.linspace(0, 1, candidates.shape[1]))
    for panel, (axis, step) in enumerate(zip(axes.flat, steps)):
        for k, candidate in enumerate(candidates[panel]):
            look = {"color": colours[k], "lw": 1, "ms": 3, "alpha": 0.8}
            axis.plot(candidate, "o-", label=f"candidate {k}", **look)
        axis.plot(actions[panel], "o-", color="black", lw=1.5, ms=4, label="demonstrated")
        axis.set(title=f"step {step}", xlabel="action dimension", ylabel="value")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="small")
    return figure


def draw_candidates(args: CandidateArgs) -> None:
    path = args.run / "candidates_along.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            candidates, actions = file["candidates"], file["actions"]
    except (OSError, ValueError, KeyError):
        sys.exit(
            fail(f"{path} is not there or not whole: name the folder of a run with candidates")
        )
    steps = np.unique(np.linspace(0, len(actions) - 1, 6).astype(int)).tolist()
    figure = candidate_figure(candidates[steps], actions[steps], steps)
    figure.savefig(args.run / "candidates.png")
    if args.video:
        write_candidate_video(args.run / "candidates.mp4", candidates, actions)


def write_candidate_video(path: Path, candidates: np.ndarray, actions: np.ndarray) -> None:
    import imageio.v2 as imageio

    limits = (min(candidates.min(), actions.min()), max(candidates.max(), actions.max()))
    with imageio.get_writer(path, fps=25, macro_block_size=8, quality=7) as video:
        for step in range(len(actions)):
            figure = candidate_figure(candidates[[step]], actions[[step]], [step])
            figure.axes[0].set_ylim(*limits)
            picture = io.BytesIO()
            figure.savefig(picture, format="rgba")
            width, height = figure.canvas.get_width_height()
            pixels = np.frombuffer(picture.getvalue(), np.uint8).reshape(height, width, 4)
            video.append_data(pixels[..., :3])


def main() -> None:
    if sys.argv[1:2] == ["candidates"]:
        draw_candidates(tyro.cli(CandidateArgs, args=sys.argv[2:], description=__doc__))
    else:
        draw_curves(tyro.cli(Args, description=__doc__))


def draw_curves(args: Args) -> None:
    if args.out.suffix not in (".png", ".svg"):
        sys.exit(fail(f"--out is {args.out}: name a .png or .svg file"))
    try:
        curves = [curve for path in args.paths if (curve := read_curve(path, METRICS[args.metric]))]
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(
            fail(
                f"a CSV file is not one of ours ({error}): give run folders or files as in docs/results/curves"
            )
        )
    if not curves:
        sys.exit(
            fail(
                f"none of the {len(args.paths)} paths is a run with {args.metric}: see python plot.py --help"
            )
        )
    figure = draw(curves, args.metric, args.title, args.human_success)
    try:
        figure.savefig(args.out)
    except OSError as error:
        sys.exit(fail(f"cannot write {args.out}: {error.strerror}"))


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
