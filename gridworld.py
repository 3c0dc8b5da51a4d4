# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "gymnasium==1.4.0",
#   "tyro", "tqdm", "matplotlib", "pillow",
# ]
# ///
"""The toy world that shows why candidates beat cloning (section 3.2 of the AQuaDem paper).

A demonstrator walks through a square world, sometimes right, sometimes up. Behavioural cloning
learns the average, a direction that was never demonstrated; AQuaDem's candidates learn both.
Trains everything and leaves the figures, an animation and a comparison of rollouts in
docs/gridworld.

    python gridworld.py
    python gridworld.py --k 5 --temperature 0.05 --out five_candidates
    python gridworld.py --num-demos 20 --seed 3 --candidate-steps 5000 --out few_demonstrations

Dadashi, Hussenot, Vincent, Girgin, Raichuk, Geist, Pietquin:
"Continuous Control with Action Quantization from Demonstrations", ICML 2022.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
START = np.array([0.05, 0.05])  # centre of the bottom-left cell
START_SPREAD = 0.05  # an episode begins anywhere in that cell
GOAL = np.array([1.0, 1.0])
GOAL_RADIUS = 0.05
CROSSROADS = 0.5  # the bottom-left region: both coordinates are below this
MAX_STEPS = 100  # then an episode is truncated

TEMPERATURES = (0.001, 0.01, 0.1, 10.0)  # of figure 3; squared distances are at most 4
ANNEALING_K = 3  # candidates where a constant T is compared with an annealed one,
ANNEALING_TEMPERATURE = 0.001  # with this T, or down to it,
INITIALISATIONS = 5  # from so many initialisations: whether a head dies is a matter of luck
IN_USE = 0.01  # a head is in use if it is the nearest one for this share of demonstrated actions

BLOCK = 100  # gradient steps in one call, between two pictures of the animation
ROLLOUTS = 100
EVALUATION_SEED = 2**31  # evaluation episode i starts from this + i; --seed stays below it
GRID_AXIS = np.linspace(0, 1, 11, dtype=np.float32)
GRID_X, GRID_Y = np.meshgrid(GRID_AXIS, GRID_AXIS)
GRID = np.column_stack([GRID_X.ravel(), GRID_Y.ravel()])  # (121, 2) where fields are drawn
Optimizer = optax.GradientTransformation


@dataclasses.dataclass
class Args:
    k: int = 2  # K where figures compare temperatures; the others show K = 1, 2 and 3 too
    temperature: float = 0.01  # T of the soft minimum where figures compare different K
    temperature_start: float = 1.0  # first T of the annealed networks; all others keep a constant T

    num_demos: int = 500  # demonstrations (not in the paper)
    seed: int = 1  # of demonstrations, networks and batches; equal seeds, equal bits on a CPU
    candidate_steps: int = 20_000  # gradient steps of a network; a quarter where annealing is shown
    batch_size: int = 16  # batch of every network (not in the paper)
    candidate_learning_rate: float = 3e-4  # Adam's learning rate
    hidden_dropout: float = 0.1  # after every hidden layer while training, never on the position

    out: str = "docs/gridworld"  # folder of the figures
    quiet: bool = False  # no progress bar and no table, only errors


# ---------------------------------------------------------------------------------- environment


def move(position: np.ndarray, action: np.ndarray) -> np.ndarray:
    """A step of fixed length in the action's direction, inside the walls.

    (2,), (..., 2) -> (..., 2)
    """
    length = np.linalg.norm(action, axis=-1, keepdims=True)
    direction = action / np.maximum(length, 1e-8)
    return np.clip(position + STEP_LENGTH * direction, 0.0, 1.0)


class GridWorld(gym.Env):
    """From the bottom-left corner to the top-right one.

    The observation is the position, the action a direction.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None):
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        start = START + self.np_random.uniform(-START_SPREAD, START_SPREAD, 2)
        self._path = [start]
        return start.astype(np.float32), {"success": False}

    def step(self, action: np.ndarray):
        position = move(self._path[-1], np.asarray(action, float))
        self._path.append(position)
        success = bool(np.linalg.norm(position - GOAL) <= GOAL_RADIUS)
        truncated = not success and len(self._path) > MAX_STEPS
        info = {"success": success}
        return position.astype(np.float32), float(success), success, truncated, info

    def render(self) -> np.ndarray | None:
        if self.render_mode != "rgb_array":
            return None
        return path_picture(self._path)


