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

from typing import NamedTuple

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
    "aquacql": Algorithm("aquacql.py", task_argument="--dataset-id"),  # no table in the paper: seeds only
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
        "discriminator_regularization": Choice(("none", "dropout", "weight-decay"), bold=("dropout",)),
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
        "discriminator_regularization": Choice(("none", "dropout", "weight-decay"), bold=("weight-decay",)),
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
        "dropout": Choice((0.0, 0.1, 0.3), bold=(0.1,), arguments=("input_dropout", "hidden_dropout")),
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
