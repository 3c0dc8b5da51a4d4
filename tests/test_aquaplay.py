"""AQuaPlay: the meshes, the update, and training end to end on seconds of play."""

import contextlib
import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import aquaplay
import record
import robodesk_env
from aquaplay import Args

ROOT = Path(__file__).parents[1]
DATASET = "tiny/play-v0"
RECORD = record.PlayArgs(dataset_id=DATASET, num_episodes=2, episode_steps=600, quiet=True)
FAST = dict(
    dataset_id=DATASET,
    candidate_steps=100,
    num_actions=4,
    total_timesteps=600,
    eval_every=300,
    eval_episodes=1,
    learning_starts=400,
    checkpoint_every=500,
    batch_size=16,
    quiet=True,
)


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """A Minari root with a few seconds of recorded play."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
    patch.setattr(record.os, "sched_getaffinity", lambda _: {0})
    record.record_play(RECORD)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def finished(play, tmp_path_factory) -> Path:
    """The folder in which an uninterrupted run was made, on the task push_green."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        aquaplay.train(Args(task="push_green", **FAST))
    return folder


def arrays(path: Path) -> list[np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return [file[name] for name in file.files if name != "meta"]


# ----------------------------------------------------------------------------------------------- desk and play


def test_nothing_is_printed(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import aquaplay;"
    code += "e = aquaplay.make_env(aquaplay.Args(task='stack'));"
    code += "e.reset(seed=0); e.step(e.action_space.sample()); assert 'gym' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_robodesk_the_user_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(aquaplay.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(aquaplay.UserError, match="RoboDesk is not installed: pip install robodesk"):
        aquaplay.check_task(Args())


def test_the_tasks_of_all_are_the_base_tasks():
    assert tuple(aquaplay.BASE_TASKS) == robodesk_env.BASE_TASKS


def test_play_is_recorded_where_there_is_none(tmp_path, monkeypatch, capsys):
    """The recorder is called as a program; here it is told to record little."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    call, commands = subprocess.run, []

    def run(command: list[str]) -> subprocess.CompletedProcess:
        commands.append(command)
        return call([*command, "--num-episodes", "1", "--episode-steps", "20"])

    monkeypatch.setattr(aquaplay.subprocess, "run", run)
    args = Args(quiet=True)
    env = aquaplay.make_env(Args(task="stack"))
    demos, dataset_id = aquaplay.find_play(args, env)
    assert dataset_id == aquaplay.PLAY and demos.actions.shape == (20, 5)
    assert f"there is no play yet: recording {aquaplay.PLAY}" in capsys.readouterr().err
    assert commands == [
        [sys.executable, str(ROOT / "record.py"), "play", "--dataset-id", aquaplay.PLAY, "--quiet"]
    ]
    aquaplay.find_play(Args(quiet=True), env)
    assert len(commands) == 1  # once


def test_a_recorder_that_fails_ends_the_training(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr(
        aquaplay.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 2)
    )
    with pytest.raises(SystemExit) as stopped:
        aquaplay.find_play(Args(quiet=True), aquaplay.make_env(Args(task="stack")))
    assert stopped.value.code == 2


# ---------------------------------------------------------------------------------------- meshes and the agent


@pytest.mark.parametrize(
    "name, mesh", [("bb2", [-1, 1]), ("bb3", [-1, 0, 1]), ("bb5", [-1, -0.5, 0, 0.5, 1])]
)
def test_bang_bang_tables_are_the_papers_meshes(name, mesh):
    table = aquaplay.bang_bang_actions(aquaplay.MESHES[name], 5)
    assert len(table) == {"bb2": 32, "bb3": 243, "bb5": 3125}[name]
    assert {tuple(row) for row in table} == set(itertools.product(mesh, repeat=5))


def test_the_update_is_munchausen_dqn_on_the_replay_alone():
    args = Args(batch_size=4, n_step=1, target_update_period=3)
    network, optimizer = aquaplay.QNetwork(3), optax.sgd(0.1)
    rng = np.random.default_rng(0)
    observations, next_observations = rng.normal(size=(2, 20, 2))
    steps = aquaplay.Transition(
        observations,
        next_observations,
        rng.integers(3, size=20),
        rng.random(20),
        *np.zeros((2, 20)),
    )
    replay = aquaplay.store(aquaplay.make_replay(20, 2), aquaplay.as_stored(steps))
    params = network.init(jax.random.PRNGKey(0), jnp.zeros(2))
    key = jax.random.PRNGKey(1)
    copies = [jax.tree.map(jnp.copy, params) for _ in range(3)]
    state = aquaplay.AgentState(
        *copies, optimizer.init(params), jnp.zeros((), jnp.int32), jnp.copy(key)
    )
    ours, _ = aquaplay.make_update(network, optimizer, args)(state, replay)

    @jax.jit
    def reference(params, target_params, batch_key):
        batch = aquaplay.sample(replay, batch_key, 4, 1, args.gamma)
        log_policy = jax.nn.log_softmax(network.apply(target_params, batch.observations) / 0.03)
        q_next = network.apply(target_params, batch.next_observations)
        next_policy = jax.nn.softmax(q_next / 0.03)
        value = jnp.sum(next_policy * (q_next - 0.03 * jnp.log(next_policy + 1e-30)), axis=1)
        target = (
            batch.returns + 0.9 * 0.03 * log_policy[jnp.arange(4), batch.indices] + 0.99 * value
        )

        def loss(params):
            q = network.apply(params, batch.observations)[jnp.arange(4), batch.indices]
            return optax.huber_loss(q, target).mean()

        return jax.tree.map(
            lambda value, slope: value - 0.1 * slope, params, jax.grad(loss)(params)
        )

    target_params = params
    for update in range(aquaplay.STEPS_PER_CALL):
        key, batch_key = jax.random.split(key)
        params = reference(params, target_params, batch_key)
        target_params = params if (update + 1) % 3 == 0 else target_params
    for ours_leaf, leaf in zip(jax.tree.leaves(ours.params), jax.tree.leaves(params), strict=True):
        assert_allclose(ours_leaf, leaf, atol=2e-5)


def test_a_run_leaves_everything_behind(finished):
    (run,) = (finished / "runs").iterdir()
    assert run.name.startswith("RoboDesk-push_green__aquaplay__1__")
    rows = [line.split(",") for line in (run / "evaluations.csv").read_text().splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [0, 300, 600] and all(
        0 < float(row[2]) < 500 for row in rows
    )
    assert (run / "candidates_along.npz").exists() and not list(run.glob("*.partial"))


def test_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    ((before,), (after,)) = (list((folder / "runs").iterdir()) for folder in (finished, tmp_path))
    (
        after / "agent.npz"
    ).unlink()  # the checkpoint is of step 500: 100 steps to go, in a new episode
    (after / "evaluations.csv").write_text(
        "\n".join((after / "evaluations.csv").read_text().splitlines()[:3]) + "\n"
    )
    monkeypatch.setattr(sys, "argv", ["aquaplay.py", "--resume", f"runs/{after.name}", "--quiet"])
    aquaplay.main()
    assert (after / "evaluations.csv").read_text() == (before / "evaluations.csv").read_text()
    for ours, theirs in zip(arrays(after / "agent.npz"), arrays(before / "agent.npz"), strict=True):
        assert_array_equal(ours, theirs)


def test_candidates_are_shared_by_tasks_but_not_by_settings(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    demos = aquaplay.load_demonstrations(
        DATASET, aquaplay.make_env(Args(task="stack")), sparse=False
    )
    (run,) = (finished / "runs").iterdir()
    start = aquaplay.start_temperature(Args(**FAST), demos.actions)
    settings = {**FAST, "temperature_start": start}
    same = aquaplay.fingerprint(Args(**{**settings, "task": "stack"}), demos)
    assert aquaplay.find_candidates(same) == f"runs/{run.name}"
    for change in (
        {"temperature": 0.1},
        {"temperature_start": 2 * start},
        {"seed": 2},
        {"num_actions": 5},
    ):
        assert (
            aquaplay.find_candidates(aquaplay.fingerprint(Args(**{**settings, **change}), demos))
            is None
        )
    loud = {**settings, "quiet": False}
    assert aquaplay.shared_candidates(Args(**loud), demos) == f"runs/{run.name}"
    assert f"reusing runs/{run.name}" in capsys.readouterr().out
    assert (
        aquaplay.shared_candidates(Args(**loud, candidates_from="asked_for"), demos) == "asked_for"
    )
    assert aquaplay.shared_candidates(Args(**loud, resume="a_run"), demos) is None
    other_play = demos._replace(actions=demos.actions * 0.5)
    assert aquaplay.find_candidates(aquaplay.fingerprint(Args(**settings), other_play)) is None


def test_borrowed_candidates_keep_the_mark_of_their_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    play = aquaplay.Demonstrations(*np.zeros((6, 3, 1), np.float32))
    trained, other = Args(seed=1), Args(seed=2, candidates_from="runs/trained")
    for name, args in (("trained", trained), ("borrower", other)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "candidates.npz").touch()
        aquaplay.mark_candidates(args, Path("runs") / name, play)
    assert (
        aquaplay.find_candidates(aquaplay.fingerprint(other, play)) is None
    )  # nothing was trained with seed 2
    shutil.rmtree("runs/trained")
    assert aquaplay.find_candidates(aquaplay.fingerprint(trained, play)) == "runs/borrower"


@pytest.mark.parametrize("lengths, every, pictured", [((40, 50), 1, 40), ((700, 24_300), 3, 500)])
def test_candidates_are_reported_over_all_of_the_play(lengths, every, pictured):
    count, random = sum(lengths), np.random.default_rng(0)
    ends = np.isin(np.arange(count), np.cumsum(lengths) - 1)
    observations, zeros = (
        random.normal(size=(count, 76)).astype(np.float32),
        np.zeros(count, np.float32),
    )
    actions = random.uniform(-1, 1, (count, 5)).astype(np.float32)
    play = aquaplay.Demonstrations(observations, actions, zeros, observations, ends, ends)
    run = MagicMock()
    log = run.log
    args = Args(num_actions=4, held_out_episodes=1, quiet=True)
    network = aquaplay.make_candidate_network(args, 5)
    params = network.init(jax.random.PRNGKey(0), observations[:1])
    aquaplay.report_on_play(args, run, network, params, play)

    indices = log.add_histogram.call_args.args[1]
    distances = np.linalg.norm(network.apply(params, observations) - actions[:, None], axis=-1)
    assert_array_equal(indices, np.argmin(distances, axis=1)[::every])
    _, _, piece = run.write_candidates_along.call_args.args
    assert len(piece.actions) == pictured and list(np.flatnonzero(piece.ends)) == [pictured - 1]
    scalars = {call.args[0]: call.args[1] for call in log.add_scalar.call_args_list}
    unseen = np.min(distances, axis=1)[::every][-(-lengths[0] // every) :]  # of the second episode
    assert_allclose(scalars["candidates/held_out_distance"], unseen.mean(), rtol=1e-5)


def test_evaluate_repeats_the_last_evaluation(finished, monkeypatch, capsys):
    (run,) = (finished / "runs").iterdir()
    monkeypatch.setattr(
        sys, "argv", ["aquaplay.py", "--evaluate", str(run), "--eval-episodes", "1"]
    )
    aquaplay.main()
    last = (run / "evaluations.csv").read_text().splitlines()[-1].split(",")
    out = capsys.readouterr().out
    assert f"success {float(last[1]):.3f} (" in out and f"return  {float(last[2]):.3f} +-" in out


def test_all_tasks_with_a_mesh_need_no_play_and_end_in_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(aquaplay, "BASE_TASKS", ["push_green", "stack"])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    arguments = "--task all --discretization bb3 --total-timesteps 8 --eval-episodes 1 --learning-starts 100".split()
    monkeypatch.setattr(
        sys, "argv", ["aquaplay.py", *arguments, "--robodesk-rewards", "upstream", "--quiet"]
    )
    aquaplay.main()
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in table[2:]] == ["| push_green", "| stack"]
    for path in tmp_path.glob("runs/*"):
        assert "__bb3__1__" in path.name and arrays(path / "candidates.npz")[0].shape == (243, 5)


# ------------------------------------------------------------------------------------------------------ misuse


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--task open_window", "no task 'open_window'"),
        ("--num-actions 0", "--num-actions is 0"),
        ("--dataset-id tiny/reach/expert-v0", "field observations has shape"),
        (
            f"--dataset-id {DATASET} --candidates-from nowhere",
            "nowhere/candidates.npz does not exist",
        ),
        ("--evaluate nowhere", "nowhere is not a run folder"),
        ("--resume nowhere", "nowhere is not a run folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments, message, play, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if "reach" in arguments:
        from conftest import record_demonstrations

        record_demonstrations("Reach-v0", "tiny/reach/expert-v0", episodes=1)
    monkeypatch.setattr(sys, "argv", ["aquaplay.py", *arguments.split(), "--quiet"])
    with pytest.raises(SystemExit) as exit:
        aquaplay.main()
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
