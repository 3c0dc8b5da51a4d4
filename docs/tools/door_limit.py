"""Are the candidates the limit, or the agent? Where the greedy agent fails, random candidates are mixed in.

    python docs/tools/door_limit.py runs/AdroitHandDoor-v1__aquadqn__1__1700000000 > limit.csv

From every initial state the greedy agent has one try. Where it fails, it tries again with some of its steps replaced by
a random candidate. One success shows that a sequence of candidates opens the door from there: what an oracle that picks
among the candidates would reach is at least the share of states solved by any try.
"""

import csv
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from record import aquadqn, load_policy

EPSILONS = (0.05, 0.1, 0.2, 0.3)  # of the tries in turn


class Options(NamedTuple):
    run: Annotated[Path, tyro.conf.Positional]
    """run folder of a finished aquadqn.py run"""
    states: int = 100
    """initial states, none of them the evaluation's"""
    tries: int = 40
    """at most, of a state where the greedy agent fails"""


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    args = aquadqn.load_args(options.run)
    envs = [aquadqn.make_env(args) for _ in range(options.tries)]
    policy = load_policy(options.run, envs[0])
    first_state = aquadqn.EVALUATION_SEED + args.eval_episodes
    key = jax.random.PRNGKey(0)

    def successes(state: int, epsilons: list[float]) -> np.ndarray:
        """Of as many episodes from one state, one after the other."""
        nonlocal key
        found = []
        for env, epsilon in zip(envs, epsilons):
            observation, ended = aquadqn.seeded_reset(env, state), False
            success = False
            while not ended:
                action, _, key = policy(np.asarray(observation, np.float32), key, epsilon)
                observation, _, terminated, truncated, info = env.step(np.asarray(action))
                success = success or bool(info["success"])
                ended = success or terminated or truncated
            found.append(success)
            if success:
                break
        return np.array(found)

    rows = csv.writer(sys.stdout)
    rows.writerow(["state", "greedy", "tries", "solved"])
    for state in range(first_state, first_state + options.states):
        greedy = bool(successes(state, [0.0])[0])
        found = np.zeros(0, bool)
        if not greedy:
            found = successes(state, [EPSILONS[i % 4] for i in range(options.tries)])
        rows.writerow([state, int(greedy), len(found), int(greedy or found.any())])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
