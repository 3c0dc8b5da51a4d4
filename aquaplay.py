# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.4.0", "robodesk==1.0.0", "dm_control==1.0.50",
#   "mujoco==3.17.0", "minari[hdf5,hf]==0.5.4", "tyro", "tensorboard", "tensorboardX", "tqdm", "matplotlib", "imageio",
#   "imageio-ffmpeg",
# ]
# ///
"""AQuaPlay: reinforcement learning with play data (section 4.3 of the AQuaDem paper).

Learn K candidate actions per state from somebody playing with everything on a robot's desk, without any task in mind;
then train Munchausen DQN on them, for one task after the other. The bang-bang baselines of the paper are here too.

    python aquaplay.py --task open_slide
    python aquaplay.py --task all --discretization bb3

Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin:
"Continuous Control with Action Quantization from Demonstrations", ICML 2022.
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm

UPDATE_BLOCK = 8  # environment steps, then as many updates in one call (the authors' code: 8 SGD steps per step)
CANDIDATE_BLOCK = 500  # candidate-network steps in one call
START_TEMPERATURE = 0.25  # of the demonstrated actions' variance, unless --temperature-start is given
EVALUATION_SEED = 2**31  # evaluation episode i starts from seed EVALUATION_SEED + i; --seed stays below it
BUNDLED_DEMONSTRATIONS = Path(__file__).resolve().parent / "demos"
PLAY = "aquadem/robodesk/play-v0"  # what `record.py play` records unless told otherwise
BASE_TASKS = (  # the nine of the paper, what --task all goes through
    "open_slide open_drawer push_green stack upright_block_off_table flat_block_in_bin flat_block_in_shelf "
    "lift_upright_block lift_ball"
).split()
MESHES = {"bb2": 2, "bb3": 3, "bb5": 5}  # values per action dimension, from -1 to 1 (appendix)


@dataclasses.dataclass
class Args:
    task: str = "open_slide"
    """a RoboDesk task; all: the nine base tasks one after the other"""
    dataset_id: str | None = None
    """any Minari id with play on this desk; default: aquadem/robodesk/play-v0, recorded first if there is none"""
    num_demos: int | None = None
    """use only the first N episodes of the dataset; default: all"""
    robodesk_rewards: Literal["upstream", "fixed"] = "fixed"
    """upstream: the package's, as in the paper, where "lift" and "off_table" do not reward what they are named after;
    fixed (not the paper's, and the default because success is what we report): they do; see robodesk_env.py"""
    seed: int = 1
    """seed of networks, batches, exploration and environment; equal seeds give bit-identical runs on a CPU"""
    total_timesteps: int = 1_000_000
    """environment steps"""
    eval_every: int = 50_000
    """environment steps between evaluations"""
    eval_episodes: int = 30
    """episodes of an evaluation, greedy, always from the same initial states"""
    exp_name: str | None = None
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}; default: aquaplay, or bb2, ..."""

    discretization: Literal["aquadem", "bb2", "bb3", "bb5"] = "aquadem"
    """aquadem: candidates learned from play; bb2, bb3, bb5: 32, 243 or 3125 fixed actions, a mesh of the box"""
    num_actions: int = 30
    """K, candidate actions per state (a mesh has its own number)"""
    temperature: float = 1e-4
    """T of the soft minimum"""
    temperature_start: float | None = None
    """T at the first step, from where it falls to --temperature in the first half of the training; default: a quarter
    of the demonstrated actions' variance; equal to --temperature: constant, as in the paper"""
    candidate_steps: int = 50_000
    """gradient steps of the candidate network"""
    held_out_episodes: int = 0
    """the last N demonstrations are kept from the candidates, to see how near to unseen actions they come"""
    candidate_learning_rate: float = 1e-3
    """Adam's learning rate for the candidate network"""
    input_dropout: float = 0.1
    """dropout on the observation while training the candidates"""
    hidden_dropout: float = 0.1
    """dropout after every hidden layer while training the candidates"""
    candidates_from: str | None = None
    """run folder whose candidates are used; default: one under runs/ with the same data, settings and seed, if any"""

    batch_size: int = 256
    """batch of both networks"""
    learning_rate: float = 1e-4
    """Adam's learning rate for the Q-network"""
    gamma: float = 0.99
    """discount (the authors' code)"""
    n_step: int = 3
    """length of the multi-step return"""
    epsilon: float = 0.1
    """probability of a uniformly random candidate while training"""
    buffer_size: int = 1_000_000
    """transitions kept in the replay buffer"""
    learning_starts: int = 1_000
    """environment steps before the first update (the authors' code)"""
    ema_decay: float = 0.999
    """the average of the Q-network that is evaluated and kept changes by 1 - decay per update; 0: none, as in the paper
    """
    target_update_period: int = 100
    """updates between copies into the target network (the authors' code)"""
    munchausen_tau: float = 0.03
    """entropy temperature of Munchausen DQN"""
    munchausen_alpha: float = 0.9
    """weight of the log-policy in the reward of Munchausen DQN"""
    munchausen_clip: float = -1e3
    """lower bound of that log-policy term (the authors' code)"""

    checkpoint_every: int = 10_000
    """environment steps between checkpoints, each written at the end of an episode"""
    resume: str | None = None
    """run folder to continue, with its own arguments"""
    evaluate: str | None = None
    """run folder to evaluate instead of training"""
    capture_video: bool = False
    """record videos: of evaluation episodes, and of the candidates along a piece of play"""
    track: bool = False
    """log to Weights & Biases too (if it is installed)"""
    quiet: bool = False
    """no progress bars, only warnings and errors"""

    env_id = property(lambda self: f"RoboDesk-{self.task}")  # in the run folder's name
    candidates = property(lambda self: "learned")  # what the blocks shared with aquadqn.py ask for


class UserError(Exception):
    """One line that says what is wrong and what to do; the program ends with exit code 2."""


class Unavailable(UserError):
    """Data that is neither here nor within reach."""


def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns whatever a library raises into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {' '.join(str(error).split())[:300] or type(error).__name__}") from None


def check_play_args(args: Args) -> None:
    counts = "num_demos num_actions batch_size n_step total_timesteps eval_every eval_episodes buffer_size"
    bounds = dict.fromkeys(f"{counts} target_update_period checkpoint_every".split(), (1, math.inf))
    bounds |= dict.fromkeys(["candidate_steps", "held_out_episodes", "learning_starts"], (0, math.inf))
    bounds |= dict.fromkeys(["epsilon", "gamma"], (0, 1))
    bounds |= dict.fromkeys(["input_dropout", "hidden_dropout"], (0, 0.99))
    bounds |= dict.fromkeys(["temperature", "learning_rate", "candidate_learning_rate", "munchausen_tau"], (1e-9, 1e9))
    bounds |= {
        "munchausen_alpha": (0, 1),
        "ema_decay": (0, 1 - 1e-9),
        "temperature_start": (1e-9, 1e9),
        "munchausen_clip": (-1e9, 0),
    }
    for name, (low, high) in {**bounds, "seed": (0, EVALUATION_SEED - 1)}.items():
        value = getattr(args, name)
        if value is not None:
            require(low <= value <= high, f"--{name.replace('_', '-')} is {value}: give a number from {low} to {high}")


