# /// script
# requires-python = ">=3.11"
# dependencies = ["ray[tune]==2.60.0", "numpy", "matplotlib", "tyro"]
# ///
"""Many runs on one machine or a cluster, on Ray Tune: seeds, and the paper's hyperparameter selection.

A trial is one of the scripts, started as a process of its own in a folder of its own. What kills it costs the steps
since its last checkpoint: it goes on with the script's --resume. Arguments after -- are passed on to the script.

    python sweep.py seeds aquadqn --env-id AdroitHandDoor-v1 AdroitHandPen-v1 --num-seeds 10 -- --total-timesteps 200000
    python sweep.py search aquadqn --env-id AdroitHandDoor-v1 --num-samples 1000 --storage-path sweeps/door
    python sweep.py restore sweeps/door
    python sweep.py report sweeps/door

docs/cluster.md says how to use more than one machine.
"""

import ast
import csv
import ctypes
import dataclasses
import fcntl
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

SCRIPTS = Path(__file__).resolve().parent
POLL_SECONDS = 0.5  # between looks at a trial's evaluations.csv
SECONDS_BETWEEN_LINES = 5  # of the live table
LAST_STEP = (
    2**31 - 1
)  # that a script takes; asha compares trials at 4, 16, 64 ... times the grace period too
SHORTEST_GRACE = (
    50_000  # environment steps: with the paper's constant T success on Door is near zero until 30k
)
# A worker on another machine has an environment of its own.
PASSED_ON = ("PYTHONPATH", "MINARI_DATASETS_PATH", "MUJOCO_GL")
# Of the libraries that multiply matrices, and (the last two) of XLA.
THREAD_LIMITS = "OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS NPROC PJRT_NPROC".split()
INSTALL_RAY = "sweep.py needs Ray: pip install -r requirements-sweep.txt"

# ---------------------------------------------------------------------------------------- the paper's appendix


class Choice(NamedTuple):
    """A row of a table: the values that are tried, those in bold, and the arguments that get the value."""

    values: tuple
    bold: tuple
    arguments: tuple[str, ...] = ()  # default: the row's own name


class Algorithm(NamedTuple):
    script: str
    subcommand: tuple[str, ...] = ()
    task_argument: str = "--env-id"


ALGORITHMS = {
    "aquadqn": Algorithm("aquadqn.py"),
    "sac": Algorithm("sac_baselines.py", ("sac",)),
    "sacfd": Algorithm("sac_baselines.py", ("sacfd",)),
    "aquagail": Algorithm("aquagail.py"),
    "gail": Algorithm("sac_baselines.py", ("gail",)),
    "bc": Algorithm("bc_mdn.py", ("bc",)),
    "mdn": Algorithm("bc_mdn.py", ("mdn",)),
    "sac-robodesk": Algorithm("sac_baselines.py", ("sac",)),
    "aquaplay": Algorithm("aquaplay.py", task_argument="--task"),
    "aquacql": Algorithm("aquacql.py", task_argument="--dataset-id"),  # no table in the paper
}

