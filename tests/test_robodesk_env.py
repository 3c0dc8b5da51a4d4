"""robodesk_env.py: the desk against the package it wraps, and as a Gymnasium environment like any other."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.testing import assert_allclose, assert_array_equal

from robodesk_env import BASE_TASKS, TASKS, Desk

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk("open_slide", "fixed")


def make(task: str, **options: Any) -> gym.Env:
    return gym.make(f"robodesk_env:RoboDesk/{task}-v0", disable_env_checker=True, **options)


@pytest.mark.parametrize("rewards", ["fixed", "upstream"])
def test_gymnasium_finds_nothing_to_complain_about(rewards, recwarn):
    env = gym.make("robodesk_env:RoboDesk/push_green-v0", robodesk_rewards=rewards)
    check_env(env.unwrapped, skip_render_check=True)
    endless = "A Box observation space"  # positions have no bounds
    assert [str(w.message) for w in recwarn if endless not in str(w.message)] == []
    assert env.unwrapped.rewards == rewards


def test_every_task_has_an_id():
    assert len(BASE_TASKS) == 9 and len(TASKS) == 18
    for task in TASKS:
        env = make(task)
        assert env.spec.id == f"RoboDesk/{task}-v0" and env.spec.max_episode_steps == 500
        assert env.unwrapped.task == task and env.unwrapped.rewards == "fixed"


def test_the_simulation_is_the_packages(monkeypatch):
    with contextlib.redirect_stderr(io.StringIO()):
        from robodesk import RoboDesk
    monkeypatch.setattr(RoboDesk, "render", lambda self, resize: None)
    theirs = RoboDesk("open_slide")
    env = make("open_slide", robodesk_rewards="upstream")
    ours = env.unwrapped
    assert set(theirs.all_tasks) == set(TASKS)
    generator = np.random.default_rng(3)  # the same draws as Gymnasium's from the seed 3
    monkeypatch.setattr(np.random, "random", generator.random)
    monkeypatch.setattr(np.random, "uniform", generator.uniform)
    theirs.reset()
    env.reset(seed=3)
    rng = np.random.default_rng(0)
    for step in range(500):
        action = np.clip(
            rng.uniform(-1, 1, 5) + [0, 0.3, -0.2, 0, 0], -1, 1
        )  # towards the table and its things
        seen, reward, done, _ = theirs.step(action)
        observation, our_reward, terminated, truncated, _ = env.step(action)
        physics = theirs.physics.data
        assert_allclose(ours.data.qpos, physics.qpos, rtol=0, atol=1e-6)
        assert_allclose(ours.data.qvel, physics.qvel, rtol=0, atol=1e-6)
        assert abs(reward - our_reward) < 1e-9 and truncated == done and not terminated
        if step % 50 == 0:
            parts = [
                seen["qpos_robot"],
                seen["qvel_robot"],
                seen["end_effector"],
                physics.qpos[9:],
                physics.qvel[9:],
            ]
            assert_allclose(observation, np.concatenate(parts), rtol=1e-6, atol=1e-6)
            for task in TASKS:
                reward, success = ours.reward_and_success(task)
                assert (
                    abs(reward - np.squeeze(theirs._get_task_reward(task, "dense_reward"))) < 1e-9
                ), task
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
    assert_allclose(
        before - desk.reward_and_success("open_slide")[0], 0.034 if fixed else 0, atol=1e-9
    )


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
    env = make("lift_flat_block", max_episode_steps=2)
    observation, info = env.reset(seed=0)
    assert env.observation_space.contains(observation) and info == {"success": False}
    place(env.unwrapped, "flat_block", (0, 0, 0.05))
    _, reward, terminated, truncated, info = env.step(np.zeros(5, np.float32))
    assert info == {"success": True} and not terminated and not truncated and reward > 0.3
    assert env.step(np.zeros(5, np.float32))[3]


def test_nothing_is_printed(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gymnasium;"
    code += "e = gymnasium.make('robodesk_env:RoboDesk/stack-v0');"
    code += "e.reset(seed=0); e.step(e.action_space.sample()); assert 'gym' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
