"""How fast these scripts are beside the libraries that one would use instead, on the same work, in turn, in one run.

    python benchmarks/peers.py                          # every row, about 15 minutes on two idle cores
    python benchmarks/peers.py --rows dqn sac           # some of them
    python benchmarks/peers.py --scale 0.02 --rounds 1  # does everything start? (its numbers mean nothing)
    python benchmarks/peers.py --install-only           # makes the peers' virtual environments, 6 GB

The peers live in virtual environments of their own (--cache); nothing of them is in requirements.txt, and what cannot
be installed is left out with the reason. Each side of a row is a process that stays alive and does a number of steps
when asked to. The sides take turns, so that whatever else the machine does falls on all of them; start-up, compilation
and the first turn do not count. Everything runs on the CPU, with the cores that this process may use: `taskset -c 0`
for one.

A ratio is the peer's time over ours in the same round: above 1, ours is faster. Printed are its median over the rounds
and its smallest and largest value; --out names the JSON file that has everything.
"""

import argparse
import contextlib
import datetime
import io
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
MUJOCO = ["gymnasium[mujoco]==1.4.0", "gymnasium-robotics==1.4.2", "mujoco==3.17.0"]
TRANSPORT = ["POT==0.9.7.post1", "geomloss==0.3.1", "h5py"]
ENVIRONMENTS = {  # PyTorch comes first and without CUDA; the rest then has what it needs of it
    "sb": [TORCH, "sbx-rl==0.28.0", "stable-baselines3==2.9.2", *MUJOCO, *TRANSPORT],
    "imitation": [TORCH, "imitation==1.0.1"],
    "d3rlpy": [TORCH, "d3rlpy==2.8.1"],
    "envpool": ["envpool==1.2.5", *MUJOCO],
    "desk": [
        "robodesk==1.0.0",
        "pillow",
        "dm_control==1.0.50",
        "gymnasium==1.4.0",
        "mujoco==3.17.0",
    ],
}

DOOR = "AdroitHandDoor-v1"
OBS_DIM, ACTION_DIM, DEMO_STEPS = 39, 28, 6729  # of Door and its human demonstrations
BATCH = 256
LEARNING_STARTS = 500
REPLAY = 200_000
FOREVER = 10**9


# ================================================================================================
# A child process: the clock, and the work of every side. Only this part runs in a peer's Python.
# ================================================================================================


class Clock:
    """A number of steps comes in on a line, the seconds that they took go out."""

    def __init__(self):
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print there
        self.left = 0
        self.busy = False
        self.value: float | None = None  # what came out, where that is comparable

    def start(self) -> int:
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        self.wall = time.perf_counter()
        self.processor = time.process_time()
        return int(line)

    def stop(self) -> None:
        wall = time.perf_counter() - self.wall
        processor = time.process_time() - self.processor
        answer = {"seconds": wall, "processor": processor, "value": self.value}
        print(json.dumps(answer), file=self.out, flush=True)

    def serve(self, turn: Callable[[int], Any]) -> None:
        while True:
            turn(self.start())
            self.stop()

    def count(self) -> None:
        """Before every step of a loop that knows nothing of turns: it waits here between them."""
        if self.left == 0:
            if self.busy:
                self.stop()
            self.busy = True
            self.left = self.start()
        self.left -= 1

    def inside(self, env: Any) -> Any:
        """The environment whose steps are counted."""
        import gymnasium as gym

        class Counted(gym.Wrapper):
            def step(this, action: Any) -> tuple:
                self.count()
                return this.env.step(action)

        return Counted(env)


def threads() -> int:
    return len(os.sched_getaffinity(0))


def door_data() -> tuple[np.ndarray, np.ndarray]:
    """Random numbers of the demonstrations' shapes: speed does not depend on them."""
    generator = np.random.default_rng(0)
    observations = generator.normal(size=(DEMO_STEPS, OBS_DIM)).astype(np.float32)
    actions = generator.uniform(-1, 1, (DEMO_STEPS, ACTION_DIM)).astype(np.float32)
    return observations, actions


# ------------------------------------------------------------------------------------------- DQN


def fixed_actions() -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (10, ACTION_DIM)).astype(np.float32)


def discretised_door() -> Any:
    import gymnasium as gym
    import gymnasium_robotics

    gym.register_envs(gymnasium_robotics)

    class Fixed(gym.ActionWrapper):
        actions = fixed_actions()
        action_space = gym.spaces.Discrete(len(actions))

        def action(self, index: int) -> np.ndarray:
            return self.actions[index]

    return Fixed(gym.make(DOOR))


