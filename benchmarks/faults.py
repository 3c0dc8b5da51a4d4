"""Kills training runs with -9 at random moments and resumes them: in the end nothing may differ from a run left alone.

    python benchmarks/faults.py                                    # every script, 30 kills each
    python benchmarks/faults.py --scripts aquadqn sac --kills 10
    python benchmarks/faults.py --soak                             # 24 hours in miniature: memory, handles, threads

Every second kill waits for a write: it comes when a `.partial` file appears or the replay grows. The others come at a
random moment. Whether one really hit a write is read from what it left on disk. Compared are all arrays (parameters,
optimiser, random keys, the environment's generator), the replay, the CSV files and TensorBoard's scalars, read as
TensorBoard reads them: what was logged after a restart replaces what was logged before from that step on. A run that
ends before it has had its kills is compared, and another one is begun. Prints a table; exit code 1 on any difference.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TASK = "--env-id tiny_env:Reach-v0 --eval-episodes 2 --batch-size 8 --seed 5 --quiet"
DATA = "--dataset-id tiny/reach/expert-v0"
STEPS = "--total-timesteps 2100 --eval-every 300 --learning-starts 100 --checkpoint-every 21"
GRADIENT_STEPS = "--gradient-steps 3000 --eval-every 500 --checkpoint-every 50"
CANDIDATES = (
    "--num-actions 2 --candidate-steps 10500"  # one checkpoint of their training, at 10,000
)
RUNS = {
    "aquadqn": f"aquadqn.py {TASK} {DATA} {STEPS} {CANDIDATES}",
    "aquagail": f"aquagail.py {TASK} {DATA} {STEPS} {CANDIDATES}",
    "aquaplay": "aquaplay.py --task open_slide --discretization bb2 --eval-episodes 1 --batch-size 8 --seed 5 --quiet"
    f" {STEPS}",
    "aquacql": f"aquacql.py {TASK} {DATA} {GRADIENT_STEPS} {CANDIDATES}",
    "bc": f"bc_mdn.py bc {TASK} {DATA} {GRADIENT_STEPS}",
    "mdn": f"bc_mdn.py mdn {TASK} {DATA} {GRADIENT_STEPS}",
    "sac": f"sac_baselines.py sac {TASK} {STEPS}",
    "sacfd": f"sac_baselines.py sacfd {TASK} {DATA} {STEPS}",
    "gail": f"sac_baselines.py gail {TASK} {DATA} {STEPS}",
}
SOAK = (
    "aquadqn.py --env-id tiny_env:Reach-v0 --dataset-id tiny/reach/expert-v0 --num-actions 4 --candidate-steps 1000"
    " --batch-size 16 --buffer-size 10000 --eval-every 5000 --eval-episodes 5 --checkpoint-every 1000 --quiet"
)
ONCE = {"candidates", "candidates_training", "reference"}  # files that a run writes only once
WALL_CLOCK = {"charts/SPS"}  # the only curve that may differ


class Setting(NamedTuple):
    source: Path  # folder of the scripts
    folder: Path  # where runs are made
    environment: dict[str, str]


class Kill(NamedTuple):
    hit: str | None  # the file whose write it interrupted


def make_setting(source: Path, folder: Path) -> Setting:
    """Demonstrations made on the fly, and a compilation cache so that resuming is quick."""
    environment = {
        **os.environ,
        "MINARI_DATASETS_PATH": str(folder / "minari"),
        "PYTHONPATH": os.pathsep.join([str(source / "tests"), str(source)]),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "jax"))
    (folder / "minari").mkdir()
    record = "import conftest; conftest.record_demonstrations('Reach-v0', 'tiny/reach/expert-v0')"
    subprocess.run([sys.executable, "-c", record], env=environment, check=True)
    return Setting(source, folder, environment)


def start(setting: Setting, folder: Path, words: list[str]) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(setting.source / words[0]), *words[1:]]
    with (folder / "stderr").open("w") as errors:
        return subprocess.Popen(
            command, cwd=folder, env=setting.environment, stdout=subprocess.DEVNULL, stderr=errors
        )


def failure(folder: Path) -> str:
    lines = (folder / "stderr").read_text().splitlines() or ["no message"]
    return f"ended by itself: {lines[-1][:200]}"


def busy_seconds(process: subprocess.Popen) -> float:
    """Processor time so far: the moments of kills then do not depend on what else the machine does."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def find_run(folder: Path) -> Path | None:
    """The run folder, once it can be resumed."""
    runs = sorted(folder.glob("runs/*/args.json"))
    return runs[-1].parent if runs else None


# ------------------------------------------------------------------------------------- comparing


