"""aquacql.py: the loss, the data's way from file to batch, several seeds at once, whole runs, and bad input."""

import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import gymnasium as gym
import h5py
import jax
import jax.numpy as jnp
import minari
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import aquacql
from aquacql import Args, Demonstrations, UserError

ENV_ID, DATASET_ID = "tiny_env:Reach-v0", "tiny/reach/expert-v0"
TINY = f"""--dataset-id {DATASET_ID} --eval-episodes 2 --batch-size 16 --num-actions 3 --candidate-steps 40
 --gradient-steps 60 --eval-every 20 --checkpoint-every 40 --ref-min-score -40 --ref-max-score -10 --quiet""".split()


class SmallQNetwork(nn.Module):
    """Takes a fraction of the time to compile. The real one is compared with its definition in test_aquadqn.py."""

    num_actions: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> jax.Array:
        return nn.Dense(self.num_actions)(nn.tanh(nn.Dense(32)(observations)))


@pytest.fixture
def here(datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder; signals are left to pytest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(aquacql, "QNetwork", SmallQNetwork)
    monkeypatch.setattr(aquacql.OfflineRun, "catch_signals", lambda self: None)
    return tmp_path


def run_script(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["aquacql.py", *argv])
    aquacql.main()


def only_run() -> Path:
    (run,) = Path("runs").iterdir()
    return run


@pytest.fixture(scope="module")
def finished(datasets: Path, tmp_path_factory) -> Path:
    """The run folder of an uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        patch.setattr(aquacql.OfflineRun, "catch_signals", lambda self: None)
        patch.setattr(aquacql, "QNetwork", SmallQNetwork)
        run_script(TINY, patch)
        return only_run().resolve()


def scalar_tags(run: Path) -> set[str]:
    return set(EventAccumulator(str(run)).Reload().Tags()["scalars"])


def saved_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file}


# -------------------------------------------------------------------------------------------------------- loss


def test_cql_loss_by_hand():
    q, action, target = (
        jnp.array([[1.0, 2.0, -1.0], [0.5, 0.0, 0.25]]),
        jnp.array([1, 2]),
        jnp.array([5.0, -0.25]),
    )
    gaps = [np.log(np.exp(row).sum()) - row[a] for row, a in zip(np.asarray(q, np.float64), (1, 2))]
    bellman = [
        0.5 * (2 - 5) ** 2,
        0.5 * (0.25 + 0.25) ** 2,
    ]  # the first error is above 1: not Huber's 2.5
    loss, parts = aquacql.cql_loss(q, action, target, alpha=5.0)
    assert_allclose(loss, 5 * np.mean(gaps) + np.mean(bellman), rtol=1e-6)
    expected = {
        "conservative": np.mean(gaps),
        "bellman": np.mean(bellman),
        "q_value": (2 + 0.25) / 2,
    }
    assert parts == pytest.approx(expected, rel=1e-6)


def test_gradient_of_the_conservative_term_is_policy_minus_data():
    q, action = jax.random.normal(jax.random.PRNGKey(0), (4, 3)), jnp.array([0, 2, 1, 1])
    chosen = jnp.take_along_axis(q, action[:, None], axis=1)[:, 0]  # as target: no Bellman error
    gradient = jax.grad(lambda q: aquacql.cql_loss(q, action, chosen, 5.0)[0])(q)
    assert_allclose(
        gradient, 5 * (jax.nn.softmax(q) - jax.nn.one_hot(action, 3)) / 4, rtol=1e-4, atol=1e-6
    )


def random_data(steps: int = 300, length: int = 30, obs_dim: int = 4) -> Demonstrations:
    """Episodes of which every other one terminates."""
    generator = np.random.default_rng(0)
    states = generator.normal(size=(steps + steps // length, obs_dim)).astype(np.float32)
    ends = np.arange(steps) % length == length - 1
    rows = np.arange(steps) + np.arange(steps) // length
    terminations = ends & (np.arange(steps) // length % 2 == 0)
    actions = generator.uniform(-1, 1, (steps, 2)).astype(np.float32)
    rewards = generator.normal(size=steps).astype(np.float32)
    return Demonstrations(states[rows], actions, rewards, states[rows + 1], terminations, ends)


def train_a_little(args: Args, steps: int = 25) -> tuple[aquacql.AgentState, dict[str, jax.Array]]:
    network = SmallQNetwork(args.num_actions)
    optimizer = optax.adam(args.learning_rate)
    seeds = range(args.seed, args.seed + args.num_seeds)
    indices = np.stack(
        [np.random.default_rng(seed).integers(args.num_actions, size=300) for seed in seeds]
    )
    data = aquacql.make_transitions(
        random_data(), indices.astype(np.int32), args.n_step, args.gamma
    )
    update = aquacql.make_update(network, optimizer, args)
    update = aquacql.over_seeds(update, aquacql.AGENT_AXES, aquacql.DATA_AXES)
    return update(aquacql.init_agents(network, optimizer, args, 4), data, steps)


def test_without_alpha_it_is_munchausen_dqn_to_the_bit(monkeypatch):
    args = Args(cql_alpha=0.0, batch_size=16, num_actions=3, target_update_period=5)
    ours, ours_metrics = train_a_little(args)

    def half_squared_error(q, action, target, alpha):
        error = q[jnp.arange(len(action)), action] - target
        return jnp.mean(0.5 * error**2), {}

    monkeypatch.setattr(aquacql, "cql_loss", half_squared_error)
    plain, plain_metrics = train_a_little(args)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert_array_equal(one, other)
    assert_array_equal(ours_metrics["losses/q_loss"], plain_metrics["losses/q_loss"])
    monkeypatch.undo()
    conservative, _ = train_a_little(dataclasses.replace(args, cql_alpha=5.0))
    kernels = [state.params["params"]["Dense_1"]["kernel"] for state in (ours, conservative)]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-4


def test_a_step_follows_equation_2_with_the_munchausen_target():
    """One step, recomputed from the batch that its key draws."""
    args = Args(batch_size=16, num_actions=3)
    network, optimizer = SmallQNetwork(3), optax.adam(args.learning_rate)
    data, indices = random_data(), np.random.default_rng(1).integers(3, size=300)
    start = aquacql.of_seed(
        aquacql.init_agents(network, optimizer, args, 4)._replace(updates=jnp.zeros(1)), 0
    )
    i = np.asarray(jax.random.randint(jax.random.split(start.key)[1], (16,), 0, 300))
    both = np.stack([data.observations, data.next_observations])
    q_values, q_next_values = np.asarray(jax.jit(network.apply)(start.params, both), np.float64)
    targets = []
    for first in i:
        total, t = 0.0, first
        for k in range(args.n_step):
            t = first + k
            total += args.gamma**k * data.rewards[t]
            if data.ends[t]:
                break
        tau, q, q_next = args.munchausen_tau, q_values[first], q_next_values[t]
        log_policy = (q - q.max()) / tau - np.log(np.exp((q - q.max()) / tau).sum())
        soft_value = q_next.max() + tau * np.log(np.exp((q_next - q_next.max()) / tau).sum())
        bootstrap = 0.0 if data.terminations[t] else args.gamma ** (t - first + 1) * soft_value
        targets.append(total + args.munchausen_alpha * tau * log_policy[indices[first]] + bootstrap)

    def loss(params):
        q = network.apply(params, data.observations[i])
        taken = q[np.arange(16), indices[i]]
        return jnp.mean(
            5.0 * (jnp.log(jnp.exp(q).sum(1)) - taken) + 0.5 * (taken - jnp.array(targets)) ** 2
        )

    value, gradient = jax.jit(jax.value_and_grad(loss))(start.params)
    after, metrics = train_a_little(args, steps=1)
    assert_allclose(metrics["losses/q_loss"], value, rtol=1e-4)
    mean = aquacql.of_seed(after.opt_state[0].mu, 0)  # Adam's first moment: a tenth of the gradient
    for one, other in zip(jax.tree.leaves(mean), jax.tree.leaves(gradient), strict=True):
        assert_allclose(one, 0.1 * other, rtol=1e-3, atol=1e-5)
    for before, now in zip(
        jax.tree.leaves(start.params), jax.tree.leaves(after.params), strict=True
    ):
        assert_allclose(
            np.abs(now[0] - before).max(), args.learning_rate, rtol=0.01
        )  # the length of Adam's first step


# -------------------------------------------------------------------------------------------------------- data


LENGTHS = (
    5,
    1,
    4,
    7,
)  # episodes of a file that catches every transition across an end; the second terminates, others
TERMINATES = (False, True, False, True)  # not


def write_d4rl(path: Path, drop: tuple[str, ...] = (), **changes: np.ndarray) -> Path:
    """Step t of episode e: observation 100 e + t in all four places, reward 10 e + t, next state 100 e + t + 1."""
    episode = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    step = np.concatenate([np.arange(length) for length in LENGTHS])
    last = step == np.array(LENGTHS)[episode] - 1
    terminates = np.array(TERMINATES)[episode]
    fields = {
        "observations": np.repeat((100.0 * episode + step)[:, None], 4, axis=1),
        "next_observations": np.repeat((100.0 * episode + step + 1)[:, None], 4, axis=1),
        "actions": np.repeat(step[:, None] / 10, 2, axis=1),
        "rewards": 10.0 * episode + step,
        "terminals": last & terminates,
        "timeouts": last & ~terminates,
    }
    with h5py.File(path, "w") as file:
        for name, array in {**fields, **changes}.items():
            if name not in drop:
                file[name] = array
    return path


@pytest.fixture(scope="module")
def tiny_env(datasets: Path) -> gym.Env:
    return aquacql.make_offline_env(aquacql.Args(env_id=ENV_ID))


@pytest.mark.parametrize("n_step", [1, 3, 10])
@pytest.mark.parametrize("known", [True, False], ids=["next_observations", "without"])
def test_no_transition_crosses_an_end(tmp_path, tiny_env, n_step, known):
    gamma, drop = 0.9, () if known else ("next_observations",)
    data = aquacql.load_d4rl(write_d4rl(tmp_path / "trap.hdf5", drop), tiny_env)
    transitions = aquacql.make_transitions(data, np.arange(len(data.rewards)), n_step, gamma)
    batch = aquacql.sample(transitions, jax.random.PRNGKey(0), 2000)
    seen = set()
    for state, index, total, following, discount in zip(*map(np.asarray, batch)):
        episode, t = divmod(int(state[0]), 100)
        # Without next states the last step before a time limit is left out: the state after it is nowhere.
        steps = LENGTHS[episode] - (0 if known or TERMINATES[episode] else 1)
        last = min(t + n_step, steps) - 1
        seen.add((episode, t))
        assert t < steps and data.actions[index][0] == np.float32(t / 10)
        assert_allclose(
            total, sum(gamma**k * (10 * episode + t + k) for k in range(last - t + 1)), rtol=1e-5
        )
        if TERMINATES[episode] and last == steps - 1:
            assert discount == 0
        else:
            assert following[0] == 100 * episode + last + 1
            assert_allclose(discount, gamma ** (last - t + 1), rtol=1e-5)
    dropped = 0 if known else 2  # of episodes 0 and 2
    assert len(seen) == len(data.rewards) == sum(LENGTHS) - dropped


def test_every_state_is_stored_once(tmp_path, tiny_env):
    data = aquacql.load_d4rl(write_d4rl(tmp_path / "trap.hdf5"), tiny_env)
    indices = np.zeros(len(data.rewards), np.int32)
    states = np.asarray(aquacql.make_transitions(data, indices, 3, 0.9).states)
    assert states.shape == (sum(LENGTHS) + len(LENGTHS), 4) and len(np.unique(states[:, 0])) == len(
        states
    )


def test_a_gap_in_the_file_ends_the_episode(tmp_path, tiny_env):
    """Steps may be missing without a flag: then the next state is not the following one."""
    fields = {}
    with h5py.File(write_d4rl(tmp_path / "whole.hdf5"), "r") as file:
        fields = {name: np.delete(file[name][()], 2, axis=0) for name in file}
    data = aquacql.load_d4rl(write_d4rl(tmp_path / "gap.hdf5", **fields), tiny_env)
    transitions = aquacql.make_transitions(data, np.zeros(len(data.rewards), np.int32), 3, 0.9)
    assert data.ends.tolist()[:5] == [False, True, False, True, True]
    assert transitions.states[transitions.bootstrap_index[0], 0] == 2.0  # not 3 or 4


def d4rl_copy(dataset_id: str, path: Path) -> Path:
    """The content of a Minari dataset as a D4RL file."""
    episodes = list(minari.load_dataset(dataset_id).iterate_episodes())
    with h5py.File(path, "w") as file:
        file["observations"] = np.concatenate([episode.observations[:-1] for episode in episodes])
        file["next_observations"] = np.concatenate(
            [episode.observations[1:] for episode in episodes]
        )
        file["terminals"] = np.concatenate([episode.terminations for episode in episodes])
        file["timeouts"] = np.concatenate([episode.truncations for episode in episodes])
        for name in ("actions", "rewards"):
            file[name] = np.concatenate([getattr(episode, name) for episode in episodes])
    return path


def test_minari_and_d4rl_give_equal_batches(datasets, tmp_path):
    path = d4rl_copy(DATASET_ID, tmp_path / "reach.hdf5")
    ways = [Args(dataset_id=DATASET_ID), Args(dataset_path=str(path), env_id=ENV_ID)]
    (one, one_env, _), (other, other_env, _) = map(aquacql.load_dataset, ways)
    for ours, theirs in zip(one, other, strict=True):
        assert_array_equal(ours, theirs)
    indices = np.arange(len(one.rewards))
    batches = [
        aquacql.sample(
            aquacql.make_transitions(data, indices, 3, 0.995), jax.random.PRNGKey(7), 256
        )
        for data in (one, other)
    ]
    for ours, theirs in zip(*batches, strict=True):
        assert_array_equal(ours, theirs)
    assert (
        one_env.unwrapped.spec.entry_point
        == other_env.unwrapped.spec.entry_point
        == "tiny_env:Reach"
    )


def test_environments_recorded_before_gymnasium_1_are_understood():
    spec = {
        "id": "Reach-v0",
        "entry_point": "tiny_env:Reach",
        "max_episode_steps": 13,
        "kwargs": {},
    }
    older = json.dumps(
        {**spec, "autoreset": False, "apply_api_compatibility": False, "additional_wrappers": []}
    )
    assert aquacql.env_id_of_dataset({"eval_env_spec": older})[0] == "Reach-v0"
    with pytest.raises(aquacql.UserError, match="name it with --env-id"):
        aquacql.env_id_of_dataset({"eval_env_spec": "{}"})


@pytest.mark.parametrize("env_id", ["Reach-v0", "Unheard-v0", "trap:Reach-v0"])
def test_no_code_that_a_dataset_names_is_run(datasets, here, monkeypatch, capsys, env_id):
    """Its environment is made by the id of an installed package, or not at all."""
    (here / "trap.py").write_text("open('sprung', 'w').close()\nfrom tiny_env import Reach\n")
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "trap", raising=False)
    spec = {
        "id": env_id,
        "entry_point": "trap:Reach",
        "max_episode_steps": 13,
        "kwargs": {"dictionary": True},
    }
    spec |= {"additional_wrappers": [], "vector_entry_point": "trap:Reach"}
    load = aquacql.open_dataset

    def changed(dataset_id):
        dataset = load(dataset_id)
        metadata = {**dataset.storage.metadata, "eval_env_spec": json.dumps(spec)}
        monkeypatch.setattr(type(dataset.storage), "metadata", metadata)
        return dataset

    monkeypatch.setattr(aquacql, "open_dataset", changed)
    known = env_id == "Reach-v0"
    result = (
        aquacql.load_dataset(Args(dataset_id=DATASET_ID))
        if known
        else error_of(TINY, monkeypatch, capsys)
    )
    assert (
        not (here / "sprung").exists()
        and "trap" not in sys.modules
        and not (here / "runs").exists()
    )
    if known:
        _, env, warning = result
        assert env.spec.entry_point == "tiny_env:Reach" and not env.unwrapped.dictionary
        assert "NOT THE DATASET'S ENVIRONMENT" in warning
    else:
        assert repr(env_id) in result and "--env-id" in result


def test_the_dataset_brings_its_environment_and_scores(datasets, monkeypatch):
    args = Args(dataset_id=DATASET_ID)
    _, env, warning = aquacql.load_dataset(args)
    assert (
        args.env_id == "Reach-v0"
        and env.spec.max_episode_steps == 21
        and args.ref_min_score is None
    )
    assert warning is None
    load = aquacql.open_dataset

    def changed(dataset_id):
        dataset = load(dataset_id)
        spec = {**json.loads(dataset.storage.metadata["env_spec"]), "id": "ReachDict-v0"}
        metadata = {**dataset.storage.metadata, "eval_env_spec": json.dumps(spec)}
        metadata |= {"ref_min_score": -50.0, "ref_max_score": -5.0}
        monkeypatch.setattr(type(dataset.storage), "metadata", metadata)
        return dataset

    monkeypatch.setattr(aquacql, "open_dataset", changed)
    args = Args(dataset_id="tiny/reachdict/expert-v0")
    _, env, _ = aquacql.load_dataset(args)
    assert args.env_id == env.spec.id == "ReachDict-v0" and (
        args.ref_min_score,
        args.ref_max_score,
    ) == (-50, -5)


@pytest.mark.parametrize(
    "name, env_id", [("hopper_medium-v2", "Hopper-v4"), ("walker2d-expert-v2", "Walker2d-v4")]
)
def test_a_d4rl_file_names_its_environment(tmp_path, name, env_id):
    args = Args(dataset_path=str(tmp_path / f"{name}.hdf5"))
    with pytest.raises(UserError, match="does not exist"):
        aquacql.load_dataset(args)
    assert args.env_id == env_id


def test_the_data_is_described(tmp_path, tiny_env, capsys):
    data = aquacql.load_d4rl(write_d4rl(tmp_path / "trap.hdf5"), tiny_env)
    logged = {}
    log = SimpleNamespace(add_scalar=lambda tag, value, step: logged.update({tag: value}))
    aquacql.describe_data(Args(ref_min_score=0, ref_max_score=200), data, log)
    mean = np.mean([sum(10 * e + t for t in range(length)) for e, length in enumerate(LENGTHS)])
    assert logged == pytest.approx(
        {"data/episodic_return": mean, "data/normalized_score": mean / 2}
    )
    assert (
        f"17 steps, 4 episodes, mean return {mean:.1f}, normalised score {mean / 2:.1f}"
        in capsys.readouterr().err
    )


def test_normalized_score_by_hand():
    table = {name: scores for name, (_, *scores) in aquacql.D4RL_TASKS.items()}
    assert_allclose(aquacql.normalized_score(3234.3, *table["hopper"]), 100)
    assert_allclose(
        aquacql.normalized_score(np.array([-280.178953, 5927.4105235]), *table["halfcheetah"]),
        [0, 50],
    )
    assert_allclose(
        aquacql.normalized_score(1000.0, *table["walker2d"]), 100 * 998.370992 / 4590.670992
    )
    assert np.isnan(aquacql.normalized_score(1.0, None, None))


# -------------------------------------------------------------------------------------------------- whole runs


def test_interrupted_run_continues_bit_for_bit(finished, here, monkeypatch, capsys):
    write_rows_until = aquacql.write_rows_until

    def killed_at_60(path, step, row):
        if step == 60:
            raise KeyboardInterrupt
        write_rows_until(path, step, row)

    monkeypatch.setattr(aquacql, "write_rows_until", killed_at_60)
    with pytest.raises(SystemExit):
        run_script([*TINY, "--gradient-steps", "80"], monkeypatch)
    gc.collect()  # a killed process gives up its lock; this one has to forget the run
    monkeypatch.setattr(aquacql, "write_rows_until", write_rows_until)
    run = only_run()
    assert json.loads(saved_arrays(run / "state.npz")["meta"].tobytes())["step"] == 40
    run_script(["--resume", str(run), "--gradient-steps", "60"], monkeypatch)
    assert (run / "evaluations.csv").read_text() == (finished / "evaluations.csv").read_text()
    for name in ("state.npz", "agent.npz", "candidates.npz"):
        one, other = saved_arrays(run / name), saved_arrays(finished / name)
        assert one.keys() == other.keys() and all(
            np.array_equal(one[key], other[key]) for key in one
        ), name

    header, *rows = (run / "evaluations.csv").read_text().splitlines()
    assert header == "step,success_rate,episodic_return,episodic_length,episodes,normalized_score"
    assert [row.split(",")[0] for row in rows] == ["0", "20", "40", "60"]
    assert (run / "candidates_along.npz").exists()
    capsys.readouterr()
    run_script(["--evaluate", str(run), "--eval-episodes", "2", "--capture-video"], monkeypatch)
    printed = capsys.readouterr().out
    assert f"seed 1: return {float(rows[-1].split(',')[2]):.3f}, normalised score" in printed
    assert (run / "videos" / "evaluation_60.mp4").stat().st_size > 0


def test_candidate_training_resumes_to_the_same_parameters(here, monkeypatch):
    class Killed(Exception):
        pass

    class Log:
        def __init__(self, last: int):
            self.last = last

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            if step > self.last:
                raise Killed

        def flush(self) -> None:
            pass

    def train_candidates(folder: Path, last: int) -> None:
        run = aquacql.OfflineRun(dataclasses.replace(args, resume=str(folder)), warning=None)
        run.log = Log(last)
        try:
            run.write_candidates(aquacql.train_candidates(args, run, network, data))
        finally:
            run.lock.close()

    monkeypatch.setattr(aquacql, "CANDIDATE_STEPS_PER_CALL", 2)  # a checkpoint every 40 steps
    args = Args(
        num_actions=3,
        candidate_steps=98,
        temperature_start=1.0,
        batch_size=16,
        num_seeds=2,
        quiet=True,
    )
    network, data = aquacql.CandidateNetwork(3, 2, (8,), ()), random_data()
    for folder, last in (("whole", 99), ("broken", 44)):
        (here / folder).mkdir()
        (here / folder / "args.json").write_text("{}")
        try:
            train_candidates(here / folder, last)
        except Killed:
            assert (
                json.loads(
                    saved_arrays(here / folder / "candidates_training.npz")["meta"].tobytes()
                )["step"]
                == 40
            )
            train_candidates(here / folder, 99)
    whole, broken = (
        saved_arrays(here / folder / "candidates.npz") for folder in ("whole", "broken")
    )
    assert all(np.array_equal(whole[key], broken[key]) for key in whole)


def test_two_seeds_of_one_run_equal_two_runs(finished, here, monkeypatch, capsys):
    runs = [finished]
    for name, seeds in {"other": ["--seed", "2"], "both": ["--num-seeds", "2"]}.items():
        run_script([*TINY, *seeds], monkeypatch)
        runs.append(only_run().rename(here / name))
    both = runs.pop()
    tables = []
    for i, single in enumerate(runs):
        for file in ("candidates.npz", "agent.npz"):
            pairs = zip(
                saved_arrays(both / file).items(), saved_arrays(single / file).values(), strict=True
            )
            for (key, together), alone in pairs:
                if key != "meta":
                    assert_allclose(together[i], alone[0], rtol=1e-3, atol=1e-5)
        tables.append(
            np.genfromtxt(both / f"Reach-v0__aquacql__{i + 1}.csv", delimiter=",", names=True)
        )
        alone = np.genfromtxt(single / "evaluations.csv", delimiter=",", names=True)
        assert_allclose(tables[i]["episodic_return"], alone["episodic_return"], rtol=1e-2)
        assert {
            f"candidates/in_use_seed_{i + 1}",
            f"candidates/perplexity_seed_{i + 1}",
        } <= scalar_tags(both)
    assert "candidates/in_use" in scalar_tags(finished) and "candidates/in_use" not in scalar_tags(
        both
    )
    returns, scores = (
        np.stack([table[name] for table in tables])
        for name in ("episodic_return", "normalized_score")
    )
    mean = np.genfromtxt(both / "evaluations.csv", delimiter=",", names=True)
    assert np.abs(returns[0] - returns[1]).max() > 0.01
    assert_allclose(scores, 100 * (returns + 40) / 30, rtol=1e-6)
    assert_allclose(mean["normalized_score"], scores.mean(0), rtol=1e-6)
    assert_allclose(
        mean["normalized_score_deviation"], np.abs(scores[0] - scores[1]) / np.sqrt(2), rtol=1e-6
    )
    capsys.readouterr()
    run_script(["--evaluate", str(both), "--eval-episodes", "2"], monkeypatch)
    last = f"normalised score {mean['normalized_score'][-1]:.3f} +- {mean['normalized_score_deviation'][-1]:.3f}"
    assert last in capsys.readouterr().out
    before = (both / "Reach-v0__aquacql__2.csv").read_text()
    run_script(["--resume", str(both), "--quiet"], monkeypatch)  # in a folder of another name
    assert (both / "Reach-v0__aquacql__2.csv").read_text() == before


def test_candidates_from_another_run(finished, here, monkeypatch):
    run_script([*TINY, "--candidates-from", str(finished)], monkeypatch)
    again = saved_arrays(only_run() / "agent.npz")
    assert all(
        np.array_equal(again[key], array)
        for key, array in saved_arrays(finished / "agent.npz").items()
    )


def test_it_learns_from_data_that_is_half_bad(here, monkeypatch):
    """Every step of the data goes to the goal or away from it, by a coin: both are candidates, and Q has to choose."""
    env, generator, rows = gym.make("Reach-v0"), np.random.default_rng(0), []
    for episode in range(60):
        observation, _ = env.reset(seed=episode)
        ended = False
        while not ended:
            direction = observation[2:] / max(np.abs(observation[2:]).max(), 0.3)
            action = (direction * generator.choice([-1, 1])).astype(np.float32)
            following, reward, terminated, truncated, _ = env.step(action)
            rows.append((observation, action, reward, terminated, truncated, following))
            observation, ended = following, terminated or truncated
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
    write_d4rl(here / "half.hdf5", **dict(zip(names, map(np.array, zip(*rows)))))
    data = [
        "--dataset-path",
        "half.hdf5",
        "--env-id",
        ENV_ID,
        "--gamma",
        "0.9",
        "--cql-alpha",
        "0.1",
    ]
    schedule = [
        "--candidate-steps",
        "500",
        "--gradient-steps",
        "1000",
        "--eval-every",
        "1000",
        "--eval-episodes",
        "10",
    ]
    run_script(
        [*data, *TINY[2:], *schedule, "--batch-size", "64", "--learning-rate", "0.003"], monkeypatch
    )
    table = np.genfromtxt(only_run() / "evaluations.csv", delimiter=",", names=True)
    behaviour = sum(row[2] for row in rows) / 60
    assert table["episodic_return"][-1] > behaviour / 2 and table["success_rate"][-1] > 0.8, (
        behaviour,
        table,
    )


def test_a_d4rl_file_from_the_shell_and_a_signal(datasets, tmp_path):
    d4rl_copy(DATASET_ID, tmp_path / "reach.hdf5")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [
        sys.executable,
        aquacql.__file__,
        "--dataset-path",
        "reach.hdf5",
        "--env-id",
        ENV_ID,
        *TINY[2:],
    ]
    command += ["--gradient-steps", "100000000", "--eval-every", "100000000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while (
        not list(tmp_path.glob("runs/*/state.npz"))
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=120)[1]
    (run,) = tmp_path.glob("runs/*")
    assert process.returncode == 128 + signal.SIGTERM, error
    assert f"continue with: python aquacql.py --resume runs/{run.name}" in error
    assert run.name.startswith("tiny_env_Reach-v0__aquacql__1__")
    assert json.loads(saved_arrays(run / "state.npz")["meta"].tobytes())["step"] >= 40


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(finished, here, monkeypatch):
    run = Path(shutil.copytree(finished, here / "run"))
    monkeypatch.setattr(aquacql, "cql_loss", lambda q, *_: (jnp.sum(q) * jnp.nan, {}))
    with pytest.raises(SystemExit, match="error: not finite at step 80"):
        run_script(["--resume", str(run), "--gradient-steps", "100"], monkeypatch)
    assert (run / "state.npz").read_bytes() == (finished / "state.npz").read_bytes()


# --------------------------------------------------------------------------------------------------- bad input


def error_of(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run_script(argv, monkeypatch)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    "argv, expected",
    [
        ([], "either --dataset-id (Minari) or --dataset-path"),
        (["--dataset-id", DATASET_ID, "--dataset-path", "a.hdf5"], "either --dataset-id"),
        (["--dataset-id", "not an id"], "not a Minari id"),
        (["--dataset-id", DATASET_ID, "--env-id", "CartPole-v1"], "AQuaDem needs a Box"),
        (
            ["--dataset-id", DATASET_ID, "--env-id", "Pendulum-v1"],
            "shape (22, 4), Pendulum-v1 needs (22, 3)",
        ),
        (
            ["--dataset-id", DATASET_ID, "--candidates-from", "nowhere"],
            "nowhere/candidates.npz does not exist",
        ),
        (["--dataset-path", "no_name.hdf5"], "name one with --env-id"),
        (["--dataset-path", "nowhere.hdf5", "--env-id", ENV_ID], "nowhere.hdf5 does not exist"),
        (["--num-actions", "0"], "--num-actions is 0"),
        (["--num-seeds", "0"], "--num-seeds is 0"),
        (["--cql-alpha", "-1"], "--cql-alpha is -1.0"),
        (["--gamma", "nan"], "--gamma is nan"),
        (["--ref-min-score", "3"], "give both"),
        (["--seed", str(2**31 - 1), "--num-seeds", "2"], "--seed is"),
        (["--resume", "nowhere"], "nowhere is not a run folder"),
        (["--evaluate", "nowhere"], "nowhere is not a run folder"),
    ],
)
def test_bad_arguments_end_with_one_line(argv, expected, here, monkeypatch, capsys):
    assert expected in error_of(argv, monkeypatch, capsys)
    assert not list(here.iterdir())


NO_STEPS = {name: np.zeros(0) for name in ("rewards", "terminals", "timeouts")}
NO_STEPS |= {
    "observations": np.zeros((0, 4)),
    "next_observations": np.zeros((0, 4)),
    "actions": np.zeros((0, 2)),
}
ONE_STEP = {name: np.zeros((1, *array.shape[1:])) for name, array in NO_STEPS.items()}


@pytest.mark.parametrize(
    "drop, changes, expected",
    [
        (("timeouts",), {}, "has no field timeouts"),
        (("observations", "actions"), {}, "has no field observations, actions"),
        ((), {"rewards": np.full(17, np.nan)}, "field rewards of shape (17,) holds NaN"),
        (
            (),
            {"next_observations": np.full((17, 4), np.inf)},
            "field next_observations of shape (17, 4) holds NaN",
        ),
        (
            (),
            {"actions": np.zeros(())},
            "field observations has shape (17, 4), Reach-v0 needs (1, 4)",
        ),
        (
            (),
            {"actions": np.zeros((17, 3))},
            "field actions has shape (17, 3), Reach-v0 needs (17, 2)",
        ),
        (
            (),
            {"observations": np.zeros((16, 4))},
            "field observations has shape (16, 4), Reach-v0 needs (17, 4)",
        ),
        ((), {"rewards": np.array(["a"] * 17, "S1")}, "cannot read trap.hdf5 as an HDF5 file"),
        ((), NO_STEPS, "trap.hdf5 holds no steps"),
        (("next_observations",), ONE_STEP, "trap.hdf5 holds no step with a known next state"),
    ],
)
def test_bad_files_are_named(drop, changes, expected, here, monkeypatch, capsys):
    write_d4rl(here / "trap.hdf5", drop, **changes)
    assert expected in error_of(
        ["--dataset-path", "trap.hdf5", "--env-id", ENV_ID], monkeypatch, capsys
    )
    assert not Path("runs").exists()


def test_a_file_that_is_not_hdf5(here, monkeypatch, capsys):
    (here / "trap.hdf5").write_bytes(b"no data")
    assert "cannot read trap.hdf5" in error_of(
        ["--dataset-path", "trap.hdf5", "--env-id", ENV_ID], monkeypatch, capsys
    )


def test_resume_refuses_what_would_change_the_learning(finished, here, monkeypatch, capsys):
    run = str(shutil.copytree(finished, here / "run"))
    assert "--cql-alpha cannot be changed" in error_of(
        ["--resume", run, "--cql-alpha", "1"], monkeypatch, capsys
    )
    assert "--num-seeds cannot be changed" in error_of(
        ["--resume", run, "--num-seeds", "2"], monkeypatch, capsys
    )
    (Path(run) / "agent.npz").write_bytes(b"half a file")
    assert "not a whole checkpoint" in error_of(["--evaluate", run], monkeypatch, capsys)


def test_defaults_are_the_papers_values():
    args = Args()
    assert (args.candidate_steps, args.gradient_steps, args.batch_size) == (
        5_000_000,
        1_000_000,
        256,
    )
    assert (args.cql_alpha, args.gamma, args.n_step, args.num_actions) == (5.0, 0.995, 3, 10)
    assert (args.learning_rate, args.candidate_learning_rate, args.temperature) == (
        1e-4,
        3e-4,
        0.001,
    )
    assert (args.munchausen_tau, args.munchausen_alpha, args.eval_every, args.eval_episodes) == (
        0.03,
        0.9,
        50_000,
        10,
    )


def test_help_reads_like_documentation(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_script(["--help"], monkeypatch)
    printed = capsys.readouterr().out
    assert (
        stopped.value.code == 0
        and "--cql-alpha" in printed
        and "AQuaCQL" in printed
        and "--env-spec" not in printed
    )