# --------------------------------------------------------------------------------- demonstrator


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
    action = rng.choice(demonstrated_directions(position))
    return action, 0


def run_episode(env: GridWorld, policy: Callable, rng: np.random.Generator) -> Episode:
    observation, info = env.reset(seed=int(rng.integers(2**31)))
    states = [observation]
    actions = []
    heads = []
    ended = False
    while not ended:
        action, head = policy(observation, rng)
        observation, _, terminated, truncated, info = env.step(action)
        states.append(observation)
        actions.append(action)
        heads.append(head)
        ended = terminated or truncated
    actions = np.array(actions, np.float32)
    return Episode(np.array(states), actions, np.array(heads), info["success"])


def run_episodes(policy: Callable, episodes: int, seed: int) -> list[Episode]:
    """Episode i depends on (seed, i) only.

    Any number can be had, and every policy starts from the same states.
    """
    env = GridWorld()
    return [run_episode(env, policy, np.random.default_rng([seed, i])) for i in range(episodes)]


def state_action_pairs(episodes: list[Episode]) -> tuple[np.ndarray, np.ndarray]:
    states = np.concatenate([episode.states[:-1] for episode in episodes])
    actions = np.concatenate([episode.actions for episode in episodes])
    return states, actions


# ----------------------------------------------------------------------------- network and loss


class CandidateNetwork(nn.Module):
    """Psi of equation 1, (..., obs) -> (..., K, action_dim): a torso, then an MLP per candidate.

    `dense` is nn.Dense and `dense_per_head` K of them side by side, both only faster on a CPU.
    """

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
            # One mask for the whole batch, as in the authors' code.
            return nn.Dropout(rate, broadcast_dims=batch_dims, deterministic=not train)(x)

        x = dropout(self.input_dropout, observations)
        for width in self.torso:
            x = nn.relu(dense(width, nn.initializers.xavier_uniform())(x))
            x = dropout(self.hidden_dropout, x)
        for layer, width in enumerate(self.head):
            x = nn.relu(dense_per_head(self, layer, width, x))  # (..., K, width)
            x = dropout(self.hidden_dropout, x)
        return dense_per_head(self, len(self.head), self.action_dim, x)


def soft_min_loss(candidates: jax.Array, actions: jax.Array, temperature: float) -> jax.Array:
    """Equation 1 as f_T of appendix B: between minimum (T -> 0) and mean of the squared distances.

    candidates (B, K, D), actions (B, D).
    """
    distances = jnp.sum((candidates - actions[:, None, :]) ** 2, axis=-1)  # (B, K)
    log_mean = jax.nn.logsumexp(-distances / temperature, axis=-1) - jnp.log(candidates.shape[1])
    return jnp.mean(-temperature * log_mean)


def nearest_candidate(candidates: jax.Array, actions: jax.Array) -> jax.Array:
    """Index of the candidate at the smallest Euclidean distance. (..., K, D), (..., D) -> (...)."""
    return jnp.argmin(jnp.sum((candidates - actions[..., None, :]) ** 2, axis=-1), axis=-1)


# ----------------------------------------------------------------------------------------- update


class CandidateState(NamedTuple):
    params: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


def annealed_temperature(args: Args, step: jax.Array) -> jax.Array | float:
    """T falls geometrically over the first half of the steps, then stays (ours, not the paper's).

    With a constant small T, the head of a candidate that is never the nearest one gets no gradient.
    """
    if args.temperature_start == args.temperature:
        return args.temperature
    progress = jnp.minimum(step / (0.5 * args.candidate_steps), 1.0)
    return args.temperature_start * (args.temperature / args.temperature_start) ** progress


