"""Records datasets for Minari: rollouts of a run, play by a script, play by a person.

    python record.py rollouts runs/AdroitHandDoor-v1__aquadqn__1__1700000000 --dataset-id me/door/agent-v0
    python record.py rollouts runs/Hopper-v5__sac__1__1700000000 --dataset-id me/hopper/medium-v0
    python record.py play
    python record.py person --device gamepad

`rollouts` keeps the successful episodes of an aquadqn.py run, or makes two datasets of a sac_baselines.py run: its
replay and rollouts of its policy. `play` and `person` record somebody who plays with everything on RoboDesk's desk
without any task in mind, which is what aquaplay.py learns from. A dataset gets its place when it is whole.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import gymnasium as gym
import h5py
import jax
import jax.numpy as jnp
import minari
import numpy as np
import tyro
from minari.data_collector import EpisodeBuffer
from minari.namespace import create_namespace, list_local_namespaces
from minari.storage import get_dataset_path
from tqdm import tqdm

import aquadqn
import aquaplay
import sac_baselines
from aquaplay import (
    EVALUATION_SEED,
    PLAY,
    UserError,
    as_user_error,
    errors_on_one_line,
    render,
    write_video,
)
from robodesk_env import BASE_TASKS, TASKS, Desk

FIRST_SEED = 1_000_000_000  # of AQuaDQN's rollouts: neither training nor evaluation starts an episode from these
TRIES_PER_EPISODE = 20  # an agent that fails more often than this is not worth recording
MINARI_ROOT = "MINARI_DATASETS_PATH"  # the variable that tells Minari where its datasets are

# D4RL's returns of a random and of an expert policy, between which a score is normalised; of its older task versions.
REFERENCE_SCORES = {
    "HalfCheetah": (-280.178953, 12135.0),
    "Hopper": (-20.272305, 3234.3),
    "Walker2d": (1.629008, 4592.3),
}


@dataclasses.dataclass
class RolloutsArgs:
    """Successful episodes of an AQuaDQN agent, or the replay and rollouts of a SAC, SACfD or GAIL agent.

    AQuaDQN explores as in training, and only episodes that reach the goal are kept: observations, actions and the
    environment's own (dense) rewards in float32, compressed, with `success` of every step in the infos. The others
    sample their actions; <name>-replay-v<N> gets what the run had stored when its latest agent was evaluated.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """run folder of aquadqn.py or sac_baselines.py"""
    dataset_id: str
    """Minari id of the new dataset"""
    root: Path | None = None
    """folder of Minari datasets that gets the new one; default: Minari's own"""
    episodes: int = 25
    """AQuaDQN: successful episodes to keep"""
    epsilon: float = 0.1
    """AQuaDQN: probability of a random candidate"""
    steps: int = 100_000
    """the others: steps of the rollouts (not from the paper)"""
    quiet: bool = False
    """no progress bar"""


@dataclasses.dataclass
class PlayArgs:
    """Play on the desk by a script. A dataset that was recorded before with the same settings is found again."""

    dataset_id: str = PLAY
    """name of the new dataset"""
    num_episodes: int = 50
    """episodes"""
    episode_steps: int = 9_000
    """steps of an episode, 50 per second: three minutes"""
    seed: int = 1
    """seed of the desk and of the script; the same data whatever the number of processes"""
    task: str | None = None
    """store reward and success of this task too, so that the data can serve as demonstrations; default: neither"""
    robodesk_rewards: Literal["upstream", "fixed"] = "fixed"
    """as in training; also decides what counts as success in the table that is printed"""
    capture_video: bool = False
    """write the first two minutes as play.mp4 into the current folder, also if the data was recorded before"""
    quiet: bool = False
    """no progress bar"""


@dataclasses.dataclass
class PersonArgs(PlayArgs):
    """Play on the desk by a person, who needs a screen and pygame (pip install pygame)."""

    dataset_id: str = "human/robodesk/play-v0"
    """name of the new dataset"""
    device: Literal["keyboard", "gamepad"] = "keyboard"
    """what the person plays with"""


def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)


# --------------------------------------------------------------------------------------------------- datasets


def check_dataset_id(dataset_id: str) -> None:
    well_formed = re.fullmatch(r"([-\w][-\w/]*[-\w]/)?[-\w]+-v\d+", dataset_id)
    require(
        well_formed,
        f"{dataset_id!r} is not a Minari id: give --dataset-id one like me/hopper/medium-v0",
    )


def require_new(dataset_id: str) -> None:
    exists = Path(get_dataset_path(dataset_id)).exists()
    require(
        not exists,
        f"dataset {dataset_id!r} exists already: delete it first, or give --dataset-id another id",
    )


@contextlib.contextmanager
def minari_root(folder: Path | str) -> Iterator[None]:
    """Minari's datasets are in this folder for a while."""
    before = os.environ.get(MINARI_ROOT)
    os.environ[MINARI_ROOT] = str(folder)
    try:
        yield
    finally:
        del os.environ[MINARI_ROOT]
        if before is not None:
            os.environ[MINARI_ROOT] = before


