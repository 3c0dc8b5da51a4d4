"""Environments that misbehave, registered when imported as `odd_env:...`; `kind` says how."""

from typing import Any

import gymnasium as gym
import numpy as np
from tiny_env import Reach

BROKEN_STEP = 8


class Odd(Reach):
    """Reach with something wrong."""

    def __init__(self, kind: str, render_mode: str | None = None):
        super().__init__(render_mode)
        self.kind = kind
        if kind == "float64":
            self.action_space = gym.spaces.Box(-0.1, 0.1, (2,), np.float64)
        elif kind == "integer":
            self.action_space = gym.spaces.Box(-1, 1, (2,), np.int64)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.steps = 0
        if self.kind == "task before seed":
            drawn = self.np_random.uniform(-1, 1, 2)  # as Meta-World does
            super().reset(seed=seed)
            self.position = drawn
            return self.observe(), {}
        observation, info = super().reset(seed=seed)
        if self.kind == "reset shape":
            observation = observation[:3]
        if self.kind == "reset NaN":
            observation = observation * np.nan
        if self.kind == "reset fails":
            raise RuntimeError("no such\ntask")
        return observation, info

    def step(self, action: np.ndarray) -> tuple:
        observation, reward, terminated, truncated, info = super().step(action)
        self.steps += 1
        broken = self.steps >= BROKEN_STEP
        changes: dict[str, Any] = {
            "reward shape": dict(reward=np.ones(1)),
            "step shape": dict(observation=observation[:2]),
            "step NaN": dict(observation=observation * np.nan),
            "reward infinite": dict(reward=np.inf),
            "no success": dict(info={}),
        }
        new = changes.get(self.kind, {}) if broken else {}
        if self.kind == "step fails" and broken:
            raise ValueError("out of\nwater")
        return (
            new.get("observation", observation),
            new.get("reward", reward),
            terminated,
            truncated,
            new.get("info", info),
        )


gym.register("Odd-v0", entry_point="odd_env:Odd", max_episode_steps=21)
gym.register("Endless-v0", entry_point="tiny_env:Reach")
