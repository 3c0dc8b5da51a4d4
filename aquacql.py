# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.4.0", "gymnasium-robotics==1.4.2", "mujoco==3.17.0",
#   "minari[hdf5,hf]==0.5.4", "tyro", "tensorboard", "tensorboardX", "tqdm", "matplotlib", "imageio", "imageio-ffmpeg",
# ]
# ///
"""AQuaCQL: offline reinforcement learning (appendix "Offline Reinforcement Learning" of the AQuaDem paper).

Learn K candidate actions per state from a fixed dataset (equation 1), then the Q-values of the candidates from the same
dataset, with conservative Q-learning (equation 2) on Munchausen DQN's target. The environment only serves to evaluate.

    python aquacql.py --dataset-id mujoco/hopper/medium-v0 --num-seeds 3
    python aquacql.py --dataset-path hopper_medium-v2.hdf5
    python aquacql.py --evaluate runs/Hopper-v5__aquacql__1__1700000000 --capture-video

Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin:
"Continuous Control with Action Quantization from Demonstrations", ICML 2022.
"""

import contextlib
import dataclasses
import errno
import fcntl
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
from typing import Any, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm

STEPS_PER_CALL = 500  # gradient steps, at most
CANDIDATE_STEPS_PER_CALL = 500
START_TEMPERATURE = 0.25  # of the demonstrated actions' variance, unless --temperature-start is given
EVALUATION_SEED = 2**31  # evaluation episode i starts from seed EVALUATION_SEED + i; --seed stays below it

# D4RL's files do not name their environment, and its normalised score is 0 for the first and 100 for the second return.
# Gymnasium's v4 is the nearest to D4RL's v2 that needs no mujoco-py.
D4RL_TASKS = {
    "halfcheetah": ("HalfCheetah-v4", -280.178953, 12135.0),
    "hopper": ("Hopper-v4", -20.272305, 3234.3),
    "walker2d": ("Walker2d-v4", 1.629008, 4592.3),
}


@dataclasses.dataclass
class Args:
    dataset_id: str | None = None  # any Minari id, used from disk or else downloaded
    dataset_path: str | None = None  # a D4RL file (HDF5) instead, such as hopper_medium-v2.hdf5
    env_id: str | None = None  # environment of the evaluations; default: the dataset's, for D4RL's files Gymnasium's v4
    env_kwargs: str = "{}"  # arguments of the environment as JSON, such as '{"env_name": "drawer-open-v3"}'
    max_episode_steps: int | None = None  # time limit of an episode; default: the environment's own
    ref_min_score: float | None = None  # return with normalised score 0; default: D4RL's, else the dataset's own
    ref_max_score: float | None = None  # return with normalised score 100; the same defaults
    seed: int = 1  # of networks and batches; equal seeds give bit-identical runs on a CPU with as many threads
    num_seeds: int = 1  # train that many seeds at once: seed, seed + 1, ... (the paper's table: 10)
    gradient_steps: int = 1_000_000  # of the Q-network
    eval_every: int = 50_000  # gradient steps between evaluations (the paper's other experiments: environment steps)
    eval_episodes: int = 10  # episodes of an evaluation, greedy, always from the same initial states
    exp_name: str = "aquacql"  # part of the folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}

    num_actions: int = 10  # K, candidate actions per state
    temperature: float = 0.001  # T of the soft minimum
    temperature_start: float | None = None  # T at first; default: a quarter of the actions' variance (paper: = T)
    candidate_steps: int = 5_000_000  # gradient steps of the candidate network
    held_out_episodes: int = 0  # the candidates never see the last N episodes: are they near those, too?
    candidate_learning_rate: float = 3e-4  # Adam's, for the candidate network
    candidates_from: str | None = None  # run folder whose candidates (of as many seeds) are used instead of training

    cql_alpha: float = 5.0  # alpha of equation 2, the weight of the conservative term; 0: plain Munchausen DQN
    batch_size: int = 256  # of both networks
    learning_rate: float = 1e-4  # Adam's, for the Q-network
    gamma: float = 0.995  # discount
    n_step: int = 3  # length of the multi-step return
    ema_decay: float = 0.999  # per update, of the averaged Q-network that is evaluated; 0: none, as in the paper
    target_update_period: int = 100  # updates between copies into the target network (the authors' code)
    munchausen_tau: float = 0.03  # entropy temperature of Munchausen DQN
    munchausen_alpha: float = 0.9  # weight of the log-policy in the reward of Munchausen DQN
    munchausen_clip: float = -1e3  # lower bound of that log-policy term (the authors' code)

    checkpoint_every: int = 10_000  # gradient steps between checkpoints
    resume: str | None = None  # run folder to continue, with its own arguments
    evaluate: str | None = None  # run folder to evaluate instead of training
    capture_video: bool = False  # of evaluation episodes, and of the candidates along the first episode
    track: bool = False  # log to Weights & Biases too (if it is installed)
    quiet: bool = False  # no progress bars, only warnings and errors


# --------------------------------------------------------------------------------------- networks


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


# ----------------------------------------------------------------------------- losses and targets


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


def cql_loss(q: jax.Array, action: jax.Array, target: jax.Array, alpha: float) -> tuple[jax.Array, jax.Array]:
    """Equation 2, with the squared Bellman error as written (AQuaDQN's is Huber's). q (B, K), action (B,), target (B,).

    Also returns its two terms and the mean Q-value of the dataset's actions.
    """
    q_taken = jnp.take_along_axis(q, action[:, None], axis=1)[:, 0]
    conservative = jnp.mean(jax.nn.logsumexp(q, axis=1) - q_taken)
    bellman = jnp.mean(0.5 * (q_taken - target) ** 2)
    return alpha * conservative + bellman, jnp.stack([conservative, bellman, jnp.mean(q_taken)])


# ------------------------------------------------------------------------------------------ data


