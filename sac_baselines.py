# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium[mujoco]==1.4.0", "gymnasium-robotics==1.4.2",
#   "robodesk==1.0.0", "dm_control==1.0.50", "mujoco==3.17.0", "minari[hdf5,hf]==0.5.4", "ott-jax==0.6.0", "tyro",
#   "tensorboard", "tensorboardX", "tqdm", "imageio", "imageio-ffmpeg",
# ]
# ///
"""SAC, SAC from demonstrations (SACfD) and GAIL: the continuous-action baselines of sections 4.1 to 4.3 of the paper.

    python sac_baselines.py sac --env-id AdroitHandDoor-v1
    python sac_baselines.py sacfd --env-id AdroitHandDoor-v1
    python sac_baselines.py gail --env-id AdroitHandDoor-v1
    python sac_baselines.py sac --env-id RoboDesk-push_green --tau 0.01 --reward-scale 1
    python sac_baselines.py --resume runs/AdroitHandDoor-v1__sac__1__1700000000
    python sac_baselines.py --evaluate runs/AdroitHandDoor-v1__sac__1__1700000000 --capture-video

Soft actor-critic with an adaptive temperature; SACfD mixes demonstrations into its batches; GAIL replaces the reward
by what a discriminator between demonstrator and agent says. `record.py rollouts RUN` makes two Minari datasets of a
run: its replay and rollouts of its policy.

Haarnoja et al.: "Soft Actor-Critic Algorithms and Applications", 2018. Ho, Ermon: "Generative Adversarial Imitation
Learning", NeurIPS 2016. Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin: "Continuous Control with Action
Quantization from Demonstrations", ICML 2022.
"""

import contextlib
import dataclasses
import importlib.util
import io
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from ott.geometry import geometry
from ott.problems.linear import linear_problem
from ott.solvers.linear import acceleration, sinkhorn
from tqdm import tqdm

HIDDEN_UNITS = (256, 256)  # of actor and critics, with relu
LOG_DEVIATION_RANGE = (-20.0, 2.0)  # the SAC authors' code
EVALUATION_SEED = 2**31  # evaluation episode i starts from seed EVALUATION_SEED + i; --seed stays below it
BUNDLED_DEMONSTRATIONS = Path(__file__).resolve().parent / "demos"

# The paper does not give the settings of its Sinkhorn distance. With these, one distance takes about half a second on
# a CPU core; on the Door demonstrations (5 episodes against 20) it is 2 percent above the unregularised one.
SINKHORN_EPSILON = 0.1  # in the unit of the cost: Euclidean distance of normalised states, median 9 on Door
SINKHORN_POINTS = 1000  # states drawn from either side, without replacement
SINKHORN_THRESHOLD = 5e-3  # the iterations end when the plan's marginals are off by less than this in total
SINKHORN_SEED = 0  # of the drawing: the distance is the same function of the states in every run
HUMAN_EPISODES, HUMAN_REPETITIONS = 5, 100  # section 4.2


@dataclasses.dataclass
class Args:
    env_id: str = "AdroitHandDoor-v1"
    """RoboDesk-<task>, or any Gymnasium id with a bounded Box action space; `module:Env-v0` imports the module first"""
    reward: Literal["sparse", "env"] | None = None
    """sparse: 1 at every step with info["success"], else 0; default: sparse if a Gymnasium id reports success"""
    robodesk_rewards: Literal["upstream", "fixed"] = "fixed"
    """of the desk: the package's, or those that "lift" and "off_table" are named after; see robodesk_env.py"""
    seed: int = 1
    """seed of networks, batches, exploration and environment; equal seeds give bit-identical runs on a CPU"""
    total_timesteps: int = 1_000_000
    """environment steps"""
    eval_every: int = 50_000
    """environment steps between evaluations"""
    eval_episodes: int = 30
    """episodes of an evaluation, with the mean action, always from the same initial states"""
    exp_name: str = "sac"
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}"""

    batch_size: int = 256
    """transitions in a batch"""
    learning_rate: float = 1e-4
    """Adam's learning rate for actor, critics and temperature"""
    gamma: float = 0.99
    """discount (the SAC paper)"""
    n_step: int = 5
    """length of the multi-step return"""
    tau: float = 0.005
    """how far the target critics move towards the critics in every update"""
    reward_scale: float = 0.5
    """factor of every reward"""
    buffer_size: int = 1_000_000
    """transitions kept in the replay buffer"""
    learning_starts: int = 1_000
    """environment steps with uniformly random actions before the first update (not from the paper)"""

    checkpoint_every: int = 10_000
    """environment steps between checkpoints, each written at the end of an episode"""
    resume: str | None = None
    """run folder to continue, with its own arguments"""
    evaluate: str | None = None
    """run folder to evaluate instead of training"""
    capture_video: bool = False
    """record videos of evaluation episodes"""
    track: bool = False
    """log to Weights & Biases too (if it is installed)"""
    quiet: bool = False
    """no progress bars, only warnings and errors"""


@dataclasses.dataclass
class SACArgs(Args):
    """Soft actor-critic (appendix "SAC and SACfD", table "SAC")."""

    method: str = dataclasses.field(default="sac", init=False)


