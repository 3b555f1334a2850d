"""Rate limiter: keeps a ratio of samples to inserts. Pure arithmetic; knows nothing of the items."""

from __future__ import annotations

import math


class RateLimiter:
    """Keeps the number of samples near ``samples_per_insert`` times the number of inserts.

    With ``i`` inserts and ``s`` samples so far, the balance is ``d = samples_per_insert * i - s``. Its target is
    ``m = samples_per_insert * min_size``, so that sampling need not catch up on the first ``min_size`` inserts.

    - ``n`` samples are allowed if ``min_size`` items are stored and ``d - n >= m - e``;
    - ``n`` inserts are allowed if at most ``min_size`` items are stored after them, or
      ``d + n * samples_per_insert <= m + e``.

    So ``d`` moves in a window ``2 * e`` wide. One call takes ``samples`` from it, and one insert adds
    ``samples_per_insert``. In a window narrower than both together there is a balance at which neither is allowed and
    both sides wait for ever, so ``e = samples + samples_per_insert``, twice the least. (After Reverb's
    SampleToInsertRatio, where ``e`` is its error_buffer.)

    Args:
        samples_per_insert: average number of samples of an item; None: no limit.
        min_size: items that must be stored before the first sample.
        samples: items per sampling call.
        capacity: items that fit.

    Raises:
        ValueError: these settings would deadlock; the message says why.
    """

    def __init__(
        self,
        samples_per_insert: float | None = None,
        min_size: int = 1,
        *,
        samples: int = 1,
        capacity: int | None = None,
    ) -> None:
        if min_size < 1:
            raise ValueError(f"min_size is {min_size}, expected 1 or more")
        if capacity is not None and min_size > capacity:
            raise ValueError(f"min_size is {min_size}, and there is room for {capacity}: nothing would ever be sampled")
        if samples_per_insert is None:
            samples_per_insert, deviation = 0.0, math.inf
        elif not (math.isfinite(samples_per_insert) and samples_per_insert > 0):
            raise ValueError(f"samples_per_insert is {samples_per_insert}, expected more than 0")
        else:
            deviation = samples + samples_per_insert
        self._ratio = samples_per_insert
        self._min_size = min_size
        self._low = self._ratio * min_size - deviation
        self._high = self._ratio * min_size + deviation
        self.inserts = 0
        self.samples = 0

    @property
    def balance(self) -> float:
        """``samples_per_insert * inserts - samples``."""
        return self._ratio * self.inserts - self.samples

    def room(self, size: int) -> int | None:
        """Number of inserts allowed while ``size`` items are stored; None: any number."""
        if self._ratio == 0:
            return None
        free = (self._high - self.balance) / self._ratio
        return max(0, math.floor(free + 1e-9), self._min_size - size)

    def may_sample(self, size: int, count: int) -> bool:
        """Whether ``count`` samples are allowed while ``size`` items are stored."""
        return size >= self._min_size and self.balance - count >= self._low - 1e-9

    def inserted(self, count: int) -> None:
        """Counts inserts."""
        self.inserts += count

    def sampled(self, count: int) -> None:
        """Counts samples."""
        self.samples += count
