"""Golden runs: short runs of every script and mode, and a digest of all that they leave behind.

    python benchmarks/golden.py before.json                        # at the old commit
    python benchmarks/golden.py after.json --compare before.json   # at the new one: the same bits?

On one core of one machine (`taskset -c 0`) equal code gives equal digests. Needs no network: the environment and the
demonstrations are those of the tests.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
COMMON = "--eval-episodes 3 --batch-size 16 --seed 5 --quiet"
TASK = f"--env-id tiny_env:Reach-v0 --dataset-id tiny/reach/expert-v0 {COMMON}"
STEPS = "--total-timesteps 630 --eval-every 210 --learning-starts 100 --checkpoint-every 200"
CANDIDATES = "--num-actions 4 --candidate-steps 700"
OFFLINE = "--gradient-steps 400 --eval-every 200 --checkpoint-every 150"
RUNS = {
    "dqn": f"aquadqn.py {TASK} {STEPS} {CANDIDATES}",
    "dqn, the paper's": f"aquadqn.py {TASK} {STEPS} {CANDIDATES} --temperature-start 0.001 --ema-decay 0",
    "dqn, double": f"aquadqn.py {TASK} {STEPS} {CANDIDATES} --q-loss double --held-out-episodes 2",
    "dqn, dense": f"aquadqn.py {TASK} {STEPS} {CANDIDATES} --q-loss dqn --reward env --min-demo-reward None",
    "dqn, kmeans": f"aquadqn.py {TASK} {STEPS} {CANDIDATES} --candidates kmeans",
    "gail": f"aquagail.py {TASK} {STEPS} {CANDIDATES}",
    "gail, weight decay": f"aquagail.py {TASK} {STEPS} {CANDIDATES} --n-step 3 --reward-balance 0"
    " --discriminator-input state-next-state --discriminator-regularization weight-decay",
    "gail, actions": f"aquagail.py {TASK} {STEPS} {CANDIDATES} --discriminator-input state-action"
    " --discriminator-regularization none --discriminator-layers 2 --no-normalize-observations",
    "play, bang-bang": f"aquaplay.py --task open_slide --discretization bb2 {STEPS} {COMMON}",
    "cql": f"aquacql.py {TASK} {CANDIDATES} {OFFLINE}",
    "cql, two seeds": f"aquacql.py {TASK} {CANDIDATES} {OFFLINE} --num-seeds 2 --cql-alpha 0",
    "bc": f"bc_mdn.py bc {TASK} {OFFLINE}",
    "mdn": f"bc_mdn.py mdn {TASK} {OFFLINE}",
    "sac": f"sac_baselines.py sac --env-id tiny_env:Reach-v0 {STEPS} {COMMON}",
    "sacfd": f"sac_baselines.py sacfd {TASK} {STEPS}",
    "gail, on sac": f"sac_baselines.py gail {TASK} {STEPS}",
}


@dataclasses.dataclass
class Options:
    out: Annotated[Path, tyro.conf.Positional]
    """JSON file for the digests"""
    compare: Path | None = None
    """an earlier one: says what differs, and ends with 1 if anything does"""
    only: list[str] | None = None
    """names of runs; default: all"""


def digest(run: Path) -> dict[str, str]:
    """Of arrays, replay and curve. Arguments, times and TensorBoard's files are left out."""
    found = {}
    for path in sorted(run.iterdir()):
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                content = b"".join(file[name].tobytes() for name in file.files if name != "meta")
        elif path.suffix in (".f32", ".csv"):
            content = path.read_bytes()
        else:
            continue
        found[path.name] = hashlib.sha256(content).hexdigest()[:16]
    return found


def record_demonstrations(environment: dict[str, str]) -> None:
    code = "import conftest; conftest.record_demonstrations('Reach-v0', 'tiny/reach/expert-v0')"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "MINARI_DATASETS_PATH": str(Path(folder, "minari")),
            "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}",
        }
        record_demonstrations(environment)
        for name in options.only or RUNS:
            script, *words = RUNS[name].split()
            place = Path(folder, name)
            place.mkdir()
            command = [sys.executable, str(ROOT / script), *words]
            subprocess.run(command, cwd=place, env=environment, check=True)
            (run,) = (place / "runs").iterdir()
            digests[name] = digest(run)
            print(name, *digests[name].values())
    options.out.write_text(json.dumps(digests, indent=1))
    if options.compare is None:
        return
    before = json.loads(options.compare.read_text())
    differing = [name for name in digests if digests[name] != before.get(name)]
    print("differing:", ", ".join(differing) or "none")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
