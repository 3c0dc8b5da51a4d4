"""Steps per second of our desk and of the package's own environment without its image, side by side in one process.

    python benchmarks/desk_speed.py [--steps 1500]

Both take the same random actions from the same initial states, in alternating rounds; the time is CPU time, so that
what else the machine does matters less. Also says how far apart the two simulations end.
"""

import argparse
import contextlib
import io
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from robodesk_env import Desk  # noqa: E402


def make_package_desk(task: str):
    """The package's environment, its image left out."""
    with contextlib.redirect_stderr(io.StringIO()):  # the notice of the old gym
        from robodesk import RoboDesk

    class WithoutImage(RoboDesk):
        def render(self, mode="rgb_array", resize=True):
            return None

    return WithoutImage(task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="steps of each, in rounds of up to 500")
    steps = parser.parse_args().steps
    ours, theirs = Desk("open_slide", "upstream"), make_package_desk("open_slide")
    random, apart, seconds = np.random.default_rng(0), 0.0, {"package": 0.0, "ours": 0.0}
    for start in range(0, steps, 500):
        ours.reset(seed=start)
        theirs.reset()
        theirs.physics.reset()
        theirs.physics.data.qpos[:] = ours.data.qpos
        theirs.physics.forward()
        theirs.physics_copy.data.qpos[:] = ours.data.qpos
        actions = random.uniform(-1, 1, (min(500, steps - start), 5))
        for name, env in (("package", theirs), ("ours", ours)):
            began = time.process_time()
            for action in actions:
                env.step(action)
            seconds[name] += time.process_time() - began
        apart = max(apart, float(np.abs(ours.data.qpos - theirs.physics.data.qpos).max()))
    for name, total in seconds.items():
        print(f"{name:8} {steps / total:7.0f} steps/s")
    print(f"ratio    {seconds['package'] / seconds['ours']:7.2f}")
    print(f"largest difference of a position after a round: {apart:.1e}")


if __name__ == "__main__":
    main()
