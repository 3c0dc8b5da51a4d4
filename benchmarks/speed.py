"""How fast AQuaDQN is on this machine, part by part and as a whole, in one run.

    python benchmarks/speed.py [--env-id AdroitHandDoor-v1] [--steps 6000]

Prints milliseconds per environment step, policy call, update and candidate step, each alone; then the training loop's
milliseconds per step, its ratio to the sum of its parts (our limit: 1.10), the update's GFLOP/s against the machine's
measured GEMM peak (our aim: 0.75) beside what its matrix products reach alone, the cost of a checkpoint with a full
replay (our limit: 2 percent), and the peak memory. Fails if anything is compiled after warm-up.
"""

import contextlib
import functools
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import aquadqn
from aquadqn import STEPS_PER_CALL, Replay, Transition


@dataclass
class Options:
    env_id: str = "AdroitHandDoor-v1"
    steps: int = 6000
    """environment steps of the measured training loop, at least 3000"""


def milliseconds(call: Callable[[], object], repeats: int = 30, per_call: int = 1) -> float:
    """Median time of one of the `per_call` things that a call does."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times)) / per_call


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def square_products() -> list[tuple[Callable[[], jax.Array], float]]:
    """Large matrix products, each with its GFLOP: the fastest of them is the machine's peak."""
    product = jax.jit(lambda a: a @ a)
    return [(functools.partial(product, jnp.ones((n, n))), 2e-9 * n**3) for n in (512, 1024, 2048)]


def make_products_alone(obs_dim: int, num_actions: int, batch_size: int) -> Callable[[], jax.Array]:
    """The matrix products of STEPS_PER_CALL updates alone: what an update could be at best with these shapes.

    The target network reads s and s' at once; the online network reads s and is differentiated."""
    layers = [obs_dim, 512, 512, 256, num_actions]
    weights = [jnp.full(shape, 0.01) for shape in zip(layers, layers[1:])]

    @jax.jit
    def products(weights: list[jax.Array]) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            x = (
                jnp.ones((2 * batch_size, obs_dim)) + carry
            )  # so that no iteration is like the one before
            for weight in weights:
                x = x @ weight
            total, inputs = x.sum(), [jnp.ones((batch_size, obs_dim)) + carry]
            for weight in weights:
                inputs.append(inputs[-1] @ weight)
            gradient = inputs.pop()
            for weight, x in zip(weights[::-1], inputs[::-1]):
                total += (x.T @ gradient).sum()
                gradient = gradient @ weight.T if x is not inputs[0] else gradient
            return total * 1e-9, None

        return jax.lax.scan(step, jnp.zeros(()), None, length=STEPS_PER_CALL)[0]

    return lambda: products(weights)


def make_adam_alone(params: object, learning_rate: float) -> Callable[[], object]:
    """Adam's step for the Q-network and nothing else, STEPS_PER_CALL times."""
    optimizer = optax.adam(learning_rate)

    def steps(params: object, state: object, gradient: object) -> tuple[object, object]:
        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            updates, state = optimizer.update(gradient, carry[1])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, state), None, length=STEPS_PER_CALL)[0]

    steps = jax.jit(steps, donate_argnums=(0, 1))
    kept = [jax.tree.map(jnp.copy, params), optimizer.init(params)]

    def call() -> object:
        kept[:] = steps(*kept, params)
        return kept

    return call


class Measured(NamedTuple):
    ms: float  # per update
    gflops: float
    share: float  # of the peak


def against_the_peak(
    calls: dict[str, Callable[[], object]], gflop: float, rounds: int = 40
) -> tuple[float, dict[str, Measured]]:
    """The GEMM peak in GFLOP/s, and how near to it calls come that each do STEPS_PER_CALL times `gflop` of products.

    All are medians over rounds, each of which measures the peak and the calls side by side: the speed of a machine
    wanders, and a ratio of numbers taken a minute apart would wander with it."""
    squares, peaks, times = square_products(), [], {name: [] for name in calls}
    for call in [*calls.values(), *(call for call, _ in squares)]:
        jax.block_until_ready(call())
    for _ in range(rounds):
        peaks.append(max(size / min(seconds(call) for _ in range(3)) for call, size in squares))
        for name, call in calls.items():
            times[name].append(seconds(call) / STEPS_PER_CALL)
    measured = {}
    for name, taken in times.items():
        speeds = gflop / np.array(taken)
        measured[name] = Measured(
            1e3 * np.median(taken), np.median(speeds), np.median(speeds / np.array(peaks))
        )
    return float(np.median(peaks)), measured


