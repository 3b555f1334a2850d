"""Games, keepers and recorded episodes that the trainings of these tests share."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

QUICK = {"num_envs": 4, "unroll_length": 8, "num_steps": 200, "engine": "torch"}


class Right(gymnasium.Env):
    """Rewards the second action, in episodes of five."""

    observation_space = gymnasium.spaces.Discrete(5)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self._at = 0
        return 0, {}

    def step(self, action):
        self._at += 1
        return self._at % 5, float(action), self._at >= 5, False, {}


class Odd(Right):
    """Rewards the second action where the observation is odd, and the first elsewhere."""

    stepped = 0

    def step(self, action):
        Odd.stepped += 1
        right = int(action) == self._at % 2
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(right), terminated, truncated, info


def written(path: Path, episodes: int = 40, **other: np.ndarray) -> Path:
    """A file of what plays `Odd` perfectly, with ``other`` arrays in place of its own."""
    obs = np.tile(np.arange(5), episodes)
    steps = {"obs": obs, "action": obs % 2, "reward": np.ones(len(obs)), "terminated": obs == 4}
    np.savez(path, **{**steps, **other})
    return path


TABLE = {"sampler": "uniform", "batch_size": 8, "min_columns": 16, "samples_per_insert": 4.0}


class Kept:
    """Keeps the newest checkpoint in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoint"

    def push(self, part: object) -> None:
        """Ignored."""

    def check(self) -> None:
        """Reports no error."""

    def best(self) -> Path | None:
        """It keeps no other."""
        return None

    def latest(self) -> Path | None:
        return self.folder if self.folder.exists() else None

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(folder, self.folder)


class Shown(gymnasium.Env):
    """Its observations are samples of its space; its reward is an argument."""

    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def __init__(self, space: Any = gymnasium.spaces.Box(-1, 1, (3,)), reward: float = 1.0) -> None:
        self.observation_space, self._reward = space, reward

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._at = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self._at += 1
        return self.observation_space.sample(), self._reward, self._at == 5, False, {}
