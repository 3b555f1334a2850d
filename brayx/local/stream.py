"""The learner's batches from the buffers of its process, mixed by weight.

Knows nothing of what fills the buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np

from brayx.local.buffer import LocalBuffer
from brayx.replay.mix import StreamMix
from brayx.replay.packing import Batch
from brayx.replay.waiters import Waiters

_LOOK_S = 0.5
"""Interval at which a wait checks its condition."""
_PAUSE_S = 0.005
"""Pause of a thread that pushes faster than the learner learns, and the least time between two pauses."""


class Batches:
    """An iterator of learner batches until all its buffers have ended.

    Args:
        buffers: the sources of batches.
        weights: share of each buffer, in proportion.
    """

    def __init__(self, buffers: Mapping[str, LocalBuffer], weights: Mapping[str, float]) -> None:
        self._given = 0
        self._buffers = dict(buffers)
        self._mix = StreamMix(weights)
        self._held: dict[str, Batch] = {}
        self._changed = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._paused_until = 0.0
        self._waiters = Waiters(self._is_ahead)
        self._stopped = False
        for buffer in buffers.values():
            buffer.changed, buffer.behind = self._changed.set, self._pause

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        """Waits for the next batch."""
        self._idle.set()
        while not self._stopped:
            self._changed.clear()
            over = all(buffer.over for buffer in self._buffers.values())
            for name, buffer in self._buffers.items():
                if name not in self._held and (batch := buffer.pop()) is not None:
                    self._held[name] = batch
            self._waiters.wake()
            if self._held:
                chosen = self._mix.choose(self._held)
                batch = self._buffers[chosen].importance.weigh(self._held.pop(chosen), self._given)
                self._given += 1
                self._idle.clear()
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
        self._idle.set()
        for buffer in self._buffers.values():
            buffer.end()
        self._waiters.wake()

    async def caught_up(self, timeout_s: float) -> None:
        """Waits while the learner has a whole batch to take, at most ``timeout_s``. From any event loop.

        A game that plays on meanwhile takes CPU from the learner, for data that would be old or dropped.
        """
        await self._waiters.wait(timeout_s)

    def _is_ahead(self) -> bool:
        return not self._stopped and any(buffer.is_ahead for buffer in self._buffers.values())

    def _pause(self) -> None:
        """Pauses a thread that pushes more than is learned from, so that an update gets the interpreter.

        Otherwise an event loop at full load takes the interpreter's lock back at every operation of the update, which
        then takes twenty times as long, and most of the data played meanwhile is dropped.
        """
        now = time.monotonic()
        if now - self._paused_until >= _PAUSE_S and not self._idle.is_set():
            self._idle.wait(_PAUSE_S)
            self._paused_until = time.monotonic()
