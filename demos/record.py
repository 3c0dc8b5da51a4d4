"""Records successful episodes of a trained AQuaDQN agent as a Minari dataset in this folder.

    python demos/record.py runs/AdroitHandDoor-v1__aquadqn__1__1700000000 --dataset-id aquadem/door/agent-v0

The agent explores as in training (epsilon 0.1). Only episodes that reach the goal are kept. Observations, actions and
the environment's own (dense) rewards are stored in float32, compressed, with `success` of every step in the infos.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import gymnasium as gym
import h5py
import jax
import jax.numpy as jnp
import minari
import numpy as np
import tyro
from minari.data_collector import EpisodeBuffer
from minari.storage import get_dataset_path
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
import aquadqn
import sac_baselines

FIRST_SEED = 1_000_000_000  # neither training nor evaluation starts an episode from these
TRIES_PER_EPISODE = 20  # an agent that fails more often than this is not worth recording


@dataclass
class Options:
    run: Annotated[Path, tyro.conf.Positional]
    """run folder of a finished aquadqn.py run"""
    dataset_id: str
    """Minari id of the new dataset"""
    episodes: int = 25
    """successful episodes to keep"""
    epsilon: float = 0.1
    """probability of a random candidate"""


def load_policy(run: Path, env: gym.Env):
    """The run's agent as a function of an observation and a key."""
    args, obs_dim = aquadqn.load_args(run), env.observation_space.shape[0]
    network = aquadqn.make_candidate_network(args, env.action_space.shape[0])
    q_network = aquadqn.QNetwork(args.num_actions)
    template = jax.eval_shape(q_network.init, jax.random.PRNGKey(0), jnp.zeros(obs_dim))
    q_params, _ = aquadqn.load_arrays(run / "agent.npz", template)
    candidate_params = aquadqn.load_candidates(run, network, obs_dim)
    policy = aquadqn.make_policy(q_network, network, env.action_space)
    return lambda observation, key, epsilon: policy(q_params, candidate_params, observation, key, epsilon=epsilon)


def record_episode(env: gym.Env, policy, seed: int, epsilon: float) -> EpisodeBuffer:
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
                options = {"compression": "gzip", "compression_opts": 9, "shuffle": True} if item.shape else {}
                new = target.create_dataset(name, data=item[()], **options)
            new.attrs.update(item.attrs)

        source.visititems(copy)
    smaller.replace(path)


def record_successes(env: gym.Env, policy, options: Options) -> tuple[list[EpisodeBuffer], int]:
    """The first successful episodes, and how many were tried for them."""
    buffers, tried, most = [], 0, TRIES_PER_EPISODE * options.episodes
    progress = tqdm(total=options.episodes, unit="episode")
    while len(buffers) < options.episodes:
        if tried == most:
            few = f"only {len(buffers)} of {tried} episodes succeeded"
            raise aquadqn.UserError(f"{few}: train {options.run} for longer")
        buffer = record_episode(env, policy, FIRST_SEED + tried, options.epsilon)
        tried += 1
        if any(buffer.infos["success"]):
            buffers.append(buffer)
            progress.update()
    progress.close()
    return buffers, tried


def record(options: Options) -> None:
    os.environ["MINARI_DATASETS_PATH"] = str(Path(__file__).parent)
    args = aquadqn.load_args(options.run)
    with aquadqn.as_user_error(f"{options.dataset_id!r} cannot be recorded"):
        exists = Path(get_dataset_path(options.dataset_id)).exists()
    if exists:
        raise aquadqn.UserError(f"dataset {options.dataset_id!r} exists already: delete it first, or name another")
    env = aquadqn.make_env(args.env_id, "env")
    buffers, tried = record_successes(env, load_policy(options.run, env), options)
    name = options.dataset_id
    with aquadqn.as_user_error(f"cannot write dataset {name!r}"), sac_baselines.whole_dataset(name):
        dataset = minari.create_dataset_from_buffers(
            name,
            buffers,
            env=replace(env.unwrapped.spec, max_episode_steps=env.spec.max_episode_steps),
            observation_space=gym.spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float32),
            action_space=env.action_space,
            algorithm_name=f"AQuaDQN, epsilon {options.epsilon}, trained on {args.dataset_id}",
            description=f"{len(buffers)} successful of {tried} episodes of {args.env_id}",
            author="The AQuaDem in JAX authors",
            requirements=["gymnasium-robotics==1.4.2", "mujoco==3.17.0"],
        )
        compress(Path(dataset.spec.data_path) / "main_data.hdf5")
        steps = dataset.total_steps
    print(f"{name}: {len(buffers)} successful of {tried} episodes, {steps} steps")


def main() -> None:
    try:
        record(tyro.cli(Options, description=__doc__))
    except aquadqn.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
