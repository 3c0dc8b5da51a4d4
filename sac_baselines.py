# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium[mujoco]==1.4.0",
#   "gymnasium-robotics==1.4.2", "robodesk==1.0.0", "dm_control==1.0.50", "mujoco==3.17.0",
#   "minari[hdf5,hf]==0.5.4", "ott-jax==0.6.0", "tyro", "tensorboard", "tensorboardX", "tqdm",
#   "imageio", "imageio-ffmpeg",
# ]
# ///
"""SAC, SAC from demonstrations and GAIL: the paper's continuous baselines (sections 4.1 to 4.3).

Soft actor-critic with an adaptive temperature; SACfD mixes demonstrations into its batches; GAIL
replaces the reward by what a discriminator between demonstrator and agent says.

    python sac_baselines.py sac --env-id AdroitHandDoor-v1    # or sacfd, or gail
    python sac_baselines.py --resume runs/AdroitHandDoor-v1__sac__1__1700000000
    python sac_baselines.py --evaluate runs/AdroitHandDoor-v1__sac__1__1700000000 --capture-video

Haarnoja et al.: "Soft Actor-Critic Algorithms and Applications", 2018.
Ho, Ermon: "Generative Adversarial Imitation Learning", NeurIPS 2016.
Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin:
"Continuous Control with Action Quantization from Demonstrations", ICML 2022.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import importlib.util
import io
import json
import math
import os
import platform
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
from flax import struct
from ott.geometry import geometry
from ott.problems.linear import linear_problem
from ott.solvers.linear import acceleration, sinkhorn
from tqdm import tqdm

STEPS_PER_CALL = 1  # one update per environment step
HIDDEN_UNITS = (256, 256)  # of actor and critics, with relu
LOG_DEVIATION_RANGE = (-20.0, 2.0)  # the SAC authors' code
EVALUATION_SEED = 2**31  # evaluation episode i starts from this + i; --seed stays below it
Optimizer = optax.GradientTransformation


@dataclasses.dataclass
class Args:
    env_id: str = "AdroitHandDoor-v1"  # RoboDesk-<task>, or any Gymnasium id with Box actions
    env_kwargs: str = "{}"  # arguments of the environment, as JSON
    max_episode_steps: int | None = None  # time limit; default: the environment's own
    reward: Literal["sparse", "env"] | None = None  # sparse (1 at info["success"]) if reported
    robodesk_rewards: Literal["upstream", "fixed"] = "fixed"  # of the desk: see robodesk_env.py
    seed: int = 1  # equal seeds give bit-identical runs on a CPU with as many threads
    total_timesteps: int = 1_000_000  # environment steps
    eval_every: int = 50_000  # environment steps between evaluations
    eval_episodes: int = 30  # with the mean action, always from the same initial states
    exp_name: str = "sac"  # in the folder's name: runs/{env_id}__{exp_name}__{seed}__{time}

    batch_size: int = 256  # transitions in a batch
    learning_rate: float = 1e-4  # Adam's, for actor, critics and temperature
    gamma: float = 0.99  # discount (the SAC paper)
    n_step: int = 5  # length of the multi-step return
    tau: float = 0.005  # how far the target critics move in every update (RoboDesk's table: 0.01)
    reward_scale: float = 0.5  # factor of every reward (RoboDesk's table: 1)
    buffer_size: int = 1_000_000  # transitions kept in the replay buffer
    learning_starts: int = 1_000  # random environment steps before the first update (ours)

    checkpoint_every: int = 10_000  # environment steps between checkpoints, at ends of episodes
    resume: str | None = None  # run folder to continue, with its own arguments
    evaluate: str | None = None  # run folder to evaluate instead of training
    capture_video: bool = False  # of evaluation episodes
    track: bool = False  # log to Weights & Biases too (if it is installed)
    quiet: bool = False  # no progress bars, only warnings and errors


@dataclasses.dataclass
class SACArgs(Args):
    """Soft actor-critic (appendix "SAC and SACfD", table "SAC")."""

    method: str = dataclasses.field(default="sac", init=False)


@dataclasses.dataclass
class SACfDArgs(Args):
    """SAC with demonstrations in a second buffer (appendix "SAC and SACfD", table "SACfD")."""

    method: str = dataclasses.field(default="sacfd", init=False)
    exp_name: str = "sacfd"  # in the folder's name: runs/{env_id}__{exp_name}__{seed}__{time}
    reward_scale: float = 0.3  # factor of every reward
    dataset_id: str | None = None  # any Minari id; default for Adroit: D4RL/<task>/human-v2
    num_demos: int | None = None  # use only the first N episodes of the dataset; default: all
    demo_ratio: float = 0.001  # probability that a window of a batch is from the demonstrations
    min_demo_reward: float | None = 0.01  # lower demonstrated rewards are raised (paper: or 0.1)


@dataclasses.dataclass
class GAILArgs(Args):
    """SAC on a discriminator's reward (appendix "GAIL"); the environment's is only reported."""

    method: str = dataclasses.field(default="gail", init=False)
    exp_name: str = "gail"  # in the folder's name: runs/{env_id}__{exp_name}__{seed}__{time}
    tau: float = 0.05  # how far the target critics move towards the critics in every update
    dataset_id: str | None = None  # any Minari id; default for Adroit: D4RL/<task>/human-v2
    num_demos: int | None = None  # use only the first N episodes of the dataset; default: all
    # what the discriminator compares (Ho and Ermon's GAIL: state and action)
    discriminator_input: Literal["state-action", "state", "state-next-state"] = "state-action"
    discriminator_layers: int = 1  # hidden layers of the discriminator
    discriminator_units: int = 256  # units of each of them
    discriminator_learning_rate: float = 3e-7  # Adam's, for the discriminator
    # what keeps the discriminator from being too good
    discriminator_regularization: Literal["none", "dropout", "weight-decay"] = "weight-decay"
    discriminator_input_dropout: float = 0.5  # if the regularization is dropout
    discriminator_hidden_dropout: float = 0.5  # after each hidden layer, likewise
    discriminator_weight_decay: float = 10.0  # AdamW's, if the regularization is weight-decay
    normalize_observations: bool = True  # for the discriminator, by mean and deviation of the demos
    reward_balance: float = 0.5  # 0: -log p, 1: log(1 - p), p: P("agent"); between: mixed


# --------------------------------------------------------------------------------------- networks


class Actor(nn.Module):
    """(..., obs) -> mean and log deviation before the tanh, (..., action_dim) each."""

    action_dim: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = observations
        for width in HIDDEN_UNITS:
            x = nn.relu(nn.Dense(width)(x))
        mean, log_deviation = jnp.split(nn.Dense(2 * self.action_dim)(x), 2, axis=-1)
        return mean, jnp.clip(log_deviation, *LOG_DEVIATION_RANGE)


class TwinCritic(nn.Module):
    """(B, obs), (B, action_dim) in [-1, 1] -> (2, B): every layer of both is one product."""

    @nn.compact
    def __call__(self, observations: jax.Array, actions: jax.Array) -> jax.Array:
        x = jnp.concatenate([observations, actions], axis=-1)
        x = jnp.broadcast_to(x, (2, *x.shape))
        init = nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        for layer, width in enumerate([*HIDDEN_UNITS, 1]):
            kernel = self.param(f"kernel_{layer}", init, (2, x.shape[-1], width))
            bias = self.param(f"bias_{layer}", nn.initializers.zeros, (2, 1, width))
            x = x @ kernel + bias
            if layer < len(HIDDEN_UNITS):
                x = nn.relu(x)
        return x[..., 0]


class Discriminator(nn.Module):
    """(..., features) -> (...): the logit of "the expert's", so that P(agent) = sigmoid(-logit)."""

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


# ----------------------------------------------------------------------------- losses and targets


def critic_loss(q: jax.Array, target: jax.Array) -> jax.Array:
    """The squared errors of both critics. (2, B), (B,) -> scalar."""
    return jnp.sum(jnp.mean((q - target) ** 2, axis=1))


def actor_loss(q: jax.Array, log_prob: jax.Array, temperature: jax.Array) -> jax.Array:
    """The policy's own actions: high value by the lower critic, much entropy. (2, B), (B,)."""
    return jnp.mean(temperature * log_prob - jnp.min(q, axis=0))


def temperature_loss(
    log_temperature: jax.Array, entropy: jax.Array, target_entropy: float
) -> jax.Array:
    """Descent lowers the temperature while the entropy is above its target, else raises it.

    As in the SAC authors' code the logarithm stands where their paper has the temperature: the
    slope does not fade.
    """
    return log_temperature * jax.lax.stop_gradient(entropy - target_entropy)


def soft_target(
    q_next: jax.Array,  # (2, B) target critics at the bootstrap state and the policy's action there
    log_prob_next: jax.Array,  # (B,) of that action
    reward: jax.Array,  # (B,) n-step return
    discount: jax.Array,  # (B,) gamma^n, 0 after a termination
    temperature: jax.Array,
) -> jax.Array:
    return reward + discount * (jnp.min(q_next, axis=0) - temperature * log_prob_next)


def squash(
    mean: jax.Array, log_deviation: jax.Array, noise: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """tanh of a Gaussian sample, (..., D), and its log density in (-1, 1)^D, (...).

    log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x)), which does not underflow where tanh is 1.
    """
    x = mean + jnp.exp(log_deviation) * noise
    action = jnp.tanh(x)
    log_gaussian = -0.5 * noise**2 - log_deviation - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - x - nn.softplus(-2 * x))
    return action, jnp.sum(log_gaussian - log_slope, axis=-1)


