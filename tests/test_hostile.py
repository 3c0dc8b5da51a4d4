"""Generated bad input for every script: it works, or it ends with exit code 2 and one line that names what is wrong.

More than 340 cases: 12 command lines for each of nine scripts, 14 datasets and 16 environments for each of eight.

Hypothesis draws command lines, datasets and environments. A case stops when a run would be made: by then everything
that can be wrong with the input has to be found, so nothing is trained and a case takes milliseconds.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import typing
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import gymnasium as gym
import h5py
import minari
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from minari.data_collector import EpisodeBuffer
from tiny_env import Reach

DATASET, DESK_DATASET = "hostile/reach/good-v0", "hostile/desk/good-v0"
CASE = "hostile/case/bad-v0"
TASK = f"--env-id tiny_env:Reach-v0 --dataset-id {DATASET}"


class Script(NamedTuple):
    """A command line that works."""

    module: str
    arguments: str  # the class of its arguments
    words: str  # what it needs
    subcommand: str = ""


SCRIPTS = {
    "aquadqn": Script("aquadqn", "Args", TASK),
    "aquagail": Script("aquagail", "Args", TASK),
    "aquaplay": Script("aquaplay", "Args", f"--task push_green --dataset-id {DESK_DATASET}"),
    "aquacql": Script("aquacql", "Args", TASK),
    "bc": Script("bc_mdn", "BCArgs", TASK, "bc"),
    "mdn": Script("bc_mdn", "MDNArgs", TASK, "mdn"),
    "sac": Script("sac_baselines", "SACArgs", "--env-id tiny_env:Reach-v0", "sac"),
    "sacfd": Script("sac_baselines", "SACfDArgs", TASK, "sacfd"),
    "gail": Script("sac_baselines", "GAILArgs", TASK, "gail"),
}
WITH_DATA = [name for name, script in SCRIPTS.items() if "--dataset-id" in script.words]
WITH_ENVIRONMENT = [name for name, script in SCRIPTS.items() if "--env-id" in script.words]


def cases(number: int) -> Any:
    """The same ones every time."""
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


class EverythingWasFine(BaseException):
    """Raised where a run folder would be made."""


def write_dataset(dataset_id: str, obs_dim: int, action_dim: int, env_id: str | None) -> None:
    """Two short episodes of noise."""
    rng = np.random.default_rng(0)
    episodes = [
        EpisodeBuffer(
            observations=rng.normal(size=(steps + 1, obs_dim)),
            actions=rng.uniform(-1, 1, (steps, action_dim)).astype(np.float32),
            rewards=rng.normal(size=steps),
            terminations=np.zeros(steps, bool),
            truncations=np.arange(steps) == steps - 1,
            infos={"success": rng.random(steps + 1) < 0.5},
        )
        for steps in (6, 4)
    ]
    minari.create_dataset_from_buffers(
        dataset_id,
        buffer=episodes,
        env=env_id,
        observation_space=gym.spaces.Box(-100, 100, (obs_dim,), np.float64),
        action_space=gym.spaces.Box(-1, 1, (action_dim,), np.float32),
    )


@pytest.fixture(scope="module", autouse=True)
def root(tmp_path_factory) -> Path:
    """A Minari root with a good dataset of each kind, and no way to download others."""

    def no_network(*_) -> None:
        raise ConnectionError("no network")

    patch = pytest.MonkeyPatch()
    root = tmp_path_factory.mktemp("minari")
    patch.setenv("MINARI_DATASETS_PATH", str(root))
    patch.setattr("minari.storage.hosting.download_dataset", no_network)
    write_dataset(DATASET, obs_dim=4, action_dim=2, env_id="Reach-v0")
    write_dataset(DESK_DATASET, obs_dim=76, action_dim=5, env_id=None)
    yield root
    patch.undo()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """An empty folder that has to stay empty."""
    return tmp_path_factory.mktemp("place")


def end_of(name: str, words: list[str], place: Path) -> tuple[str | None, Any]:
    """The message of a command that is refused, or the arguments of one that would train."""
    script = SCRIPTS[name]
    module = importlib.import_module(script.module)

    def fine(self, args: Any, *_: Any, **__: Any) -> None:
        raise EverythingWasFine(args)

    errors = io.StringIO()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for value in vars(module).values():
            if isinstance(value, type) and "open_folder" in vars(value):
                patch.setattr(value, "__init__", fine)
        subcommand = [script.subcommand] if script.subcommand else []
        patch.setattr(sys, "argv", [f"{script.module}.py", *subcommand, *words])
        stack.enter_context(contextlib.chdir(place))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(errors))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        try:
            module.main()
            raise AssertionError("it ended without a run")
        except EverythingWasFine as end:
            args, code = end.args[0], None
        except SystemExit as end:
            args, code = None, end.code
    message = errors.getvalue()
    assert not list(place.iterdir()), "something was written"
    assert "Traceback" not in message, message
    noise = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    assert not noise, noise
    if args is not None:
        return None, args
    assert code == 2, (code, message)
    if "For full helptext" in message:  # the command line's own parser says it in a few lines
        return " ".join(message.split()), None
    lines = [line for line in message.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, message
    return lines[0], None


def replaced(words: str, changes: dict[str, str]) -> list[str]:
    """A command line with other values, each as one word so that any text can be one."""
    options = words.split()
    values = dict(zip(options[::2], options[1::2])) | changes
    return [f"{option}={value}" for option, value in values.items()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_lines_work_as_they_are(name, place):
    message, args = end_of(name, SCRIPTS[name].words.split(), place)
    assert message is None and args is not None


# -------------------------------------------------------------------------------------- arguments

NUMBERS = """nan inf -inf -1 0 1 2 0.5 1e300 -1e300 1e-300 1000000000000000000 9223372036854775808
 2147483648 abc None 1e3 0x10 １ --seed 1,5 True""".split()
TEXTS = ["", " ", "ünï", "../..", "/dev/null", "a" * 300, "a\nb", "None", "*", "--seed", "-1"]
ENVIRONMENT_IDS = """: : a:b tiny_env: :Reach-v0 nosuch:Env-v0 nosuch Reach Reach-v99 CartPole-v1
 Pendulum-v1 tiny_env:ReachDict-v0 tiny_env:Reach-v0x json:Env-v0""".split()
DATASET_IDS = [
    *TEXTS,
    "hostile/none/x-v0",
    "../hostile/reach/good-v0",
    "good-v0",
    "-v0",
    "a/../b-v0",
]
ENVIRONMENT_ARGUMENTS = (
    """[] {} [1] { nul {"a":1} {"render_mode":"human"} {"max_episode_steps":3} {"id":1} 1 ""
 {"dictionary":"x"} {"dictionary":[]} {"disable_env_checker":0} NaN""".split()
    + ["[" * 100_000]
)


def argument_values(field: dataclasses.Field) -> st.SearchStrategy:
    """Odd ones, by what the field is."""
    special = {
        "env_id": ENVIRONMENT_IDS,
        "dataset_id": DATASET_IDS,
        "env_kwargs": ENVIRONMENT_ARGUMENTS,
    }
    if field.name in special:
        return st.sampled_from(special[field.name])
    kinds = {field.type, *typing.get_args(field.type)}
    return st.sampled_from(NUMBERS if {int, float} & kinds else TEXTS)


def arguments_of(name: str) -> list[dataclasses.Field]:
    script = SCRIPTS[name]
    return list(
        dataclasses.fields(getattr(importlib.import_module(script.module), script.arguments))
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_odd_arguments(name, place):
    fields = {field.name: field for field in arguments_of(name) if field.type is not bool}
    names = st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=2, unique=True)

    @cases(12)
    @given(st.data())
    def check(data) -> None:
        changes = {n: data.draw(argument_values(fields[n]), label=n) for n in data.draw(names)}
        options = {"--" + n.replace("_", "-"): value for n, value in changes.items()}
        message, args = end_of(name, replaced(SCRIPTS[name].words, options), place)
        if args is None:
            values = [" ".join(value[:50].split()) for value in changes.values()]
            assert any(word in message for word in [*options, *values, *changes, "dataset"]), (
                message
            )

    check()


TOO_LARGE = [
    ("aquadqn", {"--num-actions": "100000"}),
    ("aquagail", {"--num-actions": "100000"}),
    ("aquaplay", {"--num-actions": "100000"}),
    ("aquacql", {"--num-actions": "100000"}),
    ("mdn", {"--num-actions": "100000"}),
    ("bc", {"--num-units": "1000000", "--num-layers": "2"}),
    ("sac", {"--batch-size": "2000000000"}),
    ("sacfd", {"--buffer-size": "2000000000", "--total-timesteps": "2000000000"}),
    ("gail", {"--buffer-size": "2000000000", "--total-timesteps": "2000000000"}),
]


@pytest.mark.parametrize("name, sizes", TOO_LARGE)
def test_what_does_not_fit_into_memory_is_refused(name, sizes, place, monkeypatch):
    of_this_machine = os.sysconf
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6_000_000}  # 25 GB, wherever the test runs
    monkeypatch.setattr("os.sysconf", lambda name: pages.get(name) or of_this_machine(name))
    message, _ = end_of(name, replaced(SCRIPTS[name].words, sizes), place)
    assert message is not None and "this run needs about" in message
    assert any(option in message or "the network's size" in message for option in sizes)


def test_a_mesh_on_the_desk_needs_memory_too(place):
    words = "--task push_green --discretization bb2 --batch-size 2000000000".split()
    message, _ = end_of("aquaplay", words, place)
    assert message is not None and "this run needs about" in message and "--batch-size" in message


ODD_WORDS = ["--no-such 1", "--seed", "stray", "--quiet=maybe", "--seed 1 more"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_odd_words(name, place):
    number = list(SCRIPTS).index(name)
    for words in (ODD_WORDS[number % 5], ODD_WORDS[(number + 1) % 5]):  # each takes the parser long
        message, _ = end_of(name, [*SCRIPTS[name].words.split(), *words.split()], place)
        assert message is not None
        assert any(word.lstrip("-") in message for word in words.replace("=", " ").split())


# --------------------------------------------------------------------------------------- datasets

FIELDS = ["observations", "actions", "rewards", "terminations", "truncations", "infos/success"]


def resized(array: np.ndarray, length: int) -> np.ndarray:
    return np.resize(array, (length, *array.shape[1:])) if length else array[:0]


def with_one(array: np.ndarray, value: float) -> np.ndarray:
    array = np.array(array, np.float64)
    array.flat[array.size // 2] = value
    return array


CHANGES = {
    "one less": lambda a: a[:-1],
    "two less": lambda a: a[2:],
    "one more": lambda a: resized(a, len(a) + 1),
    "many more": lambda a: resized(a, 9 * len(a)),
    "one only": lambda a: a[:1],
    "empty": lambda a: a[:0],
    "an axis more": lambda a: a[:, None],
    "two axes more": lambda a: a[None, ..., None],
    "a column more": lambda a: np.concatenate([a, a], axis=-1),
    "turned": lambda a: a.T[..., None],
    "flat": lambda a: a.ravel(),
    "scalar": lambda a: np.float64(1.0),
    "text": lambda a: np.full(a.shape, b"text"),
    "numbers as text": lambda a: np.full(a.shape, b"1"),
    "integers": lambda a: a.astype(np.int64),
    "bytes": lambda a: a.astype(np.uint8),
    "half": lambda a: a.astype(np.float16),
    "big endian": lambda a: a.astype(">f8"),
    "complex": lambda a: a.astype(np.complex64),
    "NaN": lambda a: with_one(a, np.nan),
    "infinity": lambda a: with_one(a, -np.inf),
    "huge": lambda a: with_one(a, 1e300),
    "large": lambda a: with_one(a, 1e30),
    "all NaN": lambda a: np.full(a.shape, np.nan),
    "seven": lambda a: np.full(a.shape, 7.0),
    "gone": lambda a: None,
    "a folder": lambda a: {},
    "a folder of it": lambda a: {"x": a},
}
WHOLE_EPISODES = [
    "no steps",
    "one step",
    "gone",
    "empty",
    "an array",
    "all without",
    "other number",
]
FILES = {
    "data no HDF5": ("main_data.hdf5", lambda old: b"hello"),
    "data empty": ("main_data.hdf5", lambda old: b""),
    "data cut": ("main_data.hdf5", lambda old: old[: len(old) // 2]),
    "data cut short": ("main_data.hdf5", lambda old: old[:-9]),
    "data gone": ("main_data.hdf5", lambda old: None),
    "metadata no JSON": ("metadata.json", lambda old: b"{"),
    "metadata no text": ("metadata.json", lambda old: b"\xff\xfe\x00"),
    "metadata empty": ("metadata.json", lambda old: b"{}"),
    "metadata a list": ("metadata.json", lambda old: b"[1]"),
    "metadata gone": ("metadata.json", lambda old: None),
}
METADATA = {
    "total_episodes": [0, -1, 1, 99, "many", None, 1.5, 10**18],
    "total_steps": [0, -1, "many", None],
    "observation_space": ["{}", "x", None, '{"type": "Text"}'],
    "action_space": ["{}", "x", None, '{"type": "Discrete", "n": 3}'],
    "data_format": ["arrow", "x", None, 3],
    "minari_version": ["99.0", "x", None],
    "dataset_id": ["x", None],
    "env_spec": ["x", None, "{}", '{"id": "os:system-v0", "entry_point": "os:system"}'],
}
dataset_changes = st.one_of(
    st.tuples(st.just("field"), st.sampled_from(FIELDS), st.sampled_from(sorted(CHANGES))),
    st.tuples(st.just("field"), st.sampled_from(FIELDS), st.sampled_from(sorted(CHANGES))),
    st.tuples(st.just("field"), st.sampled_from(FIELDS), st.sampled_from(sorted(CHANGES))),
    st.tuples(st.just("episode"), st.integers(0, 1), st.sampled_from(WHOLE_EPISODES)),
    st.tuples(st.just("file"), st.sampled_from(sorted(FILES))),
    st.sampled_from(
        [("metadata", key, value) for key, values in METADATA.items() for value in values]
    ),
)


def write(group: h5py.Group, name: str, value: Any) -> None:
    del group[name]
    if isinstance(value, dict):
        folder = group.create_group(name)
        for key, array in value.items():
            folder[key] = array
    elif value is not None:
        group[name] = value


def change_episode(file: h5py.File, number: int, how: str) -> None:
    name = f"episode_{number}"
    episode = file[name]
    if how in ("no steps", "one step"):
        steps = 0 if how == "no steps" else 1
        for field in FIELDS:
            more = field in ("observations", "infos/success")
            write(episode, field, episode[field][: steps + more])
    elif how == "gone":
        del file[name]
    elif how == "empty":
        write(file, name, {})
    elif how == "an array":
        write(file, name, np.zeros(3))
    elif how == "other number":
        file.move(name, "episode_7")
    else:
        del episode["infos"]


def change_dataset(folder: Path, change: tuple) -> None:
    kind, *details = change
    if kind == "file":
        name, new = FILES[details[0]]
        path = folder / name
        content = new(path.read_bytes())
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    elif kind == "metadata":
        path = folder / "metadata.json"
        key, value = details
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    else:
        with h5py.File(folder / "main_data.hdf5", "r+") as file:
            if kind == "episode":
                change_episode(file, *details)
            else:
                field, how = details
                write(file["episode_1"], field, CHANGES[how](file["episode_1"][field][()]))


@pytest.mark.parametrize("name", WITH_DATA)
def test_odd_datasets(name, root, place):
    words = SCRIPTS[name].words
    good = dict(zip(words.split()[::2], words.split()[1::2]))["--dataset-id"]

    @cases(14)
    @given(dataset_changes)
    def check(change) -> None:
        shutil.rmtree(root / "hostile" / "case", ignore_errors=True)
        shutil.copytree(root / good, root / CASE)
        change_dataset(root / CASE / "data", change)
        message, _ = end_of(name, replaced(words, {"--dataset-id": CASE}), place)
        assert message is None or CASE in message, message

    check()


WRONG_LENGTHS = [
    ("terminations", "one less"),
    ("truncations", "two less"),
    ("actions", "one more"),
    ("observations", "one less"),
]


@pytest.mark.parametrize("name", WITH_DATA)
def test_fields_of_the_wrong_length_are_named(name, root, place):
    words = SCRIPTS[name].words
    good = dict(zip(words.split()[::2], words.split()[1::2]))["--dataset-id"]
    for field, how in WRONG_LENGTHS:
        shutil.rmtree(root / "hostile" / "case", ignore_errors=True)
        shutil.copytree(root / good, root / CASE)
        change_dataset(root / CASE / "data", ("field", field, how))
        message, _ = end_of(name, replaced(words, {"--dataset-id": CASE}), place)
        assert message is not None and CASE in message, (field, how)


# ----------------------------------------------------------------------------------- environments

VALUES = {
    "None": None,
    "text": "out of\nwater",
    "NaN": np.nan,
    "infinity": -np.inf,
    "huge": 1e300,
    "minus one": -1,
    "two": 2,
    "true": True,
    "NumPy's false": np.False_,
    "list": [1, 2],
    "ragged": [[1], [2, 3]],
    "nothing": [],
    "dict": {"a": 1},
    "success": {"success": True},
    "object": object(),
    "complex": 1j,
    "array of one": np.ones(1),
    "array of two": np.array([True, False]),
    "scalar array": np.array(1.0),
    "matrix": np.eye(2),
    "column": np.zeros((4, 1)),
    "four": np.zeros(4),
    "four small": np.zeros(4, np.int8),
    "four NaN": np.full(4, np.nan),
    "four huge": np.full(4, 1e300),
    "four texts": np.array(["1"] * 4),
    "four objects": np.array([None] * 4),
    "a pair": (np.zeros(4), {}),
    "five": (np.zeros(4), 0.0, False, False, {}),
}
ACTION_SPACES = {
    "whole numbers": gym.spaces.Box(-1, 1, (2,), np.int64),
    "unbounded": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "no dimension": gym.spaces.Box(-1, 1, (0,), np.float32),
    "scalar": gym.spaces.Box(-1, 1, (), np.float32),
    "two axes": gym.spaces.Box(-1, 1, (1, 2), np.float32),
    "double": gym.spaces.Box(-0.1, 0.1, (2,), np.float64),
    "discrete": gym.spaces.Discrete(3),
    "dict": gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (2,))),
    "none": None,
    "text": "Box",
}
OBSERVATION_SPACES = {
    "three": gym.spaces.Box(-10, 10, (3,)),
    "no dimension": gym.spaces.Box(-1, 1, (0,)),
    "scalar": gym.spaces.Box(-1, 1, ()),
    "picture": gym.spaces.Box(0, 255, (2, 2, 1), np.uint8),
    "two axes": gym.spaces.Box(-10, 10, (2, 2), np.float64),
    "discrete": gym.spaces.Discrete(3),
    "dict": gym.spaces.Dict(a=gym.spaces.Box(-10, 10, (4,))),
    "dict in dict": gym.spaces.Dict(a=gym.spaces.Dict(b=gym.spaces.Box(-10, 10, (4,)))),
    "empty dict": gym.spaces.Dict(),
    "tuple": gym.spaces.Tuple([gym.spaces.Box(-10, 10, (4,))]),
    "none": None,
    "text": "Box",
}
PLACES = """reset-result reset-observation reset-info step-result observation reward terminated truncated info
 success""".split()


class Hostile(Reach):
    """Reach that does one thing wrong: `place` says what, `value` which value is there, from step `since` on."""

    def __init__(self, place: str, value: str, since: int, render_mode: str | None = None):
        super().__init__(render_mode)
        self.place, self.value, self.since, self.steps = place, value, since, 0
        if place == "action space":
            self.action_space = ACTION_SPACES[value]
        if place == "observation space":
            self.observation_space = OBSERVATION_SPACES[value]
        self.fail("init")

    def fail(self, place: str) -> None:
        if self.place == "fails" and self.value == place and self.steps >= self.since:
            raise RuntimeError("no such\ntask")

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        self.steps = 0
        self.fail("reset")
        observation, info = super().reset(seed=seed)
        observation = VALUES[self.value] if self.place == "reset-observation" else observation
        info = VALUES[self.value] if self.place == "reset-info" else info
        return VALUES[self.value] if self.place == "reset-result" else (observation, info)

    def step(self, action: np.ndarray) -> Any:
        self.steps += 1
        self.fail("step")
        names = ["observation", "reward", "terminated", "truncated", "info"]
        action = action if np.shape(action) == (2,) else np.zeros(2, np.float32)
        result = dict(zip(names, super().step(action)))
        if self.steps >= self.since:
            if self.place in names:
                result[self.place] = VALUES[self.value]
            elif self.place == "success":
                result["info"] = {"success": VALUES[self.value]}
            elif self.place == "step-result":
                return VALUES[self.value]
        return tuple(result.values())

    def close(self) -> None:
        self.fail("close")


gym.register("Hostile-v0", entry_point=Hostile, max_episode_steps=7)
environment_changes = st.one_of(
    st.tuples(st.sampled_from(PLACES), st.sampled_from(sorted(VALUES)), st.sampled_from([0, 3])),
    st.tuples(st.sampled_from(PLACES), st.sampled_from(sorted(VALUES)), st.sampled_from([0, 3])),
    st.tuples(st.sampled_from(PLACES), st.sampled_from(sorted(VALUES)), st.sampled_from([0, 3])),
    st.tuples(st.just("action space"), st.sampled_from(sorted(ACTION_SPACES)), st.just(0)),
    st.tuples(
        st.just("observation space"), st.sampled_from(sorted(OBSERVATION_SPACES)), st.just(0)
    ),
    st.tuples(
        st.just("fails"), st.sampled_from(["init", "reset", "step", "close"]), st.integers(0, 3)
    ),
)


def play_an_episode(module: ModuleType, args: Any) -> None:
    """What passed the checks has to work."""
    makers = [vars(module).get(name) for name in ("make_task", "make_offline_env", "make_env")]
    env = next(filter(None, makers))(args)
    module.seeded_reset(env, 1)
    ended = False
    while not ended:
        observation, reward, terminated, truncated, info = env.step(np.zeros(2))
        assert np.isfinite(np.asarray(observation, np.float32)).all()
        assert np.isfinite(np.float32(reward))
        if "success" in info:
            assert 0 <= float(info["success"]) <= 1
        ended = terminated or truncated


@pytest.mark.parametrize("name", WITH_ENVIRONMENT)
def test_odd_environments(name, place):
    module = importlib.import_module(SCRIPTS[name].module)

    @cases(16)
    @given(environment_changes)
    def check(change) -> None:
        kwargs = json.dumps(dict(zip(["place", "value", "since"], change)))
        options = {"--env-id": "Hostile-v0", "--env-kwargs": kwargs}
        message, args = end_of(name, replaced(SCRIPTS[name].words, options), place)
        if args is not None:
            play_an_episode(module, args)
        else:
            assert "Hostile-v0" in message or "environment" in message, message

    check()


@pytest.mark.parametrize("name", WITH_ENVIRONMENT)
def test_no_time_limit_and_whole_numbers_are_refused(name, place):
    endless = {"--env-id": "odd_env:Endless-v0"}
    message, _ = end_of(name, replaced(SCRIPTS[name].words, endless), place)
    assert message is not None and "no time limit" in message and "--max-episode-steps" in message
    limited = replaced(SCRIPTS[name].words, {**endless, "--max-episode-steps": "9"})
    message, args = end_of(name, limited, place)
    assert message is None and args.max_episode_steps == 9
    integer = {"--env-id": "odd_env:Odd-v0", "--env-kwargs": '{"kind": "integer"}'}
    message, _ = end_of(name, replaced(SCRIPTS[name].words, integer), place)
    assert message is not None and "actions of type int64" in message


# ------------------------------------------------------------------------------------------- forks

THREADED = """
import os, sys, threading, warnings
import jax
warnings.simplefilter("error")
forks = []
os.register_at_fork(before=lambda: forks.append(1))
jax.numpy.zeros(3).block_until_ready()
for _ in range(4):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.path[:0] = [{tests!r}, {root!r}]
import tiny_env
from pathlib import Path
import aquadqn
import numpy as np
aquadqn.write_video(Path("videos/step_1.mp4"), [np.zeros((64, 64, 3), np.uint8)] * 3, fps=10)
assert Path("videos/step_1.mp4").stat().st_size > 100
print("forks:", len(forks))
"""


def test_videos_fork_nothing_in_a_process_with_threads(tmp_path):
    """JAX warns of forks, and may hang in them; notebooks, Ray and pytest have threads of their own."""
    tests = Path(__file__).parent
    program = THREADED.format(tests=str(tests), root=str(tests.parent))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout == "forks: 0\n", done.stdout + done.stderr
    assert "fork" not in done.stderr


def test_ctrl_c_does_not_reach_the_video(tmp_path, monkeypatch):
    """ffmpeg would end at once; the run itself hears of it afterwards."""
    import aquadqn

    def write(*_: Any, **__: Any) -> bytes:
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())
        return b"video"

    monkeypatch.setattr("imageio.v2.mimwrite", write)
    aquadqn.write_video(tmp_path / "videos" / "x.mp4", [], fps=10)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