def our_dqn(clock: Clock, **changes: Any) -> None:
    import jax.numpy as jnp

    import aquadqn

    args = aquadqn.Args(env_id=DOOR, reward="env", candidates="kmeans", num_actions=10, **changes)
    args.demo_ratio = 0.0
    args.total_timesteps = REPLAY
    args.learning_starts = LEARNING_STARTS
    args.eval_every = FOREVER
    args.checkpoint_every = FOREVER
    args.eval_episodes = 1
    args.quiet = True
    env = aquadqn.make_env(args)
    network = aquadqn.make_candidate_network(args, ACTION_DIM)
    candidates = {"params": {"actions": jnp.asarray(fixed_actions())}}
    demos = aquadqn.make_replay(8, OBS_DIM)._replace(count=jnp.asarray(8))
    run = aquadqn.AgentRun(args, None)
    aquadqn.train_agent(args, run, clock.inside(env), network, candidates, demos)


def their_dqn(clock: Clock, library: str, block: int) -> None:
    if library == "sbx":
        import sbx.dqn.policies
        from sbx import DQN

        sbx.dqn.policies.QNetwork = three_layers()
    else:
        from stable_baselines3 import DQN
    DQN(
        "MlpPolicy",
        clock.inside(discretised_door()),
        learning_rate=1e-4,
        batch_size=BATCH,
        buffer_size=REPLAY,
        learning_starts=LEARNING_STARTS,
        train_freq=block,
        gradient_steps=block,
        target_update_interval=100,
        exploration_initial_eps=0.1,
        exploration_final_eps=0.1,
        policy_kwargs={"net_arch": [512, 512, 256]},
        seed=1,
    ).learn(FOREVER)


def three_layers() -> Any:
    """SBX's network has two layers of the first width only: here is one with all three."""
    import flax.linen as nn

    class QNetwork(nn.Module):
        n_actions: int
        n_units: int
        activation_fn: Callable = nn.relu

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for width in (512, 512, 256):
                x = self.activation_fn(nn.Dense(width)(x))
            return nn.Dense(self.n_actions)(x)

    return QNetwork


def torch_dqn(clock: Clock, compiled: bool) -> None:
    """As CleanRL has it, with our network; compiled as LeanRL does it."""
    import torch
    from torch import nn

    torch.set_num_threads(threads())
    torch.manual_seed(1)
    generator = np.random.default_rng(1)
    env = clock.inside(discretised_door())

    def make_network() -> nn.Module:
        first = [nn.Linear(OBS_DIM, 512), nn.LayerNorm(512), nn.Tanh()]
        others = [nn.Linear(512, 512), nn.ELU(), nn.Linear(512, 256), nn.ELU(), nn.Linear(256, 10)]
        return nn.Sequential(*first, *others)

    network = make_network()
    target = make_network()
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, fused=True)

    def update(observations, actions, rewards, next_observations, continues):
        with torch.no_grad():
            wanted = rewards + 0.99 * continues * target(next_observations).max(dim=1).values
        q = network(observations).gather(1, actions[:, None]).squeeze(1)
        loss = nn.functional.huber_loss(q, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def greedy(observation):
        return network(observation).argmax()

    if compiled:
        update = torch.compile(update)
        greedy = torch.compile(greedy)

    stored = {
        "observation": np.zeros((REPLAY, OBS_DIM), np.float32),
        "action": np.zeros(REPLAY, np.int64),
        "reward": np.zeros(REPLAY, np.float32),
        "next_observation": np.zeros((REPLAY, OBS_DIM), np.float32),
        "continues": np.zeros(REPLAY, np.float32),
    }
    observation = np.asarray(env.reset(seed=1)[0], np.float32)
    step = 0
    while True:
        if generator.random() < 0.1:
            action = int(generator.integers(10))
        else:
            action = int(greedy(torch.from_numpy(observation)))
        next_observation, reward, terminated, truncated, _ = env.step(action)
        next_observation = np.asarray(next_observation, np.float32)
        new = (observation, action, reward, next_observation, 1.0 - terminated)
        for ring, value in zip(stored.values(), new):
            ring[step % REPLAY] = value
        observation = next_observation
        step += 1
        if step > LEARNING_STARTS:
            rows = generator.integers(min(step, REPLAY), size=BATCH)
            update(*(torch.from_numpy(ring[rows]) for ring in stored.values()))
            if step % 100 == 0:
                target.load_state_dict(network.state_dict())
        if terminated or truncated:
            observation = np.asarray(env.reset()[0], np.float32)


# ------------------------------------------------------------------------------------------- SAC


def our_sac(clock: Clock) -> None:
    import sac_baselines

    args = sac_baselines.SACArgs(env_id="HalfCheetah-v5", reward="env")
    args.learning_rate = 3e-4
    args.n_step = 1
    args.reward_scale = 1.0
    args.total_timesteps = REPLAY
    args.learning_starts = LEARNING_STARTS
    args.eval_every = FOREVER
    args.checkpoint_every = FOREVER
    args.eval_episodes = 1
    args.quiet = True
    env = sac_baselines.make_env(args)
    run = sac_baselines.SACRun(args, None)
    sac_baselines.train_agent(args, run, clock.inside(env), None, None)


def their_sac(clock: Clock, library: str) -> None:
    import gymnasium as gym

    if library == "sbx":
        from sbx import SAC
    else:
        from stable_baselines3 import SAC
    SAC(
        "MlpPolicy",
        clock.inside(gym.make("HalfCheetah-v5")),
        learning_rate=3e-4,
        batch_size=BATCH,
        buffer_size=REPLAY,
        learning_starts=LEARNING_STARTS,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]},
        seed=1,
    ).learn(FOREVER)


