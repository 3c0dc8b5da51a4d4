# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.4.0", "gymnasium-robotics==1.4.2", "mujoco==3.17.0",
#   "minari[hdf5,hf]==0.5.4", "ott-jax==0.6.0", "tyro", "tensorboard", "tensorboardX", "tqdm", "imageio",
#   "imageio-ffmpeg",
# ]
# ///
"""Behavioural cloning (BC) and mixture density networks (MDN): the imitation baselines of section 4.2 of the paper.

    python bc_mdn.py bc --env-id AdroitHandDoor-v1
    python bc_mdn.py mdn --env-id AdroitHandDoor-v1
    python bc_mdn.py --resume runs/AdroitHandDoor-v1__mdn__1__1700000000
    python bc_mdn.py --evaluate runs/AdroitHandDoor-v1__mdn__1__1700000000 --capture-video

Both are trained on demonstrations alone and measured twice: by success, and by the Wasserstein distance between the
states of the agent and those of the demonstrator, beside the distance of demonstrations from one another.

The second loss of the MDN, as written, trains the logits through exp(-d / T), d the squared distance of a candidate
from the action. Measured on all 6729 steps of the human Door demonstrations with K = 10, T = 0.001, float32: with
untrained candidates (seeds 1 to 5) the nearest is at d = 7.6 to 8.2 (median) and the gradient of the logits is exactly
0 at every step; with those of a trained MDN (60k steps, seeds 1 to 3) d = 0.11 to 0.13, the gradient is exactly 0 at 94
to 98 percent of the steps and its mean norm below 1e-7. The negative log-likelihood of the same mixture, computed in
logarithms, gives a mean norm of 0.95 (untrained, with equal logits) and of 0.44 to 0.53 (trained). So `--logits-loss
nll` is the default.

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

GRADIENT_BLOCK = 500  # gradient steps in one call
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
    """any Gymnasium id with a Box action space; `module:Env-v0` imports the module first"""
    dataset_id: str | None = None
    """any Minari id, used from disk or else downloaded; default for Adroit: D4RL/<task>/human-v2"""
    num_demos: int | None = None
    """use only the first N episodes of the dataset; default: all"""
    best_fraction: float = 1.0
    """of those, use only this fraction with the highest returns; 0.1 is 10-percent BC (not from the paper)"""
    reward: Literal["sparse", "env"] | None = None
    """sparse: 1 at every step with info["success"], else 0; default: sparse if the environment reports success"""
    seed: int = 1
    """seed of network, batches and sampled actions; equal seeds give bit-identical runs on a CPU"""
    gradient_steps: int = 60_000
    """gradient steps"""
    eval_every: int = 10_000
    """gradient steps between evaluations (not from the paper)"""
    eval_episodes: int = 30
    """episodes of an evaluation, always from the same initial states"""
    exp_name: str = "clone"
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}"""

    batch_size: int = 256
    """demonstrated steps in a batch"""
    learning_rate: float = 3e-4
    """Adam's learning rate"""
    input_dropout: float = 0.0
    """dropout on the observation while training"""
    hidden_dropout: float = 0.0
    """dropout after every hidden layer while training"""

    checkpoint_every: int = 5_000
    """gradient steps between checkpoints"""
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
class BCArgs(Args):
    """Behavioural cloning: a multi-layer perceptron and the squared error (appendix "Behavioral Cloning")."""

    method: str = dataclasses.field(default="bc", init=False)
    exp_name: str = "bc"
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}"""
    num_layers: int = 1
    """hidden layers"""
    num_units: int = 256
    """units of a hidden layer"""
    activation: Literal["relu", "tanh"] = "tanh"
    """after every hidden layer"""
    normalize_observations: bool = True
    """centre and scale observations by the demonstrations' mean and standard deviation"""
    weight_decay: float = 0.0
    """decoupled weight decay (AdamW)"""