def require_space(folder: str, buffers: list[EpisodeBuffer]) -> None:
    """HDF5 answers a full disk with pages of tracebacks. So the space is taken once before it writes."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves([vars(buffer) for buffer in buffers])]
    copies = 2  # as written, and compressed
    largest_header = 50_000  # of an episode
    size = copies * (sum(array.nbytes for array in arrays) + largest_header * len(buffers))
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)


@contextlib.contextmanager
def whole_dataset(dataset_id: str, buffers: list[EpisodeBuffer]) -> Iterator[None]:
    """Minari writes a dataset piece by piece. Here it does so in a hidden folder, and the dataset gets its place once
    it is whole: a kill leaves nothing that looks like one."""
    root = get_dataset_path()
    namespace = dataset_id.rpartition("/")[0]
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=root) as hidden:
        require_space(hidden, buffers)
        with minari_root(hidden):
            yield
        if namespace and namespace not in list_local_namespaces():
            create_namespace(namespace)
        (Path(hidden) / dataset_id).rename(root / dataset_id)


# --------------------------------------------------------------------------------------------------- rollouts


def load_policy(run: Path, env: gym.Env) -> Callable:
    """The run's agent as a function of an observation and a key."""
    args, obs_dim = aquadqn.load_args(run), env.observation_space.shape[0]
    network = aquadqn.make_candidate_network(args, env.action_space.shape[0])
    q_network = aquadqn.QNetwork(args.num_actions)
    template = jax.eval_shape(q_network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    q_params, _ = aquadqn.load_arrays(run / "agent.npz", template)
    candidate_params = aquadqn.load_candidates(run, network, obs_dim)
    policy = aquadqn.make_policy(q_network, network, env.action_space)
    return lambda observation, key, epsilon: policy(
        q_params, candidate_params, observation, key, epsilon=epsilon
    )


def roll_out_episode(env: gym.Env, policy: Callable, seed: int, epsilon: float) -> EpisodeBuffer:
    observation, _ = env.reset(seed=seed)
    key, observations = jax.random.PRNGKey(seed), [np.asarray(observation, np.float32)]
    actions, rewards, terminations, truncations, successes = [], [], [], [], [False]
    while not (terminations and (terminations[-1] or truncations[-1])):
        action, _, key = policy(observations[-1], key, epsilon)
        action = np.asarray(action)
        observation, reward, terminated, truncated, info = env.step(action)
        observations.append(np.asarray(observation, np.float32))
        for values, value in zip(
            (actions, rewards, terminations, truncations, successes),
            (action, np.float32(reward), terminated, truncated, bool(info["success"])),
        ):
            values.append(value)
    return EpisodeBuffer(
        seed=seed,
        observations=observations,
        actions=actions,
        rewards=rewards,
        terminations=terminations,
        truncations=truncations,
        infos={"success": successes},
    )


def compress(path: Path) -> None:
    """Rewrites an HDF5 file with compressed datasets."""
    smaller = path.with_suffix(".smaller")
    with h5py.File(path) as source, h5py.File(smaller, "w") as target:
        target.attrs.update(source.attrs)

        def copy(name: str, item: h5py.Group | h5py.Dataset) -> None:
            if isinstance(item, h5py.Group):
                new = target.require_group(name)
            else:
                options = (
                    {"compression": "gzip", "compression_opts": 9, "shuffle": True}
                    if item.shape
                    else {}
                )
                new = target.create_dataset(name, data=item[()], **options)
            new.attrs.update(item.attrs)

        source.visititems(copy)
    smaller.replace(path)


def record_successes(
    env: gym.Env, policy: Callable, args: RolloutsArgs
) -> tuple[list[EpisodeBuffer], int]:
    """The first successful episodes, and how many were tried for them."""
    buffers, tried, most = [], 0, TRIES_PER_EPISODE * args.episodes
    progress = tqdm(total=args.episodes, unit="episode", disable=args.quiet)
    while len(buffers) < args.episodes:
        few = f"only {len(buffers)} of {tried} episodes succeeded: train {args.run} for longer"
        require(tried < most, few)
        buffer = roll_out_episode(env, policy, FIRST_SEED + tried, args.epsilon)
        tried += 1
        if any(buffer.infos["success"]):
            buffers.append(buffer)
            progress.update()
    progress.close()
    return buffers, tried


def record_agent(args: RolloutsArgs) -> None:
    """The successful episodes of an AQuaDQN agent."""
    require_new(args.dataset_id)
    saved = aquadqn.load_args(args.run)
    env = aquadqn.make_env(dataclasses.replace(saved, reward="env"))
    buffers, tried = record_successes(env, load_policy(args.run, env), args)
    name = args.dataset_id
    with as_user_error(f"cannot write dataset {name!r}"), whole_dataset(name, buffers):
        dataset = minari.create_dataset_from_buffers(
            name,
            buffers,
            env=dataclasses.replace(
                env.unwrapped.spec, max_episode_steps=env.spec.max_episode_steps
            ),
            observation_space=gym.spaces.Box(
                -np.inf, np.inf, env.observation_space.shape, np.float32
            ),
            action_space=env.action_space,
            algorithm_name=f"AQuaDQN, epsilon {args.epsilon}, trained on {saved.dataset_id}",
            description=f"{len(buffers)} successful of {tried} episodes of {saved.env_id}",
            author="The AQuaDem in JAX authors",
            requirements=["gymnasium-robotics==1.4.2", "mujoco==3.17.0"],
        )
        compress(Path(dataset.spec.data_path) / "main_data.hdf5")
        steps = dataset.total_steps
    print(f"{name}: {len(buffers)} successful of {tried} episodes, {steps} steps")


def recording_ids(dataset_id: str) -> list[str]:
    """Of the replay and of the rollouts: a Minari id ends with its version."""
    return [re.sub(r"(-v\d+)$", r"-replay\1", dataset_id), dataset_id]


def require_flat(env: gym.Env) -> None:
    flat = isinstance(env.env.observation_space, gym.spaces.Box)
    require(flat, f"{env.spec.id} has dictionary observations: record.py needs a Box")


def roll_out_policy(
    policy: Callable, params: Any, env: gym.Env, steps: int, seed: int, quiet: bool
) -> np.ndarray:
    """Rows of a replay from the policy as it explores, episode after episode; the last one may be cut."""
    key, rows = jax.random.PRNGKey(seed), []
    observation = np.asarray(env.reset(seed=EVALUATION_SEED - 1 - seed)[0], np.float32)
    for _ in tqdm(range(steps), desc="rollouts", unit="step", disable=quiet):
        action, key = policy(params, observation, key, mode="sample")
        next_observation, reward, terminated, truncated, _ = env.step(np.asarray(action))
        ended = terminated or truncated
        step = sac_baselines.Transition(
            observation, next_observation, action, reward, terminated, ended
        )
        rows.append(sac_baselines.pack(step))
        observation = (
            sac_baselines.first_observation(env)
            if ended
            else np.asarray(next_observation, np.float32)
        )
    return np.stack(rows)


def episode_buffers(rows: np.ndarray, obs_dim: int, action_dim: int, sparse: bool) -> list:
    """Rows of a replay as Minari episodes. An episode that was still running counts as truncated."""
    template = sac_baselines.make_replay(1, obs_dim, action_dim).transitions
    buffers = []
    for episode in np.split(rows, np.flatnonzero(rows[:-1, -1]) + 1):
        steps = sac_baselines.unpack(episode, template)
        last = np.arange(len(episode)) == len(episode) - 1
        buffers.append(
            EpisodeBuffer(
                observations=np.concatenate([steps.observation, steps.next_observation[-1:]]),
                actions=steps.action,
                rewards=steps.reward,
                terminations=steps.terminated > 0,
                truncations=last & (steps.terminated == 0),
                # The sparse reward is the success; its first entry belongs to the reset.
                infos={"success": np.concatenate([[False], steps.reward > 0])} if sparse else None,
            )
        )
    return buffers


def record_replay_and_rollouts(args: RolloutsArgs) -> None:
    """Two datasets: what the run had stored when its latest agent was evaluated, and that agent's rollouts."""
    names = recording_ids(args.dataset_id)
    for name in names:
        require_new(name)
    run = args.run
    saved = sac_baselines.load_command(run)
    env = sac_baselines.make_task(saved)
    obs_dim, box = env.observation_space.shape[0], env.action_space
    require_flat(env)
    params, meta = sac_baselines.load_actor(run, env)
    row_size, path = 2 * obs_dim + len(box.low) + 3, run / "replay.f32"
    count = min(meta["step"], path.stat().st_size // (4 * row_size) if path.exists() else 0)
    require(count, f"{run} has no transitions from before its latest evaluation: train for longer")
    replay = np.fromfile(path, np.float32, count * row_size).reshape(-1, row_size)
    policy = sac_baselines.make_policy(sac_baselines.Actor(len(box.low)), box)
    rollouts = roll_out_policy(policy, params, env, args.steps, saved.seed, args.quiet)
    task = re.match(r"[A-Za-z0-9]+", env.unwrapped.spec.name)[0]
    low, high = REFERENCE_SCORES.get(task, (None, None)) if saved.reward == "env" else (None, None)
    kinds = ["replay", "rollouts of the policy"]
    for name, kind, rows in zip(names, kinds, (replay, rollouts)):
        buffers = episode_buffers(rows, obs_dim, len(box.low), saved.reward == "sparse")
        with (
            as_user_error(f"cannot write dataset {name!r}"),
            warnings.catch_warnings(),
            whole_dataset(name, buffers),
        ):
            warnings.simplefilter("ignore")  # advice for those who publish datasets
            dataset = minari.create_dataset_from_buffers(
                name,
                buffers,
                env=dataclasses.replace(
                    env.unwrapped.spec, max_episode_steps=env.spec.max_episode_steps
                ),
                observation_space=gym.spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32),
                action_space=box,
                ref_min_score=low,
                ref_max_score=high,
                algorithm_name=saved.method,
                description=f"{kind} of {run.name} at step {meta['step']}, reward {saved.reward}",
                author="AQuaDem in JAX, sac_baselines.py",
            )
            size = f"{dataset.total_episodes} episodes, {dataset.total_steps} steps"
        if not args.quiet:
            print(f"dataset {name}: {size}")


def record_rollouts(args: RolloutsArgs) -> None:
    check_dataset_id(args.dataset_id)
    for name in ("episodes", "steps"):
        require(getattr(args, name) >= 1, f"--{name} is {getattr(args, name)}: give at least 1")
    require(0 <= args.epsilon <= 1, f"--epsilon is {args.epsilon}: give a number from 0 to 1")
    with as_user_error(f"{args.run} is not a run folder"):
        saved = json.loads((args.run / "args.json").read_text())
    record_run = record_replay_and_rollouts if "method" in saved else record_agent
    with contextlib.nullcontext() if args.root is None else minari_root(args.root.resolve()):
        record_run(args)


# ------------------------------------------------------------------------------------------------------- play


Intention = tuple[np.ndarray, float, np.ndarray]
EAST, NORTH, UP = np.eye(3)  # seen from the robot: to the right, away, up


class Player:
    """Somebody who plays with the desk: picks a thing and something to do with it, again and again.

    It sees where things are and moves the fingertips towards them as a person with a gamepad would: fast when far,
    slow when near, with a filtered, wandering hand, an aim that is off by some millimetres, and pauses. It often fails.
    It knows nothing of tasks and rewards. The hand's tilt cannot be commanded (the action has no room for it), and
    drifts. A hand that points to a side or upwards can hardly do anything, so the player notices and straightens it.

    A way to play is a generator of intentions: a place for the fingertips, how far open the fingers (-1 to 1), and the
    direction along which they should close.
    """

    FINGERTIP = 0.04  # from the end effector to the point between the fingertips, along the hand
    BASE, REACH = np.array([0.0, 0.1]), 0.95  # of the arm, seen from above
    TABLE = 0.76  # height
    HALF_SIZES = {
        "ball": np.array([0.04, 0.04, 0.04]),
        "upright_block": np.array([0.023, 0.023, 0.09]),
        "flat_block": np.array([0.08, 0.035, 0.015]),
    }
    stopped = False  # it never has enough

    def __init__(self, desk: Desk, random: np.random.Generator):
        self.desk, self.random = desk, random
        self.pose = desk.data.site_xmat[desk.site].reshape(
            3, 3
        )  # a view; columns: across, closing direction, forward
        self.play, self.filtered, self.wander = iter(()), np.zeros(5), np.zeros(5)
        self.thing: str | None = None  # what it is playing with

    def tip(self) -> np.ndarray:
        return self.desk.hand + self.FINGERTIP * self.pose[:, 2]

    def act(self) -> np.ndarray:
        intention = next(self.play, None)
        if intention is None:
            self.pace, self.play = self.random.uniform(0.8, 1.0), self.choose()
            return self.act()
        place, fingers, closing = intention
        away = place[:2] - self.BASE  # a stretched arm gets stuck: stay within reach
        place = np.array([*self.BASE + away * min(1, self.REACH / np.linalg.norm(away)), place[2]])
        velocity = (place - self.tip()) / 0.02  # full speed until 2 cm before the place
        velocity = np.clip(velocity, -self.pace, self.pace)
        across, along = self.pose[:, 0] @ closing, self.pose[:, 1] @ closing
        turn = math.atan2(
            -across * np.sign(along or 1), abs(along)
        )  # the fingers are alike: at most a quarter turn
        if abs(self.desk.data.qpos[6] + turn) > 2.8:
            turn -= math.copysign(
                math.pi, turn
            )  # the wrist would meet its limit: the other way round
        self.wander += 0.1 * (0.5 * self.random.normal(size=5) - self.wander)
        wanted = np.array([*velocity, np.clip(2 * turn, -1, 1), fingers])
        self.filtered += 0.25 * (wanted + self.wander - self.filtered)
        return np.clip(self.filtered, -1, 1).astype(np.float32)

    def choose(self) -> Iterator[Intention]:
        """What to play next, often with the same thing; one that fell off the table is out of the game."""
        desk, random = self.desk, self.random
        if self.crooked():
            return self.straighten()
        things = [name for name in desk.OBJECTS if desk.places[name][2] > 0.7]
        if self.thing not in things or random.random() < 0.3:
            self.thing = str(random.choice(things)) if things else None
        ways: list[tuple[float, Callable]] = [
            (1, self.press),
            (1, self.move_slide),
            (1, self.move_drawer),
            (4 if things else 0, self.carry),
            (4 if things else 0, self.shove),
            (0.5, self.rest),
        ]
        weights = np.array([weight for weight, _ in ways])
        _, way = ways[random.choice(len(ways), p=weights / weights.sum())]
        return way()

    # How the hand moves

    def reach(
        self,
        place: Callable[[], np.ndarray],
        fingers: float,
        closing: np.ndarray,
        patience: int = 250,
        near: float = 0.015,
    ) -> Iterator[Intention]:
        """Until the fingertips are there, hardly come nearer, or patience ends; the aim is a little off."""
        off, best = self.random.normal(0, 0.004, 3), math.inf
        for step in range(patience):
            goal = place() + off
            yield goal, fingers, closing
            distance = math.dist(goal, self.tip())
            if distance < near:
                return
            if step % 40 == 39:
                if best - distance < 0.005:
                    return
                best = distance

    def go(
        self,
        place: np.ndarray,
        fingers: float,
        closing: np.ndarray = EAST,
        patience: int = 250,
        near: float = 0.015,
    ) -> Iterator[Intention]:
        yield from self.reach(lambda: place, fingers, closing, patience, near)

    def stay(self, steps: int, fingers: float, closing: np.ndarray = EAST) -> Iterator[Intention]:
        place = self.tip()
        for _ in range(steps):
            yield place, fingers, closing

    def come_over(
        self, place: np.ndarray, fingers: float, closing: np.ndarray = EAST
    ) -> Iterator[Intention]:
        """Up, and across above the things on the table; from under the table or out of the shelf, back first."""
        x, y, z = self.tip()
        height = max(self.random.uniform(0.88, 1.0), place[2])
        if y > 0.85:
            yield from self.go(np.array([x, 0.7, z]), fingers, closing, near=0.05)
        if z < 0.75 and y > 0.45:
            yield from self.go(np.array([x, 0.44, z]), fingers, closing, patience=100, near=0.03)
        if z < 0.85:
            x, y, _ = self.tip()
            yield from self.go(
                np.array([x, min(y, 0.7), height]), fingers, closing, patience=150, near=0.04
            )
        yield from self.go(np.array([place[0], place[1], height]), fingers, closing, near=0.04)

    def grasp(self, place: Callable[[], np.ndarray], closing: np.ndarray) -> Iterator[Intention]:
        """Open fingers come to the place along the hand, and close."""
        yield from self.come_over(place() - 0.12 * NORTH, 1, closing)
        yield from self.reach(lambda: place() - 0.1 * self.pose[:, 2], 1, closing, near=0.02)
        yield from self.reach(place, 1, closing, patience=120, near=0.012)
        yield from self.stay(int(self.random.integers(25, 45)), -1, closing)

    def sideways(self) -> float:
        """How far the hand points to the right, seen from the arm's base."""
        x, y = self.tip()[:2] - self.BASE
        right = np.array([y, -x]) / math.hypot(x, y)
        return float(right @ self.pose[:2, 2])

    def crooked(self) -> bool:
        return abs(self.sideways()) > 0.6 or self.pose[2, 2] > 0.2

    def straighten(self) -> Iterator[Intention]:
        """A round in front of the chest, begun where the hand points to: the arm unwinds on the way."""
        side = math.copysign(1.0, self.sideways())
        for x, y in ((0.4, 0.5), (0.3, 0.3), (-0.3, 0.3), (-0.4, 0.5), (0.0, 0.6)):
            yield from self.go(np.array([side * x, y, 1.0]), -1, near=0.05)

    # What can be done with the things

    def rest(self) -> Iterator[Intention]:
        yield from self.stay(int(self.random.integers(10, 60)), self.random.uniform(-1, 1))

    def press(self) -> Iterator[Intention]:
        button = self.random.choice(["red_button", "green_button", "blue_button"])
        place = self.desk.places[button] + [0, 0, 0.03]
        yield from self.come_over(place, -1)
        yield from self.go(place + 0.05 * UP, -1, near=0.02)
        yield from self.go(
            place - 0.03 * UP, -1, patience=int(self.random.integers(40, 120)), near=0.0
        )
        yield from self.go(place + 0.06 * UP, -1, near=0.03)

    def move_slide(self) -> Iterator[Intention]:
        """Open or close it by its handle, an upright bar."""
        handle, position = self.desk.slide_handle, self.desk.data.qpos[10:11]
        goal = self.random.uniform(0.5, 0.6) if position < 0.3 else self.random.uniform(0.0, 0.1)
        height = self.random.uniform(-0.04, 0.04)
        self.pace = 1.0  # it is heavy
        yield from self.grasp(lambda: handle + height * UP, EAST)
        for _ in range(1000):
            towards = math.copysign(0.05, goal - position[0])
            yield handle + [towards, 0.0, height], -1.0, EAST
            if abs(position[0] - goal) < 0.02 or math.dist(handle, self.tip()) > 0.12:
                break
        yield from self.stay(15, 1)
        yield from self.go(self.tip() - 0.12 * NORTH, 1, near=0.03)

    def move_drawer(self) -> Iterator[Intention]:
        """Open or close it: closed fingers come down between its front and its handle, a level bar."""
        position, x = self.desk.data.qpos[9:10], self.random.uniform(-0.04, 0.04)
        goal = self.random.uniform(-0.32, -0.24) if position > -0.15 else 0.0

        def inside(height: float) -> np.ndarray:
            return np.array([x, 0.53 + position[0], height])

        self.pace = 1.0  # it is heavy
        yield from self.come_over(inside(0.88) + 0.13 * NORTH, -1)
        yield from self.go(np.array([x, 0.66, 0.82]), -1, near=0.03)  # here the hand bows
        yield from self.go(inside(0.8), -1, near=0.03)
        yield from self.reach(lambda: inside(0.64), -1, EAST, patience=100)
        for _ in range(400):
            yield inside(0.635) + math.copysign(0.06, goal - position[0]) * NORTH, -1.0, EAST
            if abs(position[0] - goal) < 0.02 or self.tip()[2] > 0.72:
                break
        yield from self.go(inside(0.82), -1, near=0.04)

    def extent(self) -> np.ndarray:
        """Half of the thing's size along east, north and up."""
        if self.thing == "ball":
            return self.HALF_SIZES["ball"]
        axes = self.desk.data.body(self.thing).xmat.reshape(3, 3)
        return np.abs(axes) @ self.HALF_SIZES[self.thing]

    def narrow_side(self) -> np.ndarray:
        """The level direction in which the fingers fit round the thing best."""
        if self.thing == "ball":
            return EAST
        axes = self.desk.data.body(self.thing).xmat.reshape(3, 3)
        level = [axis for axis in range(3) if abs(axes[2, axis]) < 0.7]
        return axes[:, min(level, key=lambda axis: self.HALF_SIZES[self.thing][axis])].copy()

    def somewhere(self, chances: list[float]) -> np.ndarray:
        """The table, the other block, the shelf, the bin, beyond the table's edge."""
        random = self.random
        block = "upright_block" if self.thing == "flat_block" else "flat_block"
        places = [
            (random.uniform(-0.4, 0.45), random.uniform(0.62, 0.8), 0.85),
            self.desk.places[block] + 0.06 * UP,
            (random.uniform(0.22, 0.35), 1.05, 0.85),
            (0.4, 0.5, 0.85),
            (random.uniform(-0.3, 0.2), 0.48, 0.85),
        ]
        return np.array(places[random.choice(5, p=chances)])

    def carry(self) -> Iterator[Intention]:
        """Grasp the thing, lift it, carry it somewhere and let go."""
        random, place, closing = self.random, self.desk.places[self.thing], self.narrow_side()
        if abs(closing @ self.pose[:, 2]) > 0.6:
            return (yield from self.shove())  # one finger would have to be under the table
        off_centre = random.uniform(-0.3, 0.6) * max(self.extent()[2] - 0.015, 0) * UP
        if self.thing == "ball":
            off_centre = np.array(
                [0, 0.006, -0.012]
            )  # as wide as the open hand: it is taken below its middle
        yield from self.grasp(lambda: place + off_centre, closing)
        yield from self.go(self.tip() + random.uniform(0.05, 0.15) * UP, -1, closing, near=0.02)
        if self.desk.data.qpos[7:9].sum() < 0.02:
            return  # nothing in the hand
        below = self.tip()[2] - place[2]  # what hangs down from the fingers
        target = self.somewhere([0.2, 0.35, 0.1, 0.1, 0.25]) + below * UP
        yield from self.go(target + 0.05 * UP, -1, closing, patience=400, near=0.03)
        yield from self.go(target, -1, closing, patience=80, near=0.02)
        yield from self.stay(25, 1, closing)
        yield from self.go(self.tip() + [0, -0.05, 0.1], 1, closing, near=0.03)

    def shove(self) -> Iterator[Intention]:
        """Push or pull the thing somewhere with closed fingers, from behind as seen from there."""
        random, place = self.random, self.desk.places[self.thing]
        target = self.somewhere([0.2, 0.2, 0.2, 0.2, 0.2])
        height = random.uniform(-0.5, 0.8)  # of its half

        def way() -> np.ndarray:
            direction = (target - place) * [1, 1, 0]
            return direction / max(np.linalg.norm(direction), 1e-6)

        def touching_height() -> float:
            return max(place[2] + height * self.extent()[2], self.TABLE + 0.012)

        behind = place - (self.extent() @ np.abs(way()) + 0.035) * way()
        start = np.array([*behind[:2], touching_height()])
        yield from self.come_over(start, -1)
        yield from self.go(start + 0.08 * UP, -1, near=0.03)
        yield from self.go(start, -1)
        for _ in range(int(random.integers(300, 700))):
            offset = (self.tip() - place) * [1, 1, 0]
            beside = offset - (offset @ way()) * way()  # from the line along which it should move
            goal = place + 0.05 * way() - 2 * beside
            yield np.array([*goal[:2], touching_height()]), -1.0, EAST
            arrived = math.dist(place[:2], target[:2]) < 0.03
            if arrived or place[2] < 0.7 or np.linalg.norm(offset) > 0.2:
                break
        yield from self.go(self.tip() + [0, -0.05, 0.1], -1, near=0.04)


class PlayEpisode(NamedTuple):
    observations: np.ndarray  # (T + 1, 76)
    actions: np.ndarray  # (T, 5)
    rewards: np.ndarray  # (T,) of --task, else 0
    successes: np.ndarray  # (T + 1,) of --task; the first is the reset's
    reached: list[str]  # tasks whose criterion was met at some step; the player does not know


class Person:
    """A person at a gamepad or a keyboard, with the desk on the screen.

    Gamepad: left stick right and away, right stick up and wrist, right trigger or button A closes the fingers.
    Keyboard: arrows right and away, W and S up and down, A and D wrist, space closes the fingers. Escape stops.
    """

    def __init__(self, desk: Desk, device: str):
        with as_user_error("a person needs pygame (pip install pygame)"):
            os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
            import pygame
        self.pygame, self.desk, self.device, self.stopped = pygame, desk, device, False
        desk.render_mode = "rgb_array"
        screens = [
            os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
        ]
        require(
            sys.platform != "linux" or any(screens),
            "no screen to show the desk on: run this at a desktop",
        )
        with as_user_error("no screen to show the desk on"):
            pygame.display.init()
            self.screen = pygame.display.set_mode((960, 720))
        pygame.display.set_caption("RoboDesk: Escape stops")
        self.clock, self.shown = pygame.time.Clock(), 0
        if device == "gamepad":
            from pygame._sdl2 import controller  # the same names for the sticks of every make

            controller.init()
            require(
                controller.get_count(), "no gamepad found: plug one in, or use --device keyboard"
            )
            self.pad = controller.Controller(0)

    def act(self) -> np.ndarray:
        pygame = self.pygame
        for event in pygame.event.get():
            escape = event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE
            self.stopped = self.stopped or escape or event.type == pygame.QUIT
        if self.shown % 2 == 0:  # 25 pictures a second
            picture = pygame.surfarray.make_surface(render(self.desk).swapaxes(0, 1))
            self.screen.blit(pygame.transform.scale(picture, self.screen.get_size()), (0, 0))
            pygame.display.flip()
        self.shown += 1
        self.clock.tick(self.desk.metadata["render_fps"])
        return (self.read_gamepad() if self.device == "gamepad" else self.read_keyboard()).astype(
            np.float32
        )

    def read_gamepad(self) -> np.ndarray:
        pygame = self.pygame
        names = ("LEFTX", "LEFTY", "RIGHTY", "RIGHTX", "TRIGGERRIGHT")
        axes = [
            self.pad.get_axis(getattr(pygame, f"CONTROLLER_AXIS_{name}")) / 32768 for name in names
        ]
        x, y, z, wrist, trigger = (
            axis if abs(axis) > 0.1 else 0.0 for axis in axes
        )  # worn sticks do not rest at 0
        closed = trigger > 0.5 or self.pad.get_button(pygame.CONTROLLER_BUTTON_A)
        return np.array([x, -y, -z, wrist, -1 if closed else 1])

    def read_keyboard(self) -> np.ndarray:
        pygame, down = self.pygame, self.pygame.key.get_pressed()

        def both(plus: int, minus: int) -> float:
            return float(down[plus]) - float(down[minus])

        moves = [
            (pygame.K_RIGHT, pygame.K_LEFT),
            (pygame.K_UP, pygame.K_DOWN),
            (pygame.K_w, pygame.K_s),
        ]
        return np.array(
            [both(*keys) for keys in [*moves, (pygame.K_d, pygame.K_a)]]
            + [1 - 2 * down[pygame.K_SPACE]]
        )


def record_person(args: PersonArgs) -> list[PlayEpisode]:
    """Episodes until there are enough or the person stops; the one that was being played is kept up to there."""
    episodes, person = [], None

    def make_player(desk: Desk, _: np.random.Generator) -> Person:
        nonlocal person
        person = Person(desk, args.device)
        return person

    while len(episodes) < args.num_episodes and not (person and person.stopped):
        episodes.append(record_episode(args, len(episodes), make_player))
        person.desk.close()
    return episodes


def episode_seeds(args: PlayArgs, index: int) -> list[int]:
    """For the desk and for the player."""
    return np.random.SeedSequence([args.seed, index]).generate_state(2).tolist()


def record_episode(
    args: PlayArgs, index: int, make_player: Callable[[Desk, np.random.Generator], Any]
) -> PlayEpisode:
    """One episode; it depends on the seed and its index only."""
    desk = Desk(args.task or "open_slide", args.robodesk_rewards)
    desk_seed, player_seed = episode_seeds(args, index)
    observation, info = desk.reset(seed=desk_seed)
    player = make_player(desk, np.random.default_rng(player_seed))
    observations, actions, rewards, successes, reached = (
        [observation],
        [],
        [],
        [info["success"]],
        set(),
    )
    while len(actions) < args.episode_steps and not player.stopped:
        actions.append(player.act())
        observation, reward, _, _, info = desk.step(actions[-1])
        observations.append(observation)
        rewards.append(reward if args.task else 0.0)
        successes.append(info["success"])
        for task in set(TASKS) - reached:
            if desk.reward_and_success(task)[1]:
                reached.add(task)
    return PlayEpisode(*map(np.array, (observations, actions, rewards, successes)), sorted(reached))


def record_script(args: PlayArgs, index: int) -> PlayEpisode:
    return record_episode(args, index, Player)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def record_all(args: PlayArgs) -> list[PlayEpisode]:
    if isinstance(args, PersonArgs):
        return record_person(args)
    processes = min(args.num_episodes, usable_cores())
    progress = {
        "desc": "play",
        "total": args.num_episodes,
        "unit": "episode",
        "disable": args.quiet,
    }
    if processes == 1:
        return [record_script(args, index) for index in tqdm(range(args.num_episodes), **progress)]
    context = multiprocessing.get_context("spawn")  # JAX does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        return list(
            tqdm(
                pool.map(functools.partial(record_script, args), range(args.num_episodes)),
                **progress,
            )
        )