TABLES = {
    "aquadqn": {
        "candidate_learning_rate": Choice((3e-5, 1e-4, 3e-4, 1e-3, 3e-3), bold=(3e-4,)),
        "input_dropout": Choice((0.0, 0.1, 0.3), bold=(0.1,)),
        "hidden_dropout": Choice((0.0, 0.1, 0.3), bold=(0.1,)),
        "temperature": Choice((1e-4, 1e-3, 1e-2), bold=(1e-3,)),
        "num_actions": Choice((10, 15, 20), bold=(10,)),
        "learning_rate": Choice((3e-5, 1e-4, 3e-3), bold=(1e-4,)),
        "n_step": Choice((1, 3, 5), bold=(3,)),
        "epsilon": Choice((0.001, 0.01, 0.1), bold=(0.1,)),
        "demo_ratio": Choice((0.0, 0.1, 0.25, 0.5), bold=(0.25,)),
        "min_demo_reward": Choice((None, 0.01), bold=(0.01,)),
    },
    "sac": {
        "learning_rate": Choice((3e-5, 1e-4, 3e-4), bold=(1e-4,)),
        "n_step": Choice((1, 3, 5), bold=(5,)),
        "tau": Choice((0.005, 0.01, 0.05), bold=(0.005,)),
        "reward_scale": Choice((0.1, 0.3, 0.5), bold=(0.5,)),
    },
    "sacfd": {
        "learning_rate": Choice((3e-5, 1e-4, 3e-4), bold=(1e-4,)),
        "n_step": Choice((1, 3, 5), bold=(5,)),
        "tau": Choice((0.005, 0.01, 0.05), bold=(0.005,)),
        "reward_scale": Choice((0.1, 0.3, 0.5), bold=(0.3,)),
        "demo_ratio": Choice((0.0, 0.001, 0.1, 0.25), bold=(0.001,)),
        "min_demo_reward": Choice((None, 0.01, 0.1), bold=(0.01, 0.1)),
    },
    "aquagail": {
        "discriminator_learning_rate": Choice((1e-7, 3e-7, 1e-6, 3e-5, 1e-4), bold=(1e-6,)),
        "discriminator_layers": Choice((1, 2), bold=(1,)),
        "discriminator_units": Choice((16, 64, 256), bold=(64,)),
        "discriminator_regularization": Choice(
            ("none", "dropout", "weight-decay"), bold=("dropout",)
        ),
        "discriminator_weight_decay": Choice((5.0, 10.0, 20.0), bold=()),
        "discriminator_input_dropout": Choice((0.5, 0.75), bold=(0.5,)),
        "discriminator_hidden_dropout": Choice((0.5, 0.75), bold=(0.5,)),
        "normalize_observations": Choice((True, False), bold=(True,)),
        "reward_balance": Choice((0.0, 0.5, 1.0), bold=(0.5,)),
        "learning_rate": Choice((3e-5, 1e-4, 3e-4), bold=(3e-5,)),
        "n_step": Choice((1, 3, 5), bold=(1,)),
        "epsilon": Choice((0.001, 0.01, 0.1), bold=(0.01,)),
        "candidate_learning_rate": Choice((3e-5, 1e-4, 3e-4, 1e-3, 3e-3), bold=(3e-4,)),
        "temperature": Choice((1e-4, 1e-3, 1e-2), bold=(1e-3,)),
        "num_actions": Choice((10, 15, 20), bold=(10,)),
        "input_dropout": Choice((0.0, 0.1, 0.3), bold=(0.0,)),
        "hidden_dropout": Choice((0.0, 0.1, 0.3), bold=(0.0,)),
    },
    "gail": {
        "discriminator_learning_rate": Choice((1e-7, 3e-7, 1e-6, 3e-5, 1e-4), bold=(3e-7,)),
        "discriminator_layers": Choice((1, 2), bold=(1,)),
        "discriminator_units": Choice((16, 64, 256), bold=(256,)),
        "discriminator_regularization": Choice(
            ("none", "dropout", "weight-decay"), bold=("weight-decay",)
        ),
        "discriminator_weight_decay": Choice((5.0, 10.0, 20.0), bold=(10.0,)),
        "discriminator_input_dropout": Choice((0.5, 0.75), bold=()),
        "discriminator_hidden_dropout": Choice((0.5, 0.75), bold=()),
        "normalize_observations": Choice((True, False), bold=(True,)),
        "reward_balance": Choice((0.0, 0.5, 1.0), bold=(0.5,)),
        "learning_rate": Choice((3e-5, 1e-4, 3e-4), bold=(1e-4,)),
        "n_step": Choice((1, 3, 5), bold=(5,)),
        "tau": Choice((0.005, 0.01, 0.05), bold=(0.05,)),
        "reward_scale": Choice((0.1, 0.3, 0.5), bold=(0.5,)),
    },
    "bc": {
        "learning_rate": Choice((1e-5, 3e-5, 1e-4, 3e-4, 1e-3), bold=(3e-4,)),
        "num_layers": Choice((1, 2, 3), bold=(1,)),
        "num_units": Choice((16, 64, 256), bold=(256,)),
        "activation": Choice(("relu", "tanh"), bold=("tanh",)),
        "normalize_observations": Choice((True, False), bold=(True,)),
        "weight_decay": Choice((0.0, 0.01, 0.1), bold=(0.0,)),
        "input_dropout": Choice((0.0, 0.15, 0.3), bold=(0.0,)),
        "hidden_dropout": Choice((0.0, 0.25, 0.5), bold=(0.0,)),
    },
    "mdn": {
        "learning_rate": Choice((3e-5, 1e-4, 3e-4, 1e-3, 3e-3), bold=(3e-4,)),
        "input_dropout": Choice((0.0, 0.1), bold=(0.0,)),
        "hidden_dropout": Choice((0.0, 0.1), bold=(0.0,)),
        "temperature": Choice((1e-4, 1e-3), bold=(1e-3,)),
        "num_actions": Choice((5, 10, 20), bold=(10,)),
    },
    "sac-robodesk": {
        "learning_rate": Choice((1e-5, 3e-5, 3e-4, 1e-4), bold=(1e-4,)),
        "n_step": Choice((1, 3, 5), bold=(5,)),
        "reward_scale": Choice((0.1, 1.0, 10.0), bold=(1.0,)),
        "tau": Choice((0.005, 0.01, 0.05), bold=(0.01,)),
    },
    "aquaplay": {
        "candidate_learning_rate": Choice((1e-4, 3e-4, 1e-3), bold=(1e-3,)),
        "dropout": Choice(
            (0.0, 0.1, 0.3), bold=(0.1,), arguments=("input_dropout", "hidden_dropout")
        ),
        "temperature": Choice((1e-4, 1e-3, 1e-2), bold=(1e-4,)),
        "num_actions": Choice((10, 20, 30, 40), bold=(30,)),
    },
}

# Bold values that are not the script's default, each with its reason. What the tables do not have at all is ours:
# --temperature-start and --ema-decay stay at their defaults in every trial, unless they are given after --.
SAC_DEFAULTS = "sac_baselines.py sac has one set of defaults, those of the table for Adroit"
DIFFERENCES = {
    ("sac-robodesk", "reward_scale"): SAC_DEFAULTS,
    ("sac-robodesk", "tau"): SAC_DEFAULTS,
}


# ------------------------------------------------------------------------------------------- the selection rule


class Trial(NamedTuple):
    """What the selection needs to know of a trial."""

    values: dict[str, Any]
    score: float | None  # None: nothing is known of it, so it does not count


class Judgement(NamedTuple):
    value: Any
    average: float  # over the better half; NaN if no trial with this value has a score
    trials: int