def to_box(units: jax.Array, box: gym.spaces.Box) -> jax.Array:
    """Actions in [-1, 1] as the environment wants them."""
    return jnp.clip(
        0.5 * (box.high + box.low) + 0.5 * (box.high - box.low) * units, box.low, box.high
    )


def from_box(actions: jax.Array, box: gym.spaces.Box) -> jax.Array:
    return (actions - 0.5 * (box.high + box.low)) / (0.5 * (box.high - box.low))


def discriminator_loss(expert_logits: jax.Array, agent_logits: jax.Array) -> jax.Array:
    """Cross-entropy: -log P(expert) of the expert's logits (B,), -log P(agent) of the agent's."""
    return 0.5 * (jnp.mean(nn.softplus(-expert_logits)) + jnp.mean(nn.softplus(agent_logits)))


def discriminator_reward(logits: jax.Array, balance: float) -> jax.Array:
    """(1 - balance) [-log p] + balance log(1 - p), p = P(agent) = sigmoid(-logit).

    Balance 0 is never negative and so rewards staying alive, 1 never positive, 0.5 half the logit
    (the paper's -0.5 log p + log(1 - p) is read as the mean of both).
    """
    return (1 - balance) * nn.softplus(logits) - balance * nn.softplus(-logits)


def n_step_returns(
    rewards: jax.Array, terminations: jax.Array, ends: jax.Array, gamma: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Windows of n steps (..., n) -> return, offset of the last step used, bootstrap's discount.

    A window stops at the first end of an episode. A termination does not bootstrap (discount 0); a
    truncation does, from the observation after the last step used.
    """
    n = rewards.shape[-1]
    ended_before = (jnp.cumsum(ends, axis=-1) - ends) > 0
    used = 1.0 - ended_before
    returns = jnp.sum(rewards * used * gamma ** jnp.arange(n), axis=-1)
    last = jnp.sum(used, axis=-1).astype(jnp.int32) - 1
    terminated = jnp.take_along_axis(terminations, last[..., None], axis=-1)[..., 0]
    return returns, last, gamma ** (last + 1.0) * (1.0 - terminated)


# ----------------------------------------------------------------------------------------- replay


class Transition(NamedTuple):
    """One step, or many of them with a leading axis; action and reward are the environment's."""

    observation: Any  # (obs,)
    next_observation: Any  # (obs,)
    action: Any  # (action_dim,)
    reward: Any
    terminated: Any  # the task itself ended
    ended: Any  # the episode ended, however


class Replay(NamedTuple):
    """A ring of transitions on the device."""

    transitions: Transition  # leading axis: capacity
    count: jax.Array  # transitions ever stored; the newest is at (count - 1) % capacity


class ContinuousBatch(NamedTuple):
    observations: jax.Array  # (B, obs)
    actions: jax.Array  # (B, action_dim)
    returns: jax.Array  # (B,) n-step
    next_observations: jax.Array  # (B, obs) the bootstrap state
    discounts: jax.Array  # (B,)


def make_replay(capacity: int, obs_dim: int, action_dim: int) -> Replay:
    transitions = Transition(
        observation=jnp.zeros((capacity, obs_dim)),
        next_observation=jnp.zeros((capacity, obs_dim)),
        action=jnp.zeros((capacity, action_dim)),
        reward=jnp.zeros(capacity),
        terminated=jnp.zeros(capacity),
        ended=jnp.zeros(capacity),
    )
    return Replay(transitions, count=jnp.zeros((), jnp.int32))


def store(replay: Replay, new: Transition) -> Replay:
    number = len(new.ended)
    capacity = len(replay.transitions.ended)
    where = (replay.count + jnp.arange(number)) % capacity
    transitions = jax.tree.map(lambda ring, x: ring.at[where].set(x), replay.transitions, new)
    return Replay(transitions, replay.count + number)


def sample(replay: Replay, key: jax.Array, batch_size: int, n_step: int) -> Transition:
    """Windows of n steps, (B, n, ...), uniform over stored transitions."""
    stored = replay.transitions
    capacity = len(stored.ended)
    first = jax.random.randint(key, (batch_size,), 0, jnp.minimum(replay.count, capacity))
    offsets = jnp.arange(n_step)
    window = (first[:, None] + offsets) % capacity  # (B, n)
    # After the newest step the ring goes on with the oldest ones: a window ends there, too.
    steps_to_newest = (replay.count - 1 - first) % capacity
    ended = jnp.maximum(stored.ended[window], offsets == steps_to_newest[:, None])
    return jax.tree.map(lambda array: array[window], stored)._replace(ended=ended)


def mix_windows(
    windows: Transition, demo_windows: Transition, key: jax.Array, demo_ratio: float
) -> Transition:
    """SACfD: every window is a demonstration's with that probability (paper: whole episodes)."""
    chosen = jax.random.uniform(key, (len(windows.reward),)) < demo_ratio

    def choose(ours: jax.Array, theirs: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape(-1, *[1] * (ours.ndim - 1)), theirs, ours)

    return jax.tree.map(choose, windows, demo_windows)


def reward_windows(windows: Transition, rewards: jax.Array, gamma: float) -> ContinuousBatch:
    """The batch of the critics, given a reward for every step of the windows (B, n)."""
    returns, last, discounts = n_step_returns(rewards, windows.terminated, windows.ended, gamma)
    next_observations = windows.next_observation[jnp.arange(len(last)), last]
    observations = windows.observation[:, 0]
    actions = windows.action[:, 0]
    return ContinuousBatch(observations, actions, returns, next_observations, discounts)


# ---------------------------------------------------------------------------- GAIL: discriminator


def discriminator_input(args: Args, reference: "Reference", steps: Transition) -> jax.Array:
    """What the discriminator compares of steps (...), (..., features)."""
    observations = steps.observation
    next_observations = steps.next_observation
    if args.normalize_observations:
        observations = (observations - reference.mean) / reference.deviation
        next_observations = (next_observations - reference.mean) / reference.deviation
    parts = {
        "state-action": [observations, steps.action],
        "state": [observations],
        "state-next-state": [observations, next_observations],
    }
    return jnp.concatenate(parts[args.discriminator_input], axis=-1)


class DiscriminatorState(struct.PyTreeNode):
    params: Any
    opt_state: Any
    key: jax.Array
    network: nn.Module = struct.field(pytree_node=False)  # both constant, not arrays to update
    optimizer: Optimizer = struct.field(pytree_node=False)


def init_discriminator(args: Args, key: jax.Array, features: jax.Array) -> DiscriminatorState:
    """With dropout or weight decay; AdamW is Adam where nothing decays."""
    dropout = (0.0, 0.0)
    weight_decay = 0.0
    if args.discriminator_regularization == "dropout":
        dropout = (args.discriminator_input_dropout, args.discriminator_hidden_dropout)
    if args.discriminator_regularization == "weight-decay":
        weight_decay = args.discriminator_weight_decay
    network = Discriminator(args.discriminator_layers, args.discriminator_units, *dropout)
    optimizer = optax.adamw(args.discriminator_learning_rate, weight_decay=weight_decay)
    key, init_key = jax.random.split(key)
    params = network.init(init_key, features)
    return DiscriminatorState(params, optimizer.init(params), key, network, optimizer)


def update_discriminator(
    state: DiscriminatorState, expert: jax.Array, own: jax.Array, args: Args
) -> tuple[DiscriminatorState, dict]:
    """One gradient step on features (B, F) of the expert and as many of the agent's own."""
    features = jnp.concatenate([expert, own])
    key, dropout_key = jax.random.split(state.key)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.network.apply(params, features, train=True, rngs={"dropout": dropout_key})
        return discriminator_loss(*jnp.split(logits, 2))

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    changes, opt_state = state.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)
    # Before this step, and without dropout.
    expert_logits, agent_logits = jnp.split(state.network.apply(state.params, features), 2)
    rewards = discriminator_reward(agent_logits, args.reward_balance)
    metrics = {
        "discriminator/loss": loss,
        "discriminator/accuracy": 0.5 * (jnp.mean(expert_logits > 0) + jnp.mean(agent_logits <= 0)),
        "discriminator/reward_mean": jnp.mean(rewards),
        "discriminator/reward_std": jnp.std(rewards),
    }
    return state.replace(params=params, opt_state=opt_state, key=key), metrics


def imitate(
    args: Args,
    reference: "Reference",
    state: DiscriminatorState,
    windows: Transition,
    replay: Replay,
    demo_replay: Replay,
    key: jax.Array,
) -> tuple[DiscriminatorState, jax.Array, dict]:
    """A step of the discriminator, and then its rewards for all steps of the windows (B, n)."""
    expert_key, own_key = jax.random.split(key)
    expert_steps = sample(demo_replay, expert_key, args.batch_size, n_step=1)
    own_steps = sample(replay, own_key, args.batch_size, n_step=1)
    expert = discriminator_input(args, reference, expert_steps)[:, 0]
    own = discriminator_input(args, reference, own_steps)[:, 0]
    state, metrics = update_discriminator(state, expert, own, args)
    logits = state.network.apply(state.params, discriminator_input(args, reference, windows))
    return state, discriminator_reward(logits, args.reward_balance), metrics


# ------------------------------------------------------------------------------------------ agent


class SACParams(NamedTuple):
    actor: Any
    critic: Any
    log_temperature: jax.Array


class SACState(NamedTuple):
    params: SACParams
    target_critic: Any
    opt_state: Any
    key: jax.Array
    discriminator: DiscriminatorState | None  # None without GAIL


