# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.4.0", "tyro", "tqdm", "matplotlib", "pillow",
# ]
# ///
"""The toy world that shows why candidates beat cloning (section 3.2 of the AQuaDem paper, "Visualization").

A demonstrator walks through a square world, sometimes right, sometimes up. Behavioural cloning learns the average, a
direction that was never demonstrated; AQuaDem's candidates learn both. Trains everything and leaves the figures, an
animation and a comparison of rollouts in docs/gridworld.

    python gridworld.py
    python gridworld.py --k 5 --temperature 0.05 --out five_candidates
    python gridworld.py --num-demos 20 --seed 3 --steps 5000 --out few_demonstrations

Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin:
"Continuous Control with Action Quantization from Demonstrations", ICML 2022.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm

# The paper draws its world but gives no numbers: these are ours. Positions lie in the unit square.
STEP_LENGTH = 0.1
START, START_SPREAD = np.array([0.05, 0.05]), 0.05  # the bottom-left cell, anywhere in it
GOAL, GOAL_RADIUS = np.array([1.0, 1.0]), 0.05
CROSSROADS = 0.5  # the bottom-left region: both coordinates are below this
MAX_STEPS = 100  # then an episode is truncated

TEMPERATURES = (0.001, 0.01, 0.1, 10.0)  # of figure 3; 10 is large: squared distances of directions are at most 4
BLOCK = 100  # gradient steps in one call, between two pictures of the animation
EVALUATION_SEED = 2**31  # rollouts start where no demonstration did; --seed stays below it
ROLLOUTS = 100
GRID = np.stack(np.meshgrid(np.linspace(0, 1, 11), np.linspace(0, 1, 11)), axis=-1).reshape(-1, 2).astype(np.float32)

# Paul Tol's high-contrast blue, red and yellow stay apart for the colour-blind and in grey print; then his bright ones.
HEAD_COLOURS = ("#004488", "#BB5566", "#DDAA33", "#66CCEE", "#228833", "#AA3377")
PATH_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#222222", "#EE7733")


@dataclasses.dataclass
class Args:
    k: int = 2
    """K, candidate actions per state where figures compare temperatures (the others always show K = 1, 2 and 3 too)"""
    temperature: float = 0.01
    """T of the soft minimum where figures compare different K"""
    temperature_start: float = 1.0
    """T at the first step in the figure that compares annealing with a constant T; the others have a constant one"""
    num_demos: int = 500
    """demonstrations (not in the paper)"""
    seed: int = 1
    """seed of demonstrations, networks and batches; equal seeds give bit-identical results on a CPU"""
    candidate_steps: int = 20_000
    """gradient steps of every network"""
    batch_size: int = 16
    """batch of every network (not in the paper)"""
    candidate_learning_rate: float = 3e-4
    """Adam's learning rate"""
    hidden_dropout: float = 0.1
    """dropout after every hidden layer while training; never on the position, which has two numbers only"""
    out: str = "docs/gridworld"
    """folder of the figures"""
    quiet: bool = False
    """no progress bar and no table, only errors"""


class UserError(Exception):
    """One line that says what is wrong and what to do; the program ends with exit code 2."""


def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)


def check_grid_args(args: Args) -> None:
    bounds = {"k": (1, 100), "hidden_dropout": (0, 0.99), "seed": (0, EVALUATION_SEED - 1)}
    bounds |= dict.fromkeys(["num_demos", "batch_size", "candidate_steps"], (1, 10**6))
    bounds |= dict.fromkeys(["temperature", "temperature_start", "candidate_learning_rate"], (1e-9, 1e9))
    for name, (low, high) in bounds.items():
        value = getattr(args, name)
        require(low <= value <= high, f"--{name.replace('_', '-')} is {value}: give a number from {low} to {high}")


# ------------------------------------------------------------------------------------------------ environment


def move(position: np.ndarray, action: np.ndarray) -> np.ndarray:
    """A step of fixed length in the action's direction, inside the walls. (2,), (..., 2) -> (..., 2)."""
    length = np.linalg.norm(action, axis=-1, keepdims=True)
    return np.clip(position + STEP_LENGTH * action / np.maximum(length, 1e-8), 0.0, 1.0)


