"""sac_baselines.py: densities, targets, updates, whole runs on a tiny environment, bad input."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import sac_baselines as sac

SCRIPT = Path(sac.__file__)
ENV_ID, DATASET_ID = "tiny_env:Reach-v0", "tiny/reach/expert-v0"
OBS, DIM = 4, 2  # of the tiny environment
TINY = [
    "--env-id",
    ENV_ID,
    "--eval-episodes",
    "3",
    "--batch-size",
    "16",
    "--learning-starts",
    "16",
    "--quiet",
]
METHODS = {
    "sac": ["sac"],
    "sacfd": ["sacfd", "--dataset-id", DATASET_ID],
    "gail": ["gail", "--dataset-id", DATASET_ID, "--discriminator-units", "8"],
}


@pytest.fixture
def tiny(datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and everything small enough for a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sac, "SINKHORN_POINTS", 50)
    monkeypatch.setattr(sac, "HUMAN_REPETITIONS", 5)
    monkeypatch.setattr(sac, "HIDDEN_UNITS", (32,))
    monkeypatch.setattr(sac.Run, "catch_signals", lambda self: None)
    return tmp_path


def run_script(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sac_baselines.py", *argv])
    sac.main()


def only_run() -> Path:
    (run,) = Path("runs").iterdir()
    return run


# ----------------------------------------------------------------------------------------- losses and targets


@pytest.mark.parametrize("mean, log_deviation", [(0.0, 0.0), (0.7, -1.0), (-2.0, 0.5), (0.3, 1.2)])
def test_squashed_density_against_numerical_integration(mean, log_deviation):
    deviation = math.exp(log_deviation)
    edges = np.array([-0.999, -0.7, -0.2, 0.1, 0.6, 0.999])
    for low, high in zip(edges, edges[1:]):
        a = np.linspace(low, high, 20001)
        noise = (np.arctanh(a) - mean) / deviation
        actions, log_prob = sac.squash(
            jnp.full((1,), mean), jnp.full((1,), log_deviation), jnp.asarray(noise)[:, None]
        )
        assert_allclose(actions[:, 0], a, atol=1e-5)
        gauss = [
            0.5 * (1 + math.erf((math.atanh(x) - mean) / deviation / math.sqrt(2)))
            for x in (low, high)
        ]
        assert_allclose(
            np.trapezoid(np.exp(log_prob), a), gauss[1] - gauss[0], rtol=1e-3, atol=1e-6
        )


def test_density_of_several_dimensions_is_the_product_and_never_underflows():
    rng = np.random.default_rng(0)
    mean, log_deviation, noise = rng.normal(size=(3, 7, 2))
    parts = [sac.squash(*(x[:, [d]] for x in (mean, log_deviation, noise)))[1] for d in range(2)]
    assert_allclose(sac.squash(mean, log_deviation, noise)[1], sum(parts), rtol=1e-4, atol=1e-5)
    _, far = sac.squash(jnp.array([[30.0], [-30.0]]), jnp.zeros((2, 1)), jnp.zeros((2, 1)))
    # Where tanh is +-1 in float32: log N - log(1 - tanh^2), and 1 - tanh(30)^2 = 4 exp(-60) to many digits.
    assert_allclose(far, -0.5 * math.log(2 * math.pi) - math.log(4) + 60, rtol=1e-5)


def test_soft_target_by_hand():
    q_next, log_prob = jnp.array([[3.0, 1.0, 5.0], [2.0, 4.0, 5.0]]), jnp.array([-1.0, 2.0, 0.5])
    reward, discount = jnp.array([1.0, 0.0, 7.0]), jnp.array([0.9, 0.5, 0.0])
    target = sac.soft_target(q_next, log_prob, reward, discount, 0.1)
    assert_allclose(target, [1 + 0.9 * (2 + 0.1), 0.5 * (1 - 0.2), 7.0], rtol=1e-6)


@pytest.mark.parametrize("entropy, sign", [(-1.0, 1), (-3.0, -1)])
def test_temperature_falls_above_the_target_entropy_and_rises_below(entropy, sign):
    slope = jax.grad(sac.temperature_loss)(jnp.log(0.3), jnp.asarray(entropy), -2.0)
    assert_allclose(slope, sign, rtol=1e-6)  # descent moves against it


def test_actions_fill_the_box_and_come_back():
    box = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 0.3], np.float32))
    units = jnp.array([[-1.0, -1.0], [1.0, 1.0], [0.5, 0.0]])
    actions = sac.to_box(units, box)
    assert_allclose(actions, [[-2, 0], [2, 0.3], [1, 0.15]], rtol=1e-6)
    assert all(box.contains(np.asarray(action)) for action in actions)
    assert_allclose(sac.from_box(actions, box), units, atol=1e-6)


def test_twin_critic_is_two_independent_networks():
    rng = np.random.default_rng(0)
    observations, actions = rng.normal(size=(5, 3)), rng.normal(size=(5, 2))
    params = jax.jit(sac.TwinCritic().init)(jax.random.key(0), observations, actions)
    both = jax.jit(sac.TwinCritic().apply)(params, observations, actions)
    weights = {name: np.asarray(value) for name, value in params["params"].items()}
    assert not np.allclose(weights["kernel_0"][0], weights["kernel_0"][1])
    for k in range(2):
        x = np.concatenate([observations, actions], axis=1)
        for layer in range(3):
            x = x @ weights[f"kernel_{layer}"][k] + weights[f"bias_{layer}"][k]
            x = np.maximum(x, 0) if layer < 2 else x
        assert_allclose(both[k], x[:, 0], rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- replay


def numbered_replay(steps: int, capacity: int, seed: int = 0) -> tuple[sac.Replay, sac.Transition]:
    """Step t has observation t and next observation t + 0.5; the ring keeps the last of all these steps."""
    rng = np.random.default_rng(seed)
    ends = rng.uniform(size=steps) < 0.15
    terminations = ends & (rng.uniform(size=steps) < 0.5)
    t = np.arange(steps, dtype=np.float32)[:, None]
    steps_taken = sac.Transition(
        t, t + 0.5, rng.normal(size=(steps, 1)), rng.normal(size=steps), terminations, ends
    )
    steps_taken = jax.tree.map(lambda array: np.asarray(array, np.float32), steps_taken)
    replay, store = sac.make_replay(capacity, 1, 1), jax.jit(sac.store)
    for first in range(0, steps, 4):
        replay = store(replay, jax.tree.map(lambda array: array[first : first + 4], steps_taken))  # noqa: B023
    return replay, steps_taken


@pytest.mark.parametrize("steps, capacity, n_step", [(40, 64, 3), (200, 64, 5), (200, 64, 1)])
def test_n_step_targets_against_brute_force(steps, capacity, n_step):
    replay, stored = numbered_replay(steps, capacity)

    @jax.jit
    def draw(key):
        windows = sac.sample(replay, key, 500, n_step)
        return sac.reward_windows(windows, windows.reward, 0.9)

    batch = draw(jax.random.key(1))
    seen = set()
    for observation, action, value, bootstrap, discount in zip(*map(np.asarray, batch)):
        t = last = int(observation[0])
        expected = stored.reward[t]
        while last + 1 < min(t + n_step, steps) and not stored.ended[last]:
            last += 1
            expected += 0.9 ** (last - t) * stored.reward[last]
        assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
        assert action[0] == stored.action[t, 0] and bootstrap[0] == last + 0.5
        assert_allclose(
            discount, 0 if stored.terminated[last] else 0.9 ** (last - t + 1), rtol=1e-5
        )
        seen.add(t)
    assert seen == set(range(max(0, steps - capacity), steps))


@pytest.mark.parametrize("ratio, share", [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_demonstrations_enter_a_batch_at_their_ratio(ratio, share):
    (ours, _), (theirs, _) = numbered_replay(40, 64), numbered_replay(40, 64, seed=1)
    marked = jnp.full_like(
        theirs.transitions.action, 99.0
    )  # the action tells where a transition is from
    theirs = theirs._replace(transitions=theirs.transitions._replace(action=marked))
    sample = jax.jit(lambda replay: sac.sample(replay, jax.random.key(0), 4000, 2))
    windows = [sample(replay) for replay in (ours, theirs)]
    mixed = jax.jit(lambda *pair: sac.mix_windows(*pair, jax.random.key(2), ratio))(*windows)
    from_demos = np.asarray(mixed.action[:, :, 0] == 99.0)
    assert abs(from_demos[:, 0].mean() - share) < (0.03 if 0 < ratio < 1 else 1e-9)
    assert_array_equal(from_demos[:, 0], from_demos[:, 1])  # a window is of one kind
    for field in ("reward", "observation", "ended"):
        chosen = np.where(
            from_demos[:, 0], *(np.asarray(getattr(w, field))[:, 0].T for w in reversed(windows))
        )
        assert_array_equal(np.asarray(getattr(mixed, field))[:, 0].T, chosen)


@pytest.mark.parametrize("lowest", [0.01, 0.1, None])
def test_demonstrations_have_a_minimum_reward(datasets, lowest):
    env = sac.make_env(sac.SACArgs(env_id=ENV_ID, reward="sparse"))
    args = sac.SACfDArgs(
        env_id=ENV_ID, reward="sparse", dataset_id=DATASET_ID, min_demo_reward=lowest
    )
    demos, dataset_id, warning = sac.find_demonstrations(args, env)
    replay = sac.make_demo_replay(args, demos)
    rewards, success = np.asarray(replay.transitions.reward), demos.rewards == 1
    assert dataset_id == DATASET_ID and warning is None and 0 < success.sum() < len(success)
    assert_allclose(rewards[~success], lowest or 0.0)
    assert_allclose(rewards[success], 1.0)
    assert_array_equal(replay.transitions.action, demos.actions)
    assert {array.dtype for array in replay.transitions} == {jnp.dtype("float32")}


# ---------------------------------------------------------------------------------------------------- updates


def small_args(kind: type = sac.SACArgs, **changes) -> sac.Args:
    args = kind(env_id=ENV_ID, reward="env", batch_size=8, n_step=2, quiet=True)
    return dataclasses.replace(args, **changes)


def random_replay(seed: int, count: int = 64) -> sac.Replay:
    rng = np.random.default_rng(seed)
    states = rng.uniform(-1, 1, (2, count, OBS))
    steps = sac.Transition(
        *states,
        rng.uniform(-1, 1, (count, DIM)),
        rng.uniform(-1, 1, count),
        np.zeros(count),
        rng.uniform(size=count) < 0.1,
    )
    return sac.Replay(
        jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), steps), jnp.asarray(count)
    )


def make_agent(args: sac.Args, key: jax.Array) -> sac.SACState:
    agent, _ = sac.init_agent(
        sac.Actor(DIM),
        sac.TwinCritic(),
        optax.adam(args.learning_rate),
        key,
        args,
        OBS,
        reference(),
    )
    return agent


def reference() -> sac.Reference:
    return sac.Reference(np.zeros(OBS, np.float32), np.ones(OBS, np.float32), None, None, None)


def test_one_gradient_is_that_of_the_three_losses_apart(tiny):
    """Critics, actor and temperature are trained side by side: against the losses one by one."""
    args, env = small_args(reward_scale=0.3), sac.make_env(sac.SACArgs(env_id=ENV_ID, reward="env"))
    actor, critic = sac.Actor(DIM), sac.TwinCritic()
    loss_fn = sac.make_loss(actor, critic, env.action_space)

    @jax.jit
    def both(key):
        agent = make_agent(args, key)
        params = agent.params._replace(log_temperature=jnp.log(0.2))
        target = jax.tree.map(lambda x: x + 0.01, agent.target_critic)
        agent = agent._replace(params=params, target_critic=target)
        windows = sac.sample(random_replay(0), key, 8, 2)
        batch = sac.reward_windows(windows, windows.reward, 0.99)
        noise = jax.random.normal(key, (2, 8, DIM))
        next_actions, next_log_prob = sac.squash(
            *actor.apply(params.actor, batch.next_observations), noise[0]
        )
        q_next = critic.apply(target, batch.next_observations, next_actions)
        y = 0.3 * batch.returns + batch.discounts * (
            jnp.minimum(q_next[0], q_next[1]) - 0.2 * next_log_prob
        )

        def loss_of_critics(critic_params):
            one, two = critic.apply(critic_params, batch.observations, batch.actions)
            return jnp.mean((one - y) ** 2) + jnp.mean((two - y) ** 2)

        def loss_of_actor(actor_params):
            actions, log_prob = sac.squash(*actor.apply(actor_params, batch.observations), noise[1])
            one, two = critic.apply(params.critic, batch.observations, actions)
            return jnp.mean(0.2 * log_prob - jnp.minimum(one, two))

        apart = jax.grad(loss_of_critics)(params.critic), jax.grad(loss_of_actor)(params.actor)
        ours = sac.target_of(actor, critic, agent, batch, noise[0], args)
        grads = jax.grad(loss_fn, has_aux=True)(params, batch, ours, noise[1])
        return grads, apart, loss_of_critics(params.critic)

    (grads, metrics), apart, critic_loss = both(jax.random.key(0))
    for ours, theirs in zip(
        jax.tree.leaves((grads.critic, grads.actor)), jax.tree.leaves(apart), strict=True
    ):
        assert np.abs(theirs).max() > 0
        assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)
    assert_allclose(grads.log_temperature, metrics["losses/entropy"] + DIM, rtol=1e-4)
    assert_allclose(metrics["losses/critic_loss"], critic_loss, rtol=1e-5)


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_discriminator_rewards_have_their_closed_forms(balance):
    logits = np.linspace(-4, 4, 9)
    p = 1 / (1 + np.exp(logits))  # of "agent"
    expected = {0.0: -np.log(p), 0.5: logits / 2, 1.0: np.log(1 - p)}[balance]
    assert_allclose(
        sac.discriminator_reward(jnp.asarray(logits), balance), expected, rtol=1e-5, atol=1e-6
    )


def test_updates_of_gail(tiny):
    """It learns from the discriminator and not from the environment's reward; targets and temperature move as told."""
    values = {
        "discriminator_units": 8,
        "discriminator_learning_rate": 1e-3,
        "tau": 0.25,
        "learning_rate": 1e-4,
    }
    args, env = (
        small_args(sac.GAILArgs, **values),
        sac.make_env(sac.SACArgs(env_id=ENV_ID, reward="env")),
    )
    optimizer = optax.adam(args.learning_rate)
    networks = sac.Actor(DIM), sac.TwinCritic()
    update = sac.make_update(*networks, optimizer, env.action_space, reference(), args)
    start, results = jax.tree.map(np.asarray, make_agent(args, jax.random.PRNGKey(0))), []
    start = start._replace(target_critic=jax.tree.map(lambda x: x + 1.0, start.params.critic))
    for factor in (1.0, 100.0):
        steps = [data.transitions for data in (random_replay(0), random_replay(1))]
        scaled = [
            sac.Replay(s._replace(reward=factor * s.reward), jnp.asarray(len(s.reward)))
            for s in steps
        ]
        state = jax.tree.map(jnp.asarray, start)
        for _ in range(8):
            state, metrics = update(state, *scaled)
        results.append((state, metrics))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert_array_equal(one, other)

    after, metrics = results[0]
    weights = map(jax.tree.leaves, (start.discriminator.params, after.discriminator.params))
    assert min(np.abs(a - b).max() for a, b in zip(*weights)) > 0
    for target, critic, old in zip(
        *map(jax.tree.leaves, (after.target_critic, after.params.critic, start.params.critic))
    ):
        assert (
            0 < np.abs(critic - old).max() < 1e-3
        )  # so that 8 updates close the gap of 1 to 0.75^8
        assert_allclose(target - critic, 0.75**8, atol=3e-3)
    # Steps of Adam that agree have the length of the learning rate.
    assert_allclose(
        after.params.log_temperature, -8e-4 * np.sign(metrics["losses/entropy"] + DIM), rtol=0.1
    )