# ------------------------------------------------------------------------------------ candidates


def our_candidates(clock: Clock, num_actions: int) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    import aquadqn

    args = aquadqn.Args(num_actions=num_actions, temperature_start=1.0)
    observations, actions = map(jnp.asarray, door_data())
    network = aquadqn.make_candidate_network(args, ACTION_DIM)
    optimizer = optax.adam(args.candidate_learning_rate)
    update = aquadqn.make_candidate_update(network, optimizer, args)
    key = jax.random.PRNGKey(0)
    params = network.init(key, observations[:1])
    state = aquadqn.CandidateState(params, optimizer.init(params), jnp.asarray(0), key)

    def turn(steps: int) -> None:
        nonlocal state
        state, loss = update(state, observations, actions, steps)
        loss.block_until_ready()

    clock.serve(turn)


def torch_candidates(clock: Clock, num_actions: int, batched: bool) -> None:
    """The same network, one dropout mask for the batch as in the authors' code, the same loss."""
    import torch
    from torch import nn

    torch.set_num_threads(threads())
    torch.manual_seed(0)
    observations, actions = map(torch.from_numpy, door_data())

    def dropout(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape[1:]) >= 0.1) / 0.9

    class LoopOverHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.torso = nn.Linear(OBS_DIM, 256)
            self.hidden = nn.ModuleList(nn.Linear(256, 256) for _ in range(num_actions))
            self.out = nn.ModuleList(nn.Linear(256, ACTION_DIM) for _ in range(num_actions))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = dropout(torch.relu(self.torso(dropout(x))))
            heads = zip(self.hidden, self.out)
            return torch.stack([out(dropout(hidden(x).relu())) for hidden, out in heads], dim=1)

    class BatchedHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.torso = nn.Linear(OBS_DIM, 256)
            self.hidden = nn.Linear(256, num_actions * 256)  # all heads read the same x
            self.out = nn.Parameter(torch.randn(num_actions, 256, ACTION_DIM) / 16)
            self.bias = nn.Parameter(torch.zeros(num_actions, 1, ACTION_DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = dropout(torch.relu(self.torso(dropout(x))))
            x = dropout(torch.relu(self.hidden(x)).view(len(x), num_actions, 256))
            return torch.baddbmm(self.bias, x.transpose(0, 1), self.out).transpose(0, 1)

    network = BatchedHeads() if batched else LoopOverHeads()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-4, fused=True)
    temperature = 0.001

    def turn(steps: int) -> None:
        for _ in range(steps):
            rows = torch.randint(DEMO_STEPS, (BATCH,))
            candidates = network(observations[rows])  # (B, K, D)
            distances = ((candidates - actions[rows][:, None]) ** 2).sum(-1)
            loss = -temperature * torch.logsumexp(-distances / temperature, dim=1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    clock.serve(turn)


# ---------------------------------------------------------------------------- behavioural cloning


def our_bc(clock: Clock) -> None:
    import jax
    import jax.numpy as jnp

    import bc_mdn

    args = bc_mdn.BCArgs()
    observations, actions = map(jnp.asarray, door_data())
    network = bc_mdn.make_network(args, ACTION_DIM)
    optimizer = bc_mdn.make_optimizer(args)
    update = bc_mdn.make_update(network, optimizer, args)
    agent = bc_mdn.init_agent(network, optimizer, args, OBS_DIM)

    def turn(steps: int) -> None:
        nonlocal agent
        agent, metrics = update(agent, observations, actions, steps)
        jax.block_until_ready(metrics)

    clock.serve(turn)


def their_bc(clock: Clock) -> None:
    import gymnasium as gym
    import torch
    from imitation.algorithms.bc import BC
    from imitation.data.types import Transitions
    from stable_baselines3.common.policies import ActorCriticPolicy

    torch.set_num_threads(threads())
    observations, actions = door_data()
    following = np.roll(observations, -1, axis=0)
    ends = np.zeros(DEMO_STEPS, bool)
    infos = np.array([{}] * DEMO_STEPS)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS_DIM,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTION_DIM,), np.float32)
    policy = ActorCriticPolicy(
        observation_space,
        action_space,
        lambda _: 3e-4,
        net_arch={"pi": [256], "vf": []},
        activation_fn=torch.nn.Tanh,
    )
    trainer = BC(
        observation_space=observation_space,
        action_space=action_space,
        rng=np.random.default_rng(0),
        policy=policy,
        demonstrations=Transitions(observations, actions, infos, following, ends),
        batch_size=BATCH,
        optimizer_kwargs={"lr": 3e-4},
        device="cpu",
    )
    clock.serve(
        lambda steps: trainer.train(n_batches=steps, log_interval=FOREVER, progress_bar=False)
    )