@dataclasses.dataclass
class SACfDArgs(Args):
    """SAC with demonstrations in a second buffer (appendix "SAC and SACfD", table "SACfD")."""

    method: str = dataclasses.field(default="sacfd", init=False)
    exp_name: str = "sacfd"
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}"""
    reward_scale: float = 0.3
    """factor of every reward"""
    dataset_id: str | None = None
    """any Minari id, used from disk or else downloaded; default for Adroit: D4RL/<task>/human-v2"""
    num_demos: int | None = None
    """use only the first N episodes of the dataset; default: all"""
    demo_ratio: float = 0.001
    """probability that a transition of a batch is drawn from the demonstrations"""
    min_demo_reward: float | None = 0.01
    """rewards of the demonstrations are raised to at least this (bold: 0.01 and 0.1); None: they stay"""


@dataclasses.dataclass
class GAILArgs(Args):
    """SAC on the reward of a discriminator (appendix "GAIL"); the environment's own reward is only reported."""

    method: str = dataclasses.field(default="gail", init=False)
    exp_name: str = "gail"
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}"""
    tau: float = 0.05
    """how far the target critics move towards the critics in every update"""
    dataset_id: str | None = None
    """any Minari id, used from disk or else downloaded; default for Adroit: D4RL/<task>/human-v2"""
    num_demos: int | None = None
    """use only the first N episodes of the dataset; default: all"""
    discriminator_input: Literal["state-action", "state", "state-next-state"] = "state-action"
    """what the discriminator compares"""
    discriminator_layers: int = 1
    """hidden layers of the discriminator"""
    discriminator_units: int = 256
    """units of a hidden layer"""
    discriminator_learning_rate: float = 3e-7
    """Adam's learning rate for the discriminator"""
    discriminator_regularization: Literal["none", "dropout", "weight-decay"] = "weight-decay"
    """of the discriminator"""
    discriminator_weight_decay: float = 10.0
    """decoupled weight decay (AdamW), with --discriminator-regularization weight-decay"""
    discriminator_input_dropout: float = 0.5
    """dropout on the discriminator's input, with --discriminator-regularization dropout"""
    discriminator_hidden_dropout: float = 0.5
    """dropout after every hidden layer, with --discriminator-regularization dropout"""
    normalize_observations: bool = True
    """centre and scale what the discriminator sees by the demonstrations' mean and standard deviation"""
    reward_balance: float = 0.5
    """0: -log p; 1: log(1 - p); 0.5: the average of both; p the probability of "agent" """


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


def check_sac_args(args: Args) -> None:
    counts = "num_demos batch_size n_step total_timesteps eval_every eval_episodes buffer_size checkpoint_every"
    bounds = dict.fromkeys(f"{counts} discriminator_units".split(), (1, math.inf))
    bounds |= dict.fromkeys(["learning_starts", "discriminator_layers", "discriminator_weight_decay"], (0, math.inf))
    bounds |= dict.fromkeys(["demo_ratio", "gamma", "tau", "reward_balance"], (0, 1))
    bounds |= dict.fromkeys(["discriminator_input_dropout", "discriminator_hidden_dropout"], (0, 0.99))
    bounds |= dict.fromkeys(["learning_rate", "discriminator_learning_rate", "reward_scale"], (1e-9, 1e9))
    bounds |= {"min_demo_reward": (-1e38, 1e38)}
    for name, (low, high) in {**bounds, "seed": (0, EVALUATION_SEED - 1)}.items():
        value = getattr(args, name, None)
        if value is not None:
            require(low <= value <= high, f"--{name.replace('_', '-')} is {value}: give a number from {low} to {high}")


# ------------------------------------------------------------------------------------------------ environment


class SparseReward(gym.Wrapper):
    """Reward 1 on every step at which the goal is reached, else 0 (section 4.1)."""

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, float(info["success"]), terminated, truncated, info


@contextlib.contextmanager
def silent_compiler() -> Iterator[None]:
    """MuJoCo's compiler warns, once per environment, of old words in Gymnasium's own models: no concern of a user's."""
    import mujoco

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda _: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


def make_env(env_id: str, reward: str | None, render: bool = False) -> gym.Env:
    """A Gymnasium environment with a Box action space, flat observations, and the sparse reward if there is one."""
    if render and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # a machine without a screen
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ImportError):
        import gymnasium_robotics  # registers Adroit, and prints a notice

        gym.register_envs(gymnasium_robotics)
    with explained(f"cannot make environment {env_id!r}"), silent_compiler():
        env = gym.make(env_id, render_mode="rgb_array" if render else None, disable_env_checker=True)
    box, space = env.action_space, env.observation_space
    one_dimensional = isinstance(box, gym.spaces.Box) and len(box.shape) == 1
    require(one_dimensional, f"{env_id} has action space {box}: AQuaDem needs a Box with one dimension")
    parts = space.values() if isinstance(space, gym.spaces.Dict) else [space]
    only_boxes = all(isinstance(part, gym.spaces.Box) for part in parts)
    require(only_boxes, f"{env_id} has observation space {space}: a Box or a Dict of Boxes is needed")
    if reward != "env":
        env.reset(seed=0)
        reports_success = "success" in env.step(np.clip(np.zeros(box.shape, box.dtype), box.low, box.high))[4]
        missing = f"{env_id} reports no info['success'], so it has no sparse reward: use --reward env"
        require(reports_success or reward is None, missing)
        env = SparseReward(env) if reports_success else env
    return gym.wrappers.FlattenObservation(env)


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


def make_task(args: Args, render: bool = False) -> gym.Env:
    """RoboDesk-<task>, with its dense reward unless told otherwise, or else any Gymnasium environment."""
    if not args.env_id.startswith("RoboDesk-"):
        return make_env(args.env_id, args.reward, render)
    desk = make_desk(args.env_id.removeprefix("RoboDesk-"), args.robodesk_rewards, render)
    return gym.wrappers.FlattenObservation(SparseReward(desk.env)) if args.reward == "sparse" else desk


def first_observation(env: gym.Env) -> np.ndarray:
    return np.asarray(env.reset()[0], np.float32)


def require_bounds(env: gym.Env) -> None:
    """tanh fills the action space, which therefore needs an end on both sides."""
    box = env.action_space
    require(box.is_bounded(), f"{env.spec.id} has action space {box}: SAC needs one with finite bounds")


def to_box(units: jax.Array, box: gym.spaces.Box) -> jax.Array:
    """Actions in [-1, 1] as the environment wants them."""
    return jnp.clip(0.5 * (box.high + box.low) + 0.5 * (box.high - box.low) * units, box.low, box.high)


def from_box(actions: jax.Array, box: gym.spaces.Box) -> jax.Array:
    return (actions - 0.5 * (box.high + box.low)) / (0.5 * (box.high - box.low))


# --------------------------------------------------------------------------------------------- demonstrations


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


