"""The toy world: environment and demonstrator, and what section 3.2 says about the trained candidates."""

import dataclasses
import itertools
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

import gridworld
from gridworld import (
    CROSSROADS,
    ROLLOUTS,
    STEP_LENGTH,
    Args,
    GridWorld,
    angle_between,
    constant_temperature,
)

ROOT = Path(__file__).parents[1]
RIGHT, UP, DIAGONAL = np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([1.0, 1.0])
# The bottom-left region up to a step before its border, where the demonstrator starts to walk diagonally.
AXIS = np.linspace(0, CROSSROADS - STEP_LENGTH, 9, dtype=np.float32)
REGION = np.stack(np.meshgrid(AXIS, AXIS), axis=-1).reshape(-1, 2)
FEWER_STEPS = Args(quiet=True, candidate_steps=6_000)


@pytest.fixture(scope="module")
def demos():
    return gridworld.run_episodes(gridworld.demonstrator, Args.num_demos, Args.seed)


@pytest.fixture(scope="module")
def fits(demos):
    """BC and K=2 at three temperatures, trained as the script does by default but for fewer steps."""
    settings = [(1, 0.01), (2, 0.01), (2, 0.001), (2, 10.0)]
    variants = [constant_temperature(FEWER_STEPS, k, temperature) for k, temperature in settings]
    return dict(zip(settings, gridworld.fit_networks(variants, demos)))


@pytest.fixture(scope="module")
def annealing(demos):
    """Two initialisations with a head that dies at T=0.001, each with a constant T and an annealed one."""
    constant = []
    for seed in (3, 5):
        args = Args(quiet=True, seed=seed, candidate_steps=2000)
        constant.append(
            constant_temperature(args, gridworld.ANNEALING_K, gridworld.ANNEALING_TEMPERATURE)
        )
    annealed = [
        dataclasses.replace(args, temperature_start=Args.temperature_start) for args in constant
    ]
    fits = gridworld.fit_networks(constant + annealed, demos)
    return fits[:2], fits[2:]


# ---------------------------------------------------------------------------------- environment, demonstrator


def test_environment_passes_the_checker_without_a_warning(monkeypatch):
    monkeypatch.setitem(
        gym.registry, "GridWorld-v0", EnvSpec("GridWorld-v0", entry_point=GridWorld)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("GridWorld-v0", render_mode="rgb_array").unwrapped)


def test_a_step_has_fixed_length_whatever_the_size_of_the_action():
    env = GridWorld()
    for size in (1e-3, 0.5, 1.0):
        start, _ = env.reset(seed=0)
        position, reward, terminated, truncated, info = env.step(np.array([size, size]))
        assert_allclose(position - start, STEP_LENGTH / np.sqrt(2), rtol=1e-5)
        assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)


def test_no_direction_is_no_step_and_walls_hold():
    env = GridWorld()
    start, _ = env.reset(seed=0)
    assert_array_equal(env.step(np.zeros(2))[0], start)
    for _ in range(3):
        position = env.step(-DIAGONAL)[0]
    assert_array_equal(position, [0.0, 0.0])


def test_goal_ends_the_episode_with_reward_and_wandering_is_cut_off():
    env = GridWorld()
    env.reset(seed=0)
    outcomes = [env.step(DIAGONAL)[1:4] for _ in range(14)]
    assert (1.0, True, False) in outcomes and all(o == (0.0, False, False) for o in outcomes[:12])
    env.reset(seed=0)
    outcomes = [env.step(-DIAGONAL)[1:4] for _ in range(gridworld.MAX_STEPS)]
    assert outcomes[-1] == (0.0, False, True) and not any(
        truncated for _, _, truncated in outcomes[:-1]
    )


def test_rendering_follows_the_agent():
    env = GridWorld(render_mode="rgb_array")
    env.reset(seed=0)
    before = env.render()
    env.step(UP)
    after = env.render()
    assert before.dtype == np.uint8 and before.ndim == 3 and before.shape[2] == 3
    assert before.shape == after.shape and (before != after).any()