def make_desk(args: PlayArgs, render: bool = False) -> gym.Env:
    desk = aquaplay.Args(task=args.task or "open_slide", robodesk_rewards=args.robodesk_rewards)
    aquaplay.check_task(desk)
    return aquaplay.make_env(desk, render)


def record_play(args: PlayArgs) -> str:
    """Records a dataset, or finds the one that was recorded before; prints how often each task's goal was reached."""
    for name in ("num_episodes", "episode_steps"):
        require(
            getattr(args, name) >= 1,
            f"--{name.replace('_', '-')} is {getattr(args, name)}: give at least 1",
        )
    require(
        0 <= args.seed < EVALUATION_SEED,
        f"--seed is {args.seed}: give a number from 0 to {EVALUATION_SEED - 1}",
    )
    desk = make_desk(args).unwrapped
    dataset_id = args.dataset_id
    check_dataset_id(dataset_id)
    settings = {"device": "script", **dataclasses.asdict(args)}
    for name in ("dataset_id", "capture_video", "quiet"):
        del settings[name]
    try:
        with contextlib.suppress(FileNotFoundError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = minari.load_dataset(dataset_id)
            metadata = dataset.storage.metadata
            other = f"dataset {dataset_id!r} was recorded with other settings: name a new one with --dataset-id"
            require(metadata.get("play_settings") == settings, other)
            print(f"{dataset_id} was recorded before", file=sys.stderr)
            print_reached(metadata["play_reached"], dataset.total_episodes)
            if args.capture_video:
                film(args, dataset[0].actions)
            return dataset_id
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"cannot read dataset {dataset_id!r}: {error}") from None
    episodes = record_all(args)
    buffers = []
    for index, episode in enumerate(episodes):
        ends = np.arange(len(episode.actions)) == len(episode.actions) - 1
        infos = {"success": episode.successes} if args.task else None
        fields = (
            episode.observations,
            episode.actions,
            episode.rewards,
            np.zeros_like(ends),
            ends,
            infos,
        )
        buffers.append(EpisodeBuffer(index, None, None, *fields))
    with (
        warnings.catch_warnings(),
        as_user_error(f"cannot write dataset {dataset_id!r}"),
        whole_dataset(dataset_id, buffers),
    ):
        warnings.simplefilter("ignore")  # advice for those who publish datasets
        dataset = minari.create_dataset_from_buffers(
            dataset_id,
            buffers,
            action_space=desk.action_space,
            observation_space=desk.observation_space,
        )
        reached = {task: sum(task in episode.reached for episode in episodes) for task in TASKS}
        dataset.storage.update_metadata({"play_settings": settings, "play_reached": reached})
    print_reached(reached, len(episodes))
    if args.capture_video:
        film(args, episodes[0].actions)
    return dataset_id


