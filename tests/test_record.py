"""record.py: rollouts of AQuaDQN and of SAC, the player, a person, whole datasets or none, bad input."""

import contextlib
import dataclasses
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import minari
import numpy as np
import pytest
import tiny_env
from numpy.testing import assert_allclose, assert_array_equal

import aquadqn
import aquaplay
import record
import sac_baselines as sac
from aquaplay import UserError
from record import PersonArgs, PlayArgs, Player
from robodesk_env import TASKS, Desk

ROOT = Path(__file__).parents[1]
ENV_ID, DEMOS = "tiny_env:Reach-v0", "tiny/reach/expert-v0"
OBS, DIM = 4, 2  # of the tiny environment
DATASET = "tiny/play-v0"
RECORD = PlayArgs(dataset_id=DATASET, num_episodes=2, episode_steps=600, quiet=True)


def run_recorder(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["record.py", *words])
    record.main()


@pytest.fixture
def recorder(monkeypatch):
    """`record.py rollouts` as a function of its arguments."""
    return partial(run_recorder, monkeypatch, "rollouts")


@pytest.fixture(scope="module")
def agent(datasets, tmp_path_factory) -> Path:
    """The run folder of an AQuaDQN agent that reaches the goal."""
    settings = dict(
        candidate_steps=1500, num_actions=4, batch_size=32, total_timesteps=600, learning_starts=50
    )
    evaluation = dict(eval_every=300, eval_episodes=1, quiet=True)
    folder = tmp_path_factory.mktemp("agent")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(aquadqn.Run, "catch_signals", lambda self: None)
        aquadqn.train(aquadqn.Args(env_id=ENV_ID, dataset_id=DEMOS, **settings, **evaluation))
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def sac_run(datasets, tmp_path_factory) -> Path:
    """The run folder of a SAC agent."""
    settings = dict(
        learning_rate=3e-3, n_step=1, reward_scale=1, reward="env", gamma=0.9, batch_size=16
    )
    schedule = dict(
        total_timesteps=1500, eval_every=750, learning_starts=16, eval_episodes=3, quiet=True
    )
    folder = tmp_path_factory.mktemp("sac")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sac.Run, "catch_signals", lambda self: None)
        sac.train(sac.SACArgs(env_id=ENV_ID, **settings, **schedule))
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """An empty Minari root."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk("open_slide", "fixed")


@pytest.fixture(scope="module")
def play(datasets):
    """A few seconds of recorded play."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record.os, "sched_getaffinity", lambda _: {0})
        record.record_play(RECORD)


# --------------------------------------------------------------------------------------------------- rollouts


def test_recorded_demonstrations_are_successful(agent, recorder, root, capsys):
    recorder(
        str(agent), "--dataset-id", "made/reach/agent-v0", "--episodes", "3", "--epsilon", "0.3"
    )
    assert "made/reach/agent-v0: 3 successful of" in capsys.readouterr().out
    dataset = minari.load_dataset("made/reach/agent-v0")
    assert dataset.total_episodes == 3
    for episode in dataset.iterate_episodes():
        assert episode.infos["success"].any() and episode.observations.dtype == np.float32
    with pytest.raises(SystemExit) as stopped:
        recorder(str(agent), "--dataset-id", "made/reach/agent-v0")
    assert stopped.value.code == 2 and "exists already" in capsys.readouterr().err


def test_a_recording_that_breaks_off_leaves_no_dataset(agent, recorder, root, monkeypatch, capsys):
    words = [
        str(agent),
        "--dataset-id",
        "made/reach/agent-v0",
        "--episodes",
        "1",
        "--epsilon",
        "0.3",
    ]

    def full_disk(path: Path) -> None:
        assert path.exists()  # Minari has written the dataset
        raise OSError("no space left")

    with monkeypatch.context() as broken, pytest.raises(SystemExit) as stopped:
        broken.setattr(record, "compress", full_disk)
        recorder(*words)
    assert (
        stopped.value.code == 2 and "made/reach/agent-v0': no space left" in capsys.readouterr().err
    )
    assert list(root.iterdir()) == []
    recorder(*words)
    assert minari.load_dataset("made/reach/agent-v0").total_episodes == 1