def init_agent(
    actor: Actor,
    critic: TwinCritic,
    optimizer: Optimizer,
    key: jax.Array,
    args: Args,
    obs_dim: int,
    reference: "Reference | None",
) -> tuple[SACState, jax.Array]:
    """The agent, and the key of its policy. Two copies: an update gives its buffers away."""
    key, act_key = jax.random.split(key)
    key, actor_key, critic_key, discriminator_key = jax.random.split(key, 4)
    observations = jnp.zeros((1, obs_dim))
    actions = jnp.zeros((1, actor.action_dim))
    actor_params = actor.init(actor_key, observations)
    critic_params = critic.init(critic_key, observations, actions)
    params = SACParams(actor_params, critic_params, log_temperature=jnp.zeros(()))
    target_critic = jax.tree.map(jnp.copy, critic_params)
    discriminator = None
    if args.method == "gail":
        steps = make_replay(1, obs_dim, actor.action_dim).transitions
        features = discriminator_input(args, reference, steps)
        discriminator = init_discriminator(args, discriminator_key, features)
    return SACState(params, target_critic, optimizer.init(params), key, discriminator), act_key


def target_of(
    actor: Actor,
    critic: TwinCritic,
    agent: SACState,
    batch: ContinuousBatch,
    noise: jax.Array,  # (B, action_dim)
    args: Args,
) -> jax.Array:
    """What the Q-values of a batch should be, by the target critics."""
    next_policy = actor.apply(agent.params.actor, batch.next_observations)
    next_actions, next_log_prob = squash(*next_policy, noise)
    q_next = critic.apply(agent.target_critic, batch.next_observations, next_actions)
    returns = args.reward_scale * batch.returns
    temperature = jnp.exp(agent.params.log_temperature)
    return soft_target(q_next, next_log_prob, returns, batch.discounts, temperature)


def make_loss(actor: Actor, critic: TwinCritic, box: gym.spaces.Box) -> Callable:
    """The sum of three losses: constants keep each one's gradient to its own parameters."""
    constant = jax.lax.stop_gradient
    target_entropy = -float(actor.action_dim)

    def loss_fn(
        params: SACParams, batch: ContinuousBatch, target: jax.Array, noise: jax.Array
    ) -> tuple[jax.Array, dict]:
        q = critic.apply(params.critic, batch.observations, from_box(batch.actions, box))
        loss_of_critic = critic_loss(q, target)

        temperature = constant(jnp.exp(params.log_temperature))
        actions, log_prob = squash(*actor.apply(params.actor, batch.observations), noise)
        q_policy = critic.apply(constant(params.critic), batch.observations, actions)
        loss_of_actor = actor_loss(q_policy, log_prob, temperature)

        entropy = -jnp.mean(log_prob)
        loss_of_temperature = temperature_loss(params.log_temperature, entropy, target_entropy)
        metrics = {
            "losses/critic_loss": loss_of_critic,
            "losses/actor_loss": loss_of_actor,
            "losses/temperature": temperature,
            "losses/entropy": entropy,
            "losses/q_value": jnp.mean(q),
        }
        return loss_of_critic + loss_of_actor + loss_of_temperature, metrics

    return loss_fn


def make_update(
    actor: Actor,
    critic: TwinCritic,
    optimizer: Optimizer,
    box: gym.spaces.Box,
    reference: "Reference | None",
    args: Args,
) -> Callable:
    """One update of critics, actor, temperature and, with GAIL, discriminator."""
    loss_fn = make_loss(actor, critic, box)

    def update(agent: SACState, replay: Replay, demo_replay: Replay | None) -> tuple:
        key, batch_key, noise_key, demo_key, coin_key = jax.random.split(agent.key, 5)
        windows = sample(replay, batch_key, args.batch_size, args.n_step)
        if args.method == "sacfd":
            demo_windows = sample(demo_replay, demo_key, args.batch_size, args.n_step)
            windows = mix_windows(windows, demo_windows, coin_key, args.demo_ratio)
        rewards = windows.reward
        discriminator = agent.discriminator
        imitation_metrics = {}
        if args.method == "gail":
            discriminator, rewards, imitation_metrics = imitate(
                args, reference, discriminator, windows, replay, demo_replay, demo_key
            )
        batch = reward_windows(windows, rewards, args.gamma)
        next_noise, noise = jax.random.normal(noise_key, (2, *batch.actions.shape))
        target = target_of(actor, critic, agent, batch, next_noise, args)
        grads, metrics = jax.grad(loss_fn, has_aux=True)(agent.params, batch, target, noise)
        changes, opt_state = optimizer.update(grads, agent.opt_state)
        params = optax.apply_updates(agent.params, changes)
        target_critic = optax.incremental_update(params.critic, agent.target_critic, args.tau)
        agent = SACState(params, target_critic, opt_state, key, discriminator)
        return agent, metrics | imitation_metrics

    return jax.jit(update, donate_argnums=0)


def make_policy(actor: Actor, box: gym.spaces.Box) -> Callable:
    """For one observation or a batch: actions, by mode random, sample or mean; the next key."""

    def policy(params: Any, observations: jax.Array, key: jax.Array, mode: str):
        key, noise_key = jax.random.split(key)
        mean, log_deviation = actor.apply(params, observations)
        if mode == "random":
            units = jax.random.uniform(noise_key, mean.shape, minval=-1.0)
        elif mode == "sample":
            noise = jax.random.normal(noise_key, mean.shape)
            units = jnp.tanh(mean + jnp.exp(log_deviation) * noise)
        else:
            units = jnp.tanh(mean)
        return to_box(units, box), key

    return jax.jit(policy, static_argnames="mode")


class Evaluation(NamedTuple):
    returns: np.ndarray  # (episodes,)
    lengths: np.ndarray
    successes: np.ndarray  # goal reached at any step; NaN where the environment does not report it


def evaluate(policy: Callable[[np.ndarray], Any], envs: list[gym.Env]) -> Evaluation:
    """One episode in each environment, side by side, with one policy call per step for all."""
    starts = [seeded_reset(env, EVALUATION_SEED + i) for i, env in enumerate(envs)]
    observations = np.stack(starts).astype(np.float32)
    returns = np.zeros(len(envs))
    lengths = np.zeros(len(envs), int)
    successes = np.full(len(envs), np.nan)
    running = np.ones(len(envs), bool)
    while running.any():
        actions = np.asarray(policy(observations))
        for i in np.flatnonzero(running):
            observations[i], reward, terminated, truncated, info = envs[i].step(actions[i])
            returns[i] += reward
            lengths[i] += 1
            if "success" in info:
                successes[i] = np.fmax(successes[i], bool(info["success"]))  # fmax ignores NaN
            running[i] = not (terminated or truncated)
    return Evaluation(returns, lengths, successes)


def make_demo_replay(args: SACfDArgs | GAILArgs, demos: "Demonstrations") -> Replay:
    """The demonstrations as steps; for SACfD low rewards are raised (section 4.1)."""
    rewards = demos.rewards
    if args.method == "sacfd" and args.min_demo_reward is not None:
        rewards = np.maximum(rewards, args.min_demo_reward)
    steps = Transition(
        observation=demos.observations,
        next_observation=demos.next_observations,
        action=demos.actions,
        reward=rewards,
        terminated=demos.terminations,
        ended=demos.ends,
    )
    as_float = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), steps)
    return Replay(as_float, jnp.asarray(len(rewards)))


def train_agent(
    args: Args,
    run: "SACRun",
    env: gym.Env,
    demo_replay: Replay | None,
    reference: "Reference | None",
) -> None:
    """Random actions at first, then the policy's, with one update per environment step."""
    obs_dim = env.observation_space.shape[0]
    box = env.action_space
    actor = Actor(len(box.low))
    critic = TwinCritic()
    optimizer = optax.adam(args.learning_rate)
    policy = make_policy(actor, box)
    update = make_update(actor, critic, optimizer, box, reference, args)
    store_step = jax.jit(store, donate_argnums=0)
    key = jax.random.PRNGKey(args.seed)
    agent, policy_key = init_agent(actor, critic, optimizer, key, args, obs_dim, reference)
    replay = make_replay(replay_capacity(args), obs_dim, actor.action_dim)
    env.reset(seed=args.seed)  # seeds its generator
    (agent, policy_key), replay, _, step = run.restore(env, (agent, policy_key), replay)
    eval_envs = make_evaluation_tasks(args, args.eval_episodes, videos=1)
    metrics: dict[str, jax.Array] = {}

    def evaluate_agent() -> None:
        params = agent.params.actor

        def mean_action(observations: np.ndarray) -> jax.Array:
            return policy(params, observations, policy_key, mode="mean")[0]

        with run.clock_stopped():
            run.check_losses(step, metrics)
            result, distances = evaluate_with_distance(mean_action, eval_envs, reference)
            run.save_evaluation(step, result, params, eval_envs, **distances)

    run.show_progress(args.method, args.total_timesteps, step)
    observation = first_observation(env)
    while step < args.total_timesteps:
        if step % args.eval_every == 0:
            evaluate_agent()
        mode = "random" if step < args.learning_starts else "sample"
        action, policy_key = policy(agent.params.actor, observation, policy_key, mode=mode)
        if step > args.learning_starts:
            # On the steps so far; it runs while the environment takes this one.
            agent, metrics = update(agent, replay, demo_replay)
        action = np.asarray(action)
        run.check_action(step, action)
        next_observation, reward, terminated, truncated, info = env.step(action)
        next_observation = np.asarray(next_observation, np.float32)
        ended = terminated or truncated
        transition = Transition(observation, next_observation, action, reward, terminated, ended)
        replay = store_step(replay, stack_steps([transition]))
        observation = next_observation
        step += 1
        run.record_step(transition, reward, info)
        run.log_update(step, metrics)
        if ended:
            run.end_episode(step)
            run.check_losses(step, metrics)
            run.save_checkpoint_if_due(env, (agent, policy_key), step)
            observation = first_observation(env)
    evaluate_agent()