# ------------------------------------------------------------------------------------------------ environment


def make_desk(task: str, rewards: Literal["upstream", "fixed"], render: bool = False) -> gym.Env:
    """A RoboDesk task by its name, with flat observations; robodesk_env.py registers them all."""
    if render and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # a machine without a screen
    installed = importlib.util.find_spec("robodesk")
    require(installed, "RoboDesk is not installed: pip install robodesk==1.0.0 dm_control==1.0.50 mujoco==3.17.0")
    env_id, mode = f"robodesk_env:RoboDesk/{task}-v0", "rgb_array" if render else None
    with explained(f"cannot make the RoboDesk task {task!r}"):
        try:
            env = gym.make(env_id, robodesk_rewards=rewards, render_mode=mode, disable_env_checker=True)
        except gym.error.NameNotFound:
            known = [spec.name for spec in gym.registry.values() if spec.namespace == "RoboDesk"]
            raise UserError(f"RoboDesk has no task {task!r}: choose one of {', '.join(known)}") from None
        return gym.wrappers.FlattenObservation(env)


def first_observation(env: gym.Env) -> np.ndarray:
    return np.asarray(env.reset()[0], np.float32)


# -------------------------------------------------------------------------------------------------- play data


class Demonstrations(NamedTuple):
    """All episodes one after the other."""

    observations: np.ndarray  # (N, obs)
    actions: np.ndarray  # (N, action_dim), clipped to the action space
    rewards: np.ndarray  # (N,)
    next_observations: np.ndarray  # (N, obs)
    terminations: np.ndarray  # (N,) true where the task itself ended
    ends: np.ndarray  # (N,) true at the last step of every episode, however it ended


