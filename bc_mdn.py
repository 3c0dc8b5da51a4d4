# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.4.0", "gymnasium-robotics==1.4.2",
#   "mujoco==3.17.0", "minari[hdf5,hf]==0.5.4", "ott-jax==0.6.0", "tyro", "tensorboard",
#   "tensorboardX", "tqdm", "imageio", "imageio-ffmpeg",
# ]
# ///
"""Behavioural cloning and mixture density networks: the paper's imitation baselines (section 4.2).

    python bc_mdn.py bc --env-id AdroitHandDoor-v1
    python bc_mdn.py mdn --env-id AdroitHandDoor-v1
    python bc_mdn.py --resume runs/AdroitHandDoor-v1__mdn__1__1700000000
    python bc_mdn.py --evaluate runs/AdroitHandDoor-v1__mdn__1__1700000000 --capture-video

Both are trained on demonstrations alone and measured twice: by success, and by the Wasserstein
distance between the states of the agent and those of the demonstrator, beside the distance of
demonstrations from one another.

The MDN's second loss, as the paper writes it, underflows in float32 (docs/RESULTS.md has the
measurement), so `--logits-loss nll` is the default.

Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin:
"Continuous Control with Action Quantization from Demonstrations", ICML 2022.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import io
import itertools
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

STEPS_PER_CALL = 500  # gradient steps, at most
EVALUATION_SEED = 2**31  # evaluation episode i starts from this + i; --seed stays below it
Optimizer = optax.GradientTransformation


@dataclasses.dataclass
class Args:
    env_id: str = "AdroitHandDoor-v1"  # any Gymnasium id with Box actions; `module:Env-v0` imports
    env_kwargs: str = "{}"  # arguments of the environment, as JSON
    max_episode_steps: int | None = None  # time limit; default: the environment's own
    dataset_id: str | None = None  # any Minari id; default for Adroit: D4RL/<task>/human-v2
    num_demos: int | None = None  # use only the first N episodes of the dataset; default: all
    best_fraction: float = 1.0  # of those, only the best by return; 0.1: 10-percent BC (ours)
    reward: Literal["sparse", "env"] | None = None  # sparse (1 at info["success"]) if reported
    seed: int = 1  # equal seeds give bit-identical runs on a CPU with as many threads
    gradient_steps: int = 60_000  # gradient steps
    eval_every: int = 10_000  # gradient steps between evaluations (not from the paper)
    eval_episodes: int = 30  # of an evaluation, always from the same initial states
    exp_name: str = "clone"  # in the folder's name: runs/{env_id}__{exp_name}__{seed}__{time}

    batch_size: int = 256  # demonstrated steps in a batch
    learning_rate: float = 3e-4  # Adam's
    input_dropout: float = 0.0  # on the observation while training
    hidden_dropout: float = 0.0  # after every hidden layer while training

    checkpoint_every: int = 5_000  # gradient steps between checkpoints
    resume: str | None = None  # run folder to continue, with its own arguments
    evaluate: str | None = None  # run folder to evaluate instead of training
    capture_video: bool = False  # of evaluation episodes
    track: bool = False  # log to Weights & Biases too (if it is installed)
    quiet: bool = False  # no progress bars, only warnings and errors


@dataclasses.dataclass
class BCArgs(Args):
    """Behavioural cloning: a network and the squared error (appendix "Behavioral Cloning")."""

    method: str = dataclasses.field(default="bc", init=False)
    exp_name: str = "bc"  # in the folder's name: runs/{env_id}__{exp_name}__{seed}__{time}
    num_layers: int = 1  # hidden layers
    num_units: int = 256  # units of a hidden layer
    activation: Literal["relu", "tanh"] = "tanh"  # after every hidden layer
    normalize_observations: bool = True  # by the demonstrations' mean and standard deviation
    weight_decay: float = 0.0  # decoupled (AdamW)


@dataclasses.dataclass
class MDNArgs(Args):
    """K candidate actions and their probabilities (appendix "Mixture Density Networks")."""

    method: str = dataclasses.field(default="mdn", init=False)
    exp_name: str = "mdn"  # in the folder's name: runs/{env_id}__{exp_name}__{seed}__{time}
    num_actions: int = 10  # K, candidate actions per state
    temperature: float = 0.001  # T of the soft minimum
    logits_loss: Literal["nll", "paper"] = "nll"  # nll: the mixture's likelihood (ours); see above


# --------------------------------------------------------------------------------------- networks


class CloningNetwork(nn.Module):
    """The BC network: (..., obs) -> (..., action_dim)."""

    action_dim: int
    num_layers: int
    num_units: int
    activation: str
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0

    @nn.compact
    def __call__(self, observations: jax.Array, train: bool = False) -> jax.Array:
        activation = {"relu": nn.relu, "tanh": nn.tanh}[self.activation]
        x = nn.Dropout(self.input_dropout, deterministic=not train)(observations)
        for _ in range(self.num_layers):
            x = activation(nn.Dense(self.num_units)(x))
            x = nn.Dropout(self.hidden_dropout, deterministic=not train)(x)
        return nn.Dense(self.action_dim)(x)


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


class MixtureNetwork(nn.Module):
    """The MDN, (..., obs) -> candidates (..., K, action_dim), logits (..., K): a shared layer."""

    num_actions: int
    action_dim: int
    torso: int = 256
    head: Sequence[int] = (256,)
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0

    @nn.compact
    def __call__(self, observations: jax.Array, train: bool = False) -> tuple[jax.Array, jax.Array]:
        batch_dims = tuple(range(observations.ndim - 1))  # one mask for a batch, as in the heads
        x = nn.Dropout(self.input_dropout, batch_dims, deterministic=not train)(observations)
        x = nn.relu(nn.Dense(self.torso, kernel_init=nn.initializers.xavier_uniform())(x))
        x = nn.Dropout(self.hidden_dropout, batch_dims, deterministic=not train)(x)
        sizes = (self.num_actions, self.action_dim)
        heads = CandidateNetwork(*sizes, (), self.head, hidden_dropout=self.hidden_dropout)
        candidates = heads(x, train)
        return candidates, nn.Dense(self.num_actions)(x)


# ----------------------------------------------------------------------------------------- losses


def soft_min_loss(candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """Equation 1 as f_T of appendix B: between minimum (T -> 0) and mean of the squared distances.

    candidates (B, K, D), actions (B, D).
    """
    distances = jnp.sum((candidates - actions[:, None, :]) ** 2, axis=-1)  # (B, K)
    log_mean = jax.nn.logsumexp(-distances / temperature, axis=-1) - jnp.log(candidates.shape[1])
    return jnp.mean(-temperature * log_mean)


def squared_error(predictions: jax.Array, actions: jax.Array) -> jax.Array:
    """The BC loss of section 3.1, (B, D), (B, D) -> scalar: what soft_min_loss is for K = 1."""
    return jnp.mean(jnp.sum((predictions - actions) ** 2, axis=-1))


def scaled_distances(candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """||Psi_k - a||^2 / T, (B, K), constant for the gradient: these losses train logits only."""
    distances = jnp.sum((candidates - actions[:, None, :]) ** 2, axis=-1)
    return jax.lax.stop_gradient(distances) / temperature


def paper_logits_loss(
    logits: jax.Array, candidates: jax.Array, actions: jax.Array, temperature: float
) -> jax.Array:
    """The second loss of the MDN as written: the expected density, without a logarithm."""
    densities = jnp.exp(-scaled_distances(candidates, actions, temperature))
    return -jnp.mean(jnp.sum(nn.softmax(logits) * densities, axis=-1))


def nll_logits_loss(
    logits: jax.Array, candidates: jax.Array, actions: jax.Array, temperature: float
) -> jax.Array:
    """Negative log-likelihood of the mixture (appendix A with learned alpha), all in logarithms."""
    log_densities = -scaled_distances(candidates, actions, temperature)
    return -jnp.mean(jax.nn.logsumexp(nn.log_softmax(logits) + log_densities, axis=-1))


LOGITS_LOSSES = {"paper": paper_logits_loss, "nll": nll_logits_loss}


# ------------------------------------------------------------------------------------------ agent


class CloningState(NamedTuple):
    params: Any
    opt_state: Any
    key: jax.Array


def make_network(args: BCArgs | MDNArgs, action_dim: int) -> nn.Module:
    dropout = {"input_dropout": args.input_dropout, "hidden_dropout": args.hidden_dropout}
    if args.method == "mdn":
        return MixtureNetwork(args.num_actions, action_dim, **dropout)
    layers = (args.num_layers, args.num_units, args.activation)
    return CloningNetwork(action_dim, *layers, **dropout)


def make_optimizer(args: BCArgs | MDNArgs) -> Optimizer:
    weight_decay = args.weight_decay if args.method == "bc" else 0.0
    return optax.adamw(args.learning_rate, weight_decay=weight_decay)


def init_agent(
    network: nn.Module, optimizer: Optimizer, args: BCArgs | MDNArgs, obs_dim: int
) -> CloningState:
    key, init_key = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(args.seed), 0))
    params = network.init(init_key, jnp.zeros((1, obs_dim)))
    return CloningState(params, optimizer.init(params), key)


def make_loss(network: nn.Module, args: BCArgs | MDNArgs) -> Callable:
    """Parameters, batch and dropout key -> what is minimised, and its parts by name."""

    def bc_loss(params: Any, observations: jax.Array, actions: jax.Array, key: jax.Array):
        predictions = network.apply(params, observations, train=True, rngs={"dropout": key})
        loss = squared_error(predictions, actions)
        return loss, {"squared_error": loss}

    def mdn_loss(params: Any, observations: jax.Array, actions: jax.Array, key: jax.Array):
        candidates, logits = network.apply(params, observations, train=True, rngs={"dropout": key})
        first = soft_min_loss(candidates, actions, args.temperature)
        second = LOGITS_LOSSES[args.logits_loss](logits, candidates, actions, args.temperature)
        return first + second, {"candidates": first, "logits": second}

    return bc_loss if args.method == "bc" else mdn_loss


def make_update(network: nn.Module, optimizer: Optimizer, args: BCArgs | MDNArgs) -> Callable:
    """`steps` gradient steps in one call; returns means of the loss's parts, and the norm."""
    loss_fn = make_loss(network, args)

    def update(state: CloningState, observations: jax.Array, actions: jax.Array, steps: int):
        def step(state: CloningState, _: None) -> tuple[CloningState, dict]:
            key, batch_key, dropout_key = jax.random.split(state.key, 3)
            batch = jax.random.randint(batch_key, (args.batch_size,), 0, len(observations))
            pairs = (observations[batch], actions[batch])
            grads, parts = jax.grad(loss_fn, has_aux=True)(state.params, *pairs, dropout_key)
            changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, changes)
            return CloningState(params, opt_state, key), parts

        state, parts = jax.lax.scan(step, state, None, length=steps)
        metrics = jax.tree.map(jnp.mean, parts) | {"norm": optax.tree.norm(state.params)}
        return state, {f"losses/{name}": x for name, x in metrics.items()}

    return jax.jit(update, static_argnums=3, donate_argnums=0)


