"""SBX's SAC on the same tasks, seeds, budget and evaluation as `sac_baselines.py sac`, for a comparison of returns.

    python benchmarks/peers.py --rows sac --install-only    # prints the Python of SBX's environment
    ~/.cache/aquadem-peers/sb/bin/python benchmarks/sbx_sac.py --env-id Hopper-v5 --seed 1 --out docs/results/curves

SBX is no dependency of this project: it runs from a virtual environment of its own, with the same MuJoCo as ours. Its
hyperparameters are those of the SAC paper, which are its own defaults, except that learning starts after as many random
steps as ours. Writes {env_id}__sbx__{seed}.csv with the columns of our evaluations.csv.
"""

import argparse
from pathlib import Path

import gymnasium as gym
import numpy as np
from sbx import SAC
from stable_baselines3.common.callbacks import BaseCallback

EVALUATION_SEED = (
    2**31
)  # as in our scripts: evaluation episode i starts from seed EVALUATION_SEED + i


def evaluate(model: SAC, envs: list[gym.Env]) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths of one episode in each environment, with the mean action."""
    observations = np.stack([env.reset(seed=EVALUATION_SEED + i)[0] for i, env in enumerate(envs)])
    returns, lengths, running = (
        np.zeros(len(envs)),
        np.zeros(len(envs), int),
        np.ones(len(envs), bool),
    )
    while running.any():
        actions, _ = model.predict(observations, deterministic=True)
        for i in np.flatnonzero(running):
            observations[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += reward
            lengths[i] += 1
            running[i] = not (terminated or truncated)
    return returns, lengths


class Evaluations(BaseCallback):
    """A row in the CSV file every `every` steps; the file is rewritten each time."""

    def __init__(self, path: Path, env_id: str, every: int, episodes: int):
        super().__init__()
        self.path, self.every, self.envs = path, every, [gym.make(env_id) for _ in range(episodes)]
        self.lines = ["step,success_rate,episodic_return,episodic_length,episodes"]

    def _on_training_start(self) -> None:
        self.write()

    def _on_step(self) -> bool:
        if self.num_timesteps % self.every == 0:
            self.write()
        return True

    def write(self) -> None:
        returns, lengths = evaluate(self.model, self.envs)
        values = [
            self.num_timesteps,
            np.nan,
            float(returns.mean()),
            float(lengths.mean()),
            len(self.envs),
        ]
        self.lines.append(",".join(map(str, values)))
        self.path.write_text("\n".join(self.lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env-id", default="HalfCheetah-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=100_000)
    parser.add_argument("--eval-every", type=int, default=10_000)
    parser.add_argument("--eval-episodes", type=int, default=30)
    parser.add_argument("--learning-starts", type=int, default=1_000)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the CSV file")
    options = parser.parse_args()
    path = options.out / f"{options.env_id}__sbx__{options.seed}.csv"
    recorder = Evaluations(path, options.env_id, options.eval_every, options.eval_episodes)
    model = SAC(
        "MlpPolicy",
        gym.make(options.env_id),
        seed=options.seed,
        learning_starts=options.learning_starts,
    )
    model.learn(options.total_timesteps, callback=recorder)


if __name__ == "__main__":
    main()