def load_default_demonstrations(args: Args, env: gym.Env) -> tuple[Demonstrations, str, str | None]:
    """The human demonstrations of an Adroit task, or if they cannot be had the bundled ones: data, id and warning."""
    task = re.fullmatch(r"AdroitHand(Door|Hammer|Pen|Relocate)-v\d+", args.env_id)
    require(task, f"{args.env_id} has no default demonstrations: name a Minari dataset with --dataset-id")
    default, fallback = f"D4RL/{task[1].lower()}/human-v2", f"aquadem/{task[1].lower()}/agent-v0"
    try:
        return load_demonstrations(default, env, args.reward == "sparse", args.num_demos), default, None
    except Unavailable as error:
        require((BUNDLED_DEMONSTRATIONS / fallback).exists(), f"{error}; and no set for this task is bundled")
    warning = (
        f"NOT HUMAN DEMONSTRATIONS: {default} could not be had, so the bundled {fallback} is used, recorded by our own"
        " agent (demos/README.md). What comes out is not comparable with the paper."
    )
    return load_demonstrations(fallback, env, args.reward == "sparse", args.num_demos), fallback, warning


# --------------------------------------------------------------------------------------------------- networks


class Actor(nn.Module):
    """(..., obs) -> mean and logarithm of the standard deviation before the tanh, (..., action_dim) each."""

    action_dim: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = observations
        for width in HIDDEN_UNITS:
            x = nn.relu(nn.Dense(width)(x))
        mean, log_deviation = jnp.split(nn.Dense(2 * self.action_dim)(x), 2, axis=-1)
        return mean, jnp.clip(log_deviation, *LOG_DEVIATION_RANGE)


class TwinCritic(nn.Module):
    """(B, obs), (B, action_dim) in [-1, 1] -> (2, B): both critics at once, every layer one batched product."""

    @nn.compact
    def __call__(self, observations: jax.Array, actions: jax.Array) -> jax.Array:
        x = jnp.concatenate([observations, actions], axis=-1)
        x = jnp.broadcast_to(x, (2, *x.shape))
        init = nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        for layer, width in enumerate([*HIDDEN_UNITS, 1]):
            kernel = self.param(f"kernel_{layer}", init, (2, x.shape[-1], width))
            x = x @ kernel + self.param(f"bias_{layer}", nn.initializers.zeros, (2, 1, width))
            x = nn.relu(x) if layer < len(HIDDEN_UNITS) else x
        return x[..., 0]