def train(args: Args) -> Path:
    """One of the three methods; demonstrations serve SACfD and GAIL, a reference GAIL."""
    env, demos, run = prepare(args)  # completes args, too
    demo_replay = make_demo_replay(args, demos) if demos else None
    reference = find_reference(run, demos) if args.method == "gail" else None
    train_agent(args, run, env, demo_replay, reference)
    run.finish()
    return run.folder


# ================================================================================================
# Plumbing. The paper ends here: what follows is files, checks, videos and the command line, the
# same in every script. Nothing below is needed to understand the algorithm.
# ================================================================================================

BUNDLED_DEMONSTRATIONS = Path(__file__).resolve().parent / "demos"
PROBED_STEPS = 1_000  # of one episode, played before a run to see what the environment reports
LARGEST = 2**31 - 1  # steps are counted in 32 bits
LARGEST_FLOAT = float(np.finfo(np.float32).max)  # what is larger would be infinite in the replay

BOUNDS = {  # of every number that has any
    "max_episode_steps": (1, LARGEST),
    "seed": (0, EVALUATION_SEED - 1),
    "total_timesteps": (1, LARGEST),
    "eval_every": (1, LARGEST),
    "eval_episodes": (1, 10_000),
    "batch_size": (1, LARGEST),
    "learning_rate": (1e-9, 1e9),
    "gamma": (0, 1),
    "n_step": (1, 1_000),
    "tau": (0, 1),
    "reward_scale": (1e-9, 1e9),
    "buffer_size": (1, LARGEST),
    "learning_starts": (0, LARGEST),
    "num_demos": (1, LARGEST),
    "demo_ratio": (0, 1),
    "min_demo_reward": (-1e38, 1e38),
    "discriminator_layers": (0, 10),
    "discriminator_units": (1, 10_000),
    "discriminator_learning_rate": (1e-9, 1e9),
    "discriminator_weight_decay": (0, LARGEST),
    "discriminator_input_dropout": (0, 0.99),
    "discriminator_hidden_dropout": (0, 0.99),
    "reward_balance": (0, 1),
    "checkpoint_every": (1, LARGEST),
}


class UserError(Exception):
    """One line that says what is wrong and what to do; the program ends with exit code 2."""


class Unavailable(UserError):
    """Data that is neither here nor within reach."""


def disk_is_full(error: Exception) -> bool:
    """Or a quota, or the largest size of a file, has been reached."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Turns whatever a library raises into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if disk_is_full(error):
            raise
        raise UserError(
            f"{what}: {' '.join(str(error).split())[:300] or type(error).__name__}"
        ) from None


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_numbers(args: Args) -> None:
    for name, (low, high) in BOUNDS.items():
        value = getattr(args, name, None)  # some are of one method only
        if value is not None and not low <= value <= high:
            raise UserError(f"{option(name)} is {value}: give a number from {low} to {high}")


def check_fits(numbers: float, advice: str) -> None:
    """So many float32 numbers have to be held at once: else a run would end in the middle."""
    needed = np.dtype(np.float32).itemsize * numbers
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > here:
        sizes = f"about {needed / 1e9:.0f} GB, and this machine has {here / 1e9:.0f}"
        raise UserError(f"this run needs {sizes}: lower {advice}")


def environment_arguments(args: Args) -> dict[str, Any]:
    try:
        arguments = json.loads(args.env_kwargs)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError(
            f"--env-kwargs is {args.env_kwargs!r}: give a JSON object, such as '{{\"name\": 1}}'"
        )
    return arguments


# ----------------------------------------------------------------------------------- environment


class SparseReward(gym.Wrapper):
    """Reward 1 on every step at which the goal is reached, else 0 (section 4.1)."""

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        observation, _, terminated, truncated, info = self.env.step(action)
        if "success" not in info:
            raise UserError(
                "the environment reports info['success'] at some steps only: use --reward env"
            )
        return observation, float(info["success"]), terminated, truncated, info


class CheckedEnv(gym.wrappers.FlattenObservation):
    """Flat, finite observations; actions that are in the action space to their last bit."""

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        observation, info = super().reset(**kwargs)
        self.steps = 0
        self.check("observation", observation, self.observation_space.shape)
        return observation, info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        box = self.action_space
        action = np.clip(np.asarray(action, box.dtype), box.low, box.high)
        observation, reward, terminated, truncated, info = super().step(action)
        self.steps += 1
        self.check("observation", observation, self.observation_space.shape)
        self.check("reward", reward, ())
        self.check("terminated", terminated, ())
        self.check("truncated", truncated, ())
        self.check("info['success']", info.get("success", 0.0), ())
        return observation, reward, terminated, truncated, info

    def check(self, what: str, value: Any, shape: tuple[int, ...]) -> None:
        place = f"the environment's {what} at step {self.steps} of an episode"
        if np.shape(value) != shape:
            raise UserError(
                f"{place} has shape {np.shape(value)} instead of {shape}: repair the environment"
            )
        if np.asarray(value).dtype.kind not in "biuf":
            raise UserError(f"{place} is no number: repair the environment")
        if not (np.abs(value) <= LARGEST_FLOAT).all():  # NaN is not either
            raise UserError(f"{place} is not finite: repair the environment, then --resume the run")


@contextlib.contextmanager
def silent_compiler() -> Iterator[None]:
    """MuJoCo's compiler warns of old words in Gymnasium's own models: no concern of a user's."""
    import mujoco

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda _: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


def make_env(args: Args, render: bool = False) -> gym.Env:
    """A Gymnasium environment with Box actions, flat observations, the sparse reward if wanted."""
    if render and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # a machine without a screen
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ImportError):
        import gymnasium_robotics  # registers Adroit, and prints a notice

        gym.register_envs(gymnasium_robotics)
    arguments = environment_arguments(args)
    what = f"cannot make environment {args.env_id!r}"
    if arguments:
        what += f" with --env-kwargs {args.env_kwargs}"
    arguments["render_mode"] = "rgb_array" if render else None
    limit = args.max_episode_steps
    with as_user_error(what), silent_compiler():
        env = gym.make(args.env_id, max_episode_steps=limit, disable_env_checker=True, **arguments)
    check_spaces(args.env_id, env.action_space, env.observation_space)
    return CheckedEnv(SparseReward(env) if args.reward == "sparse" else env)


def check_spaces(env_id: str, actions: gym.Space, observations: gym.Space) -> None:
    if not isinstance(actions, gym.spaces.Box) or len(actions.shape) != 1:
        raise UserError(
            f"{env_id} has action space {actions}: AQuaDem needs a Box with one dimension"
        )
    if not np.issubdtype(actions.dtype, np.floating):
        needed = "AQuaDem needs a Box of floating-point numbers"
        raise UserError(f"{env_id} has actions of type {actions.dtype}: {needed}")
    parts = observations.values() if isinstance(observations, gym.spaces.Dict) else [observations]
    if not parts or not all(isinstance(part, gym.spaces.Box) for part in parts):
        raise UserError(
            f"{env_id} has observation space {observations}: a Box or a Dict of Boxes is needed"
        )


def check_env(args: Args) -> str:
    """Sees that episodes end, and what they report. Returns the kind of reward."""
    reports = play_once(args.env_id, make_env(dataclasses.replace(args, reward="env")))
    if args.reward == "sparse" and not all(reports):
        when = "at some steps only" if any(reports) else "never"
        reason = f"reports info['success'] {when}, so it has no sparse reward"
        raise UserError(f"{args.env_id} {reason}: use --reward env")
    return args.reward or ("sparse" if all(reports) else "env")


def play_once(env_id: str, env: gym.Env) -> list[bool]:
    """One episode, or its beginning, with zeros for actions: does each step report a success?"""
    reports: list[bool] = []
    ended = False
    truncated = False
    with as_user_error(f"{env_id} does not run"):
        env.reset(seed=0)
        while not ended and len(reports) < PROBED_STEPS:
            _, _, terminated, truncated, info = env.step(np.zeros(env.action_space.shape))
            reports.append("success" in info)
            ended = terminated or truncated
        env.close()
    if env.spec.max_episode_steps is None and not truncated:
        raise UserError(
            f"{env_id} has no time limit, an episode might never end: give --max-episode-steps"
        )
    return reports


def check_bounds(env: gym.Env) -> None:
    """tanh fills the action space, which therefore needs an end on both sides."""
    if not env.action_space.is_bounded():
        raise UserError(
            f"{env.spec.id} has action space {env.action_space}: SAC needs one with finite bounds"
        )


def make_desk(task: str, rewards: Literal["upstream", "fixed"], render: bool = False) -> gym.Env:
    """A RoboDesk task by its name, with flat observations; robodesk_env.py registers them all."""
    if render and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # a machine without a screen
    if not importlib.util.find_spec("robodesk"):
        needed = "pip install robodesk==1.0.0 dm_control==1.0.50 mujoco==3.17.0"
        raise UserError(f"RoboDesk is not installed: {needed}")
    env_id = f"robodesk_env:RoboDesk/{task}-v0"
    mode = "rgb_array" if render else None
    with as_user_error(f"cannot make the RoboDesk task {task!r}"):
        try:
            env = gym.make(
                env_id, robodesk_rewards=rewards, render_mode=mode, disable_env_checker=True
            )
        except gym.error.NameNotFound:
            known = [spec.name for spec in gym.registry.values() if spec.namespace == "RoboDesk"]
            raise UserError(
                f"RoboDesk has no task {task!r}: choose one of {', '.join(known)}"
            ) from None
    return CheckedEnv(env)


