"""What no training script may lose or leave unsaid: a run of each is stopped, its folder spoilt, its disk filled.

The environment draws its task before it looks at the seed, and needs an argument: resumed and evaluated runs have to
give it the same one.
"""

import contextlib
import dataclasses
import errno
import fcntl
import importlib
import io
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest
from odd_env import Odd

KIND = "task before seed"
BASE = "--eval-episodes 2 --batch-size 8 --seed 5 --quiet"
TASK = f"--env-id odd_env:Odd-v0 --reward env {BASE}"
ARGUMENTS = ["--env-kwargs", f'{{"kind": "{KIND}"}}']
DATA = "--dataset-id tiny/reach/expert-v0"
FEW = "--num-demos 5"  # too few for the human score, which takes a minute
STEPS = "--total-timesteps 84 --eval-every 42 --learning-starts 16 --checkpoint-every 21"
GRADIENT_STEPS = "--gradient-steps 40 --eval-every 20 --checkpoint-every 10"
CANDIDATES = "--num-actions 4 --candidate-steps 20"
COMMANDS = {
    "aquadqn": ["aquadqn", *f"{TASK} {DATA} {STEPS} {CANDIDATES}".split(), *ARGUMENTS],
    "aquagail": ["aquagail", *f"{TASK} {DATA} {FEW} {STEPS} {CANDIDATES}".split(), *ARGUMENTS],
    "aquaplay": ["aquaplay", *f"--task reach --discretization bb2 {BASE} {STEPS}".split()],
    "aquacql": [
        "aquacql",
        *f"{TASK.replace('--reward env', '')} {DATA} {GRADIENT_STEPS} {CANDIDATES}".split(),
        *ARGUMENTS,
    ],
    "bc": ["bc_mdn", "bc", *f"{TASK} {DATA} {FEW} {GRADIENT_STEPS}".split(), *ARGUMENTS],
    "mdn": ["bc_mdn", "mdn", *f"{TASK} {DATA} {FEW} {GRADIENT_STEPS}".split(), *ARGUMENTS],
    "sac": ["sac_baselines", "sac", *f"{TASK} {STEPS}".split(), *ARGUMENTS],
    "sacfd": ["sac_baselines", "sacfd", *f"{TASK} {DATA} {STEPS}".split(), *ARGUMENTS],
    "gail": ["sac_baselines", "gail", *f"{TASK} {DATA} {FEW} {STEPS}".split(), *ARGUMENTS],
}
OFFLINE = {"aquacql", "bc", "mdn"}


class OddDesk(Odd):
    """For aquaplay.py, which knows no other environments than the desk's tasks."""

    def __init__(self, render_mode: str | None = None, robodesk_rewards: str = "fixed"):
        super().__init__(KIND, render_mode)


gym.register("RoboDesk/reach-v0", entry_point=OddDesk, max_episode_steps=21)


def module_of(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name][0])