class Discriminator(nn.Module):
    """(..., features) -> (...): the logit of "this is the expert", so that P(agent) = sigmoid(-logit)."""

    num_layers: int
    num_units: int
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0

    @nn.compact
    def __call__(self, features: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dropout(self.input_dropout, deterministic=not train)(features)
        for _ in range(self.num_layers):
            x = nn.relu(nn.Dense(self.num_units)(x))
            x = nn.Dropout(self.hidden_dropout, deterministic=not train)(x)
        return nn.Dense(1)(x)[..., 0]


# ----------------------------------------------------------------------------------------- losses and targets


def squash(mean: jax.Array, log_deviation: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """tanh of a Gaussian sample, and the logarithm of its density in (-1, 1)^D. (..., D) -> (..., D), (...).

    log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x)), which does not underflow where tanh is 1.
    """
    x = mean + jnp.exp(log_deviation) * noise
    log_gaussian = -0.5 * noise**2 - log_deviation - 0.5 * math.log(2 * math.pi)
    return jnp.tanh(x), jnp.sum(log_gaussian - 2 * (math.log(2) - x - nn.softplus(-2 * x)), axis=-1)


def soft_target(
    q_next: jax.Array,  # (2, B) target critics at the bootstrap state and an action of the policy there
    log_prob_next: jax.Array,  # (B,) of that action
    reward: jax.Array,  # (B,) n-step return
    discount: jax.Array,  # (B,) gamma^n, 0 after a termination
    temperature: jax.Array,
) -> jax.Array:
    return reward + discount * (jnp.min(q_next, axis=0) - temperature * log_prob_next)


def temperature_loss(log_temperature: jax.Array, entropy: jax.Array, target_entropy: float) -> jax.Array:
    """Descent lowers the temperature while the policy's entropy is above the target, and raises it below. As in the SAC
    authors' code the logarithm stands where their paper has the temperature: the slope does not fade with it."""
    return log_temperature * jax.lax.stop_gradient(entropy - target_entropy)


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


def discriminator_input(
    kind: str, observations: jax.Array, actions: jax.Array, next_observations: jax.Array
) -> jax.Array:
    """What the discriminator compares, (..., features)."""
    parts = {
        "state-action": [observations, actions],
        "state": [observations],
        "state-next-state": [observations, next_observations],
    }
    return jnp.concatenate(parts[kind], axis=-1)


def discriminator_loss(expert_logits: jax.Array, agent_logits: jax.Array) -> jax.Array:
    """Binary cross-entropy, -log P(expert) for the expert and -log P(agent) for the agent. (B,), (B,) -> scalar."""
    return 0.5 * (jnp.mean(nn.softplus(-expert_logits)) + jnp.mean(nn.softplus(agent_logits)))


def discriminator_reward(logits: jax.Array, balance: float) -> jax.Array:
    """(1 - balance) [-log p] + balance log(1 - p), p = P(agent) = sigmoid(-logit).

    Balance 0 is never negative and so rewards staying alive, 1 is never positive, 0.5 is half the logit.
    """
    return (1 - balance) * nn.softplus(logits) - balance * nn.softplus(-logits)


# ----------------------------------------------------------------------------------------------------- replay


class ContinuousReplay(NamedTuple):
    """A ring of transitions on the device. A row: observation | next observation | action | reward, terminated, ended.
    Rewards and actions are the environment's, unscaled."""

    rows: jax.Array  # (capacity, 2 * obs + action_dim + 3) float32
    count: jax.Array  # transitions ever stored; the newest is row (count - 1) % capacity


class Windows(NamedTuple):
    """n consecutive steps from each of B drawn ones."""

    observations: jax.Array  # (B, n, obs)
    next_observations: jax.Array  # (B, n, obs)
    actions: jax.Array  # (B, n, action_dim)
    rewards: jax.Array  # (B, n)
    terminations: jax.Array  # (B, n)
    ends: jax.Array  # (B, n)


class ContinuousBatch(NamedTuple):
    observations: jax.Array  # (B, obs)
    actions: jax.Array  # (B, action_dim)
    returns: jax.Array  # (B,) n-step
    next_observations: jax.Array  # (B, obs) the bootstrap state
    discounts: jax.Array  # (B,)


def pack_transitions(observations, next_observations, actions, rewards, terminations, ends) -> np.ndarray:
    """One transition (or many) as rows of a replay."""
    scalars = np.stack([rewards, terminations, ends], axis=-1)
    parts = [observations, next_observations, actions, scalars]
    return np.concatenate(parts, axis=-1, dtype=np.float32, casting="same_kind")


def unpack_transitions(rows: Any, obs_dim: int) -> list:
    """The inverse: (..., row) -> observations, next observations, actions, rewards, terminations, ends."""
    scalars = [rows[..., -3], rows[..., -2], rows[..., -1]]
    return [rows[..., :obs_dim], rows[..., obs_dim : 2 * obs_dim], rows[..., 2 * obs_dim : -3], *scalars]


def store_transitions(replay: ContinuousReplay, rows: jax.Array) -> ContinuousReplay:
    where = (replay.count + jnp.arange(len(rows))) % len(replay.rows)
    return ContinuousReplay(replay.rows.at[where].set(rows), replay.count + len(rows))


def sample_windows(replay: ContinuousReplay, key: jax.Array, batch_size: int, n_step: int, obs_dim: int) -> Windows:
    """Uniform over stored transitions; a window that meets the newest one stops there, as at an episode's end."""
    capacity, offsets = len(replay.rows), jnp.arange(n_step)
    first = jax.random.randint(key, (batch_size,), 0, jnp.minimum(replay.count, capacity))
    windows = Windows(*unpack_transitions(replay.rows[(first[:, None] + offsets) % capacity], obs_dim))
    steps_to_newest = (replay.count - 1 - first) % capacity
    return windows._replace(ends=jnp.maximum(windows.ends, offsets == steps_to_newest[:, None]))


def n_step_batch(windows: Windows, gamma: float) -> ContinuousBatch:
    returns, last, discounts = n_step_returns(windows.rewards, windows.terminations, windows.ends, gamma)
    next_observations = windows.next_observations[jnp.arange(len(last)), last]
    return ContinuousBatch(windows.observations[:, 0], windows.actions[:, 0], returns, next_observations, discounts)


def mix_windows(replay: Windows, demos: Windows, key: jax.Array, demo_ratio: float) -> Windows:
    """SACfD: every transition of the batch comes from the demonstrations with probability demo_ratio."""
    chosen = jax.random.uniform(key, (len(replay.rewards),)) < demo_ratio

    def choose(ours: jax.Array, theirs: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape(-1, *[1] * (ours.ndim - 1)), theirs, ours)

    return jax.tree.map(choose, replay, demos)


def sample_triples(
    rows: jax.Array, count: jax.Array, key: jax.Array, batch_size: int, obs_dim: int, action_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Observations, actions and next observations, uniform over what is stored of `count` transitions."""
    drawn = rows[jax.random.randint(key, (batch_size,), 0, jnp.minimum(count, len(rows)))]
    observations, next_observations, actions, _ = jnp.split(drawn, [obs_dim, 2 * obs_dim, 2 * obs_dim + action_dim], 1)
    return observations, actions, next_observations


# ---------------------------------------------------------------------------------------------------- updates


class SACParams(NamedTuple):
    actor: Any
    critic: Any
    log_temperature: jax.Array


class SACState(NamedTuple):
    params: SACParams
    target_critic: Any
    opt_state: Any
    key: jax.Array
    discriminator: Any  # DiscriminatorState; None without GAIL


class DiscriminatorState(NamedTuple):
    params: Any
    opt_state: Any
    key: jax.Array


def make_discriminator(args: Args) -> tuple[nn.Module, optax.GradientTransformation]:
    """The network and its optimiser: AdamW, which is Adam where nothing decays."""
    dropout = args.discriminator_regularization == "dropout"
    network = Discriminator(
        args.discriminator_layers,
        args.discriminator_units,
        args.discriminator_input_dropout if dropout else 0.0,
        args.discriminator_hidden_dropout if dropout else 0.0,
    )
    decay = args.discriminator_weight_decay if args.discriminator_regularization == "weight-decay" else 0.0
    return network, optax.adamw(args.discriminator_learning_rate, weight_decay=decay)


def init_discriminator(args: Args, obs_dim: int, action_dim: int, key: jax.Array) -> DiscriminatorState:
    network, optimizer = make_discriminator(args)
    key, init_key = jax.random.split(key)
    observation, action = jnp.zeros(obs_dim), jnp.zeros(action_dim)
    params = network.init(init_key, discriminator_input(args.discriminator_input, observation, action, observation))
    return DiscriminatorState(params, optimizer.init(params), key)


def make_discriminator_features(args: Args, mean: jax.Array, deviation: jax.Array) -> Callable:
    """Observations, actions and next observations -> features, scaled by the demonstrations' mean and deviation."""

    def features(observations: jax.Array, actions: jax.Array, next_observations: jax.Array) -> jax.Array:
        if args.normalize_observations:
            observations, next_observations = ((x - mean) / deviation for x in (observations, next_observations))
        return discriminator_input(args.discriminator_input, observations, actions, next_observations)

    return features


def make_discriminator_step(network: nn.Module, optimizer: optax.GradientTransformation) -> Callable:
    """One gradient step on a batch of the expert's features and one of the agent's; also the loss and the accuracy."""

    def loss_fn(params: Any, features: jax.Array, key: jax.Array) -> jax.Array:
        logits = network.apply(params, features, train=True, rngs={"dropout": key})
        return discriminator_loss(*jnp.split(logits, 2))

    def step(state: DiscriminatorState, expert: jax.Array, agent: jax.Array) -> tuple[DiscriminatorState, jax.Array]:
        key, dropout_key = jax.random.split(state.key)
        features = jnp.concatenate([expert, agent])
        expert_logits, agent_logits = jnp.split(network.apply(state.params, features), 2)  # accuracy without dropout
        accuracy = 0.5 * (jnp.mean(expert_logits > 0) + jnp.mean(agent_logits <= 0))
        loss, grads = jax.value_and_grad(loss_fn)(state.params, features, dropout_key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return DiscriminatorState(params, opt_state, key), jnp.stack([loss, accuracy])

    return step


def make_sac_loss(args: Args, actor: nn.Module, critic: nn.Module, box: gym.spaces.Box) -> Callable:
    """Critics, actor and temperature in one loss: each part is a constant for what the others train, so that its
    gradient is that of the three side by side, in one pass."""
    constant, action_dim = jax.lax.stop_gradient, box.shape[0]

    def loss_fn(params: SACParams, target_critic: Any, batch: ContinuousBatch, noise: jax.Array):
        temperature = constant(jnp.exp(params.log_temperature))
        next_actions, next_log_probs = squash(*actor.apply(constant(params.actor), batch.next_observations), noise[0])
        q_next = critic.apply(target_critic, batch.next_observations, next_actions)
        returns = args.reward_scale * batch.returns
        target = soft_target(q_next, next_log_probs, returns, batch.discounts, temperature)
        q = critic.apply(params.critic, batch.observations, from_box(batch.actions, box))
        critic_loss = jnp.sum(jnp.mean((q - constant(target)) ** 2, axis=1))

        actions, log_probs = squash(*actor.apply(params.actor, batch.observations), noise[1])
        q_policy = jnp.min(critic.apply(constant(params.critic), batch.observations, actions), axis=0)
        actor_loss = jnp.mean(temperature * log_probs - q_policy)
        entropy = -jnp.mean(log_probs)
        loss = critic_loss + actor_loss + temperature_loss(params.log_temperature, entropy, -float(action_dim))
        metrics = {"critic_loss": critic_loss, "actor_loss": actor_loss, "temperature": temperature}
        return loss, {**metrics, "entropy": entropy, "q_value": jnp.mean(q)}

    return loss_fn


def make_sac_optimizer(args: Args) -> optax.GradientTransformation:
    return optax.adam(args.learning_rate)


def make_sac_update(args: Args, env: gym.Env, reference: Any = None) -> Callable:
    """One update; returns every metric by name. `reference` is GAIL's."""
    box, obs_dim, optimizer = env.action_space, env.observation_space.shape[0], make_sac_optimizer(args)
    loss_fn = make_sac_loss(args, Actor(box.shape[0]), TwinCritic(), box)
    if args.method == "gail":
        network, discriminator_optimizer = make_discriminator(args)
        features = make_discriminator_features(args, reference.mean, reference.deviation)
        discriminator_step = make_discriminator_step(network, discriminator_optimizer)

    def imitate(state: Any, key: jax.Array, replay: ContinuousReplay, demos: ContinuousReplay, windows: Windows):
        """One step of the discriminator, and the windows with its rewards instead of the environment's."""
        keys, sizes = jax.random.split(key), (args.batch_size, obs_dim, box.shape[0])
        expert, agent = (features(*sample_triples(*data, k, *sizes)) for data, k in zip((demos, replay), keys))
        state, (loss, accuracy) = discriminator_step(state, expert, agent)
        logits = network.apply(state.params, features(windows.observations, windows.actions, windows.next_observations))
        rewards = discriminator_reward(logits, args.reward_balance)
        metrics = {"discriminator_loss": loss, "discriminator_accuracy": accuracy, "imitation_reward": rewards.mean()}
        return state, windows._replace(rewards=rewards), metrics

    def update(state: SACState, replay: ContinuousReplay, demos: ContinuousReplay | None) -> tuple[SACState, dict]:
        key, batch_key, noise_key, demo_key, coin_key = jax.random.split(state.key, 5)
        sizes, discriminator, metrics = (args.batch_size, args.n_step, obs_dim), state.discriminator, {}
        windows = sample_windows(replay, batch_key, *sizes)
        if args.method == "sacfd":
            windows = mix_windows(windows, sample_windows(demos, demo_key, *sizes), coin_key, args.demo_ratio)
        elif args.method == "gail":
            discriminator, windows, metrics = imitate(discriminator, demo_key, replay, demos, windows)
        noise = jax.random.normal(noise_key, (2, args.batch_size, box.shape[0]))
        batch = n_step_batch(windows, args.gamma)
        grads, sac_metrics = jax.grad(loss_fn, has_aux=True)(state.params, state.target_critic, batch, noise)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        target_critic = optax.incremental_update(params.critic, state.target_critic, args.tau)
        return SACState(params, target_critic, opt_state, key, discriminator), sac_metrics | metrics

    return jax.jit(update, donate_argnums=0)


def make_sac_policy(box: gym.spaces.Box) -> Callable:
    """For one observation or a batch: uniformly random actions, a sample of the policy, or its mean."""
    actor = Actor(box.shape[0])

    def policy(params: Any, observations: jax.Array, key: jax.Array, mode: str) -> tuple[jax.Array, jax.Array]:
        key, noise_key = jax.random.split(key)
        mean, log_deviation = actor.apply(params, observations)
        if mode == "random":
            return to_box(jax.random.uniform(noise_key, mean.shape, minval=-1.0), box), key
        noise = jax.random.normal(noise_key, mean.shape) if mode == "sample" else jnp.zeros_like(mean)
        return to_box(jnp.tanh(mean + jnp.exp(log_deviation) * noise), box), key

    return jax.jit(policy, static_argnames="mode")


def initial_state(args: Args, env: gym.Env, key: jax.Array) -> SACState:
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    observations, actions = jnp.zeros((1, obs_dim)), jnp.zeros((1, action_dim))
    key, actor_key, critic_key, discriminator_key = jax.random.split(key, 4)
    actor_params = Actor(action_dim).init(actor_key, observations)
    critic_params = TwinCritic().init(critic_key, observations, actions)
    params, discriminator = SACParams(actor_params, critic_params, jnp.zeros(())), None
    if args.method == "gail":
        discriminator = init_discriminator(args, obs_dim, action_dim, discriminator_key)
    target_critic = jax.tree.map(jnp.copy, critic_params)
    return SACState(params, target_critic, make_sac_optimizer(args).init(params), key, discriminator)


# ---------------------------------------------------------------------------------------- Wasserstein distance


class Reference(NamedTuple):
    """What a run has to know of the demonstrator: made once from the demonstrations and kept in the run folder."""

    mean: Any  # (obs,) of all demonstrated states
    deviation: Any  # (obs,)
    states: Any  # (SINKHORN_POINTS, obs) drawn from the demonstrated states, normalised
    weights: Any  # (SINKHORN_POINTS,)
    human: Any  # (3,) quartiles of the human score; NaN where there are too few episodes


@jax.jit
def sinkhorn_cost(x: jax.Array, y: jax.Array, x_weights: jax.Array, y_weights: jax.Array, epsilon: float) -> jax.Array:
    """<P, C> of the entropy-regularised plan P and the Euclidean distances C (POT's sinkhorn2). (N, D), (M, D)."""
    cost = jnp.linalg.norm(x[:, None, :] - y[None, :, :], axis=-1)
    problem = linear_problem.LinearProblem(geometry.Geometry(cost, epsilon=epsilon), x_weights, y_weights)
    momentum = acceleration.Momentum(start=100)  # adaptive: same solution in about half the iterations
    solver = sinkhorn.Sinkhorn(threshold=SINKHORN_THRESHOLD, max_iterations=10_000, momentum=momentum)
    return solver(problem).primal_cost


def draw_states(states: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """SINKHORN_POINTS of the states and their weights. A smaller set is filled up with points of weight 0, so that
    the shape is always the same: one compilation."""
    drawn = states[generator.permutation(len(states))[:SINKHORN_POINTS]]
    points = np.zeros((SINKHORN_POINTS, states.shape[1]), np.float32)
    points[: len(drawn)] = drawn
    return points, np.where(np.arange(SINKHORN_POINTS) < len(drawn), 1 / len(drawn), 0.0).astype(np.float32)


def wasserstein(states: np.ndarray, reference: Reference) -> float:
    """The Sinkhorn distance of an agent's states from the demonstrator's."""
    normalised = (states - np.asarray(reference.mean)) / np.asarray(reference.deviation)
    points, weights = draw_states(normalised, np.random.default_rng(SINKHORN_SEED))
    return float(sinkhorn_cost(points, reference.states, weights, reference.weights, SINKHORN_EPSILON))


def human_scores(states: np.ndarray, ends: np.ndarray, quiet: bool = False) -> np.ndarray:
    """The Sinkhorn distance of 5 random episodes from the remaining ones, 100 times (section 4.2)."""
    episode, scores = np.cumsum(ends) - ends, []
    generator = np.random.default_rng(SINKHORN_SEED)
    for _ in tqdm(range(HUMAN_REPETITIONS), desc="human score", disable=quiet):
        chosen = np.isin(episode, generator.choice(episode[-1] + 1, HUMAN_EPISODES, replace=False))
        (x, x_weights), (y, y_weights) = (draw_states(part, generator) for part in (states[chosen], states[~chosen]))
        scores.append(float(sinkhorn_cost(x, y, x_weights, y_weights, SINKHORN_EPSILON)))
    return np.array(scores)


def make_reference(demos: Demonstrations, quiet: bool = False) -> Reference:
    mean, deviation = demos.observations.mean(axis=0), demos.observations.std(axis=0)
    deviation = np.where(deviation > 1e-6, deviation, 1).astype(np.float32)  # what never varies is only centred
    normalised = (demos.observations - mean) / deviation
    points, weights = draw_states(normalised, np.random.default_rng(SINKHORN_SEED))
    human = np.full(3, np.nan)
    if demos.ends.sum() > HUMAN_EPISODES:
        human = np.quantile(human_scores(normalised, demos.ends, quiet), [0.25, 0.5, 0.75])
    else:
        few = f"no human Wasserstein score: it needs more than {HUMAN_EPISODES} episodes, and there are"
        print(f"{few} {demos.ends.sum()}", file=sys.stderr)
    return Reference(mean, deviation, points, weights, human.astype(np.float32))


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


def evaluate_clone(
    policy: Callable, params: Any, envs: list[gym.Env], reference: Reference
) -> tuple[Evaluation, float]:
    """`evaluate`, and the Wasserstein distance of the states in which the agent acted from the demonstrator's."""
    visited: list[np.ndarray] = []

    def recording_policy(observations: np.ndarray) -> jax.Array:
        visited.append(observations.copy())
        return policy(params, observations, len(visited))

    result = evaluate(recording_policy, envs)
    acted = np.arange(len(visited)) < result.lengths[:, None]  # (episodes, steps): shorter episodes stand still
    return result, wasserstein(np.stack(visited, axis=1)[acted], reference)


def evaluate_actor(policy: Callable, params: Any, envs: list, reference: Reference | None) -> tuple[Evaluation, float]:
    """The mean action's episodes, and where there is a demonstrator to be compared with, the Wasserstein distance."""
    key = jax.random.PRNGKey(0)  # of no consequence
    if reference is None:
        return evaluate(lambda observations: policy(params, observations, key, mode="mean")[0], envs), math.nan
    return evaluate_clone(lambda params, x, _: policy(params, x, key, mode="mean")[0], params, envs, reference)


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


def load_sac_args(run: Path) -> Args:
    with explained(f"{run} is not a run folder of this script"):
        saved = json.loads((run / "args.json").read_text())
        kind = {"sac": SACArgs, "sacfd": SACfDArgs, "gail": GAILArgs}[saved["method"]]
        return kind(**{field.name: saved[field.name] for field in dataclasses.fields(kind) if field.init})


def load_reference(run: Path, obs_dim: int) -> Reference:
    shapes = [(obs_dim,), (obs_dim,), (SINKHORN_POINTS, obs_dim), (SINKHORN_POINTS,), (3,)]
    template = Reference(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return load_arrays(run / "reference.npz", template)[0]


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


def write_scores(path: Path, step: int, result: Evaluation, distance: float, human: Any, log: Any) -> None:
    """evaluations.csv and TensorBoard. Rows from this step on are what an interrupted run had written: replaced."""
    scores = {
        "success_rate": np.mean(result.successes),
        "episodic_return": np.mean(result.returns),
        "episodic_length": np.mean(result.lengths),
        "episodes": len(result.returns),
        "wasserstein": distance,
        **{f"human_wasserstein_{name}": score for name, score in zip(("q25", "median", "q75"), human)},
    }
    for tag, score in scores.items():
        if tag != "episodes" and np.isfinite(score):
            log.add_scalar(f"eval/{tag}", float(score), step)
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    kept = [line for line in lines if int(line.split(",")[0]) < step]
    row = ",".join(map(str, [step, *(np.asarray(score).item() for score in scores.values())]))
    path.with_suffix(".partial").write_text("\n".join([",".join(["step", *scores]), *kept, row]) + "\n")
    path.with_suffix(".partial").replace(path)  # earlier rows survive a kill


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


def load_actor(run: Path, env: gym.Env) -> tuple[Any, dict]:
    """The actor of the latest evaluation, and the step it is from."""
    network, observations = Actor(env.action_space.shape[0]), jnp.zeros((1, env.observation_space.shape[0]))
    template = jax.eval_shape(network.init, jax.random.PRNGKey(0), observations)
    return load_arrays(run / "agent.npz", template)


# --------------------------------------------------------------------------------------------------- training


def finite(values: dict[str, Any], step: int) -> dict[str, np.ndarray]:
    """The values on the host, or the end: what is not finite once stays so, and must not reach a checkpoint."""
    values = {name: np.asarray(value) for name, value in values.items()}
    bad = [name for name, value in values.items() if not np.isfinite(value).all()]
    if bad:
        sys.exit(f"error: not finite at step {step}: {', '.join(bad)}; lower --learning-rate")
    return values


def train_sac(
    args: Args,
    run: Path,
    env: gym.Env,
    demos: ContinuousReplay | None,
    reference: Reference | None,
    log: Any,
    signals: list,
) -> None:
    """Random actions at first, then the policy's, with one update per environment step, at the same time: the action of
    a step is chosen by the policy as it is before that step's update."""
    obs_dim, box = env.observation_space.shape[0], env.action_space
    row_size = 2 * obs_dim + box.shape[0] + 3
    key, act_key = jax.random.split(jax.random.PRNGKey(args.seed))
    agent = initial_state(args, env, key)
    capacity = min(args.buffer_size, args.total_timesteps)
    rows, step, metrics = np.zeros((capacity, row_size), np.float32), 0, {}
    env.reset(seed=args.seed)
    if (run / "state.npz").exists():
        (agent, act_key), meta = load_arrays(run / "state.npz", (agent, act_key))
        env.unwrapped.np_random.bit_generator.state, step = meta["env_generator"], meta["step"]
        kept = np.arange(max(0, step - capacity), step)
        rows[kept % capacity] = restore_rows(run / "replay.f32", step, row_size)[kept]
    else:
        (run / "replay.f32").unlink(missing_ok=True)  # of a run that was killed before its first checkpoint was whole
    replay = ContinuousReplay(jnp.asarray(rows), jnp.asarray(step, jnp.int32))
    del rows
    policy, learn = make_sac_policy(box), make_sac_update(args, env, reference)
    store_rows = jax.jit(store_transitions, donate_argnums=0)
    eval_envs = [make_task(args, args.capture_video and i == 0) for i in range(args.eval_episodes)]
    progress = tqdm(desc=args.method, total=args.total_timesteps, initial=step, unit="step", disable=args.quiet)
    unsaved, saved_step, logged_step, logged_time = [], step, step, time.perf_counter()
    observation, episode_return, episode_length, success = first_observation(env), 0.0, 0, 0.0

    while True:
        if step % args.eval_every == 0 or step >= args.total_timesteps:
            started = time.perf_counter()
            finite(metrics, step)
            result, distance = evaluate_actor(policy, agent.params.actor, eval_envs, reference)
            save_arrays(run / "agent.npz", agent.params.actor, step=step)
            if reference is None:
                write_evaluation(run / "evaluations.csv", step, result, log)
            else:
                write_scores(run / "evaluations.csv", step, result, distance, reference.human, log)
            summary = {"return": result.returns.mean(), "success": result.successes.mean()}
            progress.set_postfix({name: f"{value:.2f}" for name, value in summary.items()}, refresh=False)
            if result.frames:
                write_video(run / "videos" / f"step_{step}.mp4", result.frames, env.metadata.get("render_fps", 30))
            logged_time += time.perf_counter() - started  # SPS is the speed of training alone
        if step >= args.total_timesteps:
            break
        mode = "random" if step < args.learning_starts else "sample"
        action, act_key = policy(agent.params.actor, observation, act_key, mode=mode)
        if step > args.learning_starts:  # JAX does not wait for the result, so the environment steps meanwhile
            agent, metrics = learn(agent, replay, demos)
        action = finite({"action": action}, step)["action"]
        next_observation, reward, terminated, truncated, info = env.step(action)
        row = pack_transitions(observation, next_observation, action, reward, terminated, terminated or truncated)
        replay = store_rows(replay, row[None])
        unsaved.append(row)
        progress.update()
        observation, step = np.asarray(next_observation, np.float32), step + 1
        episode_return, episode_length = episode_return + reward, episode_length + 1
        success = max(success, float(info.get("success", 0)))
        if step - logged_step >= 1000:
            for name, value in finite(metrics, step).items():
                log.add_scalar(f"losses/{name}", value, step)
            log.add_scalar("charts/SPS", (step - logged_step) / (time.perf_counter() - logged_time), step)
            logged_step, logged_time = step, time.perf_counter()
        if terminated or truncated:
            log.add_scalar("charts/episodic_return", episode_return, step)
            log.add_scalar("charts/episodic_length", episode_length, step)
            if "success" in info:
                log.add_scalar("charts/success", success, step)
            # An environment can be restored between two episodes only, so save before one more passes the limit.
            if step + episode_length > saved_step + args.checkpoint_every or signals:
                finite(metrics, step)
                append_rows(run / "replay.f32", unsaved)
                generator = env.unwrapped.np_random.bit_generator.state
                log.flush()  # a kill loses what is not written, and a resumed run does not log it again
                save_arrays(run / "state.npz", (agent, act_key), step=step, env_generator=generator)
                unsaved, saved_step = [], step
                exit_if_asked(signals, run)
            observation, episode_return, episode_length, success = first_observation(env), 0.0, 0, 0.0
    append_rows(run / "replay.f32", unsaved)  # for record.py; --resume cuts it off again
    progress.close()


def raise_rewards(rewards: np.ndarray, lowest: float | None, reward: str) -> np.ndarray:
    """Demonstrated rewards, no less than the minimum. The paper has it for the sparse reward; with another it can make
    demonstrations look better than they were, so say what it does."""
    raised = np.maximum(rewards, -math.inf if lowest is None else lowest)
    if reward == "env" and (raised > rewards).any():
        share = f"{np.mean(raised > rewards):.0%} of the demonstrated rewards"
        print(f"--min-demo-reward {lowest} raises {share}; with None they stay as they are", file=sys.stderr)
    return raised


def load_demo_replay(args: SACfDArgs | GAILArgs, env: gym.Env) -> tuple[Demonstrations, ContinuousReplay, str | None]:
    """The demonstrations, the same as a replay, and a warning where they are not the human ones."""
    if args.dataset_id is None:
        demos, args.dataset_id, warning = load_default_demonstrations(args, env)
    else:
        sparse = args.reward == "sparse" and args.method == "sacfd"  # GAIL's may lack success: it needs no reward
        demos, warning = load_demonstrations(args.dataset_id, env, sparse, args.num_demos), None
    rewards = raise_rewards(demos.rewards, getattr(args, "min_demo_reward", None), args.reward)
    states = demos.observations, demos.next_observations
    rows = pack_transitions(*states, demos.actions, rewards, demos.terminations, demos.ends)
    return demos, ContinuousReplay(jnp.asarray(rows), jnp.asarray(len(rows))), warning


def train(args: Args) -> Path:
    """Whatever can be wrong with the input is found before the run folder is made."""
    check_sac_args(args)
    env, demo_replay, reference, warning = make_task(args), None, None, None
    require_bounds(env)
    args.reward = "sparse" if isinstance(env.env, SparseReward) else "env"
    if args.method != "sac":
        demos, demo_replay, warning = load_demo_replay(args, env)
    run, warning = open_run_folder(args, warning)
    log, signals = make_log(args, run, warning), catch_signals()
    if args.method == "gail":
        if not (run / "reference.npz").exists():
            save_arrays(run / "reference.npz", make_reference(demos, args.quiet))
            exit_if_asked(signals, run)
        reference = load_reference(run, demos.observations.shape[1])
    train_sac(args, run, env, demo_replay, reference, log, signals)
    log.close()
    if not args.quiet:
        print(f"done; evaluate with: python {Path(__file__).name} --evaluate {run}")
    return run


def evaluate_sac_run(args: Args) -> None:
    """Prints return, success (with 95 percent confidence intervals) and for GAIL the Wasserstein distance of a run's
    latest evaluated agent."""
    check_sac_args(args)
    run = Path(args.evaluate)
    saved = load_sac_args(run)
    envs = [make_task(saved, args.capture_video and i < 3) for i in range(args.eval_episodes)]
    reference = load_reference(run, envs[0].observation_space.shape[0]) if saved.method == "gail" else None
    params, meta = load_actor(run, envs[0])
    result, distance = evaluate_actor(make_sac_policy(envs[0].action_space), params, envs, reference)
    print(f"{run}, step {meta['step']}, {len(envs)} episodes")
    half = 1.96 * result.returns.std(ddof=1) / math.sqrt(len(envs)) if len(envs) > 1 else math.nan
    print(f"return  {result.returns.mean():.3f} +- {half:.3f}")
    if not np.isnan(result.successes).any():
        print("success {:.3f} ({:.3f} to {:.3f})".format(result.successes.mean(), *wilson_interval(result.successes)))
    if reference is not None:
        low, median, high = map(float, reference.human)
        print(f"Wasserstein distance {distance:.3f}; human {median:.3f} (quartiles {low:.3f} and {high:.3f})")
    if result.frames:
        path = run / "videos" / f"evaluation_{meta['step']}.mp4"
        write_video(path, result.frames, envs[0].metadata.get("render_fps", 30))
        print(f"video   {path}")


Command = (
    Annotated[SACArgs, tyro.conf.subcommand("sac")]
    | Annotated[SACfDArgs, tyro.conf.subcommand("sacfd")]
    | Annotated[GAILArgs, tyro.conf.subcommand("gail")]
)


def require_end_ahead(run: Path, argument: str, end: int) -> None:
    """A resumed run may be given another end, but none that its checkpoint has passed."""
    path = run / "state.npz"
    if path.exists():
        with explained(f"{path} is not a whole checkpoint"), np.load(path, allow_pickle=False) as file:
            step = json.loads(file["meta"].tobytes())["step"]
        require(step <= end, f"{run} is at step {step} already: give {argument} no less")


def parse_sac_command(argv: list[str]) -> SACArgs | SACfDArgs | GAILArgs:
    """`--resume RUN` and `--evaluate RUN` need no subcommand, for a run knows its own. A resumed run has its own
    arguments too: only what does not change the learning may be given anew."""
    flags = ("--resume", "--evaluate")
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith(flags) else [word])]
    for flag, run in zip(argv, argv[1:]):
        if flag in flags and argv[0].startswith("-"):
            argv = [load_sac_args(Path(run)).method, *argv]
            break
    args = tyro.cli(Command, args=argv, description=__doc__)
    if not args.resume or args.evaluate:
        return args
    saved = load_sac_args(Path(args.resume))
    require(saved.method == args.method, f"{args.resume} is a run of {saved.method}, not of {args.method}")
    changed = tyro.cli(type(saved), args=argv[1:], default=dataclasses.replace(saved, resume=args.resume))
    free = {"resume", "total_timesteps", "eval_every", "checkpoint_every", "capture_video", "track", "quiet"}
    for field in dataclasses.fields(saved):
        same = field.name in free or getattr(changed, field.name) == getattr(saved, field.name)
        require(same, f"--{field.name.replace('_', '-')} cannot be changed by --resume: start a new run")
    require_end_ahead(Path(args.resume), "--total-timesteps", changed.total_timesteps)
    return changed


def main() -> None:
    try:
        args = parse_sac_command(sys.argv[1:])
        if args.evaluate:
            evaluate_sac_run(args)
        else:
            train(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