def better_half_average(scores: Sequence[float], mode: str = "max") -> float:
    """Mean of the better half, the middle one included when their number is odd."""
    if not scores:
        return float("nan")
    best_first = sorted(scores, reverse=mode == "max")
    half = (len(best_first) + 1) // 2
    return sum(best_first[:half]) / half


def scores_of(trials: Sequence[Trial], name: str, value: Any) -> list[float]:
    """Of the configurations with this value, whatever else they have."""
    return [
        trial.score for trial in trials if trial.values[name] == value and trial.score is not None
    ]


def judge(
    trials: Sequence[Trial], name: str, values: Sequence, mode: str = "max"
) -> list[Judgement]:
    """Every value of a hyperparameter by the better half of the configurations that have it
    ("Hyperparameter Selection Procedure" of the appendix)."""
    judgements = []
    for value in values:
        scores = scores_of(trials, name, value)
        judgements.append(Judgement(value, better_half_average(scores, mode), len(scores)))
    return judgements


class Selected(NamedTuple):
    value: Any
    average: float
    margin: float  # over the next best value; 0: a tie, of which the value listed first is taken


def select(judgements: Sequence[Judgement], mode: str = "max") -> Selected | None:
    """The value with the best average, and by how much; None if no value has been tried."""
    tried = [judgement for judgement in judgements if judgement.trials]
    if not tried:
        return None
    # The sort is stable, so ties stay in the table's order.
    best_first = sorted(tried, key=lambda judgement: judgement.average, reverse=mode == "max")
    best = best_first[0]
    margin = abs(best.average - best_first[1].average) if len(best_first) > 1 else float("nan")
    return Selected(best.value, best.average, margin)


# ---------------------------------------------------------------------------------------------------- arguments


@dataclasses.dataclass
class RunArgs:
    algorithm: Annotated[Literal[tuple(ALGORITHMS)], tyro.conf.Positional]
    """which script, and of a search which table of the appendix"""
    env_id: list[str]
    """environments (aquaplay: RoboDesk tasks; aquacql: datasets); every one gets all seeds or configurations"""
    storage_path: Path | None = None
    """folder of this sweep, on a cluster one that all machines see; default: sweeps/{algorithm}__{unix time}"""
    address: str = "local"
    """of a running Ray cluster, auto for the one this machine is part of; local: this machine alone"""
    cpus_per_trial: int = 1
    """cores of a trial, to which its threads are held"""
    gpus_per_trial: float = 0.0
    """GPUs of a trial, also a part of one; 0: the trial uses the CPU"""
    max_concurrent: int | None = None
    """trials at a time; default: as many as there are cores or GPUs for"""
    max_failures: int = 5
    """how often a trial whose process, worker or machine died is continued"""
    scheduler: Literal["none", "asha"] = "none"
    """asha: stop the worse trials early; none, as in the paper: train all of them to the end"""
    grace_period: int = SHORTEST_GRACE
    """environment steps that asha gives every trial"""
    metric: str = "success_rate"
    """a trial's score: last value of a column of evaluations.csv, or of a TensorBoard tag (a name with /)"""
    mode: Literal["max", "min"] = "max"
    """whether a higher or a lower score is better"""
    columns: tuple[str, ...] = ()
    """TensorBoard tags whose last values are columns of sweep.csv too, as candidates/perplexity"""


@dataclasses.dataclass
class SeedsArgs(RunArgs):
    """The same settings with several seeds, as for a figure of the paper."""

    num_seeds: int = 10
    """seeds 1, 2, ... for every environment"""


@dataclasses.dataclass
class SearchArgs(RunArgs):
    """Configurations drawn uniformly from the algorithm's table, and the selection of the appendix."""

    values: tuple[str, ...] = ()
    """what to search over instead of the appendix's table, as temperature=0.001,0.01 num_actions=10,20; a value
    can be the name of another one: temperature_start=temperature,0.1 is a constant temperature, or one from 0.1"""

    num_samples: int = 1000
    """configurations for every environment"""
    search_seed: int = 0
    """seed of the draw; every trial trains with the script's own --seed, unless it is given after --"""


@dataclasses.dataclass
class RestoreArgs:
    """Goes on with a sweep that was stopped or whose driver died."""

    path: Annotated[Path, tyro.conf.Positional]
    """folder of the sweep"""
    address: str | None = None
    """of a running Ray cluster; default: as the sweep was started; local: this machine alone"""


@dataclasses.dataclass
class ReportArgs:
    """Writes sweep.csv, selection.md and the histograms, also while the sweep is running; needs no Ray."""

    path: Annotated[Path, tyro.conf.Positional]
    """folder of the sweep"""


Command = (
    Annotated[SeedsArgs, tyro.conf.subcommand("seeds")]
    | Annotated[SearchArgs, tyro.conf.subcommand("search")]
    | Annotated[RestoreArgs, tyro.conf.subcommand("restore")]
    | Annotated[ReportArgs, tyro.conf.subcommand("report")]
)


class UserError(Exception):
    """One line that says what is wrong and what to do; the program ends with exit code 2."""


def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)


# ----------------------------------------------------------------------------------------------- plan of a sweep
# sweep.json has every trial before the first one starts, so that nothing about a sweep depends on what is still alive.


