# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.4.0", "gymnasium-robotics==1.4.2", "mujoco==3.17.0",
#   "minari[hdf5,hf]==0.5.4", "ott-jax==0.6.0", "tyro", "tensorboard", "tensorboardX", "tqdm", "matplotlib", "imageio",
#   "imageio-ffmpeg",
# ]
# ///
"""AQuaGAIL: imitation learning without any reward (section 4.2 of the AQuaDem paper).

Learn K candidate actions per state from demonstrations (equation 1), which turns the continuous problem into a
discrete one; then train a discriminator between demonstrations and the agent's experience, and with it Munchausen DQN,
whose reward is the discriminator's confusion. The environment's reward is only reported, never stored or learned from.

    python aquagail.py --env-id AdroitHandDoor-v1
    python aquagail.py --resume runs/AdroitHandDoor-v1__aquagail__1__1700000000
    python aquagail.py --evaluate runs/AdroitHandDoor-v1__aquagail__1__1700000000 --capture-video

Imitation is measured twice: by success, and by the Wasserstein distance between the states of the agent and those of
the demonstrator, beside the distance of demonstrations from one another.

Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin:
"Continuous Control with Action Quantization from Demonstrations", ICML 2022.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import signal
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
from ott.geometry import geometry
from ott.problems.linear import linear_problem
from ott.solvers.linear import acceleration, sinkhorn
from tqdm import tqdm

UPDATE_BLOCK = 8  # environment steps, then as many updates in one call (the authors' code: 8 SGD steps per step)
CANDIDATE_BLOCK = 500  # candidate-network steps in one call
START_TEMPERATURE = 0.25  # of the demonstrated actions' variance, unless --temperature-start is given
EVALUATION_SEED = 2**31  # evaluation episode i starts from seed EVALUATION_SEED + i; --seed stays below it
BUNDLED_DEMONSTRATIONS = Path(__file__).resolve().parent / "demos"
METRICS = ["losses/q_loss", "losses/q_value"]  # of a block of updates, in the order in which they are returned
METRICS += [f"discriminator/{name}" for name in ("loss", "accuracy", "reward_mean", "reward_std")]

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
    """any Gymnasium id with a Box action space; `module:Env-v0` imports the module first"""
    dataset_id: str | None = None
    """any Minari id, used from disk or else downloaded; default for Adroit: D4RL/<task>/human-v2"""
    num_demos: int | None = None
    """use only the first N episodes of the dataset; default: all"""
    reward: Literal["sparse", "env"] | None = None
    """what evaluations report as the return, never what is learned from: sparse is 1 at every step with
    info["success"], else 0; default: sparse if the environment reports success"""
    seed: int = 1
    """seed of networks, batches, exploration and environment; equal seeds give bit-identical runs on a CPU"""
    total_timesteps: int = 1_000_000
    """environment steps"""
    eval_every: int = 50_000
    """environment steps between evaluations"""
    eval_episodes: int = 30
    """episodes of an evaluation, greedy, always from the same initial states"""
    exp_name: str = "aquagail"
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}"""

    candidates: Literal["learned", "kmeans", "random"] = "learned"
    """learned: equation 1; kmeans, random: the ablations of appendix D (fixed set; untrained network)"""
    num_actions: int = 10
    """K, candidate actions per state"""
    temperature: float = 0.001
    """T of the soft minimum"""
    temperature_start: float | None = None
    """T at the first step, from where it falls to --temperature in the first half of the training; default: a quarter
    of the demonstrated actions' variance; equal to --temperature: constant, as in the paper"""
    candidate_steps: int = 50_000
    """gradient steps of the candidate network"""
    held_out_episodes: int = 0
    """the last N demonstrations are kept from the candidates, to see how near to unseen actions they come"""
    candidate_learning_rate: float = 3e-4
    """Adam's learning rate for the candidate network"""
    input_dropout: float = 0.0
    """dropout on the observation while training the candidates"""
    hidden_dropout: float = 0.0
    """dropout after every hidden layer while training the candidates"""
    candidates_from: str | None = None
    """run folder whose trained candidates are used instead of training them"""

    discriminator_input: Literal["state-action", "state", "state-next-state"] = "state"
    """what the discriminator compares (the paper does not say; docs/RESULTS.md has all three on Door)"""
    discriminator_layers: int = 1
    """hidden layers of the discriminator"""
    discriminator_units: int = 64
    """units of each of them"""
    discriminator_learning_rate: float = 1e-6
    """Adam's learning rate for the discriminator"""
    discriminator_regularization: Literal["none", "dropout", "weight-decay"] = "dropout"
    """what keeps the discriminator from being too good"""
    discriminator_input_dropout: float = 0.5
    """dropout on its input, if that is the regularization"""
    discriminator_hidden_dropout: float = 0.5
    """dropout after each of its hidden layers, if that is the regularization"""
    discriminator_weight_decay: float = 10.0
    """decoupled weight decay (AdamW), if that is the regularization (the paper's choice for GAIL)"""
    normalize_observations: bool = True
    """the discriminator sees observations centred and scaled by the demonstrations' mean and standard deviation"""
    reward_balance: float = 0.5
    """0: -log p; 1: log(1 - p); between: their weighted mean; p is the probability of "agent" """

    batch_size: int = 256
    """batch of the candidate and the Q-network, and of either half of the discriminator's"""
    learning_rate: float = 3e-5
    """Adam's learning rate for the Q-network"""
    gamma: float = 0.99
    """discount (the authors' code)"""
    n_step: int = 1
    """length of the multi-step return"""
    epsilon: float = 0.01
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
    """record videos: of evaluation episodes, and of the candidates along a demonstration"""
    track: bool = False
    """log to Weights & Biases too (if it is installed)"""
    quiet: bool = False
    """no progress bars, only warnings and errors"""


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