# ------------------------------------------------------------------------------------ offline RL

HOPPER_OBS, HOPPER_ACTIONS, OFFLINE_STEPS, EPISODE = 11, 3, 100_000, 500


def offline_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Observations, candidate indices, rewards, ends."""
    generator = np.random.default_rng(0)
    observations = generator.normal(size=(OFFLINE_STEPS, HOPPER_OBS)).astype(np.float32)
    indices = generator.integers(10, size=OFFLINE_STEPS).astype(np.int32)
    rewards = generator.normal(size=OFFLINE_STEPS).astype(np.float32)
    return observations, indices, rewards, np.arange(OFFLINE_STEPS) % EPISODE == EPISODE - 1


def our_cql(clock: Clock) -> None:
    import jax
    import optax

    import aquacql

    args = aquacql.Args()
    observations, indices, rewards, ends = offline_data()
    data = aquacql.Demonstrations(
        observations,
        np.zeros((OFFLINE_STEPS, HOPPER_ACTIONS), np.float32),
        rewards,
        np.roll(observations, -1, axis=0),
        np.zeros_like(ends),
        ends,
    )
    transitions = aquacql.make_transitions(data, indices[None], args.n_step, args.gamma)
    network = aquacql.QNetwork(10)
    optimizer = optax.adam(args.learning_rate)
    update = aquacql.make_update(network, optimizer, args)
    update = aquacql.over_seeds(update, aquacql.AGENT_AXES, aquacql.DATA_AXES)  # of one seed
    agent = aquacql.init_agents(network, optimizer, args, HOPPER_OBS)

    def turn(steps: int) -> None:
        nonlocal agent
        agent, metrics = update(agent, transitions, steps)
        jax.block_until_ready(metrics)

    clock.serve(turn)


def their_cql(clock: Clock) -> None:
    """What d3rlpy's fit does in a step, without its logging, with our network."""
    import d3rlpy
    import torch
    from torch import nn

    class Encoder(nn.Sequential):
        def __init__(self, obs_dim: int):
            first = [nn.Linear(obs_dim, 512), nn.LayerNorm(512), nn.Tanh()]
            super().__init__(*first, nn.Linear(512, 512), nn.ELU(), nn.Linear(512, 256), nn.ELU())

    class Factory(d3rlpy.models.EncoderFactory):
        def create(self, observation_shape):
            return Encoder(observation_shape[0])

        @staticmethod
        def get_type() -> str:
            return "ours"

    torch.set_num_threads(threads())
    observations, indices, rewards, ends = offline_data()
    dataset = d3rlpy.dataset.MDPDataset(
        observations,
        indices,
        rewards,
        np.zeros(OFFLINE_STEPS),
        ends.astype(np.float32),
        action_space=d3rlpy.ActionSpace.DISCRETE,
        action_size=10,
    )
    config = d3rlpy.algos.DiscreteCQLConfig(
        learning_rate=1e-4,
        encoder_factory=Factory(),
        batch_size=BATCH,
        gamma=0.995,
        target_update_interval=100,
        alpha=5,
    )
    algorithm = config.create(device="cpu:0")
    algorithm.create_impl((HOPPER_OBS,), 10)

    def turn(steps: int) -> None:
        for _ in range(steps):
            algorithm.update(dataset.sample_transition_batch(BATCH))

    clock.serve(turn)


