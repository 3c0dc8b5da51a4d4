"""Odd environments, hostile data, full disks: one line that says what is wrong, exit code 2, and nothing harmed."""

import dataclasses
import errno
import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import h5py
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.testing import assert_array_equal

import aquadqn
import aquagail
from aquadqn import Args, UserError

ENV, DATASET = "tiny_env:Reach-v0", "tiny/reach/expert-v0"
SMALL = dict(
    env_id=ENV,
    dataset_id=DATASET,
    candidate_steps=20,
    total_timesteps=84,
    eval_every=42,
    eval_episodes=2,
    batch_size=8,
    learning_starts=16,
    num_actions=4,
    checkpoint_every=21,
    quiet=True,
)


def in_process(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.chdir(folder)
    patch.setattr(aquadqn.Run, "catch_signals", lambda self: None)
    patch.setattr(aquadqn.Run, "lock_folder", lambda self: io.StringIO())  # a failure would keep it


@pytest.fixture(autouse=True)
def here(datasets, tmp_path, monkeypatch) -> Path:
    in_process(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def one_training(datasets, tmp_path_factory) -> tuple[Path, Path]:
    """A finished run, and its folder as a kill at step 42 of 84 would have left it."""
    folder = tmp_path_factory.mktemp("one_training")
    killed = folder / "killed"
    save = aquadqn.AgentRun.save_checkpoint_if_due

    def save_and_copy(self, env, state, step: int) -> None:
        save(self, env, state, step)
        if step >= 42 and not killed.exists():
            shutil.copytree(self.folder, killed)

    with pytest.MonkeyPatch.context() as patch:
        in_process(patch, folder)
        patch.setattr(aquadqn.AgentRun, "save_checkpoint_if_due", save_and_copy)
        run = aquadqn.train(Args(**SMALL))
    return folder / run, killed


@pytest.fixture
def trained(one_training, here) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(one_training[0], here / "trained")


@pytest.fixture
def stopped(one_training, here) -> Path:
    """A copy of the interrupted run."""
    return shutil.copytree(one_training[1], here / "stopped")


def words_of(**changes) -> list[str]:
    settings = {**SMALL, **changes}
    quiet = settings.pop("quiet")
    words = [
        word for name, value in settings.items() for word in (aquadqn.option(name), str(value))
    ]
    return [*words, *(["--quiet"] if quiet else [])]


def ends_with(monkeypatch, capsys, words: list[str]) -> tuple[int, str]:
    """Exit code and the one line of a command."""
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", *words])
    with pytest.raises(SystemExit) as caught:
        aquadqn.main()
    err = capsys.readouterr().err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in err, err
    return caught.value.code, errors[0]


def odd(kind: str) -> dict:
    return dict(env_id="odd_env:Odd-v0", env_kwargs=json.dumps({"kind": kind}))


def files(run: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in run.iterdir() if path.suffix in (".f32", ".csv")
    }


def same_numbers(one: Path, other: Path) -> None:
    assert files(one) == files(other)
    for name in ("state.npz", "agent.npz", "candidates.npz"):
        with np.load(one / name) as ours, np.load(other / name) as theirs:
            for key in ours.files:
                assert_array_equal(ours[key], theirs[key])


# ------------------------------------------------------------------------------------- environments


@pytest.mark.parametrize(
    "kind, words",
    [
        ("integer", "actions of type int64"),
        ("reset shape", r"observation at step 0 .* has shape \(3,\) instead of \(4,\)"),
        ("reset NaN", "observation at step 0 of an episode is not finite"),
        ("reset fails", "does not run: no such task"),
        ("reward shape", r"reward at step 8 .* has shape \(1,\) instead of \(\)"),
        ("step shape", "observation at step 8"),
        ("step NaN", "observation at step 8 of an episode is not finite"),
        ("reward infinite", "reward at step 8 of an episode is not finite"),
        ("step fails", "does not run: out of water"),
    ],
)
def test_an_odd_environment_is_named_before_anything_is_written(
    kind, words, here, monkeypatch, capsys
):
    with pytest.raises(UserError, match=words):
        aquadqn.train(Args(**{**SMALL, **odd(kind)}))
    assert not list(here.iterdir())
    code, line = ends_with(monkeypatch, capsys, words_of(**odd(kind)))
    assert code == 2 and not list(here.iterdir())


def test_success_at_some_steps_only_is_no_sparse_reward(here):
    with pytest.raises(UserError, match="at some steps only"):
        aquadqn.train(Args(**{**SMALL, **odd("no success"), "reward": "sparse"}))
    assert aquadqn.check_env(Args(**{**SMALL, **odd("no success")})) == "env"
    assert aquadqn.check_env(Args(**SMALL)) == "sparse"
    env = aquadqn.make_env(Args(**{**SMALL, **odd("no success"), "reward": "sparse"}))
    env.reset(seed=0)
    with pytest.raises(UserError, match="at some steps only"):
        for _ in range(8):
            env.step(np.zeros(2))


def test_an_environment_without_a_time_limit_needs_one(here):
    endless = {**SMALL, "env_id": "odd_env:Endless-v0"}
    with pytest.raises(UserError, match="no time limit.*--max-episode-steps"):
        aquadqn.train(Args(**endless))
    assert not list(here.iterdir())
    run = aquadqn.train(Args(**endless, max_episode_steps=9))
    assert (
        "42,0.0,-" in (run / "evaluations.csv").read_text()
        or ",9.0,2" in (run / "evaluations.csv").read_text()
    )
    assert aquadqn.load_args(run).max_episode_steps == 9


def test_actions_stay_inside_a_float64_box(here):
    env = aquadqn.make_env(Args(**{**SMALL, **odd("float64")}))
    env.reset(seed=0)
    env.step(
        np.float32([0.1, -0.1])
    )  # 0.10000000149 as float64; the environment itself asserts what it gets
    env.step(np.float32([3.0, -np.inf]))
    run = aquadqn.train(Args(**{**SMALL, **odd("float64")}))
    assert (run / "agent.npz").exists()


def test_environment_arguments_are_kept_for_evaluation(here, monkeypatch, capsys):
    changes = {"env_kwargs": '{"dictionary": true}', "dataset_id": "tiny/reachdict/expert-v0"}
    run = aquadqn.train(Args(**{**SMALL, **changes}))
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", "--evaluate", str(run), "--eval-episodes", "2"])
    aquadqn.main()
    assert "2 episodes" in capsys.readouterr().out
    for words in ("[1]", "{", '"text"'):
        assert ends_with(monkeypatch, capsys, words_of(env_kwargs=words))[0] == 2


def test_evaluate_agrees_with_the_run_where_the_task_is_drawn_before_the_seed(
    here, monkeypatch, capsys
):
    run = aquadqn.train(
        Args(**{**SMALL, **odd("task before seed"), "reward": "env", "eval_episodes": 3})
    )
    last = float((run / "evaluations.csv").read_text().splitlines()[-1].split(",")[2])
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", "--evaluate", str(run), "--eval-episodes", "3"])
    aquadqn.main()
    assert f"return  {last:.3f}" in capsys.readouterr().out


def test_fresh_states_are_reported_apart(trained, monkeypatch, capsys):
    words = ["--evaluate", str(trained), "--eval-episodes", "5"]
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", *words])
    aquadqn.main()
    out = capsys.readouterr().out
    assert "on the 3 states that training never evaluated" in out and out.count("success") == 2


# ------------------------------------------------------------------------------------------ wrapper


WRAPPERS = pytest.mark.parametrize("module", [aquadqn, aquagail], ids=["aquadqn", "aquagail"])


@WRAPPERS
def test_the_wrapper_is_a_good_environment(module, trained):
    env = module.CandidateActions(gym.make(ENV), trained)
    check_env(env, skip_render_check=True)
    again = gym.make(env.spec)
    assert again.action_space == env.action_space
    one, other = (e.reset(seed=3)[0] for e in (env, again))
    assert_array_equal(one, other)
    for index in (0, 2, 1):
        assert_array_equal(env.step(index)[0], again.step(index)[0])


@WRAPPERS
def test_the_wrapper_refuses_what_is_no_candidate(module, trained):
    env = module.CandidateActions(gym.make(ENV), trained)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    for action in (-1, 4, 0.5):
        with pytest.raises(gym.error.InvalidAction):
            env.step(action)


def test_the_wrapper_works_in_other_processes(trained):
    def make() -> gym.Env:
        import gymnasium as gym

        import aquadqn

        return aquadqn.CandidateActions(gym.make("tiny_env:Reach-v0"), trained)

    envs = gym.vector.AsyncVectorEnv([make, make], context="spawn")
    observations, _ = envs.reset(seed=3)
    stepped, *_ = envs.step(np.array([0, 1]))
    envs.close()
    env = make()
    assert_array_equal(env.reset(seed=3)[0], observations[0])
    assert_array_equal(env.step(0)[0], stepped[0])


# --------------------------------------------------------------------------------------------- data


def broken_dataset(datasets: Path, name: str, change) -> str:
    target = datasets / "odd" / name / "expert-v0"
    if not target.exists():
        shutil.copytree(datasets / "tiny" / "reach" / "expert-v0", target)
        with h5py.File(target / "data" / "main_data.hdf5", "r+") as file:
            change(file["episode_0"])
    return f"odd/{name}/expert-v0"


def replace(episode, name: str, values) -> None:
    del episode[name]
    episode[name] = values


@pytest.mark.parametrize(
    "name, change, words",
    [
        (
            "terminations",
            lambda e: replace(e, "terminations", e["terminations"][:-1]),
            "field terminations",
        ),
        (
            "truncations",
            lambda e: replace(e, "truncations", e["truncations"][2:]),
            "field truncations",
        ),
        (
            "success",
            lambda e: replace(e, "infos/success", e["infos/success"][3:]),
            r"infos\['success'\]",
        ),
        (
            "long",
            lambda e: replace(e, "infos/success", np.zeros(99)),
            r"infos\['success'\] has shape \(99,\)",
        ),
        ("rewards", lambda e: replace(e, "rewards", e["rewards"][:][:, None]), None),
    ],
)
def test_fields_of_the_wrong_length_are_named_before_training(name, change, words, datasets, here):
    dataset_id = broken_dataset(datasets, name, change)
    reward = "sparse" if words else "env"
    with pytest.raises(UserError, match=words or "field rewards"):
        aquadqn.train(Args(**{**SMALL, "dataset_id": dataset_id, "reward": reward}))
    assert not list(here.iterdir())


def test_an_episode_without_steps_is_left_out_and_said(datasets, here, capsys):
    def empty(episode) -> None:
        for name in ("actions", "rewards", "terminations", "truncations"):
            replace(episode, name, episode[name][:0])
        for name in ("observations", "infos/success"):
            replace(episode, name, episode[name][:1])

    env = aquadqn.make_env(Args(**SMALL, reward="sparse"))
    whole = aquadqn.load_demonstrations(DATASET, env)
    demos = aquadqn.load_demonstrations(broken_dataset(datasets, "empty", empty), env)
    assert demos.ends.sum() == whole.ends.sum() - 1
    assert "1 episodes without a step are left out" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_before_training(here):
    with pytest.raises(UserError, match="this run needs about .* GB.*--num-actions"):
        aquadqn.train(Args(**{**SMALL, "num_actions": 10_000_000}))
    with pytest.raises(UserError, match="--buffer-size is 7"):
        aquadqn.train(Args(**{**SMALL, "buffer_size": 7}))
    with pytest.raises(UserError, match="more than the .* different actions"):
        aquadqn.train(Args(**{**SMALL, "candidates": "kmeans", "num_actions": 9_999}))
    assert not list(here.iterdir())


# --------------------------------------------------------------------------------------- full disks


@pytest.mark.parametrize("name", ["state", "agent", "evaluations", "args"])
def test_a_full_disk_harms_nothing(name, stopped, trained, monkeypatch, capsys):
    (stopped / f"{name}.partial").symlink_to(
        "/dev/full"
    )  # the kernel says: no space left on device
    code, line = ends_with(monkeypatch, capsys, ["--resume", str(stopped)])
    assert code == 1 and "No space left" in line and "--resume" in line
    assert not list(stopped.glob("*.partial"))
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", "--resume", str(stopped)])
    aquadqn.main()
    same_numbers(stopped, trained)


@pytest.mark.parametrize("target", ["append_rows", "flush"])
def test_a_full_disk_at_the_replay_or_the_log_harms_nothing(
    target, stopped, trained, monkeypatch, capsys
):
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if target == "flush":
            patch.setattr("tensorboardX.SummaryWriter.flush", full)
        else:
            patch.setattr(aquadqn, "append_rows", full)
        code, line = ends_with(patch, capsys, ["--resume", str(stopped)])
    assert code == 1 and "No space left" in line
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", "--resume", str(stopped)])
    aquadqn.main()
    same_numbers(stopped, trained)


def test_a_video_is_whole_or_not_there(here):
    frames = [np.zeros((64, 64, 3), np.uint8)] * 3
    path = here / "videos" / "step_1.mp4"
    path.parent.mkdir()
    (here / "videos" / "step_1.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        aquadqn.write_video(path, frames, fps=10)
    assert not list(path.parent.iterdir())
    aquadqn.write_video(path, frames, fps=10)
    assert path.stat().st_size > 100


def test_a_full_disk_is_a_full_disk_wherever_it_is_met():
    with pytest.raises(OSError, match="No space left"), aquadqn.as_user_error("cannot write"):
        raise OSError(errno.ENOSPC, "No space left on device")


# ---------------------------------------------------------------------------------- damaged folders


def test_a_file_system_without_locks_is_said(here, monkeypatch, capsys):
    def no_locks(*_) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.undo()
    monkeypatch.setattr("fcntl.flock", no_locks)
    run = SimpleNamespace(folder=here)
    assert aquadqn.Run.lock_folder(run).name == str(here / "lock")
    assert "No locks available" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, content",
    [
        ("args.json", b"\x00\x01"),
        ("args.json", b"[]"),
        ("args.json", b'{"num_actions": "ten"}'),
        ("evaluations.csv", b"step\nhello\n"),
        ("evaluations.csv", b"step\n\xff\xfe,\n"),
        ("state.npz", b"PK"),
        ("candidates.npz", b""),
    ],
)
def test_garbage_in_the_folder_is_named(name, content, stopped, monkeypatch, capsys):
    (stopped / name).write_bytes(content)
    before = {
        path.name: path.read_bytes()
        for path in stopped.iterdir()
        if path.suffix in (".f32", ".npz", ".csv")
    }
    code, line = ends_with(monkeypatch, capsys, ["--resume", str(stopped)])
    assert code == 2 and (name in line or str(stopped) in line)
    for path, content in before.items():
        assert (stopped / path).read_bytes() == content


def test_a_replay_without_its_state_is_not_thrown_away(stopped, monkeypatch, capsys):
    (stopped / "state.npz").rename(stopped / "elsewhere")
    code, line = ends_with(monkeypatch, capsys, ["--resume", str(stopped)])
    assert code == 2 and "no state.npz" in line and (stopped / "replay.f32").exists()


def test_a_kill_at_the_end_of_the_first_checkpoint_is_survived(stopped, trained, monkeypatch):
    (stopped / "replay.f32").rename(stopped / "replay.partial")
    aquadqn.train(dataclasses.replace(aquadqn.load_args(stopped), resume=str(stopped)))
    same_numbers(stopped, trained)


def test_a_replay_that_is_not_finite_is_found(stopped, monkeypatch, capsys):
    rows = np.fromfile(stopped / "replay.f32", np.float32)
    rows[5] = np.nan
    rows.tofile(stopped / "replay.f32")
    code, line = ends_with(monkeypatch, capsys, ["--resume", str(stopped)])
    assert code == 2 and "replay.f32 holds NaN" in line
