"""What the candidates of finished aquadqn.py runs are like on their own demonstrations, as one CSV.

    python docs/tools/candidate_sweep.py runs/*__sweep__* --out docs/results/logs/door_candidate_sweep.csv

For every run: equation 1 without dropout over all demonstrations, the mean distance from a demonstrated action to its
nearest candidate, and how many of the K candidates are the nearest one for at least one action.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aquadqn


@dataclass
class Options:
    runs: Annotated[list[Path], tyro.conf.Positional]
    """run folders of aquadqn.py"""
    out: Path
    """CSV file to write, a row per run"""


def describe(run: Path) -> dict[str, str | float]:
    args = aquadqn.load_args(run)
    env = aquadqn.make_env(args)
    demos = aquadqn.load_demonstrations(
        args.dataset_id, env, args.reward == "sparse", args.num_demos
    )
    network = aquadqn.make_candidate_network(args, demos.actions.shape[1])
    params = aquadqn.load_candidates(run, network, demos.observations.shape[1])
    candidates = jax.jit(network.apply)(params, demos.observations)  # (N, K, D)
    nearest = aquadqn.nearest_candidate(candidates, demos.actions)
    distances = jnp.linalg.norm(
        candidates[jnp.arange(len(nearest)), nearest] - demos.actions, axis=-1
    )
    return {
        "env_id": args.env_id,
        "exp_name": args.exp_name,
        "temperature": args.temperature,
        "num_actions": args.num_actions,
        "seed": args.seed,
        "loss": float(aquadqn.soft_min_loss(candidates, demos.actions, args.temperature)),
        "nearest_distance": float(distances.mean()),
        "in_use": len(set(nearest.tolist())),
    }


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    rows = sorted((describe(run) for run in options.runs), key=lambda row: tuple(row.values()))
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    try:
        main()
    except aquadqn.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