def make_task(args: Args, render: bool = False) -> gym.Env:
    """RoboDesk-<task>, or else any Gymnasium environment."""
    if not args.env_id.startswith("RoboDesk-"):
        return make_env(args, render)
    desk = make_desk(args.env_id.removeprefix("RoboDesk-"), args.robodesk_rewards, render)
    if args.reward == "sparse":
        return CheckedEnv(SparseReward(desk.env))
    return desk


def check_sac_memory(args: Args, env: gym.Env) -> None:
    """What surely has to be held at once: replay and batch, and its way through a critic."""
    step = 2 * env.observation_space.shape[0] + env.action_space.shape[0] + 3
    numbers = step * replay_capacity(args) + (step + HIDDEN_UNITS[0]) * args.batch_size
    check_fits(numbers, "--buffer-size or --batch-size")


def check_environment(args: Args) -> str:
    """check_env, except that a desk's reward is the dense one unless told otherwise."""
    env = make_task(args)
    check_bounds(env)
    check_sac_memory(args, env)
    if args.env_id.startswith("RoboDesk-"):
        return args.reward or "env"
    return check_env(args)


def replay_capacity(args: Args) -> int:
    """Whole blocks of steps, and no more than the run will fill."""
    blocks = math.ceil(args.total_timesteps / STEPS_PER_CALL)
    return min(args.buffer_size, blocks * STEPS_PER_CALL)


def make_evaluation_tasks(args: Args, episodes: int, videos: int) -> list[gym.Env]:
    """An environment per episode; the first ones are filmed if asked for."""
    filmed = [args.capture_video and i < videos for i in range(episodes)]
    return [Filmed(make_task(args, render=True)) if film else make_task(args) for film in filmed]


def seeded_reset(env: gym.Env, seed: int) -> np.ndarray:
    """Twice: some environments (Meta-World's) draw their task before they look at the seed."""
    env.reset(seed=seed)
    return env.reset(seed=seed)[0]


def first_observation(env: gym.Env) -> np.ndarray:
    return np.asarray(env.reset()[0], np.float32)


# -------------------------------------------------------------------------------- demonstrations


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

    if not re.fullmatch(r"([\w.-]+/)*[\w.-]+-v\d+", dataset_id):
        raise UserError(f"{dataset_id!r} is not a Minari id: give one like D4RL/door/human-v2")
    bundled = BUNDLED_DEMONSTRATIONS / dataset_id / "data"
    with as_user_error(f"cannot read dataset {dataset_id!r}"):
        try:
            return (
                minari.MinariDataset(bundled)
                if bundled.exists()
                else minari.load_dataset(dataset_id)
            )
        except FileNotFoundError:
            print(
                f"{dataset_id} is not on this machine: fetching it from the Minari hub ...",
                file=sys.stderr,
            )
    try:
        return minari.load_dataset(dataset_id, download=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        advice = "check the id and the network, or name another with --dataset-id"
        raise Unavailable(f"cannot download dataset {dataset_id!r} ({reason}): {advice}") from None


def float_array(field: str, values: Any) -> np.ndarray:
    """Numbers as float32; what is too large for that becomes infinite, and is refused as such."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"field {field} holds {array.dtype}, no numbers")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def flatten_observations(space: gym.Space, observations: Any) -> np.ndarray:
    """An episode of observations as (T, obs), in the order of gymnasium's FlattenObservation."""
    parts = [observations]
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(observations, dict):
            raise TypeError("field observations is no Dict, as the environment's are")
        parts = [observations[key] for key in space]
    arrays = [float_array("observations", part) for part in parts]
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)


def load_demonstrations(
    dataset_id: str, env: gym.Env, sparse: bool = True, num_demos: int | None = None
) -> Demonstrations:
    """Minari episodes as arrays, checked against the environment."""
    dataset = open_dataset(dataset_id)
    number = min(dataset.total_episodes, num_demos or sys.maxsize)
    with as_user_error(f"cannot read dataset {dataset_id!r}"):
        episodes = [
            read_episode(dataset_id, e, env, sparse)
            for e in dataset.iterate_episodes(range(number))
        ]
    whole = [episode for episode in episodes if len(episode.actions)]
    if not whole:
        raise UserError(f"dataset {dataset_id!r} holds no steps: choose another with --dataset-id")
    if len(whole) < len(episodes):
        print(
            f"{dataset_id}: {len(episodes) - len(whole)} episodes without a step are left out",
            file=sys.stderr,
        )
    return Demonstrations(*map(np.concatenate, zip(*whole)))


def read_episode(dataset_id: str, episode: Any, env: gym.Env, sparse: bool) -> Demonstrations:
    box = env.action_space
    steps = len(episode.actions)
    observations = flatten_observations(env.env.observation_space, episode.observations)
    actions = float_array("actions", episode.actions)
    rewards = float_array("rewards", episode.rewards)
    terminations = float_array("terminations", episode.terminations)
    if sparse:
        if "success" not in (episode.infos or {}):
            missing = "field infos has no 'success' for a sparse reward: use --reward env"
            raise UserError(f"dataset {dataset_id!r}: {missing}")
        success = float_array("infos['success']", episode.infos["success"])
        rewards = success[1:] if len(success) == steps + 1 else success  # one more is the reset's
    for field, array, shape in (
        ("observations", observations, (steps + 1, *env.observation_space.shape)),
        ("actions", actions, (steps, *box.shape)),
        ("infos['success']" if sparse else "rewards", rewards, (steps,)),
        ("terminations", terminations, (steps,)),
        ("truncations", float_array("truncations", episode.truncations), (steps,)),
    ):
        if array.shape != shape:
            needed = f"{env.spec.id} needs {shape}"
            raise UserError(
                f"dataset {dataset_id!r}: field {field} has shape {array.shape}, {needed}"
            )
        if not np.isfinite(array).all():
            place = f"dataset {dataset_id!r}: field {field} of shape {shape}"
            raise UserError(f"{place} holds NaN or infinite values")
    ends = np.arange(steps) == steps - 1
    return Demonstrations(
        observations[:-1],
        np.clip(actions, box.low, box.high),
        rewards,
        observations[1:],
        terminations.astype(bool),
        ends,
    )


def find_demonstrations(args: Args, env: gym.Env) -> tuple[Demonstrations, str, str | None]:
    """The demonstrations asked for; else an Adroit task's human ones, or failing these the bundled.

    Returns data, id and warning.
    """
    sparse = args.reward == "sparse"
    if args.dataset_id is not None:
        return (
            load_demonstrations(args.dataset_id, env, sparse, args.num_demos),
            args.dataset_id,
            None,
        )
    task = re.fullmatch(r"AdroitHand(Door|Hammer|Pen|Relocate)-v\d+", args.env_id)
    if not task:
        raise UserError(
            f"{args.env_id} has no default demonstrations: name a Minari dataset with --dataset-id"
        )
    default = f"D4RL/{task[1].lower()}/human-v2"
    fallback = f"aquadem/{task[1].lower()}/agent-v0"
    try:
        return load_demonstrations(default, env, sparse, args.num_demos), default, None
    except Unavailable as error:
        if not (BUNDLED_DEMONSTRATIONS / fallback).exists():
            raise UserError(f"{error}; and no set for this task is bundled") from None
    warning = (
        f"NOT HUMAN DEMONSTRATIONS: {default} could not be had, so the bundled {fallback} is used,"
        " recorded by our own agent (demos/README.md). What comes out is not comparable with the"
        " paper."
    )
    return load_demonstrations(fallback, env, sparse, args.num_demos), fallback, warning


def method_demonstrations(args: Args, env: gym.Env) -> tuple[Demonstrations | None, str | None]:
    """Those of SACfD and GAIL, and a warning. For GAIL they need not report success."""
    if args.method == "sac":
        return None, None
    wanted = dataclasses.replace(args, reward="env") if args.method == "gail" else args
    demos, args.dataset_id, warning = find_demonstrations(wanted, env)
    return demos, warning


def warn_of_raised_rewards(args: Args, rewards: np.ndarray) -> None:
    """The paper has a minimum for the sparse reward; another one it can flatter, so say it."""
    if args.min_demo_reward is None or args.reward != "env":
        return
    raised = rewards < args.min_demo_reward
    if raised.any():
        share = f"{np.mean(raised):.0%} of the demonstrated rewards"
        advice = "with None they stay as they are"
        print(f"--min-demo-reward {args.min_demo_reward} raises {share}; {advice}", file=sys.stderr)


# --------------------------------------------------------------- the demonstrator, for comparison

# The paper does not give the settings of its Sinkhorn distance. With these, one distance takes
# about half a second on a CPU core; on the Door demonstrations (5 episodes against 20) it is 2
# percent above the unregularised one.
SINKHORN_EPSILON = 0.1  # as the cost: Euclidean distance of normalised states, median 9 on Door
SINKHORN_POINTS = 1000  # states drawn from either side, without replacement
SINKHORN_THRESHOLD = 5e-3  # the plan's marginals are off by less than this in total
SINKHORN_SEED = 0  # of the drawing: the distance is the same function of the states in every run
HUMAN_EPISODES = 5  # section 4.2
HUMAN_REPETITIONS = 100


class Reference(NamedTuple):
    """What a run has to know of the demonstrator: made once, and kept in the run folder."""

    mean: Any  # (obs,) of all demonstrated states
    deviation: Any  # (obs,)
    states: Any  # (SINKHORN_POINTS, obs) drawn from the demonstrated states, normalised
    weights: Any  # (SINKHORN_POINTS,)
    human: Any


