"""Ready for an accelerator that is not here: what is compiled, and what moves between host and device.

`jax.export` lowers for CUDA and TPU on any machine. Each script is trained for a moment, every function that it gave to
`jax.jit` is noted with the shapes that it was called with, and lowered for both.
"""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import aquacql
import aquadqn
import aquagail
import aquaplay
import bc_mdn
import gridworld
import record
import sac_baselines

TINY = {
    "env_id": "Reach-v0",
    "dataset_id": "tiny/reach/expert-v0",
    "eval_episodes": 1,
    "batch_size": 4,
    "quiet": True,
}
STEPS = {"total_timesteps": 32, "eval_every": 32, "learning_starts": 8}
GRADIENT_STEPS = {"gradient_steps": 4, "eval_every": 4}
CANDIDATES = {"num_actions": 3, "candidate_steps": 2}


def train_sac(method: str) -> Callable[[], Any]:
    settings = TINY if method != "SAC" else {k: v for k, v in TINY.items() if k != "dataset_id"}
    return lambda: sac_baselines.train(getattr(sac_baselines, f"{method}Args")(**settings, **STEPS))


def train_dqn(**changes: Any) -> Callable[[], Any]:
    return lambda: aquadqn.train(aquadqn.Args(**TINY, **STEPS, **CANDIDATES, **changes))


def train_on_play() -> None:
    play = record.PlayArgs(
        dataset_id="tiny/lowered-play-v0", num_episodes=1, episode_steps=600, quiet=True
    )
    record.record_play(play)
    settings = {k: v for k, v in TINY.items() if k not in ("env_id", "dataset_id")}
    everything = settings | STEPS | CANDIDATES
    aquaplay.train(
        aquaplay.Args(task="push_green", dataset_id="tiny/lowered-play-v0", **everything)
    )


def train_on_grid() -> None:
    args = gridworld.Args(candidate_steps=10, k=2)
    data = jnp.zeros((20, 2))
    next(snapshots := gridworld.training(args, data, data))
    next(snapshots)


# What is trained; a new script is a row.
TRAININGS = {
    "aquadqn": (aquadqn, train_dqn()),
    "aquadqn double": (aquadqn, train_dqn(q_loss="double", ema_decay=0.0)),
    "aquadqn kmeans": (aquadqn, train_dqn(q_loss="dqn", candidates="kmeans")),
    "aquagail": (
        aquagail,
        lambda: aquagail.train(aquagail.Args(**TINY, **STEPS, **CANDIDATES)),
    ),
    "aquacql": (
        aquacql,
        lambda: aquacql.train(aquacql.Args(**TINY, **GRADIENT_STEPS, **CANDIDATES)),
    ),
    "aquaplay": (aquaplay, train_on_play),
    "gridworld": (gridworld, train_on_grid),
    "bc": (bc_mdn, lambda: bc_mdn.train(bc_mdn.BCArgs(**TINY, **GRADIENT_STEPS))),
    "mdn": (bc_mdn, lambda: bc_mdn.train(bc_mdn.MDNArgs(**TINY, **GRADIENT_STEPS, num_actions=3))),
    "sac": (sac_baselines, train_sac("SAC")),
    "sacfd": (sac_baselines, train_sac("SACfD")),
    "gail": (sac_baselines, train_sac("GAIL")),
}
OUTSIDE_TRAINING = {"CandidateActions"}  # jitted for users; a plain call of the candidate network


class Noted:
    """jax.jit's results, with where they were made and what they were called with first."""

    def __init__(self):
        self.calls: dict[str, tuple[Callable, tuple, dict]] = {}

    def jit(self, function: Callable, **options: Any) -> Callable:
        return self.note(sys._getframe(1).f_code.co_qualname, JIT(function, **options), options)

    def note(self, place: str, jitted: Callable, options: dict) -> Callable:
        numbers = np.atleast_1d(options.get("static_argnums", ()))
        names = np.atleast_1d(options.get("static_argnames", ()))

        def called(*args: Any, **kwargs: Any) -> Any:
            if place not in self.calls:
                shapes = [x if i in numbers else shapes_of(x) for i, x in enumerate(args)]
                named = {k: x if k in names else shapes_of(x) for k, x in kwargs.items()}
                self.calls[place] = (jitted, tuple(shapes), named)
            return jitted(*args, **kwargs)

        return called


JIT = jax.jit


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), tree)


def places_with_jit(module: Any) -> set[str]:
    """Top-level functions and classes of a script whose text has jax.jit."""
    found = set()
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and "jax.jit" in ast.unparse(node):
            found.add(node.name)
    return found


@pytest.fixture
def small(monkeypatch, tmp_path, datasets):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record.os, "sched_getaffinity", lambda _: {0})  # one recording process
    for module in (aquagail, bc_mdn, sac_baselines):
        monkeypatch.setattr(module, "SINKHORN_POINTS", 50, raising=False)
        monkeypatch.setattr(module, "HUMAN_REPETITIONS", 2, raising=False)


