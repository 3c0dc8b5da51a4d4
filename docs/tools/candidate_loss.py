"""Equation 1 along the training of the candidates, from TensorBoard's events, as CSV files that plot.py reads.

    python docs/tools/candidate_loss.py runs/RUN ...

Writes docs/results/curves/candidate_loss/{env_id}__{exp_name}__{seed}.csv: means over 500 steps, with
dropout, as logged.
"""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import plot

FOLDER = Path(__file__).resolve().parents[1] / "results" / "curves" / "candidate_loss"


def export(run: Path) -> None:
    curve = plot.read_curve(run, "candidate_loss")
    if curve is None:
        print(
            f"error: {run} is not a run that has trained candidates: name another", file=sys.stderr
        )
        sys.exit(2)
    with (FOLDER / f"{run.name.rpartition('__')[0]}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "candidate_loss"])
        writer.writerows(
            (int(step), f"{value:.5f}") for step, value in zip(curve.steps, curve.values)
        )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        export(Path(name))
