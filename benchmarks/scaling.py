"""How the cost of AQuaDQN grows: candidates, batch, replay, demonstrations, cores, start-up, evaluation.

    python benchmarks/scaling.py [--out docs/results/figures/scaling]   # under 10 minutes on an idle machine
    python benchmarks/scaling.py --quick                                # does everything start?

Writes one CSV file (curve, x, what, value) and one figure with a panel per curve. Random data of Door's sizes; the
values that are not varied are the script's defaults. Nothing else should run on the machine.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from speed import env_step, milliseconds, random_replay  # which also finds aquadqn

import aquadqn

ROOT = Path(__file__).resolve().parents[1]
OBS_DIM, ACTION_DIM = 39, 28  # Door's
REPEATS = 10
COLUMNS = ("curve", "x", "what", "value")


class Point(NamedTuple):
    curve: str
    x: Any
    what: str
    value: float


def megabytes(tree: Any) -> float:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 2**20


def update_ms(args: aquadqn.Args, replay: aquadqn.Replay) -> float:
    """An update of the Q-network."""
    network = aquadqn.QNetwork(args.num_actions)
    optimizer = optax.adam(args.learning_rate)
    agent, _ = aquadqn.init_agent(network, optimizer, jax.random.PRNGKey(0), OBS_DIM)
    learn = aquadqn.make_update(network, optimizer, args)

    def call() -> dict:
        nonlocal agent
        agent, metrics = learn(agent, replay, replay)
        return metrics

    return milliseconds(call, REPEATS, aquadqn.STEPS_PER_CALL)


def candidate_ms(args: aquadqn.Args, observations: jax.Array, actions: jax.Array) -> float:
    """A step of the candidate network."""
    args.temperature_start = 1.0
    network = aquadqn.make_candidate_network(args, ACTION_DIM)
    optimizer = optax.adam(args.candidate_learning_rate)
    key = jax.random.PRNGKey(0)
    params = network.init(key, observations[:1])
    state = aquadqn.CandidateState(params, optimizer.init(params), jnp.asarray(0), key)
    learn = aquadqn.make_candidate_update(network, optimizer, args)

    def call() -> jax.Array:
        nonlocal state
        state, loss = learn(state, observations, actions, 10)
        return loss

    return milliseconds(call, REPEATS, 10)


def policy_ms(args: aquadqn.Args, box: Any) -> float:
    """Candidates and Q-values of one state, from the observation to the action in memory."""
    network = aquadqn.make_candidate_network(args, ACTION_DIM)
    q_network = aquadqn.QNetwork(args.num_actions)
    observation = np.zeros(OBS_DIM, np.float32)
    key = jax.random.PRNGKey(0)
    params = network.init(key, observation)
    q_params = q_network.init(key, observation)
    policy = aquadqn.make_policy(q_network, network, box)
    return milliseconds(
        lambda: jax.device_get(policy(q_params, params, observation, key, epsilon=0.1)[:2]), 300
    )


def environment_ms(env: gym.Env) -> float:
    """A step of Door with random actions."""
    env.action_space.seed(0)
    return env_step(env, [env.action_space.sample() for _ in range(1_000)])


def demonstrations(steps: int) -> tuple[jax.Array, jax.Array]:
    key = jax.random.PRNGKey(1)
    return jax.random.normal(key, (steps, OBS_DIM)), jax.random.uniform(key, (steps, ACTION_DIM))


def grow_candidates(sizes: list[int]) -> list[Point]:
    replay = random_replay(10_000, OBS_DIM, 10)
    box = aquadqn.make_env(aquadqn.Args()).action_space
    points = []
    for k in sizes:
        args = aquadqn.Args(num_actions=k)
        points.append(
            Point(
                "candidates K", k, "candidate step, ms", candidate_ms(args, *demonstrations(6729))
            )
        )
        points.append(Point("candidates K", k, "update, ms", update_ms(args, replay)))
        points.append(Point("candidates K", k, "policy call, ms", policy_ms(args, box)))
    return points


def grow_batch(sizes: list[int]) -> list[Point]:
    replay = random_replay(10_000, OBS_DIM, 10)
    points = []
    for size in sizes:
        args = aquadqn.Args(batch_size=size)
        points.append(
            Point("batch", size, "candidate step, ms", candidate_ms(args, *demonstrations(6729)))
        )
        points.append(Point("batch", size, "update, ms", update_ms(args, replay)))
    return points


def grow_replay(sizes: list[int]) -> list[Point]:
    points = []
    for size in sizes:
        replay = random_replay(size, OBS_DIM, 10)
        points.append(Point("replay", size, "update, ms", update_ms(aquadqn.Args(), replay)))
        points.append(Point("replay", size, "memory, MB", megabytes(replay)))
    return points


def grow_demonstrations(sizes: list[int]) -> list[Point]:
    points = []
    for size in sizes:
        observations, actions = demonstrations(size)
        ms = candidate_ms(aquadqn.Args(), observations, actions)
        points.append(Point("demonstrations", size, "candidate step, ms", ms))
        kept = (observations, actions, random_replay(size, OBS_DIM, 10))  # for either stage
        points.append(Point("demonstrations", size, "memory, MB", megabytes(kept)))
    return points


def on_cores(number: int, quick: bool) -> list[Point]:
    """The parts in a process of its own that uses so many cores."""
    command = [sys.executable, __file__, "--parts", str(number), *["--quick"] * quick]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = csv.reader(result.stdout.splitlines())
    return [Point("cores", number, what, float(value)) for what, value in rows]


def print_parts(cores: int) -> None:
    os.sched_setaffinity(
        0, sorted(os.sched_getaffinity(0))[:cores]
    )  # before JAX starts its threads
    args = aquadqn.Args()
    env = aquadqn.make_env(args)
    print(f'"candidate step, ms",{candidate_ms(args, *demonstrations(6729))}')
    print(f'"update, ms",{update_ms(args, random_replay(10_000, OBS_DIM, 10))}')
    print(f'"policy call, ms",{policy_ms(args, env.action_space)}')
    print(f'"environment step, ms",{environment_ms(env)}')


FIRST_UPDATE = """
import os, sys, time
start = float(sys.argv.pop(1))
import jax
import aquadqn

