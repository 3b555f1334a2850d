"""Buffers, fragments of four steps for them, and what is in their batches."""

import numpy as np

from brayx.local.buffer import LocalBuffer
from brayx.metrics import Recorder
from brayx.replay.config import BufferConfig
from brayx.types import Fragment

T = 4


def fragment(value=0.0, version=1, steps=T):
    return Fragment(
        obs=np.full((steps + 1, 3), value, np.float32),
        action=np.zeros(steps, np.int64),
        log_prob=np.zeros(steps, np.float32),
        reward=np.full(steps, value, np.float32),
        terminated=True,
        truncated=False,
        policy_version=np.full(steps, version, np.int64),
    )


def made(**options):
    sink = Recorder()
    config = BufferConfig(**{"size": 2, "batch_size": 2, "unroll_length": T, **options})
    return LocalBuffer(config, None, sink), sink


def values(batch):
    return batch["reward"][:, 0].tolist()