class Transitions(NamedTuple):
    """n-step transitions on the device: every state once, an episode's last included; the others are indices of it."""

    states: jax.Array  # (N + episodes, obs)
    rows: jax.Array  # (N,) where the state of step i is
    next_rows: jax.Array  # (N,) where its bootstrap state is
    returns: jax.Array  # (N,) n-step
    discounts: jax.Array  # (N,) gamma^n, 0 after a termination


class Batch(NamedTuple):
    observations: jax.Array  # (B, obs)
    actions: jax.Array  # (B,) candidate indices
    returns: jax.Array  # (B,) n-step
    next_observations: jax.Array  # (B, obs) the bootstrap state
    discounts: jax.Array  # (B,)


def make_transitions(data: "Demonstrations", n_step: int, gamma: float) -> Transitions:
    """The data does not grow, so the n-step returns are computed once and for all."""
    steps = np.arange(len(data.ends))
    episodes_before = np.cumsum(data.ends) - data.ends
    rows = (steps + episodes_before).astype(np.int32)
    states = np.empty((len(steps) + data.ends.sum(), data.observations.shape[1]), np.float32)
    states[rows] = data.observations
    states[rows[data.ends] + 1] = data.next_observations[data.ends]
    windows = np.minimum(steps[:, None] + np.arange(n_step), steps[-1])  # (N, n); the last step always is an end
    terminations = data.terminations[windows].astype(np.float32)
    ends = data.ends[windows].astype(np.float32)
    returns, last, discounts = n_step_returns(data.rewards[windows], terminations, ends, gamma)
    return Transitions(jnp.asarray(states), jnp.asarray(rows), rows + last + 1, returns, discounts)


def sample(data: Transitions, indices: jax.Array, key: jax.Array, batch_size: int) -> Batch:
    """Uniform over the dataset. indices (N,): the candidates nearest to its actions."""
    i = jax.random.randint(key, (batch_size,), 0, len(indices))
    observations = data.states[data.rows[i]]
    next_observations = data.states[data.next_rows[i]]
    return Batch(observations, indices[i], data.returns[i], next_observations, data.discounts[i])


# ---------------------------------------------------------------------------------------- updates


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


# Where the agents of all seeds have their seed axis. The count has none: as one number for all it is a real condition,
# so that the target networks are copied every hundredth step only.
SEED_AXES = AgentState(0, 0, 0, 0, None, 0)


def seed_keys(args: Args, stage: int) -> jax.Array:
    """(seeds, 2): seed i's key is that of a single run with --seed i."""
    return jnp.stack([jax.random.fold_in(jax.random.PRNGKey(args.seed + i), stage) for i in range(args.num_seeds)])


def of_seed(tree: Any, i: int) -> Any:
    """The i-th seed's part of what all seeds have."""
    return jax.tree.map(lambda leaf: leaf[i], tree)


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


def make_candidate_updates(network: nn.Module, optimizer: optax.GradientTransformation, args: Args) -> Callable:
    """The update of all seeds in one call; their states differ, their data does not."""
    update = make_candidate_update(network, optimizer, args)

    def updates(states: CandidateState, observations: jax.Array, actions: jax.Array, steps: int):
        return jax.vmap(lambda state: update(state, observations, actions, steps))(states)

    return jax.jit(updates, static_argnums=3, donate_argnums=0)


def init_candidates(args: Args, network: nn.Module, optimizer: optax.GradientTransformation, obs_dim: int):
    def init(key: jax.Array) -> CandidateState:
        key, init_key = jax.random.split(key)
        params = network.init(init_key, jnp.zeros(obs_dim))
        return CandidateState(params, optimizer.init(params), jnp.zeros((), jnp.int32), key)

    return jax.jit(jax.vmap(init))(seed_keys(args, 0))


def init_agents(args: Args, q_network: nn.Module, optimizer: optax.GradientTransformation, obs_dim: int) -> AgentState:
    def init(key: jax.Array) -> AgentState:
        key, init_key = jax.random.split(key)
        params = q_network.init(init_key, jnp.zeros(obs_dim))
        average_params = params if args.ema_decay else None
        return AgentState(params, average_params, params, optimizer.init(params), jnp.zeros((), jnp.int32), key)

    agents = jax.jit(jax.vmap(init, out_axes=SEED_AXES))(seed_keys(args, 1))
    average_params = jax.tree.map(jnp.copy, agents.average_params)  # copies: an update gives its buffers away
    target_params = jax.tree.map(jnp.copy, agents.target_params)
    return agents._replace(average_params=average_params, target_params=target_params)