def merged_scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), restart after restart: a step seen again replaces it and all after it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(run.glob("events.out.tfevents*")):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for tag in set(events.Tags()["scalars"]) - WALL_CLOCK:
            curve = curves.setdefault(tag, [])
            for event in events.Scalars(tag):
                while curve and curve[-1][0] >= event.step:
                    curve.pop()
                curve.append((event.step, event.value))
    return curves


def differences(run: Path, reference: Path) -> list[str]:
    """Names of the files and curves that are not the same to the last bit."""
    found = []
    names = {
        path.name for folder in (run, reference) for path in folder.iterdir() if path.is_file()
    }
    names = {name for name in names if not name.startswith("events.out")}
    for name in sorted(names):
        one, other = run / name, reference / name
        if not (one.exists() and other.exists()):
            found.append(f"{name} in one only")
        elif name.endswith(".npz"):
            with np.load(one) as ours, np.load(other) as theirs:
                same = ours.files == theirs.files and all(
                    ours[key].tobytes() == theirs[key].tobytes() for key in ours.files
                )
            if not same:
                found.append(name)
        elif one.read_bytes() != other.read_bytes():
            found.append(name)
    ours, theirs = merged_scalars(run), merged_scalars(reference)
    found += [
        f"TensorBoard {tag}" for tag in sorted({*ours, *theirs}) if ours.get(tag) != theirs.get(tag)
    ]
    return found


# --------------------------------------------------------------------------------------- killing


