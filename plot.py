# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy", "matplotlib", "tyro"]
# ///
"""Learning curves of finished or running trainings, in the manner of the paper's figures.

Median over seeds with the interquartile range, one panel per task, one line per algorithm. Reads the evaluations.csv of
run folders, and the CSV files of docs/results, whose names say the same: {env_id}__{exp_name}__{seed}.csv.

    python plot.py runs/* --metric success --out success.png
    python plot.py docs/results/AdroitHandDoor-v1__*.csv --out door.svg
    python plot.py runs/*aquadqn* --metric return --title "AQuaDQN on Door"
"""

import csv
import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure

COLUMNS = {"success": "success_rate", "return": "episodic_return", "wasserstein": "wasserstein"}
# Okabe and Ito's palette, told apart by every kind of colour vision. The same algorithm always has the same colour.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999", "#000000"]
ALGORITHMS = "aquadqn sac sacfd bc mdn aquagail gail kmeans random".split()


@dataclasses.dataclass
class Args:
    paths: Annotated[list[Path], tyro.conf.Positional]
    """run folders, or CSV files named as in docs/results"""
    metric: Literal["success", "return", "wasserstein"] = "success"
    """what is drawn against the steps"""
    out: Path = Path("curves.png")
    """picture to write; .png and .svg are known"""
    title: str = ""
    """headline over all panels"""


class Curve(NamedTuple):
    env_id: str
    algorithm: str
    steps: np.ndarray
    values: np.ndarray


def read_curve(path: Path, column: str) -> Curve | None:
    """None for whatever is not a run with this column."""
    table, name = (path / "evaluations.csv", path.name) if path.is_dir() else (path, path.stem)
    parts = name.split("__")
    if table.suffix != ".csv" or not table.exists() or len(parts) < 3:
        return None
    with table.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get(column) not in (None, "", "nan")]
    if not rows:
        return None
    return Curve(parts[0], parts[1], *(np.array([float(row[key]) for row in rows]) for key in ("step", column)))


def quartiles(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all seeds have, and the three quartiles of their values: (S,), (3, S)."""
    steps = sorted(set.intersection(*(set(curve.steps) for curve in curves)))
    values = [[dict(zip(curve.steps, curve.values))[step] for step in steps] for curve in curves]
    return np.array(steps), np.percentile(values, [25, 50, 75], axis=0)


def colour(algorithm: str, seen: list[str]) -> str:
    known = ALGORITHMS + [name for name in seen if name not in ALGORITHMS]
    return PALETTE[known.index(algorithm) % len(PALETTE)]


def draw(curves: list[Curve], metric: str, title: str) -> Figure:
    tasks, algorithms = sorted({c.env_id for c in curves}), sorted({c.algorithm for c in curves})
    figure = Figure(figsize=(1 + 5 * len(tasks), 3.6), dpi=120, layout="constrained")
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axis, task in zip(axes, tasks):
        for algorithm in algorithms:
            same = [c for c in curves if (c.env_id, c.algorithm) == (task, algorithm)]
            if same:
                steps, (low, median, high) = quartiles(same)
                shade, label = colour(algorithm, algorithms), f"{algorithm} ({len(same)} seed{'s' * (len(same) > 1)})"
                axis.plot(steps, median, "o-", ms=3, color=shade, label=label)
                axis.fill_between(steps, low, high, color=shade, alpha=0.2, lw=0)
        axis.set(title=task, xlabel="environment steps", ylabel=metric)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
        if metric == "success":
            axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    return figure


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    curves = [curve for path in args.paths if (curve := read_curve(path, COLUMNS[args.metric]))]
    if not curves:
        print(f"error: none of the {len(args.paths)} paths is a run with {args.metric} in its CSV", file=sys.stderr)
        sys.exit(2)
    if args.out.suffix not in (".png", ".svg"):
        print(f"error: --out is {args.out}: name a .png or .svg file", file=sys.stderr)
        sys.exit(2)
    draw(curves, args.metric, args.title).savefig(args.out)


if __name__ == "__main__":
    main()
