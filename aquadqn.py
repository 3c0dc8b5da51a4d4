# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.4.0", "gymnasium-robotics==1.4.2", "mujoco==3.17.0",
#   "minari[hdf5,hf]==0.5.4", "tyro", "tensorboard", "tensorboardX", "tqdm", "matplotlib", "imageio", "imageio-ffmpeg",
# ]
# ///
"""AQuaDQN: reinforcement learning with demonstrations (section 4.1 of the AQuaDem paper).

Learn K candidate actions per state from demonstrations (equation 1), which turns the continuous problem into a
discrete one, then train Munchausen DQN on it, with the demonstrations in a second replay buffer.

    python aquadqn.py --env-id AdroitHandDoor-v1
    python aquadqn.py --resume runs/AdroitHandDoor-v1__aquadqn__1__1700000000
    python aquadqn.py --evaluate runs/AdroitHandDoor-v1__aquadqn__1__1700000000 --capture-video

Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin:
"Continuous Control with Action Quantization from Demonstrations", ICML 2022.
"""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import re
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
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
EVALUATION_SEED = 2**31  # evaluation episode i starts from seed EVALUATION_SEED + i; --seed stays below it
BUNDLED_DEMONSTRATIONS = Path(__file__).resolve().parent / "demos"


@dataclasses.dataclass
class Args:
    env_id: str = "AdroitHandDoor-v1"
    """any Gymnasium id with a Box action space; `module:Env-v0` imports the module first"""
    dataset_id: str | None = None
    """any Minari id, used from disk or else downloaded; default for Adroit: D4RL/<task>/human-v2"""
    num_demos: int | None = None
    """use only the first N episodes of the dataset; default: all"""
    reward: Literal["sparse", "env"] | None = None
    """sparse: 1 on every step at which info["success"] holds, else 0; default: sparse where the environment reports it"""
    seed: int = 1
    """seed of networks, batches, exploration and environment; equal seeds give bit-identical runs on a CPU"""
    total_timesteps: int = 1_000_000
    """environment steps"""
    eval_every: int = 50_000
    """environment steps between evaluations"""
    eval_episodes: int = 30
    """episodes of an evaluation, greedy, always from the same initial states"""
    exp_name: str = "aquadqn"
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}"""

    candidates: Literal["learned", "kmeans", "random"] = "learned"
    """learned: equation 1; kmeans, random: the ablations of appendix D (fixed set; untrained network)"""
    num_actions: int = 10
    """K, candidate actions per state"""
    temperature: float = 0.001
    """T of the soft minimum"""
    candidate_steps: int = 50_000
    """gradient steps of the candidate network"""
    candidate_learning_rate: float = 3e-4
    """Adam's learning rate for the candidate network"""
    input_dropout: float = 0.1
    """dropout on the observation while training the candidates"""
    hidden_dropout: float = 0.1
    """dropout after every hidden layer while training the candidates"""
    candidates_from: str | None = None
    """run folder whose trained candidates are used instead of training them"""

    q_loss: Literal["munchausen", "dqn", "double"] = "munchausen"
    """target of the Q-network"""
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
    demo_ratio: float = 0.25
    """probability that a batch is drawn from the demonstrations"""
    min_demo_reward: float = 0.01
    """rewards of the demonstrations are raised to at least this"""
    buffer_size: int = 1_000_000
    """transitions kept in the replay buffer"""
    learning_starts: int = 1_000
    """environment steps before the first update (the authors' code)"""
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
    """record videos: of evaluation episodes, and of the candidates along a demonstration"""
    track: bool = False
    """log to Weights & Biases too (if it is installed)"""
    quiet: bool = False
    """no progress bars, only warnings and errors"""


class UserError(Exception):
    """One line that says what is wrong and what to do; the program ends with exit code 2."""


