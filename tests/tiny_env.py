"""A point on a plane that has to reach the origin: small, fast, and registered when imported as `tiny_env:...`."""

import gymnasium as gym
import numpy as np


class Reach(gym.Env):
    """Observation: position and the vector to the goal. Action: a step. Success within 0.2 of the origin."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None, dictionary: bool = False):
        self.render_mode, self.dictionary = render_mode, dictionary
        vector = gym.spaces.Box(-10, 10, (2,), np.float64)
        flat = gym.spaces.Box(-10, 10, (4,), np.float64)
        self.observation_space = (
            gym.spaces.Dict(position=vector, goal=vector) if dictionary else flat
        )
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def observe(self) -> np.ndarray | dict:
        if self.dictionary:
            return {"position": self.position.copy(), "goal": -self.position}
        return np.concatenate([self.position, -self.position])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-1, 1, 2)
        return self.observe(), {"success": False}

    def step(self, action: np.ndarray) -> tuple:
        assert self.action_space.contains(action), action
        self.position = np.clip(
            self.position + 0.3 * action + self.np_random.normal(0, 0.01, 2), -5, 5
        )
        success = bool(np.linalg.norm(self.position) < 0.2)
        terminated = bool(np.abs(self.position).max() > 4)
        return (
            self.observe(),
            -float(np.linalg.norm(self.position)),
            terminated,
            False,
            {"success": success},
        )

    def render(self) -> np.ndarray:
        picture = np.full((64, 64, 3), 255, np.uint8)
        x, y = np.clip((self.position * 12 + 32).astype(int), 1, 62)
        picture[y - 1 : y + 2, x - 1 : x + 2] = 0
        return picture


gym.register(
    "Reach-v0", entry_point="tiny_env:Reach", max_episode_steps=21
)  # not a multiple of the update block
gym.register(
    "ReachDict-v0", entry_point="tiny_env:Reach", max_episode_steps=21, kwargs={"dictionary": True}
)
