import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import minari
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import tiny_env  # noqa: E402, F401 (registers the environments)

# Compiling takes most of a small run's time. What one process has compiled is kept for all others:
# pytest's workers and the scripts that tests start inherit these variables. A folder that is given
# outlives the tests and makes the next ones faster.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# JAX does not write its files in one piece: what is half written, or was when a test killed its
# writer, is compiled again, and no test should find that on a script's stderr.
os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache entry")
assert "jax" not in sys.modules, "JAX has read these variables already"


def record_demonstrations(env_id: str, dataset_id: str, episodes: int = 6) -> None:
    """A noisy walk to the goal from the right side or from above, as a Minari dataset."""
    env = minari.DataCollector(gym.make(env_id), record_infos=True)
    rng = np.random.default_rng(0)
    for episode in range(episodes):
        env.reset(seed=episode)
        done = False
        while not done:
            direction = -env.unwrapped.position / max(np.abs(env.unwrapped.position).max(), 0.3)
            action = np.clip(direction + rng.normal(0, 0.3, 2), -1, 1).astype(np.float32)
            _, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
    env.create_dataset(dataset_id, eval_env=env_id)
    env.close()


@pytest.fixture(scope="session")
def datasets(tmp_path_factory) -> Path:
    """A Minari root with two small sets of demonstrations: no network, no files from elsewhere."""
    root = tmp_path_factory.mktemp("minari")
    patch = pytest.MonkeyPatch()
    patch.setenv("MINARI_DATASETS_PATH", str(root))
    record_demonstrations("Reach-v0", "tiny/reach/expert-v0")
    record_demonstrations("ReachDict-v0", "tiny/reachdict/expert-v0")
    yield root
    patch.undo()