# --------------------------------------------------------------------------------------------------- whole runs


def saved_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file}


@pytest.mark.parametrize("method", ["sac", "gail"])
def test_interrupted_run_continues_bit_for_bit(method, tiny, monkeypatch, capsys):
    schedule = [
        "--total-timesteps",
        "130",
        "--eval-every",
        "50",
        "--checkpoint-every",
        "60",
        "--buffer-size",
        "48",
    ]
    run_script([*METHODS[method], *TINY, *schedule], monkeypatch)
    whole = only_run().rename(tiny / "whole")
    write = sac.write_rows_until

    def killed_at_100(path, step, *rest):
        write(path, step, *rest)
        if step == 100:
            raise KeyboardInterrupt

    monkeypatch.setattr(sac, "write_rows_until", killed_at_100)
    with pytest.raises(SystemExit):
        run_script([*METHODS[method], *TINY, *schedule], monkeypatch)
    monkeypatch.setattr(sac, "write_rows_until", write)
    run = only_run()
    assert 16 < json.loads(saved_arrays(run / "state.npz")["meta"].tobytes())["step"] < 100
    run_script(["--resume", str(run)], monkeypatch)
    assert (run / "evaluations.csv").read_text() == (whole / "evaluations.csv").read_text()
    assert (run / "replay.f32").read_bytes() == (whole / "replay.f32").read_bytes()
    for name in ("state.npz", "agent.npz"):
        one, other = saved_arrays(run / name), saved_arrays(whole / name)
        assert one.keys() == other.keys() and all(
            np.array_equal(one[key], other[key]) for key in one
        ), name

    header, *rows = (run / "evaluations.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["0", "50", "100", "130"]
    assert header.startswith("step,success_rate,episodic_return,episodic_length,episodes")
    assert (run / "replay.f32").stat().st_size == 130 * (2 * OBS + DIM + 3) * 4
    capsys.readouterr()
    video = ["--capture-video"] if method == "gail" else []
    run_script(["--evaluate", str(run), "--eval-episodes", "3", *video], monkeypatch)
    printed, last = capsys.readouterr().out, rows[-1].split(",")
    assert (
        f"return  {float(last[2]):.3f} +-" in printed
        and f"success {float(last[1]):.3f} (" in printed
    )
    if method == "gail":
        assert f"Wasserstein distance {float(last[5]):.3f}; human" in printed
        assert (run / "videos" / "evaluation_130.mp4").stat().st_size > 0


def test_sac_learns_the_tiny_task(tiny, monkeypatch):
    schedule = ["--total-timesteps", "1500", "--eval-every", "750", "--checkpoint-every", "500"]
    values = [
        "--learning-rate",
        "3e-3",
        "--n-step",
        "1",
        "--reward-scale",
        "1",
        "--reward",
        "env",
        "--gamma",
        "0.9",
    ]
    run_script(["sac", *TINY, *schedule, *values], monkeypatch)
    run = only_run()
    first, last = ((run / "evaluations.csv").read_text().splitlines()[i].split(",") for i in (1, 3))
    events = EventAccumulator(str(run)).Reload()
    assert [event.step for event in events.Scalars("losses/critic_loss")] == [1000]
    assert events.Scalars("charts/SPS")[0].value > 0
    assert float(last[2]) > float(first[2]) + 2 and float(last[1]) == 1.0


def test_the_desk_has_its_dense_reward_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_script(
        "sac --env-id RoboDesk-push_green --total-timesteps 16 --learning-starts 8 --eval-episodes 1 --quiet".split(),
        monkeypatch,
    )
    run = only_run()
    assert run.name.startswith("RoboDesk-push_green__sac__1__")
    assert json.loads((run / "args.json").read_text())["reward"] == "env"
    for row in (run / "evaluations.csv").read_text().splitlines()[1:]:
        _, success, episodic_return, length, _ = map(float, row.split(","))
        assert success in (0, 1) and length == 500
        assert 0 < episodic_return < 500 and episodic_return % 1  # nearness counts
    rewards = {}
    for reward in ("env", "sparse", None):
        env = sac.make_task(sac.SACArgs(env_id="RoboDesk-push_green", reward=reward))
        observation, _ = env.reset(seed=3)
        assert observation.shape == (76,)
        rewards[reward] = env.step(np.zeros(5, np.float32))[1]
    assert rewards["sparse"] == 0 < rewards["env"] == rewards[None]


def test_not_finite_loss_stops_and_keeps_the_last_good_checkpoint(tiny, monkeypatch):
    monkeypatch.setattr(sac, "soft_target", lambda *parts: parts[2] * jnp.nan)
    with pytest.raises(
        SystemExit, match="error: not finite at step 33: action; lower --learning-rate"
    ):
        run_script(
            ["sac", *TINY, "--learning-starts", "30", "--checkpoint-every", "20"], monkeypatch
        )
    assert json.loads(saved_arrays(only_run() / "state.npz")["meta"].tobytes())["step"] == 21


def test_sigterm_checkpoints_and_says_how_to_resume(datasets, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(SCRIPT), *METHODS["sacfd"], *TINY]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("runs/*/evaluations.csv")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=200)[1]
    (run,) = tmp_path.glob("runs/*")
    assert process.returncode == 128 + signal.SIGTERM
    assert (
        f"continue with: python sac_baselines.py --resume runs/{run.name}" in error
        and "Traceback" not in error
    )
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