def make_cql_updates(network: nn.Module, optimizer: optax.GradientTransformation, args: Args) -> Callable:
    """`steps` gradient steps on equation 2 for all seeds in one call; returns the means of loss, terms and Q-value."""

    def loss_fn(params: Any, batch: Batch, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cql_loss(network.apply(params, batch.observations), batch.actions, target, args.cql_alpha)

    def target_of(agent: AgentState, batch: Batch) -> jax.Array:
        both = jnp.concatenate([batch.observations, batch.next_observations])  # one pass through the network
        q_s, q_next = jnp.split(network.apply(agent.target_params, both), 2)
        constants = args.munchausen_tau, args.munchausen_alpha, args.munchausen_clip
        return munchausen_target(q_s, q_next, batch.actions, batch.returns, batch.discounts, *constants)

    def step(agent: AgentState, data: Transitions, indices: jax.Array) -> tuple[AgentState, jax.Array]:
        key, batch_key = jax.random.split(agent.key)
        batch = sample(data, indices, batch_key, args.batch_size)
        target = target_of(agent, batch)
        (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(agent.params, batch, target)
        changes, opt_state = optimizer.update(grads, agent.opt_state)
        params = optax.apply_updates(agent.params, changes)
        updates = agent.updates + 1
        target_params = optax.periodic_update(params, agent.target_params, updates, args.target_update_period)
        average_params = averaged(agent.average_params, params, args.ema_decay)
        agent = AgentState(params, average_params, target_params, opt_state, updates, key)
        return agent, jnp.stack([loss, *parts])

    def updates(agents: AgentState, data: Transitions, indices: jax.Array, steps: int) -> tuple[AgentState, jax.Array]:
        def update(agent: AgentState, indices: jax.Array) -> tuple[AgentState, jax.Array]:
            return jax.lax.scan(lambda agent, _: step(agent, data, indices), agent, None, length=steps)

        agents, metrics = jax.vmap(update, in_axes=(SEED_AXES, 0), out_axes=(SEED_AXES, 0))(agents, indices)
        return agents, jnp.mean(metrics, axis=1)  # (seeds, 4)

    return jax.jit(updates, static_argnums=3, donate_argnums=0)


def averaged(average: Any, params: Any, decay: float) -> Any:
    """An exponential moving average of the Q-network: its greedy policy flickers less (not in the paper)."""
    return optax.incremental_update(params, average, 1.0 - decay) if decay else None


def evaluated_params(agent: AgentState) -> Any:
    return agent.params if agent.average_params is None else agent.average_params


# -------------------------------------------------------------------------- policy and evaluation


def make_policy(q_network: nn.Module, candidate_network: nn.Module, box: gym.spaces.Box) -> Callable:
    """Greedy: the data is fixed, so nothing explores."""

    def policy(q_params: Any, candidate_params: Any, observations: jax.Array) -> jax.Array:
        index = jnp.argmax(q_network.apply(q_params, observations), axis=-1)  # (episodes,)
        candidates = candidate_network.apply(candidate_params, observations)  # (episodes, K, D)
        actions = jnp.take_along_axis(candidates, index[:, None, None], axis=1)[:, 0]
        return jnp.clip(actions, box.low, box.high)

    return jax.jit(policy)


class Evaluation(NamedTuple):
    returns: np.ndarray  # (episodes,)
    lengths: np.ndarray
    successes: np.ndarray  # goal reached at any step; NaN where the environment does not report it
    frames: list[np.ndarray]  # pictures of the environments made for rendering, episode after episode


def evaluate(policy: Callable[[np.ndarray], Any], envs: list[gym.Env]) -> Evaluation:
    """One episode in each environment, side by side, with one policy call per step for all of them."""
    observations = [seeded_reset(env, EVALUATION_SEED + i) for i, env in enumerate(envs)]
    observations = np.stack(observations).astype(np.float32)
    returns = np.zeros(len(envs))
    lengths = np.zeros(len(envs), int)
    successes = np.full(len(envs), np.nan)
    running = np.ones(len(envs), bool)
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


def evaluate_seeds(policy: Callable, params: Any, candidate_params: Any, envs: list[gym.Env]) -> list[Evaluation]:
    """One evaluation per seed, all from the same initial states."""
    results = []
    for i in range(len(jax.tree.leaves(params)[0])):
        q_params = of_seed(params, i)
        candidates = of_seed(candidate_params, i)
        results.append(evaluate(lambda observations, q=q_params, c=candidates: policy(q, c, observations), envs))
    return results


def normalized_score(returns: Any, low: float | None, high: float | None) -> Any:
    """D4RL's: 0 for the return of a random policy, 100 for an expert's; NaN where these are not known."""
    if low is None or high is None:
        return math.nan * returns
    return 100 * (returns - low) / (high - low)


# --------------------------------------------------------------------------------------- training


def make_candidate_network(args: Args, action_dim: int) -> nn.Module:
    return CandidateNetwork(args.num_actions, action_dim, torso=(256, 256, 256))


def train_candidates(args: Args, run: "OfflineRun", network: nn.Module, data: "Demonstrations") -> Any:
    """The first stage: K candidates per state by equation 1, for every seed."""
    optimizer = optax.adam(args.candidate_learning_rate)
    states = init_candidates(args, network, optimizer, data.observations.shape[1])
    states, step = run.restore_candidates(states)
    update = make_candidate_updates(network, optimizer, args)
    seen = learned_from(args, data)
    observations = jnp.asarray(data.observations[:seen])
    actions = jnp.asarray(data.actions[:seen])
    run.show_progress("candidates", args.candidate_steps, step)
    while step < args.candidate_steps:
        steps = min(CANDIDATE_STEPS_PER_CALL, args.candidate_steps - step)
        states, losses = update(states, observations, actions, steps)
        step += steps
        temperature = annealed_temperature(step, args.temperature_start, args.temperature, args.candidate_steps)
        run.log_candidates(step, jnp.mean(losses), temperature)
        run.save_candidates(step, states)
    return states.params


def steps_to_do(args: Args, step: int) -> int:
    """Gradient steps until the next evaluation, checkpoint or the end, but not too many at once."""
    to_evaluation = args.eval_every - step % args.eval_every
    to_checkpoint = args.checkpoint_every - step % args.checkpoint_every
    return min(STEPS_PER_CALL, args.gradient_steps - step, to_evaluation, to_checkpoint)


def train_agents(
    args: Args,
    run: "OfflineRun",
    env: gym.Env,
    network: nn.Module,
    candidate_params: Any,
    data: Transitions,
    indices: jax.Array,  # (seeds, N) the data's actions, as candidates of each seed
) -> None:
    """The second stage: conservative Q-learning on the candidates, for every seed."""
    q_network = QNetwork(args.num_actions)
    optimizer = optax.adam(args.learning_rate)
    policy = make_policy(q_network, network, env.action_space)
    update = make_cql_updates(q_network, optimizer, args)
    agents = init_agents(args, q_network, optimizer, data.states.shape[1])
    agents, step = run.restore(agents)
    eval_envs = make_offline_envs(args, args.eval_episodes, videos=1)

    def evaluate_agents() -> None:
        params = evaluated_params(agents)
        with run.clock_stopped():
            run.report(step, evaluate_seeds(policy, params, candidate_params, eval_envs), params)

    run.show_progress("agent", args.gradient_steps, step)
    while step < args.gradient_steps:
        if step % args.eval_every == 0:
            evaluate_agents()
        steps = steps_to_do(args, step)
        agents, metrics = update(agents, data, indices, steps)
        step += steps
        run.log_update(step, metrics)
        run.save_checkpoint_if_due(step, agents)
    evaluate_agents()


def train(args: Args) -> Path:
    """Whatever can be wrong with the input is found before the run folder is made."""
    check_args(args)
    check_seeds_and_scores(args)
    data, env, warning = load_dataset(args)
    args.temperature_start = start_temperature(args, data.actions)
    learned_from(args, data)
    check_memory(args, data, kept_steps=0, networks=args.num_seeds)
    network = make_candidate_network(args, env.action_space.shape[0])
    borrowed = borrowed_seeds(args, network, data)
    run = OfflineRun(args, warning, fps=env.metadata.get("render_fps", 30))
    describe_data(args, data, run.log)
    candidate_params = run.load_candidates(network, data)
    if candidate_params is None:
        candidate_params = borrowed or train_candidates(args, run, network, data)
        run.keep_candidates(candidate_params)
    indices = discretise_for_seeds(args, run, network, candidate_params, data)
    picture_candidates(args, run.folder, network, of_seed(candidate_params, 0), data, env.action_space, run.log)
    transitions = make_transitions(data, args.n_step, args.gamma)
    del data  # from here on every state is in memory once
    train_agents(args, run, env, network, candidate_params, transitions, jnp.asarray(indices))
    run.finish()
    return run.folder


# =================================================================================================
# Plumbing. The paper ends here: what follows is files, checks, videos and the command line, the same
# in every script. Nothing below is needed to understand the algorithm.
# =================================================================================================

BUNDLED_DEMONSTRATIONS = Path(__file__).resolve().parent / "demos"
PROBED_STEPS = 1_000  # of one episode, played before a run to see what the environment reports

BOUNDS = {  # of every number that has any
    "max_episode_steps": (1, math.inf),
    "seed": (0, EVALUATION_SEED - 1),
    "num_seeds": (1, math.inf),
    "gradient_steps": (1, math.inf),
    "eval_every": (1, math.inf),
    "eval_episodes": (1, math.inf),
    "num_actions": (1, math.inf),
    "temperature": (1e-9, 1e9),
    "temperature_start": (1e-9, 1e9),
    "candidate_steps": (0, math.inf),
    "held_out_episodes": (0, math.inf),
    "candidate_learning_rate": (1e-9, 1e9),
    "cql_alpha": (0, 1e9),
    "batch_size": (1, math.inf),
    "learning_rate": (1e-9, 1e9),
    "gamma": (0, 1),
    "n_step": (1, math.inf),
    "ema_decay": (0, 1 - 1e-9),
    "target_update_period": (1, math.inf),
    "munchausen_tau": (1e-9, 1e9),
    "munchausen_alpha": (0, 1),
    "munchausen_clip": (-1e9, 0),
    "checkpoint_every": (1, math.inf),
}


class UserError(Exception):
    """One line that says what is wrong and what to do; the program ends with exit code 2."""


class Unavailable(UserError):
    """Data that is neither here nor within reach."""


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Turns whatever a library raises into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {' '.join(str(error).split())[:300] or type(error).__name__}") from None


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
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError(f"--env-kwargs is {args.env_kwargs!r}: give a JSON object, such as '{{\"name\": 1}}'")
    return arguments


def check_memory(args: Args, demos: "Demonstrations", kept_steps: int, networks: int = 1) -> None:
    """What surely has to be held at once: a network that does not fit would end in the middle of the run."""
    width = 256
    per_candidate = width * width + width * demos.actions.shape[1]
    kernels = 4 * args.num_actions * per_candidate  # parameters, gradient and Adam's two moments
    activations = 4 * args.num_actions * args.batch_size * width
    replay = kept_steps * (2 * demos.observations.shape[1] + 4)
    needed = np.dtype(np.float32).itemsize * (networks * (kernels + activations) + replay)
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > here:
        sizes = f"about {needed / 1e9:.0f} GB, and this machine has {here / 1e9:.0f}"
        raise UserError(f"this run needs {sizes}: lower --num-actions or what it keeps of experience")


def check_seeds_and_scores(args: Args) -> None:
    highest = EVALUATION_SEED - args.num_seeds
    if args.seed > highest:
        raise UserError(f"--seed is {args.seed}: give a number from 0 to {highest} with --num-seeds {args.num_seeds}")
    low, high = args.ref_min_score, args.ref_max_score
    both_or_none = (low is None) == (high is None)
    if not both_or_none or (low is not None and not low < high):
        raise UserError(f"--ref-min-score is {low} and --ref-max-score {high}: give both, the smaller first")


# ------------------------------------------------------------------------------------ fast layers


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


def elu(x: jax.Array) -> jax.Array:
    """nn.elu with exp in place of expm1, which takes twice as long on a CPU."""
    return jnp.where(x > 0, x, jnp.exp(jnp.minimum(x, 0.0)) - 1.0)


# ------------------------------------------------------------------------------------ environment


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


def register_installed_envs() -> None:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ImportError):
        import gymnasium_robotics  # registers its environments, and prints a notice

        gym.register_envs(gymnasium_robotics)


class CheckedEnv(gym.wrappers.FlattenObservation):
    """Flat observations. What goes in is in the action space, to its last bit, and what comes out is finite."""

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
        return observation, reward, terminated, truncated, info

    def check(self, what: str, value: Any, shape: tuple[int, ...]) -> None:
        place = f"the environment's {what} at step {self.steps} of an episode"
        if np.shape(value) != shape:
            raise UserError(f"{place} has shape {np.shape(value)} instead of {shape}: repair the environment")
        if not np.isfinite(value).all():
            raise UserError(f"{place} is not finite: repair the environment, then --resume the run")


def make_offline_env(args: Args, render: bool = False) -> gym.Env:
    """A Gymnasium environment with a Box action space and flat observations; it only serves to evaluate."""
    if render and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # a machine without a screen
    register_installed_envs()
    arguments = environment_arguments(args)
    arguments["render_mode"] = "rgb_array" if render else None
    limit = args.max_episode_steps
    with warnings.catch_warnings(), as_user_error(f"cannot make environment {args.env_id!r}"), silent_compiler():
        warnings.simplefilter("ignore", DeprecationWarning)  # v4 is not the newest: D4RL's data is older still
        env = gym.make(args.env_id, max_episode_steps=limit, disable_env_checker=True, **arguments)
    check_spaces(args.env_id, env.action_space, env.observation_space)
    return CheckedEnv(env)


def make_offline_envs(args: Args, episodes: int, videos: int) -> list[gym.Env]:
    """An environment per episode; the first ones make pictures if asked for."""
    return [make_offline_env(args, args.capture_video and i < videos) for i in range(episodes)]


def seeded_reset(env: gym.Env, seed: int) -> np.ndarray:
    """Twice, because some environments (Meta-World's) draw their task before they look at the seed."""
    env.reset(seed=seed)
    return env.reset(seed=seed)[0]


def check_spaces(env_id: str, actions: gym.Space, observations: gym.Space) -> None:
    if not isinstance(actions, gym.spaces.Box) or len(actions.shape) != 1:
        raise UserError(f"{env_id} has action space {actions}: AQuaDem needs a Box with one dimension")
    if not np.issubdtype(actions.dtype, np.floating):
        raise UserError(f"{env_id} has actions of type {actions.dtype}: AQuaDem needs a Box of floating-point numbers")
    parts = observations.values() if isinstance(observations, gym.spaces.Dict) else [observations]
    if not all(isinstance(part, gym.spaces.Box) for part in parts):
        raise UserError(f"{env_id} has observation space {observations}: a Box or a Dict of Boxes is needed")


def play_once(env_id: str, env: gym.Env) -> list[bool]:
    """One episode, or its beginning, with nothing but zeros for actions: does each step report a success?"""
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
        raise UserError(f"{env_id} has no time limit, an episode might never end: give --max-episode-steps")
    return reports


# --------------------------------------------------------------------------------------- dataset


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
    dataset = open_dataset(dataset_id)
    number = min(dataset.total_episodes, num_demos or sys.maxsize)
    with as_user_error(f"cannot read dataset {dataset_id!r}"):
        episodes = [read_episode(dataset_id, e, env, sparse) for e in dataset.iterate_episodes(range(number))]
    whole = [episode for episode in episodes if len(episode.actions)]
    if not whole:
        raise UserError(f"dataset {dataset_id!r} holds no steps: choose another with --dataset-id")
    if len(whole) < len(episodes):
        print(f"{dataset_id}: {len(episodes) - len(whole)} episodes without a step are left out", file=sys.stderr)
    return Demonstrations(*map(np.concatenate, zip(*whole)))


def read_episode(dataset_id: str, episode: Any, env: gym.Env, sparse: bool) -> Demonstrations:
    box = env.action_space
    steps = len(episode.actions)
    observations = flatten_observations(env.env.observation_space, episode.observations)
    rewards = np.asarray(episode.rewards, np.float32)
    if sparse:
        if "success" not in (episode.infos or {}):
            missing = "field infos has no 'success' for a sparse reward: use --reward env"
            raise UserError(f"dataset {dataset_id!r}: {missing}")
        success = np.asarray(episode.infos["success"], np.float32)
        rewards = success[1:] if len(success) == steps + 1 else success  # one more is the reset's
    for field, array, shape in (
        ("observations", observations, (steps + 1, *env.observation_space.shape)),
        ("actions", np.asarray(episode.actions), (steps, *box.shape)),
        ("infos['success']" if sparse else "rewards", rewards, (steps,)),
        ("terminations", np.asarray(episode.terminations), (steps,)),
        ("truncations", np.asarray(episode.truncations), (steps,)),
    ):
        if array.shape != shape:
            needed = f"{env.spec.id} needs {shape}"
            raise UserError(f"dataset {dataset_id!r}: field {field} has shape {array.shape}, {needed}")
        if not np.isfinite(array).all():
            raise UserError(f"dataset {dataset_id!r}: field {field} of shape {shape} holds NaN or infinite values")
    actions = np.clip(np.asarray(episode.actions, np.float32), box.low, box.high)
    terminations = np.asarray(episode.terminations, bool)
    ends = np.arange(steps) == steps - 1
    return Demonstrations(observations[:-1], actions, rewards, observations[1:], terminations, ends)


def read_d4rl_fields(path: Path, env: gym.Env) -> dict[str, np.ndarray]:
    """The fields of a D4RL file, checked against the environment."""
    import h5py

    if not path.is_file():
        raise UserError(f"{path} does not exist: name a D4RL file with --dataset-path")
    needed = ["observations", "actions", "rewards", "terminals", "timeouts"]
    with as_user_error(f"cannot read {path} as an HDF5 file"), h5py.File(path, "r") as file:
        missing = [name for name in needed if name not in file]
        if missing:
            raise UserError(f"{path} has no field {', '.join(missing)}: is it a file of D4RL?")
        names = [*needed, *(name for name in ["next_observations"] if name in file)]
        fields = {name: np.asarray(file[name][()], np.float32) for name in names}
    shapes = {"observations": env.observation_space.shape, "actions": env.action_space.shape}
    shapes["next_observations"] = shapes["observations"]
    for name, array in fields.items():
        shape = (len(np.atleast_1d(fields["actions"])), *shapes.get(name, ()))
        if array.shape != shape:
            raise UserError(f"{path}: field {name} has shape {array.shape}, {env.spec.id} needs {shape}")
        if not np.isfinite(array).all():
            raise UserError(f"{path}: field {name} of shape {shape} holds NaN or infinite values")
    return fields


def load_d4rl(path: Path, env: gym.Env) -> Demonstrations:
    """A D4RL file as arrays. No transition reaches across an end; one whose next state is unknown is left out."""
    fields = read_d4rl_fields(path, env)
    observations = fields["observations"]
    terminations = fields["terminals"] > 0
    if len(observations) == 0:
        raise UserError(f"{path} holds no steps: choose another with --dataset-path")
    actions = np.clip(fields["actions"], env.action_space.low, env.action_space.high)
    ends = terminations | (fields["timeouts"] > 0)
    ends[-1] = True
    lost = np.zeros(len(observations), bool)
    if "next_observations" in fields:
        next_observations = fields["next_observations"]
        # A file may leave out steps: a next state that is not the following one ends the episode, too.
        ends[:-1] |= (next_observations[:-1] != observations[1:]).any(axis=1)
    else:
        next_observations = np.where(ends[:, None], observations, np.roll(observations, -1, axis=0))
        # A terminal step does not look at its next state. The last step before a time limit does, so it is left out,
        # and the step before it becomes the last one.
        lost = ends & ~terminations
        ends[:-1] |= lost[1:]
    if lost.all():
        raise UserError(f"{path} holds no step with a known next state: choose another with --dataset-path")
    arrays = (observations, actions, fields["rewards"], next_observations, terminations, ends)
    return Demonstrations(*(array[~lost] for array in arrays))


def env_id_of_dataset(metadata: dict) -> tuple[str, str | None]:
    """The id alone: a specification's entry point and arguments would run code of the dataset's choosing.

    Returns id and warning."""
    recorded = metadata.get("eval_env_spec") or metadata.get("env_spec")
    if not recorded:
        raise UserError("the dataset does not say from which environment it is: name one with --env-id")
    with as_user_error("cannot read the environment of the dataset, name it with --env-id"):
        spec = json.loads(recorded)
        env_id = str(spec["id"])
        kwargs = dict(spec.get("kwargs") or {})
    register_installed_envs()
    if env_id not in gym.registry:  # nor is any `module:Env-v0`
        raise UserError(f"the dataset's environment {env_id!r} is not registered here: name one with --env-id")
    registered = gym.spec(env_id)
    same_limit = spec.get("max_episode_steps") == registered.max_episode_steps
    same_kwargs = {**kwargs, "render_mode": None} == {**registered.kwargs, "render_mode": None}
    if same_limit and same_kwargs:
        return env_id, None
    return env_id, (
        f"NOT THE DATASET'S ENVIRONMENT: it names {env_id} with another time limit or other arguments than those it has"
        " here, and these are used. To evaluate in another environment, name one with --env-id."
    )


def env_id_of_file(path: str) -> str:
    task = re.match("|".join(D4RL_TASKS), Path(path).name.lower())
    if not task:
        raise UserError("the dataset does not say from which environment it is: name one with --env-id")
    return D4RL_TASKS[task[0]][0]


def load_dataset(args: Args) -> tuple[Demonstrations, gym.Env, str | None]:
    """The data, its environment and a warning. Completes the arguments: environment and reference scores."""
    if (args.dataset_id is None) == (args.dataset_path is None):
        raise UserError("name the data: either --dataset-id (Minari) or --dataset-path (a file of D4RL)")
    metadata = open_dataset(args.dataset_id).storage.metadata if args.dataset_id else {}
    warning = None
    if args.env_id is None and args.dataset_id:
        args.env_id, warning = env_id_of_dataset(metadata)
    elif args.env_id is None:
        args.env_id = env_id_of_file(args.dataset_path)
    if args.ref_min_score is None:
        family = re.split(r"[:/]", args.env_id)[-1].split("-")[0].lower()  # hopper of Hopper-v5
        own = (metadata.get("ref_min_score"), metadata.get("ref_max_score"))
        _, args.ref_min_score, args.ref_max_score = D4RL_TASKS.get(family, (None, *own))
    play_once(args.env_id, make_offline_env(args))
    env = make_offline_env(args)
    if args.dataset_path:
        return load_d4rl(Path(args.dataset_path), env), env, warning
    return load_demonstrations(args.dataset_id, env, sparse=False), env, warning


def describe_data(args: Args, data: Demonstrations, log: Any) -> None:
    """What the policy behind the data achieved, to compare with."""
    returns = np.bincount(np.cumsum(data.ends) - data.ends, data.rewards)  # (episodes,)
    score = normalized_score(returns.mean(), args.ref_min_score, args.ref_max_score)
    log.add_scalar("data/episodic_return", returns.mean(), 0)
    if math.isfinite(score):
        log.add_scalar("data/normalized_score", score, 0)
    if not args.quiet:
        means = f"mean return {returns.mean():.1f}, normalised score {score:.1f}"
        print(f"data: {len(data.rewards)} steps, {len(returns)} episodes, {means}", file=sys.stderr)


def borrowed_seeds(args: Args, network: nn.Module, data: Demonstrations) -> Any:
    """The candidates of another run's seeds, unless this one has a copy of its own."""
    has_a_copy = args.resume and (Path(args.resume) / "candidates.npz").exists()
    if args.candidates_from is None or has_a_copy:
        return None
    path = Path(args.candidates_from) / "candidates.npz"
    return load_seeds(path, network, data.observations.shape[1], args.num_seeds)[0]


def learned_from(args: Args, demos: Demonstrations) -> int:
    """How many of the demonstrated steps the candidates learn from: all but those of the last, held-out episodes."""
    starts = np.concatenate([[0], np.flatnonzero(demos.ends) + 1])  # of every episode, then the end of the data
    if args.held_out_episodes >= len(starts) - 1:
        raise UserError("--held-out-episodes leaves no demonstration: give a lower one")
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


class SeedLog:
    """TensorBoard's log with the seed in every tag: the seeds of a run write at the same step."""

    def __init__(self, log: Any, seed: int):
        self.log = log
        self.seed = seed

    def add_scalar(self, tag: str, *values: Any) -> None:
        self.log.add_scalar(f"{tag}_seed_{self.seed}", *values)

    def add_histogram(self, tag: str, *values: Any, **options: Any) -> None:
        self.log.add_histogram(f"{tag}_seed_{self.seed}", *values, **options)


def discretise_for_seeds(args: Args, run: "OfflineRun", network: nn.Module, params: Any, demos: Demonstrations):
    """(seeds, N): every action as the index of the nearest candidate of every seed."""
    logs = [SeedLog(run.log, args.seed + i) if args.num_seeds > 1 else run.log for i in range(args.num_seeds)]
    return np.stack([discretise(args, network, of_seed(params, i), demos, log) for i, log in enumerate(logs)])


# ----------------------------------------------------------------------------- pictures and videos


def render(env: gym.Env) -> np.ndarray:
    with as_user_error("cannot render; install libegl1 and set MUJOCO_GL=egl, or libosmesa6 and MUJOCO_GL=osmesa"):
        return env.render()


def write_video(path: Path, frames: list[np.ndarray], fps: int) -> None:
    import imageio.v2 as imageio

    path.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX does not like the fork that starts ffmpeg
        imageio.mimwrite(path, frames, fps=fps, macro_block_size=8, quality=7)


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


# -------------------------------------------------------------------------------------- run folder


def save_arrays(path: Path, tree: Any, **meta: Any) -> None:
    """Atomic: the old file stays until the new one is whole on disk. Arrays and JSON only, never a pickle."""
    arrays = {f"leaf_{i:03d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    with replacing(path) as file:
        np.savez(file, **arrays)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file to write, which takes the path's place when it is whole on disk; if that fails, nothing is left of it."""
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
    with as_user_error(f"{path} is not a whole checkpoint"), np.load(path, allow_pickle=False) as file:
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
        args = Args(**{field.name: saved.get(field.name, field.default) for field in dataclasses.fields(Args)})
        check_args(args)
        return args


def load_seeds(path: Path, network: nn.Module, obs_dim: int, num_seeds: int) -> tuple[Any, dict]:
    """The parameters of all seeds' networks."""
    template = jax.eval_shape(network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_seeds, *leaf.shape), leaf.dtype), template)
    return load_arrays(path, stacked)


