"""AQuaDQN as a user runs it: end to end, interrupted, resumed, misused; a few hundred steps on a tiny environment."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import h5py
import jax
import minari
import numpy as np
import pytest
import tiny_env
from numpy.testing import assert_array_equal

import aquadqn
from aquadqn import Args, UserError

ROOT = Path(__file__).parents[1]
ENV, DATASET = "tiny_env:Reach-v0", "tiny/reach/expert-v0"
FAST = f"""--env-id {ENV} --dataset-id {DATASET} --candidate-steps 1500 --total-timesteps 600 --eval-every 200
 --eval-episodes 3 --learning-starts 50 --checkpoint-every 100 --num-actions 4 --batch-size 32
 --buffer-size 600""".split()  # the same compiled programs however long the run


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "aquadqn.py"), *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTHONUNBUFFERED": "1"}


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out, err


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def arrays(path: Path) -> list[np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return [file[name] for name in file.files if name != "meta"]


def wait_for(condition, process: subprocess.Popen, seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.02)


def resumed_step(run: Path) -> int:
    with np.load(run / "state.npz", allow_pickle=False) as file:
        return json.loads(file["meta"].tobytes())["step"]


@pytest.fixture(scope="module")
def finished(datasets, tmp_path_factory) -> Path:
    """The run folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("finished")
    out, err = finish(start(folder, *FAST))
    assert "candidates:" in err and "agent:" in err and "done" in out
    return only_run(folder)


