"""What sweep.py loses when something is killed: trials, a Ray worker, the driver, a machine of a cluster.

    python benchmarks/sweep_faults.py                    # all of it
    python benchmarks/sweep_faults.py workers machine    # some of it

A sweep of 12 tiny trials, two at a time, first undisturbed. Then the same sweep again, disturbed:

    workers   kill -9 of a trial's process, and of the Ray worker of another trial
    driver    kill -9 of sweep.py in the middle, then `sweep.py restore`
    ctrl-c    the same with Ctrl-C
    machine   two Ray nodes, each started with `ray start`; the one that joined is killed in the middle

Every disturbed sweep has to end with 12 rows, and each of its runs to equal the undisturbed one bit for bit. A last
table is what the sweep costs beside its trials.
"""

import argparse
import csv
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import sweep  # noqa: E402

TRIALS = 12
PATIENCE = 1800  # seconds
TINY = """--dataset-id tiny/reach/expert-v0 --candidate-steps 500 --eval-every 200
 --eval-episodes 3 --learning-starts 50 --checkpoint-every 100 --num-actions 4 --batch-size 32""".split()
EQUAL_BYTES = ("evaluations.csv", "replay.f32")
EQUAL_ARRAYS = ("candidates.npz", "agent.npz", "state.npz")


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"waited {PATIENCE} s in vain until {what}")
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------- processes


def read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third one on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(pid: int) -> int:
    fields = read_stat(pid)
    return int(fields[1]) if fields else 0