def make_candidate_update(network: nn.Module, optimizer: Optimizer, args: Args) -> Callable:
    """`steps` gradient steps on equation 1 in one call; returns the mean loss."""

    def loss_fn(params: Any, batch: tuple, temperature: jax.Array, key: jax.Array) -> jax.Array:
        observations, actions = batch
        candidates = network.apply(params, observations, train=True, rngs={"dropout": key})
        return soft_min_loss(candidates, actions, temperature)

    def update(state: CandidateState, observations: jax.Array, actions: jax.Array, steps: int):
        def step(state: CandidateState, _: None) -> tuple[CandidateState, jax.Array]:
            key, batch_key, dropout_key = jax.random.split(state.key, 3)
            chosen = jax.random.randint(batch_key, (args.batch_size,), 0, len(observations))
            batch = (observations[chosen], actions[chosen])
            temperature = annealed_temperature(args, state.step)
            loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, temperature, dropout_key)
            changes, opt_state = optimizer.update(grads, state.opt_state)
            params = optax.apply_updates(state.params, changes)
            return CandidateState(params, opt_state, state.step + 1, key), loss

        state, losses = jax.lax.scan(step, state, None, length=steps)
        return state, jnp.mean(losses)

    return jax.jit(update, static_argnums=3, donate_argnums=0)


# ---------------------------------------------------------------------------------------- fitting


class Snapshot(NamedTuple):
    """A network in the course of its training."""

    step: int  # gradient steps done
    loss: float  # mean since the snapshot before, so the first is NaN
    field: np.ndarray  # (len(GRID), K, 2) candidates everywhere
    network: Callable  # (..., 2) -> (..., K, 2); gone after the next update


class Fit(NamedTuple):
    """A trained network, and how it came about."""

    name: str
    k: int
    candidates: Callable  # (..., 2) -> (..., K, 2)
    steps: np.ndarray  # (blocks + 1,)
    losses: np.ndarray  # (blocks + 1,)
    fields: np.ndarray  # (blocks + 1, len(GRID), K, 2)


def constant_temperature(args: Args, k: int, temperature: float) -> Args:
    """The paper's T: the same at every step."""
    return dataclasses.replace(args, k=k, temperature=temperature, temperature_start=temperature)


def training(args: Args, observations: jax.Array, actions: jax.Array) -> Iterator[Snapshot]:
    """One network: a snapshot at the start and after every block of gradient steps."""
    network = CandidateNetwork(args.k, 2, hidden_dropout=args.hidden_dropout)
    optimizer = optax.adam(args.candidate_learning_rate)
    apply = jax.jit(network.apply)
    update = make_candidate_update(network, optimizer, args)
    key, init_key = jax.random.split(jax.random.PRNGKey(args.seed))
    params = network.init(init_key, observations[:1])
    state = CandidateState(params, optimizer.init(params), jnp.zeros((), jnp.int32), key)
    done = 0
    loss = math.nan
    while True:
        field = np.asarray(apply(state.params, GRID))
        yield Snapshot(done, float(loss), field, partial(apply, state.params))
        block = min(BLOCK, args.candidate_steps - done)
        state, loss = update(state, observations, actions, block)
        done += block


def fit_networks(variants: Sequence[Args], demos: list[Episode]) -> list[Fit]:
    """A network for each of the arguments, which must agree on the number of steps.

    Two at a time: a step is too small to keep more than one core busy.
    """
    states, actions = map(jnp.asarray, state_action_pairs(demos))
    trainings = [training(args, states, actions) for args in variants]
    blocks = math.ceil(variants[0].candidate_steps / BLOCK)
    history = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for _ in progress_bar(blocks + 1, f"{len(variants)} networks", variants[0].quiet):
            snapshots = list(pool.map(next, trainings))
            stop_if_diverged(snapshots)
            history.append(snapshots)
    return [finish_fit(args, snapshots) for args, snapshots in zip(variants, zip(*history))]


# ----------------------------------------------------------------------------------------- policy