@dataclasses.dataclass
class MDNArgs(Args):
    """Mixture density network: K candidate actions and their probabilities (appendix "Mixture Density Networks")."""

    method: str = dataclasses.field(default="mdn", init=False)
    exp_name: str = "mdn"
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}"""
    num_actions: int = 10
    """K, candidate actions per state"""
    temperature: float = 0.001
    """T of the soft minimum"""
    logits_loss: Literal["nll", "paper"] = "nll"
    """nll: likelihood of the mixture (not from the paper); paper: the second loss as written, see above"""


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


def check_cloning_args(args: BCArgs | MDNArgs) -> None:
    counts = "num_demos gradient_steps eval_every eval_episodes batch_size checkpoint_every num_units num_actions"
    bounds = dict.fromkeys(counts.split(), (1, math.inf))
    bounds |= {"num_layers": (0, math.inf), "weight_decay": (0, math.inf), "seed": (0, EVALUATION_SEED - 1)}
    bounds |= dict.fromkeys(["input_dropout", "hidden_dropout"], (0, 0.99))
    bounds |= dict.fromkeys(["temperature", "learning_rate"], (1e-9, 1e9)) | {"best_fraction": (1e-9, 1)}
    for name, value in dataclasses.asdict(args).items():
        if name in bounds and value is not None:
            low, high = bounds[name]
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


def best_episodes(demos: Demonstrations, fraction: float) -> Demonstrations:
    """That fraction of the episodes, rounded up, with the highest returns; in their old order."""
    episode = np.cumsum(demos.ends) - demos.ends  # (N,) number of the episode of every step
    returns = np.bincount(episode, demos.rewards)
    best = np.argsort(-returns, kind="stable")[: math.ceil(fraction * len(returns))]
    return Demonstrations(*(array[np.isin(episode, best)] for array in demos))


# --------------------------------------------------------------------------------------------------- networks


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


class MixtureNetwork(nn.Module):
    """The MDN: (..., obs) -> candidates (..., K, action_dim) and logits (..., K), both read off one shared layer."""

    num_actions: int
    action_dim: int
    torso: int = 256
    head: Sequence[int] = (256,)
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0

    @nn.compact
    def __call__(self, observations: jax.Array, train: bool = False) -> tuple[jax.Array, jax.Array]:
        one_mask = {
            "broadcast_dims": tuple(range(observations.ndim - 1)),
            "deterministic": not train,
        }  # as in the heads
        x = nn.Dropout(self.input_dropout, **one_mask)(observations)
        x = nn.relu(nn.Dense(self.torso, kernel_init=nn.initializers.xavier_uniform())(x))
        x = nn.Dropout(self.hidden_dropout, **one_mask)(x)
        heads = CandidateNetwork(self.num_actions, self.action_dim, (), self.head, hidden_dropout=self.hidden_dropout)
        return heads(x, train), nn.Dense(self.num_actions)(x)


# ----------------------------------------------------------------------------------------------------- losses


def squared_error(predictions: jax.Array, actions: jax.Array) -> jax.Array:
    """The BC loss of section 3.1, (B, D), (B, D) -> scalar: what soft_min_loss is for K = 1."""
    return jnp.mean(jnp.sum((predictions - actions) ** 2, axis=-1))


def soft_min_loss(candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """Equation 1 in the form f_T of appendix B. candidates (B, K, D), actions (B, D)."""
    distances = jnp.sum((candidates - actions[:, None, :]) ** 2, axis=-1)  # (B, K)
    log_mean = jax.nn.logsumexp(-distances / temperature, axis=-1) - jnp.log(candidates.shape[1])
    return jnp.mean(-temperature * log_mean)


def scaled_distances(candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """||Psi_k - a||^2 / T of shape (B, K), a constant for the gradient: the second loss trains the logits only."""
    distances = jnp.sum((candidates - actions[:, None, :]) ** 2, axis=-1)
    return jax.lax.stop_gradient(distances) / temperature


def paper_logits_loss(logits: jax.Array, candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """The second loss of the MDN as written: the expected density, without a logarithm."""
    densities = jnp.exp(-scaled_distances(candidates, actions, temperature))
    return -jnp.mean(jnp.sum(nn.softmax(logits) * densities, axis=-1))


def nll_logits_loss(logits: jax.Array, candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """Negative log-likelihood of the mixture (appendix A with learned alpha), in logarithms throughout."""
    log_densities = -scaled_distances(candidates, actions, temperature)
    return -jnp.mean(jax.nn.logsumexp(nn.log_softmax(logits) + log_densities, axis=-1))


LOGITS_LOSSES = {"paper": paper_logits_loss, "nll": nll_logits_loss}


# ---------------------------------------------------------------------------------------------------- updates


class CloningState(NamedTuple):
    params: Any
    opt_state: Any
    key: jax.Array


def make_cloning_network(args: BCArgs | MDNArgs, action_dim: int) -> nn.Module:
    dropout = {"input_dropout": args.input_dropout, "hidden_dropout": args.hidden_dropout}
    if args.method == "bc":
        return CloningNetwork(action_dim, args.num_layers, args.num_units, args.activation, **dropout)
    return MixtureNetwork(args.num_actions, action_dim, **dropout)


def make_cloning_loss(network: nn.Module, args: BCArgs | MDNArgs) -> Callable:
    """Parameters, batch and dropout key -> what is minimised, and its parts by name."""

    def bc_loss(params: Any, observations: jax.Array, actions: jax.Array, key: jax.Array) -> tuple[jax.Array, dict]:
        predictions = network.apply(params, observations, train=True, rngs={"dropout": key})
        loss = squared_error(predictions, actions)
        return loss, {"squared_error": loss}

    def mdn_loss(params: Any, observations: jax.Array, actions: jax.Array, key: jax.Array) -> tuple[jax.Array, dict]:
        candidates, logits = network.apply(params, observations, train=True, rngs={"dropout": key})
        first = soft_min_loss(candidates, actions, args.temperature)
        second = LOGITS_LOSSES[args.logits_loss](logits, candidates, actions, args.temperature)
        return first + second, {"candidates": first, "logits": second}

    return bc_loss if args.method == "bc" else mdn_loss


def make_cloning_update(loss_fn: Callable, optimizer: optax.GradientTransformation, batch_size: int) -> Callable:
    """`steps` gradient steps in one call; returns the mean of every part of the loss, and the parameters' norm."""

    def update(state: CloningState, observations: jax.Array, actions: jax.Array, steps: int):
        def step(state: CloningState, _: None) -> tuple[CloningState, dict]:
            key, batch_key, dropout_key = jax.random.split(state.key, 3)
            batch = jax.random.randint(batch_key, (batch_size,), 0, len(observations))
            grads, parts = jax.grad(loss_fn, has_aux=True)(
                state.params, observations[batch], actions[batch], dropout_key
            )
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            return CloningState(optax.apply_updates(state.params, updates), opt_state, key), parts

        state, parts = jax.lax.scan(step, state, None, length=steps)
        return state, {**jax.tree.map(jnp.mean, parts), "parameter_norm": optax.tree.norm(state.params)}

    return jax.jit(update, static_argnums=3, donate_argnums=0)


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


