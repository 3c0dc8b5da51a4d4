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

GRADIENT_BLOCK = 500  # gradient steps in one call, without any transfer in between
START_TEMPERATURE = 0.25  # of the demonstrated actions' variance, unless --temperature-start is given
EVALUATION_SEED = 2**31  # evaluation episode i starts from seed EVALUATION_SEED + i; --seed stays below it
BUNDLED_DEMONSTRATIONS = Path(__file__).resolve().parent / "demos"

# D4RL's files do not name their environment, and its normalised score is 0 for the first and 100 for the second return.
# Gymnasium's v4 is the nearest to D4RL's v2 that needs no mujoco-py.
D4RL_TASKS = {
    "halfcheetah": ("HalfCheetah-v4", -280.178953, 12135.0),
    "hopper": ("Hopper-v4", -20.272305, 3234.3),
    "walker2d": ("Walker2d-v4", 1.629008, 4592.3),
}


@dataclasses.dataclass
class Args:
    dataset_id: str | None = None
    """any Minari id, used from disk or else downloaded"""
    dataset_path: str | None = None
    """a D4RL file (HDF5) instead, such as hopper_medium-v2.hdf5"""
    env_id: str | None = None
    """environment of the evaluations; default: the dataset's own, and for D4RL's files Gymnasium's v4"""
    env_spec: tyro.conf.Suppress[str | None] = None
    """the dataset's environment with its own arguments and time limit, as JSON; filled in from the dataset"""
    ref_min_score: float | None = None
    """return with normalised score 0; default: D4RL's for HalfCheetah, Hopper and Walker2d, else the dataset's own"""
    ref_max_score: float | None = None
    """return with normalised score 100; the same defaults"""
    seed: int = 1
    """seed of networks and batches; equal seeds give bit-identical runs on a CPU"""
    num_seeds: int = 1
    """train that many seeds at once: seed, seed + 1, ... (the paper's table: 10)"""
    gradient_steps: int = 1_000_000
    """gradient steps of the Q-network"""
    eval_every: int = 50_000
    """gradient steps between evaluations (the paper's other experiments: environment steps)"""
    eval_episodes: int = 10
    """episodes of an evaluation, greedy, always from the same initial states"""
    exp_name: str = "aquacql"
    """part of the run folder's name: runs/{env_id}__{exp_name}__{seed}__{unix time}"""

    num_actions: int = 10
    """K, candidate actions per state"""
    temperature: float = 0.001
    """T of the soft minimum"""
    temperature_start: float | None = None
    """T at the first step, from where it falls to --temperature in the first half of the training; default: a quarter
    of the demonstrated actions' variance; equal to --temperature: constant, as in the paper"""
    candidate_steps: int = 5_000_000
    """gradient steps of the candidate network"""
    held_out_episodes: int = 0
    """the last N demonstrations are kept from the candidates, to see how near to unseen actions they come"""
    candidate_learning_rate: float = 3e-4
    """Adam's learning rate for the candidate network"""
    candidates_from: str | None = None
    """run folder whose trained candidates (of as many seeds) are used instead of training them"""

    cql_alpha: float = 5.0
    """alpha of equation 2, the weight of the conservative term; 0: plain Munchausen DQN"""
    batch_size: int = 256
    """batch of both networks"""
    learning_rate: float = 1e-4
    """Adam's learning rate for the Q-network"""
    gamma: float = 0.995
    """discount"""
    n_step: int = 3
    """length of the multi-step return"""
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
    """gradient steps between checkpoints (not from the paper)"""
    resume: str | None = None
    """run folder to continue, with its own arguments"""
    evaluate: str | None = None
    """run folder to evaluate instead of training"""
    capture_video: bool = False
    """record videos: of evaluation episodes, and of the candidates along the first episode"""
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