# -------------------------------------------------------------------------------------- Sinkhorn

# The same problem: states of the bundled Door demonstrations, one half of the episodes against the
# other, Euclidean cost, epsilon 0.1. The same accuracy: ours stops by its own rule; the others have
# the loosest setting whose value is within 0.1 percent of what the tightest gives, found before
# the clock starts. The answers' values are in the JSON file: ours and POT's should agree as well.
EPSILON, ACCURACY = 0.1, 1e-3


def point_sets() -> tuple[np.ndarray, np.ndarray]:
    import h5py

    path = ROOT / "demos" / "aquadem" / "door" / "agent-v0" / "data" / "main_data.hdf5"
    with h5py.File(path) as file:
        episodes = [np.asarray(file[name]["observations"]) for name in sorted(file)]
    half = len(episodes) // 2
    states = np.concatenate(episodes)
    scale = states.std(axis=0)
    scale[scale < 1e-6] = 1.0
    generator = np.random.default_rng(0)
    drawn = []
    for part in (episodes[:half], episodes[half:]):
        points = (np.concatenate(part) - states.mean(axis=0)) / scale
        drawn.append(generator.permutation(points)[:2000].astype(np.float32))
    return drawn[0], drawn[1]


def our_sinkhorn(clock: Clock) -> None:
    import jax.numpy as jnp

    import bc_mdn

    x, y = map(jnp.asarray, point_sets())
    weights = jnp.full(len(x), 1 / len(x))

    def turn(steps: int) -> None:
        for _ in range(steps):
            clock.value = float(bc_mdn.sinkhorn_cost(x, y, weights, weights, EPSILON))

    clock.serve(turn)


def loosest(settings: list[float], value_of: Callable[[float], float]) -> float:
    converged = value_of(settings[-1])
    return next(each for each in settings if abs(value_of(each) / converged - 1) < ACCURACY)


def pot_sinkhorn(clock: Clock) -> None:
    """With NumPy in float64, where its plain solver works: in logarithms it is far slower."""
    import ot

    x, y = (points.astype(np.float64) for points in point_sets())
    weights = np.full(len(x), 1 / len(x))

    def value_of(threshold: float) -> float:
        cost = ot.dist(x, y, metric="euclidean")
        plan = ot.sinkhorn(weights, weights, cost, EPSILON, stopThr=threshold, numItermax=5000)
        return float((plan * cost).sum())

    threshold = loosest([5e-4, 2e-4, 1e-4, 5e-5, 1e-5], value_of)

    def turn(steps: int) -> None:
        for _ in range(steps):
            clock.value = value_of(threshold)

    clock.serve(turn)


def geomloss_sinkhorn(clock: Clock) -> None:
    """Its value is that of the dual problem, with the entropy in it."""
    import geomloss
    import torch

    torch.set_num_threads(threads())
    x, y = map(torch.from_numpy, point_sets())

    def value_of(scaling: float) -> float:
        settings = {"p": 1, "blur": EPSILON, "scaling": scaling, "debias": False}  # epsilon = blur
        solve = geomloss.SamplesLoss("sinkhorn", backend="tensorized", **settings)
        return float(solve(x, y))

    scaling = loosest([0.3, 0.5, 0.7, 0.8, 0.9, 0.95], value_of)

    def turn(steps: int) -> None:
        for _ in range(steps):
            clock.value = value_of(scaling)

    clock.serve(turn)


# ---------------------------------------------------------------------------------- environments


def our_desk(clock: Clock) -> None:
    from robodesk_env import Desk

    desk = Desk("open_slide", "upstream")
    actions = np.random.default_rng(0).uniform(-1, 1, (500, 5))

    def turn(steps: int) -> None:
        for step in range(steps):
            if step % 500 == 0:
                desk.reset(seed=step)
            desk.step(actions[step % 500])

    clock.serve(turn)


