"""The metrics of a process: every thread records here, and the newest numbers can be read at any time.

Knows nothing of MLflow: a callback takes the numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from brayx.metrics import Recorder, XAxis
from brayx.metrics.totals import Totals

NEWEST_S = 0.25
"""Age at which numbers are asked for again."""
_INTERVAL_S = 1.0


class LocalNumbers(Recorder):
    """The recorder of a process that trains, with the trial's `Totals`; `LearnerNumbers` of the learner.

    Args:
        totals: initial sums, from an interrupted trial.
        x_axis: as for `Totals`.
    """

    def __init__(self, totals: Mapping[str, float], x_axis: XAxis) -> None:
        super().__init__()
        self._totals = Totals(totals, x_axis=x_axis)
        self.listen(self._totals.merge)
        self._reading = threading.Lock()
        self._newest: dict[str, float] = {}
        self._newest_at = self._interval_at = 0.0

    def newest(self) -> Mapping[str, float]:
        """The trial's numbers, as `Totals.snapshot`; a quarter of a second old at most."""
        if time.monotonic() - self._newest_at < NEWEST_S:
            return self._newest
        return self.snapshot()

    def snapshot(self) -> dict[str, float]:
        """The trial's current numbers."""
        with self._reading:
            self.drain()
            now = time.monotonic()
            if now - self._interval_at >= _INTERVAL_S:  # percentiles are of the last of these
                self._totals.take_interval()
                self._interval_at = now
            self._newest = self._totals.snapshot()
            self._newest_at = now
            return dict(self._newest)

    def notes(self) -> dict[str, str]:
        """As `Totals.notes`."""
        with self._reading:
            return dict(self._totals.notes)
