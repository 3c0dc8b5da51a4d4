"""aquagail.py: the discriminator and its rewards, a learner that sees no reward, whole runs on a tiny environment."""

import csv
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import gymnasium as gym
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_env
from numpy.testing import assert_allclose, assert_array_equal

import aquagail
from aquagail import Args, Replay, Transition

ENV_ID, DATASET_ID = "tiny_env:Reach-v0", "tiny/reach/expert-v0"
TINY = dict(
    env_id=ENV_ID,
    dataset_id=DATASET_ID,
    candidate_steps=200,
    num_actions=4,
    batch_size=16,
    buffer_size=300,
)
TINY |= dict(
    total_timesteps=1100, eval_every=550, eval_episodes=3, learning_starts=50, checkpoint_every=20
)
TINY |= dict(discriminator_learning_rate=1e-3, learning_rate=1e-3, quiet=True)


class SmallQNetwork(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> jax.Array:
        return nn.Dense(self.num_actions)(nn.tanh(nn.Dense(64)(observations)))


def small(patch: pytest.MonkeyPatch) -> None:
    """A small Q-network and Wasserstein distance, and no handlers of signals left behind."""
    patch.setattr(aquagail, "QNetwork", SmallQNetwork)
    patch.setattr(aquagail, "SINKHORN_POINTS", 50)
    patch.setattr(aquagail, "HUMAN_REPETITIONS", 5)
    patch.setattr(aquagail.Run, "catch_signals", lambda run: None)


def train_in(folder: Path, **changes) -> Path:
    """The run folder of a training in the given working folder."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        patch.chdir(folder)
        return folder / aquagail.train(Args(**TINY | changes))


def run_script(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    small(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["aquagail.py", *argv])
    aquagail.main()


def arrays(path: Path) -> list[np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return [file[name] for name in file.files if name != "meta"]


def make_discriminator(num_features: int, **changes: Any) -> aquagail.DiscriminatorState:
    key = jax.random.PRNGKey(changes.pop("seed", 1))
    return aquagail.init_discriminator(Args(**changes), key, jnp.zeros(num_features))


@jax.jit
def discriminator_step(
    state: aquagail.DiscriminatorState, expert: jax.Array, agent: jax.Array
) -> tuple[aquagail.DiscriminatorState, dict]:
    return aquagail.update_discriminator(state, expert, agent, Args())


def assert_same_run(one: Path, other: Path) -> None:
    """Candidates, agent, target network, discriminator, both optimisers, every key and all experience, bit for bit."""
    for name in ("candidates.npz", "agent.npz", "state.npz"):
        for ours, theirs in zip(arrays(one / name), arrays(other / name), strict=True):
            assert_array_equal(ours, theirs)
    assert (one / "replay.f32").read_bytes() == (other / "replay.f32").read_bytes()


@pytest.fixture(scope="module")
def finished(datasets, tmp_path_factory) -> Path:
    """The run folder of an uninterrupted run."""
    return train_in(tmp_path_factory.mktemp("finished"))


# ---------------------------------------------------------------------------------------------- discriminator


@pytest.mark.parametrize("p", [0.001, 0.3, 0.5, 0.9])
def test_rewards_are_those_of_the_paper(p):
    logit = jnp.log((1 - p) / p)  # p is the probability of "agent", the logit that of "expert"
    closed_forms = {
        0.0: -np.log(p),
        1.0: np.log(1 - p),
        0.5: -0.5 * np.log(p) + 0.5 * np.log(1 - p),
    }
    for balance, reward in closed_forms.items():
        assert_allclose(aquagail.discriminator_reward(logit, balance), reward, rtol=1e-5, atol=1e-6)
    assert_allclose(aquagail.discriminator_reward(logit, 0.5), logit / 2, rtol=1e-5, atol=1e-6)


def test_rewards_stay_finite_and_keep_their_sign():
    logits = jnp.array([-200.0, -1.0, 0.0, 1.0, 200.0])
    rewards = {
        balance: np.asarray(aquagail.discriminator_reward(logits, balance))
        for balance in (0.0, 0.5, 1.0)
    }
    assert all(
        np.isfinite(reward).all() and (np.diff(reward) >= 0).all() for reward in rewards.values()
    )
    assert (rewards[0.0] >= 0).all() and (rewards[1.0] <= 0).all()


def test_loss_against_a_computation_by_hand():
    expert, agent = [2.0, -1.0, 0.5], [0.0, -3.0, 1.0]
    by_hand = [-np.log(1 / (1 + np.exp(-x))) for x in expert] + [
        -np.log(1 - 1 / (1 + np.exp(-x))) for x in agent
    ]
    assert_allclose(
        aquagail.discriminator_loss(jnp.array(expert), jnp.array(agent)),
        np.mean(by_hand),
        rtol=1e-6,
    )
    assert_allclose(aquagail.discriminator_loss(jnp.zeros(3), jnp.zeros(3)), np.log(2), rtol=1e-6)


def test_what_the_discriminator_sees():
    steps = Transition(
        observation=jnp.ones((2, 5, 3)),
        next_observation=3 * jnp.ones((2, 5, 3)),
        action=2 * jnp.ones((2, 5, 1)),
        index=None,
        terminated=None,
        ended=None,
    )
    expected = {
        "state-action": [1, 1, 1, 2],
        "state": [1, 1, 1],
        "state-next-state": [1, 1, 1, 3, 3, 3],
    }
    for kind, values in expected.items():
        args = Args(discriminator_input=kind, normalize_observations=False)
        seen = aquagail.discriminator_input(args, None, steps)
        assert_array_equal(seen, np.broadcast_to(values, (2, 5, len(values))))


def test_observations_are_normalised_and_actions_are_not():
    generator = np.random.default_rng(0)
    observations, following = generator.normal(5, [1, 10], (2, 1000, 2))
    actions = generator.normal(size=(1000, 1))
    mean = observations.mean(axis=0)
    deviation = observations.std(axis=0)
    steps = Transition(observations, following, actions, None, None, None)
    reference = aquagail.Reference(mean, deviation, None, None, None)
    args = Args(discriminator_input="state-action")
    seen = aquagail.discriminator_input(args, reference, steps)
    assert_allclose(np.mean(seen[:, :2], axis=0), 0, atol=1e-5)
    assert_allclose(np.std(seen[:, :2], axis=0), 1, rtol=1e-5)
    assert_allclose(seen[:, 2:], actions, rtol=1e-6)
    args = Args(discriminator_input="state-next-state")
    seen = aquagail.discriminator_input(args, reference, steps)
    assert_allclose(seen[:, 2:], (following - mean) / deviation, rtol=1e-4, atol=1e-5)
    args = Args(discriminator_input="state-next-state", normalize_observations=False)
    seen = aquagail.discriminator_input(args, reference, steps)
    assert_allclose(seen, np.concatenate([observations, following], axis=1), rtol=1e-6)


@pytest.mark.parametrize("regularization", ["dropout", "weight-decay"])
def test_it_tells_two_gaussians_apart(regularization):
    state = make_discriminator(
        4,
        discriminator_regularization=regularization,
        discriminator_learning_rate=1e-2,
        discriminator_weight_decay=0.1,
    )
    generator = np.random.default_rng(0)
    for _ in range(300):
        expert, agent = (
            generator.normal([1, 1, 0, 0], 0.5, (64, 4)),
            generator.normal([-1, -1, 0, 0], 0.5, (64, 4)),
        )
        state, metrics = discriminator_step(state, expert, agent)
    assert metrics["discriminator/accuracy"] > 0.95 and metrics["discriminator/loss"] < 0.4
    assert metrics["discriminator/reward_mean"] < -1  # of the agent's steps
    rewards = aquagail.discriminator_reward(
        state.network.apply(state.params, jnp.array([[1.0, 1, 0, 0], [-1, -1, 0, 0]])), 0.5
    )
    assert rewards[0] > 1 > -1 > rewards[1]


def test_indistinguishable_data_is_neither_expert_nor_agent():
    state = make_discriminator(3, discriminator_learning_rate=1e-3)
    generator = np.random.default_rng(0)
    before = np.abs(state.network.apply(state.params, generator.normal(size=(500, 3)))).mean()
    for _ in range(600):
        state, _ = discriminator_step(
            state, *jnp.asarray(generator.normal(size=(2, 64, 3)), jnp.float32)
        )
    after = np.abs(state.network.apply(state.params, generator.normal(size=(500, 3)))).mean()
    assert after < 0.15 < before  # logits near 0: p = 1/2, reward 0


def test_regularisation_does_what_it_says():
    start = make_discriminator(6).params
    data = jax.random.normal(jax.random.PRNGKey(1), (2, 32, 6))

    def after_a_step(regularization: str) -> list[list[np.ndarray]]:
        """The parameters after one step on the same data, with either of two seeds."""
        state = make_discriminator(
            6,
            discriminator_regularization=regularization,
            discriminator_learning_rate=1e-3,
            discriminator_weight_decay=20.0,
        )
        states = [state.replace(key=jax.random.PRNGKey(seed)) for seed in (1, 2)]
        return [jax.tree.leaves(discriminator_step(state, *data)[0].params) for state in states]

    plain, decayed, dropped = map(after_a_step, ("none", "weight-decay", "dropout"))
    for before, ours, theirs in zip(jax.tree.leaves(start), decayed[0], plain[0], strict=True):
        decay = 1e-3 * 20.0 * before  # of every parameter
        assert_allclose(ours, theirs - decay, rtol=1e-4, atol=1e-6)
    for (one, other), random in ((plain, False), (decayed, False), (dropped, True)):
        assert any(np.any(a != b) for a, b in zip(one, other)) == random


def test_dropout_rates_and_sizes():
    state = make_discriminator(
        3, discriminator_layers=2, discriminator_units=7, discriminator_input_dropout=0.75
    )
    network = state.network
    params = state.params
    assert (network.input_dropout, network.hidden_dropout) == (0.75, 0.5)
    assert sorted(x.shape for x in jax.tree.leaves(params) if len(x.shape) == 2) == [
        (3, 7),
        (7, 1),
        (7, 7),
    ]
    assert jax.eval_shape(network.apply, params, jnp.zeros((4, 9, 3))).shape == (4, 9)


# ----------------------------------------------------------------------------------------- replay and updates


def filled_replay(count: int, capacity: int, seed: int = 0) -> tuple[Replay, Transition]:
    """A ring with observations (3,) and actions (2,), episodes of 1 to 6 steps, some of which terminate."""
    generator, steps = np.random.default_rng(seed), []
    replay = aquagail.make_replay(capacity, 3, 2)
    store = jax.jit(aquagail.store)
    for step in range(count):
        ended = generator.random() < 0.3
        terminated = ended and generator.random() < 0.5
        observation, following, action = (
            generator.normal(size=3),
            generator.normal(size=3),
            generator.normal(size=2),
        )
        observation[0] = step  # so that a sampled transition can be found again
        steps.append(Transition(observation, following, action, step % 7, terminated, ended))
    for start in range(0, count, 8):
        replay = store(replay, aquagail.stack_transitions(steps[start : start + 8]))
    return replay, aquagail.stack_transitions(steps)


def test_a_row_on_disk_is_observation_next_observation_action_index_terminated_ended():
    replay, steps = filled_replay(24, capacity=40)
    rows = np.stack([aquagail.pack(Transition(*step)) for step in zip(*steps)])
    scalars = np.stack([steps.index, steps.terminated, steps.ended], axis=1)
    expected = np.concatenate(
        [steps.observation, steps.next_observation, steps.action, scalars], axis=1
    )
    assert rows.dtype == np.float32
    assert_array_equal(rows, expected)
    for ours, theirs in zip(aquagail.unpack(rows, replay.transitions), steps, strict=True):
        assert ours.dtype == theirs.dtype
        assert_array_equal(ours, theirs)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("count", [24, 88])
def test_windows_and_their_rewards_against_brute_force(n_step, count):
    gamma = 0.9
    replay, steps = filled_replay(count, capacity=40)
    args = Args(discriminator_input="state-action", normalize_observations=False)
    judge = aquagail.Discriminator(1, 8)
    params = jax.jit(judge.init)(jax.random.PRNGKey(1), jnp.zeros(5))

    @jax.jit
    def draw(replay: Replay) -> aquagail.Batch:
        windows = aquagail.sample(replay, jax.random.PRNGKey(2), 300, n_step)
        logits = judge.apply(params, aquagail.discriminator_input(args, None, windows))
        return aquagail.reward_windows(windows, aquagail.discriminator_reward(logits, 0.5), gamma)

    batch = jax.tree.map(np.asarray, draw(replay))
    drawn = batch.observations[:, 0].astype(int)
    assert set(drawn) == set(
        range(max(0, count - 40), count)
    )  # everything that is kept, nothing else
    logits = np.asarray(
        judge.apply(params, np.concatenate([steps.observation, steps.action], axis=1))
    )
    for i, step in enumerate(drawn):
        total, factor, last = 0.0, 1.0, step
        for last in range(step, min(step + n_step, count)):
            total, factor = total + factor * logits[last] / 2, factor * gamma
            if steps.ended[last]:
                break
        assert_allclose(batch.returns[i], total, rtol=1e-4, atol=1e-5)
        assert_allclose(batch.discounts[i], 0 if steps.terminated[last] else factor, rtol=1e-5)
        assert_array_equal(batch.next_observations[i], steps.next_observation[last])
        assert batch.indices[i] == step % 7


@pytest.mark.parametrize("count", [24, 88])
def test_single_steps_are_whole_and_cover_what_is_stored(count):
    replay, steps = filled_replay(count, capacity=40)
    windows = aquagail.sample(replay, jax.random.PRNGKey(0), 500, n_step=1)
    drawn = jax.tree.map(lambda array: array[:, 0], windows)
    numbers = np.asarray(drawn.observation[:, 0]).astype(int)
    assert set(numbers) == set(range(max(0, count - 40), count))
    newest = numbers == count - 1  # a window ends there
    assert_array_equal(drawn.ended, np.where(newest, 1, steps.ended[numbers]))
    for ours, theirs in zip(drawn[:-1], steps[:-1], strict=True):
        assert_array_equal(ours, theirs[numbers])


def test_q_values_become_the_rewards_of_the_current_discriminator():
    """With no discount and no log-policy, Q is the reward; and it follows when the discriminator changes."""
    args = Args(gamma=0.0, munchausen_alpha=0.0, batch_size=32)
    replay, steps = filled_replay(40, capacity=40)
    reference = aquagail.Reference(np.array([20.0, 0, 0]), np.array([12.0, 1, 1]), None, None, None)
    q_network, optimizer = SmallQNetwork(7), optax.adam(1e-2)
    learn = aquagail.make_update(q_network, optimizer, reference, args)
    params = jax.jit(q_network.init)(jax.random.PRNGKey(0), jnp.zeros(3))
    average, target = (jax.tree.map(jnp.copy, params) for _ in range(2))
    agent = aquagail.AgentState(
        params,
        average,
        target,
        optimizer.init(params),
        jnp.zeros((), jnp.int32),
        jax.random.PRNGKey(1),
    )
    for seed in (0, 1):
        discriminator = make_discriminator(3, seed=seed, discriminator_learning_rate=1e-9)
        features = aquagail.discriminator_input(args, reference, steps)
        expected = discriminator.network.apply(discriminator.params, features) / 2
        for _ in range(250):
            agent, discriminator, metrics = learn(agent, discriminator, replay, replay)
        q = q_network.apply(agent.params, steps.observation)[np.arange(40), steps.index]
        assert (
            np.std(expected) > 0.05
            and np.corrcoef(q, expected)[0, 1] > 0.9
            and np.abs(np.mean(q - expected)) < 0.1
        )
        assert_allclose(metrics["discriminator/reward_mean"], np.mean(expected), atol=0.05)
        assert_allclose(metrics["discriminator/reward_std"], np.std(expected), rtol=0.3)


# -------------------------------------------------------------------------------------------------- whole runs


class Scrambled(tiny_env.Reach):
    """Reach with rewards and reports of success that mean nothing."""

    def step(self, action: np.ndarray) -> tuple:
        observation, reward, terminated, truncated, info = super().step(action)
        noise = float(np.sin(1e4 * reward))
        return observation, 100 * noise, terminated, truncated, {"success": noise > 0}


gym.register("Scrambled-v0", entry_point=Scrambled, max_episode_steps=21)


def test_no_reward_reaches_the_learner(finished, datasets, tmp_path):
    source, scrambled = datasets / DATASET_ID, datasets / "scrambled" / "reach" / "expert-v0"
    shutil.copytree(source, scrambled)
    with h5py.File(scrambled / "data" / "main_data.hdf5", "r+") as file:
        for episode in file.values():
            episode["rewards"][...] = np.random.default_rng(0).normal(size=len(episode["rewards"]))
            del episode["infos"]
    metadata = json.loads((scrambled / "data" / "metadata.json").read_text())
    (scrambled / "data" / "metadata.json").write_text(
        json.dumps({**metadata, "dataset_id": "scrambled/reach/expert-v0"})
    )
    run = train_in(tmp_path, env_id="Scrambled-v0", dataset_id="scrambled/reach/expert-v0")
    returns = [[row["episodic_return"] for row in read_scores(path)] for path in (run, finished)]
    assert returns[0] != returns[1]  # the rewards do differ
    assert_same_run(run, finished)


def test_interrupted_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch, capsys):
    """Asked to stop in the middle of an episode, after the ring is full; it saves in the middle of a block of steps."""
    asked, interrupted, evaluate = [], [], aquagail.evaluate

    def note_run(run: aquagail.Run) -> None:
        interrupted.append(run)
        run.signals = asked

    def evaluate_and_ask(*arguments):
        if asked or list(tmp_path.glob("runs/*/state.npz")):
            asked.append(signal.SIGTERM)
        return evaluate(*arguments)

    small(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(aquagail.Run, "catch_signals", note_run)
        patch.setattr(aquagail, "evaluate", evaluate_and_ask)
        aquagail.train(Args(**TINY, candidates_from=str(finished)))
    (run,) = (tmp_path / "runs").iterdir()
    assert (
        stopped.value.code == 128 + signal.SIGTERM
        and f"--resume runs/{run.name}" in capsys.readouterr().err
    )
    steps = (run / "replay.f32").stat().st_size // (4 * (2 * 4 + 2 + 3))
    assert TINY["buffer_size"] < steps == 567 and steps % aquagail.STEPS_PER_CALL
    interrupted[0].lock.close()  # as the end of its process would have done
    with (run / "replay.f32").open("ab") as file:
        file.write(b"half a row")  # what a kill in the middle of a checkpoint leaves
    run_script(monkeypatch, "--resume", str(run), "--quiet")
    assert (run / "evaluations.csv").read_text() == (finished / "evaluations.csv").read_text()
    assert_same_run(run, finished)


def read_scores(run: Path) -> list[dict]:
    with (run / "evaluations.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_everything_behind(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = read_scores(finished)
    assert [int(row["step"]) for row in rows] == [0, 550, 1100]
    assert all(
        0 <= float(row["success_rate"]) <= 1 and float(row["wasserstein"]) > 0 for row in rows
    )
    assert (
        len({row["human_wasserstein_median"] for row in rows}) == 1
        and float(rows[0]["human_wasserstein_median"]) > 0
    )
    assert (finished / "candidates_along.npz").exists()
    assert finished.name.startswith("tiny_env_Reach-v0__aquagail__1__") and not list(
        finished.glob("*.partial")
    )
    events = EventAccumulator(str(finished), size_guidance={"scalars": 0})
    events.Reload()
    judged = {f"discriminator/{name}" for name in ("accuracy", "loss", "reward_mean", "reward_std")}
    scored = {
        "eval/success_rate",
        "eval/wasserstein",
        "charts/SPS",
        "charts/success",
        "losses/q_loss",
        "candidates/loss",
    }
    assert judged | scored <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("eval/wasserstein")] == [0, 550, 1100]
    assert 0.5 < events.Scalars("discriminator/accuracy")[-1].value <= 1


def test_the_discriminator_is_in_the_checkpoint(finished):
    args = aquagail.load_args(finished)
    key = jax.random.fold_in(jax.random.PRNGKey(args.seed), 2)
    fresh = aquagail.init_discriminator(args, key, jnp.zeros(4))
    expected = {leaf.shape for leaf in jax.tree.leaves(fresh.params) if leaf.ndim == 2}
    kept = [array for array in arrays(finished / "state.npz") if array.shape in expected]
    assert {array.shape for array in kept} == expected == {(4, 64), (64, 1)}
    start = {leaf.shape: leaf for leaf in jax.tree.leaves(fresh.params)}
    assert not any(
        np.array_equal(array, start[array.shape]) for array in kept
    )  # and it has learned


def test_the_executed_action_is_kept_beside_its_index(finished):
    args = aquagail.load_args(finished)
    rows = np.fromfile(finished / "replay.f32", np.float32).reshape(-1, 2 * 4 + 2 + 3)
    network = aquagail.make_candidate_network(args, 2)
    candidates = network.apply(aquagail.load_candidates(finished, network, 4), rows[:, :4])
    chosen = np.clip(np.asarray(candidates)[np.arange(len(rows)), rows[:, -3].astype(int)], -1, 1)
    assert_allclose(rows[:, 8:10], chosen, atol=1e-4)


def test_evaluate_repeats_the_last_evaluation(finished, monkeypatch, capsys):
    run_script(monkeypatch, "--evaluate", str(finished), "--eval-episodes", "3", "--capture-video")
    out, last = capsys.readouterr().out, read_scores(finished)[-1]
    assert (
        f"success {float(last['success_rate']):.3f} (" in out
        and f"return  {float(last['episodic_return']):.3f}" in out
    )
    distance, human = float(last["wasserstein"]), float(last["human_wasserstein_median"])
    assert f"Wasserstein distance {distance:.3f}; human {human:.3f} (" in out
    assert (finished / "videos" / "evaluation_1100.mp4").stat().st_size > 500


# ------------------------------------------------------------------------------------------------- the human score


@pytest.fixture
def small_scores(monkeypatch, tmp_path) -> list[int]:
    """An empty Minari root, and a list that grows with every human score that is worked out."""
    computed = []

    def human_scores(states: np.ndarray, ends: np.ndarray, quiet: bool) -> np.ndarray:
        computed.append(len(states))
        return np.arange(101.0) / 7

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setattr(aquagail, "human_scores", human_scores)
    return computed


def demonstrations(episodes: int, seed: int = 0) -> aquagail.Demonstrations:
    states = np.random.default_rng(seed).normal(size=(episodes * 4, 3)).astype(np.float32)
    ends = np.arange(len(states)) % 4 == 3
    return aquagail.Demonstrations(states, states, ends, states, ends, ends)


def test_the_human_score_is_made_once_per_dataset(small_scores, tmp_path, monkeypatch):
    first, again = (aquagail.make_reference(demonstrations(6), "a/b-v0") for _ in range(2))
    assert small_scores == [24]
    for ours, theirs in zip(first, again, strict=True):
        assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype == np.float32
    (path,) = (tmp_path / "minari").iterdir()
    assert path.name.startswith("human_score_a_b-v0_")
    aquagail.make_reference(demonstrations(6, seed=1), "a/b-v0")  # the dataset was made anew
    aquagail.make_reference(demonstrations(7), "a/b-v0")
    monkeypatch.setattr(aquagail, "SINKHORN_POINTS", 10)
    aquagail.make_reference(demonstrations(6), "a/b-v0")
    assert small_scores == [24, 24, 28, 24]


@pytest.mark.parametrize("damage", [b"", b"[1.0, 2", b"[1.0]", b"{}", b"\xff\x00", b'["a", 1, 2]'])
def test_a_damaged_human_score_is_made_again(small_scores, tmp_path, damage):
    whole = aquagail.make_reference(demonstrations(6), "a-v0").human
    (path,) = (tmp_path / "minari").iterdir()
    path.write_bytes(damage)
    for _ in range(2):
        assert_array_equal(aquagail.make_reference(demonstrations(6), "a-v0").human, whole)
    assert len(small_scores) == 2


def test_a_root_that_cannot_be_written_costs_only_time(small_scores, tmp_path):
    (tmp_path / "minari").write_text("a file, not a folder")
    for _ in range(2):
        assert np.isfinite(aquagail.make_reference(demonstrations(6), "a-v0").human).all()
    assert len(small_scores) == 2


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--num-actions", "0"], "--num-actions"),
        (["--reward-balance", "1.5"], "--reward-balance"),
        (["--reward-balance", "nan"], "--reward-balance"),
        (["--discriminator-learning-rate", "0"], "--discriminator-learning-rate"),
        (["--discriminator-input-dropout", "1"], "--discriminator-input-dropout"),
        (["--discriminator-weight-decay", "-1"], "--discriminator-weight-decay"),
        (["--discriminator-units", "0"], "--discriminator-units"),
        (["--n-step", "0"], "--n-step"),
        (["--env-id", "NoSuchEnv-v0"], "NoSuchEnv"),
        (["--env-id", "CartPole-v1"], "Box"),
        (["--env-id", "Pendulum-v1"], "--dataset-id"),
        (["--env-id", "Pendulum-v1", "--dataset-id", DATASET_ID], "shape"),
        (["--env-id", ENV_ID, "--dataset-id", "not an id"], "not an id"),
        (
            ["--env-id", ENV_ID, "--dataset-id", DATASET_ID, "--candidates-from", "no/such/run"],
            "no/such/run",
        ),
        (["--resume", "no/such/run"], "no/such/run"),
        (["--evaluate", "no/such/run"], "no/such/run"),
    ],
)
def test_bad_arguments_end_with_one_line_and_code_2(
    datasets, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run_script(monkeypatch, *arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith("error: ") and words in line
    assert not list(tmp_path.iterdir())


def test_resume_refuses_another_discriminator(finished, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_script(monkeypatch, "--resume", str(finished), "--discriminator-input", "state-action")
    assert stopped.value.code == 2 and "--discriminator-input" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, damage",
    [("state.npz", b"PK\x03\x04 cut off"), ("reference.npz", b""), ("replay.f32", b"")],
)
def test_a_damaged_checkpoint_is_one_line(finished, tmp_path, monkeypatch, capsys, name, damage):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / name).write_bytes(damage)
    with pytest.raises(SystemExit) as stopped:
        run_script(monkeypatch, "--resume", str(run), "--quiet")
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and name in line