def towards_goal(fit: Fit) -> Callable:
    """The policy that takes the candidate whose step ends nearest to the goal.

    With K=1 that is plain cloning.
    """

    def policy(position: np.ndarray, _: np.random.Generator) -> tuple[np.ndarray, int]:
        candidates = fit.candidates(position)
        distances = np.linalg.norm(move(position, candidates) - GOAL, axis=-1)
        head = int(np.argmin(distances))
        return candidates[head], head

    return policy


class Rollouts(NamedTuple):
    name: str
    k: int
    episodes: list[Episode]
    measures: dict[str, float]


# ------------------------------------------------------------------------------------- training


class Results(NamedTuple):
    demos: list[Episode]
    by_k: list[Fit]  # cloning first
    by_temperature: list[Fit]
    constant: list[Fit]  # one per initialisation
    annealed: list[Fit]  # one per initialisation
    rollouts: list[Rollouts]  # the demonstrator first


def fit_annealing(args: Args, demos: list[Episode]) -> tuple[list[Fit], list[Fit]]:
    """The same initialisations twice: with a constant T, and with one that falls to it."""
    constant = []
    annealed = []
    steps = math.ceil(args.candidate_steps / 4)
    for seed in range(args.seed, args.seed + INITIALISATIONS):
        seeded = dataclasses.replace(args, seed=seed, candidate_steps=steps)
        variant = constant_temperature(seeded, ANNEALING_K, ANNEALING_TEMPERATURE)
        constant.append(variant)
        annealed.append(dataclasses.replace(variant, temperature_start=args.temperature_start))
    fits = fit_networks(constant + annealed, demos)
    return fits[:INITIALISATIONS], fits[INITIALISATIONS:]


def train(args: Args) -> Results:
    demos = run_episodes(demonstrator, args.num_demos, args.seed)

    different_k = [(k, args.temperature) for k in sorted({1, 2, 3, args.k})]
    different_t = [(args.k, t) for t in sorted({*TEMPERATURES, args.temperature})]
    settings = list(dict.fromkeys(different_k + different_t))
    variants = [constant_temperature(args, k, temperature) for k, temperature in settings]
    fits = dict(zip(settings, fit_networks(variants, demos)))
    by_k = [fits[setting] for setting in different_k]
    by_temperature = [fits[setting] for setting in different_t]
    constant, annealed = fit_annealing(args, demos)

    rollouts = [roll_out("demonstrator", 1, demonstrator, demos)]
    for fit in by_k:
        rollouts.append(roll_out(fit.name, fit.k, towards_goal(fit), demos))
    return Results(demos, by_k, by_temperature, constant, annealed, rollouts)


# ================================================================================================
# Plumbing. The paper ends here: what follows is checks, figures, the animation and the command
# line. Nothing below is needed to understand the algorithm.
# ================================================================================================

# Paul Tol's high-contrast blue, red and yellow stay apart for the colour-blind and in grey print;
# then his bright ones.
HEAD_COLOURS = ("#004488", "#BB5566", "#DDAA33", "#66CCEE", "#228833", "#AA3377")
PATH_COLOURS = (
    "#4477AA",
    "#EE6677",
    "#228833",
    "#CCBB44",
    "#66CCEE",
    "#AA3377",
    "#222222",
    "#EE7733",
)

BOUNDS = {
    "k": (1, 100),
    "temperature": (1e-9, 1e9),
    "temperature_start": (1e-9, 1e9),
    "num_demos": (1, 10**6),
    "seed": (0, EVALUATION_SEED - 1),
    "candidate_steps": (1, 10**6),
    "batch_size": (1, 10**6),
    "candidate_learning_rate": (1e-9, 1e9),
    "hidden_dropout": (0, 0.99),
}


# --------------------------------------------------------------------------- checks and progress


class UserError(Exception):
    """One line that says what is wrong and what to do; the program ends with exit code 2."""


def check_grid_args(args: Args) -> None:
    for name, (low, high) in BOUNDS.items():
        value = getattr(args, name)
        if not low <= value <= high:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} is {value}: give a number from {low} to {high}")


def stop_if_diverged(snapshots: Sequence[Snapshot]) -> None:
    for snapshot in snapshots:
        if snapshot.step > 0 and not math.isfinite(snapshot.loss):
            step = snapshot.step
            raise UserError(f"loss not finite at step {step}: lower --candidate-learning-rate")


