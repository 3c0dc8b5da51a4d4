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


def read(path: Path) -> dict[int, dict[str, float]]:
    """Step -> scores of that evaluation."""
    with path.open() as file:
        return {int(row["step"]): {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)}


def curve(env_id: str, name: str, seed: int) -> dict[int, dict[str, float]]:
    return read(RESULTS / f"{env_id}__{name}__{seed}.csv")


def mean(scores: dict[int, dict[str, float]], column: str, first: int, last: int) -> float:
    """Over the evaluations from step `first` to step `last`."""
    values = [row[column] for step, row in scores.items() if first <= step <= last]
    return sum(values) / len(values)


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def success_rows(runs: list[tuple[str, str, int]], steps: tuple[int, ...]) -> list[list[str]]:
    """Title and success at some steps of every run on Door."""
    rows = []
    for title, name, seed in runs:
        scores = curve(DOOR, name, seed)
        rows.append([f"{title}, seed {seed}", *(f"{scores[step]['success_rate']:.2f}" for step in steps)])
    return rows


def door_aquadqn() -> str:
    """Success of AQuaDQN, SAC and SACfD along training."""
    with (RESULTS / "door_candidates_in_use.csv").open() as file:
        wins = {int(row.pop("seed")): [int(count) for count in row.values()] for row in csv.DictReader(file)}
    runs = [("AQuaDQN", "aquadqn", seed) for seed in (1, 2, 3)] + [("SAC", "sac", 1)]
    runs += [("SACfD", "sacfd", seed) for seed in (1, 2, 3)]
    steps, rows = (50_000, 100_000, 150_000, 200_000), []
    for (_, name, seed), row in zip(runs, success_rows(runs, steps)):
        in_use = f"{sum(count > 0 for count in wins[seed])} of {len(wins[seed])}" if name == "aquadqn" else ""
        average = mean(curve(DOOR, name, seed), "success_rate", 150_000, 200_000)
        rows.append([row[0], in_use, *row[1:], f"**{average:.2f}**"])
    header = ["run", "candidates in use", *(f"{step // 1000}k" for step in steps), "mean of 150k to 200k"]
    return table(header, rows)


def door_ablations() -> str:
    """Success with candidates that were not learned."""
    runs, steps = [("K-means candidates", "kmeans", 1), ("untrained candidates", "random", 1)], (50_000, 100_000)
    best = [f"{max(row['success_rate'] for row in curve(DOOR, name, seed).values()):.2f}" for _, name, seed in runs]
    rows = [[*row, most] for row, most in zip(success_rows(runs, steps), best)]
    return table(["run", *(f"{step // 1000}k" for step in steps), "best of all evaluations"], rows)


def door_short() -> str:
    """The README's: success on Door at the end of training."""
    rows = []
    for title, name, seeds, what, window in (
        ("AQuaDQN", "aquadqn", (1, 2, 3), "demonstrations and sparse reward", (150_000, 200_000)),
        ("SAC", "sac", (1,), "sparse reward", (150_000, 200_000)),
        ("SACfD", "sacfd", (1, 2, 3), "demonstrations and sparse reward", (150_000, 200_000)),
        ("AQuaGAIL", "aquagail", (1, 2), "demonstrations", (200_000, 300_000)),
        ("GAIL", "gail", (1,), "demonstrations", (100_000, 200_000)),
        ("BC", "bc", (1, 2, 3), "demonstrations", None),
        ("MDN", "mdn", (1, 2, 3), "demonstrations", None),
    ):
        curves = [curve(DOOR, name, seed) for seed in seeds]
        if window:
            scores = [mean(scores, "success_rate", *window) for scores in curves]
            when = "{}k to {}k steps".format(*(step // 1000 for step in window))
        else:
            scores = [list(scores.values())[-1]["success_rate"] for scores in curves]
            when = "the last"
        rows.append([title, what, ", ".join(f"{score:.2f}" for score in scores), when])
    return table(["", "learns from", "success, seed by seed", "evaluations"], rows)


def door_imitation() -> str:
    """Success and Wasserstein distance of the imitation runs, after the last step and averaged towards the end."""
    rows = []
    for title, name, seeds in (
        ("BC", "bc", (1, 2, 3)),
        ("MDN", "mdn", (1, 2, 3)),
        ("GAIL, 200k steps", "gail", (1,)),
        ("AQuaGAIL, 300k steps", "aquagail", (1, 2)),
    ):
        for seed in seeds:
            scores = curve(DOOR, name, seed)
            end, last = list(scores.items())[-1]
            window = 30_000 if name in ("bc", "mdn") else 100_000  # gradient steps or environment steps
            averages = [mean(scores, column, end - window, end) for column in ("success_rate", "wasserstein")]
            values = [last["success_rate"], last["wasserstein"], *averages]
            row = [f"{title}, seed {seed}", *(f"{value:.2f}" for value in values)]
            rows.append(row)
    low, middle, high = (last[f"human_wasserstein_{name}"] for name in ("q25", "median", "q75"))
    rows.append(["human", "0.32 (8 of 25)", f"{middle:.2f} (quartiles {low:.2f} and {high:.2f})", "", ""])
    header = ["", "success", "Wasserstein", "success, averaged", "Wasserstein, averaged"]
    return table(header, rows)


def mujoco_sac() -> str:
    """Return after 100k steps of SAC on MuJoCo's tasks, ours and SBX's, seed by seed and on average."""
    rows = []
    for env_id in ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"):
        row = [env_id]
        for name in ("sac", "sbx"):
            seeds = range(1, 1 + len(list(RESULTS.glob(f"{env_id}__{name}__*.csv"))))
            returns = [curve(env_id, name, seed)[100_000]["episodic_return"] for seed in seeds]
            row += [", ".join(f"{value:.0f}" for value in returns), f"**{sum(returns) / len(returns):.0f}**"]
        rows.append(row)
    return table(["", "ours, seed by seed", "mean", "SBX, seed by seed", "mean"], rows)


def halfcheetah_schedules() -> str:
    """Return on HalfCheetah along training, by when SAC's updates happen."""
    steps, rows = (50_000, 80_000, 100_000), []
    for title, pattern in (
        ("8 steps, then 8 updates", "sac_schedules/HalfCheetah-v5__blocks_of_8__*.csv"),
        ("1 step, then 1 update", "sac_schedules/HalfCheetah-v5__blocks_of_1__*.csv"),
        ("1 update while 1 step is taken (as it is now)", "HalfCheetah-v5__sac__*.csv"),
        ("SBX: 1 step, then 1 update", "HalfCheetah-v5__sbx__*.csv"),
    ):
        runs = [read(path) for path in sorted(RESULTS.glob(pattern))]
        returns = [[f"{run[step]['episodic_return']:.0f}" if step in run else "-" for run in runs] for step in steps]
        rows.append([title, *map(", ".join, returns)])
    return table(["", *(f"{step // 1000}k" for step in steps)], rows)


def fill(page: str) -> str:
    """The page with every table written anew."""

    def write(match: re.Match) -> str:
        return f"<!-- table {match[1]} -->\n{globals()[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", write, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        if path.exists():
            path.write_text(fill(path.read_text()))