def argument_words(argument: str, value: Any) -> list[str]:
    """As the scripts' command lines have it."""
    flag = argument.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def trial_words(
    algorithm: str, env_id: str, values: dict[str, Any], passed_on: Sequence[str]
) -> list[str]:
    """The command of a trial: script, subcommand, environment, hyperparameters, and what came after --."""
    script, subcommand, task_argument = ALGORITHMS[algorithm]
    words = [script, *subcommand, task_argument, env_id]
    for name, value in values.items():
        choice = TABLES.get(algorithm, {}).get(name)
        arguments = choice.arguments if choice and choice.arguments else (name,)
        value = values.get(value, value)  # a value may be another hyperparameter's name
        for argument in arguments:
            words += argument_words(argument, value)
    return [*words, *passed_on, "--quiet"]


def is_given(name: str, choice: Choice, passed_on: Sequence[str]) -> bool:
    flags = [f"--{argument.replace('_', '-')}" for argument in choice.arguments or (name,)]
    flags += [flag.replace("--", "--no-", 1) for flag in flags]
    return any(word.replace("_", "-").split("=")[0] in flags for word in passed_on)


def own_table(words: Sequence[str]) -> dict[str, Choice]:
    """The table that --values gives, name=value,value,... each."""
    table = {}
    for word in words:
        name, _, values = word.partition("=")
        different = tuple(dict.fromkeys(map(plain_value, values.split(","))))
        require(name and values, f"--values {word}: give name=value,value,...")
        table[name.strip("-").replace("-", "_")] = Choice(different, bold=())
    return table


def plain_value(word: str) -> Any:
    """A number, True, False or None if it looks like one, else the word itself."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def searched_table(args: SearchArgs, passed_on: Sequence[str]) -> dict[str, Choice]:
    """The algorithm's table without what is given after --, which has that value in every trial."""
    if args.values:
        table = own_table(args.values)
    else:
        no_table = f"the appendix has no table for {args.algorithm}: give --values, or use seeds"
        require(args.algorithm in TABLES, no_table)
        table = TABLES[args.algorithm]
    kept = {name: choice for name, choice in table.items() if not is_given(name, choice, passed_on)}
    require(kept, "every hyperparameter of the table is given after --: use seeds, not search")
    return kept


def values_of_trials(
    args: SeedsArgs | SearchArgs, table: dict[str, Choice], rng: random.Random
) -> list[dict[str, Any]]:
    """What the trials of one environment differ in."""
    if isinstance(args, SeedsArgs):
        return [{"seed": seed} for seed in range(1, args.num_seeds + 1)]
    return [
        {name: rng.choice(choice.values) for name, choice in table.items()}
        for _ in range(args.num_samples)
    ]


def make_plan(args: SeedsArgs | SearchArgs, passed_on: list[str]) -> dict[str, Any]:
    table = {} if isinstance(args, SeedsArgs) else searched_table(args, passed_on)
    rng = random.Random(getattr(args, "search_seed", 0))
    trials = []
    for env_id in args.env_id:
        for values in values_of_trials(args, table, rng):
            words = trial_words(args.algorithm, env_id, values, passed_on)
            trials.append({"env_id": env_id, "values": values, "words": words})
    settings = dataclasses.asdict(args)
    settings["storage_path"] = None  # the folder that has this file, wherever it is
    return {
        "settings": settings,
        "environment": {name: os.environ[name] for name in PASSED_ON if name in os.environ},
        "searched": {name: choice.values for name, choice in table.items()},
        "trials": trials,
    }


def check_run_args(args: SeedsArgs | SearchArgs) -> None:
    counts = "cpus_per_trial max_concurrent num_seeds num_samples"
    for name in counts.split():
        value = getattr(args, name, None)
        require(
            value is None or value >= 1, f"--{name.replace('_', '-')} is {value}: give at least 1"
        )
    require(args.gpus_per_trial >= 0, f"--gpus-per-trial is {args.gpus_per_trial}: give 0 or more")
    require(args.max_failures >= 0, f"--max-failures is {args.max_failures}: give 0 or more")
    too_short = (
        f"--grace-period is {args.grace_period}: give at least {SHORTEST_GRACE}, less says nothing"
    )
    require(args.grace_period >= SHORTEST_GRACE, too_short)
    no_curve = f"asha needs a column of evaluations.csv, and --metric {args.metric} is known at the end only"
    require(args.scheduler == "none" or "/" not in args.metric, no_curve)


def write_json(path: Path, content: Any) -> None:
    """Atomic: a kill leaves the old file or none."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(path)


def load_plan(folder: Path) -> dict[str, Any]:
    path = folder / "sweep.json"
    require(path.exists(), f"{folder} is not the folder of a sweep: it has no sweep.json")
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path} is damaged: start a new sweep") from None


# ------------------------------------------------------------------------------------------------------- a trial


def trial_folder(folder: Path, index: int) -> Path:
    return folder / "trials" / f"{index:05d}"


def find_run(trial: Path) -> Path | None:
    """The trial's run folder, if the script got as far as having one that can be resumed."""
    for run in sorted(trial.glob("runs/*")):
        if (run / "args.json").exists():
            return run
        shutil.rmtree(run)  # killed between making the folder and writing the arguments
    return None


