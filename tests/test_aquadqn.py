"""AQuaDQN's pure functions against limits, hand computation and brute force."""

import itertools
import math

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import aquadqn
from aquadqn import Args, CandidateNetwork, Replay, Transition

RNG = np.random.default_rng(0)


def random_candidates(batch: int = 7, k: int = 4, dim: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return RNG.normal(size=(batch, k, dim)).astype(np.float32), RNG.normal(
        size=(batch, dim)
    ).astype(np.float32)


# ------------------------------------------------------------------------------------------------ soft minimum


def squared_distances(candidates: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return ((candidates - actions[:, None]) ** 2).sum(-1)


def test_soft_min_is_the_minimum_for_small_temperatures():
    candidates, actions = random_candidates()
    expected = squared_distances(candidates, actions).min(1).mean()
    assert_allclose(aquadqn.soft_min_loss(candidates, actions, 1e-5), expected, rtol=1e-4)


def test_soft_min_is_the_mean_for_large_temperatures():
    candidates, actions = random_candidates()
    with jax.enable_x64(True):
        loss = aquadqn.soft_min_loss(candidates.astype(float), actions.astype(float), 1e7)
    assert_allclose(loss, squared_distances(candidates, actions).mean(), rtol=1e-4)


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 1.0, 100.0])
def test_one_candidate_is_behavioural_cloning(temperature):
    candidates, actions = random_candidates(k=1)

    def squared_error(c):
        return jnp.mean(jnp.sum((c[:, 0] - actions) ** 2, -1))

    def soft_min(c):
        return aquadqn.soft_min_loss(c, actions, temperature)

    assert_allclose(soft_min(candidates), squared_error(candidates), rtol=1e-4)
    assert_allclose(
        jax.grad(soft_min)(candidates), jax.grad(squared_error)(candidates), rtol=1e-4, atol=1e-7
    )


def test_soft_min_by_hand_and_without_underflow():
    candidates, actions = np.array([[[0.0], [2.0]]], np.float32), np.array([[0.5]], np.float32)
    temperature = 0.7
    terms = [math.exp(-0.25 / temperature), math.exp(-2.25 / temperature)]
    expected = -temperature * math.log(sum(terms) / 2)
    assert_allclose(aquadqn.soft_min_loss(candidates, actions, temperature), expected, rtol=1e-6)
    far = aquadqn.soft_min_loss(candidates + 100, actions, 1e-4)
    assert np.isfinite(far) and far > 9000


def test_nearest_candidate_against_brute_force():
    candidates, actions = random_candidates(batch=50)
    expected = [
        min(range(4), key=lambda k: np.linalg.norm(c[k] - a)) for c, a in zip(candidates, actions)
    ]
    assert_array_equal(aquadqn.nearest_candidate(candidates, actions), expected)


# ----------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("clip", [-1e3, -0.5])
def test_munchausen_target_against_a_plain_loop(clip):
    tau, alpha, batch, k = 0.03, 0.9, 6, 5
    q_s, q_next = RNG.normal(size=(2, batch, k)) * 0.1
    action, reward = RNG.integers(k, size=batch), RNG.normal(size=batch)
    discount = np.array([0.99**3] * (batch - 1) + [0.0])
    expected = []
    for i in range(batch):
        policy = [math.exp(q / tau) for q in q_s[i]]
        log_policy = math.log(policy[action[i]] / sum(policy))
        next_policy = np.exp(q_next[i] / tau) / np.exp(q_next[i] / tau).sum()
        soft_value = sum(p * (q - tau * math.log(p)) for p, q in zip(next_policy, q_next[i]))
        expected.append(reward[i] + alpha * max(tau * log_policy, clip) + discount[i] * soft_value)
    target = aquadqn.munchausen_target(q_s, q_next, action, reward, discount, tau, alpha, clip)
    assert_allclose(target, expected, rtol=1e-4, atol=1e-5)


def test_munchausen_target_without_entropy_is_dqn():
    q_s, q_next = RNG.normal(size=(2, 6, 5)).astype(np.float32)
    action, reward, discount = np.zeros(6, int), np.ones(6, np.float32), np.full(6, 0.9, np.float32)
    munchausen = aquadqn.munchausen_target(q_s, q_next, action, reward, discount, 1e-6, 0.0, -1e3)
    assert_allclose(munchausen, aquadqn.dqn_target(q_next, q_next, reward, discount), rtol=1e-4)