def progress_bar(blocks: int, description: str, quiet: bool) -> Iterable[int]:
    return tqdm(range(blocks), desc=description, unit=f"x{BLOCK} steps", disable=quiet)


def fit_name(args: Args) -> str:
    if args.k == 1:
        return "BC (K=1)"
    if args.temperature_start == args.temperature:
        return f"K={args.k}, T={args.temperature:g}"
    return f"K={args.k}, T={args.temperature_start:g} to {args.temperature:g}"


def head_order(field: np.ndarray) -> list[int]:
    """The head most to the right, then the one most to the left, then those between.

    So colours compare across figures.
    """
    x, y = field.mean(axis=0).T
    from_the_cut = (np.degrees(np.arctan2(y, x)) + 135) % 360  # opposite to the diagonal
    first, *rest = np.argsort(from_the_cut)
    return [first, *rest[-1:], *rest[:-1]]


# ------------------------------------------------------------------------------------ fast layers


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel, a sixth faster in a step of the candidates on a CPU.

    JAX's own gradient of the kernel can come out transposed; Adam then reads across the memory.
    """
    return x @ kernel


def product_gradients(
    inputs: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = inputs
    return gradient @ kernel.T, x.reshape(-1, x.shape[-1]).T @ gradient.reshape(
        -1, gradient.shape[-1]
    )


product.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), product_gradients)


def dense(width: int, init: Callable) -> nn.Dense:
    return nn.Dense(
        width, kernel_init=init, dot_general=lambda x, kernel, *_, **__: product(x, kernel)
    )


def dense_per_head(module: nn.Module, layer: int, width: int, x: jax.Array) -> jax.Array:
    """One layer of all candidates' MLPs: (..., fan_in), later (..., K, fan_in) -> (..., K, width).

    The first layer of all heads reads the same x, so it is one plain product.
    """
    heads = module.num_actions
    fan_in = x.shape[-1]
    first = layer == 0
    axes = {"in_axis": 0, "batch_axis": 1} if first else {"in_axis": 1, "batch_axis": 0}
    xavier = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform", out_axis=2, **axes)
    shape = (fan_in, heads, width) if first else (heads, fan_in, width)
    kernel = module.param(f"head_{layer}_kernel", xavier, shape)
    bias = module.param(f"head_{layer}_bias", nn.initializers.zeros, (heads, width))
    if first:
        flat = product(x, kernel.reshape(fan_in, -1))
        return flat.reshape(*x.shape[:-1], heads, width) + bias
    return jnp.einsum("...ki,kio->...ko", x, kernel) + bias


# ---------------------------------------------------------------------------- fits and measures


def finish_fit(args: Args, snapshots: Sequence[Snapshot]) -> Fit:
    last = snapshots[-1]
    order = head_order(last.field)

    def candidates(positions: np.ndarray) -> np.ndarray:
        return np.asarray(last.network(positions))[..., order, :]

    steps = np.array([snapshot.step for snapshot in snapshots])
    losses = np.array([snapshot.loss for snapshot in snapshots])
    fields = np.stack([snapshot.field for snapshot in snapshots])[:, :, order]
    return Fit(fit_name(args), args.k, candidates, steps, losses, fields)


def angle_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Degrees, from 0 to 180. (..., 2), (..., 2) -> (...)."""
    angle_a = np.arctan2(a[..., 1], a[..., 0])
    angle_b = np.arctan2(b[..., 1], b[..., 0])
    return np.abs((np.degrees(angle_a - angle_b) + 180) % 360 - 180)


def candidate_errors(fit: Fit, demos: list[Episode]) -> tuple[float, float]:
    """Mean distance of the demonstrated action to its nearest and to its farthest candidate."""
    states, actions = state_action_pairs(demos)
    distances = np.linalg.norm(fit.candidates(states) - actions[:, None], axis=-1)
    return float(distances.min(axis=1).mean()), float(distances.max(axis=1).mean())