def scale_observations(args: BCArgs | MDNArgs, reference: Reference, observations: jax.Array) -> jax.Array:
    """What the network sees; the paper's MDN sees the observations as they are."""
    if args.method == "bc" and args.normalize_observations:
        return (observations - reference.mean) / reference.deviation
    return observations


def make_cloned_policy(network: nn.Module, args: BCArgs | MDNArgs, reference: Reference, box: Any) -> Callable:
    """The actions at step t of an evaluation."""

    def policy(params: Any, observations: jax.Array, t: int) -> jax.Array:
        output = network.apply(params, scale_observations(args, reference, observations))
        if args.method == "bc":
            return jnp.clip(output, box.low, box.high)
        candidates, logits = output
        key = jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(args.seed), 1), t)
        index = jax.random.categorical(key, logits)  # sampled also when evaluated (the paper), but reproducibly
        actions = jnp.take_along_axis(candidates, index[:, None, None], axis=1)[:, 0]
        return jnp.clip(actions, box.low, box.high)

    return jax.jit(policy)


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


def load_cloning_args(run: Path) -> BCArgs | MDNArgs:
    with explained(f"{run} is not a run folder of this script"):
        saved = json.loads((run / "args.json").read_text())
        kind = {"bc": BCArgs, "mdn": MDNArgs}[saved["method"]]
        return kind(**{field.name: saved[field.name] for field in dataclasses.fields(kind) if field.init})


