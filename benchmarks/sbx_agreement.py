"""Do SBX's SAC and ours learn the same from the same transitions? Returns vary so much between seeds that a difference
between two implementations hides in them; what a fixed replay teaches does not.

    python benchmarks/sbx_agreement.py runs/HalfCheetah-v5__sac__2__1700000000 \\
        --sbx-python ~/.cache/aquadem-peers/sb/bin/python    # peers.py --rows sac --install-only makes it

Both start from random networks and take the same number of updates, with the SAC paper's values, on batches drawn from
the run's replay. Printed for three seeds each, on 250 fixed transitions: mean and deviation of the critics' values, the
temperature, the policy's mean log deviation and the mean size of its mean before the tanh.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 8


def load_replay(run: Path) -> tuple[str, int, int, np.ndarray]:
    """Environment, sizes, and the rows: observation | next observation | action | reward, terminated, ended."""
    env_id = json.loads((run / "args.json").read_text())["env_id"]
    env = gym.make(env_id)
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    return (
        env_id,
        obs_dim,
        action_dim,
        np.fromfile(run / "replay.f32", np.float32).reshape(-1, 2 * obs_dim + action_dim + 3),
    )


def summary(
    updates: int, q: jax.Array, temperature: float, mean: jax.Array, log_deviation: jax.Array
) -> list[float]:
    scores = [q.mean(), q.std(), temperature, log_deviation.mean(), jnp.abs(mean).mean()]
    return [updates, *(round(float(score), 3) for score in scores)]


def train_ours(run: Path, updates: int, seed: int) -> list[list[float]]:
    sys.path.insert(0, str(ROOT))
    import sac_baselines as sac

    env_id, obs_dim, action_dim, rows = load_replay(run)
    values = {"learning_rate": 3e-4, "n_step": 1, "tau": 0.005, "reward_scale": 1.0}
    args = sac.SACArgs(env_id=env_id, reward="env", **values)
    box = sac.make_env(args).action_space
    actor, critic, optimizer = (
        sac.Actor(action_dim),
        sac.TwinCritic(),
        optax.adam(args.learning_rate),
    )
    steps = sac.unpack(rows, sac.make_replay(1, obs_dim, action_dim).transitions)
    replay = sac.Replay(jax.tree.map(jnp.asarray, steps), jnp.asarray(len(rows)))
    fixed = slice(None, None, len(rows) // 250)
    observations, actions = steps.observation[fixed], steps.action[fixed]
    update = sac.make_update(actor, critic, optimizer, box, None, args)
    key = jax.random.PRNGKey(seed)
    agent, _ = sac.init_agent(actor, critic, optimizer, key, args, obs_dim, reference=None)
    lines = []
    for number in range(1, updates + 1):
        agent, _ = update(agent, replay, None)
        if number % (updates // 4) == 0:
            q = critic.apply(agent.params.critic, observations, actions)
            policy = actor.apply(agent.params.actor, observations)
            lines.append(summary(number, q, jnp.exp(agent.params.log_temperature), *policy))
    return lines


def train_sbx(run: Path, updates: int, seed: int) -> list[list[float]]:
    from sbx import SAC
    from sbx.common.type_aliases import ReplayBufferSamplesNp

    env_id, obs_dim, action_dim, rows = load_replay(run)
    fixed = rows[:: len(rows) // 250]
    observations, actions = fixed[:, :obs_dim], fixed[:, 2 * obs_dim : 2 * obs_dim + action_dim]
    model, generator, lines = (
        SAC("MlpPolicy", gym.make(env_id), seed=seed),
        np.random.default_rng(seed),
        [],
    )
    policy = model.policy
    discounts = np.full(256 * BLOCK, model.gamma, np.float32)
    for block in range(1, updates // BLOCK + 1):
        b = rows[generator.integers(0, len(rows), 256 * BLOCK)]
        b_observations, b_next, b_actions = np.split(b[:, :-3], [obs_dim, 2 * obs_dim], axis=1)
        batch = ReplayBufferSamplesNp(
            b_observations, b_actions, b_next, b[:, -2], b[:, -3], discounts
        )
        policy.qf_state, policy.actor_state, model.ent_coef_state, model.key, metrics = model._train(
            model.tau, model.target_entropy, BLOCK, batch, 1, 0,
            policy.qf_state, policy.actor_state, model.ent_coef_state, model.key,
        )  # fmt: skip
        if block % (updates // BLOCK // 4) == 0:
            q = policy.qf_state.apply_fn(policy.qf_state.params, observations, actions)
            gaussian = policy.actor_state.apply_fn(
                policy.actor_state.params, observations
            ).distribution
            lines.append(
                summary(block * BLOCK, q, metrics[3], gaussian.mean(), jnp.log(gaussian.stddev()))
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run",
        type=Path,
        help="run folder of sac_baselines.py sac, on a task with actions in [-1, 1]",
    )
    parser.add_argument("--updates", type=int, default=8000)
    parser.add_argument(
        "--sbx-python",
        help="the Python of SBX's virtual environment; without it only ours are printed",
    )
    parser.add_argument("--train", choices=["ours", "sbx"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is None:
        print(
            f"{'':14}{'updates':>8}{'q mean':>9}{'q dev':>9}{'temp.':>9}{'log dev':>9}{'|mean|':>9}"
        )
    for seed in (1, 2, 3):
        if options.train != "sbx":
            for line in train_ours(options.run, options.updates, seed):
                print(
                    f"ours, seed {seed}  {line[0]:8}"
                    + "".join(f"{score:9.3f}" for score in line[1:]),
                    flush=True,
                )
        else:
            for line in train_sbx(options.run, options.updates, seed):
                print(
                    f"SBX, seed {seed}   {line[0]:8}"
                    + "".join(f"{score:9.3f}" for score in line[1:]),
                    flush=True,
                )
    if options.sbx_python and options.train is None:
        command = [
            options.sbx_python,
            __file__,
            str(options.run),
            "--updates",
            str(options.updates),
            "--train",
            "sbx",
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
