"""AQuaPlay: the desk against the package it wraps, the play, the meshes, and training end to end on seconds of play."""

import contextlib
import io
import itertools
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import aquaplay
from aquaplay import Args, CollectArgs, Desk, Player, UserError

ROOT = Path(__file__).parents[1]
TASKS = Desk.BASE_TASKS + Desk.OTHER_TASKS
DATASET = "tiny/play-v0"
RECORD = CollectArgs(dataset_id=DATASET, num_episodes=2, episode_steps=600, quiet=True)
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
def desk() -> Desk:
    return Desk("open_slide", "fixed")


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """A Minari root with a few seconds of recorded play."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
    patch.setattr(aquaplay.os, "sched_getaffinity", lambda _: {0})
    aquaplay.collect(RECORD)
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


# --------------------------------------------------------------------------------------------------- the desk


def test_the_simulation_is_the_packages(monkeypatch):
    with contextlib.redirect_stderr(io.StringIO()):
        from robodesk import RoboDesk
    monkeypatch.setattr(RoboDesk, "render", lambda self, resize: None)
    theirs, ours = RoboDesk("open_slide"), Desk("open_slide", "upstream")
    assert set(theirs.all_tasks) == set(TASKS)
    generator = np.random.default_rng(3)  # the same draws as Gymnasium's from the seed 3
    monkeypatch.setattr(np.random, "random", generator.random)
    monkeypatch.setattr(np.random, "uniform", generator.uniform)
    theirs.reset()
    ours.reset(seed=3)
    rng = np.random.default_rng(0)
    for step in range(500):
        action = np.clip(rng.uniform(-1, 1, 5) + [0, 0.3, -0.2, 0, 0], -1, 1)  # towards the table and its things
        seen, reward, done, _ = theirs.step(action)
        observation, our_reward, terminated, truncated, _ = ours.step(action)
        physics = theirs.physics.data
        assert_allclose(ours.data.qpos, physics.qpos, rtol=0, atol=1e-6)
        assert_allclose(ours.data.qvel, physics.qvel, rtol=0, atol=1e-6)
        assert abs(reward - our_reward) < 1e-9 and truncated == done and not terminated
        if step % 50 == 0:
            parts = [seen["qpos_robot"], seen["qvel_robot"], seen["end_effector"], physics.qpos[9:], physics.qvel[9:]]
            assert_allclose(observation, np.concatenate(parts), rtol=1e-6, atol=1e-6)
            for task in TASKS:
                reward, success = ours.reward_and_success(task)
                assert abs(reward - np.squeeze(theirs._get_task_reward(task, "dense_reward"))) < 1e-9, task
                assert success == bool(np.squeeze(theirs._get_task_reward(task, "success"))), task
    assert truncated and observation.shape == (76,)


def place(desk: Desk, thing: str, offset: tuple[float, float, float]) -> None:
    desk.data.joint(thing).qpos[:3] += offset
    desk.mujoco.mj_forward(desk.model, desk.data)


@pytest.mark.parametrize("rewards", ["fixed", "upstream"])
def test_what_the_fixed_rewards_fix(desk, rewards, monkeypatch):
    monkeypatch.setattr(desk, "rewards", rewards)
    fixed = rewards == "fixed"
    desk.reset(seed=1)
    before = desk.reward_and_success("lift_ball")[0]
    place(desk, "ball", (0, 0, 0.05))
    reward, success = desk.reward_and_success("lift_ball")
    assert success and (reward - before > 0.4) == fixed  # half of 0.85 for 5 of 10 cm
    desk.reset(seed=1)
    before = desk.reward_and_success("upright_block_off_table")[0]
    place(desk, "upright_block", (0, 0, -0.5))
    reward, success = desk.reward_and_success("upright_block_off_table")
    assert success and (reward > before) == fixed
    place(desk, "flat_block", (0.02, 0, 0))
    assert desk.reward_and_success("upright_block_off_table")[1] != fixed
    desk.reset(seed=1)
    before = desk.reward_and_success("open_slide")[0]
    place(desk, "ball", (0.02, 0, 0))
    assert_allclose(before - desk.reward_and_success("open_slide")[0], 0.034 if fixed else 0, atol=1e-9)


def test_equal_seeds_and_restored_generators_give_equal_episodes(desk):
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 5))

    def episode(**seed) -> np.ndarray:
        return np.stack([desk.reset(**seed)[0], *(desk.step(action)[0] for action in actions)])

    first = episode(seed=5)
    state = desk.np_random.bit_generator.state
    second = episode()
    assert np.abs(first - second).max() > 0.01
    desk.np_random.bit_generator.state = state
    assert_array_equal(episode(), second)
    np.random.seed(1)  # the global generator does not matter
    assert_array_equal(episode(seed=5), first)


def test_success_and_the_end_are_reported():
    env = aquaplay.make_desk("lift_flat_block", "fixed")
    observation, info = env.reset(seed=0)
    assert env.observation_space.contains(observation) and info == {"success": False}
    place(env.unwrapped, "flat_block", (0, 0, 0.05))
    env.unwrapped.steps = 498
    _, reward, terminated, truncated, info = env.step(np.zeros(5, np.float32))
    assert info == {"success": True} and not terminated and not truncated and reward > 0.3
    assert env.step(np.zeros(5, np.float32))[3]


def test_nothing_is_printed(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import aquaplay; e = aquaplay.make_desk('stack', 'fixed');"
    code += "e.reset(seed=0); e.step(e.action_space.sample()); assert 'gym' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ------------------------------------------------------------------------------------------------------- play


def test_the_player_presses_a_button(desk):
    desk.reset(seed=1)
    player, lit = Player(desk, np.random.default_rng(0)), False
    player.pace, player.play = 1.0, player.press("green_button")
    player.choose = lambda: itertools.repeat((player.tip(), 0.0, player.EAST))
    for _ in range(450):
        desk.step(player.act())
        lit = lit or desk.reward_and_success("push_green")[1]
    assert lit and not desk.reward_and_success("push_green")[1]  # and lets go of it


@pytest.mark.parametrize("thing", Desk.OBJECTS)
def test_the_player_lifts_what_it_can_grasp(thing):
    """The ball is as wide as the open hand; the flat block has to lie across."""
    heights = []
    for seed in range(3):
        desk = Desk("open_slide", "fixed")
        desk.reset(seed=100 + seed)
        if thing == "flat_block":
            desk.data.joint(thing).qpos[3:] = [np.cos(0.65), 0, 0, np.sin(0.65)]  # about the vertical
            desk.mujoco.mj_forward(desk.model, desk.data)
        player = Player(desk, np.random.default_rng(100 + seed))
        player.pace, player.play, player.choose = 0.9, player.carry(thing), partial(player.stay, 1000, -1)
        before, highest = desk.places[thing][2], 0.0
        for _ in range(700):
            desk.step(player.act())
            highest = max(highest, desk.places[thing][2] - before)
        heights.append(highest)
    assert sum(height > 0.02 for height in heights) >= 2, heights


def test_play_is_the_same_whatever_the_task_and_moves_smoothly():
    base = CollectArgs(num_episodes=1, episode_steps=300, seed=7)
    one = aquaplay.record_script(base, 0)
    other = aquaplay.record_script(CollectArgs(episode_steps=300, seed=7, task="stack", robodesk_rewards="upstream"), 0)
    assert_array_equal(one.observations, other.observations)
    assert_array_equal(one.actions, other.actions)
    assert (one.rewards == 0).all() and (other.rewards > 0).any()
    assert one.observations.shape == (301, 76) and one.actions.shape == (300, 5) and np.abs(one.actions).max() <= 1
    assert np.abs(np.diff(one.actions, axis=0)).mean() < 0.1 < np.abs(one.actions).mean()
    assert np.abs(aquaplay.record_script(base, 1).actions[:50] - one.actions[:50]).max() > 0.1


def test_collected_once_and_found_again(play, monkeypatch, capsys):
    def record_all(args):
        raise AssertionError("recorded again")

    monkeypatch.setattr(aquaplay, "record_all", record_all)
    assert aquaplay.collect(RECORD) == DATASET
    out, err = capsys.readouterr()
    assert "was recorded before" in err and all(task in out for task in TASKS)
    with pytest.raises(UserError, match="other settings"):
        aquaplay.collect(CollectArgs(**{**vars(RECORD), "seed": 2}))
    demos = aquaplay.load_demonstrations(DATASET, aquaplay.make_desk("stack", "fixed"), sparse=False)
    assert demos.observations.shape == (1200, 76) and demos.ends.sum() == 2
    assert_array_equal(demos.actions[600:], aquaplay.record_script(RECORD, 1).actions)


def test_processes_record_what_one_process_records(monkeypatch):
    args = CollectArgs(num_episodes=2, episode_steps=10, quiet=True)
    episodes = {}
    for cores in (1, 2):
        monkeypatch.setattr(aquaplay.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        episodes[cores] = aquaplay.record_all(args)
    for one, two in zip(episodes[1], episodes[2], strict=True):
        assert_array_equal(one.observations, two.observations)
        assert_array_equal(one.actions, two.actions)


def test_goals_are_counted_where_they_are_reached(monkeypatch):
    class Lifter:
        stopped = False

        def __init__(self, desk, _):
            place(desk, "ball", (0, 0, 0.1))

        def act(self) -> np.ndarray:
            return np.zeros(5, np.float32)

    assert "lift_ball" in aquaplay.record_episode(CollectArgs(episode_steps=2), 0, Lifter).reached


@pytest.mark.parametrize("device, message", [("keyboard", "no screen"), ("gamepad", "no gamepad")])
def test_a_person_needs_a_screen_and_a_gamepad(device, message, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    if device == "gamepad":
        monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
        monkeypatch.setattr("pygame._sdl2.controller.get_count", lambda: 0)
    with pytest.raises(UserError, match=message):
        aquaplay.record_all(CollectArgs(device=device, num_episodes=1, episode_steps=2))


def test_a_person_with_a_keyboard(tmp_path, monkeypatch):
    import pygame

    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr(Desk, "render", lambda self: np.zeros((240, 320, 3), np.uint8))
    pressed = dict.fromkeys(range(2**10), False) | {pygame.K_RIGHT: True, pygame.K_SPACE: True}
    keys = type("Keys", (), {"__getitem__": lambda self, key: pressed.get(key, False)})()
    monkeypatch.setattr(pygame.key, "get_pressed", lambda: keys)
    escape = pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE)
    events = iter([[], [], [escape]])
    monkeypatch.setattr(pygame.event, "get", lambda: next(events))
    (episode,) = aquaplay.record_all(CollectArgs(device="keyboard", num_episodes=3, episode_steps=100, quiet=True))
    assert_array_equal(episode.actions, [[1, 0, 0, 0, -1]] * 3)


# ---------------------------------------------------------------------------------------- meshes and the agent


@pytest.mark.parametrize("name, mesh", [("bb2", [-1, 1]), ("bb3", [-1, 0, 1]), ("bb5", [-1, -0.5, 0, 0.5, 1])])
def test_bang_bang_tables_are_the_papers_meshes(name, mesh):
    table = aquaplay.bang_bang_actions(aquaplay.MESHES[name], 5)
    assert len(table) == {"bb2": 32, "bb3": 243, "bb5": 3125}[name]
    assert {tuple(row) for row in table} == set(itertools.product(mesh, repeat=5))


def test_the_update_is_munchausen_dqn_on_the_replay_alone():
    args = Args(batch_size=4, n_step=1, target_update_period=3)
    network, optimizer = aquaplay.QNetwork(3), optax.sgd(0.1)
    rng = np.random.default_rng(0)
    rows = aquaplay.pack_rows(
        rng.normal(size=(20, 2)), rng.normal(size=(20, 2)), rng.integers(3, size=20), rng.random(20), *np.zeros((2, 20))
    )
    replay = aquaplay.Replay(jnp.asarray(rows), jnp.asarray(20))
    params = network.init(jax.random.PRNGKey(0), jnp.zeros(2))
    key = jax.random.PRNGKey(1)
    copies = [jax.tree.map(jnp.copy, params) for _ in range(3)]
    state = aquaplay.AgentState(*copies, optimizer.init(params), jnp.zeros((), jnp.int32), jnp.copy(key))
    ours, _ = aquaplay.make_munchausen_update(network, optimizer, args)(state, replay)

    @jax.jit
    def reference(params, target_params, batch_key):
        batch = aquaplay.sample(replay, batch_key, 4, 1, args.gamma)
        log_policy = jax.nn.log_softmax(network.apply(target_params, batch.observations) / 0.03)
        q_next = network.apply(target_params, batch.next_observations)
        next_policy = jax.nn.softmax(q_next / 0.03)
        value = jnp.sum(next_policy * (q_next - 0.03 * jnp.log(next_policy + 1e-30)), axis=1)
        target = batch.returns + 0.9 * 0.03 * log_policy[jnp.arange(4), batch.actions] + 0.99 * value

        def loss(params):
            q = network.apply(params, batch.observations)[jnp.arange(4), batch.actions]
            return optax.huber_loss(q, target).mean()

        return jax.tree.map(lambda value, slope: value - 0.1 * slope, params, jax.grad(loss)(params))

    target_params = params
    for update in range(aquaplay.UPDATE_BLOCK):
        key, batch_key = jax.random.split(key)
        params = reference(params, target_params, batch_key)
        target_params = params if (update + 1) % 3 == 0 else target_params
    for ours_leaf, leaf in zip(jax.tree.leaves(ours.params), jax.tree.leaves(params), strict=True):
        assert_allclose(ours_leaf, leaf, atol=2e-5)


def test_a_run_leaves_everything_behind(finished):
    (run,) = (finished / "runs").iterdir()
    assert run.name.startswith("RoboDesk-push_green__aquaplay__1__")
    rows = [line.split(",") for line in (run / "evaluations.csv").read_text().splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [0, 300, 600] and all(0 < float(row[2]) < 500 for row in rows)
    assert (run / "candidates.png").stat().st_size > 1000 and not list(run.glob("*.partial"))


def test_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    ((before,), (after,)) = (list((folder / "runs").iterdir()) for folder in (finished, tmp_path))
    (after / "agent.npz").unlink()  # the checkpoint is of step 500: 100 steps to go, in a new episode
    (after / "evaluations.csv").write_text("\n".join((after / "evaluations.csv").read_text().splitlines()[:3]) + "\n")
    monkeypatch.setattr(sys, "argv", ["aquaplay.py", "--resume", f"runs/{after.name}", "--quiet"])
    aquaplay.main()
    assert (after / "evaluations.csv").read_text() == (before / "evaluations.csv").read_text()
    for ours, theirs in zip(arrays(after / "agent.npz"), arrays(before / "agent.npz"), strict=True):
        assert_array_equal(ours, theirs)


def test_candidates_are_shared_by_tasks_but_not_by_settings(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    demos = aquaplay.load_demonstrations(DATASET, aquaplay.make_desk("stack", "fixed"), sparse=False)
    (run,) = (finished / "runs").iterdir()
    same = aquaplay.fingerprint(Args(task="stack", **FAST), demos)
    assert aquaplay.find_candidates(same) == f"runs/{run.name}"
    for change in ({"temperature": 0.1}, {"seed": 2}, {"num_actions": 5}):
        assert aquaplay.find_candidates(aquaplay.fingerprint(Args(**{**FAST, **change}), demos)) is None
    other_play = demos._replace(actions=demos.actions * 0.5)
    assert aquaplay.find_candidates(aquaplay.fingerprint(Args(**FAST), other_play)) is None


def test_borrowed_candidates_keep_the_mark_of_their_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    play = aquaplay.Demonstrations(*np.zeros((6, 3, 1), np.float32))
    trained, other = Args(seed=1), Args(seed=2, candidates_from="runs/trained")
    for name, args in (("trained", trained), ("borrower", other)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "candidates.npz").touch()
        aquaplay.mark_candidates(args, Path("runs") / name, play)
    assert aquaplay.find_candidates(aquaplay.fingerprint(other, play)) is None  # nothing was trained with seed 2
    shutil.rmtree("runs/trained")
    assert aquaplay.find_candidates(aquaplay.fingerprint(trained, play)) == "runs/borrower"


@pytest.mark.parametrize("lengths, every, pictured", [((40, 50), 1, 40), ((700, 24_300), 3, 500)])
def test_candidates_are_reported_over_all_of_the_play(lengths, every, pictured, tmp_path, monkeypatch):
    count, random = sum(lengths), np.random.default_rng(0)
    ends = np.isin(np.arange(count), np.cumsum(lengths) - 1)
    observations, zeros = random.normal(size=(count, 76)).astype(np.float32), np.zeros(count, np.float32)
    actions = random.uniform(-1, 1, (count, 5)).astype(np.float32)
    play = aquaplay.Demonstrations(observations, actions, zeros, observations, ends, ends)
    log, drawn = MagicMock(), []
    monkeypatch.setattr(aquaplay, "candidate_picture", lambda *a: drawn.append(a[2]) or np.zeros((8, 8, 3), np.uint8))
    args = Args(num_actions=4, candidate_steps=0, quiet=True)
    network, params = aquaplay.make_candidates(args, tmp_path, play, Desk().action_space, log, [])

    indices = log.add_histogram.call_args.args[1]
    distances = np.linalg.norm(network.apply(params, observations) - actions[:, None], axis=-1)
    assert_array_equal(indices, np.argmin(distances, axis=1)[::every])
    assert drawn[0][-1] == pictured - 1


def test_evaluate_repeats_the_last_evaluation(finished, monkeypatch, capsys):
    (run,) = (finished / "runs").iterdir()
    monkeypatch.setattr(sys, "argv", ["aquaplay.py", "--evaluate", str(run), "--eval-episodes", "1"])
    aquaplay.main()
    last = (run / "evaluations.csv").read_text().splitlines()[-1].split(",")
    out = capsys.readouterr().out
    assert f"success {float(last[1]):.3f} (" in out and f"return  {float(last[2]):.3f} +-" in out


def test_all_tasks_with_a_mesh_need_no_play_and_end_in_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Desk, "BASE_TASKS", ["push_green", "stack"])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    arguments = "--task all --discretization bb3 --total-timesteps 8 --eval-episodes 1 --learning-starts 100".split()
    monkeypatch.setattr(sys, "argv", ["aquaplay.py", *arguments, "--robodesk-rewards", "upstream", "--quiet"])
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
        (f"--dataset-id {DATASET} --candidates-from nowhere", "nowhere/candidates.npz does not exist"),
        ("--evaluate nowhere", "nowhere is not a run folder"),
        ("--resume nowhere", "nowhere is not a run folder"),
        ("collect --num-episodes 0", "--num-episodes is 0"),
        ("collect --task open_window", "no task 'open_window'"),
        ("collect --dataset-id play", "'play' is not a Minari id"),
        ("collect --device keyboard --dataset-id me/play-v0", "pip install pygame"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, play, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pygame", None)
    if "reach" in arguments:
        from conftest import record_demonstrations

        record_demonstrations("Reach-v0", "tiny/reach/expert-v0", episodes=1)
    monkeypatch.setattr(sys, "argv", ["aquaplay.py", *arguments.split(), "--quiet"])
    with pytest.raises(SystemExit) as exit:
        aquaplay.main()
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
