"""The metrics of a training in one process: every thread records here, and the newest numbers can be read at any time.

Knows nothing of MLflow: a callback takes what was gathered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from brayx.books import Books, Drained
from brayx.metrics import Kind, Recorder, XAxis

_NEWEST_S = 0.25
_INTERVAL_S = 1.0


class LocalNumbers:
    """A thread safe `brayx.metrics.Sink` over a trial's `Books`; the learner's `Numbers`.

    Args:
        totals: sums to go on from, those of an interrupted trial.
        keep: takes each part that was gathered.
        x_axis: as of `Books`.
    """

    def __init__(self, totals: Mapping[str, float], keep: Callable[[Drained], None], x_axis: XAxis) -> None:
        self._books = Books(totals, x_axis=x_axis)
        self._keep = keep
        self._recorder = Recorder()
        self._recording = threading.Lock()
        self._booking = threading.Lock()
        self._newest: dict[str, float] = {}
        self._booked_at = self._interval_at = 0.0

    def add(self, name: str, value: float, *, label: str = "", kind: Kind | None = None, weight: float = 1.0) -> None:
        """Records one sample, as `Recorder.add`."""
        with self._recording:
            self._recorder.add(name, value, label=label, kind=kind, weight=weight)

    def add_all(self, name: str, values: Sequence[float]) -> None:
        """Records many samples, as `Recorder.add_all`."""
        with self._recording:
            self._recorder.add_all(name, values)

    def merge(self, part: Drained) -> None:
        """Adds what another recorder drained."""
        with self._recording:
            self._recorder.merge(part)

    def newest(self) -> Mapping[str, float]:
        """The trial's numbers, as `Books.snapshot`; a quarter of a second old at most."""
        if time.monotonic() - self._booked_at < _NEWEST_S:
            return self._newest
        return self.snapshot()

    def snapshot(self) -> dict[str, float]:
        """The trial's numbers as of now."""
        with self._booking:
            with self._recording:
                part = self._recorder.drain()
            if part[0]:
                self._books.merge(part)
                self._keep(part)
            now = time.monotonic()
            if now - self._interval_at >= _INTERVAL_S:  # percentiles are of the last of these
                self._books.take_interval()
                self._interval_at = now
            self._newest = self._books.snapshot()
            self._booked_at = now
            return dict(self._newest)

    def notes(self) -> dict[str, str]:
        """The newest note of each metric that has one, by summary name."""
        with self._booking:
            return dict(self._books.notes)