def call(name: str, words: list[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [f"{COMMANDS[name][0]}.py", *words])
            module_of(name).main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def resume(name: str, run: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:  # a run that fails would keep its lock
        patch.setattr(module_of(name).Run, "lock_folder", lambda self: io.StringIO())
        call(name, ["--resume", str(run), "--quiet"])


def refusal(capsys: pytest.CaptureFixture, function, *arguments) -> tuple[int, str]:
    """Exit code and the one line of a command that ends with an error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        function(*arguments)
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and not any("Traceback" in line for line in lines), lines
    return caught.value.code, errors[0]


def contents(run: Path) -> dict[str, bytes]:
    """Of all files but TensorBoard's and the lock."""
    return {
        path.name: path.read_bytes()
        for path in run.iterdir()
        if path.is_file() and path.name != "lock" and "tfevents" not in path.name
    }


def numbers(run: Path) -> dict[str, bytes]:
    """Every array and every other file: an archive's bytes have the time in them."""
    found: dict[str, bytes] = {}
    for name, content in contents(run).items():
        if name.endswith(".npz"):
            with np.load(run / name) as file:
                found |= {f"{name} {key}": file[key].tobytes() for key in file.files}
        else:
            found[name] = content
    return found


@dataclasses.dataclass
class Trained:
    name: str
    finished: Path
    second_checkpoint: Path  # the folder as a kill after the second checkpoint leaves it


@pytest.fixture(scope="module", params=COMMANDS)
def trained(request, datasets, tmp_path_factory) -> Trained:
    name = request.param
    module = module_of(name)
    folder = tmp_path_factory.mktemp(name)
    copy = folder / "copy"
    save = module.save_arrays
    saved: list[Path] = []

    def save_and_copy(path: Path, *arrays, **meta) -> None:
        save(path, *arrays, **meta)
        saved.extend([path] * (path.name == "state.npz"))
        if len(saved) == 2 and not copy.exists():
            shutil.copytree(path.parent, copy)

    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr(module, "save_arrays", save_and_copy)
        call(name, COMMANDS[name][1:])
    (finished,) = (folder / "runs").iterdir()
    replay = copy / "replay.partial"
    assert copy.exists() and not replay.exists()
    return Trained(name, finished, copy)


@pytest.fixture
def stopped(trained, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained.second_checkpoint, tmp_path / "run")


def test_evaluate_agrees_with_the_last_evaluation(trained, stopped, capsys):
    header, *_, last = (trained.finished / "evaluations.csv").read_text().splitlines()
    row = dict(zip(header.split(","), last.split(",")))
    call(trained.name, ["--evaluate", str(trained.finished), "--eval-episodes", "2"])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert words[words.index("return") + 1] == f"{float(row['episodic_return']):.3f}"


def test_a_folder_has_one_writer(trained, stopped, capsys):
    before = contents(stopped)
    command = (call, trained.name, ["--resume", str(stopped), "--quiet"])
    with (stopped / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, line = refusal(capsys, *command)
    assert code == 2 and f"{stopped} is in use by another process" in line
    (stopped / "lock").unlink()
    (stopped / "lock").mkdir()  # nobody can write to that
    code, line = refusal(capsys, *command)
    assert code == 2 and f"cannot write to {stopped}" in line
    assert contents(stopped) == before


GARBAGE = {
    "args.json": [b"\x00\x01", b"[]", b'{"seed": "ten"}'],
    "evaluations.csv": [b"step\nhello\n", b"step\n\xff\xfe,\n"],
    "state.npz": [b"PK"],
}


def test_garbage_in_the_folder_is_named(trained, stopped, capsys):
    for name, garbage in GARBAGE.items():
        good = (stopped / name).read_bytes()
        for content in garbage:
            (stopped / name).write_bytes(content)
            before = contents(stopped)
            code, line = refusal(capsys, resume, trained.name, stopped)
            assert code == 2 and (name in line or str(stopped) in line)
            after = contents(stopped)
            assert {**after, "args.json": b""} == {**before, "args.json": b""}
        (stopped / name).write_bytes(good)


def test_a_replay_is_neither_thrown_away_nor_believed(trained, stopped, capsys):
    if trained.name in OFFLINE:
        assert not (stopped / "replay.f32").exists()
        return
    good = (stopped / "replay.f32").read_bytes()
    rows = np.frombuffer(good, np.float32).copy()
    rows[5] = np.nan
    rows.tofile(stopped / "replay.f32")
    code, line = refusal(capsys, resume, trained.name, stopped)
    assert code == 2 and "replay.f32 holds NaN" in line
    (stopped / "state.npz").rename(stopped / "elsewhere")
    code, line = refusal(capsys, resume, trained.name, stopped)
    assert code == 2 and "no state.npz" in line
    assert (stopped / "replay.f32").stat().st_size == len(good)


def test_what_is_not_finite_stops_the_run_and_is_not_stored(trained, stopped, capsys, monkeypatch):
    step = Odd.step
    steps = iter(range(10_000))

    def breaks(self, action: np.ndarray) -> tuple:
        observation, *rest = step(self, action)
        return observation * (np.nan if next(steps) == 30 else 1), *rest  # the probe takes 21

    with monkeypatch.context() as patch:
        patch.setattr(Odd, "step", breaks)
        code, line = refusal(capsys, resume, trained.name, stopped)
    assert code == 2 and "observation at step" in line and "is not finite" in line
    resume(trained.name, stopped)
    assert numbers(stopped) == numbers(trained.finished)


def test_ctrl_c_twice_stops_within_a_step(trained, stopped, monkeypatch):
    step = Odd.step
    outside_of_runs = signal.getsignal(signal.SIGINT)

    def interrupted(self, action: np.ndarray) -> tuple:
        if signal.getsignal(signal.SIGINT) is not outside_of_runs:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one is heard at once")
        return step(self, action)

    before = numbers(stopped)
    monkeypatch.setattr(Odd, "step", interrupted)
    with pytest.raises(SystemExit) as caught:
        resume(trained.name, stopped)
    assert caught.value.code == 130
    assert numbers(stopped) == before


def test_a_full_disk_harms_nothing(trained, stopped, capsys, monkeypatch):
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    module = module_of(trained.name)

    def check_files(*names: str) -> None:
        for name in names:
            (stopped / f"{name}.partial").symlink_to("/dev/full")  # the kernel: no space left
            code, line = refusal(capsys, resume, trained.name, stopped)
            assert code == 1 and "No space left" in line and "--resume" in line, name
            assert not list(stopped.glob("*.partial"))

    check_files("args", "state")
    targets = ["tensorboardX.SummaryWriter.flush"]
    targets += [] if trained.name in OFFLINE else [f"{module.__name__}.append_rows"]
    for target in targets:
        with monkeypatch.context() as patch:
            patch.setattr(target, full)
            code, line = refusal(capsys, resume, trained.name, stopped)
        assert code == 1 and "No space left" in line, target
    check_files("agent", "evaluations")  # last, for until then such a run goes on
    resume(trained.name, stopped)
    assert numbers(stopped) == numbers(trained.finished)