def stop(run, step, metrics):
    jax.block_until_ready(metrics)
    print("first update after", time.time() - start, flush=True)
    os._exit(0)

aquadqn.Run.log_update = stop
aquadqn.main()
"""


def start_up(repeats: int) -> list[Point]:
    """Seconds from the command to the first update, without the work that is not start-up."""
    words = "--dataset-id aquadem/door/agent-v0 --candidate-steps 1 --learning-starts 0 --quiet"
    words += " --total-timesteps 800 --eval-episodes 1"
    points = []
    with tempfile.TemporaryDirectory() as folder:
        cache = {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        ways = {
            "no cache": {"JAX_ENABLE_COMPILATION_CACHE": "false"},
            "cache, first run": cache,
            "cache, later": cache,
        }
        for way, changes in ways.items():
            for i in range(1 if way == "cache, first run" else repeats):
                env = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
                command = [sys.executable, "-c", FIRST_UPDATE, str(time.time()), *words.split()]
                command += ["--exp-name", f"{way.replace(', ', '_').replace(' ', '_')}_{i}"]
                result = subprocess.run(
                    command, capture_output=True, text=True, check=True, cwd=folder, env=env
                )
                seconds = float(result.stdout.split("first update after")[1])
                points.append(Point("start-up", way, "seconds to the first update", seconds))
    return points


def evaluation_share(step_ms: float, episodes: int) -> list[Point]:
    """One evaluation, measured; its share of a run for several distances, calculated from it."""
    args = aquadqn.Args(reward="sparse", eval_episodes=episodes)
    envs = aquadqn.make_evaluation_envs(args, episodes, videos=0)
    box = envs[0].action_space
    network = aquadqn.make_candidate_network(args, ACTION_DIM)
    q_network = aquadqn.QNetwork(args.num_actions)
    key = jax.random.PRNGKey(0)
    params = network.init(key, jnp.zeros(OBS_DIM))
    q_params = q_network.init(key, jnp.zeros(OBS_DIM))
    policy = aquadqn.make_policy(q_network, network, box)
    jax.block_until_ready(policy(q_params, params, np.zeros((episodes, OBS_DIM)), key, epsilon=0.0))
    start = time.perf_counter()
    aquadqn.evaluate(lambda x: policy(q_params, params, x, key, epsilon=0.0)[0], envs)
    seconds = time.perf_counter() - start
    points = [Point("evaluation", "one", "seconds", seconds)]
    for every in (5_000, 10_000, 50_000):
        share = 100 * seconds / (seconds + every * step_ms / 1e3)
        points.append(Point("evaluation", every, "percent of a run", share))
    return points


def draw(points: list[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    curves = list(dict.fromkeys(point.curve for point in points))
    figure = Figure(figsize=(16, 8), layout="constrained")
    axes = figure.subplots(2, 4)
    for axis, curve in zip(axes.flat, curves):
        axis.set_title(curve)
        here = [point for point in points if point.curve == curve]
        for what in dict.fromkeys(point.what for point in here):
            of_it = [point for point in here if point.what == what]
            numbers = all(isinstance(point.x, int) for point in of_it)
            xs = [point.x if numbers else str(point.x) for point in of_it]
            axis.plot(xs, [point.value for point in of_it], "o-" if numbers else "o", label=what)
        if curve in ("candidates K", "batch", "replay", "demonstrations"):
            axis.set_xscale("log")
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("scaling"), help="without .csv and .png")
    parser.add_argument("--quick", action="store_true", help="two small sizes of everything")
    parser.add_argument("--parts", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        global REPEATS
        REPEATS = 2
    if options.parts:
        return print_parts(options.parts)
    sizes = {
        "candidates": [10, 20, 30, 50, 100],
        "batch": [64, 256, 1024, 4096],
        "replay": [10_000, 100_000, 1_000_000],
        "demonstrations": [1_000, 10_000, 100_000, 1_000_000],
    }
    if options.quick:
        sizes = {name: values[:2] for name, values in sizes.items()}
    points: list[Point] = []

    def add(new: list[Point]) -> None:
        points.extend(new)
        for point in new:
            print(
                f"{point.curve:15} {point.x!s:>16}  {point.what:28} {point.value:10.3f}", flush=True
            )

    add(grow_candidates(sizes["candidates"]))
    add(grow_batch(sizes["batch"]))
    add(grow_replay(sizes["replay"]))
    add(grow_demonstrations(sizes["demonstrations"]))
    for number in range(1, min(2, len(os.sched_getaffinity(0))) + 1):
        add(on_cores(number, options.quick))
    add(start_up(1 if options.quick else 3))
    parts = {point.what: point.value for point in points if point.curve == "cores"}  # of all cores
    step_ms = parts["update, ms"] + parts["policy call, ms"] + parts["environment step, ms"]
    add(evaluation_share(step_ms, 2 if options.quick else 30))
    with options.out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(points)
    draw(points, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
