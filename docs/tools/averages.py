"""Train aquadqn.py once and evaluate several averages of its Q-network: one run tells about every decay.

    python docs/tools/averages.py --env-id AdroitHandDoor-v1 --candidate-steps 20000 --total-timesteps 100000 \
        --eval-every 10000 --seed 11 --exp-name tune_t20k

An average has no part in training, so the run is the same whatever is averaged. Arguments and run folder are those of
aquadqn.py (--resume too); averages.csv in the folder has the success of every decay in DECAYS, evaluations.csv that of
--ema-decay, which has to be one of them.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aquadqn

DECAYS = (0.0, 0.99, 0.999, 0.9998)
init_one = aquadqn.init_agent
make_one_policy = aquadqn.make_policy
evaluate_one = aquadqn.evaluate
save_one_evaluation = aquadqn.AgentRun.save_evaluation


def init_agent(*inputs: Any) -> tuple:
    agent, key = init_one(*inputs)
    copies = {decay: jax.tree.map(jnp.copy, agent.params) for decay in DECAYS}
    return agent._replace(average_params=copies), key


def incremental_update(params: Any, averages: dict, _: float) -> dict:
    return {d: optax.incremental_update(params, averages[d], 1.0 - d) for d in DECAYS}


class Selected:
    """The average that the policy is to use where it is given all of them."""

    decay = DECAYS[0]


def make_policy(*inputs: Any) -> Any:
    policy = make_one_policy(*inputs)

    def choose(params: dict, *rest: Any, **options: Any) -> tuple:
        several = params.keys() == set(DECAYS)
        return policy(params[Selected.decay] if several else params, *rest, **options)

    return choose


def evaluate(policy: Any, envs: list) -> dict:
    results = {}
    for Selected.decay in DECAYS:
        results[Selected.decay] = evaluate_one(policy, envs)
    return results


def save_evaluation(run: Any, step: int, results: dict, params: dict, envs: list) -> None:
    shares = {f"decay_{decay}": np.mean(results[decay].successes) for decay in DECAYS}
    aquadqn.write_rows_until(run.folder / "averages.csv", step, shares)
    decay = run.args.ema_decay
    save_one_evaluation(run, step, results[decay], params[decay], envs)


if __name__ == "__main__":
    aquadqn.init_agent = init_agent
    aquadqn.optax = SimpleNamespace(**vars(optax) | {"incremental_update": incremental_update})
    aquadqn.make_policy = make_policy
    aquadqn.evaluate = evaluate
    aquadqn.AgentRun.save_evaluation = save_evaluation
    aquadqn.main()