@jax.jit
def sinkhorn_cost(
    x: jax.Array,  # (N, D)
    y: jax.Array,  # (M, D)
    x_weights: jax.Array,
    y_weights: jax.Array,
    epsilon: float,
) -> jax.Array:
    """<P, C> of the entropy-regularised plan P and the Euclidean distances C (POT's sinkhorn2)."""
    cost = jnp.linalg.norm(x[:, None, :] - y[None, :, :], axis=-1)
    costs = geometry.Geometry(cost, epsilon=epsilon)
    problem = linear_problem.LinearProblem(costs, x_weights, y_weights)
    momentum = acceleration.Momentum(start=100)  # same solution in about half the iterations
    solver = sinkhorn.Sinkhorn(
        threshold=SINKHORN_THRESHOLD, max_iterations=10_000, momentum=momentum
    )
    return solver(problem).primal_cost


def draw_states(
    states: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """SINKHORN_POINTS of the states and their weights.

    A smaller set is filled up with points of weight 0: one shape, one compilation.
    """
    drawn = states[generator.permutation(len(states))[:SINKHORN_POINTS]]
    points = np.zeros((SINKHORN_POINTS, states.shape[1]), np.float32)
    points[: len(drawn)] = drawn
    weights = np.where(np.arange(SINKHORN_POINTS) < len(drawn), 1 / len(drawn), 0.0)
    return points, weights.astype(np.float32)


def wasserstein(states: np.ndarray, reference: Reference) -> float:
    """The Sinkhorn distance of an agent's states from the demonstrator's."""
    normalised = (states - np.asarray(reference.mean)) / np.asarray(reference.deviation)
    points, weights = draw_states(normalised, np.random.default_rng(SINKHORN_SEED))
    return float(
        sinkhorn_cost(points, reference.states, weights, reference.weights, SINKHORN_EPSILON)
    )


def human_scores(states: np.ndarray, ends: np.ndarray, quiet: bool = False) -> np.ndarray:
    """The Sinkhorn distance of 5 random episodes from the others, 100 times (section 4.2)."""
    episode = np.cumsum(ends) - ends  # (N,) number of the episode of every step
    generator = np.random.default_rng(SINKHORN_SEED)
    scores = []
    for _ in tqdm(range(HUMAN_REPETITIONS), desc="human score", disable=quiet):
        chosen = np.isin(episode, generator.choice(episode[-1] + 1, HUMAN_EPISODES, replace=False))
        x, x_weights = draw_states(states[chosen], generator)
        y, y_weights = draw_states(states[~chosen], generator)
        scores.append(float(sinkhorn_cost(x, y, x_weights, y_weights, SINKHORN_EPSILON)))
    return np.array(scores)


def human_score_file(dataset_id: str, states: np.ndarray, ends: np.ndarray) -> Path:
    """Beside Minari's datasets; named after all that the score depends on."""
    default = os.path.expanduser("~/.minari/datasets")
    settings = (SINKHORN_EPSILON, SINKHORN_POINTS, SINKHORN_THRESHOLD, SINKHORN_SEED)
    settings += (HUMAN_EPISODES, HUMAN_REPETITIONS)
    digest = hashlib.sha256(repr(settings).encode() + states.tobytes() + ends.tobytes()).hexdigest()
    name = re.sub(r"[^\w.-]", "_", f"human_score_{dataset_id}_{digest[:16]}.json")
    return Path(os.environ.get("MINARI_DATASETS_PATH", default)) / name


def human_quartiles(
    dataset_id: str, states: np.ndarray, ends: np.ndarray, quiet: bool
) -> np.ndarray:
    """Of the human score, which takes a minute: made once per dataset, not in every run."""
    path = human_score_file(dataset_id, states, ends)
    with contextlib.suppress(OSError, ValueError, TypeError):  # not there, or not whole
        return np.array(json.loads(path.read_text()), np.float32).reshape(3)
    quartiles = np.quantile(human_scores(states, ends, quiet), [0.25, 0.5, 0.75]).astype(np.float32)
    with contextlib.suppress(OSError):  # what cannot be written there is still in the run folder
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(quartiles.tolist()))
    return quartiles


def make_reference(demos: Demonstrations, dataset_id: str, quiet: bool = False) -> Reference:
    mean = demos.observations.mean(axis=0)
    deviation = demos.observations.std(axis=0)
    varies = deviation > 1e-6  # what never varies is only centred
    deviation = np.where(varies, deviation, 1).astype(np.float32)
    normalised = (demos.observations - mean) / deviation
    points, weights = draw_states(normalised, np.random.default_rng(SINKHORN_SEED))
    if demos.ends.sum() > HUMAN_EPISODES:
        human = human_quartiles(dataset_id, normalised, demos.ends, quiet)
    else:
        human = np.full(3, np.nan, np.float32)
        warn_of_too_few_episodes(demos)
    return Reference(mean, deviation, points, weights, human)


def warn_of_too_few_episodes(demos: Demonstrations) -> None:
    need = f"it needs more than {HUMAN_EPISODES} episodes, and there are {demos.ends.sum()}"
    print(f"no human Wasserstein score: {need}", file=sys.stderr)


def load_reference(run: Path, obs_dim: int) -> Reference:
    shapes = [(obs_dim,), (obs_dim,), (SINKHORN_POINTS, obs_dim), (SINKHORN_POINTS,), (3,)]
    template = Reference(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return load_arrays(run / "reference.npz", template)[0]


def find_reference(run: "Run", demos: Demonstrations) -> Reference:
    """Made once, and kept in the run folder."""
    path = run.folder / "reference.npz"
    if not path.exists():
        save_arrays(path, make_reference(demos, run.args.dataset_id, run.args.quiet))
        run.stop_if_asked()
    return load_reference(run.folder, demos.observations.shape[1])


def evaluate_with_distance(
    policy: Callable[[np.ndarray], Any], envs: list[gym.Env], reference: Reference | None
) -> tuple[Evaluation, dict[str, float]]:
    """`evaluate`, and with a reference how far the agent's states and the human's are from it."""
    if reference is None:
        return evaluate(policy, envs), {}
    visited: list[np.ndarray] = []

    def recording_policy(observations: np.ndarray) -> Any:
        visited.append(observations.copy())
        return policy(observations)

    result = evaluate(recording_policy, envs)
    acted = np.arange(len(visited)) < result.lengths[:, None]  # (episodes, steps)
    states = np.stack(visited, axis=1)[acted]
    low, median, high = map(float, reference.human)
    distances = {
        "wasserstein": wasserstein(states, reference),
        "human_wasserstein_q25": low,
        "human_wasserstein_median": median,
        "human_wasserstein_q75": high,
    }
    return result, distances


# ---------------------------------------------------------------------------------------- videos


def render(env: gym.Env) -> np.ndarray:
    with as_user_error(
        "cannot render; install libegl1 and set MUJOCO_GL=egl, or libosmesa6 and MUJOCO_GL=osmesa"
    ):
        return env.render()


class Filmed(gym.Wrapper):
    """Keeps a picture of every step of the present episode."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        self.frames: list[np.ndarray] = []
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple:
        result = self.env.step(action)
        self.frames.append(render(self.env))
        return result


def film(envs: list[gym.Env]) -> list[np.ndarray]:
    """What was filmed, episode after episode."""
    return [frame for env in envs if isinstance(env, Filmed) for frame in env.frames]


def write_video(path: Path, frames: list[np.ndarray], fps: int) -> None:
    import imageio.v2 as imageio

    path.parent.mkdir(exist_ok=True)
    os.environ["IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"] = "1"  # that takes a fork, which may hang in JAX
    options = {"macro_block_size": 8, "quality": 7, "ffmpeg_log_level": "quiet"}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for ffmpeg, too
    try:
        with as_user_error("cannot make a video"):
            # ffmpeg itself would leave half a file on a full disk, and say nothing.
            video = imageio.mimwrite(imageio.RETURN_BYTES, frames, format="mp4", fps=fps, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with replacing(path) as file:
        file.write(video)


# ------------------------------------------------------------------------------------ run folder


def save_arrays(path: Path, tree: Any, **meta: Any) -> None:
    """Atomic: the old file stays until the new one is whole on disk. Arrays and JSON, no pickle."""
    arrays = {f"leaf_{i:03d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    with replacing(path) as file:
        np.savez(file, **arrays)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file to write that takes the path's place when it is whole; else nothing is left of it."""
    unfinished = path.with_suffix(".partial")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def load_arrays(path: Path, template: Any) -> tuple[Any, dict]:
    """The inverse of save_arrays, for a tree of the template's structure, shapes and types."""
    leaves, structure = jax.tree.flatten(template)
    if not path.exists():
        raise UserError(f"{path} does not exist: name a run folder that has it")
    with (
        as_user_error(f"{path} is not a whole checkpoint"),
        np.load(path, allow_pickle=False) as file,
    ):
        arrays = [file[f"leaf_{i:03d}"] for i in range(len(leaves))]
        meta = json.loads(file["meta"].tobytes())
    for array, leaf in zip(arrays, leaves):
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            needed = f"{leaf.dtype}{leaf.shape}"
            raise UserError(f"{path} holds {array.dtype}{array.shape} where {needed} is needed")
    return jax.tree.unflatten(structure, [jnp.asarray(array) for array in arrays]), meta


def load_command(run: Path) -> Any:
    """The arguments of a run, of the kind that its method has."""
    with as_user_error(f"{run} is not a run folder of this script"):
        saved = json.loads((run / "args.json").read_text())
        kind = METHODS[saved["method"]]
        fields = [field for field in dataclasses.fields(kind) if field.init]
        args = kind(**{field.name: saved.get(field.name, field.default) for field in fields})
        check_numbers(args)
        return args


def load_actor(run: Path, env: gym.Env) -> tuple[Any, dict]:
    """The actor of the latest evaluation, and the step it is from."""
    actor = Actor(env.action_space.shape[0])
    observations = jnp.zeros((1, env.observation_space.shape[0]))
    template = jax.eval_shape(actor.init, jax.random.PRNGKey(0), observations)
    return load_arrays(run / "agent.npz", template)


def stack_steps(steps: list[Transition]) -> Transition:
    """With a leading axis, everything as float32: as the replay has them."""
    return Transition(*(np.asarray(parts, np.float32) for parts in zip(*steps)))


def pack(transition: Transition) -> np.ndarray:
    """A transition as one row of float32: the replay's form on disk."""
    return np.concatenate(
        [np.ravel(part) for part in transition], dtype=np.float32, casting="unsafe"
    )


def unpack(rows: np.ndarray, template: Transition) -> Transition:
    """Rows (..., size) as transitions of the template's shapes and types."""
    sizes = [math.prod(array.shape[1:]) for array in template]
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=-1)
    shaped = [
        part.reshape((*rows.shape[:-1], *array.shape[1:])) for part, array in zip(parts, template)
    ]
    return Transition(*(part.astype(array.dtype) for part, array in zip(shaped, template)))