def check_args(args: Args) -> None:
    for name in ("num_actions", "batch_size", "n_step", "total_timesteps", "eval_every", "eval_episodes", "buffer_size",
                 "target_update_period", "checkpoint_every", "num_demos"):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: give at least 1")
    for name in ("demo_ratio", "epsilon", "gamma"):
        if not 0 <= getattr(args, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give a number in [0, 1]")
    for name in ("input_dropout", "hidden_dropout"):
        if not 0 <= getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give a number in [0, 1)")
    for name in ("temperature", "learning_rate", "candidate_learning_rate", "munchausen_tau"):
        if not 0 < getattr(args, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give a positive number")
    for name in ("candidate_steps", "learning_starts"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give at least 0")
    if not 0 <= args.seed < EVALUATION_SEED:
        raise UserError(f"--seed is {args.seed}: give a number from 0 to {EVALUATION_SEED - 1}")


# ------------------------------------------------------------------------------------------------ environment


class SparseReward(gym.Wrapper):
    """Reward 1 on every step at which the goal is reached, else 0 (section 4.1)."""

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, float(info["success"]), terminated, truncated, info


def make_env(env_id: str, reward: str | None, render: bool = False) -> gym.Env:
    """A Gymnasium environment with a Box action space and flat observations. No reward named: the best there is."""
    if render and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # a machine without a screen
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ImportError):
        import gymnasium_robotics  # registers Adroit; redirected because it prints a notice

        gym.register_envs(gymnasium_robotics)
    try:
        env = gym.make(env_id, render_mode="rgb_array" if render else None, disable_env_checker=True)
    except (gym.error.Error, ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"cannot make environment {env_id!r}: {one_line(error)}") from None
    if not isinstance(env.action_space, gym.spaces.Box) or len(env.action_space.shape) != 1:
        raise UserError(f"{env_id} has action space {env.action_space}: AQuaDem needs a Box with one dimension")
    if not holds_only_boxes(env.observation_space):
        raise UserError(f"{env_id} has observation space {env.observation_space}: a Box or a Dict of Boxes is needed")
    if reward != "env":
        env.reset(seed=0)
        reports_success = "success" in env.step(np.clip(0, env.action_space.low, env.action_space.high))[4]
        if reports_success:
            env = SparseReward(env)
        elif reward == "sparse":
            raise UserError(f"{env_id} reports no info['success'], so it has no sparse reward: use --reward env")
    return gym.wrappers.FlattenObservation(env)


def holds_only_boxes(space: gym.Space) -> bool:
    if isinstance(space, gym.spaces.Dict):
        return all(holds_only_boxes(part) for part in space.values())
    return isinstance(space, gym.spaces.Box)


def flatten_observations(space: gym.Space, observations: Any) -> np.ndarray:
    """A whole episode of observations as (T, obs), in the order of gymnasium's FlattenObservation."""
    if isinstance(space, gym.spaces.Dict):
        return np.concatenate([flatten_observations(part, observations[key]) for key, part in space.items()], axis=1)
    return np.asarray(observations, np.float32).reshape(len(observations), -1)


def one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300] or type(error).__name__


class CandidateActions(gym.Wrapper):
    """Turns a continuous environment into Discrete(K) with the candidates of a finished run, for any discrete library.

    `env = CandidateActions(gym.make("AdroitHandDoor-v1"), "runs/AdroitHandDoor-v1__aquadqn__1__1700000000")`
    """

    def __init__(self, env: gym.Env, run: str | Path):
        super().__init__(gym.wrappers.FlattenObservation(env))
        args = load_args(Path(run))
        low, high = env.action_space.low, env.action_space.high
        network = make_candidate_network(args, len(low))
        params = load_candidates(Path(run), network, self.observation_space.shape[0])
        self.action_space = gym.spaces.Discrete(args.num_actions)
        self._candidates = jax.jit(lambda observation: jnp.clip(network.apply(params, observation), low, high))

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        observation, info = self.env.reset(**kwargs)
        self._observation = np.asarray(observation, np.float32)
        return observation, info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        continuous = np.asarray(self._candidates(self._observation))[action]
        observation, reward, terminated, truncated, info = self.env.step(continuous)
        self._observation = np.asarray(observation, np.float32)
        return observation, reward, terminated, truncated, info


# --------------------------------------------------------------------------------------------- demonstrations


class Demonstrations(NamedTuple):
    """All episodes one after the other."""

    observations: np.ndarray  # (N, obs)
    actions: np.ndarray  # (N, action_dim), clipped to the action space
    rewards: np.ndarray  # (N,)
    next_observations: np.ndarray  # (N, obs)
    terminations: np.ndarray  # (N,) true where the task itself ended
    ends: np.ndarray  # (N,) true at the last step of every episode, however it ended


def default_dataset(env_id: str) -> str | None:
    task = re.fullmatch(r"AdroitHand(Door|Hammer|Pen|Relocate)(Sparse)?-v\d+", env_id)
    return f"D4RL/{task[1].lower()}/human-v2" if task else None


def find_dataset(args: Args) -> tuple[Any, str | None]:
    """The Minari dataset, and a warning if it is not the one that was meant."""
    import minari

    if args.dataset_id is not None:
        bundled = BUNDLED_DEMONSTRATIONS / args.dataset_id / "data"
        return (minari.MinariDataset(bundled) if bundled.exists() else open_dataset(args.dataset_id)), None
    default = default_dataset(args.env_id)
    if default is None:
        raise UserError(f"{args.env_id} has no default demonstrations: name a Minari dataset with --dataset-id")
    try:
        return open_dataset(default), None
    except UserError as error:
        bundled = BUNDLED_DEMONSTRATIONS / "aquadem" / default.split("/")[1] / "agent-v0" / "data"
        if not bundled.exists():
            raise UserError(f"{error}; and there is no bundled set for this task") from None
        return minari.MinariDataset(bundled), (
            f"NOT HUMAN DEMONSTRATIONS: {default} could not be had, so the bundled aquadem/{bundled.parts[-3]}/agent-v0"
            " is used, recorded by our own agent (demos/README.md). Results are not comparable with the paper's."
        )


def open_dataset(dataset_id: str) -> Any:
    import minari

    try:
        return minari.load_dataset(dataset_id)
    except FileNotFoundError:
        print(f"{dataset_id} is not on this machine: fetching it from the Minari hub ...", file=sys.stderr)
    except Exception as error:
        raise UserError(f"cannot read dataset {dataset_id!r}: {one_line(error)}") from None
    try:
        return minari.load_dataset(dataset_id, download=True)
    except Exception as error:
        raise UserError(f"cannot download dataset {dataset_id!r}: {one_line(error)}") from None


def load_demonstrations(dataset: Any, env: gym.Env, sparse: bool, num_demos: int | None = None) -> Demonstrations:
    """Minari episodes as arrays, checked against the environment; the reward is the environment's (see make_env)."""
    name, space = dataset.spec.dataset_id, env.env.observation_space
    obs_dim, box = gym.spaces.flatdim(space), env.action_space
    episodes = []
    try:
        for episode in dataset.iterate_episodes(range(min(dataset.total_episodes, num_demos or sys.maxsize))):
            episodes.append(episode_arrays(episode, name, space, obs_dim, box, sparse))
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"cannot read dataset {name!r}: {one_line(error)}") from None
    demonstrations = Demonstrations(*map(np.concatenate, zip(*episodes))) if episodes else None
    if demonstrations is None or len(demonstrations.actions) == 0:
        raise UserError(f"dataset {name!r} holds no steps: choose another with --dataset-id")
    for field in ("observations", "actions", "rewards", "next_observations"):
        array = getattr(demonstrations, field)
        if not np.isfinite(array).all():
            bad = int((~np.isfinite(array)).sum())
            raise UserError(f"dataset {name!r}: field {field} {array.shape} has {bad} NaN or infinite values")
    return demonstrations._replace(actions=np.clip(demonstrations.actions, box.low, box.high).astype(np.float32))