def their_desk(clock: Clock) -> None:
    """The package's environment without its image, from the same initial states."""
    from robodesk_env import Desk

    with contextlib.redirect_stderr(io.StringIO()):  # the notice of the old gym
        from robodesk import RoboDesk

    class WithoutImage(RoboDesk):
        def render(self, mode="rgb_array", resize=True):
            return None

    ours = Desk("open_slide", "upstream")
    theirs = WithoutImage("open_slide")
    actions = np.random.default_rng(0).uniform(-1, 1, (500, 5))
    starts = []
    for step in range(0, 10_000, 500):
        ours.reset(seed=step)
        starts.append(ours.data.qpos.copy())

    def turn(steps: int) -> None:
        for step in range(steps):
            if step % 500 == 0:
                theirs.reset()
                theirs.physics.reset()
                theirs.physics.data.qpos[:] = starts[step // 500 % len(starts)]
                theirs.physics.forward()
                theirs.physics_copy.data.qpos[:] = theirs.physics.data.qpos
            theirs.step(actions[step % 500])

    clock.serve(turn)


def our_adroit(clock: Clock) -> None:
    import aquadqn

    env = aquadqn.make_env(aquadqn.Args(env_id=DOOR, reward="sparse"))
    actions = np.random.default_rng(0).uniform(-1, 1, (200, ACTION_DIM)).astype(np.float32)

    def turn(steps: int) -> None:
        for step in range(steps):
            if step % 200 == 0:
                env.reset(seed=step)
            env.step(actions[step % 200])

    clock.serve(turn)


def their_adroit(clock: Clock, count: int) -> None:
    """EnvPool's own Door; `steps` is split among `count` environments, stepped side by side."""
    import envpool

    env = envpool.make_gymnasium(DOOR, num_envs=count, seed=0, num_threads=min(count, threads()))
    env.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (200, 1, ACTION_DIM))
    actions = np.repeat(actions, count, axis=1)

    def turn(steps: int) -> None:
        for step in range(steps // count):
            env.step(actions[step % 200])

    clock.serve(turn)


# ================================================================================================
# The table's rows.
# ================================================================================================


class Side(NamedTuple):
    name: str
    environment: str  # of ENVIRONMENTS; "" is this Python
    work: Callable[..., None]
    arguments: dict[str, Any] = {}
    beside: str = ""  # our side that it is compared with
    goal: float | None = None


class Row(NamedTuple):
    work: str
    steps: int  # of a turn
    sides: list[Side]
    before: int = 0  # more steps of the first turn, which is the warm-up


def side(name: str, environment: str, work: Callable, beside: str, goal: float | None, **arguments):
    return Side(name, environment, work, arguments, beside, goal)


def ours(name: str, work: Callable, **arguments: Any) -> Side:
    return Side(name, "", work, arguments)


JAX, PYTORCH = 1.3, 2.0  # goals
DQN, M_DQN = "aquadqn.py, --q-loss dqn", "aquadqn.py, munchausen"
K10, K30 = "aquadqn.py, K = 10", "aquadqn.py, K = 30"
SAC, BC, CQL = "sac_baselines.py", "bc_mdn.py bc", "aquacql.py"

ROWS = {
    "dqn": Row(
        "DQN on Door with 10 fixed actions, 512-512-256, batch 256, one update per step",
        320,
        [
            ours(DQN, our_dqn, q_loss="dqn", n_step=1, ema_decay=0.0),
            ours(M_DQN, our_dqn, q_loss="munchausen"),  # three-step returns and the average too
            side("SBX", "sb", their_dqn, DQN, JAX, library="sbx", block=1),
            side("SBX, 8 updates every 8 steps", "sb", their_dqn, DQN, JAX, library="sbx", block=8),
            side("Stable-Baselines3", "sb", their_dqn, DQN, PYTORCH, library="sb3", block=1),
            side("PyTorch loop", "sb", torch_dqn, DQN, PYTORCH, compiled=False),
            side("PyTorch loop, compiled", "sb", torch_dqn, DQN, PYTORCH, compiled=True),
        ],
        before=LEARNING_STARTS,
    ),
    "sac": Row(
        "SAC on HalfCheetah-v5, 256-256, batch 256, one update per step",
        400,
        [
            ours(SAC, our_sac),
            side("SBX", "sb", their_sac, SAC, JAX, library="sbx"),
            side("Stable-Baselines3", "sb", their_sac, SAC, PYTORCH, library="sb3"),
        ],
        before=LEARNING_STARTS,
    ),
    "candidates": Row(
        "training of K candidates, Door's sizes, batch 256",
        100,
        [
            ours(K10, our_candidates, num_actions=10),
            side(
                "PyTorch, loop", "sb", torch_candidates, K10, PYTORCH, num_actions=10, batched=False
            ),
            side(
                "PyTorch, batched",
                "sb",
                torch_candidates,
                K10,
                PYTORCH,
                num_actions=10,
                batched=True,
            ),
            ours(K30, our_candidates, num_actions=30),
            side(
                "PyTorch, loop", "sb", torch_candidates, K30, PYTORCH, num_actions=30, batched=False
            ),
            side(
                "PyTorch, batched",
                "sb",
                torch_candidates,
                K30,
                PYTORCH,
                num_actions=30,
                batched=True,
            ),
        ],
    ),
    "bc": Row(
        "behavioural cloning, one layer of 256, batch 256",
        1000,
        [ours(BC, our_bc), side("imitation", "imitation", their_bc, BC, PYTORCH)],
    ),
    "cql": Row(
        "discrete CQL, 512-512-256, batch 256",
        200,
        [ours(CQL, our_cql), side("d3rlpy", "d3rlpy", their_cql, CQL, PYTORCH)],
    ),
    "sinkhorn": Row(
        "Sinkhorn distance, 2000 x 2000 points, 39 dimensions, same accuracy",
        2,
        [
            ours("bc_mdn.py", our_sinkhorn),
            side("POT", "sb", pot_sinkhorn, "bc_mdn.py", PYTORCH),
            side("geomloss", "sb", geomloss_sinkhorn, "bc_mdn.py", PYTORCH),
        ],
    ),
    "desk": Row(
        "RoboDesk's desk, random actions",
        3000,
        [
            ours("robodesk_env.py", our_desk),
            side("robodesk without its image", "desk", their_desk, "robodesk_env.py", None),
        ],
    ),
    "adroit": Row(
        "AdroitHandDoor-v1, random actions",
        5000,
        [
            ours("gymnasium-robotics", our_adroit),
            side("EnvPool", "envpool", their_adroit, "gymnasium-robotics", None, count=1),
            side(
                "EnvPool, 16 at once", "envpool", their_adroit, "gymnasium-robotics", None, count=16
            ),
        ],
    ),
}


def serve(row: str, number: int) -> None:
    """A child's whole life."""
    clock = Clock()
    sys.path.insert(0, str(ROOT))
    chosen = ROWS[row].sides[number]
    chosen.work(clock, **chosen.arguments)


# ================================================================================================
# The parent: environments, turns, table.
# ================================================================================================


class NotAvailable(Exception):
    pass


def environment_python(name: str, cache: Path) -> Path:
    """The Python of a peer's virtual environment, which is made if it is not there."""
    if not name:
        return Path(sys.executable)
    wanted = ENVIRONMENTS[name]
    python = cache / name / "bin" / "python"
    done = cache / name / "installed.json"
    if done.exists() and json.loads(done.read_text()) == wanted:
        return python
    print(f"making {python.parents[1]} ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", python.parents[1]], check=True)
    if TORCH in wanted and pip(python, [f"{TORCH}+cpu"]):  # from a local wheel, if there is one
        require(pip(python, [TORCH, "--index-url", TORCH_INDEX]))
    require(pip(python, wanted))
    done.write_text(json.dumps(wanted))
    return python