def heads_in_use(fit: Fit, demos: list[Episode]) -> int:
    """Heads that are the nearest one for at least 1 percent of the demonstrated actions."""
    states, actions = state_action_pairs(demos)
    nearest = nearest_candidate(fit.candidates(states), actions)
    shares = np.bincount(nearest, minlength=fit.k) / len(actions)
    return int(np.sum(shares >= IN_USE))


def roll_out(name: str, k: int, policy: Callable, demos: list[Episode]) -> Rollouts:
    """What a policy does from the start, and how far that is from the demonstrations."""
    episodes = run_episodes(policy, ROLLOUTS, EVALUATION_SEED)
    visited, actions = state_action_pairs(episodes)
    demonstrated, _ = state_action_pairs(demos)
    distances = []
    angles = []
    for state, action in zip(visited, actions):
        distances.append(np.linalg.norm(demonstrated - state, axis=1).min())
        angles.append(angle_between(action, demonstrated_directions(state)).min())
    measures = {
        "reached_goal": np.mean([episode.success for episode in episodes]),
        "steps": np.mean([len(episode.actions) for episode in episodes]),
        "distance_to_demonstrated_states": np.mean(distances),
        "degrees_off_demonstrated_directions": np.mean(angles),
    }
    return Rollouts(name, k, episodes, measures)


# -------------------------------------------------------------------------------- drawing blocks


def head_colours(k: int) -> Sequence[Any]:
    """One colour per head; cloning's single action is black."""
    import matplotlib

    if k == 1:
        return ("black",)
    if k > len(HEAD_COLOURS):
        return matplotlib.colormaps["turbo"](np.linspace(0, 1, k))
    return HEAD_COLOURS[:k]