def test_demonstrator_goes_right_or_up_then_diagonally_then_along_an_edge(demos):
    phases = set()
    for demo in demos:
        assert demo.success and (demo.states[0] <= 2 * STEP_LENGTH).all()
        inside = (demo.states[:-1] < CROSSROADS).all(axis=1)
        on_edge = (demo.states[:-1] >= 1).any(axis=1)
        stage = np.where(inside, 0, np.where(on_edge, 2, 1))
        assert (np.diff(stage) >= 0).all()
        for state, action, now in zip(demo.states, demo.actions, stage):
            right, up = angle_between(action, RIGHT) < 1e-3, angle_between(action, UP) < 1e-3
            if now == 0:
                assert right or up
                phases.add("right" if right else "up")
            elif now == 1:
                assert angle_between(action, DIAGONAL) < 1e-3
            else:
                assert up if state[0] >= 1 else right
                phases.add("right edge" if state[0] >= 1 else "top edge")
    assert phases == {"right", "up", "right edge", "top edge"}


def test_demonstrations_are_seeded_and_any_number_can_be_had():
    few, more, other = (
        gridworld.run_episodes(gridworld.demonstrator, n, seed)
        for n, seed in ((3, 5), (7, 5), (3, 6))
    )
    assert (len(few), len(more)) == (3, 7)
    for a, b in zip(few, more):
        assert_array_equal(a.states, b.states)
        assert_array_equal(a.actions, b.actions)
    assert (few[0].states[0] != other[0].states[0]).any()


# ------------------------------------------------------------------------------------------ trained candidates


def test_cloning_goes_diagonally_where_only_right_and_up_were_demonstrated(fits):
    assert angle_between(fits[1, 0.01].candidates(REGION)[:, 0], DIAGONAL).max() < 15


def test_two_candidates_go_right_and_up_there(fits):
    first, second = np.moveaxis(fits[2, 0.01].candidates(REGION), 1, 0)
    assert angle_between(first, RIGHT).max() < 15
    assert angle_between(second, UP).max() < 15


def test_a_large_temperature_makes_all_heads_clone(fits, demos):
    for states, share in ((REGION, 1.0), (gridworld.state_action_pairs(demos)[0], 0.99)):
        angles = angle_between(fits[2, 10.0].candidates(states), fits[1, 0.01].candidates(states))
        assert np.quantile(angles, share) < 10


def test_a_low_temperature_frees_the_farthest_candidate_not_the_nearest(fits, demos):
    nearest, farthest = gridworld.candidate_errors(fits[2, 0.01], demos)
    low_nearest, low_farthest = gridworld.candidate_errors(fits[2, 0.001], demos)
    assert low_nearest <= 1.2 * nearest
    assert low_farthest > farthest


def test_loss_falls_and_candidates_beat_cloning(fits):
    for fit in fits.values():
        assert np.isnan(fit.losses[0]) and fit.losses[-10:].mean() < fit.losses[1]
        assert fit.steps[-1] == FEWER_STEPS.candidate_steps and len(fit.steps) == len(
            fit.losses
        ) == len(fit.fields)
    assert fits[2, 0.01].losses[-10:].mean() < 0.1 * fits[1, 0.01].losses[-10:].mean()


def test_rollouts_of_candidates_stay_with_the_demonstrator_where_cloning_does_not(fits, demos):
    policies = {"demonstrator": gridworld.demonstrator}
    policies |= {str(k): gridworld.towards_goal(fits[k, 0.01]) for k in (1, 2)}
    rollouts = {
        name: gridworld.roll_out(name, 1, policy, demos) for name, policy in policies.items()
    }
    for rollout in rollouts.values():
        assert len(rollout.episodes) == ROLLOUTS and rollout.measures["reached_goal"] == 1
    off = {
        name: rollout.measures["degrees_off_demonstrated_directions"]
        for name, rollout in rollouts.items()
    }
    assert off["demonstrator"] < 1e-3 and off["2"] < 0.5 * off["1"]
    first_steps = [episode.actions[0] for episode in rollouts["1"].episodes]
    assert angle_between(np.array(first_steps), DIAGONAL).max() < 15


def test_training_is_reproducible_to_the_bit(fits, demos):
    args = constant_temperature(Args(), 1, 0.01)
    again = gridworld.training(args, *map(jnp.asarray, gridworld.state_action_pairs(demos)))
    for block, (steps, loss, field, _) in enumerate(itertools.islice(again, 3)):
        assert steps == fits[1, 0.01].steps[block]
        assert_array_equal(loss, fits[1, 0.01].losses[block])
        assert_array_equal(field, fits[1, 0.01].fields[block])