def pip(python: Path, packages: list[str]) -> str:
    """Installs; what went wrong, or nothing."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", *packages]
    result = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
    return " ".join(errors or ["pip failed"])[:300] if result.returncode else ""


def require(problem: str) -> None:
    if problem:
        raise NotAvailable(problem)


class Child:
    """A side at work: it is asked for a number of steps and answers with the seconds."""

    def __init__(self, python: Path, row: str, number: int, folder: Path):
        self.folder = folder / f"{row}_{number}"
        self.folder.mkdir()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        with (self.folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(
                [python, __file__, "--serve", row, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )

    def ask(self, steps: int) -> dict[str, float]:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], 600)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            errors = (self.folder / "errors").read_text().strip().splitlines()
            raise NotAvailable((errors or ["no answer in 10 minutes"])[-1][:300])
        return json.loads(line)

    def stop(self) -> None:
        """With the processes that it may have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure(row: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of every side in every round, or why there are none."""
    started = time.perf_counter()
    steps = max(1, round(ROWS[row].steps * options.scale))
    children: dict[int, Child] = {}
    sides = [{**each._asdict(), "rounds": [], "missing": None} for each in ROWS[row].sides]

    def ask(number: int, steps: int) -> dict[str, float] | None:
        try:
            return children[number].ask(steps)
        except NotAvailable as reason:
            sides[number]["missing"] = str(reason)
            return None

    try:
        for number, each in enumerate(sides):
            try:
                python = environment_python(each["environment"], options.cache)
            except NotAvailable as reason:
                each["missing"] = str(reason)
                continue
            children[number] = Child(python, row, number, folder)
            ask(number, ROWS[row].before + steps)
        for i in range(options.rounds):
            seconds = time.perf_counter() - started
            print(f"{row}: round {i + 1} of {options.rounds}, {seconds:.0f} s", file=sys.stderr)
            there = [number for number, each in enumerate(sides) if not each["missing"]]
            for number in there if i % 2 == 0 else there[::-1]:
                sides[number]["rounds"].append(ask(number, steps))
    finally:
        for child in children.values():
            child.stop()
    for each in sides:
        del each["work"]  # a function
    return {"work": ROWS[row].work, "steps": steps, "sides": sides}


def add_ratios(result: dict[str, Any]) -> None:
    """The peer's seconds over ours, round by round."""
    for each in result["sides"]:
        if each["missing"]:
            continue
        seconds = [answer["seconds"] for answer in each["rounds"]]
        each["steps_per_second"] = result["steps"] / statistics.median(seconds)
        if each["beside"]:
            ours = next(a for a in result["sides"] if a["name"] == each["beside"])
            if not ours["missing"]:
                pairs = zip(seconds, ours["rounds"])
                each["ratios"] = [theirs / own["seconds"] for theirs, own in pairs]


def table(results: dict[str, Any]) -> str:
    lines = [
        "| work | | steps/s | ours is faster by (all rounds) | goal |",
        "|---|---|---|---|---|",
    ]
    for result in results.values():
        work = result["work"]
        for each in result["sides"]:
            speed = f"{each['steps_per_second']:.4g}" if "steps_per_second" in each else ""
            ratio = f"not available: {each['missing']}" if each["missing"] else ""
            if ratios := each.get("ratios"):
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                ratio = f"{statistics.median(ratios):.2f} ({spread})"
            lines.append(f"| {work} | {each['name']} | {speed} | {ratio} | {each['goal'] or ''} |")
            work = ""
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo")
    models = (
        [line for line in cpu.read_text().splitlines() if "model name" in line]
        if cpu.exists()
        else []
    )
    return {
        "date": datetime.date.today().isoformat(),
        "processor": models[0].split(":")[1].strip() if models else "unknown",
        "cores": threads(),
        "load before": round(os.getloadavg()[0], 2),  # what else was running
    }


def packages(python: Path) -> list[str]:
    command = [python, "-m", "pip", "freeze"]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path.home() / ".cache" / "aquadem-peers"
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=list(ROWS),
        metavar="ROW",
        help=f"of {' '.join(ROWS)}; default: all",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of every side; default: 5")
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps of a turn")
    parser.add_argument("--cache", type=Path, default=cache, help=f"of the peers; default: {cache}")
    parser.add_argument("--out", type=Path, default=Path("peers.json"), help="default: peers.json")
    parser.add_argument(
        "--install-only", action="store_true", help="make the environments and stop"
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve[0], int(options.serve[1]))
    used = sorted({each.environment for row in options.rows for each in ROWS[row].sides} - {""})
    for name in used if options.install_only else []:
        try:
            print(environment_python(name, options.cache))
        except NotAvailable as reason:
            print(f"{name} is not available: {reason}")
    if options.install_only:
        return
    report = {"machine": machine(), "rounds": options.rounds, "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        for row in options.rows:
            result = measure(row, options, Path(folder))
            add_ratios(result)
            report["rows"][row] = result
            options.out.write_text(json.dumps(report, indent=1))  # what is measured is not lost
    there = {name: options.cache / name / "bin" / "python" for name in used}
    pythons = {"ours": Path(sys.executable)} | {n: p for n, p in there.items() if p.exists()}
    report["packages"] = {name: packages(python) for name, python in pythons.items()}
    options.out.write_text(json.dumps(report, indent=1))
    print(table(report["rows"]))
    print()
    print(", ".join(f"{what}: {value}" for what, value in report["machine"].items()))


if __name__ == "__main__":
    main()