def score_table(args: Args, results: list[Evaluation]) -> dict[str, np.ndarray]:
    """Every seed's means over its episodes, (seeds,) each."""
    returns = np.array([result.returns.mean() for result in results])
    return {
        "success_rate": np.array([result.successes.mean() for result in results]),
        "episodic_return": returns,
        "episodic_length": np.array([result.lengths.mean() for result in results]),
        "episodes": np.array([len(result.returns) for result in results]),
        "normalized_score": normalized_score(returns, args.ref_min_score, args.ref_max_score),
    }


def write_rows_until(path: Path, step: int, row: dict[str, Any]) -> None:
    """Appends to a CSV. Rows from this step on are what an interrupted run had written: replaced."""
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


class OfflineRun:
    """One training run: its folder, arguments, log, curves, checkpoints, progress, and the wish to stop."""

    def __init__(self, args: Args, warning: str | None, fps: int):
        self.args = args
        self.fps = fps
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
        self.shown: dict[str, str] = {}  # beside the progress bar
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
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        folder = Path("runs") / re.sub(r"[^\w.-]", "_", name)
        with as_user_error(f"cannot make the run folder {folder}"):
            folder.mkdir(parents=True)
        return folder

    def lock_folder(self) -> Any:
        """Two processes that write to one folder would spoil it. The lock ends with its process."""
        with as_user_error(f"cannot write to {self.folder}"):
            file = (self.folder / "lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{self.folder} is in use by another process: wait for it or stop it") from None
        return file

    def write_args(self, warning: str | None) -> None:
        """The present arguments, so that a longer run that is interrupted again goes on to its new end."""
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
                wandb.init(project="aquadem", name=self.folder.name, config=arguments, sync_tensorboard=True)
        log = SummaryWriter(str(self.folder))
        events = log.file_writer.event_writer
        events.add_event = events._ev_writer.write_event  # at once: flush() would not wait for the writer's queue
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

    # ------------------------------------------------------------------------ candidates

    def load_candidates(self, network: nn.Module, data: Demonstrations) -> Any:
        """Those that this run has trained already, or None."""
        path = self.folder / "candidates.npz"
        if not path.exists():
            return None
        return load_seeds(path, network, data.observations.shape[1], self.args.num_seeds)[0]

    def keep_candidates(self, params: Any) -> None:
        save_arrays(self.folder / "candidates.npz", params)
        (self.folder / "candidates_training.npz").unlink(missing_ok=True)

    def restore_candidates(self, state: CandidateState) -> tuple[CandidateState, int]:
        path = self.folder / "candidates_training.npz"
        if not path.exists():
            return state, 0
        state, meta = load_arrays(path, state)
        return state, meta["step"]

    def log_candidates(self, step: int, loss: jax.Array, temperature: Any) -> None:
        if not np.isfinite(loss):
            sys.exit(f"error: the candidate loss is {loss} at step {step}: lower --candidate-learning-rate")
        self.log.add_scalar("candidates/loss", float(loss), step)
        self.log.add_scalar("candidates/temperature", float(temperature), step)
        self.log.flush()
        self.bar.set_postfix(loss=f"{loss:.5f}", refresh=False)
        self.bar.update(step - self.bar.n)

    def save_candidates(self, step: int, state: CandidateState) -> None:
        if step % (20 * CANDIDATE_STEPS_PER_CALL) == 0 or self.signals:
            self.log.flush()  # a kill loses what is not written, and a resumed run does not log it again
            save_arrays(self.folder / "candidates_training.npz", state, step=step)
            self.stop_if_asked()

    # --------------------------------------------------------------- the agents' training

    def restore(self, agents: AgentState) -> tuple[AgentState, int]:
        """Where an interrupted run left off."""
        path = self.folder / "state.npz"
        if not path.exists():
            return agents, 0
        agents, meta = load_arrays(path, agents)
        return agents, meta["step"]

    def log_update(self, step: int, metrics: jax.Array) -> None:
        means = np.asarray(metrics).mean(axis=0)  # over the seeds
        if not np.isfinite(means).all():
            sys.exit(f"error: the loss is {means[0]} at step {step}: lower --learning-rate")
        for tag, value in zip(("q_loss", "conservative", "bellman", "q_value"), means):
            self.log.add_scalar(f"losses/{tag}", float(value), step)
        speed = (step - self.logged_step) / (time.perf_counter() - self.logged_time)
        self.log.add_scalar("charts/SPS", speed, step)
        self.log.flush()
        self.start_clock(step)
        self.shown["loss"] = f"{means[0]:.3f}"
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update(step - self.bar.n)

    def report(self, step: int, results: list[Evaluation], params: Any) -> None:
        """An evaluation into agent.npz, CSV, TensorBoard and the progress bar: the mean over seeds. With several, each
        has a file of its own for plot.py, and the deviation between them is reported, as in the paper's table."""
        args = self.args
        save_arrays(self.folder / "agent.npz", params, step=step)
        table = score_table(args, results)
        scores = {name: values.mean().item() for name, values in table.items()}
        if args.num_seeds > 1:
            for name in ("episodic_return", "normalized_score"):
                scores[f"{name}_deviation"] = table[name].std(ddof=1).item()
            for i in range(args.num_seeds):
                name = re.sub(r"[^\w.-]", "_", f"{args.env_id}__{args.exp_name}__{args.seed + i}")
                row = {column: values[i].item() for column, values in table.items()}
                write_rows_until(self.folder / f"{name}.csv", step, row)
        write_rows_until(self.folder / "evaluations.csv", step, scores)
        for tag, score in scores.items():
            if tag != "episodes" and math.isfinite(score):
                self.log.add_scalar(f"eval/{tag}", score, step)
        self.shown["return"] = f"{scores['episodic_return']:.1f}"
        self.shown["score"] = f"{scores['normalized_score']:.1f}"
        self.bar.set_postfix(self.shown, refresh=False)
        if results[0].frames:
            write_video(self.folder / "videos" / f"step_{step}.mp4", results[0].frames, self.fps)

    def save_checkpoint_if_due(self, step: int, agents: AgentState) -> None:
        if step % self.args.checkpoint_every == 0 or step == self.args.gradient_steps or self.signals:
            self.log.flush()  # a kill loses what is not written, and a resumed run does not log it again
            save_arrays(self.folder / "state.npz", agents, step=step)
            self.stop_if_asked()