def read_evaluations(run: Path | None) -> list[dict[str, float]]:
    path = run / "evaluations.csv" if run else None
    if path is None or not path.exists():
        return []
    with path.open() as file:
        rows = [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
    return [{**row, "step": int(row["step"])} for row in rows]


def trial_environment(plan: dict[str, Any]) -> dict[str, str]:
    """The process's variables: what the driver had, and its threads held to its cores."""
    settings = plan["settings"]
    cores = str(settings["cpus_per_trial"])
    variables = {**os.environ, **plan["environment"], "PYTHONUNBUFFERED": "1"}
    for name in THREAD_LIMITS:
        variables[name] = cores
    if cores == "1":
        flags = os.environ.get("XLA_FLAGS", "")
        variables["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    if settings["gpus_per_trial"] == 0:
        variables["JAX_PLATFORMS"] = "cpu"
    elif settings["gpus_per_trial"] < 1:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(0.9 * settings["gpus_per_trial"])
    return variables


def die_with_worker() -> None:
    """Called in the new process: when the Ray worker that started it is killed, so is it (Linux)."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def start_trial(trial: Path, words: Sequence[str], plan: dict[str, Any]) -> subprocess.Popen:
    """The script, from its beginning or from the trial's last checkpoint; its output goes to log.txt."""
    # The process inherits the lock: while one writes to this folder, be it an orphan, no second one starts.
    lock = (trial / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    run = find_run(trial)
    script = str(SCRIPTS / words[0])
    rest = ["--resume", str(run.relative_to(trial)), "--quiet"] if run else words[1:]
    with (trial / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, script, *rest],
            cwd=trial,
            env=trial_environment(plan),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[lock.fileno()],
            preexec_fn=die_with_worker if sys.platform == "linux" else None,
        )
    lock.close()
    with (trial / "attempts.txt").open("a") as attempts:
        attempts.write(f"{time.time():.1f} {socket.gethostname()} {process.pid}\n")
    return process


def last_words(trial: Path) -> str:
    """The script's line about what is wrong, or else the last line of its log."""
    path = trial / "log.txt"
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    # The command line's parser draws a box: its first line says what it did not understand.
    boxed = [line for top, line in zip(lines, lines[1:]) if top.startswith("╭")]
    return (errors or boxed or lines or [""])[-1].strip(" │")


def run_trial(config: dict[str, Any]) -> None:
    """Tune's trainable: starts the script and reports each row of evaluations.csv as it comes."""
    from ray import tune

    folder = Path(config["folder"])
    plan = load_plan(folder)
    trial = trial_folder(folder, config["trial"])
    trial.mkdir(parents=True, exist_ok=True)
    process = None
    if not has_ended(trial):  # else an earlier attempt ended it, and the driver died unaware of it
        process = start_trial(trial, plan["trials"][config["trial"]]["words"], plan)
    reported = -1
    running = True
    while running:
        running = process is not None and process.poll() is None
        # After the look at the process, so that the last turn sees the last rows.
        for row in read_evaluations(find_evaluated(trial)):
            if row["step"] > reported:
                tune.report(row)
                reported = row["step"]
        if running:
            time.sleep(POLL_SECONDS)
    if process is not None:
        write_outcome(trial, process.returncode, plan)


def has_ended(trial: Path) -> bool:
    return (trial / "outcome.json").exists()


def write_outcome(trial: Path, exit_code: int, plan: dict[str, Any]) -> None:
    """How a trial ended; an error, for Tune to try again, if it ended before its end."""
    message = last_words(trial) if exit_code else ""
    if not is_final(exit_code, message):
        raise RuntimeError(f"exit code {exit_code}: {message}")
    scalars = last_scalars(find_evaluated(trial), asked_tags(plan))
    ended = {"exit_code": exit_code, "error": message, "scalars": scalars}
    write_json(trial / "outcome.json", ended)


def is_final(exit_code: int, message: str) -> bool:
    """Exit code 2 is bad input, a line of the script's own a training that diverged: neither is
    better a second time. A full disk may be."""
    if exit_code in (0, 2):
        return True
    return exit_code > 0 and message.startswith("error:") and "--resume the run" not in message


def asked_tags(plan: dict[str, Any]) -> list[str]:
    """The TensorBoard tags that this sweep wants to know of every trial."""
    settings = plan["settings"]
    metric = [settings["metric"]] if "/" in settings["metric"] else []
    return [*metric, *settings["columns"]]


def last_scalars(run: Path | None, tags: Sequence[str]) -> dict[str, float]:
    """The last value of TensorBoard tags, as far as a run has them."""
    if not tags or run is None:
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(run), size_guidance={"scalars": 1})  # it keeps the last one
    log.Reload()
    there = log.Tags()["scalars"]
    return {tag: log.Scalars(tag)[-1].value for tag in tags if tag in there}


def find_evaluated(trial: Path) -> Path | None:
    for path in trial.glob("runs/*/evaluations.csv"):
        return path.parent
    return None


# ----------------------------------------------------------------------------------------------- state of a sweep

ENDED = ("done", "stopped", "failed")


class Row(NamedTuple):
    """A trial as its folder tells it: a row of sweep.csv."""

    index: int
    env_id: str
    values: dict[str, Any]
    status: str  # waiting, started, done, stopped (by asha) or failed
    score: float | None
    step: int | None
    attempts: int
    run: str
    error: str
    columns: Sequence[float | None] = ()  # of --columns


def read_trial(folder: Path, index: int, plan: dict[str, Any]) -> Row:
    planned = plan["trials"][index]
    trial = trial_folder(folder, index)
    attempts = trial / "attempts.txt"
    started = len(attempts.read_text().splitlines()) if attempts.exists() else 0
    run = find_evaluated(trial)
    evaluations = read_evaluations(run)
    last = evaluations[-1] if evaluations else {}
    status = "started" if started else "waiting"
    error = last_words(trial) if started else ""
    scalars = {}
    if has_ended(trial):
        ended = json.loads((trial / "outcome.json").read_text())
        status = status_of(ended["exit_code"])
        error = ended["error"]
        scalars = ended["scalars"]
    settings = plan["settings"]
    metric = settings["metric"]
    return Row(
        index,
        planned["env_id"],
        planned["values"],
        status,
        score=scalars.get(metric, last.get(metric)),
        step=last.get("step"),
        attempts=started,
        run=str(run.relative_to(folder)) if run else "",
        error=error,
        columns=[scalars.get(tag) for tag in settings["columns"]],
    )


def status_of(exit_code: int | None) -> str:
    if exit_code is None:
        return "stopped"
    return "failed" if exit_code else "done"


def read_sweep(folder: Path, plan: dict[str, Any]) -> list[Row]:
    return [read_trial(folder, index, plan) for index in range(len(plan["trials"]))]


def has_score(row: Row) -> bool:
    ended = row.status in ("done", "stopped")
    return ended and row.score is not None and np.isfinite(row.score)


def counted(row: Row, worst: float = 0.0) -> Trial:
    """A configuration that failed by itself counts as the worst score: leaving it out would favour
    values that diverge. One that has not ended, or has no such score, says nothing yet."""
    if row.status == "failed":
        return Trial(row.values, worst)
    return Trial(row.values, row.score if has_score(row) else None)


def worst_score(rows: Sequence[Row], settings: dict[str, Any]) -> float | None:
    """No success at all; of another metric the worst of those that ended."""
    if settings["metric"] == "success_rate":
        return 0.0
    scores = [row.score for row in rows if has_score(row)]
    worst = min if settings["mode"] == "max" else max
    return worst(scores, default=None)


# --------------------------------------------------------------------------------------------------------- report


def write_table(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    names = list(rows[0].values)
    ends = ["status", "score", *columns, "step", "attempts", "run", "error"]
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["trial", "env_id", *names, *ends])
        for row in rows:
            start = [f"{row.index:05d}", row.env_id, *(str(row.values[name]) for name in names)]
            scores = [row.status, row.score, *row.columns]
            table.writerow([*start, *scores, row.step, row.attempts, row.run, row.error])


def judgement_words(judgement: Judgement) -> str:
    value, average, trials = judgement
    return f"{value}: {average:.3f} ({trials})" if trials else f"{value}: not tried"


def selection_lines(title: str, trials: Sequence[Trial], plan: dict[str, Any]) -> list[str]:
    """A section of selection.md."""
    algorithm = plan["settings"]["algorithm"]
    mode = plan["settings"]["mode"]
    scored = sum(trial.score is not None for trial in trials)
    lines = [
        f"## {title}",
        "",
        f"{scored} of {len(trials)} configurations counted.",
        "",
        "| hyperparameter | selected | margin | the paper's | mean of the better half (configurations) |",
        "|---|---|---|---|---|",
    ]
    for name, values in plan["searched"].items():
        judgements = judge(trials, name, values, mode)
        selected = select(judgements, mode)
        tried = ", ".join(map(judgement_words, judgements))
        choice = TABLES.get(algorithm, {}).get(name)
        bold = ", ".join(map(str, choice.bold)) if choice else ""
        if selected is None:
            lines.append(f"| {name} | | | {bold} | {tried} |")
            continue
        margin = "tie" if selected.margin == 0 else f"{selected.margin:.3f}"
        if np.isnan(selected.margin):
            margin = "no other value tried"
        lines.append(f"| {name} | {selected.value} | {margin} | {bold} | {tried} |")
    return [*lines, ""]


def draw_histograms(
    path: Path, title: str, name: str, values: Sequence, trials: Sequence[Trial], plan: dict
) -> None:
    """A panel per value: how many of its configurations reached which score, and the average of
    their better half."""
    from matplotlib.figure import Figure

    metric = plan["settings"]["metric"]
    figure = Figure(figsize=(2.6 * len(values), 2.6), layout="constrained")
    axes = figure.subplots(1, len(values), sharex=True, sharey=True, squeeze=False)[0]
    rates = [0.0, 1.0] if metric == "success_rate" else []
    scores = [trial.score for trial in trials if trial.score is not None] + rates
    bins = np.linspace(min(scores, default=0.0), max(scores, default=1.0), 21)
    for axis, judgement in zip(axes, judge(trials, name, values, plan["settings"]["mode"])):
        heading = f"{judgement.value} ({judgement.trials})"
        if judgement.trials:
            axis.hist(scores_of(trials, name, judgement.value), bins=bins, color="#0072B2")
            axis.axvline(judgement.average, color="#D55E00")
            heading += f"\nbetter half: {judgement.average:.3f}"
        axis.set_title(heading, fontsize="medium")
        axis.set_xlabel(metric)
    axes[0].set_ylabel("configurations")
    figure.suptitle(f"{title}: {name}")
    figure.savefig(path, dpi=100)


def file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in text)