class GridWorld(gym.Env):
    """From the bottom-left corner to the top-right one: the observation is the position, the action a direction."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None):
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._path = [START + self.np_random.uniform(-START_SPREAD, START_SPREAD, 2)]
        return self._path[-1].astype(np.float32), {"success": False}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._path.append(move(self._path[-1], np.asarray(action, float)))
        success = bool(np.linalg.norm(self._path[-1] - GOAL) <= GOAL_RADIUS)
        truncated = not success and len(self._path) > MAX_STEPS
        return self._path[-1].astype(np.float32), float(success), success, truncated, {"success": success}

    def render(self) -> np.ndarray | None:
        if self.render_mode != "rgb_array":
            return None
        figure, (axis,) = new_figure(1, 1, f"step {len(self._path) - 1}")
        draw_world(axis)
        axis.plot(*np.transpose(self._path), "o-", color=HEAD_COLOURS[0], ms=3, lw=1.2)
        axis.plot(*self._path[-1], "o", color=HEAD_COLOURS[1], ms=9)
        return to_pixels(figure)


# --------------------------------------------------------------------------------------------- demonstrations


class Episode(NamedTuple):
    states: np.ndarray  # (T + 1, 2)
    actions: np.ndarray  # (T, 2)
    heads: np.ndarray  # (T,) which candidate was taken
    success: bool


def demonstrated_directions(position: np.ndarray) -> np.ndarray:
    """The unit vectors the demonstrator chooses from, with equal chances: (options, 2)."""
    if position[0] >= 1.0:
        return np.array([[0.0, 1.0]])  # up along the right edge
    if position[1] >= 1.0:
        return np.array([[1.0, 0.0]])  # right along the top edge
    if (position < CROSSROADS).all():
        return np.array([[1.0, 0.0], [0.0, 1.0]])
    return np.array([[1.0, 1.0]]) / math.sqrt(2.0)


def demonstrator(position: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    return rng.choice(demonstrated_directions(position)), 0


def run_episodes(policy: Callable, episodes: int, seed: int) -> list[Episode]:
    """Episode i depends on (seed, i) only: any number can be had, and every policy starts from the same states."""
    env, results = GridWorld(), []
    for i in range(episodes):
        rng = np.random.default_rng([seed, i])
        observation, info = env.reset(seed=int(rng.integers(2**31)))
        taken, ended = [], False
        while not ended:
            action, head = policy(observation, rng)
            taken.append((observation, action, head))
            observation, _, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
        states, actions, heads = map(np.array, zip(*taken))
        results.append(Episode(np.vstack([states, observation]), actions.astype(np.float32), heads, info["success"]))
    return results


def state_action_pairs(episodes: list[Episode]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([e.states[:-1] for e in episodes]), np.concatenate([e.actions for e in episodes])


# --------------------------------------------------------------------------------------------------- networks


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel. JAX's own gradient of the kernel can come out transposed, and Adam then reads it across the memory:
    with this one a step of the candidates takes a sixth less time on a CPU."""
    return x @ kernel


def product_gradients(inputs: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = inputs
    return gradient @ kernel.T, x.reshape(-1, x.shape[-1]).T @ gradient.reshape(-1, gradient.shape[-1])


product.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), product_gradients)


def dense(width: int, init: Callable) -> nn.Dense:
    return nn.Dense(width, kernel_init=init, dot_general=lambda x, kernel, *_, **__: product(x, kernel))


class CandidateNetwork(nn.Module):
    """Psi of equation 1: (..., obs) -> (..., K, action_dim). A shared torso, then one small MLP per candidate."""

    num_actions: int
    action_dim: int
    torso: Sequence[int] = (256,)
    head: Sequence[int] = (256,)
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0

    @nn.compact
    def __call__(self, observations: jax.Array, train: bool = False) -> jax.Array:
        batch_dims = tuple(range(observations.ndim - 1))

        def dropout(rate: float, x: jax.Array) -> jax.Array:
            # One mask for the whole batch, as in the authors' code: same expected loss, hardly any random numbers.
            return nn.Dropout(rate, broadcast_dims=batch_dims, deterministic=not train)(x)

        x = dropout(self.input_dropout, observations)
        for width in self.torso:
            x = nn.relu(dense(width, nn.initializers.xavier_uniform())(x))
            x = dropout(self.hidden_dropout, x)
        for layer, width in enumerate([*self.head, self.action_dim]):
            # The first layer of all heads reads the same x, so it is one plain matmul; the others are batched over k.
            first, fan_in, heads = layer == 0, x.shape[-1], self.num_actions
            xavier = nn.initializers.variance_scaling(
                1.0, "fan_avg", "uniform", in_axis=0 if first else 1, out_axis=2, batch_axis=1 if first else 0
            )
            shape = (fan_in, heads, width) if first else (heads, fan_in, width)
            kernel = self.param(f"head_{layer}_kernel", xavier, shape)
            bias = self.param(f"head_{layer}_bias", nn.initializers.zeros, (heads, width))
            if first:
                x = product(x, kernel.reshape(fan_in, -1)).reshape(*x.shape[:-1], heads, width) + bias
            else:
                x = jnp.einsum("...ki,kio->...ko", x, kernel) + bias
            if layer < len(self.head):
                x = dropout(self.hidden_dropout, nn.relu(x))
        return x