def episode_arrays(
    episode: Any, name: str, space: gym.Space, obs_dim: int, box: gym.spaces.Box, sparse: bool
) -> tuple[np.ndarray, ...]:
    observations = flatten_observations(space, episode.observations)
    actions = np.asarray(episode.actions, np.float32)
    steps = len(actions)
    if observations.shape != (steps + 1, obs_dim):
        raise UserError(
            f"dataset {name!r}: field observations has shape {observations.shape}, not {(steps + 1, obs_dim)}"
        )
    if actions.shape != (steps, *box.shape):
        raise UserError(f"dataset {name!r}: field actions has shape {actions.shape}, not {(steps, *box.shape)}")
    rewards = np.asarray(episode.rewards, np.float32)
    if sparse:
        if "success" not in (episode.infos or {}):
            raise UserError(f"dataset {name!r}: field infos has no 'success', so no sparse reward: use --reward env")
        # Newer datasets have one entry more than steps, which belongs to the reset.
        rewards = np.asarray(episode.infos["success"], np.float32).reshape(-1)[-steps:]
    if rewards.shape != (steps,):
        raise UserError(f"dataset {name!r}: the rewards have shape {rewards.shape}, not {(steps,)}")
    ends = np.arange(steps) == steps - 1
    return observations[:-1], actions, rewards, observations[1:], np.asarray(episode.terminations, bool), ends


# --------------------------------------------------------------------------------------------------- networks


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
            x = nn.relu(nn.Dense(width, kernel_init=nn.initializers.xavier_uniform())(x))
            x = dropout(self.hidden_dropout, x)
        for layer, width in enumerate([*self.head, self.action_dim]):
            # The first layer of all heads reads the same x, so it is one plain matmul; the others are batched over k.
            kernel_axes = ("...i,iko->...ko", (x.shape[-1], self.num_actions, width), 1) if layer == 0 else (
                "...ki,kio->...ko", (self.num_actions, x.shape[-1], width), 0)  # fmt: skip
            equation, shape, heads_axis = kernel_axes
            init = nn.initializers.variance_scaling(
                1.0, "fan_avg", "uniform", in_axis=0 if layer == 0 else 1, out_axis=2, batch_axis=heads_axis
            )
            kernel = self.param(f"head_{layer}_kernel", init, shape)
            bias = self.param(f"head_{layer}_bias", nn.initializers.zeros, (self.num_actions, width))
            x = jnp.einsum(equation, x, kernel) + bias
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


def elu(x: jax.Array) -> jax.Array:
    """nn.elu with exp in place of expm1, which takes twice as long on a CPU."""
    return jnp.where(x > 0, x, jnp.exp(jnp.minimum(x, 0.0)) - 1.0)


class QNetwork(nn.Module):
    """(..., obs) -> (..., K): Acme's LayerNorm MLP, which the paper names."""

    num_actions: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> jax.Array:
        init = nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")
        x = nn.tanh(nn.LayerNorm()(nn.Dense(512, kernel_init=init)(observations)))
        x = elu(nn.Dense(512, kernel_init=init)(x))
        x = elu(nn.Dense(256, kernel_init=init)(x))
        return nn.Dense(self.num_actions, kernel_init=init)(x)


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


def dqn_target(q_select: jax.Array, q_target_next: jax.Array, reward: jax.Array, discount: jax.Array) -> jax.Array:
    """DQN for q_select = q_target_next; double DQN for q_select = the online network at the bootstrap state."""
    best = jnp.argmax(q_select, axis=1)
    return reward + discount * jnp.take_along_axis(q_target_next, best[:, None], axis=1)[:, 0]


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
    """A ring of transitions, on the device. A row is observation | next observation | index, reward, terminated, ended."""

    rows: jax.Array  # (capacity, 2 * obs + 4) float32
    count: jax.Array  # transitions ever stored; the newest is row (count - 1) % capacity