def write_selection(folder: Path, rows: Sequence[Row], plan: dict[str, Any]) -> None:
    settings = plan["settings"]
    groups = {}
    for env_id in dict.fromkeys(row.env_id for row in rows):
        mine = [row for row in rows if row.env_id == env_id]
        worst = worst_score(mine, settings)
        groups[env_id] = [counted(row, worst) for row in mine]
    if len(groups) > 1:
        groups["all environments"] = [trial for trials in groups.values() for trial in trials]
    better = "" if settings["mode"] == "max" else " (lower is better)"
    failed = "0" if settings["metric"] == "success_rate" else "the worst of the others"
    lines = [
        f"# Selected hyperparameters of {settings['algorithm']}",
        "",
        f"A value is judged by the mean {settings['metric']}{better} over the better half of the",
        "configurations that have it; of equals the one listed first is taken. Failed configurations",
        f"count as {failed}.",
        "",
    ]
    figures = folder / "histograms"
    figures.mkdir(exist_ok=True)
    for title, trials in groups.items():
        lines += selection_lines(title, trials, plan)
        for name, values in plan["searched"].items():
            figure = figures / f"{file_name(title)}__{name}.png"
            draw_histograms(figure, title, name, values, trials, plan)
    (folder / "selection.md").write_text("\n".join(lines))