def test_a_constant_temperature_leaves_a_dead_head_and_annealing_does_not(annealing, demos):
    constant, annealed = annealing
    assert [gridworld.heads_in_use(fit, demos) for fit in constant] == [2, 2]
    assert [gridworld.heads_in_use(fit, demos) for fit in annealed] == [3, 3]
    for before, after in zip(constant, annealed):
        sums = [
            fit.fields[0].sum(axis=1) for fit in (before, after)
        ]  # heads are drawn in another order
        assert_allclose(*sums, atol=1e-6)  # one initialisation
        assert (
            gridworld.candidate_errors(after, demos)[0]
            < gridworld.candidate_errors(before, demos)[0]
        )
    assert (constant[0].name, annealed[0].name) == ("K=3, T=0.001", "K=3, T=1 to 0.001")


def test_heads_in_use_are_counted_from_one_percent_on():
    actions = np.repeat(
        [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], [190, 8, 2], axis=0
    )  # 95, 4 and 1 percent
    episode = gridworld.Episode(np.zeros((201, 2)), actions, np.zeros(200), True)
    heads = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    fit = gridworld.Fit(
        "", 4, lambda states: np.broadcast_to(heads, (len(states), 4, 2)), *[np.zeros(1)] * 3
    )
    assert gridworld.heads_in_use(fit, [episode]) == 3


@pytest.mark.parametrize("start", [0.02, 5.0])
def test_constant_fits_do_not_know_the_start_of_the_annealing(start, fits, demos):
    args = constant_temperature(Args(temperature_start=start), 2, 0.01)
    assert args == constant_temperature(Args(), 2, 0.01) and args.temperature_start == 0.01
    pairs = map(jnp.asarray, gridworld.state_action_pairs(demos))
    _, after_a_block = itertools.islice(gridworld.training(args, *pairs), 2)
    assert after_a_block.loss == fits[2, 0.01].losses[1]


def test_a_loss_that_is_not_finite_stops_the_run():
    first, last = (gridworld.Snapshot(step, np.nan, np.zeros(1), None) for step in (0, 100))
    gridworld.stop_if_diverged([first])
    with pytest.raises(gridworld.UserError, match="step 100: lower --candidate-learning-rate"):
        gridworld.stop_if_diverged([last])


def test_heads_are_ordered_right_then_left_then_between():
    field = np.array([[[0.7, 0.7], [0.0, 1.0], [1.0, 0.0], [0.9, 0.4]]])
    assert gridworld.head_order(field) == [2, 1, 3, 0]
    assert gridworld.head_order(field[:, :1]) == [0]


# ------------------------------------------------------------------------------------------------- the script


def test_the_script_leaves_figures_and_numbers(fits, tmp_path, monkeypatch, capsys):
    def trained(variants, demos):
        assert len(variants) in (6, 2 * gridworld.INITIALISATIONS)
        return [fits.get((args.k, args.temperature), fits[2, 0.01]) for args in variants]

    monkeypatch.setattr(gridworld, "fit_networks", trained)
    monkeypatch.setattr(
        sys,
        "argv",
        ["gridworld.py", "--num-demos", "20", "--out", str(tmp_path / "new" / "folder")],
    )
    gridworld.main()
    out = tmp_path / "new" / "folder"
    names = ("world", "candidates", "temperature", "annealing", "loss", "rollouts")
    pictures = {f"{name}.png" for name in names} | {"training.gif"}
    assert {path.name for path in out.iterdir()} == pictures | {"rollouts.csv"}
    for name in pictures:
        with Image.open(out / name) as picture:
            assert min(picture.size) > 300
            assert getattr(picture, "n_frames", 1) > 20 or name != "training.gif"
    lines = (out / "rollouts.csv").read_text().splitlines()
    assert lines[0].startswith("policy,reached_goal,steps,") and len(lines) == 5
    printed = capsys.readouterr().out
    assert (
        lines[1] in printed
        and "heads in use (nearest for at least 1% of demonstrated actions):" in printed
    )
    assert "from 5 initialisations" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        "--k 0",
        "--temperature 0",
        "--temperature -1",
        "--temperature nan",
        "--num-demos 0",
        "--candidate-steps 0",
        "--seed -1",
    ],
)
def test_bad_values_get_one_line_and_exit_code_2(arguments, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["gridworld.py", *arguments.split(), "--out", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit) as stop:
        gridworld.main()
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: {arguments.split()[0]} is ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", ["--k 0", "--out gridworld.py"])
def test_bad_values_from_the_shell(arguments):
    command = [sys.executable, "gridworld.py", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_importing_has_no_side_effects(tmp_path):
    code = f"""import os, sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["x", "--not-an-argument"]
import gridworld
from jax._src import xla_bridge
assert not xla_bridge._backends, "a device was set up"
assert "matplotlib" not in sys.modules, "it may build its font cache"
assert os.listdir() == []"""
    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