def descendants(ancestor: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    parents = {pid: parent_of(pid) for pid in pids}
    found = [ancestor]
    for pid in found:  # it grows on the way
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def processor_seconds(pid: int) -> float:
    fields = read_stat(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def kill(*pids: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


# ------------------------------------------------------------------------------------------- sweeps


class Driver:
    """A process of sweep.py, its output in a file beside the sweep's folder."""

    def __init__(self, folder: Path, *words: str):
        self.folder = folder
        self.log = folder.with_suffix(".log")
        command = [sys.executable, str(ROOT / "sweep.py"), *words]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @classmethod
    def start(cls, folder: Path, *options: str, steps: int = 600) -> "Driver":
        where = ["--env-id", "tiny_env:Reach-v0", "--storage-path", str(folder)]
        number = ["--num-seeds", str(TRIALS), "--max-concurrent", "2"]
        return cls(
            folder,
            "seeds",
            "aquadqn",
            *where,
            *number,
            *options,
            "--",
            *TINY,
            "--total-timesteps",
            str(steps),
        )

    def trial(self, index: int) -> Path:
        return sweep.trial_folder(self.folder, index)

    def wait_for_checkpoint(self, index: int) -> None:
        """A kill is in the middle of training if it comes right after."""

        def has_one() -> bool:
            if self.process.poll() is not None:
                sys.exit(f"sweep.py has ended too early:\n{self.log.read_text()}")
            return bool(list(self.trial(index).glob("runs/*/state.npz")))

        wait_until(has_one, f"trial {index} writes a checkpoint")

    def pid_of(self, index: int) -> int:
        return int((self.trial(index) / "attempts.txt").read_text().split()[-1])

    def finish(self) -> int:
        return self.process.wait(PATIENCE)


def equal_runs(ours: Path, theirs: Path) -> bool:
    for name in EQUAL_BYTES:
        if (ours / name).read_bytes() != (theirs / name).read_bytes():
            return False
    for name in EQUAL_ARRAYS:
        with np.load(ours / name) as our_arrays, np.load(theirs / name) as their_arrays:
            if our_arrays.files != their_arrays.files:
                return False
            for key in our_arrays.files:
                if our_arrays[key].tobytes() != their_arrays[key].tobytes():
                    return False
    return True


def compare(what: str, folder: Path, undisturbed: Path, exit_code: int) -> bool:
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    done = [row for row in rows if row["status"] == "done"]
    again = {int(row["trial"]): row["attempts"] for row in rows if row["attempts"] != "1"}
    equal = 0
    for row in done:
        index = int(row["trial"])
        ours = sweep.find_run(sweep.trial_folder(folder, index))
        theirs = sweep.find_run(sweep.trial_folder(undisturbed, index))
        equal += equal_runs(ours, theirs)
    print(f"{what}: exit code {exit_code}, {len(rows)} rows, {len(done)} done, {equal} equal to")
    print(
        f"    the undisturbed ones bit for bit; attempts of trials tried again: {again or 'none'}"
    )
    return exit_code == 0 and len(rows) == len(done) == equal == TRIALS


# ------------------------------------------------------------------------------------------- faults


def kill_workers(folder: Path) -> int:
    driver = Driver.start(folder)
    driver.wait_for_checkpoint(0)
    kill(driver.pid_of(0))
    print("    killed the process of trial 0")
    driver.wait_for_checkpoint(3)
    kill(parent_of(driver.pid_of(3)))
    print("    killed the Ray worker of trial 3")
    return driver.finish()


def ended_trials(folder: Path) -> dict[Path, int]:
    """When each of them ended: what is repeated has another time."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("trials/*/outcome.json")}


def restore(folder: Path) -> int:
    before = ended_trials(folder)
    print(f"    {len(before)} trials had ended; restored")
    code = Driver(folder, "restore", str(folder)).finish()
    after = ended_trials(folder)
    repeated = sum(after[path] != before[path] for path in before)
    print(f"    {repeated} of the ended trials were repeated")
    return code or repeated


def kill_driver(folder: Path) -> int:
    driver = Driver.start(folder)
    driver.wait_for_checkpoint(4)
    running = descendants(driver.process.pid)
    kill(driver.process.pid)
    driver.process.wait()
    wait_until(lambda: not any(map(read_stat, running)), "all of Ray has ended by itself")
    print("    killed sweep.py; Ray and the trials ended with it")
    return restore(folder)


def interrupt_driver(folder: Path) -> int:
    driver = Driver.start(folder)
    driver.wait_for_checkpoint(4)
    os.killpg(driver.process.pid, signal.SIGINT)  # as a terminal does
    code = driver.finish()
    print(f"    Ctrl-C: exit code {code}, {driver.log.read_text().splitlines()[-1]!r}")
    return restore(folder)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ray_node(*words: str) -> subprocess.Popen:
    ray = str(Path(sys.executable).with_name("ray"))
    common = ["--num-cpus", "1", "--node-ip-address", "127.0.0.1", "--block"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([ray, "start", *words, *common], start_new_session=True, **quiet)


def kill_machine(folder: Path) -> int:
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    scratch = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need a short path
    address = f"127.0.0.1:{free_port()}"
    ports = ["--min-worker-port", "21000", "--max-worker-port", "21999"]
    first = ["--head", "--port", address.rpartition(":")[2], "--include-dashboard", "false"]
    head = ray_node(*first, "--temp-dir", str(scratch), *ports)
    time.sleep(20)
    ports = ["--min-worker-port", "22000", "--max-worker-port", "22999"]
    joined = ray_node("--address", address, *ports)
    nodes = [head, joined]
    try:
        driver = Driver.start(folder, "--address", address)
        driver.wait_for_checkpoint(4)
        driver.wait_for_checkpoint(5)
        theirs = descendants(joined.pid)
        lost = [index for index in range(TRIALS) if runs_in(driver.trial(index), theirs)]
        kill(joined.pid, *theirs)
        print(f"    killed the second node, {len(theirs)} processes, on it trials {lost}")
        return driver.finish()
    finally:
        for node in nodes:
            kill(node.pid, *descendants(node.pid))
            node.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def runs_in(trial: Path, pids: list[int]) -> bool:
    attempts = trial / "attempts.txt"
    return attempts.exists() and int(attempts.read_text().split()[-1]) in pids


FAULTS = {
    "workers": kill_workers,
    "driver": kill_driver,
    "ctrl-c": interrupt_driver,
    "machine": kill_machine,
}


# --------------------------------------------------------------------------------------------- cost


def undisturbed_sweep(folder: Path) -> None:
    driver = Driver.start(folder)
    if driver.finish():
        sys.exit(driver.log.read_text())


def report_start(folder: Path) -> None:
    """Between the end of a trial and the start of the next in its place: what a sweep adds."""
    starts = []
    ends = []
    for index in range(TRIALS):
        trial = sweep.trial_folder(folder, index)
        starts.append(float((trial / "attempts.txt").read_text().split()[0]))
        ends.append((trial / "outcome.json").stat().st_mtime)
    lengths = [end - start for start, end in zip(starts, ends)]
    # Two at a time: the third trial takes the place of the one that ended first, and so on.
    gaps = [start - end for start, end in zip(sorted(starts)[2:], sorted(ends))]
    gap = statistics.median(gaps) + sweep.POLL_SECONDS
    print(f"undisturbed: a trial takes {statistics.median(lengths):.1f} s (median of {TRIALS});")
    print(
        f"    from its end, which is seen within {sweep.POLL_SECONDS} s, to the start of the next"
    )
    print(
        f"    {gap:.1f} s (median, from {min(gaps):.1f} to {max(gaps):.1f}): {gap / 600:.1%} of 10 minutes"
    )


def report_work(folder: Path, seconds: float = 60.0) -> None:
    """The processor time of Ray and of sweep.py while a trial is running."""
    driver = Driver.start(folder, "--num-seeds", "1", steps=10_000_000)
    driver.wait_for_checkpoint(0)
    pids = [driver.process.pid, *descendants(driver.process.pid)]
    trial = driver.pid_of(0)
    before = {pid: processor_seconds(pid) for pid in pids}
    time.sleep(seconds)
    spent = {pid: processor_seconds(pid) - before[pid] for pid in pids}
    worker = spent[parent_of(trial)]
    others = sum(spent.values()) - spent[trial] - worker
    kill(driver.process.pid)
    print(
        f"processor time in {seconds:.0f} s of a running trial: its Ray worker {worker:.2f} s, which"
    )
    print(
        f"    is {worker / seconds:.1%} of a core; all other processes of Ray and sweep.py {others:.2f} s"
    )
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", default=list(FAULTS), help=", ".join(FAULTS))
    parser.add_argument("--folder", type=Path, help="to keep the sweeps; default: a temporary one")
    options = parser.parse_args()
    unknown = set(options.faults) - set(FAULTS)
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}")
    folder = (options.folder or Path(tempfile.mkdtemp())).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["MINARI_DATASETS_PATH"] = str(folder / "minari")
    os.environ["PYTHONPATH"] = str(ROOT / "tests")
    os.environ["RAY_worker_niceness"] = "0"  # Ray's 15 starves the trials on a busy machine
    undisturbed = folder / "undisturbed"
    if not (undisturbed / "sweep.csv").exists():
        from conftest import record_demonstrations

        record_demonstrations("Reach-v0", "tiny/reach/expert-v0")
        undisturbed_sweep(undisturbed)
    report_start(undisturbed)
    report_work(folder / "long")
    passed = []
    for name in options.faults:
        print(f"{name}:")
        exit_code = FAULTS[name](folder / name)
        passed.append(compare(name, folder / name, undisturbed, exit_code))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
