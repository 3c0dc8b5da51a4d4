# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.4.0", "gymnasium-robotics==1.4.2",
#   "mujoco==3.17.0", "minari[hdf5,hf]==0.5.4", "tyro", "tensorboard", "tensorboardX", "tqdm",
#   "matplotlib", "imageio", "imageio-ffmpeg",
#   "ott-jax==0.6.0",
# ]
# ///
"""AQuaGAIL: imitation learning without any reward (section 4.2 of the AQuaDem paper).

Learn K candidate actions per state from demonstrations (equation 1), which turns the continuous
problem into a discrete one, then train Munchausen DQN on it, whose reward is how well it confuses a
discriminator between the demonstrations and its own experience. Two defaults are ours, not the
paper's: T falls while the candidates are trained, and a running average of the Q-network is what is
evaluated. The paper's: --temperature-start 0.001 --ema-decay 0.

    python aquagail.py --env-id AdroitHandDoor-v1
    python aquagail.py --resume runs/AdroitHandDoor-v1__aquagail__1__1700000000
    python aquagail.py --evaluate runs/AdroitHandDoor-v1__aquagail__1__1700000000 --capture-video

Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin:
"Continuous Control with Action Quantization from Demonstrations", ICML 2022.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
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
from flax import struct
from ott.geometry import geometry
from ott.problems.linear import linear_problem
from ott.solvers.linear import acceleration, sinkhorn
from tqdm import tqdm

STEPS_PER_CALL = 8  # environment steps, then as many updates in one call (authors' code)
CANDIDATE_STEPS_PER_CALL = 500
EVALUATION_SEED = 2**31  # evaluation episode i starts from this + i; --seed stays below it
Optimizer = optax.GradientTransformation


@dataclasses.dataclass
class Args:
    env_id: str = "AdroitHandDoor-v1"  # any Gymnasium id with Box actions; `module:Env-v0` imports
    env_kwargs: str = "{}"  # arguments of the environment, as JSON
    max_episode_steps: int | None = None  # time limit; default: the environment's own
    dataset_id: str | None = None  # any Minari id; default for Adroit: D4RL/<task>/human-v2
    num_demos: int | None = None  # use only the first N episodes of the dataset; default: all
    reward: Literal["sparse", "env"] | None = None  # only reported, never learned from
    seed: int = 1  # equal seeds give bit-identical runs on a CPU with as many threads
    total_timesteps: int = 1_000_000  # environment steps
    eval_every: int = 50_000  # environment steps between evaluations
    eval_episodes: int = 30  # of an evaluation, greedy, always from the same initial states
    exp_name: str = "aquagail"  # in the folder's name: runs/{env_id}__{exp_name}__{seed}__{time}

    candidates: Literal["learned", "kmeans", "random"] = "learned"  # the others: appendix D
    num_actions: int = 10  # K, candidate actions per state
    temperature: float = 0.001  # T of the soft minimum
    temperature_start: float | None = None  # T at first; default: variance / 4 (paper: = T)
    candidate_steps: int = 50_000  # gradient steps of the candidate network
    held_out_episodes: int = 0  # demonstrations, the last N, that the candidates never see
    candidate_learning_rate: float = 3e-4  # Adam's, for the candidate network
    input_dropout: float = 0.0  # on the observation while training the candidates
    hidden_dropout: float = 0.0  # after every hidden layer while training the candidates
    candidates_from: str | None = None  # run folder whose candidates are used instead of training

    # what the discriminator compares (the paper does not say; measured in docs/RESULTS.md)
    discriminator_input: Literal["state-action", "state", "state-next-state"] = "state"
    discriminator_layers: int = 1  # hidden layers of the discriminator
    discriminator_units: int = 64  # units of each of them
    discriminator_learning_rate: float = 1e-6  # Adam's, for the discriminator
    # what keeps the discriminator from being too good
    discriminator_regularization: Literal["none", "dropout", "weight-decay"] = "dropout"
    discriminator_input_dropout: float = 0.5  # if the regularization is dropout
    discriminator_hidden_dropout: float = 0.5  # after each hidden layer, likewise
    discriminator_weight_decay: float = 10.0  # AdamW's, if the regularization is weight-decay
    normalize_observations: bool = True  # for the discriminator, by mean and deviation of the demos
    reward_balance: float = 0.5  # 0: -log p, 1: log(1 - p), p: P("agent"); between: mixed

    batch_size: int = 256  # of all networks, and of either half of the discriminator's
    learning_rate: float = 3e-5  # Adam's, for the Q-network
    gamma: float = 0.99  # discount, as in the authors' code
    n_step: int = 1  # length of the multi-step return
    epsilon: float = 0.01  # probability of a uniformly random candidate while training
    buffer_size: int = 1_000_000  # transitions kept in the replay buffer
    learning_starts: int = 1_000  # environment steps before the first update (authors' code)
    ema_decay: float = 0.999  # of the average of the Q-network that is evaluated (paper: 0, none)
    target_update_period: int = 100  # updates between copies of the target (authors' code)
    munchausen_tau: float = 0.03  # entropy temperature of Munchausen DQN
    munchausen_alpha: float = 0.9  # weight of the log-policy in the reward of Munchausen DQN
    munchausen_clip: float = -1e3  # lower bound of that log-policy term, as in the authors' code

    checkpoint_every: int = 10_000  # environment steps between checkpoints, at ends of episodes
    resume: str | None = None  # run folder to continue, with its own arguments
    evaluate: str | None = None  # run folder to evaluate instead of training
    capture_video: bool = False  # of evaluation episodes
    track: bool = False  # log to Weights & Biases too (if it is installed)
    quiet: bool = False  # no progress bars, only warnings and errors


# --------------------------------------------------------------------------------------- networks


class CandidateNetwork(nn.Module):
    """Psi of equation 1, (..., obs) -> (..., K, action_dim): a torso, then an MLP per candidate.

    `dense` is nn.Dense and `dense_per_head` K of them side by side, both only faster on a CPU.
    """

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
            # One mask for the whole batch, as in the authors' code.
            return nn.Dropout(rate, broadcast_dims=batch_dims, deterministic=not train)(x)

        x = dropout(self.input_dropout, observations)
        for width in self.torso:
            x = nn.relu(dense(width, nn.initializers.xavier_uniform())(x))
            x = dropout(self.hidden_dropout, x)
        for layer, width in enumerate(self.head):
            x = nn.relu(dense_per_head(self, layer, width, x))  # (..., K, width)
            x = dropout(self.hidden_dropout, x)
        return dense_per_head(self, len(self.head), self.action_dim, x)


class QNetwork(nn.Module):
    """(..., obs) -> (..., K): Acme's LayerNorm MLP, which the paper names."""

    num_actions: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> jax.Array:
        init = nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")  # Acme's
        x = nn.tanh(nn.LayerNorm()(dense(512, init)(observations)))
        x = elu(dense(512, init)(x))
        x = elu(dense(256, init)(x))
        return dense(self.num_actions, init)(x)


