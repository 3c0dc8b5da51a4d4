"""bc_mdn.py: losses, Wasserstein distance, whole runs on a tiny environment, and what happens to bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import minari
import numpy as np
import optax
import ot
import pytest

import bc_mdn

SCRIPT = Path(bc_mdn.__file__)
ENV_ID, DATASET_ID = "tiny_env:Reach-v0", "tiny/reach/expert-v0"


@pytest.fixture
def tiny(datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and everything small enough for a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bc_mdn, "SINKHORN_POINTS", 50)
    monkeypatch.setattr(bc_mdn, "HUMAN_REPETITIONS", 5)
    monkeypatch.setattr(bc_mdn.CloningRun, "catch_signals", lambda run: None)
    return tmp_path


TINY = [
    "--env-id",
    ENV_ID,
    "--dataset-id",
    DATASET_ID,
    "--eval-episodes",
    "3",
    "--batch-size",
    "16",
    "--quiet",
]
METHODS = {
    "bc": ["bc", "--num-units", "16", "--hidden-dropout", "0.1"],
    "mdn": ["mdn", "--num-actions", "3"],
}


def run_script(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bc_mdn.py", *argv])
    bc_mdn.main()


def only_run() -> Path:
    (run,) = Path("runs").iterdir()
    return run


# --------------------------------------------------------------------------------------------- demonstrations


@pytest.mark.parametrize(
    "fraction, kept",
    [(0.1, [1]), (0.25, [1]), (0.26, [1, 3]), (0.75, [0, 1, 3]), (1.0, [0, 1, 2, 3])],
)
def test_the_best_fraction_of_episodes_by_return(fraction, kept):
    lengths, returns = [3, 1, 4, 2], [2.0, 9.0, -8.0, 5.0]
    episode = np.repeat(np.arange(4), lengths)
    rewards = np.concatenate(
        [[total, *[0.0] * (length - 1)] for total, length in zip(returns, lengths)]
    )
    ends = np.append(episode[1:] != episode[:-1], True)
    demos = bc_mdn.Demonstrations(
        episode[:, None], episode[:, None] + 10, rewards, episode[:, None], ends, ends
    )
    best = bc_mdn.best_episodes(demos, fraction)
    expected = np.isin(episode, kept)
    for array, whole in zip(best, demos):
        np.testing.assert_array_equal(array, whole[expected])


# ----------------------------------------------------------------------------------------------------- losses


def random_batch(seed: int = 0, batch: int = 32, k: int = 4, dim: int = 3):
    keys = jax.random.split(jax.random.PRNGKey(seed), 3)
    return (
        jax.random.normal(keys[0], (batch, k, dim)),
        jax.random.normal(keys[1], (batch, dim)),
        keys[2],
    )


@pytest.mark.parametrize("temperature", [0.001, 0.1, 10.0])
def test_one_candidate_gives_the_gradient_of_the_squared_error(temperature):
    network = bc_mdn.CandidateNetwork(1, 3, (16,), (16,))
    observations, actions = (
        jax.random.normal(jax.random.PRNGKey(0), (64, 5)),
        random_batch(batch=64)[1],
    )
    params = network.init(jax.random.PRNGKey(1), observations)
    squared = jax.grad(
        lambda p: bc_mdn.squared_error(network.apply(p, observations)[:, 0], actions)
    )(params)
    soft_min = jax.grad(
        lambda p: bc_mdn.soft_min_loss(network.apply(p, observations), actions, temperature)
    )(params)
    for one, other in zip(jax.tree.leaves(squared), jax.tree.leaves(soft_min)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_squared_error_against_a_loop():
    candidates, actions, _ = random_batch()
    by_hand = np.mean(
        [sum((p - a) ** 2) for p, a in zip(np.asarray(candidates[:, 0]), np.asarray(actions))]
    )
    np.testing.assert_allclose(bc_mdn.squared_error(candidates[:, 0], actions), by_hand, rtol=1e-5)


def test_logits_losses_against_a_loop():
    candidates, actions, key = random_batch()
    logits, temperature, paper, nll = jax.random.normal(key, (32, 4)), 2.0, [], []
    for c, a, p in zip(*(np.asarray(x, np.float64) for x in (candidates, actions, logits))):
        probabilities = np.exp(p) / np.exp(p).sum()
        paper.append(-sum(probabilities * np.exp(-((c - a) ** 2).sum(axis=1) / temperature)))
        nll.append(-np.log(-paper[-1]))
    np.testing.assert_allclose(
        bc_mdn.paper_logits_loss(logits, candidates, actions, temperature), np.mean(paper), 1e-5
    )
    np.testing.assert_allclose(
        bc_mdn.nll_logits_loss(logits, candidates, actions, temperature), np.mean(nll), 1e-5
    )


@pytest.mark.parametrize("name", ["paper", "nll"])
def test_second_loss_does_not_move_the_candidates(name):
    candidates, actions, _ = random_batch()
    loss = bc_mdn.LOGITS_LOSSES[name]
    assert not np.any(jax.grad(loss, argnums=1)(jnp.zeros((32, 4)), candidates, actions, 1.0))


def test_loss_as_written_underflows_and_the_likelihood_does_not():
    actions, logits = jnp.zeros((1, 1)), jnp.zeros((1, 2))
    candidates = jnp.sqrt(jnp.array([[[0.15], [0.2]]]))  # squared distances of 0.15 and 0.2
    assert not np.any(jax.grad(bc_mdn.paper_logits_loss)(logits, candidates, actions, 0.001))
    np.testing.assert_allclose(
        jax.grad(bc_mdn.nll_logits_loss)(logits, candidates, actions, 0.001), [[-0.5, 0.5]]
    )


def test_mixture_heads_read_one_shared_layer():
    network = bc_mdn.MixtureNetwork(4, 3, torso=8, head=(6,), hidden_dropout=0.5)
    params = network.init(jax.random.PRNGKey(0), jnp.zeros((2, 5)))
    shapes = {
        path[-2].key + "/" + path[-1].key: x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    assert shapes["Dense_0/kernel"] == (5, 8) and shapes["Dense_1/kernel"] == (8, 4)
    assert shapes["CandidateNetwork_0/head_0_kernel"] == (8, 4, 6)
    candidates, logits = network.apply(params, jnp.ones((7, 5)))
    assert candidates.shape == (7, 4, 3) and logits.shape == (7, 4)


def test_mdn_recovers_two_modes_and_their_proportions():
    generator = np.random.default_rng(0)
    observations = generator.uniform(-1, 1, (4000, 2)).astype(np.float32)
    share = np.where(observations[:, 0] > 0, 0.7, 0.2)  # of the first mode; it depends on the state
    first = generator.random(4000) < share
    modes = np.stack(
        [observations * 0.2 + 0.6, observations * 0.2 - 0.6], axis=1
    )  # (N, 2 modes, 2)
    actions = modes[np.arange(4000), np.where(first, 0, 1)] + 0.02 * generator.normal(
        size=(4000, 2)
    )
    args = bc_mdn.MDNArgs(num_actions=6, batch_size=128)
    network, optimizer = bc_mdn.MixtureNetwork(6, 2, torso=64, head=(64,)), optax.adam(1e-3)
    params = network.init(jax.random.PRNGKey(0), observations[:1])
    update = bc_mdn.make_update(network, optimizer, args)
    state = bc_mdn.CloningState(params, optimizer.init(params), jax.random.PRNGKey(1))
    state, _ = update(state, jnp.asarray(observations), jnp.asarray(actions, jnp.float32), 4000)
    candidates, logits = network.apply(state.params, observations)
    probabilities = np.asarray(jax.nn.softmax(logits))
    gaps = np.linalg.norm(np.asarray(candidates)[:, :, None] - modes[:, None], axis=-1)  # (N, K, 2)
    near = gaps < 0.2
    assert (
        np.mean(np.sum(probabilities * near.any(axis=2), axis=1)) > 0.97
    )  # hardly any sample away from both
    assert np.median(gaps.min(axis=1), axis=0).max() < 0.05  # both are found
    learned = np.sum(probabilities * near[:, :, 0], axis=1)
    for side in (observations[:, 0] > 0, observations[:, 0] < 0):
        assert abs(learned[side].mean() - share[side].mean()) < 0.05


# ---------------------------------------------------------------------------------------- Wasserstein distance


def uniform(n: int) -> np.ndarray:
    return np.full(n, 1 / n, np.float32)


def cost(x: np.ndarray, y: np.ndarray, epsilon: float = 0.1) -> float:
    return float(bc_mdn.sinkhorn_cost(x, y, uniform(len(x)), uniform(len(y)), epsilon))


def random_sets(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(60, 3)).astype(np.float32), generator.normal(
        0.5, 1.5, (45, 3)
    ).astype(np.float32)


@pytest.mark.parametrize("epsilon", [0.05, bc_mdn.SINKHORN_EPSILON, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sinkhorn_agrees_with_pot(seed, epsilon):
    x, y = random_sets(seed)
    distances = ot.dist(x.astype(np.float64), y.astype(np.float64), metric="euclidean")
    a, b = (np.full(len(z), 1 / len(z)) for z in (x, y))
    theirs = ot.sinkhorn2(
        a, b, distances, epsilon, method="sinkhorn_log", numItermax=100_000, stopThr=1e-8
    )
    assert cost(x, y, epsilon) == pytest.approx(float(theirs), rel=0.01)


def test_sinkhorn_grows_as_one_set_is_shifted_away():
    x, y = random_sets()
    costs = [cost(x, y + shift) for shift in (0, 1, 2, 4, 8)]
    assert all(np.diff(costs) > 0)
    far = np.float32(100) * np.array([1, 0, 0], np.float32)
    assert cost(x, x + far) == pytest.approx(100, rel=0.01)


def test_sinkhorn_does_not_depend_on_the_order_of_points():
    x, y = random_sets()
    generator = np.random.default_rng(0)
    assert cost(generator.permutation(x), generator.permutation(y)) == pytest.approx(
        cost(x, y), rel=1e-4
    )


def test_points_of_weight_zero_do_not_count(monkeypatch):
    x, y = random_sets()
    monkeypatch.setattr(bc_mdn, "SINKHORN_POINTS", 80)
    points, weights = bc_mdn.draw_states(x, np.random.default_rng(0))
    assert (
        points.shape == (80, 3) and weights.sum() == pytest.approx(1) and (weights > 0).sum() == 60
    )
    padded = float(bc_mdn.sinkhorn_cost(points, y, weights, uniform(45), 0.1))
    assert padded == pytest.approx(cost(x, y), rel=1e-4)


def test_states_are_drawn_without_replacement_and_by_seed(monkeypatch):
    monkeypatch.setattr(bc_mdn, "SINKHORN_POINTS", 80)
    states = np.arange(200, dtype=np.float32)[:, None]
    draws = [bc_mdn.draw_states(states, np.random.default_rng(seed))[0] for seed in (3, 3, 4)]
    assert len(np.unique(draws[0])) == 80 and np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


def demonstrations(episodes: int, length: int = 10) -> bc_mdn.Demonstrations:
    n = episodes * length
    observations = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    ends = np.arange(n) % length == length - 1
    return bc_mdn.Demonstrations(observations, observations, np.zeros(n), observations, ends, ends)


def test_human_score_sets_five_episodes_against_the_others(monkeypatch):
    sides = []
    monkeypatch.setattr(
        bc_mdn,
        "sinkhorn_cost",
        lambda x, y, a, b, epsilon: sides.append((x, y, a, b)) or len(sides),
    )
    monkeypatch.setattr(bc_mdn, "SINKHORN_POINTS", 200)
    demos = demonstrations(12)
    demos.observations[:, 0] = np.repeat(np.arange(12), 10)  # an episode can be told by its states
    scores = bc_mdn.human_scores(demos.observations, demos.ends, quiet=True)
    assert np.array_equal(scores, np.arange(1, 101))
    for x, y, a, b in sides:
        five, others = set(x[a > 0, 0]), set(y[b > 0, 0])
        assert len(five) == 5 and len(others) == 7 and not five & others
    assert len({tuple(sorted(set(x[a > 0, 0]))) for x, _, a, _ in sides}) > 50


def test_reference_has_quartiles_and_normalised_states(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))  # where the human score is kept
    monkeypatch.setattr(bc_mdn, "human_scores", lambda *_: np.arange(101.0))
    demos = demonstrations(6)
    demos.observations[:, 1] = 7.0  # never varies
    reference = bc_mdn.make_reference(demos, "tiny/x-v0", quiet=True)
    assert list(reference.human) == [25, 50, 75]
    states = reference.states[reference.weights > 0]
    np.testing.assert_allclose(states.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(states.std(axis=0), [1, 0], atol=1e-5)
    assert bc_mdn.wasserstein(demos.observations, reference) < 0.2


def test_too_few_episodes_for_a_human_score(capsys):
    reference = bc_mdn.make_reference(demonstrations(5), "tiny/x-v0", quiet=True)
    assert np.isnan(reference.human).all()
    assert "more than 5 episodes, and there are 5" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- policy


def test_mdn_samples_by_the_logits_and_reproducibly():
    class Mixture:
        def apply(self, params, observations):
            batch = len(observations)
            candidates = jnp.broadcast_to(
                jnp.array([[-3.0], [0.5]]), (batch, 2, 1)
            )  # the first is outside the box
            return candidates, jnp.broadcast_to(jnp.log(jnp.array([0.25, 0.75])), (batch, 2))

    box = gym.spaces.Box(-1, 1, (1,))
    policy = bc_mdn.make_policy(Mixture(), bc_mdn.MDNArgs(), None, box)
    one, again, later = (np.asarray(policy({}, np.zeros((4000, 1)), t)) for t in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, later)
    assert set(one[:, 0]) == {-1.0, 0.5} and np.mean(one[:, 0] == 0.5) == pytest.approx(
        0.75, abs=0.03
    )


# --------------------------------------------------------------------------------------------------- whole runs


def saved_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file}


@pytest.mark.parametrize("method", ["bc", "mdn"])
def test_interrupted_run_continues_bit_for_bit(method, tiny, monkeypatch, capsys):
    schedule = ["--gradient-steps", "80", "--eval-every", "20", "--checkpoint-every", "40"]
    run_script([*METHODS[method], *TINY, *schedule], monkeypatch)
    whole = only_run().rename(tiny / "whole")
    save_evaluation = bc_mdn.CloningRun.save_evaluation

    def killed_at_60(run, step, *rest, **scores):
        save_evaluation(run, step, *rest, **scores)
        if step == 60:
            run.lock.close()  # as the end of its process would
            raise KeyboardInterrupt

    monkeypatch.setattr(bc_mdn.CloningRun, "save_evaluation", killed_at_60)
    with pytest.raises(SystemExit) as stopped:
        run_script([*METHODS[method], *TINY, *schedule], monkeypatch)
    assert stopped.value.code == 130
    monkeypatch.setattr(bc_mdn.CloningRun, "save_evaluation", save_evaluation)
    run = only_run()
    assert json.loads(saved_arrays(run / "state.npz")["meta"].tobytes())["step"] == 40
    run_script(["--resume", str(run)], monkeypatch)
    assert (run / "evaluations.csv").read_text() == (whole / "evaluations.csv").read_text()
    for name in ("state.npz", "agent.npz", "reference.npz"):
        one, other = saved_arrays(run / name), saved_arrays(whole / name)
        assert one.keys() == other.keys() and all(
            np.array_equal(one[key], other[key]) for key in one
        ), name

    header, *rows = (run / "evaluations.csv").read_text().splitlines()
    columns = "step,success_rate,episodic_return,episodic_length,episodes,wasserstein,human_wasserstein_q25"
    assert header == f"{columns},human_wasserstein_median,human_wasserstein_q75"
    assert [row.split(",")[0] for row in rows] == ["0", "20", "40", "60", "80"]
    assert "nan" not in rows[-1] and rows[-1].split(",")[4] == "3"
    capsys.readouterr()
    run_script(["--evaluate", str(run), "--eval-episodes", "3", "--capture-video"], monkeypatch)
    printed = capsys.readouterr().out
    assert (
        f"Wasserstein distance {float(rows[-1].split(',')[5]):.3f}; human" in printed
    )  # the same sampled actions
    assert "success" in printed and (run / "videos" / "evaluation_80.mp4").stat().st_size > 0


def test_bc_learns_the_tiny_task(tiny, monkeypatch):
    run_script(["bc", *TINY, "--gradient-steps", "1500", "--eval-every", "1500"], monkeypatch)
    first, last = (
        (only_run() / "evaluations.csv").read_text().splitlines()[i].split(",") for i in (1, 2)
    )
    assert float(last[1]) == 1.0 and float(last[5]) < float(first[5])


def test_not_finite_loss_stops_and_keeps_the_last_good_checkpoint(tiny, monkeypatch):
    run_script(["bc", *TINY, "--gradient-steps", "40"], monkeypatch)
    run = only_run()
    good = (run / "state.npz").read_bytes()
    monkeypatch.setattr(
        bc_mdn, "squared_error", lambda predictions, actions: jnp.sum(predictions) * jnp.nan
    )
    with pytest.raises(SystemExit, match="error: not finite at step 80: .*lower --learning-rate"):
        run_script(["bc", "--resume", str(run), "--gradient-steps", "80"], monkeypatch)
    assert (run / "state.npz").read_bytes() == good


def test_two_processes_cannot_write_to_one_folder(tiny, monkeypatch, capsys):
    run_script(["bc", *TINY, "--gradient-steps", "5"], monkeypatch)
    run = only_run()
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); input()",
        ]
        + [str(run / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    longer = ["--resume", str(run), "--gradient-steps", "10"]
    assert f"{run} is in use by another process" in error_of(longer, monkeypatch, capsys)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    holder.kill()  # the lock dies with its process
    holder.wait()
    run_script(longer, monkeypatch)
    assert json.loads(saved_arrays(run / "state.npz")["meta"].tobytes())["step"] == 10


def test_sigterm_checkpoints_and_says_how_to_resume(datasets, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [
        sys.executable,
        str(SCRIPT),
        "bc",
        *TINY,
        "--num-demos",
        "5",
        "--gradient-steps",
        "100000000",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("runs/*/evaluations.csv")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=60)[1]
    (run,) = tmp_path.glob("runs/*")
    assert process.returncode == 128 + signal.SIGTERM
    assert f"continue with: python bc_mdn.py --resume runs/{run.name}" in error
    assert json.loads(saved_arrays(run / "state.npz")["meta"].tobytes())["step"] > 0


# ---------------------------------------------------------------------------------------------------- bad input


def error_of(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run_script(argv, monkeypatch)
    assert stopped.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["bc", "--learning-rate", "-1"], "--learning-rate is -1.0"),
        (["bc", "--num-units", "0"], "--num-units is 0"),
        (["mdn", "--hidden-dropout", "1"], "--hidden-dropout is 1.0"),
        (["mdn", "--temperature", "0"], "--temperature is 0.0"),
        (["mdn", "--num-actions", "0"], "--num-actions is 0"),
        (["bc", "--best-fraction", "1.5"], "--best-fraction is 1.5"),
        (["bc", "--env-id", "NoSuchEnv-v0"], "cannot make environment 'NoSuchEnv-v0'"),
        (["bc", "--env-id", "CartPole-v1"], "AQuaDem needs a Box"),
        (
            ["mdn", "--env-id", "Pendulum-v1", "--dataset-id", DATASET_ID],
            "field observations has shape (22, 4), Pendulum-v1 needs (22, 3)",
        ),
        (["bc", "--env-id", ENV_ID], "has no default demonstrations"),
        (
            ["bc", "--env-id", ENV_ID, "--dataset-id", "tiny/nothing-v0"],
            "cannot download dataset 'tiny/nothing-v0'",
        ),
        (["--resume", "nowhere"], "nowhere is not a run folder"),
        (["--resume=nowhere"], "nowhere is not a run folder"),
        (["--evaluate", "nowhere"], "nowhere is not a run folder"),
    ],
)
def test_bad_input_ends_with_one_line(argv, expected, tiny, monkeypatch, capsys):
    load_dataset = minari.load_dataset

    def without_network(dataset_id: str, download: bool = False):
        if download:
            raise ConnectionError("no network in a test")
        return load_dataset(dataset_id)

    monkeypatch.setattr(minari, "load_dataset", without_network)
    assert expected in error_of(argv, monkeypatch, capsys)
    assert not Path("runs").exists()


def test_resume_refuses_what_would_change_the_learning(tiny, monkeypatch, capsys):
    run_script(["bc", *TINY, "--gradient-steps", "5"], monkeypatch)
    run = str(only_run())
    assert "--batch-size cannot be changed" in error_of(
        ["--resume", run, "--batch-size", "8"], monkeypatch, capsys
    )
    assert "is a run of bc, not of mdn" in error_of(["mdn", "--resume", run], monkeypatch, capsys)
    (Path(run) / "agent.npz").write_bytes(b"half a file")
    assert "not a whole checkpoint" in error_of(["--evaluate", run], monkeypatch, capsys)


@pytest.mark.parametrize("method, option", [("bc", "--num-layers"), ("mdn", "--logits-loss")])
def test_help_reads_like_documentation(method, option, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_script([method, "--help"], monkeypatch)
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and option in printed and "60000" in printed


def test_defaults_are_the_papers_bold_values():
    bc, mdn = bc_mdn.BCArgs(), bc_mdn.MDNArgs()
    assert (bc.gradient_steps, bc.batch_size, bc.learning_rate, bc.num_layers, bc.num_units) == (
        60_000,
        256,
        3e-4,
        1,
        256,
    )
    assert (bc.activation, bc.normalize_observations, bc.weight_decay) == ("tanh", True, 0)
    assert (mdn.gradient_steps, mdn.batch_size, mdn.learning_rate, mdn.num_actions) == (
        60_000,
        256,
        3e-4,
        10,
    )
    assert mdn.temperature == 0.001
    assert all((x.input_dropout, x.hidden_dropout) == (0, 0) for x in (bc, mdn))