def film(args: PlayArgs, actions: np.ndarray) -> None:
    """The beginning of the first episode once more, in pictures: equal seeds and actions give equal episodes."""
    env, frames = make_desk(args, render=True), []
    env.reset(seed=episode_seeds(args, 0)[0])
    for step, action in enumerate(
        tqdm(actions[:6000], desc="video", unit="step", disable=args.quiet)
    ):
        env.step(action)
        if step % 5 == 0:
            frames.append(render(env))
    env.close()
    write_video(Path("play.mp4"), frames, fps=env.metadata["render_fps"] // 5)


def print_reached(reached: dict[str, int], episodes: int) -> None:
    base = sum(reached[task] > 0 for task in BASE_TASKS)
    print(
        f"goals reached by chance, in how many of {episodes} episodes ({base} of the 9 base tasks):"
    )
    for task, count in reached.items():
        print(f"  {task:26}{count:4}{'' if task in BASE_TASKS else '  (not a base task)'}")


# ------------------------------------------------------------------------------------------------ command line


Command = (
    Annotated[RolloutsArgs, tyro.conf.subcommand("rollouts")]
    | Annotated[PlayArgs, tyro.conf.subcommand("play")]
    | Annotated[PersonArgs, tyro.conf.subcommand("person")]
)


def main() -> None:
    args = tyro.cli(Command, description=__doc__)
    with errors_on_one_line():
        try:
            if isinstance(args, RolloutsArgs):
                record_rollouts(args)
            else:
                record_play(args)
        except (aquadqn.UserError, sac_baselines.UserError) as error:
            raise UserError(error) from None


if __name__ == "__main__":
    main()