def load_reference(run: Path, obs_dim: int) -> Reference:
    shapes = [(obs_dim,), (obs_dim,), (SINKHORN_POINTS, obs_dim), (SINKHORN_POINTS,), (3,)]
    template = Reference(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return load_arrays(run / "reference.npz", template)[0]


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


def clone(
    args: BCArgs | MDNArgs,
    run: Path,
    env: gym.Env,
    demos: Demonstrations,
    reference: Reference,
    log: Any,
    signals: list,
) -> None:
    """Blocks of gradient steps between evaluations and checkpoints, which may stand at any step."""
    network = make_cloning_network(args, env.action_space.shape[0])
    optimizer = optax.adamw(args.learning_rate, weight_decay=args.weight_decay if args.method == "bc" else 0.0)
    key, init_key = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(args.seed), 0))
    params = network.init(init_key, demos.observations[:1])
    state, step = CloningState(params, optimizer.init(params), key), 0
    if (run / "state.npz").exists():
        state, meta = load_arrays(run / "state.npz", state)
        step = meta["step"]
    update = make_cloning_update(make_cloning_loss(network, args), optimizer, args.batch_size)
    policy = make_cloned_policy(network, args, reference, env.action_space)
    observations = jnp.asarray(scale_observations(args, reference, demos.observations))
    actions, logged_time = jnp.asarray(demos.actions), time.perf_counter()
    eval_envs = [make_env(args.env_id, args.reward, args.capture_video and i == 0) for i in range(args.eval_episodes)]
    progress = tqdm(desc=args.method, total=args.gradient_steps, initial=step, unit="step", disable=args.quiet)
    shown = {}
    while True:
        if step % args.eval_every == 0 or step >= args.gradient_steps:
            result, distance = evaluate_clone(policy, state.params, eval_envs, reference)
            save_arrays(run / "policy.npz", state.params, step=step)
            write_scores(run / "evaluations.csv", step, result, distance, reference.human, log)
            shown |= {"success": f"{np.mean(result.successes):.2f}", "wasserstein": f"{distance:.2f}"}
            if result.frames:
                write_video(run / "videos" / f"step_{step}.mp4", result.frames, env.metadata.get("render_fps", 30))
            logged_time = time.perf_counter()
        if step >= args.gradient_steps:
            break
        to_next = [every - step % every for every in (args.eval_every, args.checkpoint_every)]
        block = min(GRADIENT_BLOCK, args.gradient_steps - step, *to_next)
        state, metrics = update(state, observations, actions, block)
        step, metrics = step + block, {name: float(value) for name, value in metrics.items()}
        if not all(map(math.isfinite, metrics.values())):
            sys.exit(f"error: not finite at step {step}: {metrics}; lower --learning-rate")
        for name, value in metrics.items():
            log.add_scalar(f"losses/{name}", value, step)
        log.add_scalar("charts/SPS", block / (time.perf_counter() - logged_time), step)
        logged_time = time.perf_counter()
        shown |= {name: f"{value:.4f}" for name, value in metrics.items() if name != "parameter_norm"}
        progress.set_postfix(shown, refresh=False)
        progress.update(block)
        if step % args.checkpoint_every == 0 or step == args.gradient_steps or signals:
            log.flush()  # a kill loses what is not written, and a resumed run does not log it again
            save_arrays(run / "state.npz", state, step=step)
            exit_if_asked(signals, run)
    progress.close()