# ------------------------------------------------------------------------- evaluation of a saved run


def print_scores(args: Args) -> None:
    """Every seed's return and normalised score at the last evaluation's parameters, then mean and deviation."""
    check_args(args)
    check_seeds_and_scores(args)
    run = Path(args.evaluate)
    saved = load_args(run)
    saved.capture_video = args.capture_video
    envs = make_offline_envs(saved, args.eval_episodes, videos=3)
    box = envs[0].action_space
    obs_dim = envs[0].observation_space.shape[0]
    network = make_candidate_network(saved, len(box.low))
    q_network = QNetwork(saved.num_actions)
    candidate_params, _ = load_seeds(run / "candidates.npz", network, obs_dim, saved.num_seeds)
    q_params, meta = load_seeds(run / "agent.npz", q_network, obs_dim, saved.num_seeds)
    results = evaluate_seeds(make_policy(q_network, network, box), q_params, candidate_params, envs)
    table = score_table(saved, results)
    print(f"{run}, step {meta['step']}, {len(envs)} episodes")
    names = {"return": "episodic_return", "normalised score": "normalized_score", "success": "success_rate"}
    shown = {label: table[name] for label, name in names.items() if np.isfinite(table[name]).all()}
    for i in range(saved.num_seeds):
        print(f"seed {saved.seed + i}: " + ", ".join(f"{label} {values[i]:.3f}" for label, values in shown.items()))
    if saved.num_seeds > 1:
        both = [f"{label} {values.mean():.3f} +- {values.std(ddof=1):.3f}" for label, values in shown.items()]
        print(f"mean and standard deviation of the seeds: {', '.join(both)}")
    if results[0].frames:
        path = run / "videos" / f"evaluation_{meta['step']}.mp4"
        write_video(path, results[0].frames, envs[0].metadata.get("render_fps", 30))
        print(f"video of seed {saved.seed}: {path}")


