"""Wait and duration of ticks, recorded in batches: a record for each tick would cost measurable throughput."""

from __future__ import annotations

from brayx.metrics import Recorder

_LOT = 256
_SAMPLED = 8
"""Sample the wait of one tick in eight: recording every wait costs measurable throughput."""


class TickTimes:
    """The times of a table's ticks.

    Args:
        recorder: gets a batch when it is full, and at each `flush`.
    """

    __slots__ = ("_recorder", "_seconds", "_since_sample")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seconds: list[float] = []
        self._since_sample = 0

    def add(self, arrived: float, began: float, ended: float) -> None:
        """Adds an answered tick; times in seconds of `brayx.clock`."""
        self._since_sample += 1
        if self._since_sample == _SAMPLED:
            self._since_sample = 0
            self._recorder.add("tick_wait_seconds", began - arrived, weight=_SAMPLED)
        self._seconds.append(ended - arrived)
        if len(self._seconds) >= _LOT:
            self.flush()

    def flush(self) -> None:
        """Records the batch."""
        seconds, self._seconds = self._seconds, []
        if seconds:
            self._recorder.add("ticks", float(len(seconds)))
            self._recorder.add_all("tick_seconds", seconds)
