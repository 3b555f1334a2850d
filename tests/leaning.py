"""Recorded games for tests that imitate."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from brayx.replay.files import Dataset


def leaning(path: Path) -> Dataset:
    """Games of a policy that pushes CartPole's cart towards where the pole leans, as a file ``path``."""
    lean = np.random.default_rng(0).uniform(-0.2, 0.2, (500, 4)).astype(np.float32)
    ended = np.arange(500) % 50 == 49
    steps = {"action": (lean[:, 2] + lean[:, 3] > 0).astype(np.int64), "reward": np.ones(500), "terminated": ended}
    np.savez(path, obs=lean, **steps)
    return Dataset(path)