def check_end_is_ahead(run: Path, argument: str, end: int) -> None:
    """A resumed run may be given another end, but none that its checkpoint has passed."""
    path = run / "state.npz"
    if path.exists():
        with as_user_error(f"{path} is not a whole checkpoint"), np.load(path, allow_pickle=False) as file:
            step = json.loads(file["meta"].tobytes())["step"]
        if step > end:
            raise UserError(f"{run} is at step {step} already: give {argument} no less")


def args_to_resume(args: Args) -> Args:
    """The run's own arguments; only what does not change the learning may be given anew."""
    saved = load_args(Path(args.resume))
    changed = tyro.cli(Args, default=dataclasses.replace(saved, resume=args.resume))
    free = {"resume", "gradient_steps", "eval_every", "checkpoint_every", "capture_video", "track", "quiet"}
    for field in dataclasses.fields(Args):
        if field.name not in free and getattr(changed, field.name) != getattr(saved, field.name):
            raise UserError(f"{option(field.name)} cannot be changed by --resume: start a new run")
    check_end_is_ahead(Path(args.resume), "--gradient-steps", changed.gradient_steps)
    return changed


@contextlib.contextmanager
def errors_on_one_line() -> Iterator[None]:
    """Bad input ends with exit code 2, a full disk with 1, and neither with a traceback."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "; free some space, then --resume the run" if full else ""
        print(f"error: {error}{advice}", file=sys.stderr)
        sys.exit(1 if full else 2)
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    with errors_on_one_line():
        if args.evaluate:
            print_scores(args)
        else:
            train(args_to_resume(args) if args.resume else args)


if __name__ == "__main__":
    main()