class Unbounded(gym.Env):
    metadata = {"render_modes": []}
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))

    def __init__(self, render_mode: str | None = None):
        pass


gym.register("Unbounded-v0", entry_point=Unbounded)


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["sac", "--learning-rate", "-1"], "--learning-rate is -1.0"),
        (["sac", "--tau", "nan"], "--tau is nan"),
        (["sac", "--n-step", "0"], "--n-step is 0"),
        (["sac", "--reward-scale", "0"], "--reward-scale is 0.0"),
        (["sacfd", "--demo-ratio", "1.5"], "--demo-ratio is 1.5"),
        (["gail", "--reward-balance", "2"], "--reward-balance is 2.0"),
        (["gail", "--discriminator-input-dropout", "1"], "--discriminator-input-dropout is 1.0"),
        (["sac", "--env-id", "NoSuchEnv-v0"], "cannot make environment 'NoSuchEnv-v0'"),
        (["sac", "--env-id", "CartPole-v1"], "AQuaDem needs a Box"),
        (
            ["sac", "--env-id", "Unbounded-v0", "--reward", "env"],
            "SAC needs one with finite bounds",
        ),
        (
            ["sac", "--env-id", "RoboDesk-fly"],
            "RoboDesk has no task 'fly': choose one of open_slide",
        ),
        (["sacfd", "--env-id", "RoboDesk-stack"], "RoboDesk-stack has no default demonstrations"),
        (["sacfd", "--env-id", ENV_ID], "has no default demonstrations"),
        (
            ["gail", "--env-id", "Pendulum-v1", "--dataset-id", DATASET_ID],
            "Pendulum-v1 needs (22, 3)",
        ),
        (["sacfd", "--min-demo-reward", "nan"], "--min-demo-reward is nan"),
        (["--resume", "nowhere"], "nowhere is not a run folder"),
        (["--evaluate", "nowhere"], "nowhere is not a run folder"),
        (["--resume=nowhere"], "nowhere is not a run folder"),
    ],
)
def test_bad_input_ends_with_one_line(argv, expected, tiny, monkeypatch, capsys):
    assert expected in error_of(argv, monkeypatch, capsys)
    assert not Path("runs").exists()