def test_double_dqn_values_the_choice_of_the_online_network():
    online, target = np.array([[1.0, 5.0]]), np.array([[10.0, 2.0]])
    one, half = np.ones(1), np.full(1, 0.5)
    assert_allclose(aquadqn.dqn_target(online, target, one, half), [1 + 0.5 * 2])
    assert_allclose(aquadqn.dqn_target(target, target, one, half), [1 + 0.5 * 10])


def n_step_by_loop(rewards, terminations, ends, gamma):
    total = 0.0
    for k, reward in enumerate(rewards):
        total += gamma**k * reward
        if ends[k] or k == len(rewards) - 1:
            return total, k, 0.0 if terminations[k] else gamma ** (k + 1)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_n_step_returns_against_a_loop_over_every_pattern_of_ends(n):
    gamma = 0.9
    patterns = list(
        itertools.product([(0, 0), (0, 1), (1, 1)], repeat=n)
    )  # running, truncated, terminated
    flags = np.array(patterns, np.float32)  # (P, n, 2)
    rewards = RNG.normal(size=(len(patterns), n)).astype(np.float32)
    got = aquadqn.n_step_returns(rewards, flags[..., 0], flags[..., 1], gamma)
    expected = [n_step_by_loop(r, f[:, 0], f[:, 1], gamma) for r, f in zip(rewards, flags)]
    for array, column in zip(got, zip(*expected)):
        assert_allclose(array, column, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ replay


def numbered_steps(first: int, last: int, episode: int = 4, terminate: bool = False) -> Transition:
    """Step t has observation t, next observation t + 0.5, index t % 10, reward t; every `episode`-th step ends one."""
    steps = np.arange(first, last)
    ends = steps % episode == episode - 1
    transitions = Transition(
        steps[:, None], steps[:, None] + 0.5, steps % 10, steps, ends & terminate, ends
    )
    return aquadqn.as_stored(transitions)


def eight_steps(**changes) -> Replay:
    transitions = numbered_steps(0, 8)._replace(**changes)
    return Replay(jax.tree.map(jnp.asarray, transitions), jnp.asarray(8))


@pytest.mark.parametrize("terminate", [False, True])
@pytest.mark.parametrize("total", [5, 16, 22, 40])
def test_samples_are_n_step_transitions_of_what_is_still_stored(total, terminate):
    capacity, n, gamma = 16, 3, 0.9
    replay = aquadqn.make_replay(capacity, 1)
    store = jax.jit(aquadqn.store)
    for t in range(total):
        replay = store(replay, numbered_steps(t, t + 1, terminate=terminate))
    sample = jax.jit(aquadqn.sample, static_argnums=(2, 3, 4))
    batch = jax.device_get(sample(replay, jax.random.PRNGKey(0), 2000, n, gamma))
    firsts = batch.observations[:, 0].astype(int)
    assert set(firsts) == set(range(max(0, total - capacity), total))
    for i, first in enumerate(firsts):
        last = next(
            t for t in range(first, total) if t % 4 == 3 or t == first + n - 1 or t == total - 1
        )
        assert batch.indices[i] == first % 10
        assert_allclose(
            batch.returns[i],
            sum(gamma**k * (first + k) for k in range(last - first + 1)),
            rtol=1e-5,
        )
        assert_allclose(batch.next_observations[i, 0], last + 0.5)
        ended_the_task = terminate and last % 4 == 3
        assert_allclose(
            batch.discounts[i], 0 if ended_the_task else gamma ** (last - first + 1), rtol=1e-5
        )


def test_storing_a_block_that_wraps_around_equals_storing_row_by_row():
    one = many = aquadqn.make_replay(10, 1)
    store = jax.jit(aquadqn.store)
    for start in range(0, 24, 8):
        many = store(many, numbered_steps(start, start + 8))
    for t in range(24):
        one = store(one, numbered_steps(t, t + 1))
    for ours, theirs in zip(one.transitions, many.transitions):
        assert_array_equal(ours, theirs)
    assert one.count == many.count == 24


def new_agent(params, optimizer) -> aquadqn.AgentState:
    average, target = (jax.tree.map(jnp.copy, params) for _ in range(2))
    return aquadqn.AgentState(
        params, average, target, optimizer.init(params), jnp.asarray(0), jax.random.PRNGKey(0)
    )


def test_a_transition_survives_its_way_to_the_disk_and_back():
    steps = numbered_steps(5, 9, terminate=True)
    rows = np.stack([aquadqn.pack(Transition(*step)) for step in zip(*steps)])
    assert rows.dtype == np.float32 and rows.shape == (4, 6)
    for ours, theirs in zip(
        aquadqn.unpack(rows, aquadqn.make_replay(10, 1).transitions), steps, strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert_array_equal(ours, theirs)


class Linear:
    """A stand-in for a Q-network: its parameters are a matrix."""

    apply = staticmethod(lambda matrix, x: x @ matrix)


@pytest.mark.parametrize("q_loss", ["munchausen", "dqn", "double"])
def test_the_target_network_values_a_batch(q_loss):
    args = Args(q_loss=q_loss, munchausen_tau=0.5, munchausen_alpha=0.7)
    online, target = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    observations, following = RNG.normal(size=(2, 6, 3)).astype(np.float32)
    returns, discounts = RNG.random((2, 6)).astype(np.float32)
    actions = np.arange(6) % 4
    agent = aquadqn.AgentState(online, None, target, None, jnp.asarray(0), None)
    batch = aquadqn.Batch(observations, actions, returns, following, discounts)
    if q_loss == "munchausen":
        q_s, q_next = observations @ target, following @ target
        step = (actions, returns, discounts, 0.5, 0.7, args.munchausen_clip)
        expected = aquadqn.munchausen_target(q_s, q_next, *step)
    else:
        choice = (following @ (target if q_loss == "dqn" else online)).argmax(1)
        expected = returns + discounts * (following @ target)[np.arange(6), choice]
    assert_allclose(aquadqn.target_of(Linear, agent, batch, args), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_batches_come_from_the_demonstrations_with_the_given_probability(ratio):
    """Replay rewards are 0, demonstration rewards 1: where a network of zeros learns, the batch had demonstrations."""
    args = Args(demo_ratio=ratio, batch_size=4, n_step=1, q_loss="dqn", gamma=0.0)
    replay = eight_steps(reward=np.zeros(8, np.float32))
    demos = eight_steps(reward=np.ones(8, np.float32))

    class Zero:
        apply = staticmethod(lambda params, x: jnp.zeros((len(x), 10)) + 0.0 * params)

    optimizer = optax.sgd(0.0)
    params = jnp.zeros(())
    state = new_agent(params, optimizer)
    update, losses = aquadqn.make_update(Zero, optimizer, args), []
    for _ in range(60):
        state, metrics = update(state, replay, demos)
        losses.append(float(metrics["losses/q_loss"]) / 0.5)  # Huber loss of an error of 1
    assert_allclose(np.mean(losses), ratio, atol=0.08)


def test_the_target_network_is_copied_every_period():
    args = Args(target_update_period=5, batch_size=4, learning_rate=0.1)
    network, optimizer = aquadqn.QNetwork(10), optax.sgd(0.1)
    params = network.init(jax.random.PRNGKey(0), jnp.zeros(1))
    state = new_agent(params, optimizer)
    replay = eight_steps()
    state, _ = aquadqn.make_update(network, optimizer, args)(state, replay, replay)
    assert state.updates == aquadqn.STEPS_PER_CALL == 8  # the last copy was made after update 5
    online, target = (p["params"]["Dense_3"]["bias"] for p in (state.params, state.target_params))
    initial = network.init(jax.random.PRNGKey(0), jnp.zeros(1))["params"]["Dense_3"]["bias"]
    assert np.abs(online - target).max() > 0 and np.abs(target - initial).max() > 0


# ---------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 5)])
def test_the_product_has_the_gradients_of_a_plain_one(shape):
    x, kernel, weights = (
        RNG.normal(size=size).astype(np.float32) for size in (shape, (5, 4), (*shape[:-1], 4))
    )

    def gradients(product):
        return jax.grad(lambda *inputs: jnp.sum(product(*inputs) * weights), argnums=(0, 1))(
            x, kernel
        )

    assert_allclose(aquadqn.product(x, kernel), x @ kernel, rtol=1e-5, atol=1e-6)
    for ours, plain in zip(gradients(aquadqn.product), gradients(jnp.matmul)):
        assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_candidate_network_is_one_mlp_per_head_on_a_shared_torso():
    network = CandidateNetwork(3, 2, torso=(8, 6), head=(5, 4))
    observations = RNG.normal(size=(7, 9)).astype(np.float32)
    params = network.init(jax.random.PRNGKey(0), observations)
    p = jax.tree.map(np.asarray, params["params"])
    x = observations
    for layer in ("Dense_0", "Dense_1"):
        x = np.maximum(x @ p[layer]["kernel"] + p[layer]["bias"], 0)
    for k in range(3):
        z = np.maximum(x @ p["head_0_kernel"][:, k] + p["head_0_bias"][k], 0)
        z = np.maximum(z @ p["head_1_kernel"][k] + p["head_1_bias"][k], 0)
        z = z @ p["head_2_kernel"][k] + p["head_2_bias"][k]
        assert_allclose(network.apply(params, observations)[:, k], z, rtol=1e-4, atol=1e-5)


def test_every_head_starts_with_the_spread_of_a_layer_of_its_own():
    params = CandidateNetwork(30, 4).init(jax.random.PRNGKey(0), jnp.zeros(5))["params"]
    xavier = math.sqrt(6 / (256 + 256))
    assert_allclose(np.abs(params["head_0_kernel"]).max(), xavier, rtol=1e-3)
    assert_allclose(np.abs(params["head_1_kernel"]).max(), math.sqrt(6 / (256 + 4)), rtol=1e-3)


def test_dropout_only_in_training_and_with_the_right_scale():
    network = CandidateNetwork(2, 3, input_dropout=0.5, hidden_dropout=0.5)
    observations = np.ones((4, 6), np.float32)
    params = network.init(jax.random.PRNGKey(0), observations)
    assert_array_equal(network.apply(params, observations), network.apply(params, observations))
    first, second = (
        network.apply(params, observations, train=True, rngs={"dropout": jax.random.PRNGKey(i)})
        for i in range(2)
    )
    assert np.abs(first - second).max() > 0


def test_leading_dimensions_pass_through():
    network = CandidateNetwork(4, 3)
    params = network.init(jax.random.PRNGKey(0), jnp.zeros(5))
    observations = RNG.normal(size=(2, 6, 5)).astype(np.float32)
    assert network.apply(params, observations).shape == (2, 6, 4, 3)
    assert_allclose(
        network.apply(params, observations[1, 2]),
        network.apply(params, observations)[1, 2],
        atol=1e-5,
    )


def test_q_network_has_the_papers_layers():
    params = aquadqn.QNetwork(10).init(jax.random.PRNGKey(0), jnp.zeros(39))["params"]
    assert [params[f"Dense_{i}"]["kernel"].shape for i in range(4)] == [
        (39, 512),
        (512, 512),
        (512, 256),
        (256, 10),
    ]
    assert params["LayerNorm_0"]["scale"].shape == (512,)


def test_elu_equals_flax():
    x = np.linspace(-20, 20, 1000, dtype=np.float32)  # without 0 itself
    assert_allclose(aquadqn.elu(x), jax.nn.elu(x), atol=1e-6)
    assert_allclose(
        jax.vmap(jax.grad(aquadqn.elu))(x), jax.vmap(jax.grad(jax.nn.elu))(x), atol=1e-6
    )


def test_candidate_training_finds_both_modes_of_two_mode_data():
    """Actions +1 or -1 in every state: the mean is 0, but two candidates have to find the two modes."""
    args = Args(num_actions=2, temperature=0.01, temperature_start=0.01, batch_size=64)
    observations = RNG.normal(size=(256, 3)).astype(np.float32)
    actions = np.where(RNG.random((256, 1)) < 0.5, 1.0, -1.0).astype(np.float32)
    network, optimizer = CandidateNetwork(2, 1), optax.adam(1e-3)
    params = network.init(jax.random.PRNGKey(0), observations)
    state = aquadqn.CandidateState(
        params, optimizer.init(params), jnp.asarray(0), jax.random.PRNGKey(1)
    )
    state, _ = aquadqn.make_candidate_update(network, optimizer, args)(
        state, observations, actions, 400
    )
    candidates = np.sort(np.asarray(network.apply(state.params, observations))[..., 0], axis=1)
    assert_allclose(candidates.mean(0), [-1, 1], atol=0.05)


# --------------------------------------------------------------------------------------- annealing and averaging


def test_the_temperature_falls_geometrically_in_the_first_half_and_then_stays():
    args = Args(temperature_start=1.0, temperature=0.01, candidate_steps=1000)
    steps = (0, 250, 500, 501, 999)
    at = [float(aquadqn.annealed_temperature(args, jnp.asarray(step))) for step in steps]
    assert_allclose(at, [1.0, 0.1, 0.01, 0.01, 0.01], rtol=1e-5)
    paper = Args(temperature_start=0.01, temperature=0.01, candidate_steps=1000)
    temperature = aquadqn.annealed_temperature(paper, jnp.asarray(3))
    assert temperature == 0.01 and isinstance(temperature, float)  # a constant, not an array


def test_the_temperature_starts_at_a_quarter_of_the_actions_variance_unless_told():
    actions = np.array([[0.0, 1.0], [2.0, 5.0]], np.float32)  # variances 1 and 4
    assert_allclose(aquadqn.start_temperature(Args(), actions), 0.25 * 5)
    assert aquadqn.start_temperature(Args(temperature_start=0.3), actions) == 0.3
    assert aquadqn.start_temperature(Args(temperature=7.0), actions) == 7.0  # never below its end


def train_two_candidates(**changes) -> np.ndarray:
    """Two candidates on actions of -1 and 1; the second begins so far away that the first is always the nearer one."""
    args = Args(num_actions=2, temperature=0.001, batch_size=64, candidate_steps=600, **changes)
    observations = np.random.default_rng(0).normal(size=(256, 3)).astype(np.float32)
    actions = np.where(np.arange(256)[:, None] % 2, 1.0, -1.0).astype(np.float32)
    network, optimizer = CandidateNetwork(2, 1), optax.adam(1e-2)
    params = network.init(jax.random.PRNGKey(0), observations)
    params["params"]["head_1_bias"] = jnp.array([[0.0], [4.0]])
    state = aquadqn.CandidateState(
        params, optimizer.init(params), jnp.asarray(0), jax.random.PRNGKey(1)
    )
    state, _ = aquadqn.make_candidate_update(network, optimizer, args)(
        state, observations, actions, 600
    )
    return np.asarray(network.apply(state.params, observations))[..., 0].mean(0)


def test_annealing_revives_a_candidate_that_a_constant_temperature_leaves_dead():
    constant, annealed = (
        train_two_candidates(temperature_start=0.001),
        train_two_candidates(temperature_start=10.0),
    )
    assert (
        constant[1] > 2 and abs(constant[0]) < 0.3
    )  # the first clones the mean, the second never moves
    assert_allclose(np.sort(annealed), [-1, 1], atol=0.1)


def test_held_out_episodes_are_the_last_ones():
    ends = np.array([0, 1, 0, 0, 1, 1], bool)
    demos = aquadqn.Demonstrations(*[np.zeros((6, 1))] * 5, ends)
    assert [aquadqn.steps_to_learn_from(Args(held_out_episodes=n), demos) for n in (0, 1, 2)] == [
        6,
        5,
        2,
    ]
    with pytest.raises(aquadqn.UserError, match="--held-out-episodes"):
        aquadqn.steps_to_learn_from(Args(held_out_episodes=3), demos)


def updates_of_one_step(ema_decay: float, number: int, monkeypatch) -> list:
    """The agent after each of some updates that are done one by one."""
    monkeypatch.setattr(aquadqn, "STEPS_PER_CALL", 1)
    network, optimizer = aquadqn.QNetwork(10), optax.sgd(0.1)
    replay = eight_steps()
    update = aquadqn.make_update(network, optimizer, Args(batch_size=4, ema_decay=ema_decay))
    agent = new_agent(network.init(jax.random.PRNGKey(0), jnp.zeros(1)), optimizer)
    agents = []
    for _ in range(number):
        agent, _ = update(agent, replay, replay)
        agents.append(jax.tree.map(np.array, agent))
    return agents


def last_bias(params) -> np.ndarray:
    return params["params"]["Dense_3"]["bias"]


def test_the_average_against_a_hand_computation(monkeypatch):
    agents = updates_of_one_step(0.9, 3, monkeypatch)
    expected = np.zeros(10)  # the initial bias
    for agent in agents:
        expected = 0.9 * expected + 0.1 * last_bias(agent.params)
        assert_allclose(last_bias(agent.average_params), expected, rtol=1e-5, atol=1e-9)
    assert np.abs(expected).max() > 0


def test_without_a_decay_the_average_is_the_network_itself_and_averaging_changes_no_learning(
    monkeypatch,
):
    (still,) = updates_of_one_step(0.0, 1, monkeypatch)
    jax.tree.map(assert_array_equal, still.average_params, still.params)
    (moving,) = updates_of_one_step(0.5, 1, monkeypatch)
    jax.tree.map(assert_array_equal, moving.params, still.params)


# ------------------------------------------------------------------------------------------- policy, evaluation


class Table:
    """A stand-in for a network: ignores its parameters and returns fixed numbers."""

    def __init__(self, values):
        self.values, self.num_actions = jnp.asarray(values, jnp.float32), len(values)

    def apply(self, _, observations):
        return jnp.broadcast_to(self.values, (*observations.shape[:-1], *self.values.shape))


def test_policy_is_greedy_clipped_and_explores_with_probability_epsilon():
    box = gym.spaces.Box(-1, 1, (2,), np.float32)
    candidates = Table([[0.1, 0.2], [0.5, 3.0], [-0.3, -0.4]])
    policy = aquadqn.make_policy(Table([0.0, 2.0, 1.0]), candidates, box)
    observations = jnp.zeros((20000, 4))
    actions, indices, key = policy(None, None, observations, jax.random.PRNGKey(0), epsilon=0.0)
    assert_allclose(actions, np.tile([0.5, 1.0], (20000, 1)))
    assert_array_equal(indices, np.ones(20000))
    action, index, _ = policy(None, None, observations[0], jax.random.PRNGKey(0), epsilon=0.0)
    assert_allclose(action, [0.5, 1.0])
    assert index == 1
    _, indices, _ = policy(None, None, observations, key, epsilon=0.3)
    shares = np.bincount(indices, minlength=3) / 20000
    assert_allclose(shares, [0.1, 0.8, 0.1], atol=0.015)


def straight_to_the_goal(observations: np.ndarray) -> np.ndarray:
    return np.clip(observations[:, 2:] / 0.3, -1, 1).astype(np.float32)


def test_evaluation_counts_success_at_any_step_and_is_the_same_every_time():
    envs = [aquadqn.make_env(Args(env_id="tiny_env:Reach-v0", reward="sparse")) for _ in range(5)]
    result = aquadqn.evaluate(straight_to_the_goal, envs)
    assert_array_equal(result.successes, np.ones(5))
    assert_array_equal(result.lengths, np.full(5, 21))
    assert (result.returns > 10).all() and (result.returns < 21).all()  # 1 per step at the goal
    assert_array_equal(aquadqn.evaluate(straight_to_the_goal, envs).returns, result.returns)
    away = aquadqn.evaluate(lambda x: -straight_to_the_goal(x), envs)
    assert_array_equal(away.successes, np.zeros(5))
    assert (away.lengths < 21).all()  # terminated at the border
    fewer = aquadqn.evaluate(straight_to_the_goal, envs[:2])
    assert_array_equal(fewer.returns, result.returns[:2])


def test_wilson_interval_by_hand():
    low, high = aquadqn.wilson_interval(np.array([1.0] * 8 + [0.0] * 2))
    assert_allclose([low, high], [0.490, 0.943], atol=1e-3)  # Wilson's interval for 8 of 10
    assert aquadqn.wilson_interval(np.ones(30))[1] == pytest.approx(1.0)