def check_offline_args(args: Args) -> None:
    counts = "num_seeds gradient_steps eval_every eval_episodes num_actions batch_size n_step target_update_period"
    bounds = dict.fromkeys(f"{counts} checkpoint_every".split(), (1, math.inf))
    bounds |= {
        "candidate_steps": (0, math.inf),
        "held_out_episodes": (0, math.inf),
        "cql_alpha": (0, 1e9),
        "gamma": (0, 1),
    }
    bounds |= dict.fromkeys(["temperature", "learning_rate", "candidate_learning_rate", "munchausen_tau"], (1e-9, 1e9))
    bounds |= {
        "munchausen_alpha": (0, 1),
        "ema_decay": (0, 1 - 1e-9),
        "temperature_start": (1e-9, 1e9),
        "munchausen_clip": (-1e9, 0),
    }
    for name, (low, high) in {**bounds, "seed": (0, EVALUATION_SEED - args.num_seeds)}.items():
        value = getattr(args, name)
        if value is not None:
            require(low <= value <= high, f"--{name.replace('_', '-')} is {value}: give a number from {low} to {high}")
    low, high = args.ref_min_score, args.ref_max_score
    together = (low is None) == (high is None) and (low is None or low < high)
    require(together, f"--ref-min-score is {low} and --ref-max-score {high}: give both, the smaller first")


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


def make_evaluation_env(args: Args, render: bool = False) -> gym.Env:
    """--env-id, or the dataset's own environment with its own arguments and time limit."""
    environment = args.env_id
    if args.env_spec:
        with explained(f"cannot read the environment of dataset {args.dataset_id!r}, name it with --env-id"):
            known = {field.name for field in dataclasses.fields(gym.envs.registration.EnvSpec)}
            # Specifications from before Gymnasium 1.0 have fields that are no more.
            spec = {key: value for key, value in json.loads(args.env_spec).items() if key in known}
            environment = gym.envs.registration.EnvSpec.from_json(json.dumps(spec))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # v4 is not the newest: D4RL's data is older still
        return make_env(environment, "env", render)


# ---------------------------------------------------------------------------------------------------- dataset


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


def read_d4rl_fields(path: Path, env: gym.Env) -> dict[str, np.ndarray]:
    """The fields of a D4RL file, checked against the environment."""
    import h5py

    require(path.is_file(), f"{path} does not exist: name a D4RL file with --dataset-path")
    needed = ["observations", "actions", "rewards", "terminals", "timeouts"]
    with explained(f"cannot read {path} as an HDF5 file"), h5py.File(path, "r") as file:
        missing = [name for name in needed if name not in file]
        require(not missing, f"{path} has no field {', '.join(missing)}: is it a file of D4RL?")
        names = [*needed, *(name for name in ["next_observations"] if name in file)]
        fields = {name: np.asarray(file[name][()], np.float32) for name in names}
    shapes = {"observations": env.observation_space.shape, "actions": env.action_space.shape}
    shapes["next_observations"] = shapes["observations"]
    for name, array in fields.items():
        shape = (len(np.atleast_1d(fields["actions"])), *shapes.get(name, ()))
        require(array.shape == shape, f"{path}: field {name} has shape {array.shape}, {env.spec.id} needs {shape}")
        require(np.isfinite(array).all(), f"{path}: field {name} of shape {shape} holds NaN or infinite values")
    return fields


def load_d4rl(path: Path, env: gym.Env) -> Demonstrations:
    """A D4RL file as arrays. No transition reaches across an end; one whose next state is unknown is left out."""
    fields = read_d4rl_fields(path, env)
    observations, terminations = fields["observations"], fields["terminals"] > 0
    require(len(observations), f"{path} holds no steps: choose another with --dataset-path")
    actions = np.clip(fields["actions"], env.action_space.low, env.action_space.high)
    ends, lost = terminations | (fields["timeouts"] > 0), np.zeros(len(observations), bool)
    ends[-1] = True
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
    require(not lost.all(), f"{path} holds no step with a known next state: choose another with --dataset-path")
    arrays = (observations, actions, fields["rewards"], next_observations, terminations, ends)
    return Demonstrations(*(array[~lost] for array in arrays))