def test_a_full_disk_is_one_line(agent, recorder, root, monkeypatch, capfd):
    """Found before HDF5 meets it, which prints pages of tracebacks then."""
    words = [str(agent), "--dataset-id", "made/reach/agent-v0", "--episodes", "1", "--quiet"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(SystemExit) as stopped:
            recorder(*words, "--epsilon", "0.3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capfd.readouterr().err.strip()
    assert stopped.value.code == 1 and "free some space" in error
    assert error.count("\n") == 0 and error.startswith("error: [Errno")
    assert list(root.iterdir()) == []


def test_an_agent_that_never_succeeds_is_not_recorded(agent, recorder, root, monkeypatch, capsys):
    monkeypatch.setattr("tiny_env.Reach.step", fail_always(tiny_env.Reach.step))
    with pytest.raises(SystemExit) as stopped:
        recorder(str(agent), "--dataset-id", "made/reach/none-v0", "--episodes", "1")
    assert stopped.value.code == 2 and "only 0 of 20 episodes succeeded" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        recorder("nowhere", "--dataset-id", "made/reach/none-v0")
    assert stopped.value.code == 2 and "nowhere is not a run folder" in capsys.readouterr().err
    assert not (root / "made").exists()


def fail_always(step):
    def failing(self, action):
        *others, info = step(self, action)
        return *others, {**info, "success": False}

    return failing


def test_a_dataset_can_be_put_into_another_folder(agent, recorder, tmp_path):
    words = [
        "--dataset-id",
        "made/reach/other-v0",
        "--episodes",
        "1",
        "--epsilon",
        "0.3",
        "--root",
        str(tmp_path),
    ]
    recorder(str(agent), *words)
    assert (tmp_path / "made" / "reach" / "other-v0" / "data" / "main_data.hdf5").exists()
    assert "made/reach/other-v0" not in minari.list_local_datasets()


def test_the_replay_and_rollouts_of_sac(sac_run, recorder, capsys):
    recorder(str(sac_run), "--dataset-id", "tiny/reach/sac-v3", "--steps", "50")
    run = sac_run
    first = (run / "evaluations.csv").read_text().splitlines()[1].split(",")
    env = sac.make_env(sac.SACArgs(env_id=ENV_ID, reward="env"))
    row_size = 2 * OBS + DIM + 3
    rows = np.fromfile(run / "replay.f32", np.float32).reshape(-1, row_size)
    replay = minari.load_dataset("tiny/reach/sac-replay-v3")
    assert replay.total_steps == len(rows) == 1500
    demos = sac.load_demonstrations("tiny/reach/sac-replay-v3", env, sparse=False)
    ends, demos_ends = rows[:, -1].copy(), demos.ends.astype(float)
    ends[-1] = 1.0  # the last episode was running
    assert_array_equal(demos_ends, ends)
    fields = (
        demos.observations,
        demos.next_observations,
        demos.actions,
        demos.rewards,
        demos.terminations,
    )
    for ours, theirs in zip(fields, sac.unpack(rows, sac.make_replay(1, OBS, DIM).transitions)):
        assert_array_equal(ours, theirs)

    rollouts = minari.load_dataset("tiny/reach/sac-v3")
    lengths = [len(episode.actions) for episode in rollouts.iterate_episodes()]
    assert lengths == [21, 21, 8] and rollouts.spec.env_spec.id == "Reach-v0"
    for episode in rollouts.iterate_episodes():
        assert len(episode.observations) == len(episode.actions) + 1
        assert not episode.terminations.any() and list(np.flatnonzero(episode.truncations)) == [
            len(episode.actions) - 1
        ]
    rewards = [episode.rewards.sum() for episode in rollouts.iterate_episodes()]
    assert np.mean(rewards[:2]) > float(first[2])  # it is the trained policy
    with pytest.raises(SystemExit):
        recorder(str(run), "--dataset-id", "tiny/reach/sac-v3")
    assert "exists already" in capsys.readouterr().err


def test_episodes_know_how_they_ended_and_success():
    rows = np.zeros((7, 2 + 1 + 3), np.float32)
    rows[:, 0], rows[:, 1] = np.arange(7), np.arange(7) + 1
    rows[2, -2:], rows[4, -1] = (
        1,
        1,
    )  # a termination, a truncation, and an episode that was still running
    rows[1, -3] = 1
    first, second, third = record.episode_buffers(rows, 1, 1, sparse=True)
    assert [list(b.observations[:, 0]) for b in (first, second, third)] == [
        [0, 1, 2, 3],
        [3, 4, 5],
        [5, 6, 7],
    ]
    assert list(first.terminations) == [False, False, True] and not any(first.truncations)
    for buffer in (second, third):
        assert not any(buffer.terminations) and list(buffer.truncations) == [False, True]
    assert list(first.infos["success"]) == [
        False,
        False,
        True,
        False,
    ]  # the reset's, then one for every step
    assert record.episode_buffers(rows, 1, 1, sparse=False)[0].infos is None


def test_datasets_carry_the_reference_scores(datasets, recorder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    run.mkdir()
    args = sac.SACArgs(env_id="Hopper-v5", reward="env")
    params = sac.Actor(3).init(jax.random.PRNGKey(0), np.zeros((1, 11)))
    (run / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    sac.save_arrays(run / "agent.npz", params, step=2)
    sac.append_rows(run / "replay.f32", list(np.ones((3, 2 * 11 + 3 + 3), np.float32)))
    recorder("run", "--dataset-id", "tiny/hopper/medium-v0", "--steps", "4", "--quiet")
    for name, steps in (("tiny/hopper/medium-replay-v0", 2), ("tiny/hopper/medium-v0", 4)):
        dataset = minari.load_dataset(name)
        assert (
            dataset.total_steps == steps
        )  # of the replay, what there was when the agent was evaluated
        metadata = dataset.storage.metadata
        assert (metadata["ref_min_score"], metadata["ref_max_score"]) == (-20.272305, 3234.3)
        spec = dataset.spec.env_spec
        assert (spec.id, spec.max_episode_steps) == (
            "Hopper-v5",
            1000,
        )  # without a limit an evaluation may never end
        assert_allclose(minari.get_normalized_score(dataset, np.array([3234.3])), 1.0)


def test_a_kill_while_a_dataset_is_written_leaves_none(tmp_path, monkeypatch):
    """Ended in the middle of Minari's work, as by kill -9; then recorded for good."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    program = """
import os, sys
import numpy as np, gymnasium as gym, minari
from minari.data_collector import EpisodeBuffer
import record
box = gym.spaces.Box(-1, 1, (2,), np.float32)
buffer = EpisodeBuffer(
    observations=np.zeros((3, 2), np.float32), actions=np.zeros((2, 2), np.float32), rewards=np.zeros(2),
    terminations=np.zeros(2, bool), truncations=np.array([False, True]), infos={},
)
with record.whole_dataset("me/task/data-v0", [buffer]):
    minari.create_dataset_from_buffers("me/task/data-v0", [buffer], action_space=box, observation_space=box)
    if sys.argv[1] == "kill":
        os._exit(9)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    assert subprocess.run([*command, "kill"], cwd=ROOT).returncode == 9
    assert minari.list_local_datasets() == {} and not (tmp_path / "me").exists()
    assert subprocess.run([*command, "finish"], cwd=ROOT).returncode == 0
    assert minari.load_dataset("me/task/data-v0").total_steps == 2
    assert list(minari.list_local_datasets()) == ["me/task/data-v0"]


# ------------------------------------------------------------------------------------------------------- play


def place(desk: Desk, thing: str, offset: tuple[float, float, float]) -> None:
    desk.data.joint(thing).qpos[:3] += offset
    desk.mujoco.mj_forward(desk.model, desk.data)


class Finished(Exception):
    pass


def play_once(desk: Desk, way: str, seed: int, thing: str | None = None) -> Iterator[Player]:
    """The player after every step of one thing that it does."""

    def finish() -> None:
        raise Finished

    player = Player(desk, np.random.default_rng(seed))
    player.pace, player.thing, player.choose = 0.9, thing, finish
    player.play = getattr(player, way)()
    with contextlib.suppress(Finished):
        while True:
            desk.step(player.act())
            yield player


def test_the_player_presses_a_button(desk):
    desk.reset(seed=1)
    buttons, lit = ["push_red", "push_green", "push_blue"], []
    for _ in play_once(desk, "press", seed=0):
        lit.append([desk.reward_and_success(button)[1] for button in buttons])
    assert np.any(lit) and not np.any(lit[-1])  # and lets go of it


@pytest.mark.parametrize("way, joint", [("move_drawer", 9), ("move_slide", 10)])
def test_the_player_moves_what_has_a_handle(desk, way, joint):
    moved = []
    for seed in range(3):
        desk.reset(seed=seed)
        before = desk.data.qpos[joint]
        moved.append(max(abs(desk.data.qpos[joint] - before) for _ in play_once(desk, way, seed)))
    assert max(moved) > {"move_drawer": 0.05, "move_slide": 0.2}[way], moved


@pytest.mark.parametrize("thing", Desk.OBJECTS)
def test_the_player_shoves_everything(desk, thing):
    moved = []
    for seed in range(3):
        desk.reset(seed=seed)
        for _ in play_once(desk, "shove", seed, thing):
            pass
        moved.append(np.linalg.norm(desk.places[thing] - desk.origins[thing]))
    assert sum(distance > 0.1 for distance in moved) >= 2, moved


def test_the_player_straightens_a_hand_that_points_to_a_side(desk):
    desk.reset(seed=0)
    desk.data.qpos[:7] = [-0.47, 0.69, 0.12, -1.4, 1.39, -0.84, 2.2]
    desk.mujoco.mj_forward(desk.model, desk.data)
    before = Player(desk, np.random.default_rng(0))
    assert before.crooked() and before.sideways() < -0.8
    *_, player = play_once(desk, "straighten", seed=0)
    assert abs(player.sideways()) < 0.6


@pytest.mark.parametrize("thing", Desk.OBJECTS)
def test_the_player_lifts_what_it_can_grasp(thing):
    """The ball is as wide as the open hand; the flat block has to lie across."""
    heights = []
    for seed in range(3):
        desk = Desk("open_slide", "fixed")
        desk.reset(seed=100 + seed)
        if thing == "flat_block":
            desk.data.joint(thing).qpos[3:] = [
                np.cos(0.65),
                0,
                0,
                np.sin(0.65),
            ]  # about the vertical
            desk.mujoco.mj_forward(desk.model, desk.data)
        before, highest = desk.places[thing][2], 0.0
        for _ in play_once(desk, "carry", 100 + seed, thing):
            highest = max(highest, desk.places[thing][2] - before)
        heights.append(highest)
    assert sum(height > 0.02 for height in heights) >= 2, heights


def test_play_is_the_same_whatever_the_task_and_moves_smoothly():
    base = PlayArgs(num_episodes=1, episode_steps=300, seed=7)
    one = record.record_script(base, 0)
    other = record.record_script(
        PlayArgs(episode_steps=300, seed=7, task="stack", robodesk_rewards="upstream"), 0
    )
    assert_array_equal(one.observations, other.observations)
    assert_array_equal(one.actions, other.actions)
    assert (one.rewards == 0).all() and (other.rewards > 0).any()
    assert (
        one.observations.shape == (301, 76)
        and one.actions.shape == (300, 5)
        and np.abs(one.actions).max() <= 1
    )
    assert np.abs(np.diff(one.actions, axis=0)).mean() < 0.1 < np.abs(one.actions).mean()
    assert np.abs(record.record_script(base, 1).actions[:50] - one.actions[:50]).max() > 0.1


def test_collected_once_and_found_again(play, monkeypatch, capsys):
    def record_all(args):
        raise AssertionError("recorded again")

    monkeypatch.setattr(record, "record_all", record_all)
    assert record.record_play(RECORD) == DATASET
    out, err = capsys.readouterr()
    assert "was recorded before" in err and all(task in out for task in TASKS)
    with pytest.raises(UserError, match="other settings"):
        record.record_play(PlayArgs(**{**vars(RECORD), "seed": 2}))
    demos = aquaplay.load_demonstrations(
        DATASET, aquaplay.make_env(aquaplay.Args(task="stack")), sparse=False
    )
    assert demos.observations.shape == (1200, 76) and demos.ends.sum() == 2
    assert_array_equal(demos.actions[600:], record.record_script(RECORD, 1).actions)


def test_processes_record_what_one_process_records(monkeypatch):
    args = PlayArgs(num_episodes=2, episode_steps=10, quiet=True)
    episodes = {}
    for cores in (1, 2):
        monkeypatch.setattr(
            record.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores))
        )
        episodes[cores] = record.record_all(args)
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

    assert "lift_ball" in record.record_episode(PlayArgs(episode_steps=2), 0, Lifter).reached


@pytest.mark.parametrize("device, message", [("keyboard", "no screen"), ("gamepad", "no gamepad")])
def test_a_person_needs_a_screen_and_a_gamepad(device, message, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    if device == "gamepad":
        monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
        monkeypatch.setattr("pygame._sdl2.controller.get_count", lambda: 0)
    with pytest.raises(UserError, match=message):
        record.record_all(PersonArgs(device=device, num_episodes=1, episode_steps=2))


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
    (episode,) = record.record_all(
        PersonArgs(device="keyboard", num_episodes=3, episode_steps=100, quiet=True)
    )
    assert_array_equal(episode.actions, [[1, 0, 0, 0, -1]] * 3)


# ------------------------------------------------------------------------------------------------------ misuse


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("play --num-episodes 0", "--num-episodes is 0"),
        ("play --task open_window", "no task 'open_window'"),
        ("play --dataset-id play", "'play' is not a Minari id"),
        ("person --device keyboard --dataset-id me/play-v0", "pip install pygame"),
        ("rollouts SAC --dataset-id no_version", "'no_version' is not a Minari id"),
        ("rollouts SAC --dataset-id m/medium-v0", "'m/medium-v0' is not a Minari id"),
        (f"rollouts SAC --dataset-id {DEMOS}", f"dataset '{DEMOS}' exists already"),
        ("rollouts SAC --dataset-id tiny/new-v0 --steps 0", "--steps is 0"),
        ("rollouts DICT --dataset-id tiny/dict-v0", "dictionary observations"),
        ("rollouts nowhere --dataset-id tiny/new-v0", "nowhere is not a run folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments, message, sac_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pygame", None)
    saved = {**json.loads((sac_run / "args.json").read_text()), "env_id": "tiny_env:ReachDict-v0"}
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "args.json").write_text(json.dumps(saved))
    words = arguments.replace("SAC", str(sac_run)).replace("DICT", "dict").split()
    with pytest.raises(SystemExit) as exit:
        run_recorder(monkeypatch, *words, "--quiet")
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and error.count("\n") == 1


def test_help_reads_like_documentation(monkeypatch, capsys):
    for words in (["rollouts"], ["play"], ["person"]):
        with pytest.raises(SystemExit) as stopped:
            run_recorder(monkeypatch, *words, "--help")
        assert stopped.value.code == 0 and "--dataset-id" in capsys.readouterr().out