# ----------------------------------------------------------------------------- losses and targets


def soft_min_loss(candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """Equation 1 as f_T of appendix B: between minimum (T -> 0) and mean of the squared distances.

    candidates (B, K, D), actions (B, D).
    """
    distances = jnp.sum((candidates - actions[:, None, :]) ** 2, axis=-1)  # (B, K)
    log_mean = jax.nn.logsumexp(-distances / temperature, axis=-1) - jnp.log(candidates.shape[1])
    return jnp.mean(-temperature * log_mean)


def nearest_candidate(candidates: jax.Array, actions: jax.Array) -> jax.Array:
    """Index of the candidate at the smallest Euclidean distance. (..., K, D), (..., D) -> (...)."""
    return jnp.argmin(jnp.sum((candidates - actions[..., None, :]) ** 2, axis=-1), axis=-1)


def munchausen_target(
    q_target_s: jax.Array,  # (B, K) target network at s
    q_target_next: jax.Array,  # (B, K) target network at the bootstrap state
    action: jax.Array,  # (B,)
    reward: jax.Array,  # (B,) n-step return
    discount: jax.Array,  # (B,) gamma^(steps in the return), 0 after a termination
    tau: float,
    alpha: float,
    clip: float,
) -> jax.Array:
    """Munchausen DQN (Vieillard et al. 2020): r + alpha tau log pi(a|s) + discount * soft value."""
    log_policy = q_of(jax.nn.log_softmax(q_target_s / tau), action)
    soft_value = tau * jax.nn.logsumexp(q_target_next / tau, axis=1)  # = sum_a pi (q - tau log pi)
    return reward + alpha * jnp.clip(tau * log_policy, clip, 0.0) + discount * soft_value


def q_of(q: jax.Array, action: jax.Array) -> jax.Array:
    """The column of each row's action. (B, K), (B,) -> (B,)."""
    return jnp.take_along_axis(q, action[:, None], axis=1)[:, 0]


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
    """One step, or many of them with a leading axis."""

    observation: Any  # (obs,)
    next_observation: Any  # (obs,)
    action: Any  # (action_dim,) the candidate itself
    index: Any  # of the candidate
    terminated: Any  # 1 if the task itself ended, else 0
    ended: Any  # 1 if the episode ended, however


class Replay(NamedTuple):
    """A ring of transitions on the device."""

    transitions: Transition  # leading axis: capacity
    count: jax.Array  # transitions ever stored; the newest is at (count - 1) % capacity


class Batch(NamedTuple):
    observations: jax.Array  # (B, obs)
    indices: jax.Array  # (B,) of the candidates
    returns: jax.Array  # (B,) n-step
    next_observations: jax.Array  # (B, obs) the bootstrap state
    discounts: jax.Array  # (B,)


def make_replay(capacity: int, obs_dim: int, action_dim: int) -> Replay:
    transitions = Transition(
        observation=jnp.zeros((capacity, obs_dim)),
        next_observation=jnp.zeros((capacity, obs_dim)),
        action=jnp.zeros((capacity, action_dim)),
        index=jnp.zeros(capacity, jnp.int32),
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


def reward_windows(windows: Transition, rewards: jax.Array, gamma: float) -> Batch:
    """The batch of the Q-network, given a reward for every step of the windows (B, n)."""
    returns, last, discounts = n_step_returns(rewards, windows.terminated, windows.ended, gamma)
    next_observations = windows.next_observation[jnp.arange(len(last)), last]
    observations = windows.observation[:, 0]
    indices = windows.index[:, 0]
    return Batch(observations, indices, returns, next_observations, discounts)


# ----------------------------------------------------------------------------- stage 1: candidates


class CandidateState(NamedTuple):
    params: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


def annealed_temperature(args: Args, step: jax.Array) -> jax.Array | float:
    """T falls geometrically over the first half of the steps, then stays (ours, not the paper's).

    With a constant small T, the head of a candidate that is never the nearest one gets no gradient.
    """
    if args.temperature_start == args.temperature:
        return args.temperature
    progress = jnp.minimum(step / (0.5 * args.candidate_steps), 1.0)
    return args.temperature_start * (args.temperature / args.temperature_start) ** progress


def make_candidate_update(network: nn.Module, optimizer: Optimizer, args: Args) -> Callable:
    """`steps` gradient steps on equation 1 in one call; returns the mean loss."""

    def loss_fn(params: Any, batch: tuple, temperature: jax.Array, key: jax.Array) -> jax.Array:
        observations, actions = batch
        candidates = network.apply(params, observations, train=True, rngs={"dropout": key})
        return soft_min_loss(candidates, actions, temperature)

    def update(state: CandidateState, observations: jax.Array, actions: jax.Array, steps: int):
        def step(state: CandidateState, _: None) -> tuple[CandidateState, jax.Array]:
            key, batch_key, dropout_key = jax.random.split(state.key, 3)
            chosen = jax.random.randint(batch_key, (args.batch_size,), 0, len(observations))
            batch = (observations[chosen], actions[chosen])
            temperature = annealed_temperature(args, state.step)
            loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, temperature, dropout_key)
            changes, opt_state = optimizer.update(grads, state.opt_state)
            params = optax.apply_updates(state.params, changes)
            return CandidateState(params, opt_state, state.step + 1, key), loss

        state, losses = jax.lax.scan(step, state, None, length=steps)
        return state, jnp.mean(losses)

    return jax.jit(update, static_argnums=3, donate_argnums=0)


def make_candidate_network(args: Args, action_dim: int) -> nn.Module:
    if args.candidates == "kmeans":
        return FixedCandidates(args.num_actions, action_dim)
    dropout = {"input_dropout": args.input_dropout, "hidden_dropout": args.hidden_dropout}
    return CandidateNetwork(args.num_actions, action_dim, **dropout)


def train_candidates(
    args: Args, run: "CandidateRun", network: nn.Module, demos: "Demonstrations"
) -> Any:
    """K candidates per state by equation 1, or those of an ablation."""
    key = jax.random.fold_in(jax.random.PRNGKey(args.seed), 0)  # 0: the first stage
    key, init_key = jax.random.split(key)
    params = network.init(init_key, demos.observations[:1])
    if args.candidates == "random":
        return params
    if args.candidates == "kmeans":
        return kmeans_candidates(demos.actions, args)
    optimizer = optax.adam(args.candidate_learning_rate)
    state = CandidateState(params, optimizer.init(params), jnp.zeros((), jnp.int32), key)
    state, step = run.restore_candidate_checkpoint(state)
    update = make_candidate_update(network, optimizer, args)
    seen = steps_to_learn_from(args, demos)
    observations = jnp.asarray(demos.observations[:seen])
    actions = jnp.asarray(demos.actions[:seen])
    run.show_progress("candidates", args.candidate_steps, step)
    while step < args.candidate_steps:
        steps = min(CANDIDATE_STEPS_PER_CALL, args.candidate_steps - step)
        state, loss = update(state, observations, actions, steps)
        step += steps
        run.log_candidates(step, loss, annealed_temperature(args, step))
        run.save_candidate_checkpoint(step, state)
    return state.params


def discretise(
    network: nn.Module, params: Any, demos: "Demonstrations"
) -> tuple[np.ndarray, np.ndarray]:
    """Every demonstrated action as its nearest candidate's index, and how far away that is."""

    def nearest(step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        observation, action = step
        candidates = network.apply(params, observation)  # (K, D)
        index = nearest_candidate(candidates, action)
        return index, jnp.linalg.norm(candidates[index] - action)

    steps = (demos.observations, demos.actions)
    indices, distances = jax.lax.map(nearest, steps, batch_size=4096)  # bounds the memory
    return np.asarray(indices), np.asarray(distances)


# -------------------------------------------------------------------- stage 2: the discriminator


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


def discriminator_loss(expert_logits: jax.Array, agent_logits: jax.Array) -> jax.Array:
    """Cross-entropy: -log P(expert) of the expert's logits (B,), -log P(agent) of the agent's."""
    return 0.5 * (jnp.mean(nn.softplus(-expert_logits)) + jnp.mean(nn.softplus(agent_logits)))


def discriminator_reward(logits: jax.Array, balance: float) -> jax.Array:
    """(1 - balance) [-log p] + balance log(1 - p), p = P(agent) = sigmoid(-logit).

    Balance 0 is never negative and so rewards staying alive, 1 never positive, 0.5 half the logit
    (the paper's -0.5 log p + log(1 - p) is read as the mean of both).
    """
    return (1 - balance) * nn.softplus(logits) - balance * nn.softplus(-logits)


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


# ---------------------------------------------------------------------------------- stage 2: agent


class AgentState(NamedTuple):
    params: Any
    average_params: Any  # of the latest params: what is evaluated
    target_params: Any
    opt_state: Any
    updates: jax.Array
    key: jax.Array


def init_agent(
    q_network: nn.Module, optimizer: Optimizer, key: jax.Array, obs_dim: int
) -> tuple[AgentState, jax.Array]:
    """The agent and its policy's key. Copies, because one buffer cannot be donated twice."""
    key, act_key, init_key = jax.random.split(key, 3)
    params = q_network.init(init_key, jnp.zeros(obs_dim))
    average_params = jax.tree.map(jnp.copy, params)
    target_params = jax.tree.map(jnp.copy, params)
    opt_state = optimizer.init(params)
    updates = jnp.zeros((), jnp.int32)
    return AgentState(params, average_params, target_params, opt_state, updates, key), act_key


def target_of(q_network: nn.Module, agent: AgentState, batch: Batch, args: Args) -> jax.Array:
    """What the Q-value of a batch should be, by the target network."""
    both = jnp.concatenate([batch.observations, batch.next_observations])  # one pass for both
    q_s, q_next = jnp.split(q_network.apply(agent.target_params, both), 2)
    return munchausen_target(
        q_s,
        q_next,
        batch.indices,
        batch.returns,
        batch.discounts,
        tau=args.munchausen_tau,
        alpha=args.munchausen_alpha,
        clip=args.munchausen_clip,
    )


def make_update(
    q_network: nn.Module, optimizer: Optimizer, reference: "Reference", args: Args
) -> Callable:
    """STEPS_PER_CALL updates of discriminator and Q-network in one call; returns mean metrics."""

    def loss_fn(params: Any, batch: Batch, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_taken = q_of(q_network.apply(params, batch.observations), batch.indices)
        return jnp.mean(optax.huber_loss(q_taken, target)), jnp.mean(q_taken)

    def update(
        agent: AgentState, discriminator: DiscriminatorState, replay: Replay, demo_replay: Replay
    ) -> tuple:
        def step(states: tuple[AgentState, DiscriminatorState], _: None) -> tuple[tuple, dict]:
            agent, discriminator = states
            key, expert_key, own_key, batch_key = jax.random.split(agent.key, 4)
            expert_steps = sample(demo_replay, expert_key, args.batch_size, n_step=1)
            own_steps = sample(replay, own_key, args.batch_size, n_step=1)
            expert = discriminator_input(args, reference, expert_steps)[:, 0]
            own = discriminator_input(args, reference, own_steps)[:, 0]
            discriminator, metrics = update_discriminator(discriminator, expert, own, args)
            # Rewards are the discriminator's of now, not of when the steps were taken.
            windows = sample(replay, batch_key, args.batch_size, args.n_step)
            features = discriminator_input(args, reference, windows)
            logits = discriminator.network.apply(discriminator.params, features)
            rewards = discriminator_reward(logits, args.reward_balance)  # (B, n)
            batch = reward_windows(windows, rewards, args.gamma)
            target = target_of(q_network, agent, batch, args)
            grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, q_value), grads = grad_fn(agent.params, batch, target)
            changes, opt_state = optimizer.update(grads, agent.opt_state)
            params = optax.apply_updates(agent.params, changes)
            # The average's greedy policy flickers less than the network's (ours, not the paper's).
            share = 1.0 - args.ema_decay
            average_params = optax.incremental_update(params, agent.average_params, share)
            updates = agent.updates + 1
            target_params = optax.periodic_update(
                params, agent.target_params, updates, args.target_update_period
            )
            agent = AgentState(params, average_params, target_params, opt_state, updates, key)
            metrics |= {"losses/q_loss": loss, "losses/q_value": q_value}
            return (agent, discriminator), metrics

        states, metrics = jax.lax.scan(step, (agent, discriminator), None, length=STEPS_PER_CALL)
        return *states, jax.tree.map(jnp.mean, metrics)

    return jax.jit(update, donate_argnums=(0, 1))


def make_policy(
    q_network: nn.Module, candidate_network: nn.Module, box: gym.spaces.Box
) -> Callable:
    """Epsilon-greedy, for one observation or a batch: actions, their indices, the next key."""

    def policy(
        q_params: Any,
        candidate_params: Any,
        observations: jax.Array,
        key: jax.Array,
        epsilon: float,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        key, coin_key, index_key = jax.random.split(key, 3)
        greedy = jnp.argmax(q_network.apply(q_params, observations), axis=-1)
        explore = jax.random.uniform(coin_key, greedy.shape) < epsilon
        random = jax.random.randint(index_key, greedy.shape, 0, q_network.num_actions)
        index = jnp.where(explore, random, greedy)
        candidates = candidate_network.apply(candidate_params, observations)  # (..., K, D)
        actions = jnp.take_along_axis(candidates, index[..., None, None], axis=-2)[..., 0, :]
        return jnp.clip(actions, box.low, box.high), index, key

    return jax.jit(policy, static_argnames="epsilon")


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


def make_demo_replay(demos: "Demonstrations", indices: np.ndarray) -> Replay:
    """The demonstrated steps, with the human's own actions and without rewards."""
    steps = Transition(
        observation=demos.observations,
        next_observation=demos.next_observations,
        action=demos.actions,
        index=indices,  # never learned from: the discriminator sees no index
        terminated=demos.terminations,
        ended=demos.ends,
    )
    return Replay(jax.tree.map(jnp.asarray, as_stored(steps)), jnp.asarray(len(indices)))


def train_agent(
    args: Args,
    run: "AgentRun",
    env: gym.Env,
    candidate_network: nn.Module,
    candidate_params: Any,
    demo_replay: Replay,
    reference: "Reference",
) -> None:
    """Epsilon-greedy steps among the candidates, and as many updates of both networks."""
    obs_dim = env.observation_space.shape[0]
    q_network = QNetwork(args.num_actions)
    optimizer = optax.adam(args.learning_rate)
    policy = make_policy(q_network, candidate_network, env.action_space)
    update = make_update(q_network, optimizer, reference, args)
    store_steps = jax.jit(store, donate_argnums=0)
    key = jax.random.fold_in(jax.random.PRNGKey(args.seed), 1)  # 1: the second stage
    agent, policy_key = init_agent(q_network, optimizer, key, obs_dim)
    key = jax.random.fold_in(jax.random.PRNGKey(args.seed), 2)  # 2: its discriminator
    features = discriminator_input(args, reference, demo_replay.transitions)
    discriminator = init_discriminator(args, key, features[0])
    replay = make_replay(replay_capacity(args), obs_dim, env.action_space.shape[0])
    env.reset(seed=args.seed)  # seeds its generator
    state = (agent, discriminator, policy_key)
    (agent, discriminator, policy_key), replay, unstored, step = run.restore(env, state, replay)
    eval_envs = make_evaluation_envs(args, args.eval_episodes, videos=1)

    def evaluate_agent() -> None:
        params = agent.average_params

        def greedy(observations: np.ndarray) -> jax.Array:
            return policy(params, candidate_params, observations, policy_key, epsilon=0.0)[0]

        with run.clock_stopped():
            result, distances = evaluate_with_distance(greedy, eval_envs, reference)
            run.save_evaluation(step, result, params, eval_envs, **distances)

    run.show_progress("agent", args.total_timesteps, step)
    observation = first_observation(env)
    while step < args.total_timesteps:
        if step % args.eval_every == 0:
            evaluate_agent()
        action, index, policy_key = policy(
            agent.params, candidate_params, observation, policy_key, epsilon=args.epsilon
        )
        action, index = jax.device_get((action, index))
        next_observation, reward, terminated, truncated, info = env.step(action)
        next_observation = np.asarray(next_observation, np.float32)
        ended = terminated or truncated
        transition = Transition(observation, next_observation, action, index, terminated, ended)
        unstored.append(transition)
        observation = next_observation
        step += 1
        run.record_step(transition, reward, info)
        if len(unstored) == STEPS_PER_CALL:
            replay = store_steps(replay, stack_transitions(unstored))
            unstored = []
            if step > args.learning_starts:
                agent, discriminator, metrics = update(agent, discriminator, replay, demo_replay)
                run.log_update(step, metrics)
        if ended:
            run.end_episode(step)
            run.save_checkpoint_if_due(env, (agent, discriminator, policy_key), step)
            observation = first_observation(env)
    evaluate_agent()


def train(args: Args) -> Path:
    """Candidates from the demonstrations, then an agent that imitates them."""
    env, demos, network, run = prepare(args)  # completes args, too
    reference = find_reference(run, demos)
    candidate_params = run.load_candidates(network, demos)
    if candidate_params is None:
        candidate_params = train_candidates(args, run, network, demos)
    run.write_candidates(candidate_params)
    indices, distances = discretise(network, candidate_params, demos)
    report_candidates(args, indices, distances, demos, run.log)
    run.write_candidates_along(network, candidate_params, demos)
    demo_replay = make_demo_replay(demos, indices)
    train_agent(args, run, env, network, candidate_params, demo_replay, reference)
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
START_TEMPERATURE = 0.25  # --temperature-start, in variances of the demonstrated actions

BOUNDS = {  # of every number that has any
    "max_episode_steps": (1, LARGEST),
    "num_demos": (1, LARGEST),
    "seed": (0, EVALUATION_SEED - 1),
    "total_timesteps": (1, LARGEST),
    "eval_every": (1, LARGEST),
    "eval_episodes": (1, 10_000),
    "num_actions": (1, LARGEST),
    "temperature": (1e-9, 1e9),
    "temperature_start": (1e-9, 1e9),
    "candidate_steps": (0, LARGEST),
    "held_out_episodes": (0, LARGEST),
    "candidate_learning_rate": (1e-9, 1e9),
    "input_dropout": (0, 0.99),
    "hidden_dropout": (0, 0.99),
    "discriminator_layers": (0, 10),
    "discriminator_units": (1, 10_000),
    "discriminator_learning_rate": (1e-9, 1e9),
    "discriminator_input_dropout": (0, 0.99),
    "discriminator_hidden_dropout": (0, 0.99),
    "discriminator_weight_decay": (0, 1e9),
    "reward_balance": (0, 1),
    "batch_size": (1, LARGEST),
    "learning_rate": (1e-9, 1e9),
    "gamma": (0, 1),
    "n_step": (1, 1_000),
    "epsilon": (0, 1),
    "buffer_size": (STEPS_PER_CALL, LARGEST),
    "learning_starts": (0, LARGEST),
    "ema_decay": (0, 1 - 1e-9),
    "target_update_period": (1, LARGEST),
    "munchausen_tau": (1e-9, 1e9),
    "munchausen_alpha": (0, 1),
    "munchausen_clip": (-1e9, 0),
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


def check_args(args: Args) -> None:
    for name, (low, high) in BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise UserError(f"{option(name)} is {value}: give a number from {low} to {high}")


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


def check_fits(numbers: float, advice: str) -> None:
    """So many float32 numbers have to be held at once: else a run would end in the middle."""
    needed = np.dtype(np.float32).itemsize * numbers
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > here:
        sizes = f"about {needed / 1e9:.0f} GB, and this machine has {here / 1e9:.0f}"
        raise UserError(f"this run needs {sizes}: lower {advice}")


def check_memory(args: Args, demos: "Demonstrations", kept_steps: int, networks: int = 1) -> None:
    """What surely has to be held at once."""
    width = 256
    per_candidate = width * width + width * demos.actions.shape[1]
    kernels = 4 * args.num_actions * per_candidate  # parameters, gradient and Adam's two moments
    activations = 4 * args.num_actions * args.batch_size * width
    replay = kept_steps * (2 * demos.observations.shape[1] + 4)
    check_fits(networks * (kernels + activations) + replay, "--num-actions or another size")


# ------------------------------------------------------------------------------------ fast layers


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel, a sixth faster in a step of the candidates on a CPU.

    JAX's own gradient of the kernel can come out transposed; Adam then reads across the memory.
    """
    return x @ kernel


def product_gradients(
    inputs: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = inputs
    return gradient @ kernel.T, x.reshape(-1, x.shape[-1]).T @ gradient.reshape(
        -1, gradient.shape[-1]
    )


product.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), product_gradients)


def dense(width: int, init: Callable) -> nn.Dense:
    return nn.Dense(
        width, kernel_init=init, dot_general=lambda x, kernel, *_, **__: product(x, kernel)
    )


def dense_per_head(module: nn.Module, layer: int, width: int, x: jax.Array) -> jax.Array:
    """One layer of all candidates' MLPs: (..., fan_in), later (..., K, fan_in) -> (..., K, width).

    The first layer of all heads reads the same x, so it is one plain product.
    """
    heads = module.num_actions
    fan_in = x.shape[-1]
    first = layer == 0
    axes = {"in_axis": 0, "batch_axis": 1} if first else {"in_axis": 1, "batch_axis": 0}
    xavier = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", out_axis=2, **axes)
    shape = (fan_in, heads, width) if first else (heads, fan_in, width)
    kernel = module.param(f"head_{layer}_kernel", xavier, shape)
    bias = module.param(f"head_{layer}_bias", nn.initializers.zeros, (heads, width))
    if first:
        flat = product(x, kernel.reshape(fan_in, -1))
        return flat.reshape(*x.shape[:-1], heads, width) + bias
    return jnp.einsum("...ki,kio->...ko", x, kernel) + bias


def elu(x: jax.Array) -> jax.Array:
    """nn.elu with exp in place of expm1, which takes twice as long on a CPU."""
    return jnp.where(x > 0, x, jnp.exp(jnp.minimum(x, 0.0)) - 1.0)


# ------------------------------------------------------------------------------------ environment


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


def replay_capacity(args: Args) -> int:
    """Whole blocks of steps, and no more than the run will fill."""
    blocks = math.ceil(args.total_timesteps / STEPS_PER_CALL)
    return min(args.buffer_size, blocks * STEPS_PER_CALL)


def make_evaluation_envs(args: Args, episodes: int, videos: int) -> list[gym.Env]:
    """An environment per episode; the first ones are filmed if asked for."""
    filmed = [args.capture_video and i < videos for i in range(episodes)]
    return [Filmed(make_env(args, render=True)) if film else make_env(args) for film in filmed]


def seeded_reset(env: gym.Env, seed: int) -> np.ndarray:
    """Twice: some environments (Meta-World's) draw their task before they look at the seed."""
    env.reset(seed=seed)
    return env.reset(seed=seed)[0]


def first_observation(env: gym.Env) -> np.ndarray:
    return np.asarray(env.reset()[0], np.float32)


class CandidateActions(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """A continuous environment as Discrete(K), with a run's candidates, for any discrete library.

    `env = CandidateActions(gym.make("AdroitHandDoor-v1"), "runs/RUN")`
    """

    def __init__(self, env: gym.Env, run: str | Path):
        gym.utils.RecordConstructorArgs.__init__(self, run=str(run))
        super().__init__(env if isinstance(env, CheckedEnv) else CheckedEnv(env))
        args = load_args(Path(run))
        network = make_candidate_network(args, env.action_space.shape[0])
        params = load_candidates(Path(run), network, self.observation_space.shape[0])
        self.action_space = gym.spaces.Discrete(args.num_actions)
        self._candidates = jax.jit(lambda observation: network.apply(params, observation))
        self._observation: np.ndarray | None = None

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        observation, info = self.env.reset(**kwargs)
        self._observation = np.asarray(observation, np.float32)
        return observation, info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._observation is None:
            raise gym.error.ResetNeeded("call reset() before step()")
        if not self.action_space.contains(action):
            raise gym.error.InvalidAction(
                f"{action!r} is not one of the {self.action_space.n} candidates"
            )
        continuous = np.asarray(self._candidates(self._observation))[action]
        observation, reward, terminated, truncated, info = self.env.step(continuous)
        self._observation = np.asarray(observation, np.float32)
        return observation, reward, terminated, truncated, info


# --------------------------------------------------------------------------------- demonstrations


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


def steps_to_learn_from(args: Args, demos: Demonstrations) -> int:
    """How many of the demonstrated steps the candidates learn from: all but the held-out ones."""
    starts = np.concatenate(
        [[0], np.flatnonzero(demos.ends) + 1]
    )  # of every episode, then the end of the data
    if args.held_out_episodes >= len(starts) - 1:
        raise UserError("--held-out-episodes leaves no demonstration: give a lower one")
    return int(starts[len(starts) - 1 - args.held_out_episodes])


def check_candidates(args: Args, demos: Demonstrations) -> None:
    steps_to_learn_from(args, demos)
    different = len(np.unique(demos.actions, axis=0))
    if args.candidates == "kmeans" and args.num_actions > different:
        there = f"the {different} different actions"
        raise UserError(f"--num-actions {args.num_actions} is more than {there}: lower it")


class FixedCandidates(nn.Module):
    """The same K actions in every state."""

    num_actions: int
    action_dim: int

    @nn.compact
    def __call__(self, observations: jax.Array, train: bool = False) -> jax.Array:
        actions = self.param("actions", nn.initializers.zeros, (self.num_actions, self.action_dim))
        return jnp.broadcast_to(actions, (*observations.shape[:-1], *actions.shape))


def kmeans_candidates(actions: np.ndarray, args: Args) -> Any:
    from scipy.cluster.vq import kmeans2

    centres, _ = kmeans2(actions, args.num_actions, iter=100, minit="++", rng=args.seed)
    return {"params": {"actions": jnp.asarray(centres)}}


def start_temperature(args: Args, actions: np.ndarray) -> float:
    """T is compared with squared action distances, so it starts at a fraction of their variance."""
    if args.temperature_start is not None:
        return args.temperature_start
    return max(args.temperature, START_TEMPERATURE * float(np.sum(np.var(actions, axis=0))))


def check_borrowed_candidates(args: Args, network: nn.Module, demos: Demonstrations) -> None:
    """Those of --candidates-from have to fit, unless this run has a copy of its own."""
    has_a_copy = args.resume and (Path(args.resume) / "candidates.npz").exists()
    if args.candidates_from and not has_a_copy:
        load_candidates(Path(args.candidates_from), network, demos.observations.shape[1])


def report_candidates(
    args: Args, indices: np.ndarray, distances: np.ndarray, demos: Demonstrations, log: Any
) -> None:
    """Which candidates are in use, and how near they come to what was demonstrated."""
    shares = np.bincount(indices, minlength=args.num_actions) / len(indices)
    used = shares[shares > 0]
    log.add_scalar("candidates/in_use", len(used), 0)
    log.add_scalar("candidates/perplexity", float(np.exp(-np.sum(used * np.log(used)))), 0)
    log.add_scalar("candidates/nearest_distance", float(distances.mean()), 0)
    if args.held_out_episodes:
        unseen = steps_to_learn_from(args, demos)
        log.add_scalar("candidates/held_out_distance", float(distances[unseen:].mean()), 0)
    log.add_histogram("candidates/usage", indices, 0, bins=np.arange(args.num_actions + 1) - 0.5)


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


# ----------------------------------------------------------------------------- pictures and videos


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


# -------------------------------------------------------------------------------------- run folder


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


def load_args(run: Path) -> Args:
    with as_user_error(f"{run} is not a run folder of this script"):
        saved = json.loads((run / "args.json").read_text())
        args = Args(
            **{
                field.name: saved.get(field.name, field.default)
                for field in dataclasses.fields(Args)
            }
        )
        check_args(args)
        return args


def load_candidates(run: Path, network: nn.Module, obs_dim: int) -> Any:
    template = jax.eval_shape(network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    return load_arrays(run / "candidates.npz", template)[0]


def stack_transitions(transitions: list[Transition]) -> Transition:
    return as_stored(Transition(*map(np.stack, zip(*transitions))))


def as_stored(transitions: Transition) -> Transition:
    """As the replay has them: indices as integers, everything else as float32."""
    arrays = [np.asarray(array, np.float32) for array in transitions]
    return Transition(*arrays)._replace(index=np.asarray(transitions.index, np.int32))


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


class CandidateRun(Run):
    """A run whose first stage learns candidates."""

    def load_candidates(self, network: nn.Module, demos: Demonstrations) -> Any:
        """This run's own, else those of --candidates-from; None if they are yet to be trained."""
        has_a_copy = (self.folder / "candidates.npz").exists()
        if not has_a_copy and self.args.candidates_from is None:
            return None
        source = self.folder if has_a_copy else Path(self.args.candidates_from)
        return load_candidates(source, network, demos.observations.shape[1])

    def write_candidates(self, params: Any) -> None:
        if not (self.folder / "candidates.npz").exists():
            save_arrays(self.folder / "candidates.npz", params)
        (self.folder / "candidates_training.npz").unlink(missing_ok=True)

    def write_candidates_along(
        self, network: nn.Module, params: Any, demos: Demonstrations
    ) -> None:
        """What `python plot.py candidates RUN` draws: the first demonstration, its candidates."""
        length = int(np.argmax(demos.ends)) + 1
        candidates = np.asarray(network.apply(params, demos.observations[:length]))
        with replacing(self.folder / "candidates_along.npz") as file:
            np.savez(file, candidates=candidates, actions=demos.actions[:length])

    def restore_candidate_checkpoint(self, state: CandidateState) -> tuple[CandidateState, int]:
        path = self.folder / "candidates_training.npz"
        if not path.exists():
            return state, 0
        state, meta = load_arrays(path, state)
        return state, meta["step"]

    def log_candidates(self, step: int, loss: jax.Array, temperature: Any) -> None:
        if not np.isfinite(loss):
            problem = f"the candidate loss is {loss} at step {step}"
            sys.exit(f"error: {problem}: lower --candidate-learning-rate")
        self.log.add_scalar("candidates/loss", float(loss), step)
        self.log.add_scalar("candidates/temperature", float(temperature), step)
        self.log.flush()
        self.bar.set_postfix(loss=f"{loss:.5f}", refresh=False)
        self.bar.update(step - self.bar.n)

    def save_candidate_checkpoint(self, step: int, state: CandidateState) -> None:
        if step % (20 * CANDIDATE_STEPS_PER_CALL) == 0 or self.signals:
            self.log.flush()  # what a kill loses, a resumed run does not log again
            save_arrays(self.folder / "candidates_training.npz", state, step=step)
            self.stop_if_asked()


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


class AgentRun(CandidateRun, EpisodeRun):
    """Candidates first, then episodes."""


# ------------------------------------------------------------------------ evaluation of a saved run


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


def measure_imitation(args: Args) -> None:
    """Prints mean return, success and Wasserstein distance of a run's latest evaluated agent."""
    check_args(args)
    run = Path(args.evaluate)
    saved = load_args(run)
    saved.capture_video = args.capture_video
    envs = make_evaluation_envs(saved, args.eval_episodes, videos=3)
    box = envs[0].action_space
    obs_dim = envs[0].observation_space.shape[0]
    network = make_candidate_network(saved, len(box.low))
    q_network = QNetwork(saved.num_actions)
    candidate_params = load_candidates(run, network, obs_dim)
    reference = load_reference(run, obs_dim)
    template = jax.eval_shape(q_network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    q_params, meta = load_arrays(run / "agent.npz", template)
    policy = make_policy(q_network, network, box)
    key = jax.random.PRNGKey(0)
    result, distances = evaluate_with_distance(
        lambda x: policy(q_params, candidate_params, x, key, epsilon=0.0)[0], envs, reference
    )
    print(f"{run}, step {meta['step']}, {len(envs)} episodes")
    half = 1.96 * result.returns.std(ddof=1) / math.sqrt(len(envs)) if len(envs) > 1 else math.nan
    print(f"return  {result.returns.mean():.3f} +- {half:.3f}")
    print_success(result.successes, saved.eval_episodes)
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


def resumed_args(args: Args) -> Args:
    """The run's own arguments; only what does not change the learning may be given anew."""
    saved = load_args(Path(args.resume))
    changed = tyro.cli(Args, default=dataclasses.replace(saved, resume=args.resume))
    free = {
        "resume",
        "total_timesteps",
        "eval_every",
        "checkpoint_every",
        "capture_video",
        "track",
        "quiet",
    }
    for field in dataclasses.fields(Args):
        if field.name not in free and getattr(changed, field.name) != getattr(saved, field.name):
            raise UserError(f"{option(field.name)} cannot be changed by --resume: start a new run")
    check_end_is_ahead(Path(args.resume), "--total-timesteps", changed.total_timesteps)
    return changed


def prepare(args: Args) -> tuple[gym.Env, Demonstrations, nn.Module, AgentRun]:
    """Whatever can be wrong with the input is found before the run folder is made."""
    check_args(args)
    args.reward = check_env(args)
    env = make_env(args)
    without_success = dataclasses.replace(args, reward="env")  # demonstrations need not report it
    demos, args.dataset_id, warning = find_demonstrations(without_success, env)
    check_candidates(args, demos)
    check_memory(args, demos, replay_capacity(args))
    args.temperature_start = start_temperature(args, demos.actions)
    network = make_candidate_network(args, env.action_space.shape[0])
    check_borrowed_candidates(args, network, demos)
    return env, demos, network, AgentRun(args, warning)


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
    args = tyro.cli(Args, description=__doc__)
    with errors_on_one_line():
        if args.evaluate:
            measure_imitation(args)
        else:
            train(resumed_args(args) if args.resume else args)


if __name__ == "__main__":
    main()
