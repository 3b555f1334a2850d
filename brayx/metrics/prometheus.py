"""Prometheus' names for the metrics, and their samples as updates of them; both hosts export these.

`Fold` turns samples into updates of declared Prometheus metrics. The set of names is fixed (`EXPORTED`): each of
`METRICS` under its own name, and all metrics of an application under one name per kind, with their own name as a tag.
So an application cannot export a bad name, nor too many. Knows nothing of Ray, nor of readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from brayx.metrics import BOUNDS, DROPPED, METRICS, SIGNED_BOUNDS, Drained, Kind, Metric
from brayx.names import shortened

OBSERVATIONS = 100
"""Most observations of one histogram series per export through Ray, which handles them one at a time.

If there are more samples, a subset is exported, in proportion to the buckets. Each bucket's remainder is carried over,
so rare slow samples appear too. The counter ``NAME_samples`` has the exact number of samples.
"""
MAX_NAMES = 1024
"""Most pairs of name and label over a process's life; samples of others count as ``metrics_dropped``."""
_MAX_LABEL = 100
_SECONDS = tuple(BOUNDS[20:81:2])
"""Buckets from 10 µs to 10 s, five a decade: ends of `Recorder`'s own, so that no sample changes its bucket."""
_ANY_UNIT = tuple(BOUNDS[::5])


class Type(StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Declared:
    """One exported metric, by its name in Ray."""

    name: str
    type: Type
    help: str
    tags: tuple[str, ...]
    bounds: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """Its name as Ray's endpoint shows it."""
        return f"ray_{self.name}"

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series as Ray's endpoint shows them."""
        if self.type is Type.COUNTER:
            return (f"{self.family}_total",)
        if self.type is Type.GAUGE:
            return (self.family,)
        return (f"{self.family}_bucket", f"{self.family}_sum", f"{self.family}_count")


@dataclass(frozen=True)
class MetricUpdate:
    """An update of one metric: an increment, a level, or ``count`` observations of the same value."""

    of: Declared
    tags: Mapping[str, str]
    value: float
    count: int = 1


def _declare(metric: Metric, tags: tuple[str, ...]) -> tuple[Declared, ...]:
    name, text = f"brayx_{metric.name}", f"{metric.help} [{metric.unit}]"
    if metric.kind is Kind.SUM:
        return (Declared(name, Type.COUNTER, text, tags),)
    if metric.kind in (Kind.PERCENTILE, Kind.HISTOGRAM):
        bounds = _SECONDS if metric.unit == "s" else _ANY_UNIT
        counted = f"how many there were: {metric.help} [samples]"
        return (
            Declared(name, Type.HISTOGRAM, text, tags, bounds),
            Declared(f"{name}_samples", Type.COUNTER, counted, tags),
        )
    return () if metric.kind is Kind.SHAPE else (Declared(name, Type.GAUGE, text, tags),)


_OWN = {kind: Metric(f"own_{kind}", "its own", kind, f"applications' own metrics ({kind}), by name") for kind in Kind}
_DECLARED: dict[str, tuple[Declared, ...]] = {
    **{name: _declare(metric, ("label",)) for name, metric in METRICS.items()},
    **{metric.name: _declare(metric, ("metric", "label")) for metric in _OWN.values()},
}

EXPORTED: dict[str, Declared] = {declared.name: declared for group in _DECLARED.values() for declared in group}
"""All metrics that can be exported, by name; Ray adds the prefix ``ray_``, and ``_total`` to counters."""


def _middle(slot: int, bounds: Sequence[float]) -> float:
    """A value inside a bucket of `Recorder`'s."""
    if slot == 0:
        return bounds[0]
    if slot == len(bounds):
        return 2 * bounds[-1]
    low, high = bounds[slot - 1 : slot + 1]
    return math.copysign(math.sqrt(low * high), high) if low * high > 0 else (low + high) / 2


class Fold:
    """Turns drained metrics into points. Not thread safe.

    Args:
        observations: most observations of one histogram series in each part, see `OBSERVATIONS`.
        max_names: see `MAX_NAMES`. Metrics of `METRICS` without a label always have room.
    """

    def __init__(self, *, observations: float = OBSERVATIONS, max_names: int = MAX_NAMES) -> None:
        self._observations = observations
        self._max_names = max_names
        self._known: set[tuple[str, str]] = set()
        self._owed: dict[tuple[str, str], dict[int, float]] = {}  # mostly fractions of an observation, by bucket

    def points(self, part: Drained) -> Iterator[MetricUpdate]:
        """The points of one part; skips sums that fell and values that are not numbers."""
        cells, metrics = part
        dropped = 0.0
        for (name, label), cell in cells.items():
            if cell.count <= 0:
                continue
            if not self._has_room(name, label):
                dropped += cell.count
                continue
            metric = METRICS.get(name) or metrics.get(name) or Metric(name, "", Kind.MEAN, "")
            tags = {"label": clean(label)}
            if name not in METRICS:
                tags["metric"] = clean(name)
                declared = _DECLARED[_OWN[metric.kind].name]
            else:
                declared = _DECLARED[name]
            match metric.kind:
                case Kind.SUM:
                    points = [MetricUpdate(declared[0], tags, cell.total)]
                case Kind.MEAN:
                    points = [MetricUpdate(declared[0], tags, cell.total / cell.count)]
                case Kind.MAX:
                    points = [MetricUpdate(declared[0], tags, cell.maximum)]
                case Kind.LAST:
                    points = [MetricUpdate(declared[0], tags, cell.last)]
                case Kind.PERCENTILE | Kind.HISTOGRAM:
                    bounds = BOUNDS if metric.kind is Kind.PERCENTILE else SIGNED_BOUNDS
                    due = self._due(self._owed.setdefault((name, label), {}), cell.buckets)
                    points = [MetricUpdate(declared[0], tags, _middle(slot, bounds), count) for slot, count in due]
                    points.append(MetricUpdate(declared[1], tags, cell.count))
            for point in points:
                # Counters refuse these values, and some of them would corrupt a counter for good.
                if math.isfinite(point.value) and (point.of.type is not Type.COUNTER or point.value > 0):
                    yield point
        if dropped:
            yield MetricUpdate(_DECLARED[DROPPED][0], {"label": ""}, dropped)

    def _due(self, owed: dict[int, float], buckets: Mapping[int, float]) -> Iterator[tuple[int, int]]:
        """The buckets to observe a value of now, each with its number of observations; ``owed`` keeps the rest."""
        share = min(1.0, self._observations / sum(buckets.values()))
        for slot, count in buckets.items():
            due = owed.get(slot, 0.0) + count * share
            whole = int(due + 1e-9)
            owed[slot] = due - whole
            if whole:
                yield slot, whole

    def _has_room(self, name: str, label: str) -> bool:
        if (name in METRICS and not label) or (name, label) in self._known:
            return True
        if len(self._known) >= self._max_names:
            return False
        self._known.add((name, label))
        return True


def clean(label: str) -> str:
    """A label as a tag's value: short and in ASCII, as Ray requires. Different labels stay different."""
    return shortened(label.encode("unicode_escape").decode(), _MAX_LABEL)
