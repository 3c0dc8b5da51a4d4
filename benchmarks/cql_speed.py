"""Gradient steps per second of aquacql.py and of d3rlpy's DiscreteCQL, turn by turn in one run.

    python -m venv d3 && d3/bin/pip install torch d3rlpy    # a virtual environment of its own
    python benchmarks/cql_speed.py --d3rlpy-python d3/bin/python

Both get the same random data, network (512 LayerNorm tanh, 512 elu, 256 elu, K), batch of 256 and copy into the target
network every 100 steps; a step is the drawing of a batch and one update with Adam. Ours takes 3-step transitions and
Munchausen DQN's target, d3rlpy 1-step transitions and double DQN's, with one pass more of the online network. The two
take turns, so that whatever else the machine does falls on both; the threads are those that this process may use.
PyTorch is d3rlpy's: it is imported in the child process only, from that environment, and is no dependency of ours.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

OBS_DIM, ACTION_DIM, K, BATCH = 11, 3, 10, 256  # as many as Hopper has
TRANSITIONS, EPISODE = 100_000, 500


@dataclass
class Options:
    d3rlpy_python: str | None = None
    """Python of a virtual environment that has d3rlpy; without it only ours is measured"""
    steps: int = 200
    """gradient steps of a turn"""
    turns: int = 5
    """turns of each"""
    num_seeds: tuple[int, ...] = (1,)
    """numbers of seeds with which ours is measured"""


def our_turns(num_seeds: int, steps: int) -> Callable[[], None]:
    """A turn of ours: `steps` gradient steps of every seed."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import jax
    import jax.numpy as jnp
    import optax

    import aquacql

    generator, args = np.random.default_rng(0), aquacql.Args(num_seeds=num_seeds)
    observations = generator.normal(size=(TRANSITIONS, OBS_DIM)).astype(np.float32)
    rewards = generator.normal(size=TRANSITIONS).astype(np.float32)
    actions = np.zeros((TRANSITIONS, ACTION_DIM), np.float32)
    ends = np.arange(TRANSITIONS) % EPISODE == EPISODE - 1
    following = np.roll(observations, -1, axis=0)
    data = aquacql.Demonstrations(observations, actions, rewards, following, np.zeros_like(ends), ends)
    transitions = aquacql.make_transitions(data, args.n_step, args.gamma)
    indices = jnp.asarray(generator.integers(K, size=(num_seeds, TRANSITIONS)), jnp.int32)
    network, optimizer = aquacql.QNetwork(K), optax.adam(args.learning_rate)
    update = aquacql.make_cql_updates(network, optimizer, args)
    kept = [aquacql.init_agents(args, network, optimizer, OBS_DIM)]

    def turn() -> None:
        kept[0], metrics = update(kept[0], transitions, indices, steps)
        jax.block_until_ready(metrics)

    return turn


def d3rlpy_turns(steps: int) -> Callable[[], None]:
    """A turn of d3rlpy: what its fit does in a step, without its logging."""
    import d3rlpy
    import torch

    class Encoder(torch.nn.Sequential):
        def __init__(self, obs_dim: int):
            first = [torch.nn.Linear(obs_dim, 512), torch.nn.LayerNorm(512), torch.nn.Tanh()]
            others = [torch.nn.Linear(512, 512), torch.nn.ELU(), torch.nn.Linear(512, 256), torch.nn.ELU()]
            super().__init__(*first, *others)

    class Factory(d3rlpy.models.EncoderFactory):
        def create(self, observation_shape):
            return Encoder(observation_shape[0])

        @staticmethod
        def get_type() -> str:
            return "aquacql"

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    generator = np.random.default_rng(0)
    ends = (np.arange(TRANSITIONS) % EPISODE == EPISODE - 1).astype(np.float32)
    observations = generator.normal(size=(TRANSITIONS, OBS_DIM)).astype(np.float32)
    actions, rewards = generator.integers(K, size=TRANSITIONS), generator.normal(size=TRANSITIONS).astype(np.float32)
    arrays = (observations, actions, rewards, np.zeros(TRANSITIONS), ends)
    dataset = d3rlpy.dataset.MDPDataset(*arrays, action_space=d3rlpy.ActionSpace.DISCRETE, action_size=K)
    config = d3rlpy.algos.DiscreteCQLConfig(
        learning_rate=1e-4,
        encoder_factory=Factory(),
        batch_size=BATCH,
        gamma=0.995,
        target_update_interval=100,
        alpha=5,
    )
    algorithm = config.create(device="cpu:0")
    algorithm.create_impl((OBS_DIM,), K)

    def turn() -> None:
        for _ in range(steps):
            algorithm.update(dataset.sample_transition_batch(BATCH))

    return turn


def seconds(turn: Callable[[], None]) -> tuple[float, float]:
    """On the wall, and of the processor."""
    wall, processor = time.perf_counter(), time.process_time()
    turn()
    return time.perf_counter() - wall, time.process_time() - processor


def serve(steps: int) -> None:
    """The child process in d3rlpy's environment: a turn for every line that comes in."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # d3rlpy prints there
    turn = d3rlpy_turns(steps)
    for _ in sys.stdin:
        print(*seconds(turn), file=out, flush=True)


def ask(python: str, steps: int) -> Iterator[tuple[float, float]]:
    command = [python, __file__, "--serve", str(steps)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with subprocess.Popen(command, **pipes) as child:
        while True:
            child.stdin.write("turn\n")
            child.stdin.flush()
            wall, processor = map(float, child.stdout.readline().split())
            yield wall, processor


def main() -> None:
    import tyro

    options = tyro.cli(Options, description=__doc__)
    sides: dict[str, tuple[int, Callable[[], tuple[float, float]]]] = {}
    for n in options.num_seeds:
        turn = our_turns(n, options.steps)
        sides[f"aquacql.py, {n} seed{'s' * (n > 1)}"] = n, lambda turn=turn: seconds(turn)
    if options.d3rlpy_python:
        answers = ask(options.d3rlpy_python, options.steps)
        sides["d3rlpy DiscreteCQL"] = 1, lambda: next(answers)
    times = {name: [] for name in sides}
    for _ in range(1 + options.turns):
        for name, (_, side) in sides.items():
            times[name].append(side())
    print(f"{len(os.sched_getaffinity(0))} cores, {options.turns} turns of {options.steps} gradient steps, medians")
    speeds = {}
    for name, (seeds, _) in sides.items():
        # The first turn is the warm-up, with the compilation.
        wall, processor = np.median(times[name][1:], axis=0) / (options.steps * seeds)
        speeds[name] = 1 / wall, 1 / processor
        print(f"{name:20} {1 / wall:7.1f} steps/s   {1e3 * processor:6.2f} ms of processor time a step")
    if options.d3rlpy_python:
        ours, theirs = (np.array(speeds[name]) for name in (next(iter(speeds)), "d3rlpy DiscreteCQL"))
        wall, processor = ours / theirs
        print(f"ratio {wall:.2f} by the clock, {processor:.2f} by processor time")


if __name__ == "__main__":
    serve(int(sys.argv[2])) if sys.argv[1:2] == ["--serve"] else main()