def summary_lines(rows: Sequence[Row], settings: dict[str, Any]) -> list[str]:
    lines = []
    metric = settings["metric"]
    best_of = max if settings["mode"] == "max" else min
    for env_id in dict.fromkeys(row.env_id for row in rows):
        mine = [row for row in rows if row.env_id == env_id]
        statuses = [row.status for row in mine]
        states = [f"{statuses.count(status)} {status}" for status in ("done", "stopped", "failed")]
        states.append(f"{statuses.count('waiting') + statuses.count('started')} not ended")
        scores = [row.score for row in mine if has_score(row)]
        middle = "no score yet"
        if "done" in statuses:
            middle = f"no score: no trial has {metric}"
        if scores:
            middle = f"median score {np.median(scores):.3f}, best {best_of(scores):.3f}"
        lines.append(f"{env_id}: {', '.join(states)}; {middle}")
    for row in [row for row in rows if row.status == "failed"][:10]:
        lines.append(f"trial {row.index:05d} failed: {row.error}")
    return lines


def report(folder: Path) -> None:
    plan = load_plan(folder)
    rows = read_sweep(folder, plan)
    write_table(folder / "sweep.csv", rows, plan["settings"]["columns"])
    written = "sweep.csv"
    if plan["searched"]:
        write_selection(folder, rows, plan)
        written = "sweep.csv, selection.md and histograms"
    for line in summary_lines(rows, plan["settings"]):
        print(line)
    print(f"written to {folder}: {written}")
    if not plan["searched"]:
        print(f"curves, the median over seeds: python plot.py {folder}/trials/*/runs/*")


# --------------------------------------------------------------------------------------------------------- driver


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # no tables of Tune's own beside ours
    # The run folders have TensorBoard's files already.
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    try:
        import ray
        import ray.tune
    except ImportError:
        raise UserError(INSTALL_RAY) from None
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # the live table says what has died
    return ray


def cause_of_death(trial: Any) -> str:
    """What happened to a trial of Tune's, in the words of the last error that it wrote down."""
    if trial.error_file is None:
        return "unknown"
    last_failure = Path(trial.error_file).read_text().rpartition("Failure # ")[2]
    lines = last_failure.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+Error: ", line)]
    return (errors or lines)[-1].split(". ")[0].rstrip(" :")


@dataclasses.dataclass
class Progress:
    """What the live table knows."""

    total: int
    mode: str
    ended: dict[int, str] = dataclasses.field(default_factory=dict)  # trial -> status
    scores: dict[int, float] = dataclasses.field(default_factory=dict)
    seconds: list[float] = dataclasses.field(default_factory=list)  # that trials took
    slots: int = 1  # trials at a time, as far as seen

    def line(self, running: int, given_up: int) -> str:
        self.slots = max(self.slots, running)
        failed = list(self.ended.values()).count("failed")
        unended = self.total - len(self.ended) - given_up
        line = f"{running} running, {unended - running} waiting"
        line += f", {len(self.ended) - failed} done, {failed} failed"
        if given_up:
            line += f", {given_up} given up"
        finite = {index: score for index, score in self.scores.items() if np.isfinite(score)}
        if finite:
            best_of = max if self.mode == "max" else min
            best = best_of(finite, key=finite.get)
            line += f"; best {finite[best]:.3f} (trial {best:05d})"
        if self.seconds and unended:
            left = unended / self.slots * float(np.mean(self.seconds))
            line += f"; about {left / 60:.0f} min left"
        return line