def train(args: BCArgs | MDNArgs) -> Path:
    """Whatever can be wrong with the input is found before the run folder is made."""
    check_cloning_args(args)
    env = make_env(args.env_id, args.reward)
    args.reward = "sparse" if isinstance(env.env, SparseReward) else "env"
    if args.dataset_id is None:
        demos, args.dataset_id, warning = load_default_demonstrations(args, env)
    else:
        demos, warning = load_demonstrations(args.dataset_id, env, args.reward == "sparse", args.num_demos), None
    demos = best_episodes(demos, args.best_fraction)
    run, warning = open_run_folder(args, warning)
    log, signals = make_log(args, run, warning), catch_signals()
    if not (run / "reference.npz").exists():
        save_arrays(run / "reference.npz", make_reference(demos, args.quiet))
        exit_if_asked(signals, run)
    clone(args, run, env, demos, load_reference(run, demos.observations.shape[1]), log, signals)
    log.close()
    if not args.quiet:
        print(f"done; evaluate with: python {Path(__file__).name} --evaluate {run}")
    return run


def evaluate_cloned_run(args: BCArgs | MDNArgs) -> None:
    """Prints return, success (with 95 percent confidence intervals) and Wasserstein distance of a run's last policy."""
    check_cloning_args(args)
    run = Path(args.evaluate)
    saved = load_cloning_args(run)
    envs = [make_env(saved.env_id, saved.reward, args.capture_video and i < 3) for i in range(args.eval_episodes)]
    obs_dim, box = envs[0].observation_space.shape[0], envs[0].action_space
    network, reference = make_cloning_network(saved, len(box.low)), load_reference(run, obs_dim)
    template = jax.eval_shape(network.init, jax.random.PRNGKey(0), jnp.zeros((1, obs_dim)))
    params, meta = load_arrays(run / "policy.npz", template)
    policy = make_cloned_policy(network, saved, reference, box)
    result, distance = evaluate_clone(policy, params, envs, reference)
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


Command = Annotated[BCArgs, tyro.conf.subcommand("bc")] | Annotated[MDNArgs, tyro.conf.subcommand("mdn")]


def require_end_ahead(run: Path, argument: str, end: int) -> None:
    """A resumed run may be given another end, but none that its checkpoint has passed."""
    path = run / "state.npz"
    if path.exists():
        with explained(f"{path} is not a whole checkpoint"), np.load(path, allow_pickle=False) as file:
            step = json.loads(file["meta"].tobytes())["step"]
        require(step <= end, f"{run} is at step {step} already: give {argument} no less")


def parse_command(argv: list[str]) -> BCArgs | MDNArgs:
    """`--resume RUN` and `--evaluate RUN` need no subcommand, for a run knows its own. A resumed run has its own
    arguments too: only what does not change the learning may be given anew."""
    flags = ("--resume", "--evaluate")
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith(flags) else [word])]
    for flag, run in zip(argv, argv[1:]):
        if flag in flags and argv[0].startswith("-"):
            argv = [load_cloning_args(Path(run)).method, *argv]
            break
    args = tyro.cli(Command, args=argv, description=__doc__)
    if not args.resume or args.evaluate:
        return args
    saved = load_cloning_args(Path(args.resume))
    require(saved.method == args.method, f"{args.resume} is a run of {saved.method}, not of {args.method}")
    changed = tyro.cli(type(saved), args=argv[1:], default=dataclasses.replace(saved, resume=args.resume))
    free = {"resume", "gradient_steps", "eval_every", "checkpoint_every", "capture_video", "track", "quiet"}
    for field in dataclasses.fields(saved):
        same = field.name in free or getattr(changed, field.name) == getattr(saved, field.name)
        require(same, f"--{field.name.replace('_', '-')} cannot be changed by --resume: start a new run")
    require_end_ahead(Path(args.resume), "--gradient-steps", changed.gradient_steps)
    return changed


def main() -> None:
    try:
        args = parse_command(sys.argv[1:])
        if args.evaluate:
            evaluate_cloned_run(args)
        else:
            train(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