def new_figure(
    panels: int, columns: int, title: str, panel: float = 3.2
) -> tuple[Any, Sequence[Any]]:
    """A figure of its own, because pyplot keeps global state.

    An inch is room for title and legend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(panels / columns)
    columns = min(panels, columns)
    size = (panel * columns, (panel + 0.2) * rows + 0.8)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]
    return figure, axes


def to_pixels(figure: Any) -> np.ndarray:
    figure.canvas.draw()
    return np.array(figure.canvas.buffer_rgba())[..., :3]


def draw_world(axis: Any, title: str = "") -> None:
    from matplotlib.patches import Rectangle

    region = Rectangle((0, 0), CROSSROADS, CROSSROADS, color="#E4E4E4", lw=0)
    region.set_label("right or up demonstrated")
    axis.add_patch(region)
    axis.add_patch(Rectangle((0, 0), 1, 1, fill=False, color="#888888", lw=0.8))
    side = 2 * START_SPREAD
    start = Rectangle(START - START_SPREAD, side, side, fill=False, lw=1.5, zorder=3, label="start")
    axis.add_patch(start)
    axis.plot(*GOAL, "*", color="white", mec="black", ms=16, ls="none", zorder=1.5, label="goal")
    axis.set_title(title, fontsize=10)
    axis.set(xlim=(-0.06, 1.13), ylim=(-0.06, 1.13))
    axis.set(xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], aspect="equal")


def draw_arrows(axis: Any, states: np.ndarray, actions: np.ndarray, head: int, k: int) -> Any:
    """Arrows of true length, a unit vector just shorter than a step.

    Thinner from head to head, so none is hidden.
    """
    colour = head_colours(k)[head]
    width = 0.006 * (1 + (k - 1 - head) / k)
    label = f"candidate {head + 1}" if k > 1 else "single action"
    axis.plot([], [], color=colour, marker=">", ms=7, lw=2, label=label)  # the legend's arrow
    return axis.quiver(
        *states.T,
        *actions.T,
        color=colour,
        width=width,
        zorder=2,
        angles="xy",
        scale_units="xy",
        scale=1 / (0.85 * STEP_LENGTH),
    )


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
    rows = math.ceil(len(entries) / columns)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        fontsize=9,
        ncols=math.ceil(len(entries) / rows),
        columnspacing=1.2,
        handlelength=1.5,
        frameon=False,
    )


def path_picture(path: list[np.ndarray]) -> np.ndarray:
    """What GridWorld.render shows: the way so far, and where it has led."""
    figure, (axis,) = new_figure(1, 1, f"step {len(path) - 1}")
    draw_world(axis)
    axis.plot(*np.transpose(path), "o-", color=HEAD_COLOURS[0], ms=3, lw=1.2)
    axis.plot(*path[-1], "o", color=HEAD_COLOURS[1], ms=9)
    return to_pixels(figure)


# --------------------------------------------------------------------------------------- figures


def world_figure(demos: list[Episode]) -> Any:
    every = math.ceil(len(demos) / len(PATH_COLOURS))
    shown = demos[::every]
    title = f"The world and {len(shown)} of {len(demos)} demonstrations"
    figure, (axis,) = new_figure(1, 1, title, panel=5.0)
    draw_world(axis)
    for i, (demo, colour) in enumerate(zip(shown, PATH_COLOURS)):
        axis.plot(*demo.states.T, "o-", color=colour, ms=3.5, lw=1.6, label=f"demo {i + 1}")
    axis.set(xlabel="x", ylabel="y")
    add_legend(figure, columns=4)
    return figure


def fields_figure(title: str, fits: Sequence[Fit], demos: list[Episode]) -> Any:
    figure, axes = new_figure(len(fits), 3, title)
    for axis, fit in zip(axes, fits):
        near, far = candidate_errors(fit, demos)
        errors = f"error: nearest {near:.3f}, farthest {far:.2f}"
        draw_field(axis, fit.fields[-1], f"{fit.name}\n{errors}")
    add_legend(figure)
    return figure


def without_dead_head(fits: Sequence[Fit], demos: list[Episode]) -> int:
    return sum(heads_in_use(fit, demos) == fit.k for fit in fits)


def annealing_figure(constant: Sequence[Fit], annealed: Sequence[Fit], demos: list[Episode]) -> Any:
    """Above a constant T, below an annealed one, from the same initialisations."""
    runs = len(constant)
    title = (
        f"All heads in use after {constant[0].steps[-1]:,} steps: "
        f"{without_dead_head(constant, demos)} of {runs} initialisations with constant T, "
        f"{without_dead_head(annealed, demos)} of {runs} with annealed T"
    )
    figure, axes = new_figure(2 * runs, runs, title, panel=2.8)
    for axis, fit in zip(axes, [*constant, *annealed]):
        near, _ = candidate_errors(fit, demos)
        heads = f"{heads_in_use(fit, demos)} of {fit.k} heads in use"
        draw_field(axis, fit.fields[-1], f"{fit.name}\n{heads}, nearest {near:.3f}")
    add_legend(figure)
    return figure


def loss_figure(panels: dict[str, Sequence[Fit]]) -> Any:
    figure, axes = new_figure(len(panels), 2, "The soft-minimum loss over training", panel=4.4)
    names = list(dict.fromkeys(fit.name for fits in panels.values() for fit in fits))
    colours = ("black", *HEAD_COLOURS)
    styles = ("-", "--", "-.", ":")
    for axis, (title, fits) in zip(axes, panels.items()):
        for fit in fits:
            i = names.index(fit.name)
            colour = colours[i % len(colours)]
            style = styles[i % len(styles)]
            width = 2 if i else 4  # cloning comes first: thick, so that a line upon it shows
            axis.semilogy(fit.steps, fit.losses, color=colour, ls=style, lw=width, label=fit.name)
        axis.set(title=title, xlabel="gradient step", ylabel=f"loss, mean over {BLOCK} steps")
        axis.grid(alpha=0.3)
        axis.legend(
            fontsize=9,
            handlelength=3,
            ncols=2,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.14),
            frameon=False,
        )
    return figure


def rollouts_figure(compared: Sequence[Rollouts], demos: list[Episode], shown: int = 3) -> Any:
    title = f"{shown} of {ROLLOUTS} rollouts, taking the candidate nearest to the goal"
    figure, axes = new_figure(len(compared), 2, title, panel=3.6)
    demonstrated, _ = state_action_pairs(demos)
    for axis, (name, k, episodes, measures) in zip(axes, compared):
        steps = measures["steps"]
        distance = measures["distance_to_demonstrated_states"]
        degrees = measures["degrees_off_demonstrated_directions"]
        off = f"states {distance:.4f} off, directions {degrees:.0f}° off"
        draw_world(axis, f"{name}: {steps:.1f} steps\n{off}")
        label = "demonstrated states"
        axis.plot(*demonstrated.T, ".", color="#BBBBBB", ms=1.5, zorder=1.2, label=label)
        states, actions = state_action_pairs(episodes[:shown])
        heads = np.concatenate([episode.heads for episode in episodes[:shown]])
        for head in range(k):
            draw_arrows(axis, states[heads == head], actions[heads == head], head, k)
    add_legend(figure, columns=4)
    return figure


def write_animation(path: Path, fits: Sequence[Fit]) -> None:
    """How the candidates specialise.

    Frames get sparser, because most happens early; the last one stays a while.
    """
    from PIL import Image

    figure, axes = new_figure(len(fits), len(fits), " ", panel=2.9)
    arrows = [draw_field(axis, fit.fields[0], fit.name) for axis, fit in zip(axes, fits)]
    add_legend(figure)
    steps = fits[0].steps
    frames = []
    for block in np.unique([0, *np.geomspace(1, len(steps) - 1, 40).astype(int)]):
        title = f"Candidates after {steps[block]:,} of {steps[-1]:,} gradient steps"
        figure.suptitle(title, fontsize=13)
        for fit, quivers in zip(fits, arrows):
            for head, quiver in enumerate(quivers):
                quiver.set_UVC(*fit.fields[block][:, head].T)
        frames.append(Image.fromarray(to_pixels(figure)))
        figure.set_layout_engine("none")  # laid out once: nothing moves, and drawing is faster
    palette = frames[-1].quantize(64, Image.Quantize.FASTOCTREE)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [200] * (len(frames) - 1) + [3000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)


# ---------------------------------------------------------------------------- files and the shell


def write_figures(out: Path, args: Args, results: Results) -> None:
    demos = results.demos
    cloning = results.by_k[0]
    by_temperature = [*results.by_temperature, cloning]
    title_t = f"Influence of the temperature on K={args.k} candidates"
    panels = {
        f"by number of candidates, T={args.temperature:g}": results.by_k,
        f"by temperature, K={args.k}": [cloning, *results.by_temperature],
    }
    figures = {
        "world": world_figure(demos),
        "candidates": fields_figure("Cloning averages, candidates do not", results.by_k, demos),
        "temperature": fields_figure(title_t, by_temperature, demos),
        "annealing": annealing_figure(results.constant, results.annealed, demos),
        "loss": loss_figure(panels),
        "rollouts": rollouts_figure(results.rollouts, demos),
    }
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png")
    write_animation(out / "training.gif", results.by_k)


def rollouts_table(rollouts: Sequence[Rollouts]) -> str:
    rows = [",".join(["policy", *rollouts[0].measures])]
    for rollout in rollouts:
        values = [f"{value:.4f}" for value in rollout.measures.values()]
        rows.append(",".join([f'"{rollout.name}"', *values]))
    return "\n".join(rows) + "\n"


def annealing_table(results: Results) -> str:
    rows = [f"heads in use (nearest for at least {IN_USE:.0%} of demonstrated actions):"]
    for fits in (results.constant, results.annealed):
        counts = [str(heads_in_use(fit, results.demos)) for fit in fits]
        rows.append(f"{fits[0].name}: {', '.join(counts)} from {len(fits)} initialisations")
    return "\n".join(rows)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    try:
        check_grid_args(args)
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        results = train(args)
        write_figures(out, args, results)
        table = rollouts_table(results.rollouts)
        (out / "rollouts.csv").write_text(table)
    except (UserError, OSError) as error:  # OSError: the folder cannot be written
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if not args.quiet:
        print(table + annealing_table(results))
        print(f"figures are in {out}")


if __name__ == "__main__":
    main()