def scale_observations(
    args: BCArgs | MDNArgs, reference: "Reference", observations: jax.Array
) -> jax.Array:
    """What the network sees; the paper's MDN sees the observations as they are."""
    if args.method == "bc" and args.normalize_observations:
        return (observations - reference.mean) / reference.deviation
    return observations


def make_policy(
    network: nn.Module, args: BCArgs | MDNArgs, reference: "Reference", box: gym.spaces.Box
) -> Callable:
    """The actions at step t of an evaluation; those of the MDN are sampled, but reproducibly."""

    def policy(params: Any, observations: jax.Array, t: int) -> jax.Array:
        output = network.apply(params, scale_observations(args, reference, observations))
        if args.method == "bc":
            return jnp.clip(output, box.low, box.high)
        candidates, logits = output
        key = jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(args.seed), 1), t)
        index = jax.random.categorical(key, logits)  # in evaluations, too (the paper)
        actions = jnp.take_along_axis(candidates, index[:, None, None], axis=1)[:, 0]
        return jnp.clip(actions, box.low, box.high)

    return jax.jit(policy)


def from_first_step(policy: Callable, params: Any) -> Callable[[np.ndarray], jax.Array]:
    """The policy of one evaluation: observations -> actions, step after step."""
    steps = itertools.count(1)
    return lambda observations: policy(params, observations, next(steps))


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


