"""Fragments and columns for the tests of replay, the small buffer that they fill, and a handle that keeps them."""

from __future__ import annotations

import numpy as np

from brayx.replay.config import BufferConfig
from brayx.types import Columns, Fragment

CONFIG = BufferConfig(size=3, batch_size=2, unroll_length=4, max_in_flight=1)
WHOLE = 8
"""Number of transitions in one batch."""


def fragment(length: int, number: float = 0.0) -> Fragment:
    return Fragment(
        obs=np.full((length + 1, 2), number, np.float32),
        action=np.zeros(length, np.int64),
        log_prob=np.zeros(length, np.float32),
        reward=np.full(length, number, np.float32),
        terminated=True,
        truncated=False,
        policy_version=np.zeros(length, np.int64),
    )


def columns(rows: int, number: float = 0.0, version: int = 0) -> Columns:
    steps = (rows, CONFIG.unroll_length + 1)
    mask = np.ones(steps, np.float32)
    mask[:, -1] = 0
    return Columns(
        {
            "obs": np.full((*steps, 2), number, np.float32),
            "action": np.zeros(steps, np.int64),
            "log_prob": np.zeros(steps, np.float32),
            "reward": np.full(steps, number, np.float32),
            "terminated": np.zeros(steps, bool),
            "truncated": np.zeros(steps, bool),
            "mask": mask,
            "policy_version": np.full(steps, version, np.int64),
        }
    )


def changed(**options) -> BufferConfig:
    return BufferConfig(**{**CONFIG.model_dump(), **options})


class Box:
    """A buffer handle that keeps what is pushed."""

    def __init__(self) -> None:
        self.fragments: list[Fragment] = []

    def push(self, *fragments: Fragment) -> None:
        self.fragments.extend(fragments)
