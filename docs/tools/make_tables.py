"""Writes the tables of README.md, demos/README.md and the pages in docs/ from docs/results.

    python docs/tools/make_tables.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`; NAME is a function below. A test runs this and
compares, so no number in those tables is typed by hand. Curves are named {env_id}__{exp_name}__{seed}.csv.
"""

import csv
import re
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
CURVES, LOGS = ROOT / "docs" / "results" / "curves", ROOT / "docs" / "results" / "logs"
SWEEPS = ROOT / "docs" / "results" / "sweeps"
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "RESULTS.md",
    ROOT / "docs" / "choices.md",
    ROOT / "docs" / "candidate_search.md",
    ROOT / "demos" / "README.md",
]
DOOR = "AdroitHandDoor-v1"


def read(path: Path) -> dict[int, dict[str, float]]:
    """Step -> scores of that evaluation."""
    with path.open() as file:
        return {
            int(row["step"]): {key: float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        }


def read_rows(name: str) -> list[dict[str, str]]:
    with (LOGS / name).open() as file:
        return list(csv.DictReader(file))


def curve(env_id: str, name: str, seed: int) -> dict[int, dict[str, float]]:
    return read(CURVES / f"{env_id}__{name}__{seed}.csv")


def mean(scores: dict[int, dict[str, float]], column: str, first: int, last: int) -> float:
    """Over the evaluations from step `first` to step `last`."""
    values = [row[column] for step, row in scores.items() if first <= step <= last]
    return sum(values) / len(values)


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    return stats.trim_mean(values, 0.25, axis=axis)


def over_seeds(values: list[float]) -> str:
    """The interquartile mean over seeds with its 95 percent bootstrap interval; one seed as it is."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    sample = (np.array(values),)
    resampled = stats.bootstrap(sample, interquartile_mean, method="percentile", rng=0)
    low, high = resampled.confidence_interval
    return f"{interquartile_mean(sample[0]):.2f} ({low:.2f} to {high:.2f})"


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]
    )


def success_rows(runs: list[tuple[str, str, int]], steps: tuple[int, ...]) -> list[list[str]]:
    """Title and success at some steps of every run on Door."""
    rows = []
    for title, name, seed in runs:
        scores = curve(DOOR, name, seed)
        rows.append(
            [f"{title}, seed {seed}", *(f"{scores[step]['success_rate']:.2f}" for step in steps)]
        )
    return rows


def door_aquadqn() -> str:
    """Success of AQuaDQN, SAC and SACfD along training."""
    counts = read_rows("door_candidates_in_use.csv")
    wins = {int(row.pop("seed")): [int(count) for count in row.values()] for row in counts}
    runs = [("AQuaDQN", "aquadqn", seed) for seed in (1, 2, 3)] + [("SAC", "sac", 1)]
    runs += [("SACfD", "sacfd", seed) for seed in (1, 2, 3)]
    steps, rows = (50_000, 100_000, 150_000, 200_000), []
    for (_, name, seed), row in zip(runs, success_rows(runs, steps)):
        in_use = (
            f"{sum(count > 0 for count in wins[seed])} of {len(wins[seed])}"
            if name == "aquadqn"
            else ""
        )
        average = mean(curve(DOOR, name, seed), "success_rate", 150_000, 200_000)
        rows.append([row[0], in_use, *row[1:], f"**{average:.2f}**"])
    header = [
        "run",
        "candidates in use",
        *(f"{step // 1000}k" for step in steps),
        "mean of 150k to 200k",
    ]
    return table(header, rows)


EXPERT_TASKS = ("Hammer", "Pen", "Relocate")
EXPERT_METHODS = {
    "AQuaDQN": "aquadqn",
    "AQuaDQN without dropout": "aquadqn_nodropout",
    "SACfD": "sacfd",
    "SAC": "sac",
    "BC": "bc",
}


def expert_curves(task: str) -> dict[str, dict[int, dict[str, float]]]:
    """Title -> curve of what has been run on the demonstrations of that task's trained policy."""
    env_id = f"AdroitHand{task}-v1"
    present = {title: f"{env_id}__{name}__1.csv" for title, name in EXPERT_METHODS.items()}
    return {
        title: read(CURVES / name) for title, name in present.items() if (CURVES / name).exists()
    }


def expert_success(title: str, scores: dict[int, dict[str, float]]) -> str:
    """Towards the end; BC, without environment steps, at the end."""
    last = list(scores.values())[-1]["success_rate"]
    return f"{last if title == 'BC' else mean(scores, 'success_rate', 150_000, 200_000):.2f}"


def expert_demonstrations(task: str) -> tuple[str, str]:
    """Their share of successful episodes, and their mean return."""
    row = next(
        row
        for row in read_rows("demonstrations.csv")
        if row["dataset"] == f"dapg/{task.lower()}/expert-v0"
    )
    return (
        f"{int(row['successful']) / int(row['episodes']):.2f}",
        f"{float(row['mean_return']):.0f}",
    )


def expert_rl() -> str:
    """Success along training on demonstrations of trained policies, beside BC and those demonstrations."""
    in_use = {(row["env_id"], row["exp_name"]): row for row in read_rows("expert_candidates.csv")}
    steps, rows = (50_000, 100_000, 150_000, 200_000), []
    for task in EXPERT_TASKS:
        for title, scores in expert_curves(task).items():
            heads = in_use.get((f"AdroitHand{task}-v1", EXPERT_METHODS[title]))
            used = f"{heads['in_use']} of {heads['num_actions']}" if heads else ""
            successes = [
                f"{scores[step]['success_rate']:.2f}" if title != "BC" else "" for step in steps
            ]
            total = f"{list(scores.values())[-1]['episodic_return']:.0f}"
            rows.append(
                [
                    f"{task}: {title}",
                    used,
                    *successes,
                    f"**{expert_success(title, scores)}**",
                    total,
                ]
            )
        share, total = expert_demonstrations(task)
        rows.append([f"{task}: demonstrations", *[""] * 5, f"**{share}**", total])
    header = [
        "",
        "candidates in use",
        *(f"{step // 1000}k" for step in steps),
        "mean of 150k to 200k",
        "last return",
    ]
    return table(header, rows)


def bundled() -> str:
    """Success of AQuaDQN and BC on the bundled demonstrations, and of the agent that recorded them."""
    in_use = {row["env_id"]: row for row in read_rows("bundled_candidates.csv")}
    steps, rows = (50_000, 100_000, 150_000), []
    for task in ("Door", *EXPERT_TASKS):
        env_id = f"AdroitHand{task}-v1"
        agent, recorder = curve(env_id, "aquadqn_bundled", 1), curve(env_id, "aquadqn", 1)
        used = f"{in_use[env_id]['in_use']} of {in_use[env_id]['num_actions']}"
        successes = [f"{agent[step]['success_rate']:.2f}" for step in steps]
        average, behind = (
            mean(scores, "success_rate", 100_000, 150_000) for scores in (agent, recorder)
        )
        clone = list(curve(env_id, "bc_bundled", 1).values())[-1]["success_rate"]
        rows.append([task, used, *successes, f"**{average:.2f}**", f"{clone:.2f}", f"{behind:.2f}"])
    header = [
        "",
        "candidates in use",
        *(f"{step // 1000}k" for step in steps),
        "mean of 100k to 150k",
    ]
    return table([*header, "BC", "the recording agent's own run, 100k to 150k"], rows)


def door_ablations() -> str:
    """Success with candidates that were not learned."""
    runs, steps = (
        [("K-means candidates", "kmeans", 1), ("untrained candidates", "random", 1)],
        (50_000, 100_000),
    )
    best = [
        f"{max(row['success_rate'] for row in curve(DOOR, name, seed).values()):.2f}"
        for _, name, seed in runs
    ]
    rows = [[*row, most] for row, most in zip(success_rows(runs, steps), best)]
    return table(["run", *(f"{step // 1000}k" for step in steps), "best of all evaluations"], rows)


def door_sweep() -> str:
    """The candidates by their number and temperature, on the demonstrations from which they were learned."""
    runs, rows = read_rows("door_candidate_sweep.csv"), []
    for row in sorted(runs, key=lambda row: (int(row["num_actions"]), float(row["temperature"]))):
        measures = [f"{float(row[name]):.4f}" for name in ("loss", "nearest_distance")]
        rows.append(
            [
                row["num_actions"],
                row["temperature"],
                *measures,
                f"{row['in_use']} of {row['num_actions']}",
            ]
        )
    return table(
        ["K", "T", "loss (equation 1)", "distance to the nearest candidate", "candidates in use"],
        rows,
    )


def door_candidate_search() -> str:
    """The search over the candidates' hyperparameters, by their start temperature."""
    with (SWEEPS / "door_candidates" / "sweep.csv").open() as file:
        trials = [row for row in csv.DictReader(file) if row["status"] == "done"]
    starts = {"temperature": "equal to T (constant)", "0.1": "0.1", "None": "variance / 4"}
    measures = {
        "candidates/in_use": 1,
        "candidates/perplexity": 1,
        "candidates/held_out_distance": 3,
        "candidates/nearest_distance": 3,
    }
    rows = []
    for number in ("10", "15"):
        for start, title in starts.items():
            mine = [
                row
                for row in trials
                if row["temperature_start"] == start and row["num_actions"] == number
            ]
            row = [number, title, str(len(mine))]
            for name, digits in measures.items():
                column = "score" if name == "candidates/held_out_distance" else name
                values = [float(each[column]) for each in mine]
                average = f"{np.mean(values):.{digits}f}"
                row.append(f"{average} ({min(values):.{digits}f} to {max(values):.{digits}f})")
            rows.append(row)
    header = ["K", "start temperature", "configurations", "candidates in use", "perplexity"]
    return table([*header, "held-out distance", "distance, all episodes"], rows)


def door_sweep_success() -> str:
    """Success of agents by the number of their candidates."""
    runs = [("K = 10", "aquadqn", seed) for seed in (1, 2, 3)] + [
        ("K = 15", "aquadqn_k15_t0.001", 1)
    ]
    steps, rows = (20_000, 40_000, 60_000, 80_000, 100_000), []
    for (_, name, seed), row in zip(runs, success_rows(runs, steps)):
        average = mean(curve(DOOR, name, seed), "success_rate", 60_000, 100_000)
        rows.append([*row, f"**{average:.2f}**"])
    return table(["", *(f"{step // 1000}k" for step in steps), "mean of 60k to 100k"], rows)


def door_short() -> str:
    """The README's: success on Door at the end of training."""
    rows = []
    for title, name, seeds, what, window in (
        (
            "AQuaDQN",
            "aquadqn_annealed",
            tuple(present_seeds(DOOR, "aquadqn_annealed")),
            "demonstrations and sparse reward",
            (150_000, 200_000),
        ),
        (
            "AQuaDQN, the paper's setting",
            "aquadqn",
            (1, 2, 3),
            "demonstrations and sparse reward",
            (150_000, 200_000),
        ),
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


IMITATION_HEADER = ["success", "Wasserstein", "success, averaged", "Wasserstein, averaged"]


def imitation_row(env_id: str, title: str, name: str, seed: int) -> list[str]:
    """Success and Wasserstein distance after the last step, and averaged towards the end."""
    scores = curve(env_id, name, seed)
    end, last = list(scores.items())[-1]
    window = 30_000 if name in ("bc", "mdn") else 100_000  # gradient steps or environment steps
    columns = ("success_rate", "wasserstein")
    values = [last[column] for column in columns] + [
        mean(scores, column, end - window, end) for column in columns
    ]
    return [f"{title}, seed {seed}", *(f"{value:.2f}" for value in values)]


def demonstrator_row(env_id: str, title: str, dataset_id: str) -> list[str]:
    """The demonstrations' share of successful episodes, and their distance from one another."""
    row = next(row for row in read_rows("demonstrations.csv") if row["dataset"] == dataset_id)
    successful, episodes = int(row["successful"]), int(row["episodes"])
    scores = list(curve(env_id, "aquagail", 1).values())[-1]
    low, middle, high = (scores[f"human_wasserstein_{name}"] for name in ("q25", "median", "q75"))
    success = f"{successful / episodes:.2f} ({successful} of {episodes})"
    return [title, success, f"{middle:.2f} (quartiles {low:.2f} and {high:.2f})", "", ""]


def door_imitation() -> str:
    """The imitation runs on Door beside the human."""
    rows = []
    for title, name, seeds in (
        ("BC", "bc", (1, 2, 3)),
        ("MDN", "mdn", (1, 2, 3)),
        ("GAIL, 200k steps", "gail", (1,)),
        ("AQuaGAIL, 300k steps", "aquagail", (1, 2)),
    ):
        rows += [imitation_row(DOOR, title, name, seed) for seed in seeds]
    rows.append(demonstrator_row(DOOR, "human", "D4RL/door/human-v2"))
    return table(["", *IMITATION_HEADER], rows)


def door_inputs() -> str:
    """AQuaGAIL by what its discriminator compares, with the same candidates for each seed."""
    steps, rows = (100_000, 150_000, 200_000, 250_000, 300_000), []
    for title, name in (
        ("state (default)", "aquagail"),
        ("state-action", "aquagail_action"),
        ("state-next-state", "aquagail_next"),
    ):
        for seed in (1, 2):
            scores = curve(DOOR, name, seed)
            averages = [
                f"**{mean(scores, key, 200_000, 300_000):.2f}**"
                for key in ("success_rate", "wasserstein")
            ]
            successes = [f"{scores[step]['success_rate']:.2f}" for step in steps]
            rows.append([f"{title}, seed {seed}", *successes, *averages])
    steps = [f"{step // 1000}k" for step in steps]
    return table(["", *steps, "mean of 200k to 300k", "Wasserstein, mean of the same"], rows)


def expert_imitation() -> str:
    """AQuaGAIL and BC on demonstrations of trained policies, beside those policies."""
    rows = []
    for task in ("Hammer", "Pen"):
        env_id = f"AdroitHand{task}-v1"
        rows += [
            imitation_row(env_id, f"{task}: {title}", title.lower(), 1)
            for title in ("AQuaGAIL", "BC")
        ]
        rows.append(
            demonstrator_row(env_id, f"{task}: demonstrator", f"dapg/{task.lower()}/expert-v0")
        )
    return table(["", *IMITATION_HEADER], rows)


def play() -> str:
    """Return and success on the desk, by how the actions are made discrete, if at all."""
    methods = {"AQuaPlay": "aquaplay", "BB-2": "bb2", "BB-3": "bb3", "BB-5": "bb5", "SAC": "sac"}
    rows = []
    for task in ("push_green", "lift_ball", "open_slide"):
        curves = [curve(f"RoboDesk-{task}", name, 1) for name in methods.values()]
        for when, first in (("after 100k steps", 100_000), ("mean of 60k to 100k", 60_000)):
            columns = ("episodic_return", "success_rate")
            scores = [
                [mean(scores, column, first, 100_000) for column in columns] for scores in curves
            ]
            rows.append(
                [task, when, *(f"{total:.0f} ({success:.2f})" for total, success in scores)]
            )
    return table(["", "return (success)", *methods], rows)


def mujoco_sac() -> str:
    """Return after 100k steps of SAC on MuJoCo's tasks, ours and SBX's, seed by seed and on average."""
    rows = []
    for env_id in ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"):
        row = [env_id]
        for name in ("sac", "sbx"):
            paths = sorted(CURVES.glob(f"{env_id}__{name}__*.csv"))
            returns = [read(path)[100_000]["episodic_return"] for path in paths]
            row += [
                ", ".join(f"{value:.0f}" for value in returns),
                f"**{sum(returns) / len(returns):.0f}**",
            ]
        rows.append(row)
    return table(["", "ours, seed by seed", "mean", "SBX, seed by seed", "mean"], rows)


def sac_schedules() -> str:
    """Return of SAC along training, by when its updates happen."""
    steps, rows = (50_000, 80_000, 100_000), []
    schedules = {
        "8 steps, then 8 updates": "sac_schedules/{}__blocks_of_8__*.csv",
        "1 step, then 1 update": "sac_schedules/{}__blocks_of_1__*.csv",
        "1 update while 1 step is taken (as it is now)": "{}__sac__*.csv",
        "SBX: 1 step, then 1 update": "{}__sbx__*.csv",
    }
    for env_id in ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"):
        for title, pattern in schedules.items():
            paths = sorted(CURVES.glob(pattern.format(env_id)))
            if paths:
                runs, seeds = (
                    [read(path) for path in paths],
                    [path.stem.split("__")[2] for path in paths],
                )
                returns = [
                    [f"{run[step]['episodic_return']:.0f}" if step in run else "-" for run in runs]
                    for step in steps
                ]
                rows.append([env_id, title, ", ".join(seeds), *map(", ".join, returns)])
    return table(["", "", "seeds", *(f"{step // 1000}k" for step in steps)], rows)


# D4RL's returns with normalised score 0 and 100.
REFERENCE_RETURNS = {"HalfCheetah-v5": (-280.178953, 12135.0), "Hopper-v5": (-20.272305, 3234.3)}


def offline_scores() -> dict[tuple[str, str], list[float]]:
    """Normalised scores on our offline datasets, by task and kind: of the data, BC, 10-percent BC, and AQuaCQL's after
    the last step and on average from 60k on."""
    scores = {}
    for data in read_rows("offline_data.csv"):
        env_id, kind = data["env_id"], data["kind"]
        if kind == "expert":  # nothing was trained on it but as a part of medium-expert
            continue
        low, high = REFERENCE_RETURNS[env_id]
        clones = [list(curve(f"{env_id}-{kind}", name, 1).values())[-1] for name in ("bc", "bc10")]
        agent = curve(f"{env_id}-{kind}", "aquacql", 1)
        returns = [float(data["mean_return"]), *(row["episodic_return"] for row in clones)]
        returns += [
            agent[100_000]["episodic_return"],
            mean(agent, "episodic_return", 60_000, 100_000),
        ]
        scores[env_id, kind] = [100 * (value - low) / (high - low) for value in returns]
    return scores


OFFLINE_NAMES = [
    "behaviour policy",
    "BC",
    "10-percent BC",
    "AQuaCQL, 100k",
    "AQuaCQL, mean of 60k to 100k",
]


def offline() -> str:
    """Our scores, dataset by dataset, and the paper's AQuaCQL on D4RL's of the same names."""
    paper = {row["dataset"]: row["AQuaCQL"] for row in read_rows("paper_offline.csv")}
    steps = {(row["env_id"], row["kind"]): row["steps"] for row in read_rows("offline_data.csv")}
    scores, rows = offline_scores(), []
    for (env_id, kind), values in scores.items():
        theirs = paper[f"{env_id.removesuffix('-v5').lower()}-{kind}-v2"]
        rows.append(
            [
                f"{env_id}, {kind}",
                steps[env_id, kind],
                *(f"{value:.1f}" for value in values),
                theirs,
            ]
        )
    rows.append(["total", "", *(f"**{sum(column):.1f}**" for column in zip(*scores.values())), ""])
    return table(
        [
            "our dataset",
            "steps",
            *OFFLINE_NAMES,
            "the paper's AQuaCQL on D4RL's dataset of that name",
        ],
        rows,
    )


def paper_offline() -> str:
    """The paper's table, as it stands there."""
    rows = read_rows("paper_offline.csv")
    return table(["D4RL's dataset", *list(rows[0])[1:]], [list(row.values()) for row in rows])


def present_seeds(env_id: str, name: str) -> list[int]:
    """The seeds whose curves are here."""
    paths = CURVES.glob(f"{env_id}__{name}__*.csv")
    return sorted(int(path.stem.split("__")[2]) for path in paths)


def late_success(env_id: str, name: str, first: int, last: int) -> list[float]:
    """Of every seed, averaged over the evaluations from one step to another."""
    seeds = present_seeds(env_id, name)
    return [mean(curve(env_id, name, seed), "success_rate", first, last) for seed in seeds]


def last_scores(env_id: str, name: str, column: str) -> list[float]:
    """Of every seed, after the last step."""
    seeds = present_seeds(env_id, name)
    return [list(curve(env_id, name, seed).values())[-1][column] for seed in seeds]


def scored(title: str, values: list[float]) -> str:
    seeds = "1 seed" if len(values) == 1 else f"{len(values)} seeds"
    return f"{title} {over_seeds(values)}, {seeds}"


def adroit_claim() -> str:
    """AQuaDQN and SACfD with demonstrations, after 150k to 200k steps."""
    window = (150_000, 200_000)
    by_default = scored("Door, our defaults", late_success(DOOR, "aquadqn_annealed", *window))
    parts = []
    for task in ("Door", "Hammer", "Pen"):
        env_id = f"AdroitHand{task}-v1"
        ours, theirs = (late_success(env_id, name, *window) for name in ("aquadqn", "sacfd"))
        parts.append(f"{scored(task, ours)} (SACfD {over_seeds(theirs)})")
    return f"{by_default}; the paper's setting: {'; '.join(parts)}"


def return_claim() -> str:
    """Return at 200k on Door."""
    parts = []
    names = {"AQuaDQN": "aquadqn_annealed", "SACfD": "sacfd", "SAC": "sac"}
    for title, name in names.items():
        values = last_scores(DOOR, name, "episodic_return")
        parts.append(f"{title} {np.mean(values):.0f}")
    return ", ".join(parts) + " (means over seeds, after 200k steps)"


def imitation_claim(column: str) -> str:
    """AQuaGAIL, MDN, BC and GAIL on Door, towards the end of training."""
    parts = []
    windows = {"aquagail": (200_000, 300_000), "gail": (100_000, 200_000)}
    for title, name in (("AQuaGAIL", "aquagail"), ("GAIL", "gail"), ("MDN", "mdn"), ("BC", "bc")):
        window = windows.get(name, (30_000, 60_000))
        seeds = present_seeds(DOOR, name)
        values = [mean(curve(DOOR, name, seed), column, *window) for seed in seeds]
        parts.append(scored(title, values))
    return "; ".join(parts)


def play_claim(names: dict[str, str], column: str, digits: int) -> str:
    """The desk after 60k to 100k steps."""
    parts = []
    for task in ("push_green", "open_slide", "lift_ball"):
        scores = [
            f"{mean(curve(f'RoboDesk-{task}', name, 1), column, 60_000, 100_000):.{digits}f}"
            for name in names.values()
        ]
        parts.append(f"{task} {', '.join(scores)}")
    return f"{', '.join(names)}: " + "; ".join(parts)


def claims() -> str:
    """What the paper says, claim by claim."""
    relocate = late_success("AdroitHandRelocate-v1", "aquadqn", 150_000, 200_000)
    without = late_success("AdroitHandRelocate-v1", "aquadqn_nodropout", 150_000, 200_000)
    clone = last_scores("AdroitHandRelocate-v1", "bc", "success_rate")
    ablations = [
        max(row["success_rate"] for row in curve(DOOR, name, 1).values())
        for name in ("kmeans", "random")
    ]
    fewer = late_success(DOOR, "aquadqn", 60_000, 100_000)
    more = late_success(DOOR, "aquadqn_k15_t0.001", 60_000, 100_000)
    sums = [f"{sum(column):.0f}" for column in zip(*offline_scores().values())]
    offline = f"AQuaCQL {sums[3]}, BC {sums[1]}, 10-percent BC {sums[2]}"
    meshes = {"AQuaPlay": "aquaplay", "BB-2": "bb2", "BB-3": "bb3", "BB-5": "bb5"}
    against_sac = {"AQuaPlay": "aquaplay", "SAC": "sac"}
    door, experts = (
        "#door-human-demonstrations",
        "#hammer-pen-and-relocate-demonstrations-of-trained-policies",
    )
    imitation = "#imitation-learning-section-42"
    desk = "#reinforcement-learning-with-play-data-section-43"
    fixed = "#offline-reinforcement-learning-appendix-offline-reinforcement-learning"
    rows = [
        (
            "AQuaDQN succeeds on Door, Hammer and Pen and largely outperforms SACfD",
            adroit_claim(),
            "holds",
            door,
        ),
        (
            "SAC and SACfD have the higher return on Door, not the higher success",
            return_claim(),
            "partly",
            door,
        ),
        (
            "On Relocate all do poorly",
            f"{scored('AQuaDQN', relocate)} (BC {clone[0]:.2f}, SACfD and SAC 0.00)",
            "partly",
            experts,
        ),
        (
            "Relocate gets better without dropout",
            f"{without[0]:.2f} without, {relocate[0]:.2f} with; 1 seed",
            "no",
            experts,
        ),
        (
            "K-means or untrained candidates do not succeed",
            f"{ablations[0]:.2f} and {ablations[1]:.2f} at best, 1 seed, 100k steps",
            "holds",
            "#ablations-appendix-d",
        ),
        (
            "K = 10 is the best number of candidates",
            f"60k to 100k steps: {scored('K = 10', fewer)}; {scored('K = 15', more)}",
            "untried",
            "#temperature-and-number-of-candidates-appendix-table-aquadqn",
        ),
        (
            "AQuaGAIL is as successful as the human and more than GAIL, MDN and BC",
            f"Door, the human 0.32: {imitation_claim('success_rate')}; on Hammer and Pen below BC",
            "partly",
            imitation,
        ),
        (
            "AQuaGAIL's states are nearer to the human's (Wasserstein; the human's own 3.30)",
            imitation_claim("wasserstein"),
            "partly",
            imitation,
        ),
        (
            "AQuaPlay consistently outperforms SAC",
            "return, " + play_claim(against_sac, "episodic_return", 0),
            "partly",
            desk,
        ),
        (
            "BB-2 is competitive, finer meshes are worse",
            "return, " + play_claim(meshes, "episodic_return", 0),
            "partly",
            desk,
        ),
        (
            "AQuaCQL is above BC",
            f"six sets of our own, summed normalised score: {offline}; 1 seed",
            "holds",
            fixed,
        ),
        (
            "AQuaCQL is competitive with CQL, IQL and TD3+BC",
            "none of them was run",
            "untried",
            fixed,
        ),
        (
            "The SAC baseline is sound",
            "after 100k steps: HalfCheetah and Hopper like SBX, Walker2d below it in the mean of six seeds",
            "partly",
            "#sac-on-mujoco-appendix-sanity-check-baselines",
        ),
    ]
    linked = [
        [f"[{claim}]({where})", found, f"**{verdict}**"] for claim, found, verdict, where in rows
    ]
    return table(["the paper says", "here", "verdict"], linked)


DOOR_RUNS = {
    "the paper's setting": "aquadqn",
    "our defaults": "aquadqn_annealed",
}


def door_annealed() -> str:
    """Success on Door along training: the paper's setting and ours."""
    steps, rows = (10_000, 20_000, 30_000, 50_000, 100_000, 150_000, 200_000), []
    windows = ((50_000, 100_000), (150_000, 200_000))
    for title, name in DOOR_RUNS.items():
        for seed in present_seeds(DOOR, name):
            scores = curve(DOOR, name, seed)
            points = [f"{scores[step]['success_rate']:.2f}" for step in steps]
            averages = [mean(scores, "success_rate", *window) for window in windows]
            rows.append([f"{title}, seed {seed}", *points, *(f"**{a:.2f}**" for a in averages)])
        over_all = [over_seeds(late_success(DOOR, name, *window)) for window in windows]
        rows.append([f"{title}, over seeds", *[""] * len(steps), *(f"**{a}**" for a in over_all)])
    header = ["", *(f"{step // 1000}k" for step in steps), "mean of 50k to 100k"]
    return table([*header, "mean of 150k to 200k"], rows)


def door_fresh() -> str:
    """Last agents on initial states that no evaluation of their training used."""
    rows = []
    for row in read_rows("door_fresh_states.csv"):
        interval = f"{float(row['low']):.2f} to {float(row['high']):.2f}"
        last = [row["in_use"], row["perplexity"], row["nearest_distance"]]
        scores = curve(DOOR, "aquadqn_annealed", int(row["seed"]))
        known = scores[int(row["step"])]["success_rate"]
        success = f"**{float(row['success']):.2f}** ({interval})"
        rows.append([row["seed"], f"{known:.2f}", success, *last])
    header = ["seed", "the 30 states", "300 other states", "candidates in use", "perplexity"]
    return table([*header, "distance to the nearest"], rows)


def door_limit() -> str:
    """States solved by the greedy agent, and by any of its tries with random candidates."""
    rows = []
    for path in sorted((LOGS / "door_limit").glob("seed_*.csv")):
        states = read_rows(f"door_limit/{path.name}")
        solved = [sum(int(state[key]) for state in states) for key in ("greedy", "solved")]
        seed = path.stem.removeprefix("seed_")
        rows.append([seed, *(f"{count} of {len(states)}" for count in solved)])
    return table(["seed", "greedy agent", "any try"], rows)


TUNING_SEEDS = (11, 12)


def tuning_decays() -> str:
    """Success on the tuning seeds, from 50k to 100k, by the decay of the average."""
    paths = [CURVES / "tuning" / f"{DOOR}__tune_t20k__{seed}.csv" for seed in TUNING_SEEDS]
    scores = [read(path) for path in paths]
    rows = []
    for column in [name for name in next(iter(scores[0].values())) if name != "step"]:
        means = [mean(each, column, 50_000, 100_000) for each in scores]
        decay = column.removeprefix("decay_").replace("0.0", "0 (the paper)")
        rows.append([decay, *(f"{value:.3f}" for value in means), f"**{np.mean(means):.3f}**"])
    return table(["--ema-decay", *(f"seed {seed}" for seed in TUNING_SEEDS), "score"], rows)


def tuning_choices() -> str:
    """Success on the tuning seeds, from 50k to 100k, of settings that differ in one argument."""
    rows = []
    for title, name in {
        "20k candidate steps, K = 10": "tune_t20k",
        "50k candidate steps (the paper)": "tune_t50k",
        "K = 20": "tune_t20k_k20",
    }.items():
        paths = [CURVES / "tuning" / f"{DOOR}__{name}__{seed}.csv" for seed in TUNING_SEEDS]
        if all(path.exists() for path in paths):
            means = [mean(read(path), "decay_0.999", 50_000, 100_000) for path in paths]
            rows.append([title, *(f"{value:.3f}" for value in means), f"**{np.mean(means):.3f}**"])
    return table(["", *(f"seed {seed}" for seed in TUNING_SEEDS), "score"], rows)


def fill(page: str) -> str:
    """The page with every table written anew."""

    def write(match: re.Match) -> str:
        return f"<!-- table {match[1]} -->\n{globals()[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", write, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in PAGES:
        if path.exists():
            path.write_text(fill(path.read_text()))