def changed_at(path: Path) -> tuple[int, int]:
    """Time of the last change in nanoseconds, and size; zeros if it is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def being_written(run: Path, name: str, since: int, whole_replay: int) -> bool:
    """Is there a half of this file, or of the replay, that the present process has made?"""
    if changed_at(run / f"{name}.partial")[0] > since:
        return True
    if name != "replay":
        return False
    changed, size = changed_at(run / "replay.f32")
    return changed > since and size > whole_replay


def checkpoint_step(run: Path) -> int:
    if not (run / "state.npz").exists():
        return 0
    with np.load(run / "state.npz") as file:
        return json.loads(file["meta"].tobytes())["step"]


def files_to_hit(run: Path | None, names: list[str]) -> list[str]:
    """Those whose write is still to come."""
    if run is None:
        return ["args"]
    written = {name for name in ONCE if (run / f"{name}.npz").exists()}
    if "candidates" in written:
        written.add("candidates_training")
    if (set(names) & ONCE) - written - {"reference"}:
        return [name for name in names if name in {"args", *ONCE} - written]
    return [name for name in names if name not in written]


def kill_at_a_write(
    process: subprocess.Popen,
    folder: Path,
    name: str,
    times: int,
    since: int,
    whole: int,
    patience: float,
) -> None:
    """Kills when that file is being written for that many times; or out of patience, if it was missed."""
    before = False
    while process.poll() is None:
        if busy_seconds(process) > patience:
            process.send_signal(signal.SIGKILL)
            return
        run = find_run(folder) or next(iter(folder.glob("runs/*")), None)
        now = run is not None and being_written(run, name, since, whole)
        if now and not before:
            times -= 1
            if times == 0:
                process.send_signal(signal.SIGKILL)
                return
            if name == "replay":
                whole = changed_at(run / "replay.f32")[1]
                now = False
        before = now
        time.sleep(0.0002)


def kill_at_a_time(process: subprocess.Popen, seconds: float) -> None:
    while process.poll() is None:
        if busy_seconds(process) > seconds:
            process.send_signal(signal.SIGKILL)
            return
        time.sleep(0.01)


def torment(name: str, words: list[str], setting: Setting, kills: int, say: Callable) -> str:
    """The row of one script."""
    random = np.random.default_rng(sum(name.encode()))
    home = setting.folder / f"{name}_alone"
    process = start(setting, home, words)
    startup = total = 0.0
    while process.poll() is None:
        total = max(total, busy_seconds(process))
        if find_run(home) is None:
            startup = total
        time.sleep(0.01)
    if process.wait():
        return f"| {name} | 0 | 0 | | 0 | {failure(home)} |"
    work = total - startup
    reference = find_run(home)
    last_step = checkpoint_step(reference)
    row_size = changed_at(reference / "replay.f32")[1] // max(last_step, 1)
    names = [path.stem for path in sorted(reference.iterdir()) if path.suffix in (".npz", ".csv")]
    names += ["args"]
    names += ["candidates_training"] if "candidates" in names else []
    names += ["replay"] if row_size else []
    say(f"{name}: alone {startup:.0f} + {work:.0f} s of processor time; writes {names}")

    done: list[Kill] = []
    found: list[str] = []
    runs = resumes = 0
    while len(done) < kills and not found:
        runs += 1
        folder = setting.folder / f"{name}_{runs}"
        ended = False
        while not ended:
            run = find_run(folder)
            resumes += run is not None
            step = checkpoint_step(run) if run else 0
            whole = step * row_size
            since = time.time_ns()
            rest = ["--resume", str(run), "--quiet"] if run else words[1:]
            if run and words[1][:2] != "--":
                rest = [words[1], *rest]
            process = start(setting, folder, [words[0], *rest])
            goal = "the end"
            if len(done) < kills and len(done) % 2:
                goal = str(random.choice(files_to_hit(run, names)))
                times = int(random.integers(1, 4)) if goal in ("state", "replay") else 1
                patience = 2 * startup + work / 4
                kill_at_a_write(process, folder, goal, times, since, whole, patience)
            elif len(done) < kills:
                seconds = random.uniform(0, 1.5 * startup + 2 * work / kills)
                goal = f"{seconds:.1f} s"
                kill_at_a_time(process, seconds)
            code = process.wait()
            run = find_run(folder)
            if code == -signal.SIGKILL:
                whole = checkpoint_step(run) * row_size if run else 0
                place = run or next(iter(folder.glob("runs/*")), folder)
                hits = [n for n in names if being_written(place, n, since, whole)]
                done.append(Kill(hits[0] if hits else None))
                reached = checkpoint_step(run) if run else 0
                say(f"{name}: kill {len(done)}, aimed at {goal}, hit {hits}, step {reached}")
            elif code:
                found.append(failure(folder))
                ended = True
            else:
                found += differences(run, reference)
                ended = True
    hits = Counter(kill.hit for kill in done if kill.hit)
    inside = ", ".join(f"{n} {count}" for n, count in sorted(hits.items()))
    result = "identical" if not found else "; ".join(found)
    return f"| {name} | {runs} | {len(done)} | {sum(hits.values())} ({inside}) | {resumes} | {result} |"


# ------------------------------------------------------------------------------------------ soak


def soak(setting: Setting, steps: int, say: Callable) -> bool:
    """Memory, file handles and threads of one run, as it goes: flat from 20 percent on?"""
    folder = setting.folder / "soak"
    words = [*SOAK.split(), "--total-timesteps", str(steps)]
    process = start(setting, folder, words)
    began = time.monotonic()
    samples: list[tuple[float, float, int, int]] = []
    row_size = 4 * (4 + 4 + 4)  # of the tiny environment's transition in replay.f32
    while process.poll() is None:
        run = find_run(folder)
        step = changed_at(run / "replay.f32")[1] / row_size if run else 0
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            handles = len(os.listdir(f"/proc/{process.pid}/fd"))
            # Its own memory: the kernel takes pages of files (libraries) back when it likes.
            megabytes = float(fields["RssAnon"].split()[0]) / 1024
        except (FileNotFoundError, KeyError, PermissionError):
            break  # it has just ended
        samples.append((step / steps, megabytes, handles, int(fields["Threads"])))
        time.sleep(1.0)
    if process.wait():
        print(failure(folder))
        return False
    table = np.array(samples)
    minutes = (time.monotonic() - began) / 60
    say(f"{len(table)} samples in {minutes:.1f} minutes")
    begin = table[(table[:, 0] >= 0.2) & (table[:, 0] < 0.25)]
    end = table[table[:, 0] >= 0.95]
    print(f"{steps} steps in {minutes:.1f} minutes: python {' '.join(words)}\n")
    print("| median of | 20 to 25 percent | 95 to 100 percent | growth |\n|---|---|---|---|")
    flat = True
    for column, what in enumerate(["memory, MB", "file handles", "threads"], start=1):
        first, last = np.median(begin[:, column]), np.median(end[:, column])
        growth = last / first - 1
        flat &= growth < 0.02
        print(f"| {what} | {first:.1f} | {last:.1f} | {growth:+.2%} |")
    return bool(flat)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--kills", type=int, default=30, help="of every script")
    parser.add_argument("--soak", action="store_true", help="one long run instead of kills")
    parser.add_argument("--soak-steps", type=int, default=200_000)
    parser.add_argument("--source", type=Path, default=ROOT, help="folder of the scripts")
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: a temporary one")
    args = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        setting = make_setting(args.source.resolve(), folder)
        if args.soak:
            sys.exit(0 if soak(setting, args.soak_steps, say) else 1)
        print("| run | runs | kills | inside a write | resumes | in the end |")
        print("|---|---|---|---|---|---|", flush=True)
        rows = []
        for name in args.scripts:
            rows.append(torment(name, RUNS[name].split(), setting, args.kills, say))
            print(rows[-1], flush=True)
    sys.exit(0 if all(row.endswith("| identical |") for row in rows) else 1)


if __name__ == "__main__":
    main()