def noted_training(module: Any, train: Callable, monkeypatch: pytest.MonkeyPatch) -> Noted:
    noted = Noted()
    for name, value in vars(module).items():  # jitted when the script was imported
        if hasattr(value, "lower") and hasattr(value, "trace"):
            monkeypatch.setattr(module, name, noted.note(name, value, {}))
    monkeypatch.setattr(jax, "jit", noted.jit)
    train()
    monkeypatch.undo()
    return noted


@pytest.mark.parametrize("name", TRAININGS)
def test_everything_that_is_compiled_can_be_for_an_accelerator(name, small, monkeypatch):
    module, train = TRAININGS[name]
    with pytest.MonkeyPatch.context() as patch:
        noted = noted_training(module, train, patch)
    found = {place.split(".")[0] for place in noted.calls}
    if name not in ("aquadqn kmeans", "sac", "sacfd"):  # which use less of their script
        assert found == places_with_jit(module) - OUTSIDE_TRAINING
    for place, (jitted, args, kwargs) in noted.calls.items():
        for platform in ("cuda", "tpu"):
            exported = jax.export.export(jitted, platforms=(platform,))(*args, **kwargs)
            assert exported.platforms == (platform,)
            calls = re.findall(r"custom_call @(\w+)", exported.mlir_module())
            cpu_only = [call for call in calls if re.search("cpu|lapack|callback", call)]
            assert cpu_only == [], f"{place} on {platform}"


def test_what_only_a_cpu_can_do_would_be_found():
    def callback(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, x, x)

    for function in (callback, jax.lax.linalg.schur):
        for platform in ("cuda", "tpu"):
            with pytest.raises((ValueError, NotImplementedError), match=platform):
                jax.export.export(jax.jit(function), platforms=(platform,))(jnp.eye(2))


# ------------------------------------------------------------------------------------- transfers

BLOCKS = 3


class OnDevice:
    """An array that nothing but jax.device_get may look at."""

    strict = False

    def __init__(self, array: jax.Array):
        self.array = array

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        assert not OnDevice.strict, "read from the device without jax.device_get"
        return np.asarray(self.array)

    def __float__(self) -> float:
        return float(self.__array__())

    def __bool__(self) -> bool:
        return bool(self.__array__())

    def __index__(self) -> int:
        return int(self.__array__())


def unwrapped(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.array if isinstance(x, OnDevice) else x, tree)


def stays_on_device(make: Callable) -> Callable:
    """make_policy or make_update, whose results stay on the device."""

    def made(*args: Any) -> Callable:
        function = make(*args)
        return lambda *args, **kwargs: jax.tree.map(OnDevice, function(*unwrapped(args), **kwargs))

    return made


class Watched(gym.Wrapper):
    """Watches the training loop from one environment step to another, some blocks later."""

    def __init__(self, env: gym.Env, first: int):
        super().__init__(env)
        self.first = first
        self.steps = 0
        self.guard = jax.transfer_guard_host_to_device("log_explicit")

    def step(self, action: np.ndarray) -> tuple:
        self.steps += 1
        if self.steps == self.first:
            OnDevice.strict = True
            self.guard.__enter__()
        if self.steps == self.first + BLOCKS * aquadqn.STEPS_PER_CALL:
            self.guard.__exit__(None, None, None)
            OnDevice.strict = False
        return self.env.step(action)


def test_a_step_is_one_transfer_each_way_and_a_block_one_more(small, monkeypatch, capfd):
    """A step: the observation there, the action with its index back. A block of 8 steps: its transitions there, the
    update's losses back. What counts on an accelerator is the number of waits, not of arrays."""
    fetched: list[int] = []

    def device_get(tree: Any) -> Any:
        if OnDevice.strict:
            fetched.append(len(jax.tree.leaves(tree)))
        return real_device_get(unwrapped(tree))

    def watched(arguments: tuple) -> list[Any]:
        return [Watched(x, first=24) if isinstance(x, gym.Env) else x for x in arguments]

    real_device_get = jax.device_get
    train_agent = aquadqn.train_agent
    monkeypatch.setattr(jax, "device_get", device_get)
    monkeypatch.setattr(aquadqn, "make_policy", stays_on_device(aquadqn.make_policy))
    monkeypatch.setattr(aquadqn, "make_update", stays_on_device(aquadqn.make_update))
    monkeypatch.setattr(aquadqn, "train_agent", lambda *args: train_agent(*watched(args)))
    steps = {"total_timesteps": 64, "eval_every": 64, "learning_starts": 8}
    aquadqn.train(aquadqn.Args(**TINY, **steps, **CANDIDATES))
    sent = capfd.readouterr().err.count("host-to-device transfer")
    steps = BLOCKS * aquadqn.STEPS_PER_CALL
    assert sent == steps + BLOCKS * len(aquadqn.Transition._fields)
    assert fetched.count(2) == len(fetched) == steps + BLOCKS  # action and index; loss and Q-value