def load_dataset(args: Args) -> tuple[Demonstrations, gym.Env]:
    """The data and its environment. Completes the arguments: environment and reference scores."""
    both_or_none = (args.dataset_id is None) == (args.dataset_path is None)
    require(not both_or_none, "name the data: either --dataset-id (Minari) or --dataset-path (a file of D4RL)")
    metadata = open_dataset(args.dataset_id).storage.metadata if args.dataset_id else {}
    if args.env_id is None:
        if args.dataset_id:
            args.env_spec = metadata.get("eval_env_spec") or metadata.get("env_spec")
            args.env_id = json.loads(args.env_spec)["id"] if args.env_spec else None
        else:
            task = re.match("|".join(D4RL_TASKS), Path(args.dataset_path).name.lower())
            args.env_id = D4RL_TASKS[task[0]][0] if task else None
        require(args.env_id, "the dataset does not say from which environment it is: name one with --env-id")
    if args.ref_min_score is None:
        family = re.split(r"[:/]", args.env_id)[-1].split("-")[0].lower()  # hopper of Hopper-v5
        own = (metadata.get("ref_min_score"), metadata.get("ref_max_score"))
        _, args.ref_min_score, args.ref_max_score = D4RL_TASKS.get(family, (None, *own))
    env = make_evaluation_env(args)
    if args.dataset_path:
        return load_d4rl(Path(args.dataset_path), env), env
    return load_demonstrations(args.dataset_id, env, sparse=False), env


class Transitions(NamedTuple):
    """n-step transitions on the device: every state once, an episode's last included; the others are indices of it."""

    states: jax.Array  # (N + episodes, obs)
    rows: jax.Array  # (N,) where the state of step i is
    next_rows: jax.Array  # (N,) where its bootstrap state is
    returns: jax.Array  # (N,) n-step
    discounts: jax.Array  # (N,) gamma^n, 0 after a termination


def make_transitions(data: Demonstrations, n_step: int, gamma: float) -> Transitions:
    """The data does not grow, so the n-step returns are computed once and for all."""
    steps = np.arange(len(data.ends))
    rows = (steps + np.cumsum(data.ends) - data.ends).astype(np.int32)
    states = np.empty((len(steps) + data.ends.sum(), data.observations.shape[1]), np.float32)
    states[rows], states[rows[data.ends] + 1] = data.observations, data.next_observations[data.ends]
    windows = np.minimum(steps[:, None] + np.arange(n_step), steps[-1])  # (N, n); the last step always is an end
    flags = (flag[windows].astype(np.float32) for flag in (data.terminations, data.ends))
    returns, last, discounts = n_step_returns(data.rewards[windows], *flags, gamma)
    return Transitions(jnp.asarray(states), jnp.asarray(rows), rows + last + 1, returns, discounts)


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


def cql_loss(q: jax.Array, action: jax.Array, target: jax.Array, alpha: float) -> tuple[jax.Array, jax.Array]:
    """Equation 2, with the squared Bellman error as written (AQuaDQN's is Huber's). q (B, K), action (B,), target (B,).

    Also returns its two terms and the mean Q-value of the dataset's actions.
    """
    q_taken = jnp.take_along_axis(q, action[:, None], axis=1)[:, 0]
    conservative = jnp.mean(jax.nn.logsumexp(q, axis=1) - q_taken)
    bellman = jnp.mean(0.5 * (q_taken - target) ** 2)
    return alpha * conservative + bellman, jnp.stack([conservative, bellman, jnp.mean(q_taken)])


# ---------------------------------------------------------------------------------------------------- updates


class Batch(NamedTuple):
    observations: jax.Array  # (B, obs)
    actions: jax.Array  # (B,) candidate indices
    returns: jax.Array  # (B,) n-step
    next_observations: jax.Array  # (B, obs) the bootstrap state
    discounts: jax.Array  # (B,)


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