class Batch(NamedTuple):
    observations: jax.Array  # (B, obs)
    actions: jax.Array  # (B,) candidate indices
    returns: jax.Array  # (B,) n-step
    next_observations: jax.Array  # (B, obs) the bootstrap state
    discounts: jax.Array  # (B,)


def pack_rows(observations, next_observations, indices, rewards, terminations, ends) -> np.ndarray:
    scalars = np.stack([indices, rewards, terminations, ends], axis=-1)
    return np.concatenate([observations, next_observations, scalars], axis=-1).astype(np.float32)


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
    key: jax.Array


class AgentState(NamedTuple):
    params: Any
    target_params: Any
    opt_state: Any
    updates: jax.Array
    key: jax.Array


def make_candidate_network(args: Args, action_dim: int) -> nn.Module:
    if args.candidates == "kmeans":
        return FixedCandidates(args.num_actions, action_dim)
    return CandidateNetwork(
        args.num_actions, action_dim, input_dropout=args.input_dropout, hidden_dropout=args.hidden_dropout
    )


def make_candidate_update(network: nn.Module, optimizer: optax.GradientTransformation, args: Args) -> Callable:
    """`steps` gradient steps on equation 1 in one call; returns the mean loss."""

    def loss_fn(params: Any, observations: jax.Array, actions: jax.Array, key: jax.Array) -> jax.Array:
        candidates = network.apply(params, observations, train=True, rngs={"dropout": key})
        return soft_min_loss(candidates, actions, args.temperature)

    def update(state: CandidateState, observations: jax.Array, actions: jax.Array, steps: int):
        def step(state: CandidateState, _: None) -> tuple[CandidateState, jax.Array]:
            key, batch_key, dropout_key = jax.random.split(state.key, 3)
            batch = jax.random.randint(batch_key, (args.batch_size,), 0, len(observations))
            loss, grads = jax.value_and_grad(loss_fn)(state.params, observations[batch], actions[batch], dropout_key)
            updates, opt_state = optimizer.update(grads, state.opt_state)
            return CandidateState(optax.apply_updates(state.params, updates), opt_state, key), loss

        state, losses = jax.lax.scan(step, state, None, length=steps)
        return state, jnp.mean(losses)

    return jax.jit(update, static_argnums=3, donate_argnums=0)


def make_agent_update(network: nn.Module, optimizer: optax.GradientTransformation, args: Args) -> Callable:
    """UPDATE_BLOCK Q-network updates in one call; returns the mean loss and the mean Q-value."""

    def targets(state: AgentState, batch: Batch) -> jax.Array:
        both = jnp.concatenate([batch.observations, batch.next_observations])
        if args.q_loss == "munchausen":
            q_s, q_next = jnp.split(network.apply(state.target_params, both), 2)
            tau, alpha, clip = args.munchausen_tau, args.munchausen_alpha, args.munchausen_clip
            return munchausen_target(q_s, q_next, batch.actions, batch.returns, batch.discounts, tau, alpha, clip)
        q_next = network.apply(state.target_params, batch.next_observations)
        q_select = q_next if args.q_loss == "dqn" else network.apply(state.params, batch.next_observations)
        return dqn_target(q_select, q_next, batch.returns, batch.discounts)

    def loss_fn(params: Any, batch: Batch, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = jnp.take_along_axis(network.apply(params, batch.observations), batch.actions[:, None], axis=1)[:, 0]
        return jnp.mean(optax.huber_loss(q, target)), jnp.mean(q)

    def update(state: AgentState, replay: Replay, demos: Replay) -> tuple[AgentState, jax.Array]:
        def step(state: AgentState, _: None) -> tuple[AgentState, jax.Array]:
            key, coin_key, batch_key = jax.random.split(state.key, 3)
            batch = jax.lax.cond(
                jax.random.uniform(coin_key) < args.demo_ratio,
                lambda: sample(demos, batch_key, args.batch_size, args.n_step, args.gamma),
                lambda: sample(replay, batch_key, args.batch_size, args.n_step, args.gamma),
            )
            (loss, q), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch, targets(state, batch))
            updates, opt_state = optimizer.update(grads, state.opt_state)
            params, count = optax.apply_updates(state.params, updates), state.updates + 1
            target_params = optax.periodic_update(params, state.target_params, count, args.target_update_period)
            return AgentState(params, target_params, opt_state, count, key), jnp.stack([loss, q])

        state, metrics = jax.lax.scan(step, state, None, length=UPDATE_BLOCK)
        return state, jnp.mean(metrics, axis=0)

    return jax.jit(update, donate_argnums=0)