def steps_to_do(args: Args, step: int) -> int:
    """Gradient steps until the next evaluation, checkpoint or the end, but not too many at once."""
    to_evaluation = args.eval_every - step % args.eval_every
    to_checkpoint = args.checkpoint_every - step % args.checkpoint_every
    return min(STEPS_PER_CALL, args.gradient_steps - step, to_evaluation, to_checkpoint)


def train_agent(
    args: BCArgs | MDNArgs,
    run: "CloningRun",
    env: gym.Env,
    demos: "Demonstrations",
    reference: "Reference",
) -> None:
    """Gradient steps on the demonstrations; the environment is for evaluations only."""
    network = make_network(args, env.action_space.shape[0])
    optimizer = make_optimizer(args)
    policy = make_policy(network, args, reference, env.action_space)
    update = make_update(network, optimizer, args)
    agent = init_agent(network, optimizer, args, env.observation_space.shape[0])
    agent, step = run.restore(agent)
    observations = jnp.asarray(scale_observations(args, reference, demos.observations))
    actions = jnp.asarray(demos.actions)
    eval_envs = make_evaluation_envs(args, args.eval_episodes, videos=1)

    def evaluate_agent() -> None:
        with run.clock_stopped():
            act = from_first_step(policy, agent.params)
            result, distances = evaluate_with_distance(act, eval_envs, reference)
            run.save_evaluation(step, result, agent.params, eval_envs, **distances)

    run.show_progress(args.method, args.gradient_steps, step)
    while step < args.gradient_steps:
        if step % args.eval_every == 0:
            evaluate_agent()
        steps = steps_to_do(args, step)
        agent, metrics = update(agent, observations, actions, steps)
        step += steps
        run.log_update(step, metrics)
        run.save_checkpoint_if_due(agent, step)
    evaluate_agent()