# Where the agents of all seeds have their seed axis. The count has none: as one number for all it is a real condition,
# so that the target networks are copied every hundredth step only.
SEED_AXES = AgentState(0, 0, 0, 0, None, 0)


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


def sample_transitions(data: Transitions, indices: jax.Array, key: jax.Array, batch_size: int) -> Batch:
    """Uniform over the dataset. indices (N,): the candidates nearest to its actions."""
    i = jax.random.randint(key, (batch_size,), 0, len(indices))
    states, next_states = data.states[data.rows[i]], data.states[data.next_rows[i]]
    return Batch(states, indices[i], data.returns[i], next_states, data.discounts[i])


def make_cql_updates(network: nn.Module, optimizer: optax.GradientTransformation, args: Args) -> Callable:
    """`steps` gradient steps on equation 2 for all seeds in one call; returns the means of loss, terms and Q-value."""

    def loss_fn(params: Any, batch: Batch, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cql_loss(network.apply(params, batch.observations), batch.actions, target, args.cql_alpha)

    def step(state: AgentState, data: Transitions, indices: jax.Array) -> tuple[AgentState, jax.Array]:
        key, batch_key = jax.random.split(state.key)
        batch = sample_transitions(data, indices, batch_key, args.batch_size)
        both = jnp.concatenate([batch.observations, batch.next_observations])
        q_s, q_next = jnp.split(network.apply(state.target_params, both), 2)
        munchausen = (args.munchausen_tau, args.munchausen_alpha, args.munchausen_clip)
        target = munchausen_target(q_s, q_next, batch.actions, batch.returns, batch.discounts, *munchausen)
        (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch, target)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        params, count = optax.apply_updates(state.params, updates), state.updates + 1
        target_params = optax.periodic_update(params, state.target_params, count, args.target_update_period)
        average = averaged(state.average_params, params, args.ema_decay)
        return AgentState(params, average, target_params, opt_state, count, key), jnp.stack([loss, *parts])

    def updates(states: AgentState, data: Transitions, indices: jax.Array, steps: int) -> tuple[AgentState, jax.Array]:
        def update(state: AgentState, indices: jax.Array) -> tuple[AgentState, jax.Array]:
            return jax.lax.scan(lambda state, _: step(state, data, indices), state, None, length=steps)

        states, metrics = jax.vmap(update, in_axes=(SEED_AXES, 0), out_axes=(SEED_AXES, 0))(states, indices)
        return states, jnp.mean(metrics, axis=1)  # (seeds, 4)

    return jax.jit(updates, static_argnums=3, donate_argnums=0)


def make_greedy_policy(q_network: nn.Module, network: nn.Module, box: gym.spaces.Box) -> Callable:
    def policy(q_params: Any, candidate_params: Any, observations: jax.Array) -> jax.Array:
        index = jnp.argmax(q_network.apply(q_params, observations), axis=-1)  # (episodes,)
        candidates = network.apply(candidate_params, observations)  # (episodes, K, D)
        actions = jnp.take_along_axis(candidates, index[:, None, None], axis=1)[:, 0]
        return jnp.clip(actions, box.low, box.high)

    return jax.jit(policy)


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


def of_seed(tree: Any, i: int) -> Any:
    """The i-th seed's part of what all seeds have."""
    return jax.tree.map(lambda leaf: leaf[i], tree)


def evaluate_seeds(policy: Callable, params: Any, candidate_params: Any, envs: list[gym.Env]) -> list[Evaluation]:
    """One evaluation per seed, all from the same initial states."""
    results = []
    for i in range(len(jax.tree.leaves(params)[0])):
        q, candidates = of_seed(params, i), of_seed(candidate_params, i)
        results.append(evaluate(lambda observations, q=q, c=candidates: policy(q, c, observations), envs))
    return results


def normalized_score(returns: Any, low: float | None, high: float | None) -> Any:
    """D4RL's: 0 for the return of a random policy, 100 for an expert's; NaN where these are not known."""
    return math.nan * returns if low is None or high is None else 100 * (returns - low) / (high - low)


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


def write_row(path: Path, step: int, scores: dict[str, float]) -> None:
    """Adds a row to a CSV file. Rows from this step on are what an interrupted run had written: replaced."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    kept = [line for line in lines if int(line.split(",")[0]) < step]
    row = ",".join(map(str, [step, *(np.asarray(score).item() for score in scores.values())]))
    path.with_suffix(".partial").write_text("\n".join([",".join(["step", *scores]), *kept, row]) + "\n")
    path.with_suffix(".partial").replace(path)  # earlier rows survive a kill


def write_score_table(args: Args, run: Path, step: int, table: dict[str, np.ndarray], log: Any) -> None:
    """evaluations.csv and TensorBoard have the mean over seeds. With several, each has a file of its own for plot.py,
    and the deviation between them is reported, as in the paper's table."""
    scores = {name: values.mean() for name, values in table.items()}
    if args.num_seeds > 1:
        for name in ("episodic_return", "normalized_score"):
            scores[f"{name}_deviation"] = table[name].std(ddof=1)
        for i in range(args.num_seeds):
            name = re.sub(r"[^\w.-]", "_", f"{args.env_id}__{args.exp_name}__{args.seed + i}")
            write_row(run / f"{name}.csv", step, {column: values[i] for column, values in table.items()})
    write_row(run / "evaluations.csv", step, scores)
    for tag, score in scores.items():
        if tag != "episodes" and np.isfinite(score):
            log.add_scalar(f"eval/{tag}", float(score), step)


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


# --------------------------------------------------------------------------------------------------- training


def seed_keys(args: Args, stage: int) -> jax.Array:
    """(seeds, 2): seed i's key is that of a single run with --seed i."""
    return jnp.stack([jax.random.fold_in(jax.random.PRNGKey(args.seed + i), stage) for i in range(args.num_seeds)])


def train_all_candidates(
    args: Args, run: Path, network: nn.Module, data: Demonstrations, log: Any, signals: list
) -> Any:
    """The first stage: the parameters of every seed's candidates, kept in candidates.npz."""
    path, unfinished, obs_dim = run / "candidates.npz", run / "candidates_training.npz", data.observations.shape[1]
    if path.exists():
        return load_seeds(path, network, obs_dim, args.num_seeds)[0]
    if args.candidates_from:
        params, _ = load_seeds(Path(args.candidates_from) / "candidates.npz", network, obs_dim, args.num_seeds)
        save_arrays(path, params)
        return params
    optimizer = optax.adam(args.candidate_learning_rate)

    def init(key: jax.Array) -> CandidateState:
        key, init_key = jax.random.split(key)
        params = network.init(init_key, jnp.zeros(obs_dim))
        return CandidateState(params, optimizer.init(params), jnp.zeros((), jnp.int32), key)

    states, step = jax.jit(jax.vmap(init))(seed_keys(args, 0)), 0
    if unfinished.exists():
        states, meta = load_arrays(unfinished, states)
        step = meta["step"]
    update = make_candidate_updates(network, optimizer, args)
    seen = learned_from(args, data)
    observations, actions = jnp.asarray(data.observations[:seen]), jnp.asarray(data.actions[:seen])
    progress = tqdm(desc="candidates", total=args.candidate_steps, initial=step, unit="step", disable=args.quiet)
    while step < args.candidate_steps:
        block = min(GRADIENT_BLOCK, args.candidate_steps - step)
        states, losses = update(states, observations, actions, block)
        step, loss = step + block, float(jnp.mean(losses))
        if not math.isfinite(loss):
            sys.exit(f"error: the candidate loss is {loss} at step {step}: lower --candidate-learning-rate")
        log.add_scalar("candidates/loss", loss, step)
        temperature = annealed_temperature(step, args.temperature_start, args.temperature, args.candidate_steps)
        log.add_scalar("candidates/temperature", float(temperature), step)
        progress.set_postfix(loss=f"{loss:.5f}", refresh=False)
        progress.update(block)
        if step % (20 * GRADIENT_BLOCK) == 0 or signals:
            log.flush()  # a kill loses what is not written, and a resumed run does not log it again
            save_arrays(unfinished, states, step=step)
            exit_if_asked(signals, run)
    progress.close()
    save_arrays(path, states.params)
    unfinished.unlink(missing_ok=True)
    return states.params


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


def init_agents(args: Args, q_network: nn.Module, optimizer: optax.GradientTransformation, obs_dim: int) -> AgentState:
    def init(key: jax.Array) -> AgentState:
        key, init_key = jax.random.split(key)
        params = q_network.init(init_key, jnp.zeros(obs_dim))
        average = params if args.ema_decay else None
        return AgentState(params, average, params, optimizer.init(params), jnp.zeros((), jnp.int32), key)

    agents = jax.jit(jax.vmap(init, out_axes=SEED_AXES))(seed_keys(args, 1))
    copies = [jax.tree.map(jnp.copy, tree) for tree in (agents.average_params, agents.target_params)]
    return agents._replace(average_params=copies[0], target_params=copies[1])  # an update gives its buffers away


def train_agents(
    args: Args,
    run: Path,
    env: gym.Env,
    network: nn.Module,
    candidate_params: Any,
    data: Transitions,
    indices: jax.Array,
    log: Any,
    signals: list,
) -> None:
    """The second stage: blocks of gradient steps between evaluations and checkpoints, which may stand at any step."""
    q_network, optimizer = QNetwork(args.num_actions), optax.adam(args.learning_rate)
    agents, step = init_agents(args, q_network, optimizer, data.states.shape[1]), 0
    if (run / "state.npz").exists():
        agents, meta = load_arrays(run / "state.npz", agents)
        step = meta["step"]
    update = make_cql_updates(q_network, optimizer, args)
    policy = make_greedy_policy(q_network, network, env.action_space)
    eval_envs = [make_evaluation_env(args, args.capture_video and i == 0) for i in range(args.eval_episodes)]
    progress = tqdm(desc="agent", total=args.gradient_steps, initial=step, unit="step", disable=args.quiet)
    shown, logged_time = {}, time.perf_counter()
    while True:
        if step % args.eval_every == 0 or step >= args.gradient_steps:
            results = evaluate_seeds(policy, evaluated_params(agents), candidate_params, eval_envs)
            save_arrays(run / "agent.npz", evaluated_params(agents), step=step)
            table = score_table(args, results)
            write_score_table(args, run, step, table, log)
            shown |= {"return": f"{table['episodic_return'].mean():.1f}"}
            shown |= {"score": f"{table['normalized_score'].mean():.1f}"}
            if results[0].frames:
                fps = env.metadata.get("render_fps", 30)
                write_video(run / "videos" / f"step_{step}.mp4", results[0].frames, fps)
            logged_time = time.perf_counter()
        if step >= args.gradient_steps:
            break
        to_next = [every - step % every for every in (args.eval_every, args.checkpoint_every)]
        block = min(GRADIENT_BLOCK, args.gradient_steps - step, *to_next)
        agents, metrics = update(agents, data, indices, block)
        step, metrics = step + block, np.asarray(metrics).mean(axis=0)
        if not np.isfinite(metrics).all():
            sys.exit(f"error: the loss is {metrics[0]} at step {step}: lower --learning-rate")
        for tag, value in zip(("q_loss", "conservative", "bellman", "q_value"), metrics):
            log.add_scalar(f"losses/{tag}", float(value), step)
        log.add_scalar("charts/SPS", block / (time.perf_counter() - logged_time), step)
        logged_time = time.perf_counter()
        shown |= {"loss": f"{metrics[0]:.3f}"}
        progress.set_postfix(shown, refresh=False)
        progress.update(block)
        if step % args.checkpoint_every == 0 or step == args.gradient_steps or signals:
            log.flush()  # a kill loses what is not written, and a resumed run does not log it again
            save_arrays(run / "state.npz", agents, step=step)
            exit_if_asked(signals, run)
    progress.set_postfix(shown)
    progress.close()


def train(args: Args) -> Path:
    """Whatever can be wrong with the input is found before the run folder is made."""
    check_offline_args(args)
    data, env = load_dataset(args)
    args.temperature_start = start_temperature(args, data.actions)
    learned_from(args, data)
    network = CandidateNetwork(args.num_actions, env.action_space.shape[0], torso=(256, 256, 256))
    if args.candidates_from and not args.resume:  # a run has a copy of its own
        load_seeds(Path(args.candidates_from) / "candidates.npz", network, data.observations.shape[1], args.num_seeds)
    signals = catch_signals()
    run, warning = open_run_folder(args, None)
    log = make_log(args, run, warning)
    describe_data(args, data, log)
    params = train_all_candidates(args, run, network, data, log, signals)
    indices = [discretise(args, network, of_seed(params, i), data, log) for i in range(args.num_seeds)]
    picture_candidates(args, run, network, of_seed(params, 0), data, env.action_space, log)
    transitions = make_transitions(data, args.n_step, args.gamma)
    del data  # from here on every state is in memory once
    train_agents(args, run, env, network, params, transitions, jnp.asarray(np.stack(indices)), log, signals)
    log.close()
    if not args.quiet:
        print(f"done; evaluate with: python {Path(__file__).name} --evaluate {run}")
    return run


def evaluate_offline_run(args: Args) -> None:
    """Prints every seed's return and normalised score at the last evaluation's parameters, then mean and deviation."""
    check_offline_args(args)
    run = Path(args.evaluate)
    saved = load_args(run)
    envs = [make_evaluation_env(saved, args.capture_video and i < 3) for i in range(args.eval_episodes)]
    obs_dim, box = envs[0].observation_space.shape[0], envs[0].action_space
    network = CandidateNetwork(saved.num_actions, len(box.low), torso=(256, 256, 256))
    q_network = QNetwork(saved.num_actions)
    candidate_params, _ = load_seeds(run / "candidates.npz", network, obs_dim, saved.num_seeds)
    q_params, meta = load_seeds(run / "agent.npz", q_network, obs_dim, saved.num_seeds)
    results = evaluate_seeds(make_greedy_policy(q_network, network, box), q_params, candidate_params, envs)
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


def require_end_ahead(run: Path, argument: str, end: int) -> None:
    """A resumed run may be given another end, but none that its checkpoint has passed."""
    path = run / "state.npz"
    if path.exists():
        with explained(f"{path} is not a whole checkpoint"), np.load(path, allow_pickle=False) as file:
            step = json.loads(file["meta"].tobytes())["step"]
        require(step <= end, f"{run} is at step {step} already: give {argument} no less")


def resumed_offline_args(args: Args) -> Args:
    """The run's own arguments; only what does not change the learning may be given anew."""
    saved = load_args(Path(args.resume))
    changed = tyro.cli(Args, default=dataclasses.replace(saved, resume=args.resume))
    free = {"resume", "gradient_steps", "eval_every", "checkpoint_every", "capture_video", "track", "quiet"}
    for field in dataclasses.fields(Args):
        same = field.name in free or getattr(changed, field.name) == getattr(saved, field.name)
        require(same, f"--{field.name.replace('_', '-')} cannot be changed by --resume: start a new run")
    require_end_ahead(Path(args.resume), "--gradient-steps", changed.gradient_steps)
    return changed


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    try:
        if args.evaluate:
            evaluate_offline_run(args)
        else:
            train(resumed_offline_args(args) if args.resume else args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
