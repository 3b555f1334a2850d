"""The samples of one metric and label: count, sum, minimum, maximum, histogram buckets and newest values."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

from brayx.metrics.declarations import WINDOW_GAMES, WINDOWED, Bars, Kind, Metric

BOUNDS: tuple[float, ...] = tuple(10 ** (exponent / 10) for exponent in range(-70, 71))
"""Histogram bounds, ten per decade from 1e-7 to 1e7. A percentile lies in the bucket of the exact one: its error is at
most 26 per cent, and mostly a few per cent."""
SIGNED_BOUNDS: tuple[float, ...] = (*(-bound for bound in reversed(BOUNDS)), 0.0, *BOUNDS)
"""The same bounds on both sides of zero, for `Kind.HISTOGRAM`."""
_BOUNDS: Mapping[Kind, tuple[float, ...]] = {Kind.PERCENTILE: BOUNDS, Kind.HISTOGRAM: SIGNED_BOUNDS}


@dataclass(slots=True)
class Cell:
    """Samples of one metric and one label set, in a form that merges."""

    count: float = 0.0
    total: float = 0.0
    maximum: float = -math.inf
    minimum: float = math.inf
    last: float = math.nan
    buckets: dict[int, float] = field(default_factory=dict)
    kind: Kind | None = None
    """Kind of a metric with buckets, which determines their bounds."""
    window: deque[float] | None = None
    """Newest samples of a metric of `WINDOWED`, oldest first."""
    note: str = ""
    """Note of the newest sample that had one."""
    shape: Bars | None = None
    """Newest distribution of a metric of `Kind.SHAPE`."""

    @classmethod
    def of_metric(cls, metric: Metric) -> Cell:
        """An empty cell."""
        return cls(
            kind=metric.kind if metric.kind in _BOUNDS else None,
            window=deque(maxlen=WINDOW_GAMES) if metric.name in WINDOWED else None,
        )

    def add(self, value: float, weight: float) -> None:
        """Adds one sample that stands for ``weight``."""
        self.count += weight
        self.total += value * weight
        if value > self.maximum:
            self.maximum = value
        self.last = value
        if self.kind is not None:
            self.minimum = min(self.minimum, value)
            slot = bisect.bisect_left(_BOUNDS[self.kind], value)
            self.buckets[slot] = self.buckets.get(slot, 0.0) + weight
        if self.window is not None:
            self.window.extend(repeat(value, min(round(weight), WINDOW_GAMES)))

    def add_all(self, values: Sequence[float]) -> None:
        """Adds samples, at least one."""
        self.count += len(values)
        self.total += sum(values)
        self.maximum = max(self.maximum, *values)
        self.last = values[-1]
        if self.kind is not None:
            self.minimum = min(self.minimum, *values)
            bounds = _BOUNDS[self.kind]
            ordered = sorted(values)  # so that one search finds all values of a bucket
            start = 0
            while start < len(ordered):
                slot = bisect.bisect_left(bounds, ordered[start])
                end = bisect.bisect_right(ordered, bounds[slot], start) if slot < len(bounds) else len(ordered)
                self.buckets[slot] = self.buckets.get(slot, 0.0) + end - start
                start = end
        if self.window is not None:
            self.window.extend(values)

    def merge(self, other: Cell) -> None:
        """Adds the samples of another cell, which are newer."""
        self.count += other.count
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)
        self.minimum = min(self.minimum, other.minimum)
        self.last = other.last
        if self.kind is other.kind:  # else two processes call different things by one name
            for slot, count in other.buckets.items():
                self.buckets[slot] = self.buckets.get(slot, 0.0) + count
        if self.window is not None and other.window is not None:
            self.window.extend(other.window)
        self.note = other.note or self.note
        self.shape = other.shape or self.shape

    def copy(self) -> Cell:
        """A copy that shares no data with this cell."""
        window = None if self.window is None else self.window.copy()
        return replace(self, buckets=dict(self.buckets), window=window)

    def quantile(self, q: float) -> float:
        """The value below which the share ``q`` of the samples lies; of a metric with buckets."""
        assert self.kind is not None
        bounds, rank = _BOUNDS[self.kind], q * sum(self.buckets.values())
        for slot in sorted(self.buckets):
            if rank <= self.buckets[slot]:  # interpolate, assuming evenly spread samples in the bucket
                low = max(bounds[slot - 1], self.minimum) if slot else self.minimum
                high = min(bounds[slot], self.maximum) if slot < len(bounds) else self.maximum
                inside = low + (high - low) * rank / self.buckets[slot]
                return inside if math.isfinite(inside) else bounds[min(slot, len(bounds) - 1)]
            rank -= self.buckets[slot]
        return self.maximum

    def bars(self) -> dict[str, list[float]]:
        """``edges`` ``[n + 1]``, from the least value to the greatest, and ``counts`` ``[n]``."""
        assert self.kind is not None
        bounds, (first, last) = _BOUNDS[self.kind], (min(self.buckets), max(self.buckets))
        inner = [bounds[slot] for slot in range(first, last)]
        counts = [self.buckets.get(slot, 0.0) for slot in range(first, last + 1)]
        return {"edges": [self.minimum, *inner, self.maximum], "counts": counts}
