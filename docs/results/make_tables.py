"""Writes the tables of README.md and docs/RESULTS.md from the curves in this folder.

    python docs/results/make_tables.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`; NAME is a function below. A test runs this and
compares, so no number in those tables is typed by hand. Curves are named {env_id}__{exp_name}__{seed}.csv.
"""

import csv
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
PAGES = [RESULTS.parents[1] / "README.md", RESULTS.parent / "RESULTS.md"]
DOOR = "AdroitHandDoor-v1"


def curve(env_id: str, name: str, seed: int) -> dict[int, dict[str, float]]:
    """Step -> scores of that evaluation."""
    with (RESULTS / f"{env_id}__{name}__{seed}.csv").open() as file:
        return {int(row["step"]): {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)}


def mean(scores: dict[int, dict[str, float]], column: str, first: int, last: int) -> float:
    """Over the evaluations from step `first` to step `last`."""
    values = [row[column] for step, row in scores.items() if first <= step <= last]
    return sum(values) / len(values)


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def door_aquadqn() -> str:
    """Success of AQuaDQN and its ablations along training."""
    with (RESULTS / "door_candidates_in_use.csv").open() as file:
        wins = {int(row.pop("seed")): [int(count) for count in row.values()] for row in csv.DictReader(file)}
    in_use = {seed: f"{sum(count > 0 for count in counts)} of {len(counts)}" for seed, counts in wins.items()}
    runs = [("AQuaDQN", "aquadqn", seed) for seed in (1, 2, 3)]
    runs += [("K-means candidates", "kmeans", 1), ("untrained candidates", "random", 1)]
    steps, rows = (50_000, 100_000, 150_000, 200_000), []
    for title, name, seed in runs:
        scores = curve(DOOR, name, seed)
        row = [f"{title}, seed {seed}", in_use[seed] if name == "aquadqn" else ""]
        row += [f"{scores[step]['success_rate']:.2f}" if step in scores else "" for step in steps]
        rows.append([*row, f"**{mean(scores, 'success_rate', 150_000, 200_000):.2f}**" if 200_000 in scores else ""])
    header = ["run", "candidates in use", *(f"{step // 1000}k" for step in steps), "mean of 150k to 200k"]
    return table(header, rows)


def door_imitation() -> str:
    """Success and Wasserstein distance after the last step of every imitation run."""
    rows = []
    for title, name, seeds in (("BC", "bc", (1, 2, 3)), ("MDN", "mdn", (1, 2, 3))):
        for seed in seeds:
            last = list(curve(DOOR, name, seed).values())[-1]
            rows.append([f"{title}, seed {seed}", f"{last['success_rate']:.2f}", f"{last['wasserstein']:.2f}"])
    low, middle, high = (last[f"human_wasserstein_{name}"] for name in ("q25", "median", "q75"))
    rows.append(["human", "0.32 (8 of 25)", f"{middle:.2f} (quartiles {low:.2f} and {high:.2f})"])
    return table(["", "success", "Wasserstein"], rows)


def fill(page: str) -> str:
    """The page with every table written anew."""

    def write(match: re.Match) -> str:
        return f"<!-- table {match[1]} -->\n{globals()[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", write, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        if path.exists():
            path.write_text(fill(path.read_text()))