def record_actions(
    env: gym.Env, act: Callable[[np.ndarray], np.ndarray], steps: int = 1000
) -> list[np.ndarray]:
    """What the policy does from the first reset on: contacts, and so the time of a step, depend on the actions."""
    actions, observation = [], env.reset(seed=0)[0]
    for _ in range(steps):
        actions.append(act(np.asarray(observation, np.float32)))
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        if terminated or truncated:
            observation = env.reset()[0]
    return actions


def env_step(env: gym.Env, actions: list[np.ndarray]) -> float:
    """Milliseconds of a step, resets included, on the recorded way."""
    env.reset(seed=0)
    start = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return 1e3 * (time.perf_counter() - start) / len(actions)


def update_gflop(args: aquadqn.Args, obs_dim: int) -> float:
    """Matrix products only: the target network at s and s', the online network forward and backward."""
    layers = [obs_dim, 512, 512, 256, args.num_actions]
    weights = sum(a * b for a, b in zip(layers, layers[1:]))
    forward = 2 * args.batch_size * weights
    return 1e-9 * (
        5 * forward - 2 * args.batch_size * layers[0] * layers[1]
    )  # no gradient for the observations


def random_replay(count: int, obs_dim: int, num_actions: int) -> Replay:
    """Episodes of 200 steps that end by truncation."""
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(2, count, obs_dim))
    indices = rng.integers(num_actions, size=count)
    ends = np.arange(count) % 200 == 199
    steps = aquadqn.as_stored(
        Transition(*observations, indices, np.zeros(count), np.zeros(count), ends)
    )
    return Replay(jax.tree.map(jnp.asarray, steps), jnp.asarray(count))


class LoopLog:
    """Stands in for TensorBoard: keeps the speed that the training loop itself reports, and counts compilations."""

    def __init__(self):
        self.speeds, self.compilations, self.compiled_at = [], 0, []
        jax.monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event: str, *_: object, **__: object) -> None:
        self.compilations += event == "/jax/core/compile/backend_compile_duration"

    def flush(self) -> None:
        pass

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if tag == "charts/SPS":
            self.speeds.append(value)
            self.compiled_at.append(self.compilations)