# ----------------------------------------------------------------------------------------------------- losses


def soft_min_loss(candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """Equation 1 in the form f_T of appendix B. candidates (B, K, D), actions (B, D)."""
    distances = jnp.sum((candidates - actions[:, None, :]) ** 2, axis=-1)  # (B, K)
    log_mean = jax.nn.logsumexp(-distances / temperature, axis=-1) - jnp.log(candidates.shape[1])
    return jnp.mean(-temperature * log_mean)


def nearest_candidate(candidates: jax.Array, actions: jax.Array) -> jax.Array:
    """Index of the candidate with the smallest Euclidean distance. (..., K, D), (..., D) -> (...)."""
    return jnp.argmin(jnp.sum((candidates - actions[..., None, :]) ** 2, axis=-1), axis=-1)


# ---------------------------------------------------------------------------------------------------- updates


class CandidateState(NamedTuple):
    params: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


def annealed_temperature(step: jax.Array, start: float, end: float, steps: int) -> jax.Array | float:
    """T falls geometrically from start to end over the first half of the steps, then stays (not in the paper).

    With a constant small T, a candidate that is never the nearest one gets no gradient and stays as it was initialised.
    """
    if start == end:
        return end
    return start * (end / start) ** jnp.minimum(step / (0.5 * steps), 1.0)


def make_candidate_update(network: nn.Module, optimizer: optax.GradientTransformation, args: Args) -> Callable:
    """`steps` gradient steps on equation 1 in one call; returns the mean loss."""

    def loss_fn(params: Any, observations: jax.Array, actions: jax.Array, step: jax.Array, key: jax.Array) -> jax.Array:
        candidates = network.apply(params, observations, train=True, rngs={"dropout": key})
        temperature = annealed_temperature(step, args.temperature_start, args.temperature, args.candidate_steps)
        return soft_min_loss(candidates, actions, temperature)

    def update(state: CandidateState, observations: jax.Array, actions: jax.Array, steps: int):
        def step(state: CandidateState, _: None) -> tuple[CandidateState, jax.Array]:
            key, batch_key, dropout_key = jax.random.split(state.key, 3)
            batch = jax.random.randint(batch_key, (args.batch_size,), 0, len(observations))
            pairs = observations[batch], actions[batch]
            loss, grads = jax.value_and_grad(loss_fn)(state.params, *pairs, state.step, dropout_key)
            updates, opt_state = optimizer.update(grads, state.opt_state)
            return CandidateState(optax.apply_updates(state.params, updates), opt_state, state.step + 1, key), loss

        state, losses = jax.lax.scan(step, state, None, length=steps)
        return state, jnp.mean(losses)

    return jax.jit(update, static_argnums=3, donate_argnums=0)


class Fit(NamedTuple):
    """A trained network, and how it came about."""

    name: str
    k: int
    candidates: Callable  # (..., 2) -> (..., K, 2)
    steps: np.ndarray  # (blocks + 1,) gradient steps done
    losses: np.ndarray  # (blocks + 1,) mean over the block before, so the first is NaN
    fields: np.ndarray  # (blocks + 1, len(GRID), K, 2) candidates everywhere after so many steps


def training(args: Args, k: int, observations: jax.Array, actions: jax.Array) -> Iterator[tuple]:
    """Yields steps done, loss, candidates on the grid and the network so far: at the start and after every block."""
    network = CandidateNetwork(k, 2, hidden_dropout=args.hidden_dropout)
    optimizer = optax.adam(args.candidate_learning_rate)
    apply, update = jax.jit(network.apply), make_candidate_update(network, optimizer, args)
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    params = network.init(init_key, observations[:1])
    state, done, loss = CandidateState(params, optimizer.init(params), jnp.zeros((), jnp.int32), key), 0, math.nan
    while True:  # an update takes over the parameters, so only the last network yielded can be used
        yield done, float(loss), np.asarray(apply(state.params, GRID)), partial(apply, state.params)
        block = min(BLOCK, args.candidate_steps - done)
        state, loss = update(state, observations, actions, block)
        done += block


def head_order(field: np.ndarray) -> list[int]:
    """The head most to the right, then the one most to the left, then those between: colours compare across figures."""
    x, y = field.mean(axis=0).T
    first, *rest = np.argsort((np.degrees(np.arctan2(y, x)) + 135) % 360)  # cut opposite to the diagonal
    return [first, *rest[-1:], *rest[:-1]]


def finish_fit(k: int, temperature: float, blocks: Sequence[tuple]) -> Fit:
    steps, losses, fields, networks = zip(*blocks)
    name, order = f"K={k}, T={temperature:g}" if k > 1 else "BC (K=1)", head_order(fields[-1])

    def candidates(positions: np.ndarray) -> np.ndarray:
        return np.asarray(networks[-1](positions))[..., order, :]

    return Fit(name, k, candidates, np.array(steps), np.array(losses), np.stack(fields)[:, :, order])


def fit_networks(args: Args, settings: Sequence[tuple[int, float]], demos: list[Episode]) -> dict[tuple, Fit]:
    """One network per (K, T), two at a time: a step is too small to keep more than one core busy."""
    arrays = tuple(map(jnp.asarray, state_action_pairs(demos)))
    trainings = [training(dataclasses.replace(args, temperature=t), k, *arrays) for k, t in settings]
    progress = tqdm(desc=f"{len(settings)} networks", total=args.candidate_steps, unit="step", disable=args.quiet)
    with ThreadPoolExecutor(max_workers=2) as pool, progress:
        history = [list(pool.map(next, trainings))]
        for done in range(0, args.candidate_steps, BLOCK):
            history.append(list(pool.map(next, trainings)))
            finite = all(math.isfinite(loss) for _, loss, *_ in history[-1])
            require(finite, f"the loss is not finite after step {done}: lower --candidate-learning-rate")
            progress.update(min(BLOCK, args.candidate_steps - done))
    return {setting: finish_fit(*setting, blocks) for setting, blocks in zip(settings, zip(*history))}


# ------------------------------------------------------------------------------------------------- evaluation


def angle_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Degrees, from 0 to 180. (..., 2), (..., 2) -> (...)."""
    difference = np.arctan2(a[..., 1], a[..., 0]) - np.arctan2(b[..., 1], b[..., 0])
    return np.abs((np.degrees(difference) + 180) % 360 - 180)


def candidate_errors(fit: Fit, demos: list[Episode]) -> tuple[float, float]:
    """Mean distance of the demonstrated action to its nearest and to its farthest candidate."""
    states, actions = state_action_pairs(demos)
    candidates = fit.candidates(states)
    nearest = candidates[np.arange(len(actions)), nearest_candidate(candidates, actions)]
    farthest = np.linalg.norm(candidates - actions[:, None], axis=-1).max(axis=1)
    return float(np.linalg.norm(nearest - actions, axis=-1).mean()), float(farthest.mean())


def towards_goal(fit: Fit) -> Callable:
    """The policy that takes the candidate whose step ends nearest to the goal; with K=1 that is plain cloning."""

    def policy(position: np.ndarray, _: np.random.Generator) -> tuple[np.ndarray, int]:
        candidates = fit.candidates(position)
        head = int(np.argmin(np.linalg.norm(move(position, candidates) - GOAL, axis=-1)))
        return candidates[head], head

    return policy


class Rollouts(NamedTuple):
    name: str
    k: int
    episodes: list[Episode]
    measures: dict[str, float]


def roll_out(name: str, k: int, policy: Callable, demos: list[Episode]) -> Rollouts:
    """What a policy does from the start, and how far that is from the demonstrations."""
    episodes = run_episodes(policy, ROLLOUTS, EVALUATION_SEED)
    (visited, actions), (demonstrated, _) = state_action_pairs(episodes), state_action_pairs(demos)
    distances = [np.linalg.norm(demonstrated - state, axis=1).min() for state in visited]
    angles = [angle_between(a, demonstrated_directions(s)).min() for s, a in zip(visited, actions)]
    measures = {
        "reached_goal": np.mean([episode.success for episode in episodes]),
        "steps": np.mean([len(episode.actions) for episode in episodes]),
        "distance_to_demonstrated_states": np.mean(distances),
        "degrees_off_demonstrated_directions": np.mean(angles),
    }
    return Rollouts(name, k, episodes, measures)


# ---------------------------------------------------------------------------------------------------- figures


def head_colours(k: int) -> Sequence[Any]:
    """One colour per head; cloning's single action is black."""
    import matplotlib

    if k > len(HEAD_COLOURS):
        return matplotlib.colormaps["turbo"](np.linspace(0, 1, k))
    return HEAD_COLOURS[:k] if k > 1 else ("black",)


def new_figure(panels: int, columns: int, title: str, panel: float = 3.2) -> tuple[Any, Sequence[Any]]:
    """A figure of its own, because pyplot keeps global state; an inch is room for title and legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = -(-panels // columns), min(panels, columns)
    figure = Figure(figsize=(panel * columns, (panel + 0.2) * rows + 0.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def to_pixels(figure: Any) -> np.ndarray:
    figure.canvas.draw()
    return np.array(figure.canvas.buffer_rgba())[..., :3]


def draw_world(axis: Any, title: str = "") -> None:
    from matplotlib.patches import Rectangle

    label = "right or up demonstrated"
    axis.add_patch(Rectangle((0, 0), CROSSROADS, CROSSROADS, color="#E4E4E4", lw=0, label=label))
    axis.add_patch(Rectangle((0, 0), 1, 1, fill=False, color="#888888", lw=0.8))
    side = 2 * START_SPREAD
    axis.add_patch(Rectangle(START - START_SPREAD, side, side, fill=False, lw=1.5, zorder=3, label="start"))
    axis.plot(*GOAL, "*", color="white", mec="black", ms=16, ls="none", zorder=1.5, label="goal")
    axis.set_title(title, fontsize=10)
    axis.set(xlim=(-0.06, 1.13), ylim=(-0.06, 1.13), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], aspect="equal")


def draw_arrows(axis: Any, states: np.ndarray, actions: np.ndarray, head: int, k: int) -> Any:
    """Arrows of true length, a unit vector just shorter than a step; thinner from head to head, so none is hidden."""
    colour, width = head_colours(k)[head], 0.006 * (1 + (k - 1 - head) / k)
    label = f"candidate {head + 1}" if k > 1 else "single action"
    axis.plot([], [], color=colour, marker=">", ms=7, lw=2, label=label)  # for the legend, which cannot show arrows
    scale = {"angles": "xy", "scale_units": "xy", "scale": 1 / (0.85 * STEP_LENGTH)}
    return axis.quiver(*states.T, *actions.T, color=colour, width=width, zorder=2, **scale)


def draw_field(axis: Any, field: np.ndarray, title: str) -> list[Any]:
    """The candidates (len(GRID), K, 2), one colour per head; returns the arrows of every head."""
    draw_world(axis, title)
    k = field.shape[1]
    return [draw_arrows(axis, GRID, field[:, head], head, k) for head in range(k)]


def add_legend(figure: Any, columns: int = 7) -> None:
    """One legend below all panels, every label once."""
    entries: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    rows = -(-len(entries) // columns)
    compact = {"ncols": -(-len(entries) // rows), "columnspacing": 1.2, "handlelength": 1.5, "frameon": False}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", fontsize=9, **compact)


def world_figure(demos: list[Episode]) -> Any:
    shown = demos[:: -(-len(demos) // len(PATH_COLOURS))]  # evenly spread
    figure, (axis,) = new_figure(1, 1, f"The world and {len(shown)} of {len(demos)} demonstrations", panel=5.0)
    draw_world(axis)
    for i, demo in enumerate(shown):
        axis.plot(*demo.states.T, "o-", color=PATH_COLOURS[i], ms=3.5, lw=1.6, label=f"demo {i + 1}")
    axis.set(xlabel="x", ylabel="y")
    add_legend(figure, columns=4)
    return figure


def fields_figure(title: str, fits: Sequence[Fit], demos: list[Episode]) -> Any:
    figure, axes = new_figure(len(fits), 3, title)
    for axis, fit in zip(axes, fits):
        near, far = candidate_errors(fit, demos)
        draw_field(axis, fit.fields[-1], f"{fit.name}\nerror: nearest {near:.3f}, farthest {far:.2f}")
    add_legend(figure)
    return figure


def loss_figure(panels: dict[str, Sequence[Fit]]) -> Any:
    figure, axes = new_figure(len(panels), 2, "The soft-minimum loss over training", panel=4.4)
    names = list(dict.fromkeys(fit.name for fits in panels.values() for fit in fits))
    for axis, (title, fits) in zip(axes, panels.items()):
        for fit in fits:
            i = names.index(fit.name)  # cloning comes first: thick and black, so that a line upon it shows
            colour, style = ("black", *HEAD_COLOURS)[i % 7], ("-", "--", "-.", ":")[i % 4]
            axis.semilogy(fit.steps, fit.losses, color=colour, ls=style, lw=2 if i else 4, label=fit.name)
        axis.set(title=title, xlabel="gradient step", ylabel=f"loss, mean over {BLOCK} steps")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9, handlelength=3, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    return figure


def rollouts_figure(compared: Sequence[Rollouts], demos: list[Episode], shown: int = 3) -> Any:
    title = f"{shown} of {ROLLOUTS} rollouts, taking the candidate nearest to the goal"
    figure, axes = new_figure(len(compared), 2, title, panel=3.6)
    demonstrated, _ = state_action_pairs(demos)
    for axis, (name, k, episodes, measures) in zip(axes, compared):
        _, steps, distance, degrees = measures.values()
        draw_world(axis, f"{name}: {steps:.1f} steps\nstates {distance:.4f} off, directions {degrees:.0f}° off")
        axis.plot(*demonstrated.T, ".", color="#BBBBBB", ms=1.5, zorder=1.2, label="demonstrated states")
        states, actions = state_action_pairs(episodes[:shown])
        heads = np.concatenate([episode.heads for episode in episodes[:shown]])
        for head in range(k):
            draw_arrows(axis, states[heads == head], actions[heads == head], head, k)
    add_legend(figure, columns=4)
    return figure


def write_animation(path: Path, fits: Sequence[Fit]) -> None:
    """How the candidates specialise. Frames get sparser, because most happens early; the last one stays a while."""
    from PIL import Image

    figure, axes = new_figure(len(fits), len(fits), " ", panel=2.9)
    arrows = [draw_field(axis, fit.fields[0], fit.name) for axis, fit in zip(axes, fits)]
    add_legend(figure)
    steps, frames = fits[0].steps, []
    for block in np.unique([0, *np.geomspace(1, len(steps) - 1, 40).astype(int)]):
        figure.suptitle(f"Candidates after {steps[block]:,} of {steps[-1]:,} gradient steps", fontsize=13)
        for fit, quivers in zip(fits, arrows):
            for head, quiver in enumerate(quivers):
                quiver.set_UVC(*fit.fields[block][:, head].T)
        frames.append(Image.fromarray(to_pixels(figure)))
        figure.set_layout_engine("none")  # laid out once: nothing moves from frame to frame, and drawing is faster
    palette = frames[-1].quantize(64, Image.Quantize.FASTOCTREE)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [200] * (len(frames) - 1) + [3000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)


# --------------------------------------------------------------------------------------------------- training


def train(args: Args) -> None:
    check_grid_args(args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    demos = run_episodes(demonstrator, args.num_demos, args.seed)
    settings_k = [(k, args.temperature) for k in sorted({1, 2, 3, args.k})]
    settings_t = [(args.k, temperature) for temperature in sorted({*TEMPERATURES, args.temperature})]
    fits = fit_networks(args, list(dict.fromkeys(settings_k + settings_t)), demos)
    by_k = [fits[setting] for setting in settings_k]
    by_t = [by_k[0], *(fits[setting] for setting in settings_t)]

    world_figure(demos).savefig(out / "world.png")
    fields_figure("Cloning averages, candidates do not", by_k, demos).savefig(out / "candidates.png")
    title = f"Influence of the temperature on K={args.k} candidates"
    fields_figure(title, [*by_t[1:], by_t[0]], demos).savefig(out / "temperature.png")
    panels = {f"by number of candidates, T={args.temperature:g}": by_k, f"by temperature, K={args.k}": by_t}
    loss_figure(panels).savefig(out / "loss.png")
    write_animation(out / "training.gif", by_k)

    compared = [roll_out("demonstrator", 1, demonstrator, demos)]
    compared += [roll_out(fit.name, fit.k, towards_goal(fit), demos) for fit in by_k]
    rollouts_figure(compared, demos).savefig(out / "rollouts.png")
    table = [",".join(["policy", *compared[0].measures])]
    table += [",".join([f'"{r.name}"', *(f"{value:.4f}" for value in r.measures.values())]) for r in compared]
    (out / "rollouts.csv").write_text("\n".join(table) + "\n")
    if not args.quiet:
        print("\n".join([*table, f"figures are in {out}"]))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    try:
        train(args)
    except (UserError, OSError) as error:  # OSError: the folder cannot be written
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