def train(args: BCArgs | MDNArgs) -> Path:
    """Clones the demonstrator, and measures how near to its states the clone stays."""
    env, demos, run = prepare(args)  # completes args, too
    reference = find_reference(run, demos)
    train_agent(args, run, env, demos, reference)
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
    "num_demos": (1, LARGEST),
    "best_fraction": (1e-9, 1),
    "seed": (0, EVALUATION_SEED - 1),
    "gradient_steps": (1, LARGEST),
    "eval_every": (1, LARGEST),
    "eval_episodes": (1, 10_000),
    "batch_size": (1, LARGEST),
    "learning_rate": (1e-9, 1e9),
    "input_dropout": (0, 0.99),
    "hidden_dropout": (0, 0.99),
    "num_layers": (0, 100),
    "num_units": (1, LARGEST),
    "weight_decay": (0, LARGEST),
    "num_actions": (1, LARGEST),
    "temperature": (1e-9, 1e9),
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


def check_cloning_memory(args: BCArgs | MDNArgs, demos: "Demonstrations") -> None:
    """What surely has to be held at once: parameters, gradient and Adam's two moments; a batch."""
    if args.method == "mdn":
        width = 256
        kernels = args.num_actions * width * (width + demos.actions.shape[1])
        activations = args.num_actions * args.batch_size * width
    else:
        inputs = demos.observations.shape[1] + (args.num_layers - 1) * args.num_units
        kernels = args.num_units * inputs
        activations = args.num_layers * args.batch_size * args.num_units
    check_fits(4 * kernels + activations, "the network's size or --batch-size")


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