def make_live_table(folder: Path, plan: dict[str, Any]) -> Any:
    """Tune's callback: a line when something has changed, at most one every few seconds."""
    from ray import tune

    settings = plan["settings"]

    class LiveTable(tune.Callback):
        def setup(self, **_: Any) -> None:
            self.progress = Progress(len(plan["trials"]), settings["mode"])
            for row in read_sweep(folder, plan):  # of a restored sweep some have ended already
                self.note(row)
            self.started: dict[int, float] = {}
            self.printed = 0.0
            self.shown = ""

        def note(self, row: Row) -> None:
            if row.status in ENDED:
                self.progress.ended[row.index] = row.status
            if row.score is not None:
                self.progress.scores[row.index] = row.score

        def on_trial_start(self, iteration: int, trials: list, trial: Any, **_: Any) -> None:
            self.started.setdefault(trial.config["trial"], time.monotonic())

        def on_trial_result(
            self, iteration: int, trials: list, trial: Any, result: dict, **_: Any
        ) -> None:
            if settings["metric"] in result:
                self.progress.scores[trial.config["trial"]] = result[settings["metric"]]

        def on_trial_complete(self, iteration: int, trials: list, trial: Any, **_: Any) -> None:
            index = trial.config["trial"]
            if index in self.started:
                self.progress.seconds.append(time.monotonic() - self.started[index])
            trial_path = trial_folder(folder, index)
            if settings["scheduler"] == "asha" and not has_ended(trial_path):
                stopped = {"exit_code": None, "error": "stopped by asha", "scalars": {}}
                write_json(trial_path / "outcome.json", stopped)
            row = read_trial(folder, index, plan)
            self.note(row)
            if row.status == "failed":
                print(f"trial {index:05d} failed: {row.error}", flush=True)

        def on_trial_recover(self, iteration: int, trials: list, trial: Any, **_: Any) -> None:
            reason = cause_of_death(trial)
            print(f"trial {trial.config['trial']:05d} died and is continued: {reason}", flush=True)

        def on_trial_error(self, iteration: int, trials: list, trial: Any, **_: Any) -> None:
            reason = cause_of_death(trial)
            print(f"trial {trial.config['trial']:05d} died and is given up: {reason}", flush=True)

        def on_step_end(self, iteration: int, trials: list, **_: Any) -> None:
            if time.monotonic() > self.printed + SECONDS_BETWEEN_LINES:
                self.show(trials)

        def on_experiment_end(self, trials: list, **_: Any) -> None:
            self.show(trials)

        def show(self, trials: list) -> None:
            alive = [trial for trial in trials if trial.config["trial"] not in self.progress.ended]
            line = self.progress.line(
                running=sum(trial.status == "RUNNING" for trial in alive),
                given_up=sum(trial.status == "ERROR" for trial in alive),
            )
            if line != self.shown:
                print(time.strftime("%H:%M:%S"), line, flush=True)
                self.shown = line
                self.printed = time.monotonic()

    return LiveTable()


def make_tuner(ray: Any, folder: Path, plan: dict[str, Any]) -> Any:
    """A new Tuner, or the one that Tune kept if the sweep had got so far."""
    tune = ray.tune
    settings = plan["settings"]
    resources = {"cpu": settings["cpus_per_trial"], "gpu": settings["gpus_per_trial"]}
    trainable = tune.with_resources(run_trial, resources)
    state = folder / "tune"
    indices = list(range(len(plan["trials"])))
    param_space = {"trial": tune.grid_search(indices), "folder": str(folder)}
    if tune.Tuner.can_restore(str(state)):
        return tune.Tuner.restore(
            str(state),
            trainable,
            resume_unfinished=True,
            resume_errored=True,
            param_space=param_space,
        )
    scheduler = None
    if settings["scheduler"] == "asha":
        scheduler = tune.schedulers.ASHAScheduler(
            time_attr="step",
            metric=settings["metric"],
            mode=settings["mode"],
            grace_period=settings["grace_period"],
            max_t=LAST_STEP,
        )
    return tune.Tuner(
        trainable,
        param_space=param_space,
        tune_config=tune.TuneConfig(
            scheduler=scheduler, max_concurrent_trials=settings["max_concurrent"]
        ),
        run_config=tune.RunConfig(
            name=state.name,
            storage_path=str(folder),
            failure_config=tune.FailureConfig(max_failures=settings["max_failures"]),
            callbacks=[make_live_table(folder, plan)],
            verbose=0,
        ),
    )


def connect(ray: Any, address: str) -> None:
    """Starts Ray on this machine, or joins the cluster at this address."""
    options = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **options)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        problem = f"no Ray cluster at {address!r}, start one with ray start --head"
        if address == "local":
            problem = "Ray does not start, perhaps the machine is too busy"
        raise UserError(f"{problem}: {reason}") from None


def run_sweep(folder: Path, address: str | None) -> int:
    """Runs what has not ended yet; returns the exit code."""
    ray = import_ray()
    plan = load_plan(folder)
    given_up = 0
    try:
        connect(ray, address or plan["settings"]["address"])
        given_up = make_tuner(ray, folder, plan).fit().num_errors  # Ctrl-C ends fit() early
    except KeyboardInterrupt:
        print("stopped at once", file=sys.stderr)
    ray.shutdown()
    report(folder)
    unfinished = sum(row.status not in ENDED for row in read_sweep(folder, plan))
    if not unfinished:
        return 0
    how_on = f"continue with: python sweep.py restore {folder}"
    print(f"{unfinished} trials have not ended; {how_on}", file=sys.stderr)
    return 130 if unfinished > given_up else 1


def new_sweep(args: SeedsArgs | SearchArgs, passed_on: list[str]) -> Path:
    check_run_args(args)
    folder = args.storage_path or Path("sweeps") / f"{args.algorithm}__{int(time.time())}"
    folder = folder.resolve()
    there = f"{folder} has a sweep already: python sweep.py restore {folder}, or give another --storage-path"
    require(not (folder / "sweep.json").exists(), there)
    plan = make_plan(args, passed_on)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "sweep.json", plan)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from None
    print(f"{len(plan['trials'])} trials in {folder}", flush=True)
    return folder


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    try:
        args = tyro.cli(Command, args=words[:end], description=__doc__)
        passed_on = words[end + 1 :]
        if isinstance(args, ReportArgs):
            report(args.path.resolve())
            return
        import_ray()  # before anything is written
        if isinstance(args, RestoreArgs):
            folder = args.path.resolve()
        else:
            folder = new_sweep(args, passed_on)
        sys.exit(run_sweep(folder, args.address))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