def open_dataset(dataset_id: str) -> Any:
    """A Minari dataset: bundled, on disk, or else downloaded."""
    import minari

    well_formed = re.fullmatch(r"([\w.-]+/)*[\w.-]+-v\d+", dataset_id)
    require(well_formed, f"{dataset_id!r} is not a Minari id: give one like D4RL/door/human-v2")
    bundled = BUNDLED_DEMONSTRATIONS / dataset_id / "data"
    with explained(f"cannot read dataset {dataset_id!r}"):
        try:
            return minari.MinariDataset(bundled) if bundled.exists() else minari.load_dataset(dataset_id)
        except FileNotFoundError:
            print(f"{dataset_id} is not on this machine: fetching it from the Minari hub ...", file=sys.stderr)
    try:
        return minari.load_dataset(dataset_id, download=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        advice = "check the id and the network, or name another with --dataset-id"
        raise Unavailable(f"cannot download dataset {dataset_id!r} ({reason}): {advice}") from None


def flatten_observations(space: gym.Space, observations: Any) -> np.ndarray:
    """A whole episode of observations as (T, obs), in the order of gymnasium's FlattenObservation."""
    parts = [observations[key] for key in space] if isinstance(space, gym.spaces.Dict) else [observations]
    return np.concatenate([np.asarray(part, np.float32).reshape(len(part), -1) for part in parts], axis=1)


def load_demonstrations(
    dataset_id: str, env: gym.Env, sparse: bool = True, num_demos: int | None = None
) -> Demonstrations:
    """Minari episodes as arrays, checked against the environment; the reward is the environment's (see make_env)."""
    dataset, box, episodes = open_dataset(dataset_id), env.action_space, []
    with explained(f"cannot read dataset {dataset_id!r}"):
        for episode in dataset.iterate_episodes(range(min(dataset.total_episodes, num_demos or sys.maxsize))):
            observations = flatten_observations(env.env.observation_space, episode.observations)
            steps, rewards = len(episode.actions), np.asarray(episode.rewards, np.float32)
            if sparse:
                missing = f"dataset {dataset_id!r}: field infos has no 'success' for a sparse reward: use --reward env"
                require("success" in (episode.infos or {}), missing)
                # One entry more than steps is the reset's.
                rewards = np.asarray(episode.infos["success"], np.float32).reshape(-1)[-steps:]
            for field, array, shape in (
                ("observations", observations, (steps + 1, *env.observation_space.shape)),
                ("actions", np.asarray(episode.actions), (steps, *box.shape)),
                ("rewards", rewards, (steps,)),
            ):
                wrong = f"dataset {dataset_id!r}: field {field} has shape {array.shape}, {env.spec.id} needs {shape}"
                require(array.shape == shape, wrong)
                bad = f"dataset {dataset_id!r}: field {field} of shape {shape} holds NaN or infinite values"
                require(np.isfinite(array).all(), bad)
            actions = np.clip(np.asarray(episode.actions, np.float32), box.low, box.high)
            terminations, ends = np.asarray(episode.terminations, bool), np.arange(steps) == steps - 1
            episodes.append((observations[:-1], actions, rewards, observations[1:], terminations, ends))
    empty = f"dataset {dataset_id!r} holds no steps: choose another with --dataset-id"
    require(sum(len(episode[1]) for episode in episodes), empty)
    return Demonstrations(*map(np.concatenate, zip(*episodes)))


# --------------------------------------------------------------------------------------------------- networks


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel. JAX's own gradient of the kernel can come out transposed, and Adam then reads it across the memory:
    with this one a step of the candidates takes a sixth less time on a CPU."""
    return x @ kernel


def product_gradients(inputs: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = inputs
    return gradient @ kernel.T, x.reshape(-1, x.shape[-1]).T @ gradient.reshape(-1, gradient.shape[-1])


product.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), product_gradients)


def dense(width: int, init: Callable) -> nn.Dense:
    return nn.Dense(width, kernel_init=init, dot_general=lambda x, kernel, *_, **__: product(x, kernel))


class CandidateNetwork(nn.Module):
    """Psi of equation 1: (..., obs) -> (..., K, action_dim). A shared torso, then one small MLP per candidate."""

    num_actions: int
    action_dim: int
    torso: Sequence[int] = (256,)
    head: Sequence[int] = (256,)
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0

    @nn.compact
    def __call__(self, observations: jax.Array, train: bool = False) -> jax.Array:
        batch_dims = tuple(range(observations.ndim - 1))

        def dropout(rate: float, x: jax.Array) -> jax.Array:
            # One mask for the whole batch, as in the authors' code: same expected loss, hardly any random numbers.
            return nn.Dropout(rate, broadcast_dims=batch_dims, deterministic=not train)(x)

        x = dropout(self.input_dropout, observations)
        for width in self.torso:
            x = nn.relu(dense(width, nn.initializers.xavier_uniform())(x))
            x = dropout(self.hidden_dropout, x)
        for layer, width in enumerate([*self.head, self.action_dim]):
            # The first layer of all heads reads the same x, so it is one plain matmul; the others are batched over k.
            first, fan_in, heads = layer == 0, x.shape[-1], self.num_actions
            xavier = nn.initializers.variance_scaling(
                1.0, "fan_avg", "uniform", in_axis=0 if first else 1, out_axis=2, batch_axis=1 if first else 0
            )
            shape = (fan_in, heads, width) if first else (heads, fan_in, width)
            kernel = self.param(f"head_{layer}_kernel", xavier, shape)
            bias = self.param(f"head_{layer}_bias", nn.initializers.zeros, (heads, width))
            if first:
                x = product(x, kernel.reshape(fan_in, -1)).reshape(*x.shape[:-1], heads, width) + bias
            else:
                x = jnp.einsum("...ki,kio->...ko", x, kernel) + bias
            if layer < len(self.head):
                x = dropout(self.hidden_dropout, nn.relu(x))
        return x


class FixedCandidates(nn.Module):
    """The K-means ablation: the same K actions in every state."""

    num_actions: int
    action_dim: int

    @nn.compact
    def __call__(self, observations: jax.Array, train: bool = False) -> jax.Array:
        actions = self.param("actions", nn.initializers.zeros, (self.num_actions, self.action_dim))
        return jnp.broadcast_to(actions, (*observations.shape[:-1], *actions.shape))


def bang_bang_actions(values: int, action_dim: int) -> np.ndarray:
    """The baselines' mesh: every combination of evenly spaced values from -1 to 1. (values^action_dim, action_dim)."""
    return np.array(list(itertools.product(np.linspace(-1, 1, values), repeat=action_dim)), np.float32)


def elu(x: jax.Array) -> jax.Array:
    """nn.elu with exp in place of expm1, which takes twice as long on a CPU."""
    return jnp.where(x > 0, x, jnp.exp(jnp.minimum(x, 0.0)) - 1.0)


class QNetwork(nn.Module):
    """(..., obs) -> (..., K): Acme's LayerNorm MLP, which the paper names."""

    num_actions: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> jax.Array:
        init = nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")
        x = nn.tanh(nn.LayerNorm()(dense(512, init)(observations)))
        x = elu(dense(512, init)(x))
        x = elu(dense(256, init)(x))
        return dense(self.num_actions, init)(x)


# ----------------------------------------------------------------------------------------- losses and targets


def soft_min_loss(candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """Equation 1 in the form f_T of appendix B. candidates (B, K, D), actions (B, D)."""
    distances = jnp.sum((candidates - actions[:, None, :]) ** 2, axis=-1)  # (B, K)
    log_mean = jax.nn.logsumexp(-distances / temperature, axis=-1) - jnp.log(candidates.shape[1])
    return jnp.mean(-temperature * log_mean)


def nearest_candidate(candidates: jax.Array, actions: jax.Array) -> jax.Array:
    """Index of the candidate with the smallest Euclidean distance. (..., K, D), (..., D) -> (...)."""
    return jnp.argmin(jnp.sum((candidates - actions[..., None, :]) ** 2, axis=-1), axis=-1)


def munchausen_target(
    q_target_s: jax.Array,  # (B, K) target network at s
    q_target_next: jax.Array,  # (B, K) target network at the bootstrap state
    action: jax.Array,  # (B,)
    reward: jax.Array,  # (B,) n-step return
    discount: jax.Array,  # (B,) gamma^n, 0 after a termination
    tau: float,
    alpha: float,
    clip: float,
) -> jax.Array:
    """Munchausen DQN (Vieillard et al. 2020): r + alpha [tau log pi(a|s)] + discount * soft value of the next state."""
    log_policy = jnp.take_along_axis(jax.nn.log_softmax(q_target_s / tau), action[:, None], axis=1)[:, 0]
    soft_value = tau * jax.nn.logsumexp(q_target_next / tau, axis=1)  # = sum_a pi (q - tau log pi)
    return reward + alpha * jnp.clip(tau * log_policy, clip, 0.0) + discount * soft_value


def n_step_returns(
    rewards: jax.Array, terminations: jax.Array, ends: jax.Array, gamma: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Windows of n consecutive steps (..., n) -> return, offset of the last step used, discount of the bootstrap.

    A window stops at the first end of an episode. A termination does not bootstrap (discount 0); a truncation does,
    from the observation after the last step used.
    """
    n = rewards.shape[-1]
    ended_before = jnp.cumsum(ends, axis=-1) - ends > 0
    used = 1.0 - ended_before
    returns = jnp.sum(rewards * used * gamma ** jnp.arange(n), axis=-1)
    last = jnp.sum(used, axis=-1).astype(jnp.int32) - 1
    terminated = jnp.take_along_axis(terminations, last[..., None], axis=-1)[..., 0]
    return returns, last, gamma ** (last + 1.0) * (1.0 - terminated)


# ----------------------------------------------------------------------------------------------------- replay


class Replay(NamedTuple):
    """A ring of transitions on the device. A row: observation | next observation | index, reward, terminated, ended."""

    rows: jax.Array  # (capacity, 2 * obs + 4) float32
    count: jax.Array  # transitions ever stored; the newest is row (count - 1) % capacity


class Batch(NamedTuple):
    observations: jax.Array  # (B, obs)
    actions: jax.Array  # (B,) candidate indices
    returns: jax.Array  # (B,) n-step
    next_observations: jax.Array  # (B, obs) the bootstrap state
    discounts: jax.Array  # (B,)


def pack_rows(observations, next_observations, indices, rewards, terminations, ends) -> np.ndarray:
    """One transition (or many) as rows of a replay."""
    scalars = np.stack([indices, rewards, terminations, ends], axis=-1)
    return np.concatenate([observations, next_observations, scalars], axis=-1, dtype=np.float32, casting="same_kind")


def store(replay: Replay, rows: jax.Array) -> Replay:
    where = (replay.count + jnp.arange(len(rows))) % len(replay.rows)
    return Replay(replay.rows.at[where].set(rows), replay.count + len(rows))


def sample(replay: Replay, key: jax.Array, batch_size: int, n_step: int, gamma: float) -> Batch:
    """Uniform over stored transitions; a window that meets the newest one stops there, as at an episode's end."""
    capacity, obs_dim = len(replay.rows), (replay.rows.shape[1] - 4) // 2
    first = jax.random.randint(key, (batch_size,), 0, jnp.minimum(replay.count, capacity))
    offsets = jnp.arange(n_step)
    windows = replay.rows[(first[:, None] + offsets) % capacity]  # (B, n, row)
    steps_to_newest = (replay.count - 1 - first) % capacity
    rewards, terminations, ends = jnp.moveaxis(windows[..., -3:], -1, 0)  # (B, n) each
    ends = jnp.maximum(ends, offsets == steps_to_newest[:, None])
    returns, last, discounts = n_step_returns(rewards, terminations, ends, gamma)
    next_observations = windows[jnp.arange(batch_size), last, obs_dim : 2 * obs_dim]
    indices = windows[:, 0, -4].astype(jnp.int32)
    return Batch(windows[:, 0, :obs_dim], indices, returns, next_observations, discounts)


# ---------------------------------------------------------------------------------------------------- updates


class CandidateState(NamedTuple):
    params: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


class AgentState(NamedTuple):
    params: Any
    average_params: Any  # None without --ema-decay
    target_params: Any
    opt_state: Any
    updates: jax.Array
    key: jax.Array


def averaged(average: Any, params: Any, decay: float) -> Any:
    """An exponential moving average of the Q-network: its greedy policy flickers less (not in the paper)."""
    return optax.incremental_update(params, average, 1.0 - decay) if decay else None


def evaluated_params(agent: AgentState) -> Any:
    return agent.params if agent.average_params is None else agent.average_params


def make_candidate_network(args: Args, action_dim: int) -> nn.Module:
    if args.candidates == "kmeans":
        return FixedCandidates(args.num_actions, action_dim)
    return CandidateNetwork(
        args.num_actions, action_dim, input_dropout=args.input_dropout, hidden_dropout=args.hidden_dropout
    )


def start_temperature(args: Args, actions: np.ndarray) -> float:
    """T is compared with squared distances between actions, so it starts at a fraction of their variance."""
    if args.temperature_start is not None:
        return args.temperature_start
    return max(args.temperature, START_TEMPERATURE * float(np.sum(np.var(actions, axis=0))))


def annealed_temperature(step: jax.Array, start: float, end: float, steps: int) -> jax.Array | float:
    """T falls geometrically from start to end over the first half of the steps, then stays (not in the paper).

    With a constant small T, a candidate that is never the nearest one gets no gradient and stays as it was initialised.
    """
    if start == end:
        return end
    return start * (end / start) ** jnp.minimum(step / (0.5 * steps), 1.0)


def make_candidate_update(network: nn.Module, optimizer: optax.GradientTransformation, args: Args) -> Callable:
    """`steps` gradient steps on equation 1 in one call; returns the mean loss."""

    def loss_fn(params: Any, observations: jax.Array, actions: jax.Array, step: jax.Array, key: jax.Array) -> jax.Array:
        candidates = network.apply(params, observations, train=True, rngs={"dropout": key})
        temperature = annealed_temperature(step, args.temperature_start, args.temperature, args.candidate_steps)
        return soft_min_loss(candidates, actions, temperature)

    def update(state: CandidateState, observations: jax.Array, actions: jax.Array, steps: int):
        def step(state: CandidateState, _: None) -> tuple[CandidateState, jax.Array]:
            key, batch_key, dropout_key = jax.random.split(state.key, 3)
            batch = jax.random.randint(batch_key, (args.batch_size,), 0, len(observations))
            pairs = observations[batch], actions[batch]
            loss, grads = jax.value_and_grad(loss_fn)(state.params, *pairs, state.step, dropout_key)
            updates, opt_state = optimizer.update(grads, state.opt_state)
            return CandidateState(optax.apply_updates(state.params, updates), opt_state, state.step + 1, key), loss

        state, losses = jax.lax.scan(step, state, None, length=steps)
        return state, jnp.mean(losses)

    return jax.jit(update, static_argnums=3, donate_argnums=0)


def make_munchausen_update(network: nn.Module, optimizer: optax.GradientTransformation, args: Args) -> Callable:
    """UPDATE_BLOCK Q-network updates in one call, from the agent's own replay only: play has no rewards."""

    def targets(state: AgentState, batch: Batch) -> jax.Array:
        both = jnp.concatenate([batch.observations, batch.next_observations])
        q_s, q_next = jnp.split(network.apply(state.target_params, both), 2)
        tau, alpha, clip = args.munchausen_tau, args.munchausen_alpha, args.munchausen_clip
        return munchausen_target(q_s, q_next, batch.actions, batch.returns, batch.discounts, tau, alpha, clip)

    def loss_fn(params: Any, batch: Batch, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = jnp.take_along_axis(network.apply(params, batch.observations), batch.actions[:, None], axis=1)[:, 0]
        return jnp.mean(optax.huber_loss(q, target)), jnp.mean(q)

    def update(state: AgentState, replay: Replay) -> tuple[AgentState, jax.Array]:
        def step(state: AgentState, _: None) -> tuple[AgentState, jax.Array]:
            key, batch_key = jax.random.split(state.key)
            batch = sample(replay, batch_key, args.batch_size, args.n_step, args.gamma)
            (loss, q), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch, targets(state, batch))
            updates, opt_state = optimizer.update(grads, state.opt_state)
            params, count = optax.apply_updates(state.params, updates), state.updates + 1
            target_params = optax.periodic_update(params, state.target_params, count, args.target_update_period)
            average = averaged(state.average_params, params, args.ema_decay)
            return AgentState(params, average, target_params, opt_state, count, key), jnp.stack([loss, q])

        state, metrics = jax.lax.scan(step, state, None, length=UPDATE_BLOCK)
        return state, jnp.mean(metrics, axis=0)

    return jax.jit(update, donate_argnums=0)


def make_policy(q_network: nn.Module, candidate_network: nn.Module, box: gym.spaces.Box) -> Callable:
    """Epsilon-greedy, for one observation or a batch. Actions and indices come back in one array: one transfer."""

    def policy(q_params: Any, candidate_params: Any, observations: jax.Array, key: jax.Array, epsilon: float):
        key, coin_key, index_key = jax.random.split(key, 3)
        greedy = jnp.argmax(q_network.apply(q_params, observations), axis=-1)
        explore = jax.random.uniform(coin_key, greedy.shape) < epsilon
        index = jnp.where(explore, jax.random.randint(index_key, greedy.shape, 0, q_network.num_actions), greedy)
        candidates = candidate_network.apply(candidate_params, observations)  # (..., K, D)
        actions = jnp.take_along_axis(candidates, index[..., None, None], axis=-2)[..., 0, :]
        actions = jnp.clip(actions, box.low, box.high)
        return jnp.concatenate([actions, index[..., None].astype(jnp.float32)], axis=-1), key

    return jax.jit(policy, static_argnames="epsilon")


# ------------------------------------------------------------------------------------------------- evaluation


class Evaluation(NamedTuple):
    returns: np.ndarray  # (episodes,)
    lengths: np.ndarray
    successes: np.ndarray  # goal reached at any step; NaN where the environment does not report it
    frames: list[np.ndarray]  # pictures of the environments made for rendering, episode after episode


def evaluate(policy: Callable[[np.ndarray], Any], envs: list[gym.Env]) -> Evaluation:
    """One episode in each environment, side by side, with one policy call per step for all of them."""
    observations = np.stack([env.reset(seed=EVALUATION_SEED + i)[0] for i, env in enumerate(envs)]).astype(np.float32)
    returns, lengths = np.zeros(len(envs)), np.zeros(len(envs), int)
    successes, running = np.full(len(envs), np.nan), np.ones(len(envs), bool)
    frames: list[list[np.ndarray]] = [[] for _ in envs]
    while running.any():
        actions = np.asarray(policy(observations))
        for i in np.flatnonzero(running):
            observation, reward, terminated, truncated, info = envs[i].step(actions[i])
            observations[i] = observation
            returns[i] += reward
            lengths[i] += 1
            if "success" in info:
                successes[i] = np.nanmax([successes[i], bool(info["success"])])
            if envs[i].render_mode == "rgb_array":
                frames[i].append(render(envs[i]))
            running[i] = not (terminated or truncated)
    return Evaluation(returns, lengths, successes, sum(frames, []))


def render(env: gym.Env) -> np.ndarray:
    with explained("cannot render; install libegl1 and set MUJOCO_GL=egl, or libosmesa6 and MUJOCO_GL=osmesa"):
        return env.render()


def write_video(path: Path, frames: list[np.ndarray], fps: int) -> None:
    import imageio.v2 as imageio

    path.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX does not like the fork that starts ffmpeg
        imageio.mimwrite(path, frames, fps=fps, macro_block_size=8, quality=7)


def wilson_interval(successes: np.ndarray, z: float = 1.96) -> tuple[float, float]:
    """95 percent confidence interval of a success rate."""
    n, p = len(successes), float(np.mean(successes))
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def candidate_picture(candidates: np.ndarray, actions: np.ndarray, steps: Sequence[int], box: Any) -> np.ndarray:
    """Appendix C, a panel per step: action dimension on x, value on y, one colour per candidate, the demonstration's
    action in black. candidates (P, K, D), actions (P, D)."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(len(steps), 3)
    rows = -(-len(steps) // columns)
    figure = Figure(figsize=(3 + 4 * columns, 1 + 3 * rows), dpi=80, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colours = matplotlib.colormaps["turbo"](np.linspace(0, 1, candidates.shape[1]))
    for panel, (axis, step) in enumerate(zip(axes.flat, steps)):
        for k, candidate in enumerate(candidates[panel]):
            axis.plot(candidate, "o-", color=colours[k], lw=1, ms=3, alpha=0.8, label=f"candidate {k}")
        axis.plot(actions[panel], "o-", color="black", lw=1.5, ms=4, label="demonstrated")
        axis.set(title=f"step {step}", xlabel="action dimension", ylabel="value")
        if np.isfinite(box.low).all() and np.isfinite(box.high).all():
            axis.set_ylim(float(box.low.min()) - 0.3, float(box.high.max()) + 0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="rgba")
    width, height = figure.canvas.get_width_height()
    return np.frombuffer(picture.getvalue(), np.uint8).reshape(height, width, 4)[..., :3]


# -------------------------------------------------------------------------------------------------- run folder


def save_arrays(path: Path, tree: Any, **meta: Any) -> None:
    """Atomic: the old file stays until the new one is whole on disk. Arrays and JSON only, never a pickle."""
    arrays = {f"leaf_{i:03d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    unfinished = path.with_suffix(".partial")
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_arrays(path: Path, template: Any) -> tuple[Any, dict]:
    """The inverse of save_arrays, for a tree of the template's structure, shapes and types."""
    leaves, structure = jax.tree.flatten(template)
    require(path.exists(), f"{path} does not exist: name a run folder that has it")
    with explained(f"{path} is not a whole checkpoint"), np.load(path, allow_pickle=False) as file:
        arrays = [file[f"leaf_{i:03d}"] for i in range(len(leaves))]
        meta = json.loads(file["meta"].tobytes())
    for array, leaf in zip(arrays, leaves):
        wrong = f"{path} holds {array.dtype}{array.shape} where {leaf.dtype}{leaf.shape} is needed"
        require(array.shape == leaf.shape and array.dtype == leaf.dtype, wrong)
    return jax.tree.unflatten(structure, [jnp.asarray(array) for array in arrays]), meta


def open_run_folder(args: Args, warning: str | None) -> tuple[Path, str | None]:
    """The folder of a new run, or of the one to resume: it keeps its warning, and from now on the present arguments, so
    that a longer run that is interrupted again goes on to its new end."""
    if args.track:
        with explained("--track needs Weights & Biases (pip install wandb)"):
            import wandb  # noqa: F401
    if args.resume:
        run = Path(args.resume)
        warning = json.loads((run / "args.json").read_text()).get("warning")
    else:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        run = Path("runs") / re.sub(r"[^\w.-]", "_", name)
        with explained(f"cannot make the run folder {run}"):
            run.mkdir(parents=True)
    partial = run / "args.partial"
    partial.write_text(json.dumps({**dataclasses.asdict(args), "resume": None, "warning": warning}, indent=2))
    partial.replace(run / "args.json")
    return run, warning


def load_args(run: Path) -> Args:
    with explained(f"{run} is not a run folder of this script"):
        saved = json.loads((run / "args.json").read_text())
        return Args(**{field.name: saved[field.name] for field in dataclasses.fields(Args)})


def load_candidates(run: Path, network: nn.Module, obs_dim: int) -> Any:
    template = jax.eval_shape(network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    return load_arrays(run / "candidates.npz", template)[0]


def append_rows(path: Path, rows: list[np.ndarray]) -> None:
    """The replay on disk: every transition in order, so that a checkpoint writes only what is new."""
    with path.open("ab") as file:
        file.write(b"".join(row.tobytes() for row in rows))
        file.flush()
        os.fsync(file.fileno())


def restore_rows(path: Path, count: int, row_size: int) -> np.ndarray:
    """The first `count` rows; what an interrupted run appended after its last whole checkpoint is cut off."""
    size = count * row_size * 4
    whole = path.exists() and path.stat().st_size >= size
    require(whole, f"{path} is shorter than its checkpoint says: this run cannot be resumed")
    os.truncate(path, size)
    return np.memmap(path, np.float32, "r", shape=(count, row_size))


def write_evaluation(path: Path, step: int, result: Evaluation, log: Any) -> None:
    """evaluations.csv and TensorBoard. Rows from this step on are what an interrupted run had written: replaced."""
    means = [float(np.mean(x)) for x in (result.successes, result.returns, result.lengths)]
    for tag, mean in zip(("success_rate", "episodic_return", "episodic_length"), means):
        if math.isfinite(mean):  # an environment need not report success
            log.add_scalar(f"eval/{tag}", mean, step)
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    kept = [line for line in lines if int(line.split(",")[0]) < step]
    row = ",".join(map(str, [step, *means, len(result.returns)]))
    header = "step,success_rate,episodic_return,episodic_length,episodes"
    path.with_suffix(".partial").write_text("\n".join([header, *kept, row]) + "\n")
    path.with_suffix(".partial").replace(path)


def catch_signals() -> list[int]:
    """Ctrl-C and SIGTERM end up in this list and ask for a stop at the next checkpoint; a second one stops at once."""
    asked: list[int] = []

    def handle(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        print("\nstopping at the next checkpoint; once more to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return asked


def exit_if_asked(signals: list[int], run: Path) -> None:
    if signals:
        print(f"\nstopped; continue with: python {Path(__file__).name} --resume {run}", file=sys.stderr)
        sys.exit(128 + signals[0])


def make_log(args: Args, run: Path, warning: str | None) -> Any:
    """The TensorBoard writer. What a resumed run logs again, TensorBoard itself replaces."""
    from tensorboardX import SummaryWriter

    if args.track:
        import wandb

        with explained("Weights & Biases does not start: run without --track"):
            wandb.init(project="aquadem", name=run.name, config=dataclasses.asdict(args), sync_tensorboard=True)
    log = SummaryWriter(str(run))
    table = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
    log.add_text("arguments", f"|argument|value|\n|-|-|\n{table}")
    if warning:
        log.add_text("warning", warning)
        print("\n".join(["!" * 100, warning, "!" * 100]), file=sys.stderr)
    return log


# --------------------------------------------------------------------------------------------------- training


def train_candidates(args: Args, run: Path, network: nn.Module, demos: Demonstrations, log: Any, signals: list) -> Any:
    """The first stage: the parameters of the candidates, trained or otherwise had, and kept in candidates.npz."""
    path, unfinished = run / "candidates.npz", run / "candidates_training.npz"
    if path.exists():
        return load_candidates(run, network, demos.observations.shape[1])
    key, init_key = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(args.seed), 0))
    params = network.init(init_key, demos.observations[:1])
    if args.candidates_from:
        params = load_candidates(Path(args.candidates_from), network, demos.observations.shape[1])
    elif args.candidates == "kmeans":
        from scipy.cluster.vq import kmeans2

        centres, _ = kmeans2(demos.actions, args.num_actions, iter=100, minit="++", rng=args.seed)
        params = {"params": {"actions": jnp.asarray(centres)}}
    elif args.candidates == "learned":
        optimizer = optax.adam(args.candidate_learning_rate)
        state, step = CandidateState(params, optimizer.init(params), jnp.zeros((), jnp.int32), key), 0
        if unfinished.exists():
            state, meta = load_arrays(unfinished, state)
            step = meta["step"]
        update = make_candidate_update(network, optimizer, args)
        seen = learned_from(args, demos)
        observations, actions = jnp.asarray(demos.observations[:seen]), jnp.asarray(demos.actions[:seen])
        progress = tqdm(desc="candidates", total=args.candidate_steps, initial=step, unit="step", disable=args.quiet)
        while step < args.candidate_steps:
            block = min(CANDIDATE_BLOCK, args.candidate_steps - step)
            state, loss = update(state, observations, actions, block)
            step += block
            if not np.isfinite(loss):
                sys.exit(f"error: the candidate loss is {loss} at step {step}: lower --candidate-learning-rate")
            log.add_scalar("candidates/loss", float(loss), step)
            temperature = annealed_temperature(step, args.temperature_start, args.temperature, args.candidate_steps)
            log.add_scalar("candidates/temperature", float(temperature), step)
            progress.set_postfix(loss=f"{loss:.5f}", refresh=False)
            progress.update(block)
            if step % (20 * CANDIDATE_BLOCK) == 0 or signals:
                log.flush()  # a kill loses what is not written, and a resumed run does not log it again
                save_arrays(unfinished, state, step=step)
                exit_if_asked(signals, run)
        progress.close()
        params = state.params
    save_arrays(path, params)
    unfinished.unlink(missing_ok=True)
    return params


def learned_from(args: Args, demos: Demonstrations) -> int:
    """How many of the demonstrated steps the candidates learn from: all but those of the last, held-out episodes."""
    starts = np.concatenate([[0], np.flatnonzero(demos.ends) + 1])  # of every episode, then the end of the data
    require(args.held_out_episodes < len(starts) - 1, "--held-out-episodes leaves no demonstration: give a lower one")
    return int(starts[len(starts) - 1 - args.held_out_episodes])


def discretise(args: Args, network: nn.Module, params: Any, demos: Demonstrations, log: Any) -> np.ndarray:
    """Every demonstrated action as the index of its nearest candidate, computed once; and a report on how near."""

    @jax.jit
    def nearest(observations: jax.Array, actions: jax.Array) -> tuple[jax.Array, jax.Array]:
        candidates = network.apply(params, observations)
        index = nearest_candidate(candidates, actions)
        return index, jnp.linalg.norm(candidates[jnp.arange(len(index)), index] - actions, axis=-1)

    chunks = [slice(i, i + 4096) for i in range(0, len(demos.actions), 4096)]  # bounds the memory of (chunk, K, D)
    pairs = [nearest(demos.observations[chunk], demos.actions[chunk]) for chunk in chunks]
    indices, distances = (np.concatenate(arrays) for arrays in zip(*pairs))
    shares = np.bincount(indices, minlength=args.num_actions) / len(indices)
    used = shares[shares > 0]
    log.add_scalar("candidates/in_use", len(used), 0)
    log.add_scalar("candidates/perplexity", float(np.exp(-np.sum(used * np.log(used)))), 0)
    log.add_scalar("candidates/nearest_distance", float(distances.mean()), 0)
    if args.held_out_episodes:
        unseen = learned_from(args, demos)
        log.add_scalar("candidates/held_out_distance", float(distances[unseen:].mean()), 0)
    log.add_histogram("candidates/usage", indices, 0, bins=np.arange(args.num_actions + 1) - 0.5)
    return indices


def picture_candidates(
    args: Args, run: Path, network: nn.Module, params: Any, demos: Demonstrations, box: Any, log: Any
) -> None:
    """The candidates along the first demonstration (appendix C), as a picture and with --capture-video as a video."""
    import imageio.v2 as imageio

    length = int(np.argmax(demos.ends)) + 1
    candidates, actions = np.asarray(network.apply(params, demos.observations[:length])), demos.actions[:length]
    steps = np.unique(np.linspace(0, length - 1, 6).astype(int))
    picture = candidate_picture(candidates[steps], actions[steps], steps, box)
    imageio.imwrite(run / "candidates.png", picture)
    log.add_image("candidates/along_a_demonstration", picture, 0, dataformats="HWC")
    if args.capture_video:
        frames = [candidate_picture(candidates[[t]], actions[[t]], [t], box) for t in range(length)]
        write_video(run / "videos" / "candidates.mp4", frames, fps=25)


def fingerprint(args: Args, demos: Demonstrations) -> str:
    """Of all that trained candidates depend on: the play and the settings."""
    names = (
        "num_actions temperature temperature_start candidate_steps held_out_episodes candidate_learning_rate"
        " input_dropout hidden_dropout batch_size seed"
    )
    digest = hashlib.sha256(json.dumps([getattr(args, name) for name in names.split()]).encode())
    digest.update(demos.observations.tobytes())
    digest.update(demos.actions.tobytes())
    return digest.hexdigest()


def find_candidates(mark: str) -> str | None:
    """A run folder here whose candidates were trained on the same play with the same settings."""
    for path in sorted(Path("runs").glob("*/candidates.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(path.read_text())["fingerprint"] == mark and (path.parent / "candidates.npz").exists():
                return str(path.parent)
    return None


def train_play_agent(
    args: Args, run: Path, env: gym.Env, network: nn.Module, candidate_params: Any, log: Any, signals: list
) -> Evaluation:
    """The second stage: epsilon-greedy steps in blocks, then as many updates in one call. The last evaluation."""
    obs_dim, row_size = env.observation_space.shape[0], 2 * env.observation_space.shape[0] + 4
    q_network, optimizer = QNetwork(args.num_actions), optax.adam(args.learning_rate)
    key, act_key, init_key = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(args.seed), 1), 3)
    params = q_network.init(init_key, jnp.zeros(obs_dim))
    average, target = (jax.tree.map(jnp.copy, params) for _ in range(2))  # an update gives its buffers away
    average = average if args.ema_decay else None
    agent = AgentState(params, average, target, optimizer.init(params), jnp.zeros((), jnp.int32), key)
    capacity = min(args.buffer_size, -(-args.total_timesteps // UPDATE_BLOCK) * UPDATE_BLOCK)
    rows, step, block = np.zeros((capacity, row_size), np.float32), 0, []  # block: steps not yet in the replay
    env.reset(seed=args.seed)
    if (run / "state.npz").exists():
        (agent, act_key), meta = load_arrays(run / "state.npz", (agent, act_key))
        env.unwrapped.np_random.bit_generator.state, step = meta["env_generator"], meta["step"]
        past, stored = restore_rows(run / "replay.f32", step, row_size), step - step % UPDATE_BLOCK
        kept = np.arange(max(0, stored - capacity), stored)
        rows[kept % capacity], block = past[kept], list(np.array(past[stored:]))
    else:
        (run / "replay.f32").unlink(missing_ok=True)  # of a run that was killed before its first checkpoint was whole
    replay = Replay(jnp.asarray(rows), jnp.asarray(step - len(block), jnp.int32))
    del rows
    policy = make_policy(q_network, network, env.action_space)
    learn, store_rows = make_munchausen_update(q_network, optimizer, args), jax.jit(store, donate_argnums=0)
    rewards, video = args.robodesk_rewards, args.capture_video
    eval_envs = [make_desk(args.task, rewards, video and i == 0) for i in range(args.eval_episodes)]
    progress = tqdm(desc=args.task, total=args.total_timesteps, initial=step, unit="step", disable=args.quiet)
    unsaved, saved_step, logged_step, logged_time = [], step, step, time.perf_counter()
    observation, episode_return, episode_length, success = first_observation(env), 0.0, 0, 0.0

    def greedy(observations: np.ndarray) -> jax.Array:
        return policy(evaluated_params(agent), candidate_params, observations, act_key, epsilon=0.0)[0][:, :-1]

    while True:
        if step % args.eval_every == 0 or step >= args.total_timesteps:
            started = time.perf_counter()
            result = evaluate(greedy, eval_envs)
            save_arrays(run / "agent.npz", evaluated_params(agent), step=step)
            write_evaluation(run / "evaluations.csv", step, result, log)
            summary = {"return": result.returns.mean(), "success": result.successes.mean()}
            progress.set_postfix({name: f"{value:.2f}" for name, value in summary.items()}, refresh=False)
            if result.frames:
                write_video(run / "videos" / f"step_{step}.mp4", result.frames, env.metadata["render_fps"])
            logged_time += time.perf_counter() - started  # SPS is the speed of training alone
        if step >= args.total_timesteps:
            break
        packed, act_key = policy(agent.params, candidate_params, observation, act_key, epsilon=args.epsilon)
        packed = np.asarray(packed)  # the action, then its index
        next_observation, reward, terminated, truncated, info = env.step(packed[:-1])
        row = pack_rows(observation, next_observation, packed[-1], reward, terminated, terminated or truncated)
        block.append(row)
        unsaved.append(row)
        observation, step = np.asarray(next_observation, np.float32), step + 1
        episode_return, episode_length = episode_return + reward, episode_length + 1
        success = max(success, float(info["success"]))
        if len(block) == UPDATE_BLOCK:
            replay, block = store_rows(replay, np.stack(block)), []
            progress.update(UPDATE_BLOCK)
            if step > args.learning_starts:
                agent, metrics = learn(agent, replay)
                loss, q_value = np.asarray(metrics)
                if not np.isfinite(loss):
                    sys.exit(f"error: the Q-loss is {loss} at step {step}: lower --learning-rate")
                if step - logged_step >= 1000:
                    log.add_scalar("losses/q_loss", loss, step)
                    log.add_scalar("losses/q_value", q_value, step)
                    log.add_scalar("charts/SPS", (step - logged_step) / (time.perf_counter() - logged_time), step)
                    logged_step, logged_time = step, time.perf_counter()
        if terminated or truncated:
            log.add_scalar("charts/episodic_return", episode_return, step)
            log.add_scalar("charts/episodic_length", episode_length, step)
            log.add_scalar("charts/success", success, step)
            # An environment can be restored between two episodes only, so save before one more passes the limit.
            if step + episode_length > saved_step + args.checkpoint_every or signals:
                append_rows(run / "replay.f32", unsaved)
                generator = env.unwrapped.np_random.bit_generator.state
                log.flush()  # a kill loses what is not written, and a resumed run does not log it again
                save_arrays(run / "state.npz", (agent, act_key), step=step, env_generator=generator)
                unsaved, saved_step = [], step
                exit_if_asked(signals, run)
            observation, episode_return, episode_length, success = first_observation(env), 0.0, 0, 0.0
    progress.close()
    for eval_env in eval_envs:
        eval_env.close()
    return result


def mark_candidates(args: Args, run: Path, demos: Demonstrations) -> None:
    """Says from what the candidates were trained, to find them again; borrowed ones keep the mark they had."""
    mark, source = run / "candidates.json", Path(args.candidates_from or run) / "candidates.json"
    if args.candidates_from is None:
        mark.write_text(json.dumps({"fingerprint": fingerprint(args, demos)}))
    elif source.exists():
        mark.write_text(source.read_text())


def make_candidates(args: Args, run: Path, demos: Demonstrations | None, box: Any, log: Any, signals: list) -> tuple:
    """The first stage: network and parameters of the candidates, learned from play or a fixed mesh."""
    if args.discretization in MESHES:
        params = {"params": {"actions": jnp.asarray(bang_bang_actions(MESHES[args.discretization], len(box.low)))}}
        save_arrays(run / "candidates.npz", params)
        return FixedCandidates(args.num_actions, len(box.low)), params
    network = make_candidate_network(args, len(box.low))
    params = train_candidates(args, run, network, demos, log, signals)
    mark_candidates(args, run, demos)
    thinned = Demonstrations(*(array[:: 1 + len(array) // 10_000] for array in demos))  # all would take half a minute
    discretise(args, network, params, thinned, log)
    length = min(500, int(np.argmax(demos.ends)) + 1)
    excerpt = Demonstrations(*(array[:length] for array in demos))._replace(ends=np.arange(length) == length - 1)
    picture_candidates(args, run, network, params, excerpt, box, log)
    return network, params


def call_recorder(quiet: bool) -> None:
    """Calls the recorder; what goes wrong there it says itself."""
    recorder = Path(__file__).resolve().parent / "record.py"
    require(recorder.exists(), f"there is no play yet and no {recorder.name} here to record it: give --dataset-id")
    print(f"there is no play yet: recording {PLAY}, once, by python {recorder.name} play", file=sys.stderr)
    command = [sys.executable, str(recorder), "play", "--dataset-id", PLAY]
    done = subprocess.run([*command, "--quiet"] if quiet else command)
    if done.returncode:
        sys.exit(done.returncode)


def load_play(args: Args, env: gym.Env) -> Demonstrations:
    """The play data, without rewards; the default set is recorded if it is not there yet."""
    import minari

    if args.dataset_id is None:
        args.dataset_id = PLAY
        try:
            minari.load_dataset(PLAY)
        except FileNotFoundError:
            call_recorder(args.quiet)
        except Exception:
            pass  # load_demonstrations says what is wrong with it
    return load_demonstrations(args.dataset_id, env, sparse=False, num_demos=args.num_demos)


def train(args: Args) -> tuple[Path, Evaluation]:
    """Whatever can be wrong with the input is found before the run folder is made."""
    check_play_args(args)
    env = make_desk(args.task, args.robodesk_rewards)
    box, demos = env.action_space, None
    if args.discretization in MESHES:
        args.num_actions, args.exp_name = (
            MESHES[args.discretization] ** len(box.low),
            args.exp_name or args.discretization,
        )
    else:
        demos, args.exp_name = load_play(args, env), args.exp_name or "aquaplay"
        args.temperature_start = start_temperature(args, demos.actions)
        learned_from(args, demos)
        if args.candidates_from is None and not args.resume:
            args.candidates_from = find_candidates(fingerprint(args, demos))
            if args.candidates_from and not args.quiet:
                print(f"candidates: the same play and settings were trained before, reusing {args.candidates_from}")
        if args.candidates_from and not args.resume:  # a run has a copy of its own
            load_candidates(
                Path(args.candidates_from), make_candidate_network(args, len(box.low)), len(demos.observations[0])
            )
    signals = catch_signals()
    run, warning = open_run_folder(args, None)
    log = make_log(args, run, warning)
    network, params = make_candidates(args, run, demos, box, log, signals)
    result = train_play_agent(args, run, env, network, params, log, signals)
    log.close()
    if not args.quiet:
        print(f"done; evaluate with: python {Path(__file__).name} --evaluate {run}")
    return run, result


def train_all(args: Args) -> None:
    """The nine base tasks one after the other, then the table of their last evaluations."""
    rows = []
    for task in BASE_TASKS:
        run, result = train(dataclasses.replace(args, task=task))
        rows.append(f"| {task} | {result.returns.mean():.1f} | {result.successes.mean():.2f} | {run} |")
    print("\n".join(["| task | return | success | run |", "|---|---|---|---|", *rows]))


def evaluate_play_run(args: Args) -> None:
    """Prints mean return and success of a run's latest evaluated agent, with 95 percent confidence intervals."""
    check_play_args(args)
    run = Path(args.evaluate)
    saved = load_args(run)
    rewards, video = saved.robodesk_rewards, args.capture_video
    envs = [make_desk(saved.task, rewards, video and i < 3) for i in range(args.eval_episodes)]
    obs_dim, box = envs[0].observation_space.shape[0], envs[0].action_space
    fixed = saved.discretization in MESHES
    network = FixedCandidates(saved.num_actions, len(box.low)) if fixed else make_candidate_network(saved, len(box.low))
    candidate_params, q_network = load_candidates(run, network, obs_dim), QNetwork(saved.num_actions)
    template = jax.eval_shape(q_network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    q_params, meta = load_arrays(run / "agent.npz", template)
    policy, key = make_policy(q_network, network, box), jax.random.PRNGKey(0)
    result = evaluate(lambda x: policy(q_params, candidate_params, x, key, epsilon=0.0)[0][:, :-1], envs)
    print(f"{run}, step {meta['step']}, {len(envs)} episodes")
    half = 1.96 * result.returns.std(ddof=1) / math.sqrt(len(envs)) if len(envs) > 1 else math.nan
    print(f"return  {result.returns.mean():.3f} +- {half:.3f}")
    print("success {:.3f} ({:.3f} to {:.3f})".format(result.successes.mean(), *wilson_interval(result.successes)))
    if result.frames:
        path = run / "videos" / f"evaluation_{meta['step']}.mp4"
        write_video(path, result.frames, envs[0].metadata["render_fps"])
        print(f"video   {path}")
    for env in envs:
        env.close()


def require_end_ahead(run: Path, argument: str, end: int) -> None:
    """A resumed run may be given another end, but none that its checkpoint has passed."""
    path = run / "state.npz"
    if path.exists():
        with explained(f"{path} is not a whole checkpoint"), np.load(path, allow_pickle=False) as file:
            step = json.loads(file["meta"].tobytes())["step"]
        require(step <= end, f"{run} is at step {step} already: give {argument} no less")


def resumed_args(args: Args) -> Args:
    """The run's own arguments; only what does not change the learning may be given anew."""
    saved = load_args(Path(args.resume))
    changed = tyro.cli(Args, default=dataclasses.replace(saved, resume=args.resume))
    free = {"resume", "total_timesteps", "eval_every", "checkpoint_every", "capture_video", "track", "quiet"}
    for field in dataclasses.fields(Args):
        same = field.name in free or getattr(changed, field.name) == getattr(saved, field.name)
        require(same, f"--{field.name.replace('_', '-')} cannot be changed by --resume: start a new run")
    require_end_ahead(Path(args.resume), "--total-timesteps", changed.total_timesteps)
    return changed


def main() -> None:
    try:
        args = tyro.cli(Args, description=__doc__)
        if args.evaluate:
            evaluate_play_run(args)
        elif args.task == "all" and not args.resume:
            train_all(args)
        else:
            train(resumed_args(args) if args.resume else args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