def append_rows(path: Path, rows: list[np.ndarray]) -> None:
    """The replay on disk: all transitions in order, so a checkpoint writes only what is new."""
    with path.open("ab") as file:
        file.write(b"".join(row.tobytes() for row in rows))
        file.flush()
        os.fsync(file.fileno())


def restore_rows(path: Path, count: int, row_size: int) -> np.ndarray:
    """The first `count` rows; what was appended after the last whole checkpoint is cut off."""
    size = count * row_size * 4
    if not path.exists() or path.stat().st_size < size:
        raise UserError(f"{path} is shorter than its checkpoint says: this run cannot be resumed")
    os.truncate(path, size)
    return np.memmap(path, np.float32, "r", shape=(count, row_size))


def write_rows_until(path: Path, step: int, row: dict[str, Any]) -> None:
    """Appends to a CSV. Rows from this step on, of an interrupted run, are replaced."""
    kept = [line for line in read_rows(path) if int(line.split(",")[0]) < step]
    header = ",".join(["step", *row])
    new = ",".join(map(str, [step, *row.values()]))
    with replacing(path) as file:
        file.write(("\n".join([header, *kept, new]) + "\n").encode())


def read_rows(path: Path) -> list[str]:
    """The lines of a CSV of evaluations, without its header."""
    with as_user_error(f"{path} is not a curve of this script, move it away"):
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for line in lines:
            int(line.split(",")[0])
    return lines