def checkpoint_share(
    args: aquadqn.Args, state: object, row_size: int, loop_ms: float
) -> tuple[float, float]:
    """Milliseconds of a checkpoint, and its share of the time of the steps between two. The replay's size is no matter:
    only new rows are written, here after a file of a full replay's size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay.f32"
        with path.open("wb") as file:
            file.truncate(args.buffer_size * row_size * 4)
        rows = [np.zeros(row_size, np.float32)] * args.checkpoint_every
        start = time.perf_counter()
        aquadqn.append_rows(path, rows)
        aquadqn.save_arrays(Path(folder) / "state.npz", state, step=0)
        ms = 1e3 * (time.perf_counter() - start)
    return ms, ms / (ms + args.checkpoint_every * loop_ms)


def main() -> None:
    options = tyro.cli(Options)
    args = aquadqn.Args(
        env_id=options.env_id, total_timesteps=options.steps, eval_episodes=1, quiet=True
    )
    args.temperature_start = 1.0  # annealed, as a run's default is
    args.eval_every = 10**9
    args.reward = "sparse"
    env = aquadqn.make_env(args)
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    row_size = 2 * obs_dim + 4
    q_network, network = (
        aquadqn.QNetwork(args.num_actions),
        aquadqn.make_candidate_network(args, action_dim),
    )
    q_params = q_network.init(jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    params = network.init(jax.random.PRNGKey(1), jnp.zeros(obs_dim))
    demos = random_replay(6729, obs_dim, args.num_actions)
    replay = random_replay(200_000, obs_dim, args.num_actions)

    policy = aquadqn.make_policy(q_network, network, env.action_space)
    key, observation = jax.random.PRNGKey(2), np.zeros(obs_dim, np.float32)
    optimizer = optax.adam(args.learning_rate)
    average, target = (jax.tree.map(jnp.copy, q_params) for _ in range(2))
    agent = aquadqn.AgentState(
        q_params, average, target, optimizer.init(q_params), jnp.zeros((), jnp.int32), key
    )
    saved = jax.tree.map(np.asarray, agent)  # the updates below give the buffers away
    learn, kept = (
        aquadqn.make_update(q_network, optimizer, args),
        [jax.tree.map(jnp.asarray, saved)],
    )

    def update() -> jax.Array:
        kept[0], metrics = learn(kept[0], replay, demos)
        return metrics

    def act(observation: np.ndarray) -> np.ndarray:
        action, _ = jax.device_get(policy(q_params, params, observation, key, epsilon=0.1)[:2])
        return action

    actions_taken = record_actions(env, act)

    def parts() -> np.ndarray:
        """Milliseconds of an environment step, a policy call and an update."""
        policy_ms = milliseconds(lambda: act(observation), 300)
        return np.array(
            [env_step(env, actions_taken), policy_ms, milliseconds(update, 20, STEPS_PER_CALL)]
        )

    gflop = update_gflop(args, obs_dim)
    products = make_products_alone(obs_dim, args.num_actions, args.batch_size)
    adam = make_adam_alone(q_params, args.learning_rate)
    peak, measured = against_the_peak({"update": update, "products": products, "adam": adam}, gflop)

    candidate_optimizer = optax.adam(args.candidate_learning_rate)
    candidate_update = aquadqn.make_candidate_update(network, candidate_optimizer, args)
    start = jax.tree.map(jnp.copy, params)
    candidate = [
        aquadqn.CandidateState(
            start, candidate_optimizer.init(params), jnp.asarray(0), jax.random.PRNGKey(3)
        )
    ]
    observations, actions = demos.transitions.observation, jnp.zeros((6729, action_dim))

    def candidate_steps() -> jax.Array:
        candidate[0], loss = candidate_update(candidate[0], observations, actions, 50)
        return loss

    candidate_ms = milliseconds(candidate_steps, 8, 50)

    log, parts_before = LoopLog(), parts()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run = aquadqn.AgentRun(args, None)
        run.log = log
        aquadqn.train_agent(args, run, env, network, params, demos)
    loop_ms = 1e3 / float(np.median(log.speeds[1:]))
    assert log.compiled_at[1] == log.compiled_at[-1], "something was compiled after the warm-up"
    env_ms, policy_ms, update_ms = (
        parts_before + parts()
    ) / 2  # on both sides of the loop: the machine's speed wanders
    checkpoint_ms, checkpoint_time = checkpoint_share(args, saved, row_size, loop_ms)

    print(f"environment step   {env_ms:8.3f} ms   ({args.env_id})")
    print(f"policy call        {policy_ms:8.3f} ms")
    print(f"update             {update_ms:8.3f} ms   (batch {args.batch_size})")
    print(
        f"candidate step     {candidate_ms:8.3f} ms   (K {args.num_actions}, batch {args.batch_size})"
    )
    print(f"training loop      {loop_ms:8.3f} ms per step, {1e3 / loop_ms:.0f} steps/s")
    print(
        f"loop / (environment + policy + update)   {loop_ms / (env_ms + policy_ms + update_ms):.3f}   (at most 1.10)"
    )
    print(f"GEMM peak          {peak:8.1f} GFLOP/s")
    for title, name in (("update          ", "update"), ("  products alone", "products")):
        ms, gflops, share = measured[name]
        print(f"{title}   {gflops:8.1f} GFLOP/s, {share:.2f} of the peak, {ms:.2f} ms")
    print(f"  Adam alone       {measured['adam'].ms:8.2f} ms")
    print(
        f"checkpoint         {checkpoint_ms:8.1f} ms, {100 * checkpoint_time:.2f} percent of the time   (under 2)"
    )
    print(f"peak memory        {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:8.0f} MB")
    print("compilations after warm-up: none")


if __name__ == "__main__":
    main()