def make_evaluation_envs(args: Args, episodes: int, videos: int) -> list[gym.Env]:
    """An environment per episode; the first ones are filmed if asked for."""
    filmed = [args.capture_video and i < videos for i in range(episodes)]
    return [Filmed(make_env(args, render=True)) if film else make_env(args) for film in filmed]


def seeded_reset(env: gym.Env, seed: int) -> np.ndarray:
    """Twice: some environments (Meta-World's) draw their task before they look at the seed."""
    env.reset(seed=seed)
    return env.reset(seed=seed)[0]


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


def best_episodes(demos: Demonstrations, fraction: float) -> Demonstrations:
    """That fraction of the episodes, rounded up, with the highest returns; in their old order."""
    episode = np.cumsum(demos.ends) - demos.ends  # (N,) number of the episode of every step
    returns = np.bincount(episode, demos.rewards)
    best = np.argsort(-returns, kind="stable")[: math.ceil(fraction * len(returns))]
    return Demonstrations(*(array[np.isin(episode, best)] for array in demos))


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


def load_command(run: Path) -> Any:
    """The arguments of a run, of the kind that its method has."""
    with as_user_error(f"{run} is not a run folder of this script"):
        saved = json.loads((run / "args.json").read_text())
        kind = METHODS[saved["method"]]
        fields = [field for field in dataclasses.fields(kind) if field.init]
        args = kind(**{field.name: saved.get(field.name, field.default) for field in fields})
        check_numbers(args)
        return args


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


class CloningRun(Run):
    """A run without an environment to learn in: no replay to keep."""

    def restore(self, state: CloningState) -> tuple[CloningState, int]:
        """Where an interrupted run left off."""
        path = self.folder / "state.npz"
        if not path.exists():
            return state, 0
        state, meta = load_arrays(path, state)
        return state, meta["step"]

    def save_checkpoint_if_due(self, state: CloningState, step: int) -> None:
        at_end = step == self.args.gradient_steps
        if step % self.args.checkpoint_every == 0 or at_end or self.signals:
            self.log.flush()  # what a kill loses, a resumed run does not log again
            save_arrays(self.folder / "state.npz", state, step=step)
            self.stop_if_asked()


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


def evaluate_saved_policy(args: BCArgs | MDNArgs) -> None:
    """Prints return, success and Wasserstein distance of a run's latest policy.

    Return and success with 95 percent confidence intervals.
    """
    check_numbers(args)
    run = Path(args.evaluate)
    saved = load_command(run)
    saved.capture_video = args.capture_video
    envs = make_evaluation_envs(saved, args.eval_episodes, videos=3)
    box = envs[0].action_space
    obs_dim = envs[0].observation_space.shape[0]
    network = make_network(saved, len(box.low))
    reference = load_reference(run, obs_dim)
    template = jax.eval_shape(network.init, jax.random.PRNGKey(0), jnp.zeros((1, obs_dim)))
    params, meta = load_arrays(run / "agent.npz", template)
    policy = make_policy(network, saved, reference, box)
    result, distances = evaluate_with_distance(from_first_step(policy, params), envs, reference)
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


# ------------------------------------------------------------------------------------ command line

METHODS = {"bc": BCArgs, "mdn": MDNArgs}
Command = (
    Annotated[BCArgs, tyro.conf.subcommand("bc")] | Annotated[MDNArgs, tyro.conf.subcommand("mdn")]
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


def prepare(args: BCArgs | MDNArgs) -> tuple[gym.Env, Demonstrations, CloningRun]:
    """Whatever can be wrong with the input is found before the run folder is made."""
    check_numbers(args)
    args.reward = check_env(args)
    env = make_env(args)
    demos, args.dataset_id, warning = find_demonstrations(args, env)
    demos = best_episodes(demos, args.best_fraction)
    check_cloning_memory(args, demos)
    return env, demos, CloningRun(args, warning)


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
            evaluate_saved_policy(args)
        else:
            train(resumed_command(args, argv, "gradient_steps") if args.resume else args)


if __name__ == "__main__":
    main()
