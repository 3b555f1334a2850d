"""How much may be sampled for what was inserted. Pure arithmetic; knows nothing of what is counted."""

from __future__ import annotations

import math


class RateLimiter:
    """Keeps the number of samples near ``samples_per_insert`` times the number of inserts.

    With ``i`` inserts and ``s`` samples so far, the balance is ``d = samples_per_insert * i - s``. Its middle is
    ``m = samples_per_insert * min_size``: what is inserted before sampling begins is not sampled in arrears.

    - ``n`` samples may be taken when ``min_size`` items are there and ``d - n >= m - error_buffer``;
    - ``n`` inserts may be made when they leave no more than ``min_size`` items there, or
      ``d + n * samples_per_insert <= m + error_buffer``.

    So ``d`` moves in a window ``2 * error_buffer`` wide. A sample takes ``samples`` out of it at once and an insert
    puts ``samples_per_insert`` in; if the window is narrower than both, there is a balance at which neither fits and
    all wait for each other for ever. Such settings are refused. (After Reverb's SampleToInsertRatio.)

    Args:
        samples_per_insert: how often an item is sampled on average; None: any number of times.
        min_size: items that must be there before the first sample.
        error_buffer: how far the balance may be from its middle, in samples; None: the least that cannot deadlock,
            twice over.
        samples: items that one call samples.
        capacity: items that there is room for.

    Raises:
        ValueError: these settings would deadlock; the message says why.
    """

    def __init__(
        self,
        samples_per_insert: float | None = None,
        min_size: int = 1,
        error_buffer: float | None = None,
        *,
        samples: int = 1,
        capacity: int | None = None,
    ) -> None:
        if min_size < 1:
            raise ValueError(f"min_size is {min_size}, expected 1 or more")
        if capacity is not None and min_size > capacity:
            raise ValueError(f"min_size is {min_size}, and there is room for {capacity}: nothing would ever be sampled")
        if samples_per_insert is None:
            if error_buffer is not None:
                raise ValueError("error_buffer says how far samples_per_insert may be missed; there is none")
            samples_per_insert, error_buffer = 0.0, math.inf
        elif not (math.isfinite(samples_per_insert) and samples_per_insert > 0):
            raise ValueError(f"samples_per_insert is {samples_per_insert}, expected more than 0")
        else:
            step = samples + samples_per_insert
            error_buffer = step if error_buffer is None else error_buffer
            if not 2 * error_buffer >= step:
                raise ValueError(
                    f"error_buffer is {error_buffer:g}: the window of {2 * error_buffer:g} is narrower than one sample "
                    f"of {samples} and one insert worth {samples_per_insert:g}, so both could wait for each other for "
                    f"ever; it needs {step / 2:g} or more"
                )
        self._ratio = samples_per_insert
        self._min_size = min_size
        self._low = self._ratio * min_size - error_buffer
        self._high = self._ratio * min_size + error_buffer
        self.inserts = 0
        self.samples = 0

    @property
    def balance(self) -> float:
        """``samples_per_insert * inserts - samples``."""
        return self._ratio * self.inserts - self.samples

    def room(self, size: int) -> int | None:
        """How many inserts may be made when ``size`` items are there; None: any number."""
        if self._ratio == 0:
            return None
        free = (self._high - self.balance) / self._ratio
        return max(0, math.floor(free + 1e-9), self._min_size - size)

    def may_sample(self, size: int, count: int) -> bool:
        """Whether ``count`` samples may be taken of ``size`` items."""
        return size >= self._min_size and self.balance - count >= self._low - 1e-9

    def inserted(self, count: int) -> None:
        """Counts inserts that were made."""
        self.inserts += count

    def sampled(self, count: int) -> None:
        """Counts samples that were taken."""
        self.samples += count