def test_resume_refuses_what_would_change_the_learning(tiny, monkeypatch, capsys):
    run_script(["sac", *TINY, "--total-timesteps", "5"], monkeypatch)
    run = str(only_run())
    assert "--tau cannot be changed" in error_of(
        ["--resume", run, "--tau", "0.1"], monkeypatch, capsys
    )
    assert "is a run of sac, not of gail" in error_of(
        ["gail", "--resume", run], monkeypatch, capsys
    )
    (Path(run) / "agent.npz").write_bytes(b"half a file")
    assert "not a whole checkpoint" in error_of(["--evaluate", run], monkeypatch, capsys)
    (Path(run) / "replay.f32").write_bytes(b"")
    (Path(run) / "state.npz").write_bytes(b"PK\x03\x04 cut off")
    assert "not a whole checkpoint" in error_of(["--resume", run], monkeypatch, capsys)


@pytest.mark.parametrize(
    "method, option", [("sac", "--reward-scale"), ("sacfd", "--demo-ratio"), ("gail", "--tau")]
)
def test_help_reads_like_documentation(method, option, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_script([method, "--help"], monkeypatch)
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and option in printed and "1000000" in printed


def test_defaults_are_the_papers_bold_values():
    plain, fd, gail = sac.SACArgs(), sac.SACfDArgs(), sac.GAILArgs()
    for args in (plain, fd, gail):
        assert (args.learning_rate, args.n_step, args.batch_size, args.buffer_size) == (
            1e-4,
            5,
            256,
            1_000_000,
        )
    assert [(args.tau, args.reward_scale) for args in (plain, fd, gail)] == [
        (0.005, 0.5),
        (0.005, 0.3),
        (0.05, 0.5),
    ]
    assert (fd.demo_ratio, fd.min_demo_reward) == (0.001, 0.01)
    discriminator = (
        gail.discriminator_learning_rate,
        gail.discriminator_layers,
        gail.discriminator_units,
    )
    assert discriminator == (3e-7, 1, 256)
    assert (gail.discriminator_regularization, gail.discriminator_weight_decay) == (
        "weight-decay",
        10,
    )
    assert (
        gail.normalize_observations
        and gail.reward_balance == 0.5
        and gail.discriminator_input == "state-action"
    )
    assert sac.HIDDEN_UNITS == (256, 256)