class Run:
    """One training run: folder, arguments, log, curve, checkpoints, progress, the wish to stop."""

    def __init__(self, args: Args, warning: str | None):
        self.args = args
        self.signals: list[int] = []
        self.catch_signals()
        self.check_tracking()
        self.folder = self.open_folder()
        self.lock = self.lock_folder()
        if args.resume:
            warning = json.loads((self.folder / "args.json").read_text()).get("warning")
            read_rows(self.folder / "evaluations.csv")
        self.write_args(warning)
        self.log = self.open_log(warning)
        self.bar = tqdm(disable=True)
        self.start_clock(0)

    # ------------------------------------------------------------------ beginning and end

    def check_tracking(self) -> None:
        if self.args.track:
            with as_user_error("--track needs Weights & Biases (pip install wandb)"):
                import wandb  # noqa: F401

    def open_folder(self) -> Path:
        args = self.args
        if args.resume:
            return Path(args.resume)
        name = f"{self.task_name()}__{args.exp_name}__{args.seed}__{int(time.time())}"
        folder = Path("runs") / re.sub(r"[^\w.-]", "_", name)
        with as_user_error(f"cannot make the run folder {folder}"):
            folder.mkdir(parents=True)
        return folder

    def task_name(self) -> str:
        return self.args.env_id

    def lock_folder(self) -> Any:
        """Two processes that write to one folder would spoil it. The lock ends with its process."""
        with as_user_error(f"cannot write to {self.folder}"):
            file = (self.folder / "lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait for it or stop it"
            raise UserError(f"{self.folder} is in use by another process: {advice}") from None
        except OSError as error:  # some network file systems have no locks
            advice = "see to it that no other process resumes this run"
            print(f"cannot lock {self.folder} ({error}): {advice}", file=sys.stderr)
        return file

    def write_args(self, warning: str | None) -> None:
        """The present arguments, so that a run made longer keeps its new end when interrupted."""
        saved = {**dataclasses.asdict(self.args), "resume": None, "warning": warning}
        with replacing(self.folder / "args.json") as file:
            file.write(json.dumps(saved, indent=2).encode())

    def open_log(self, warning: str | None) -> Any:
        """The TensorBoard writer. What a resumed run logs again, TensorBoard itself replaces."""
        from tensorboardX import SummaryWriter

        arguments = dataclasses.asdict(self.args)
        if self.args.track:
            import wandb

            with as_user_error("Weights & Biases does not start: run without --track"):
                wandb.init(
                    project="aquadem",
                    name=self.folder.name,
                    config=arguments,
                    sync_tensorboard=True,
                )
        log = SummaryWriter(str(self.folder))
        # Events are written at once: flush() would not wait for the writer's queue.
        events = log.file_writer.event_writer
        events.add_event = events._ev_writer.write_event
        table = "\n".join(f"|{key}|{value}|" for key, value in arguments.items())
        log.add_text("arguments", f"|argument|value|\n|-|-|\n{table}")
        if warning:
            log.add_text("warning", warning)
            print("\n".join(["!" * 100, warning, "!" * 100]), file=sys.stderr)
        return log

    def finish(self) -> None:
        self.bar.close()
        self.log.close()
        self.lock.close()
        if not self.args.quiet:
            print(f"done; evaluate with: python {Path(__file__).name} --evaluate {self.folder}")

    # --------------------------------------------------------------------------- signals

    def catch_signals(self) -> None:
        """Ctrl-C and SIGTERM ask for a stop at the next checkpoint; a second one stops at once."""

        def handle(number: int, _: Any) -> None:
            if self.signals:
                raise KeyboardInterrupt
            self.signals.append(number)
            print("\nstopping at the next checkpoint; once more to stop at once", file=sys.stderr)

        signal.signal(signal.SIGINT, handle)
        signal.signal(signal.SIGTERM, handle)

    def stop_if_asked(self) -> None:
        if self.signals:
            command = f"python {Path(__file__).name} --resume {self.folder}"
            print(f"\nstopped; continue with: {command}", file=sys.stderr)
            sys.exit(128 + self.signals[0])

    # ----------------------------------------------------------------- progress and speed

    def show_progress(self, what: str, total: int, step: int) -> None:
        self.bar.close()
        self.bar = tqdm(desc=what, total=total, initial=step, unit="step", disable=self.args.quiet)
        self.seen_step = step
        self.start_clock(step)

    def start_clock(self, step: int) -> None:
        self.logged_step = step
        self.logged_time = time.perf_counter()

    @contextlib.contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """charts/SPS is the speed of training alone."""
        started = time.perf_counter()
        yield
        self.logged_time += time.perf_counter() - started

    def log_update(self, step: int, metrics: dict[str, jax.Array]) -> None:
        values = {tag: float(value) for tag, value in jax.device_get(metrics).items()}
        if not all(map(math.isfinite, values.values())):
            sys.exit(f"error: not finite at step {step}: {values}; lower --learning-rate")
        if step // 1000 > self.seen_step // 1000:  # a resumed run logs the same steps
            for tag, value in values.items():
                self.log.add_scalar(tag, value, step)
            speed = (step - self.logged_step) / (time.perf_counter() - self.logged_time)
            self.log.add_scalar("charts/SPS", speed, step)
            self.log.flush()
            self.start_clock(step)
        self.seen_step = step
        self.bar.update(step - self.bar.n)

    def save_evaluation(
        self, step: int, result: Evaluation, params: Any, envs: list[gym.Env], **scores: float
    ) -> None:
        """An evaluation, with further scores of it, into files, TensorBoard and progress bar."""
        save_arrays(self.folder / "agent.npz", params, step=step)
        row = {
            "success_rate": float(np.mean(result.successes)),
            "episodic_return": float(np.mean(result.returns)),
            "episodic_length": float(np.mean(result.lengths)),
            "episodes": len(result.returns),
            **scores,
        }
        for tag, score in row.items():
            if tag != "episodes" and math.isfinite(score):  # an environment need not report success
                self.log.add_scalar(f"eval/{tag}", score, step)
        write_rows_until(self.folder / "evaluations.csv", step, row)
        shown = {"return": f"{row['episodic_return']:.2f}", "success": f"{row['success_rate']:.2f}"}
        self.bar.set_postfix(shown, refresh=False)
        if frames := film(envs):
            fps = envs[0].metadata.get("render_fps", 30)
            write_video(self.folder / "videos" / f"step_{step}.mp4", frames, fps)


class EpisodeRun(Run):
    """A run that learns from its own episodes: it counts them, its checkpoints have a replay."""

    def start_episode(self) -> None:
        self.episode_return = 0.0
        self.episode_length = 0
        self.success: float | None = None

    def record_step(self, transition: Transition, reward: float, info: dict) -> None:
        self.unsaved.append(pack(transition))
        self.episode_return += float(reward)
        self.episode_length += 1
        if "success" in info:
            self.success = max(self.success or 0.0, float(info["success"]))
        self.bar.update()

    def end_episode(self, step: int) -> None:
        self.log.add_scalar("charts/episodic_return", self.episode_return, step)
        self.log.add_scalar("charts/episodic_length", self.episode_length, step)
        if self.success is not None:
            self.log.add_scalar("charts/success", self.success, step)
        self.last_length = self.episode_length
        self.start_episode()

    def save_checkpoint_if_due(self, env: gym.Env, state: Any, step: int) -> None:
        """An environment can be restored between episodes only: save before one passes the end."""
        next_end = step + self.last_length
        if next_end <= self.saved_step + self.args.checkpoint_every and not self.signals:
            return
        first = not (self.folder / "state.npz").exists()
        append_rows(self.folder / ("replay.partial" if first else "replay.f32"), self.unsaved)
        self.log.flush()  # what a kill loses, a resumed run does not log again
        generator = env.unwrapped.np_random.bit_generator.state
        save_arrays(self.folder / "state.npz", state, step=step, env_generator=generator)
        if first:
            (self.folder / "replay.partial").replace(self.folder / "replay.f32")
        self.unsaved = []
        self.saved_step = step
        self.stop_if_asked()

    def restore(
        self, env: gym.Env, state: Any, replay: Replay
    ) -> tuple[Any, Replay, list[Transition], int]:
        """Where an interrupted run left off: state, replay, steps not yet in it, and the step."""
        self.start_episode()
        self.unsaved: list[np.ndarray] = []
        self.saved_step = 0
        path = self.folder / "replay.f32"
        unfinished = self.folder / "replay.partial"
        if not (self.folder / "state.npz").exists():
            if path.exists():
                advice = "bring it back, or delete the replay to start the agent anew"
                raise UserError(f"{self.folder} has a replay.f32 but no state.npz: {advice}")
            # Killed before its first checkpoint was whole.
            unfinished.unlink(missing_ok=True)
            return state, replay, [], 0
        if unfinished.exists():
            unfinished.replace(path)  # killed at the end of its first checkpoint
        state, meta = load_arrays(self.folder / "state.npz", state)
        env.unwrapped.np_random.bit_generator.state = meta["env_generator"]
        step = meta["step"]
        self.saved_step = step
        stored = step - step % STEPS_PER_CALL
        template = replay.transitions
        capacity = len(template.ended)
        row_size = sum(math.prod(array.shape[1:]) for array in template)
        rows = restore_rows(path, step, row_size)
        if not np.isfinite(rows).all():
            raise UserError(f"{path} holds NaN or infinite values: this run cannot be resumed")
        kept = np.arange(max(0, stored - capacity), stored)
        ring = np.zeros((capacity, row_size), np.float32)
        ring[kept % capacity] = rows[kept]
        transitions = jax.tree.map(jnp.asarray, unpack(ring, template))
        block = [unpack(np.array(row), template) for row in rows[stored:]]
        return state, Replay(transitions, jnp.asarray(stored, jnp.int32)), block, step


class SACRun(EpisodeRun):
    """A run whose updates are not waited for, and whose replay is kept to the end."""

    def check_action(self, step: int, action: np.ndarray) -> None:
        if not np.isfinite(action).all():
            sys.exit(f"error: not finite at step {step}: action; lower --learning-rate")

    def log_update(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """To look at the metrics is to wait for the update, so only when they are logged."""
        if step % 1000 == 0:
            super().log_update(step, metrics)

    def check_losses(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """What is not finite once stays so, and must not reach an evaluation or a checkpoint."""
        super().log_update(step, metrics)

    def finish(self) -> None:
        # For record.py; --resume cuts it off again.
        append_rows(self.folder / "replay.f32", self.unsaved)
        super().finish()


# --------------------------------------------------------------------- evaluation of a saved run


def wilson_interval(successes: np.ndarray, z: float = 1.96) -> tuple[float, float]:
    """95 percent confidence interval of a success rate."""
    n, p = len(successes), float(np.mean(successes))
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def print_success(successes: np.ndarray, seen: int) -> None:
    """With its interval; and once more for the states that training never evaluated."""
    if np.isnan(successes).any():  # an environment need not report it
        return
    low, high = wilson_interval(successes)
    print(f"success {successes.mean():.3f} ({low:.3f} to {high:.3f})")
    fresh = successes[seen:]
    if len(fresh):
        low, high = wilson_interval(fresh)
        where = f"on the {len(fresh)} states that training never evaluated"
        print(f"success {fresh.mean():.3f} ({low:.3f} to {high:.3f}) {where}")


def print_distances(distances: dict[str, float]) -> None:
    distance, low, median, high = distances.values()
    quartiles = f"quartiles {low:.3f} and {high:.3f}"
    print(f"Wasserstein distance {distance:.3f}; human {median:.3f} ({quartiles})")


def evaluate_saved_agent(args: Args) -> None:
    """Prints return, success and for GAIL the Wasserstein distance of a run's latest agent.

    Return and success with 95 percent confidence intervals.
    """
    check_numbers(args)
    run = Path(args.evaluate)
    saved = load_command(run)
    saved.capture_video = args.capture_video
    envs = make_evaluation_tasks(saved, args.eval_episodes, videos=3)
    box = envs[0].action_space
    params, meta = load_actor(run, envs[0])
    policy = make_policy(Actor(len(box.low)), box)
    key = jax.random.PRNGKey(0)

    def mean_action(observations: np.ndarray) -> jax.Array:
        return policy(params, observations, key, mode="mean")[0]

    reference = None
    if saved.method == "gail":
        reference = load_reference(run, envs[0].observation_space.shape[0])
    result, distances = evaluate_with_distance(mean_action, envs, reference)
    print(f"{run}, step {meta['step']}, {len(envs)} episodes")
    half = 1.96 * result.returns.std(ddof=1) / math.sqrt(len(envs)) if len(envs) > 1 else math.nan
    print(f"return  {result.returns.mean():.3f} +- {half:.3f}")
    print_success(result.successes, saved.eval_episodes)
    if saved.method == "gail":
        print_distances(distances)
    if frames := film(envs):
        path = run / "videos" / f"evaluation_{meta['step']}.mp4"
        write_video(path, frames, envs[0].metadata.get("render_fps", 30))
        print(f"video   {path}")


def check_end_is_ahead(run: Path, argument: str, end: int) -> None:
    """A resumed run may be given another end, but none that its checkpoint has passed."""
    path = run / "state.npz"
    if path.exists():
        with (
            as_user_error(f"{path} is not a whole checkpoint"),
            np.load(path, allow_pickle=False) as file,
        ):
            step = json.loads(file["meta"].tobytes())["step"]
        if step > end:
            raise UserError(f"{run} is at step {step} already: give {argument} no less")


# ------------------------------------------------------------------------------------ command line

METHODS = {"sac": SACArgs, "sacfd": SACfDArgs, "gail": GAILArgs}
Command = (
    Annotated[SACArgs, tyro.conf.subcommand("sac")]
    | Annotated[SACfDArgs, tyro.conf.subcommand("sacfd")]
    | Annotated[GAILArgs, tyro.conf.subcommand("gail")]
)


def with_subcommand(words: list[str]) -> list[str]:
    """`--resume RUN` and `--evaluate RUN` need no method, for a run knows its own."""
    flags = ("--resume", "--evaluate")
    argv: list[str] = []
    for word in words:
        argv += word.split("=", 1) if word.startswith(flags) else [word]
    for flag, run in zip(argv, argv[1:]):
        if flag in flags and argv[0].startswith("-"):
            return [load_command(Path(run)).method, *argv]
    return argv


def resumed_command(args: Any, argv: list[str], end: str) -> Any:
    """The run's own arguments; only what does not change the learning may be given anew."""
    saved = load_command(Path(args.resume))
    if saved.method != args.method:
        raise UserError(f"{args.resume} is a run of {saved.method}, not of {args.method}")
    changed = tyro.cli(
        type(saved), args=argv[1:], default=dataclasses.replace(saved, resume=args.resume)
    )
    free = {"resume", end, "eval_every", "checkpoint_every", "capture_video", "track", "quiet"}
    for field in dataclasses.fields(saved):
        if field.name not in free and getattr(changed, field.name) != getattr(saved, field.name):
            raise UserError(f"{option(field.name)} cannot be changed by --resume: start a new run")
    check_end_is_ahead(Path(args.resume), option(end), getattr(changed, end))
    return changed


def prepare(args: Args) -> tuple[gym.Env, Demonstrations | None, SACRun]:
    """Whatever can be wrong with the input is found before the run folder is made."""
    check_numbers(args)
    args.reward = check_environment(args)
    env = make_task(args)
    demos, warning = method_demonstrations(args, env)
    if args.method == "sacfd":
        warn_of_raised_rewards(args, demos.rewards)
    return env, demos, SACRun(args, warning)


@contextlib.contextmanager
def errors_on_one_line() -> Iterator[None]:
    """Bad input ends with exit code 2, a full disk with 1, and neither with a traceback."""
    try:
        yield
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        full = disk_is_full(error)
        advice = "; free some space, then go on (a run with --resume)" if full else ""
        print("error:", " ".join(f"{error}{advice}".split()), file=sys.stderr)
        sys.exit(1 if full else 2)
    except KeyboardInterrupt:
        sys.exit(130)


def keep_what_is_compiled() -> None:
    """What XLA compiles is kept for later runs: they start in a third of the time.

    In ~/.cache/aquadem, or where JAX_COMPILATION_CACHE_DIR says.
    """
    if jax.config.jax_compilation_cache_dir is None:
        machine = platform.node()  # a home may be shared, processors differ
        folder = Path.home() / ".cache" / "aquadem" / machine
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # An entry that a kill cut off is compiled again, without a word.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")


def main() -> None:
    keep_what_is_compiled()
    with errors_on_one_line():
        argv = with_subcommand(sys.argv[1:])
        args = tyro.cli(Command, args=argv, description=__doc__)
        if args.evaluate:
            evaluate_saved_agent(args)
        else:
            train(resumed_command(args, argv, "total_timesteps") if args.resume else args)


if __name__ == "__main__":
    main()
