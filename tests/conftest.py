import sys
from pathlib import Path

import gymnasium as gym
import minari
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import tiny_env  # noqa: E402, F401 (registers the environments)


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