def check_imitation_args(args: Args) -> None:
    counts = "num_demos num_actions batch_size n_step total_timesteps eval_every eval_episodes buffer_size"
    bounds = dict.fromkeys(f"{counts} target_update_period checkpoint_every".split(), (1, math.inf))
    bounds |= dict.fromkeys(
        ["candidate_steps", "held_out_episodes", "learning_starts", "discriminator_layers"], (0, math.inf)
    )
    bounds |= {"discriminator_units": (1, math.inf), "discriminator_weight_decay": (0, 1e9)}
    bounds |= dict.fromkeys(["epsilon", "gamma", "reward_balance"], (0, 1))
    dropouts = ["input_dropout", "hidden_dropout"]
    bounds |= dict.fromkeys([*dropouts, *(f"discriminator_{name}" for name in dropouts)], (0, 0.99))
    rates = ["learning_rate", "candidate_learning_rate", "discriminator_learning_rate"]
    bounds |= dict.fromkeys(["temperature", "munchausen_tau", *rates], (1e-9, 1e9))
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


def first_observation(env: gym.Env) -> np.ndarray:
    return np.asarray(env.reset()[0], np.float32)


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


def soft_min_loss(candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """Equation 1 in the form f_T of appendix B. candidates (B, K, D), actions (B, D)."""
    distances = jnp.sum((candidates - actions[:, None, :]) ** 2, axis=-1)  # (B, K)
    log_mean = jax.nn.logsumexp(-distances / temperature, axis=-1) - jnp.log(candidates.shape[1])
    return jnp.mean(-temperature * log_mean)


def nearest_candidate(candidates: jax.Array, actions: jax.Array) -> jax.Array:
    """Index of the candidate with the smallest Euclidean distance. (..., K, D), (..., D) -> (...)."""
    return jnp.argmin(jnp.sum((candidates - actions[..., None, :]) ** 2, axis=-1), axis=-1)


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


class Experience(NamedTuple):
    """A ring of transitions on the device, without rewards. A row: observation | next observation | executed action |
    its index, terminated, ended."""

    rows: jax.Array  # (capacity, 2 * obs + action_dim + 3) float32
    count: jax.Array  # transitions ever stored; the newest is row (count - 1) % capacity


class ExperienceWindows(NamedTuple):
    """n consecutive steps, from each of B drawn transitions on."""

    observations: jax.Array  # (B, n, obs)
    next_observations: jax.Array  # (B, n, obs)
    actions: jax.Array  # (B, n, action_dim) as executed
    indices: jax.Array  # (B, n) of the candidates
    terminations: jax.Array  # (B, n)
    ends: jax.Array  # (B, n)


class Batch(NamedTuple):
    observations: jax.Array  # (B, obs)
    actions: jax.Array  # (B,) candidate indices
    returns: jax.Array  # (B,) n-step
    next_observations: jax.Array  # (B, obs) the bootstrap state
    discounts: jax.Array  # (B,)


def pack_experience(observations, next_observations, actions, indices, terminations, ends) -> np.ndarray:
    """One transition (or many) as rows of an Experience."""
    parts = [observations, next_observations, actions, np.stack([indices, terminations, ends], axis=-1)]
    return np.concatenate(parts, axis=-1, dtype=np.float32, casting="same_kind")


def store_experience(experience: Experience, rows: jax.Array) -> Experience:
    where = (experience.count + jnp.arange(len(rows))) % len(experience.rows)
    return Experience(experience.rows.at[where].set(rows), experience.count + len(rows))


def sample_experience(
    experience: Experience, key: jax.Array, batch_size: int, n_step: int, obs_dim: int
) -> ExperienceWindows:
    """Uniform over stored transitions; a window that meets the newest one stops there, as at an episode's end."""
    capacity = len(experience.rows)
    first = jax.random.randint(key, (batch_size,), 0, jnp.minimum(experience.count, capacity))
    offsets = jnp.arange(n_step)
    rows = experience.rows[(first[:, None] + offsets) % capacity]  # (B, n, row)
    borders = [obs_dim, 2 * obs_dim, rows.shape[-1] - 3]
    observations, next_observations, actions, scalars = jnp.split(rows, borders, axis=-1)
    indices, terminations, ends = jnp.moveaxis(scalars, -1, 0)
    steps_to_newest = (experience.count - 1 - first) % capacity
    ends = jnp.maximum(ends, offsets == steps_to_newest[:, None])
    return ExperienceWindows(observations, next_observations, actions, indices.astype(jnp.int32), terminations, ends)


def reward_windows(windows: ExperienceWindows, rewards: jax.Array, gamma: float) -> Batch:
    """The n-step batch of the Q-network, given a reward for every step of the windows (B, n)."""
    returns, last, discounts = n_step_returns(rewards, windows.terminations, windows.ends, gamma)
    next_observations = windows.next_observations[jnp.arange(len(last)), last]
    return Batch(windows.observations[:, 0], windows.indices[:, 0], returns, next_observations, discounts)


def sample_triples(
    rows: jax.Array, count: jax.Array, key: jax.Array, batch_size: int, obs_dim: int, action_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Observations, actions and next observations, uniform over what is stored of `count` transitions."""
    drawn = rows[jax.random.randint(key, (batch_size,), 0, jnp.minimum(count, len(rows)))]
    observations, next_observations, actions, _ = jnp.split(drawn, [obs_dim, 2 * obs_dim, 2 * obs_dim + action_dim], 1)
    return observations, actions, next_observations


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


class DiscriminatorState(NamedTuple):
    params: Any
    opt_state: Any
    key: jax.Array


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


def make_imitation_update(
    q_network: nn.Module, q_optimizer: optax.GradientTransformation, reference: Reference, args: Args
) -> Callable:
    """UPDATE_BLOCK times one step of the discriminator and one of the Q-network, in one call; returns mean METRICS.

    Rewards are those of the discriminator as it is when a batch is drawn: the replay holds none that could grow old.
    """
    discriminator_network, discriminator_optimizer = make_discriminator(args)
    discriminator_step = make_discriminator_step(discriminator_network, discriminator_optimizer)
    features = make_discriminator_features(args, reference.mean, reference.deviation)
    obs_dim = len(reference.mean)

    def targets(agent: AgentState, batch: Batch) -> jax.Array:
        both = jnp.concatenate([batch.observations, batch.next_observations])
        q_s, q_next = jnp.split(q_network.apply(agent.target_params, both), 2)
        tau, alpha, clip = args.munchausen_tau, args.munchausen_alpha, args.munchausen_clip
        return munchausen_target(q_s, q_next, batch.actions, batch.returns, batch.discounts, tau, alpha, clip)

    def loss_fn(params: Any, batch: Batch, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = jnp.take_along_axis(q_network.apply(params, batch.observations), batch.actions[:, None], axis=1)[:, 0]
        return jnp.mean(optax.huber_loss(q, target)), jnp.mean(q)

    def update(agent: AgentState, discriminator: DiscriminatorState, experience: Experience, demos: jax.Array):
        """demos: (N, 2 * obs + action_dim), rows that begin as those of the experience do."""
        dims = args.batch_size, obs_dim, demos.shape[1] - 2 * obs_dim

        def step(states: tuple[AgentState, DiscriminatorState], _: None):
            agent, discriminator = states
            key, expert_key, agent_key, batch_key = jax.random.split(agent.key, 4)
            discriminator, fit = discriminator_step(
                discriminator,
                features(*sample_triples(demos, len(demos), expert_key, *dims)),
                features(*sample_triples(experience.rows, experience.count, agent_key, *dims)),
            )
            windows = sample_experience(experience, batch_key, args.batch_size, args.n_step, obs_dim)
            seen = features(windows.observations, windows.actions, windows.next_observations)  # (B, n, features)
            logits = discriminator_network.apply(discriminator.params, seen)
            rewards = discriminator_reward(logits, args.reward_balance)
            batch = reward_windows(windows, rewards, args.gamma)
            (loss, q), grads = jax.value_and_grad(loss_fn, has_aux=True)(agent.params, batch, targets(agent, batch))
            updates, opt_state = q_optimizer.update(grads, agent.opt_state)
            params, count = optax.apply_updates(agent.params, updates), agent.updates + 1
            target_params = optax.periodic_update(params, agent.target_params, count, args.target_update_period)
            average = averaged(agent.average_params, params, args.ema_decay)
            agent = AgentState(params, average, target_params, opt_state, count, key)
            metrics = jnp.stack([loss, q, *fit, jnp.mean(rewards), jnp.std(rewards)])
            return (agent, discriminator), metrics

        states, metrics = jax.lax.scan(step, (agent, discriminator), None, length=UPDATE_BLOCK)
        return *states, jnp.mean(metrics, axis=0)

    return jax.jit(update, donate_argnums=(0, 1))


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


def train_imitation(
    args: Args,
    run: Path,
    env: gym.Env,
    network: nn.Module,
    candidate_params: Any,
    demos: Demonstrations,
    reference: Reference,
    log: Any,
    signals: list,
) -> None:
    """The second stage: epsilon-greedy steps in blocks, then as many updates of discriminator and agent in one call."""
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    row_size = 2 * obs_dim + action_dim + 3
    q_network, optimizer = QNetwork(args.num_actions), optax.adam(args.learning_rate)
    key, act_key, init_key = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(args.seed), 1), 3)
    params = q_network.init(init_key, jnp.zeros(obs_dim))
    average, target = (jax.tree.map(jnp.copy, params) for _ in range(2))  # an update gives its buffers away
    average = average if args.ema_decay else None
    agent = AgentState(params, average, target, optimizer.init(params), jnp.zeros((), jnp.int32), key)
    key = jax.random.fold_in(jax.random.PRNGKey(args.seed), 2)
    discriminator = init_discriminator(args, obs_dim, action_dim, key)
    capacity = min(args.buffer_size, -(-args.total_timesteps // UPDATE_BLOCK) * UPDATE_BLOCK)
    rows, step, block = np.zeros((capacity, row_size), np.float32), 0, []  # block: steps not yet in the replay
    env.reset(seed=args.seed)
    if (run / "state.npz").exists():
        (agent, discriminator, act_key), meta = load_arrays(run / "state.npz", (agent, discriminator, act_key))
        env.unwrapped.np_random.bit_generator.state, step = meta["env_generator"], meta["step"]
        past, stored = restore_rows(run / "replay.f32", step, row_size), step - step % UPDATE_BLOCK
        kept = np.arange(max(0, stored - capacity), stored)
        rows[kept % capacity], block = past[kept], list(np.array(past[stored:]))
    else:
        (run / "replay.f32").unlink(missing_ok=True)  # of a run that was killed before its first checkpoint was whole
    experience = Experience(jnp.asarray(rows), jnp.asarray(step - len(block), jnp.int32))
    del rows
    expert = jnp.concatenate([demos.observations, demos.next_observations, demos.actions], axis=1)
    learn = make_imitation_update(q_network, optimizer, reference, args)
    policy, store_rows = make_policy(q_network, network, env.action_space), jax.jit(store_experience, donate_argnums=0)
    eval_envs = [make_env(args.env_id, args.reward, args.capture_video and i == 0) for i in range(args.eval_episodes)]
    progress = tqdm(desc="agent", total=args.total_timesteps, initial=step, unit="step", disable=args.quiet)
    unsaved, saved_step, logged_step, logged_time = [], step, step, time.perf_counter()
    observation, episode_return, episode_length, success = first_observation(env), 0.0, 0, 0.0

    def greedy(params: Any, observations: np.ndarray, _: int) -> jax.Array:
        return policy(params, candidate_params, observations, act_key, epsilon=0.0)[0][:, :-1]

    while True:
        if step % args.eval_every == 0 or step >= args.total_timesteps:
            started = time.perf_counter()
            result, distance = evaluate_clone(greedy, evaluated_params(agent), eval_envs, reference)
            save_arrays(run / "agent.npz", evaluated_params(agent), step=step)
            write_scores(run / "evaluations.csv", step, result, distance, reference.human, log)
            summary = {"success": result.successes.mean(), "wasserstein": distance}
            progress.set_postfix({name: f"{value:.2f}" for name, value in summary.items()}, refresh=False)
            if result.frames:
                write_video(run / "videos" / f"step_{step}.mp4", result.frames, env.metadata.get("render_fps", 30))
            logged_time += time.perf_counter() - started  # SPS is the speed of training alone
        if step >= args.total_timesteps:
            break
        packed, act_key = policy(agent.params, candidate_params, observation, act_key, epsilon=args.epsilon)
        action, index = np.split(np.asarray(packed), [-1])
        next_observation, reward, terminated, truncated, info = env.step(action)
        row = pack_experience(observation, next_observation, action, index[0], terminated, terminated or truncated)
        block.append(row)
        unsaved.append(row)
        observation, step = np.asarray(next_observation, np.float32), step + 1
        episode_return, episode_length = episode_return + reward, episode_length + 1  # for the log only
        success = max(success, float(info.get("success", 0)))
        if len(block) == UPDATE_BLOCK:
            experience, block = store_rows(experience, np.stack(block)), []
            progress.update(UPDATE_BLOCK)
            if step > args.learning_starts:
                agent, discriminator, metrics = learn(agent, discriminator, experience, expert)
                metrics = dict(zip(METRICS, np.asarray(metrics).tolist()))
                if not all(map(math.isfinite, metrics.values())):
                    sys.exit(f"error: not finite at step {step}: {metrics}; lower --learning-rate")
                if step - logged_step >= 1000:
                    for tag, value in metrics.items():
                        log.add_scalar(tag, value, step)
                    log.add_scalar("charts/SPS", (step - logged_step) / (time.perf_counter() - logged_time), step)
                    logged_step, logged_time = step, time.perf_counter()
        if terminated or truncated:
            log.add_scalar("charts/episodic_return", episode_return, step)
            log.add_scalar("charts/episodic_length", episode_length, step)
            if "success" in info:
                log.add_scalar("charts/success", success, step)
            # An environment can be restored between two episodes only, so save before one more passes the limit.
            if step + episode_length > saved_step + args.checkpoint_every or signals:
                append_rows(run / "replay.f32", unsaved)
                generator = env.unwrapped.np_random.bit_generator.state
                states = (agent, discriminator, act_key)
                log.flush()  # a kill loses what is not written, and a resumed run does not log it again
                save_arrays(run / "state.npz", states, step=step, env_generator=generator)
                unsaved, saved_step = [], step
                exit_if_asked(signals, run)
            observation, episode_return, episode_length, success = first_observation(env), 0.0, 0, 0.0
    progress.close()


def train(args: Args) -> Path:
    """Whatever can be wrong with the input is found before the run folder is made."""
    check_imitation_args(args)
    env = make_env(args.env_id, args.reward)
    args.reward = "sparse" if isinstance(env.env, SparseReward) else "env"
    if args.dataset_id is None:
        demos, args.dataset_id, warning = load_default_demonstrations(args, env)
    else:  # demonstrations that do not report success serve as well
        demos, warning = load_demonstrations(args.dataset_id, env, sparse=False, num_demos=args.num_demos), None
    args.temperature_start = start_temperature(args, demos.actions)
    learned_from(args, demos)
    network = make_candidate_network(args, env.action_space.shape[0])
    if args.candidates_from and not args.resume:  # a run has a copy of its own
        load_candidates(Path(args.candidates_from), network, demos.observations.shape[1])
    signals = catch_signals()
    run, warning = open_run_folder(args, warning)
    log = make_log(args, run, warning)
    if not (run / "reference.npz").exists():
        save_arrays(run / "reference.npz", make_reference(demos, args.quiet))
        exit_if_asked(signals, run)
    reference = load_reference(run, demos.observations.shape[1])
    params = train_candidates(args, run, network, demos, log, signals)
    discretise(args, network, params, demos, log)  # for its report: no index of a demonstration is learned from
    picture_candidates(args, run, network, params, demos, env.action_space, log)
    train_imitation(args, run, env, network, params, demos, reference, log, signals)
    log.close()
    if not args.quiet:
        print(f"done; evaluate with: python {Path(__file__).name} --evaluate {run}")
    return run


def evaluate_imitation_run(args: Args) -> None:
    """Prints return, success (with 95 percent confidence intervals) and Wasserstein distance of a run's latest
    evaluated agent."""
    check_imitation_args(args)
    run = Path(args.evaluate)
    saved = load_args(run)
    envs = [make_env(saved.env_id, saved.reward, args.capture_video and i < 3) for i in range(args.eval_episodes)]
    obs_dim, box = envs[0].observation_space.shape[0], envs[0].action_space
    network, q_network = make_candidate_network(saved, len(box.low)), QNetwork(saved.num_actions)
    candidate_params, reference = load_candidates(run, network, obs_dim), load_reference(run, obs_dim)
    template = jax.eval_shape(q_network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    q_params, meta = load_arrays(run / "agent.npz", template)
    policy, key = make_policy(q_network, network, box), jax.random.PRNGKey(0)

    def greedy(params: Any, observations: np.ndarray, _: int) -> jax.Array:
        return policy(params, candidate_params, observations, key, epsilon=0.0)[0][:, :-1]

    result, distance = evaluate_clone(greedy, q_params, envs, reference)
    print(f"{run}, step {meta['step']}, {len(envs)} episodes")
    half = 1.96 * result.returns.std(ddof=1) / math.sqrt(len(envs)) if len(envs) > 1 else math.nan
    print(f"return  {result.returns.mean():.3f} +- {half:.3f}")
    if not np.isnan(result.successes).any():
        print("success {:.3f} ({:.3f} to {:.3f})".format(result.successes.mean(), *wilson_interval(result.successes)))
    low, median, high = map(float, reference.human)
    print(f"Wasserstein distance {distance:.3f}; human {median:.3f} (quartiles {low:.3f} and {high:.3f})")
    if result.frames:
        path = run / "videos" / f"evaluation_{meta['step']}.mp4"
        write_video(path, result.frames, envs[0].metadata.get("render_fps", 30))
        print(f"video   {path}")


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
    args = tyro.cli(Args, description=__doc__)
    try:
        if args.evaluate:
            evaluate_imitation_run(args)
        else:
            train(resumed_args(args) if args.resume else args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
