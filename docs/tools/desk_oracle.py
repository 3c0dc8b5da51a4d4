"""How far the candidates of an aquaplay.py run reach when they are picked by look-ahead in the simulator.

    python docs/tools/desk_oracle.py runs/RoboDesk-push_green__aquaplay__1__1700000000 > oracle.csv

Every few steps the oracle tries plans on copies of the desk: each of the K candidates held throughout, random sequences
of candidates, and the rest of the last plan. It follows the one of the greatest return for a few steps. If it fails
where it sees the future, the candidates are the limit; where it succeeds and the agent does not, the agent is.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import mujoco
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aquaplay
from robodesk_env import BASE_TASKS, Desk


@dataclass
class Options:
    run: Annotated[Path, tyro.conf.Positional]
    """run folder of aquaplay.py, with candidates"""
    tasks: tuple[str, ...] = BASE_TASKS
    """tasks to solve"""
    episodes: int = 3
    """of each task, from the first initial states of the evaluation"""
    hold: int = 5
    """steps for which a candidate is kept"""
    segments: int = 3
    """candidates of a plan; the look-ahead has this many times --hold steps"""
    sequences: int = 0
    """random plans in addition to the K constant ones"""
    epsilon: float = 0.0
    """probability of a random candidate instead; 1 shows how far exploration alone gets"""


class Oracle:
    def __init__(self, options: Options):
        args = aquaplay.load_args(options.run)
        network = aquaplay.make_candidate_network(args, 5)
        params = aquaplay.load_candidates(options.run, network, 76)
        self.candidates = jax.jit(lambda batch: network.apply(params, batch).clip(-1, 1))
        self.options, self.count, self.random = options, args.num_actions, np.random.default_rng(0)
        plans = self.count + options.sequences + 1
        self.desk = Desk(robodesk_rewards=args.robodesk_rewards)
        self.copies = [Desk(robodesk_rewards=args.robodesk_rewards) for _ in range(plans)]

    def best_plan(self, last: np.ndarray) -> np.ndarray:
        """Indices of candidates (segments,); `last` is the plan of which the first segment is done."""
        shape = (self.count + self.options.sequences, self.options.segments)
        plans = self.random.integers(self.count, size=shape)
        plans[: self.count] = np.arange(self.count)[:, None]  # each candidate held throughout
        plans = np.concatenate([plans, [[*last[1:], last[-1]]]])
        for copy in self.copies:
            mujoco.mj_copyData(copy.data, self.desk.model, self.desk.data)
            copy.task, copy.origins = self.desk.task, self.desk.origins
        observations = np.stack([copy.observe() for copy in self.copies])
        returns = np.zeros(len(plans))
        for segment in range(self.options.segments):
            for _ in range(self.options.hold):
                candidates = np.asarray(self.candidates(observations))  # (plans, K, 5)
                for i, copy in enumerate(self.copies):
                    action = candidates[i, plans[i, segment]]
                    observations[i], reward, _, _, info = copy.step(action)
                    returns[i] += reward + info["success"]
        return plans[returns.argmax()]

    def play(self, task: str, seed: int) -> tuple[float, bool, bool, np.ndarray]:
        """Return, success, whether a thing was between the fingers, how often each candidate was used (K,)."""
        desk, uses = self.desk, np.zeros(self.count, int)
        desk.task = task
        observation, _ = desk.reset(seed=seed)
        total, success, gripped = 0.0, False, False
        plan = self.random.integers(self.count, size=self.options.segments)
        for step in range(500):
            if self.random.random() < self.options.epsilon:
                index = self.random.integers(self.count)
            else:
                if step % self.options.hold == 0:
                    plan = self.best_plan(plan)
                index = plan[0]
            action = self.candidates(observation[None])[0, index]
            observation, reward, _, _, info = desk.step(action)
            uses[index] += 1
            total += reward
            success, gripped = success or info["success"], gripped or grips(desk)
        return total, success, gripped, uses


def grips(desk: Desk) -> bool:
    """Both fingers touch the same free thing."""
    fingers = {desk.model.body(f"panda0_{side}finger").id for side in ("left", "right")}
    bodies = desk.model.geom_bodyid[desk.data.contact.geom].tolist()  # (contacts, 2)
    pairs = set(map(frozenset, bodies))
    things = (desk.model.body(name).id for name in desk.OBJECTS)
    return any(all(frozenset((f, t)) in pairs for f in fingers) for t in things)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    oracle, writer = Oracle(options), csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["task", "episodes", "return", "successes", "gripped", "uses"])
    for task in options.tasks:
        seeds = range(aquaplay.EVALUATION_SEED, aquaplay.EVALUATION_SEED + options.episodes)
        returns, *sums, uses = zip(*(oracle.play(task, seed) for seed in seeds))
        scores = [options.episodes, round(np.mean(returns), 1), *map(sum, sums)]
        writer.writerow([task, *scores, " ".join(map(str, sum(uses)))])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
