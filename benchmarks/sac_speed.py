"""Environment steps per second of SAC: sac_baselines.py, SBX and Stable-Baselines3, in turn, in one run.

    python benchmarks/sac_speed.py --sbx-python ../sbx/bin/python --sb3-python ../sb3/bin/python

Each runs in its own process and from its own virtual environment, which the arguments name (`pip install sbx-rl
gymnasium[mujoco]`, `pip install stable-baselines3 gymnasium[mujoco]`; one without a name is left out). All get the same
task, batch 256, networks of 256 and 256, one update per step on average, and the threads that this process has: pin it
with taskset to compare on fewer cores. A clock around the environment starts after the warm-up, so that compilation
does not count; evaluation and checkpoints do not fall into the measured steps.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym

LEARNING_STARTS = 500


class Stopwatch(gym.Wrapper):
    """Seconds on the wall and of the processor between two of the training's environment steps."""

    def __init__(self, env: gym.Env, first: int, last: int):
        super().__init__(env)
        self.first, self.last, self.count, self.start = first, last, 0, (0.0, 0.0)

    def step(self, action):
        if self.count == self.first:
            self.start = time.perf_counter(), time.process_time()
        if self.count == self.last:
            wall, processor = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
            print(f"seconds {wall} {processor}", flush=True)
        self.count += 1
        return self.env.step(action)


def run_ours(env_id: str, first: int, last: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import sac_baselines

    args = sac_baselines.SACArgs(env_id=env_id, learning_rate=3e-4, n_step=1, reward_scale=1.0, quiet=True)
    args.total_timesteps, args.eval_every, args.eval_episodes = last + 1, 10**9, 1
    args.learning_starts, args.checkpoint_every = LEARNING_STARTS, 10**9
    env = Stopwatch(sac_baselines.make_env(sac_baselines.SACArgs(env_id=env_id, reward="env")), first, last)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run = sac_baselines.SACRun(args, None)
        sac_baselines.train_agent(args, run, env, None, None)
        run.finish()


def run_peer(name: str, env_id: str, first: int, last: int) -> None:
    if name == "sbx":
        from sbx import SAC
    else:
        from stable_baselines3 import SAC
    env = Stopwatch(gym.make(env_id), first, last)
    sizes = {"buffer_size": 1_000_000, "batch_size": 256, "policy_kwargs": {"net_arch": [256, 256]}}
    schedule = {"learning_rate": 3e-4, "learning_starts": LEARNING_STARTS, "train_freq": 1, "gradient_steps": 1}
    SAC("MlpPolicy", env, seed=1, **sizes, **schedule).learn(last + 1)


def measure(python: str, name: str, options: argparse.Namespace) -> tuple[float, float]:
    """Steps per second, and milliseconds of processor time per step, from a process of its own."""
    command = [python, __file__, "--child", name, "--env-id", options.env_id]
    command += ["--warm-up", str(options.warm_up), "--steps", str(options.steps)]
    result = subprocess.run(command, capture_output=True, text=True)
    lines = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("seconds ")]
    if result.returncode or not lines:
        sys.exit(f"error: {name} failed: {' '.join(result.stderr.split())[-500:]}")
    wall, processor = map(float, lines[0])
    return options.steps / wall, 1e3 * processor / options.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sbx-python", help="the Python of SBX's virtual environment")
    parser.add_argument("--sb3-python", help="the Python of Stable-Baselines3's virtual environment")
    parser.add_argument("--env-id", default="HalfCheetah-v5")
    parser.add_argument(
        "--warm-up", type=int, default=1500, help=f"environment steps, {LEARNING_STARTS} of them random"
    )
    parser.add_argument("--steps", type=int, default=2000, help="environment steps that are measured")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turn")
    parser.add_argument("--child", choices=["ours", "sbx", "sb3"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    span = options.warm_up, options.warm_up + options.steps
    if options.child == "ours":
        return run_ours(options.env_id, *span)
    if options.child:
        return run_peer(options.child, options.env_id, *span)
    pythons = {"ours": sys.executable, "sbx": options.sbx_python, "sb3": options.sb3_python}
    measured = {name: [] for name, python in pythons.items() if python}
    for _ in range(options.rounds):
        for name in measured:
            measured[name].append(measure(pythons[name], name, options))
    print(f"{options.env_id}, {len(os.sched_getaffinity(0))} cores, {options.steps} steps, {options.rounds} rounds")
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in measured.items()}
    for name, (speed, processor) in medians.items():
        every = " ".join(f"{row[0]:.1f}" for row in measured[name])
        print(f"{name:5s}{speed:8.1f} steps/s (median of {every}), {processor:.2f} ms of processor time per step")
    for name, least in (("sbx", 1.3), ("sb3", 2.0)):
        if name in medians:
            speed, time_ratio = medians["ours"][0] / medians[name][0], medians[name][1] / medians["ours"][1]
            print(f"ours / {name}   {speed:.2f} in steps/s (at least {least}), {time_ratio:.2f} in processor time")


if __name__ == "__main__":
    main()