def test_a_run_leaves_everything_behind(finished):
    with (finished / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [0, 200, 400, 600]
    assert all(row["episodes"] == "3" and 0 <= float(row["success_rate"]) <= 1 for row in rows)
    assert finished.name.startswith("tiny_env_Reach-v0__aquadqn__1__")
    saved = json.loads((finished / "args.json").read_text())
    assert (
        saved["dataset_id"] == DATASET and saved["reward"] == "sparse" and saved["warning"] is None
    )
    with np.load(finished / "candidates_along.npz") as file:
        assert file["candidates"].shape == (len(file["actions"]), 4, 2)
    assert not list(finished.glob("*.partial"))


def test_what_is_compiled_serves_the_next_run_with_the_same_bits(datasets, tmp_path):
    """In bc_mdn.py, which compiles least."""
    home = {**environment(), "HOME": str(tmp_path)}
    for name in [name for name in home if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))]:
        del home[name]
    words = f"--env-id {ENV} --dataset-id {DATASET} --num-demos 5 --gradient-steps 40 --quiet"
    program = [sys.executable, str(ROOT / "bc_mdn.py"), "bc", *words.split()]
    written = []
    for name in ("first", "second"):
        place = tmp_path / name
        place.mkdir()
        done = subprocess.run(program, cwd=place, env=home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "compilation cache" not in done.stderr
        kept = (tmp_path / ".cache" / "aquadem").rglob("*-cache")
        written.append(sorted(path.name for path in kept))
    assert written[0] and written[0] == written[1]
    first, second = (
        arrays(only_run(tmp_path / name) / "agent.npz") for name in ("first", "second")
    )
    for ours, theirs in zip(first, second, strict=True):
        assert_array_equal(ours, theirs)


def tensorboard_events(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()


def test_tensorboard_has_the_promised_tags(finished):
    events = tensorboard_events(finished)
    tags = events.Tags()
    expected = {
        "charts/episodic_return",
        "charts/episodic_length",
        "charts/success",
        "eval/success_rate",
    }
    assert expected | {
        "eval/episodic_return",
        "candidates/loss",
        "candidates/nearest_distance",
    } <= set(tags["scalars"])
    assert "candidates/usage" in tags["histograms"]
    assert [event.step for event in events.Scalars("eval/success_rate")] == [0, 200, 400, 600]
    losses = [event.value for event in events.Scalars("candidates/loss")]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_killed_and_resumed_equals_uninterrupted(finished, tmp_path):
    process = start(tmp_path, *FAST, "--quiet")
    wait_for(lambda: list(tmp_path.glob("runs/*/state.npz")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = only_run(tmp_path)
    assert 0 < resumed_step(run) < 600
    logged = [event.step for event in tensorboard_events(run).Scalars("charts/episodic_return")]
    assert max(logged) >= resumed_step(run)  # the rest is logged again
    with (run / "replay.f32").open("ab") as file:
        file.write(b"half a row")  # what a kill in the middle of a checkpoint leaves
    finish(start(tmp_path, "--resume", str(run), "--quiet"))
    assert (run / "evaluations.csv").read_text() == (finished / "evaluations.csv").read_text()
    for name in ("agent.npz", "candidates.npz", "state.npz"):
        for ours, theirs in zip(arrays(run / name), arrays(finished / name), strict=True):
            assert_array_equal(ours, theirs)
    assert (run / "replay.f32").read_bytes() == (finished / "replay.f32").read_bytes()


def test_a_run_killed_before_its_first_checkpoint_starts_over(finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for name in ("state.npz", "agent.npz"):
        (run / name).unlink()
    (run / "replay.f32").rename(
        run / "replay.partial"
    )  # written, but the state that belongs to it was not
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", "--resume", str(run), "--quiet"])
    aquadqn.main()
    assert (run / "replay.f32").read_bytes() == (finished / "replay.f32").read_bytes()
    assert (run / "evaluations.csv").read_text() == (finished / "evaluations.csv").read_text()
    for ours, theirs in zip(arrays(run / "agent.npz"), arrays(finished / "agent.npz"), strict=True):
        assert_array_equal(ours, theirs)


def resume_here(run: Path, monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", "--resume", str(run), "--quiet", *words])
    aquadqn.main()


def test_a_finished_run_cannot_be_resumed_with_fewer_steps(finished, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    with pytest.raises(SystemExit) as stopped:
        resume_here(run, monkeypatch, "--total-timesteps", "100")
    assert stopped.value.code == 2 and "give --total-timesteps no less" in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == sorted(
        path.name for path in finished.iterdir()
    )
    for name in ("args.json", "evaluations.csv", "agent.npz", "replay.f32"):
        assert (run / name).read_bytes() == (finished / name).read_bytes()


def test_a_longer_run_stays_longer(finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    resume_here(run, monkeypatch, "--total-timesteps", "700")
    longer = {name: (run / name).read_bytes() for name in ("evaluations.csv", "agent.npz")}
    assert (
        longer["evaluations.csv"].decode().splitlines()[-1].startswith("700,")
        and resumed_step(run) < 700
    )
    saved = json.loads((run / "args.json").read_text())
    assert saved["total_timesteps"] == 700 and saved["resume"] is None
    resume_here(
        run, monkeypatch
    )  # as the message after a signal says: from the last checkpoint to the same end
    assert {name: (run / name).read_bytes() for name in longer} == longer


def test_a_resumed_run_repeats_its_warning(finished, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    saved = json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps({**saved, "warning": "not what you think"}))
    resume_here(run, monkeypatch)
    assert "not what you think" in capsys.readouterr().err
    assert json.loads((run / "args.json").read_text())["warning"] == "not what you think"


@pytest.mark.parametrize("stage", ["candidates", "agent"])
def test_a_signal_saves_and_says_how_to_resume(finished, tmp_path, stage):
    longer = (
        ["--candidate-steps", "1000000"]
        if stage == "candidates"
        else ["--total-timesteps", "1000000"]
    )
    process = start(tmp_path, *FAST, *longer)
    mark = {"candidates": "events*", "agent": "agent.npz"}[stage]
    wait_for(lambda: list(tmp_path.glob(f"runs/*/{mark}")), process)
    process.send_signal(signal.SIGTERM if stage == "agent" else signal.SIGINT)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 128 + (signal.SIGTERM if stage == "agent" else signal.SIGINT)
    run = only_run(tmp_path)
    assert f"--resume runs/{run.name}" in err and "Traceback" not in err
    assert (run / ("candidates_training.npz" if stage == "candidates" else "state.npz")).exists()
    if stage == "agent":
        end = str(max(600, resumed_step(run) + 40))
        finish(start(tmp_path, "--resume", f"runs/{run.name}", "--total-timesteps", end, "--quiet"))
        assert (run / "evaluations.csv").read_text().splitlines()[-1].startswith(f"{end},")


def test_candidate_training_resumes_to_the_same_parameters(datasets, tmp_path, monkeypatch):
    """Broken off where the temperature has not reached its end yet."""

    class Stop(Exception):
        pass

    class BreaksOff(aquadqn.CandidateRun):
        def log_candidates(self, step: int, loss, temperature) -> None:
            if step > 1100:
                raise Stop

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(aquadqn, "CANDIDATE_STEPS_PER_CALL", 50)  # a checkpoint every 1000 steps
    args = Args(
        env_id=ENV,
        dataset_id=DATASET,
        num_actions=3,
        candidate_steps=2400,
        batch_size=16,
        quiet=True,
    )
    args.temperature_start = 1.0
    demos = aquadqn.load_demonstrations(
        DATASET, aquadqn.make_env(Args(env_id=ENV, reward="sparse"))
    )
    network = aquadqn.make_candidate_network(args, 2)
    whole = aquadqn.train_candidates(args, aquadqn.CandidateRun(args, None), network, demos)
    args.exp_name = "broken"
    broken = BreaksOff(args, None)
    with pytest.raises(Stop):
        aquadqn.train_candidates(args, broken, network, demos)
    assert (
        json.loads(np.load(broken.folder / "candidates_training.npz")["meta"].tobytes())["step"]
        == 1000
    )
    broken.lock.close()
    args.resume = str(broken.folder)
    resumed = aquadqn.train_candidates(args, aquadqn.CandidateRun(args, None), network, demos)
    for ours, theirs in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        assert_array_equal(ours, theirs)


def test_two_processes_cannot_write_to_one_folder(finished, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
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
    with pytest.raises(SystemExit) as stopped:
        resume_here(run, monkeypatch)
    assert (
        stopped.value.code == 2 and f"{run} is in use by another process" in capsys.readouterr().err
    )
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    holder.kill()  # the lock dies with its process
    holder.wait()
    resume_here(run, monkeypatch)


class Breaks(tiny_env.Reach):
    """Reach whose numbers become NaN at its 300th step."""

    steps = 0
    broken = "reward"

    def step(self, action):
        observation, reward, *rest = super().step(action)
        Breaks.steps += 1
        if Breaks.steps == 300:
            if self.broken == "reward":
                reward = np.nan
            else:
                observation = observation * np.nan
        return observation, reward, *rest


gym.register("Breaks-v0", entry_point=Breaks, max_episode_steps=21)


@pytest.mark.parametrize("quantity", ["reward", "observation"])
def test_what_is_not_finite_in_the_environment_is_named_and_never_stored(
    datasets, tmp_path, monkeypatch, capsys, quantity
):
    monkeypatch.setattr(Breaks, "broken", quantity)
    monkeypatch.setattr(Breaks, "steps", 0)
    settings = dict(
        env_id="Breaks-v0",
        candidates="random",
        reward="env",
        min_demo_reward=None,
        checkpoint_every=50,
    )
    with pytest.raises(UserError, match=f"{quantity} at step .* is not finite"):
        train_here(
            tmp_path, monkeypatch, **settings, total_timesteps=500, eval_every=1000, eval_episodes=1
        )
    run = only_run(tmp_path)
    assert resumed_step(run) > 0 and np.isfinite(np.fromfile(run / "replay.f32", np.float32)).all()
    resume_here(run, monkeypatch)  # the environment has got better
    assert (run / "evaluations.csv").read_text().splitlines()[-1].startswith("500,")


def test_evaluate_repeats_the_last_evaluation_and_records_a_video(finished):
    out, _ = finish(
        start(
            finished.parents[1],
            "--evaluate",
            str(finished),
            "--eval-episodes",
            "3",
            "--capture-video",
        )
    )
    last = (finished / "evaluations.csv").read_text().splitlines()[-1].split(",")
    assert f"success {float(last[1]):.3f} (" in out and f"return  {float(last[2]):.3f} +-" in out
    assert (finished / "videos" / "evaluation_600.mp4").stat().st_size > 500


def test_the_wrapper_plays_the_candidates_of_a_run(finished):
    env = aquadqn.CandidateActions(gym.make("Reach-v0"), finished)
    assert env.action_space == gym.spaces.Discrete(4)
    observation, _ = env.reset(seed=3)
    box = env.env.action_space
    network = aquadqn.make_candidate_network(aquadqn.load_args(finished), 2)
    params = aquadqn.load_candidates(finished, network, 4)
    for index in (0, 3, 1):
        before = env.unwrapped.position.copy()
        candidate = np.clip(
            network.apply(params, observation.astype(np.float32))[index], box.low, box.high
        )
        observation, *_ = env.step(index)
        moved = env.unwrapped.position - before
        assert (
            np.abs(moved - 0.3 * np.asarray(candidate)).max() < 0.06
        )  # the environment adds noise of 0.01


# ---------------------------------------------------------------------------------------------------- variants


def train_here(tmp_path: Path, monkeypatch, **changes) -> Path:
    monkeypatch.chdir(tmp_path)
    settings = dict(
        env_id=ENV,
        dataset_id=DATASET,
        candidate_steps=20,
        total_timesteps=84,
        eval_every=84,
        batch_size=8,
        buffer_size=88,  # in blocks of 8
    )
    settings |= dict(eval_episodes=2, learning_starts=16, num_actions=4, quiet=True)
    return aquadqn.train(Args(**(settings | changes)))


def test_a_minimum_reward_that_changes_dense_rewards_is_said(
    datasets, tmp_path, monkeypatch, capsys
):
    train_here(tmp_path, monkeypatch, reward="env", candidates="random", min_demo_reward=-1e-9)
    assert (
        "--min-demo-reward -1e-09 raises 100% of the demonstrated rewards"
        in capsys.readouterr().err
    )
    train_here(
        tmp_path,
        monkeypatch,
        reward="env",
        candidates="random",
        min_demo_reward=None,
        exp_name="none",
    )
    train_here(tmp_path, monkeypatch, candidates="random", exp_name="sparse")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("candidates", ["kmeans", "random"])
def test_ablations(datasets, tmp_path, monkeypatch, candidates):
    run = train_here(tmp_path, monkeypatch, candidates=candidates)
    args = aquadqn.load_args(run)
    network = aquadqn.make_candidate_network(args, 2)
    params = aquadqn.load_candidates(run, network, 4)
    here, there = (
        network.apply(params, np.zeros(4, np.float32)),
        network.apply(params, np.ones(4, np.float32)),
    )
    if candidates == "random":
        assert np.abs(here - there).max() > 0.01
        return
    assert_array_equal(here, there)
    demos = aquadqn.load_demonstrations(
        DATASET, aquadqn.make_env(Args(env_id=ENV, reward="sparse"))
    )
    nearest = ((demos.actions[:, None] - np.asarray(here)) ** 2).sum(-1).argmin(1)
    for k in range(
        4
    ):  # the fixed point of Lloyd's algorithm: every centre is the mean of what is nearest to it
        np.testing.assert_allclose(here[k], demos.actions[nearest == k].mean(0), atol=1e-4)


@pytest.mark.parametrize("q_loss", ["dqn", "double"])
def test_other_q_losses_run_and_differ(datasets, tmp_path, monkeypatch, q_loss):
    run = train_here(tmp_path, monkeypatch, q_loss=q_loss, candidates="random", exp_name=q_loss)
    munchausen = train_here(tmp_path, monkeypatch, candidates="random")
    differences = [
        np.abs(a - b).max()
        for a, b in zip(arrays(run / "agent.npz"), arrays(munchausen / "agent.npz"))
    ]
    assert max(differences) > 0


def test_dictionary_observations_are_flattened_alike(datasets):
    env = aquadqn.make_env(Args(env_id="tiny_env:ReachDict-v0", reward="sparse"))
    observation, _ = env.reset(seed=0)
    demos = aquadqn.load_demonstrations("tiny/reachdict/expert-v0", env)
    assert demos.observations.shape[1:] == observation.shape == (4,)
    # The recorder's first episode has the same seed, and Dict sorts its keys: goal, then position.
    np.testing.assert_allclose(demos.observations[0], observation, rtol=1e-6)
    np.testing.assert_allclose(observation[:2], -observation[2:])


def test_candidates_from_another_run(finished, datasets, tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(finished, source)
    run = train_here(tmp_path, monkeypatch, candidates_from=str(source))
    for ours, theirs in zip(
        arrays(run / "candidates.npz"), arrays(finished / "candidates.npz"), strict=True
    ):
        assert_array_equal(ours, theirs)
    shutil.rmtree(source)  # the run has a copy
    before = (run / "evaluations.csv").read_text()
    resume_here(run, monkeypatch)
    assert (run / "evaluations.csv").read_text() == before


def test_demonstrations_keep_episodes_apart(datasets):
    env = aquadqn.make_env(Args(env_id=ENV, reward="sparse"))
    demos = aquadqn.load_demonstrations(DATASET, env, num_demos=2)
    dataset = minari.load_dataset(DATASET)
    first, second = dataset.iterate_episodes([0, 1])
    assert_array_equal(
        np.flatnonzero(demos.ends),
        [len(first.actions) - 1, len(first.actions) + len(second.actions) - 1],
    )
    np.testing.assert_allclose(
        demos.next_observations[demos.ends][0], first.observations[-1], rtol=1e-6
    )
    np.testing.assert_allclose(
        demos.observations[len(first.actions)], second.observations[0], rtol=1e-6
    )
    assert_array_equal(demos.rewards[: len(first.actions)], first.infos["success"][1:])
    dense = aquadqn.load_demonstrations(DATASET, env, sparse=False)
    np.testing.assert_allclose(dense.rewards[: len(first.actions)], first.rewards, rtol=1e-6)


# --------------------------------------------------------------------------------------------------- bad input


def broken_copy(datasets: Path, name: str, change) -> str:
    """A copy of the demonstrations with something wrong in its first episode."""
    source, target = (
        datasets / "tiny" / "reach" / "expert-v0",
        datasets / "broken" / name / "expert-v0",
    )
    if not target.exists():
        shutil.copytree(source, target)
        with h5py.File(target / "data" / "main_data.hdf5", "r+") as file:
            change(file["episode_0"])
        metadata = json.loads((target / "data" / "metadata.json").read_text())
        metadata["dataset_id"] = f"broken/{name}/expert-v0"
        (target / "data" / "metadata.json").write_text(json.dumps(metadata))
    return f"broken/{name}/expert-v0"


def put_nan(episode):
    episode["observations"][2, 1] = np.nan


def put_infinity(episode):
    episode["actions"][0, 0] = np.inf


def drop_success(episode):
    del episode["infos"]["success"]


def shorten_success(episode):
    values = episode["infos"]["success"][1:]  # as in D4RL's older uploads: as many entries as steps
    del episode["infos"]["success"]
    episode["infos"]["success"] = values


def widen_actions(episode):
    values = np.repeat(episode["actions"][:], 2, axis=1)
    del episode["actions"]
    episode["actions"] = values


@pytest.mark.parametrize(
    "change, words",
    [
        (put_nan, "observations"),
        (put_infinity, "actions"),
        (drop_success, "success"),
        (widen_actions, r"actions.*4"),
    ],
)
def test_bad_data_is_named(datasets, change, words):
    dataset_id = broken_copy(datasets, change.__name__.replace("_", ""), change)
    with pytest.raises(UserError, match=words) as caught:
        aquadqn.load_demonstrations(dataset_id, aquadqn.make_env(Args(env_id=ENV, reward="sparse")))
    assert dataset_id in str(caught.value) and "\n" not in str(caught.value)


def test_success_may_have_as_many_entries_as_actions(datasets):
    older = broken_copy(datasets, "older", shorten_success)
    env = aquadqn.make_env(Args(env_id=ENV, reward="sparse"))
    assert_array_equal(
        aquadqn.load_demonstrations(older, env).rewards,
        aquadqn.load_demonstrations(DATASET, env).rewards,
    )


def test_actions_are_clipped_to_the_box(datasets):
    def enlarge(episode):
        episode["actions"][...] = 1.37

    demos = aquadqn.load_demonstrations(
        broken_copy(datasets, "large", enlarge), aquadqn.make_env(Args(env_id=ENV, reward="sparse"))
    )
    assert demos.actions[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--num-actions", "0"], "--num-actions"),
        (["--demo-ratio", "1.5"], "--demo-ratio"),
        (["--temperature", "0"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--min-demo-reward", "nan"], "--min-demo-reward"),
        (["--munchausen-clip", "nan"], "--munchausen-clip"),
        (["--seed", "-1"], "--seed"),
        (["--env-id", "NoSuchEnv-v0"], "NoSuchEnv"),
        (["--env-id", "no_such_module:Env-v0"], "no_such_module"),
        (["--env-id", "CartPole-v1"], "Box"),
        (["--env-id", "Pendulum-v1"], "--dataset-id"),
        (["--env-id", "Pendulum-v1", "--reward", "sparse"], "--reward env"),
        (["--env-id", "Pendulum-v1", "--dataset-id", DATASET], "shape"),
        (["--env-id", ENV, "--dataset-id", "not an id"], "not an id"),
        (["--resume", "no/such/run"], "no/such/run"),
        (["--evaluate", "no/such/run", "--eval-episodes", "0"], "--eval-episodes"),
        (["--evaluate", "no/such/run"], "no/such/run"),
        (
            ["--env-id", ENV, "--dataset-id", DATASET, "--candidates-from", "no/such/run"],
            "no/such/run",
        ),
    ],
)
def test_bad_arguments_end_with_one_line_and_code_2(
    datasets, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        aquadqn.main()
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and words in line
    assert not list(tmp_path.iterdir())


def test_an_unreachable_dataset_is_one_line(datasets, tmp_path, monkeypatch, capsys):
    def load_dataset(dataset_id: str, download: bool = False):
        raise ConnectionError("no network\nhere") if download else FileNotFoundError(dataset_id)

    monkeypatch.setattr(minari, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", "--env-id", ENV, "--dataset-id", "far/away-v0"])
    with pytest.raises(SystemExit) as stopped:
        aquadqn.main()
    fetching, line = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and "far/away-v0" in fetching and "no network here" in line


@pytest.mark.parametrize("task", ["Door", "Hammer", "Pen", "Relocate"])
def test_where_no_hub_is_reachable_the_bundled_demonstrations_are_used_and_said_so(
    datasets, monkeypatch, task
):
    """Every Adroit task has 25 bundled episodes that reach the goal, and they fit its environment."""

    def load_dataset(dataset_id: str, download: bool = False):
        raise ConnectionError("no network here") if download else FileNotFoundError(dataset_id)

    monkeypatch.setattr(minari, "load_dataset", load_dataset)
    args = Args(env_id=f"AdroitHand{task}-v1", reward="sparse")
    demos, dataset_id, warning = aquadqn.find_demonstrations(args, aquadqn.make_env(args))
    assert dataset_id == f"aquadem/{task.lower()}/agent-v0"
    assert "NOT HUMAN" in warning and f"D4RL/{task.lower()}/human-v2" in warning
    episodes = np.split(demos.rewards, np.flatnonzero(demos.ends) + 1)[:-1]
    assert len(episodes) == 25 and all(rewards.any() for rewards in episodes)
    (data,) = (aquadqn.BUNDLED_DEMONSTRATIONS / dataset_id).rglob("*.hdf5")
    assert data.stat().st_size < 3e6


def test_resume_refuses_what_would_change_the_learning(finished, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["aquadqn.py", "--resume", str(finished), "--learning-rate", "0.5"]
    )
    with pytest.raises(SystemExit) as stopped:
        aquadqn.main()
    assert stopped.value.code == 2 and "--learning-rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, damage", [("state.npz", b"PK\x03\x04 cut off"), ("replay.f32", b"")]
)
def test_a_damaged_checkpoint_is_one_line(finished, tmp_path, monkeypatch, capsys, name, damage):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / name).write_bytes(damage)
    monkeypatch.setattr(sys, "argv", ["aquadqn.py", "--resume", str(run), "--quiet"])
    with pytest.raises(SystemExit) as stopped:
        aquadqn.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and name in line


def test_a_pickle_is_never_loaded(tmp_path):
    path = tmp_path / "agent.npz"
    np.savez(path, leaf_000=np.array([{"a": 1}], dtype=object), meta=np.zeros(2, np.uint8))
    with pytest.raises(UserError, match="not a whole checkpoint"):
        aquadqn.load_arrays(path, [np.zeros(1)])


def test_a_non_finite_loss_stops_the_run_and_keeps_the_checkpoint(datasets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = dict(
        env_id=ENV, dataset_id=DATASET, candidates="random", num_actions=3, batch_size=8, quiet=True
    )
    args = Args(
        **settings, total_timesteps=2000, eval_every=2000, eval_episodes=1, learning_starts=50
    )
    args.checkpoint_every, args.min_demo_reward = (
        25,
        1e38,
    )  # its square overflows once Q-values grow
    args.learning_rate = 1e9
    with pytest.raises(SystemExit, match="not finite at step .*lower --learning-rate"):
        aquadqn.train(args)
    run = only_run(tmp_path)
    assert (run / "state.npz").exists()
    assert all(
        np.isfinite(array).all() for array in arrays(run / "state.npz") if array.dtype == np.float32
    )


# -------------------------------------------------------------------------------------------------- appearances


def test_help_reads_like_documentation():
    out = subprocess.run(
        command("--help"), capture_output=True, text=True, env=environment(), check=True
    ).stdout
    for words in (
        "--env-id",
        "--candidates {learned,kmeans,random}",
        "candidate actions per state",
        "AQuaDQN",
    ):
        assert words in out


def test_importing_has_no_side_effect(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import aquadqn, jax; from jax._src import xla_bridge as b;"
    code += "assert not b.backends_are_initialized(), 'device work at import'"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("env_id, size", [("AdroitHandDoor-v1", 39), ("HalfCheetah-v5", 17)])
def test_environments_come_without_notices(env_id, size, tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import aquadqn;"
    code += "e = aquadqn.make_env(aquadqn.Args(sys.argv[2]));"
    code += f"assert e.observation_space.shape == ({size},)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), env_id],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())  # nor MuJoCo's log


def test_adroit_has_the_sparse_reward():
    assert isinstance(aquadqn.make_env(Args(reward="sparse")).env, aquadqn.SparseReward)
