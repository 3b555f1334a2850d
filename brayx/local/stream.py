"""The learner's batches from the buffers of its process, mixed by weight.

Knows nothing of what fills the buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from brayx.local.buffer import LocalBuffer
from brayx.replay.mix import Mix
from brayx.replay.packing import Batch

_LOOK_S = 0.5
"""Interval at which a wait checks its condition."""


class Batches:
    """An iterator of learner batches until all its buffers have ended.

    Args:
        buffers: the sources of batches.
        weights: share of each buffer, in proportion.
    """

    def __init__(self, buffers: Mapping[str, LocalBuffer], weights: Mapping[str, float]) -> None:
        self._given = 0
        self._buffers = dict(buffers)
        self._mix = Mix(weights)
        self._held: dict[str, Batch] = {}
        self._changed = threading.Event()
        self._stopped = False
        for buffer in buffers.values():
            buffer.changed = self._changed.set

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        """Waits for the next batch."""
        while not self._stopped:
            self._changed.clear()
            over = all(buffer.over for buffer in self._buffers.values())
            for name, buffer in self._buffers.items():
                if name not in self._held and (batch := buffer.pop()) is not None:
                    self._held[name] = batch
            if self._held:
                chosen = self._mix.choose(self._held)
                batch = self._buffers[chosen].importance.weigh(self._held.pop(chosen), self._given)
                self._given += 1
                return batch
            if over:
                break
            self._changed.wait(_LOOK_S)
        raise StopIteration

    def skip(self, batches: int) -> None:
        """Counts the batches of an interrupted training, so that importance weights continue from there."""
        self._given = batches

    def published(self, version: int) -> None:
        """Passes the newest policy version to the buffers."""
        for buffer in self._buffers.values():
            buffer.published(version)

    def update_priorities(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities ``[n]`` of columns, by the ``index`` ``[n]`` of their batch."""
        for buffer in self._buffers.values():
            buffer.update_priorities(index, priorities)

    def end(self) -> None:
        """Ends the streams of its buffers now. From any thread."""
        self._stopped = True
        for buffer in self._buffers.values():
            buffer.end()