def make_act(q_network: nn.Module, candidate_network: nn.Module, box: gym.spaces.Box, epsilon: float) -> Callable:
    """Epsilon-greedy for one observation. Action and index come back in one array: one transfer each way per step."""

    def act(
        q_params: Any, candidate_params: Any, observation: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        key, coin_key, index_key = jax.random.split(key, 3)
        q = q_network.apply(q_params, observation)
        explore = jax.random.uniform(coin_key) < epsilon
        index = jnp.where(explore, jax.random.randint(index_key, (), 0, len(q)), jnp.argmax(q))
        action = jnp.clip(candidate_network.apply(candidate_params, observation)[index], box.low, box.high)
        return jnp.append(action, index.astype(jnp.float32)), key

    return jax.jit(act)


def make_policy(q_network: nn.Module, candidate_network: nn.Module, box: gym.spaces.Box) -> Callable:
    """Greedy, for a batch of observations: what is evaluated."""

    def policy(q_params: Any, candidate_params: Any, observations: jax.Array) -> jax.Array:
        index = jnp.argmax(q_network.apply(q_params, observations), axis=-1)
        candidates = candidate_network.apply(candidate_params, observations)  # (E, K, D)
        return jnp.clip(candidates[jnp.arange(len(index)), index], box.low, box.high)

    return jax.jit(policy)


# ------------------------------------------------------------------------------------------------- evaluation


class Evaluation(NamedTuple):
    returns: np.ndarray  # (episodes,)
    lengths: np.ndarray
    successes: np.ndarray  # goal reached at any step; NaN where the environment does not report it
    frames: list[np.ndarray]  # pictures of the environments made for rendering, episode after episode


def evaluate(policy: Callable[[np.ndarray], np.ndarray], envs: list[gym.Env]) -> Evaluation:
    """One episode in each environment, side by side, with one batched policy call per step."""
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
    try:
        return env.render()
    except Exception as error:
        raise UserError(
            f"cannot render ({one_line(error)}): install libegl1 and set MUJOCO_GL=egl, or libosmesa6 and MUJOCO_GL=osmesa"
        ) from None


def write_video(path: Path, frames: list[np.ndarray], fps: int) -> None:
    import imageio.v2 as imageio

    path.parent.mkdir(exist_ok=True)
    imageio.mimwrite(path, frames, fps=fps, macro_block_size=8, quality=7)


def wilson_interval(successes: np.ndarray, z: float = 1.96) -> tuple[float, float]:
    """95 percent confidence interval of a success rate."""
    n, p = len(successes), float(np.mean(successes))
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def candidate_picture(candidates: np.ndarray, actions: np.ndarray, steps: Sequence[int], box: Any) -> np.ndarray:
    """Appendix C, one panel per step: action dimension on x, value on y, one colour per candidate, the demonstrated
    action in black. candidates (P, K, D), actions (P, D)."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(steps), 3)
    rows = -(-len(steps) // columns)
    figure = Figure(
        figsize=(8 if columns == 1 else 5 * columns, 4 if columns == 1 else 3 * rows), dpi=80, layout="constrained"
    )
    canvas, axes = FigureCanvasAgg(figure), figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel, (axis, step) in enumerate(zip(axes.flat, steps)):
        for k, candidate in enumerate(candidates[panel]):
            colour = colormaps["turbo"](k / max(candidates.shape[1] - 1, 1))
            axis.plot(candidate, "o-", color=colour, lw=1, ms=3, alpha=0.8, label=f"candidate {k}")
        axis.plot(actions[panel], "o-", color="black", lw=1.5, ms=4, label="demonstrated")
        axis.set(
            title=f"step {step}",
            xlabel="action dimension",
            ylabel="value",
            ylim=(box.low.min() - 0.3, box.high.max() + 0.3),
        )
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


# -------------------------------------------------------------------------------------------------- run folder


def save_arrays(path: Path, tree: Any, **meta: Any) -> None:
    """Atomic: the old file stays until the new one is whole on disk. Arrays and JSON only, never a pickle."""
    arrays = {f"leaf_{i:03d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_arrays(path: Path, template: Any) -> tuple[Any, dict]:
    """The inverse of save_arrays, for a tree of the template's structure, shapes and types."""
    leaves, structure = jax.tree.flatten(template)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = [file[f"leaf_{i:03d}"] for i in range(len(leaves))]
            meta = json.loads(file["meta"].tobytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: name a run folder that has it") from None
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a whole checkpoint: {one_line(error)}") from None
    for array, leaf in zip(arrays, leaves):
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise UserError(f"{path} holds {array.dtype}{array.shape} where {leaf.dtype}{leaf.shape} is needed")
    return jax.tree.unflatten(structure, [jnp.asarray(array) for array in arrays]), meta


def load_args(run: Path) -> Args:
    try:
        saved = json.loads((run / "args.json").read_text())
        return Args(**{field.name: saved[field.name] for field in dataclasses.fields(Args)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run} is not a run folder of this script: {one_line(error)}") from None


def load_candidates(run: Path, network: nn.Module, obs_dim: int) -> Any:
    template = jax.eval_shape(network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    return load_arrays(run / "candidates.npz", template)[0]


class ReplayLog:
    """Every transition ever stored, appended to a file, so that a checkpoint writes only what is new."""

    def __init__(self, path: Path, row_size: int):
        self.path, self.row_size, self.pending = path, row_size, []

    def append(self, row: np.ndarray) -> None:
        self.pending.append(row)

    def flush(self) -> None:
        with self.path.open("ab") as file:
            file.write(b"".join(row.tobytes() for row in self.pending))
            file.flush()
            os.fsync(file.fileno())
        self.pending = []

    def restore(self, count: int) -> np.ndarray:
        """The first `count` rows; what an interrupted run wrote after its last checkpoint is cut off."""
        size = count * self.row_size * 4
        if not self.path.exists() or self.path.stat().st_size < size:
            raise UserError(f"{self.path} is shorter than its checkpoint says: this run cannot be resumed")
        os.truncate(self.path, size)
        return (
            np.memmap(self.path, np.float32, "r", shape=(count, self.row_size))
            if count
            else np.empty((0, self.row_size))
        )


class Interruption:
    """Ctrl-C and SIGTERM ask for a stop at the next checkpoint; a second one stops at once."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, number: int, _: Any) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        print("\nstopping at the next checkpoint; once more to stop at once", file=sys.stderr)

    def exit_if_asked(self, run: Path) -> None:
        if self.signal:
            print(f"\nstopped; continue with: python {Path(__file__).name} --resume {run}", file=sys.stderr)
            sys.exit(128 + self.signal)


# --------------------------------------------------------------------------------------------------- training


def demonstration_candidates(network: nn.Module, params: Any, demos: Demonstrations) -> tuple[np.ndarray, np.ndarray]:
    """For every demonstrated action, the index of the nearest candidate and the distance to it. Computed once."""

    @jax.jit
    def nearest(observations: jax.Array, actions: jax.Array) -> tuple[jax.Array, jax.Array]:
        candidates = network.apply(params, observations)
        index = nearest_candidate(candidates, actions)
        return index, jnp.linalg.norm(candidates[jnp.arange(len(index)), index] - actions, axis=-1)

    chunks = range(0, len(demos.actions), 4096)  # bounds the memory of (chunk, K, D)
    results = [nearest(demos.observations[i : i + 4096], demos.actions[i : i + 4096]) for i in chunks]
    indices, distances = zip(*results)
    return np.concatenate(indices), np.concatenate(distances)


def train_candidates(args: Args, run: Path, network: nn.Module, demos: Demonstrations, log: Any, stop: Any) -> Any:
    """The first stage. Continues from an unfinished one; leaves the parameters in candidates.npz."""
    key, init_key = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(args.seed), 0))
    params = network.init(init_key, demos.observations[:1])
    if args.candidates_from:
        params = load_candidates(Path(args.candidates_from), network, demos.observations.shape[1])
    elif args.candidates == "kmeans":
        from scipy.cluster.vq import kmeans2

        centres, _ = kmeans2(demos.actions, args.num_actions, iter=100, minit="++", rng=args.seed)
        params = {"params": {"actions": jnp.asarray(centres)}}
    elif args.candidates == "learned":
        params = minimise_soft_min_loss(args, run, network, params, key, demos, log, stop)
    save_arrays(run / "candidates.npz", params)
    (run / "candidates_training.npz").unlink(missing_ok=True)
    return params


def minimise_soft_min_loss(
    args: Args, run: Path, network: nn.Module, params: Any, key: jax.Array, demos: Demonstrations, log: Any, stop: Any
) -> Any:
    optimizer = optax.adam(args.candidate_learning_rate)
    state, step, path = CandidateState(params, optimizer.init(params), key), 0, run / "candidates_training.npz"
    if path.exists():
        state, meta = load_arrays(path, state)
        step = meta["step"]
    update = make_candidate_update(network, optimizer, args)
    observations, actions = jnp.asarray(demos.observations), jnp.asarray(demos.actions)
    progress = tqdm(desc="candidates", total=args.candidate_steps, initial=step, unit="step", disable=args.quiet)
    while step < args.candidate_steps:
        block = min(CANDIDATE_BLOCK, args.candidate_steps - step)
        state, loss = update(state, observations, actions, block)
        step += block
        if not np.isfinite(loss):
            sys.exit(f"error: the candidate loss is {loss} at step {step}: lower --candidate-learning-rate")
        log.add_scalar("candidates/loss", float(loss), step)
        progress.set_postfix(loss=f"{loss:.5f}", refresh=False)
        progress.update(block)
        if step % (20 * CANDIDATE_BLOCK) == 0 or stop.signal:
            save_arrays(path, state, step=step)
            stop.exit_if_asked(run)
    progress.close()
    return state.params


def report_candidates(
    args: Args, run: Path, network: nn.Module, params: Any, demos: Demonstrations, box: Any, log: Any
):
    """TensorBoard and candidates.png: which candidates the demonstrations use, and how near they come."""
    indices, distances = demonstration_candidates(network, params, demos)
    log.add_scalar("candidates/nearest_distance", float(distances.mean()), 0)
    log.add_histogram("candidates/usage", indices, 0, bins=np.arange(args.num_actions + 1) - 0.5)
    episode = slice(0, int(np.argmax(demos.ends)) + 1)
    candidates = np.asarray(network.apply(params, demos.observations[episode]))
    steps = np.linspace(0, len(candidates) - 1, min(6, len(candidates))).astype(int)
    picture = candidate_picture(candidates[steps], demos.actions[steps], steps, box)
    log.add_image("candidates/along_a_demonstration", picture, 0, dataformats="HWC")
    import imageio.v2 as imageio

    imageio.imwrite(run / "candidates.png", picture)
    if args.capture_video:
        frames = [
            candidate_picture(candidates[t : t + 1], demos.actions[t : t + 1], [t], box) for t in range(len(candidates))
        ]
        write_video(run / "videos" / "candidates.mp4", frames, fps=25)
    return indices


def train_agent(
    args: Args, run: Path, env: gym.Env, network: nn.Module, candidate_params: Any, demos: Replay, log: Any, stop: Any
) -> None:
    """The second stage: epsilon-greedy steps in blocks, then as many updates in one call."""
    obs_dim = env.observation_space.shape[0]
    q_network, optimizer = QNetwork(args.num_actions), optax.adam(args.learning_rate)
    key, act_key, init_key = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(args.seed), 1), 3)
    params = q_network.init(init_key, jnp.zeros(obs_dim))
    agent = AgentState(params, jax.tree.map(jnp.copy, params), optimizer.init(params), jnp.zeros((), jnp.int32), key)
    replay_log = ReplayLog(run / "replay.f32", row_size=2 * obs_dim + 4)
    capacity = min(args.buffer_size, -(-args.total_timesteps // UPDATE_BLOCK) * UPDATE_BLOCK)
    rows = np.zeros((capacity, replay_log.row_size), np.float32)
    step, block = 0, []  # the block holds the steps not yet stored
    env.reset(seed=args.seed)
    if (run / "state.npz").exists():
        (agent, act_key), meta = load_arrays(run / "state.npz", (agent, act_key))
        env.unwrapped.np_random.bit_generator.state = meta["env_generator"]
        step = meta["step"]
        past, stored = replay_log.restore(step), step - step % UPDATE_BLOCK
        kept = np.arange(max(0, stored - capacity), stored)
        rows[kept % capacity], block = past[kept], list(np.array(past[stored:]))
    replay = Replay(jnp.asarray(rows), jnp.asarray(step - len(block), jnp.int32))
    del rows

    act = make_act(q_network, network, env.action_space, args.epsilon)
    policy = make_policy(q_network, network, env.action_space)
    learn, store_rows = make_agent_update(q_network, optimizer, args), jax.jit(store, donate_argnums=0)
    eval_envs = [make_env(args.env_id, args.reward, args.capture_video and i == 0) for i in range(args.eval_episodes)]
    table = EvaluationTable(run / "evaluations.csv", before_step=step)
    progress = tqdm(desc="agent", total=args.total_timesteps, initial=step, unit="step", disable=args.quiet)
    last_checkpoint, logged_step, logged_time = step, step, time.perf_counter()
    observation = np.asarray(env.reset()[0], np.float32)
    episode_return, episode_length, episode_success = 0.0, 0, 0.0
    while True:
        if step % args.eval_every == 0 or step == args.total_timesteps:
            result = evaluate(lambda x: policy(agent.params, candidate_params, x), eval_envs)
            save_arrays(run / "agent.npz", agent.params, step=step)
            table.write(step, result, log)
            progress.set_postfix(success=f"{np.mean(result.successes):.2f}", refresh=False)
            if result.frames:
                write_video(run / "videos" / f"step_{step}.mp4", result.frames, fps=env.metadata.get("render_fps", 30))
        if step == args.total_timesteps:
            break
        packed, act_key = act(agent.params, candidate_params, observation, act_key)
        packed = np.asarray(packed)  # action, then index
        next_observation, reward, terminated, truncated, info = env.step(packed[:-1])
        next_observation, ended = np.asarray(next_observation, np.float32), terminated or truncated
        row = np.concatenate([observation, next_observation, [packed[-1], reward, terminated, ended]], dtype=np.float32)
        block.append(row)
        replay_log.append(row)
        observation, step = next_observation, step + 1
        episode_return, episode_length = episode_return + reward, episode_length + 1
        episode_success = max(episode_success, float(info.get("success", math.nan)))
        if len(block) == UPDATE_BLOCK:
            replay, block = store_rows(replay, np.stack(block)), []
            progress.update(UPDATE_BLOCK)
            if step > args.learning_starts:
                agent, metrics = learn(agent, replay, demos)
                if not np.isfinite(metrics).all():
                    sys.exit(f"error: the Q-loss is not finite at step {step}; the last good checkpoint is in {run}")
                if step - logged_step >= 1000:
                    now = time.perf_counter()
                    log.add_scalar("losses/q_loss", float(metrics[0]), step)
                    log.add_scalar("losses/q_values", float(metrics[1]), step)
                    log.add_scalar("charts/SPS", (step - logged_step) / (now - logged_time), step)
                    logged_step, logged_time = step, now
        if ended:
            log.add_scalar("charts/episodic_return", episode_return, step)
            log.add_scalar("charts/episodic_length", episode_length, step)
            log.add_scalar("charts/success", episode_success, step)
            # One more episode could pass the limit, and in the middle of an episode nothing can be saved.
            if step + episode_length > last_checkpoint + args.checkpoint_every or stop.signal:
                replay_log.flush()
                generator = env.unwrapped.np_random.bit_generator.state
                save_arrays(run / "state.npz", (agent, act_key), step=step, env_generator=generator)
                last_checkpoint = step
                stop.exit_if_asked(run)
            observation = np.asarray(env.reset()[0], np.float32)
            episode_return, episode_length, episode_success = 0.0, 0, 0.0
    progress.close()


class EvaluationTable:
    """evaluations.csv and the eval/ tags of TensorBoard."""

    def __init__(self, path: Path, before_step: int):
        """Drops the rows that a resumed run is going to write again."""
        self.path = path
        kept = path.read_text().splitlines()[1:] if path.exists() else []
        kept = [line for line in kept if int(line.split(",")[0]) < before_step]
        path.write_text("\n".join(["step,success_rate,episodic_return,episodic_length,episodes", *kept]) + "\n")

    def write(self, step: int, result: Evaluation, log: Any) -> None:
        success, score, length = (float(np.mean(x)) for x in (result.successes, result.returns, result.lengths))
        with self.path.open("a") as file:
            csv.writer(file, lineterminator="\n").writerow([step, success, score, length, len(result.returns)])
        log.add_scalar("eval/success_rate", success, step)
        log.add_scalar("eval/episodic_return", score, step)
        log.add_scalar("eval/episodic_length", length, step)


def train(args: Args) -> Path:
    """Everything that can be wrong with the input is found before the run folder is made."""
    check_args(args)
    env = make_env(args.env_id, args.reward)
    args.reward = "sparse" if isinstance(env.env, SparseReward) else "env"
    dataset, warning = find_dataset(args)
    args.dataset_id = dataset.spec.dataset_id
    demos = load_demonstrations(dataset, env, args.reward == "sparse", args.num_demos)
    network = make_candidate_network(args, env.action_space.shape[0])
    if args.candidates_from:
        load_candidates(Path(args.candidates_from), network, demos.observations.shape[1])
    if args.resume:
        run = Path(args.resume)
    else:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        run = Path("runs") / re.sub(r"[^\w.-]", "_", name)
        run.mkdir(parents=True)
        (run / "args.json").write_text(json.dumps({**dataclasses.asdict(args), "warning": warning}, indent=2))
    log = make_log(args, run, warning)
    stop = Interruption()
    if (run / "candidates.npz").exists():
        params = load_candidates(run, network, demos.observations.shape[1])
    else:
        params = train_candidates(args, run, network, demos, log, stop)
    indices = report_candidates(args, run, network, params, demos, env.action_space, log)
    demo_rewards = np.maximum(demos.rewards, args.min_demo_reward)
    demo_rows = pack_rows(
        demos.observations, demos.next_observations, indices, demo_rewards, demos.terminations, demos.ends
    )
    demo_replay = Replay(jnp.asarray(demo_rows), jnp.asarray(len(demo_rows), jnp.int32))
    train_agent(args, run, env, network, params, demo_replay, log, stop)
    log.close()
    if not args.quiet:
        print(f"done: {run} (evaluate with: python {Path(__file__).name} --evaluate {run})")
    return run


def make_log(args: Args, run: Path, warning: str | None) -> Any:
    if args.track:
        try:
            import wandb
        except ImportError:
            raise UserError("--track needs Weights & Biases: pip install wandb") from None
        wandb.init(project="aquadem", name=run.name, config=dataclasses.asdict(args), sync_tensorboard=True)
    from tensorboardX import SummaryWriter

    log = SummaryWriter(str(run))
    table = "\n".join(f"|{key}|{value}|" for key, value in dataclasses.asdict(args).items())
    log.add_text("arguments", f"|argument|value|\n|-|-|\n{table}")
    if warning:
        log.add_text("warning", warning)
        print("\n".join(["!" * 100, warning, "!" * 100]), file=sys.stderr)
    return log


def evaluate_run(args: Args) -> None:
    """Prints mean return and success of a run's latest evaluated agent, with 95 percent confidence intervals."""
    run = Path(args.evaluate)
    saved = load_args(run)
    envs = [make_env(saved.env_id, saved.reward, args.capture_video and i < 3) for i in range(args.eval_episodes)]
    obs_dim, box = envs[0].observation_space.shape[0], envs[0].action_space
    network, q_network = make_candidate_network(saved, len(box.low)), QNetwork(saved.num_actions)
    candidate_params = load_candidates(run, network, obs_dim)
    template = jax.eval_shape(q_network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    q_params, meta = load_arrays(run / "agent.npz", template)
    policy = make_policy(q_network, network, box)
    result = evaluate(lambda x: policy(q_params, candidate_params, x), envs)
    half = 1.96 * result.returns.std(ddof=1) / math.sqrt(len(envs)) if len(envs) > 1 else math.nan
    print(f"{run}, step {meta['step']}, {len(envs)} episodes")
    print(f"return  {result.returns.mean():.3f} +- {half:.3f}")
    if not np.isnan(result.successes).any():
        print("success {:.3f} ({:.3f} to {:.3f})".format(result.successes.mean(), *wilson_interval(result.successes)))
    if result.frames:
        path = run / "videos" / f"evaluation_{meta['step']}.mp4"
        write_video(path, result.frames, fps=envs[0].metadata.get("render_fps", 30))
        print(f"video   {path}")


def resumed_args(args: Args) -> Args:
    """The run's own arguments; only what does not change the learning may be given anew."""
    saved = load_args(Path(args.resume))
    changed = tyro.cli(Args, default=dataclasses.replace(saved, resume=args.resume))
    free = {"resume", "total_timesteps", "eval_every", "checkpoint_every", "capture_video", "track", "quiet"}
    for field in dataclasses.fields(Args):
        if field.name not in free and getattr(changed, field.name) != getattr(saved, field.name):
            raise UserError(f"--{field.name.replace('_', '-')} cannot be changed by --resume: start a new run")
    return changed


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    try:
        if args.evaluate:
            evaluate_run(args)
        else:
            train(resumed_args(args) if args.resume else args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
