"""Accumulates samples of metrics; what is drained merges elsewhere.

Merging is exact for counts, sums, maxima and histograms; only the choice of the newest samples depends on the order in
which processes report.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from brayx.metrics.cell import BOUNDS, Cell
from brayx.metrics.declarations import (
    DROPPED,
    FOLDED,
    MAX_LABELS,
    MAX_NOTE,
    METRICS,
    OTHER,
    QUANTILES,
    Bars,
    Kind,
    Metric,
    kind_of,
)

Part = dict[tuple[str, str], Cell]
"""Drained samples: cells by metric name and label."""


Drained = tuple[Part, dict[str, Metric]]
"""Result of `Recorder.drain`: the samples, and the declarations of an application's own metrics among them."""


class Traced(NamedTuple):
    """A sample of which a trace shows more.

    Attributes:
        value: the sample, in the metric's unit.
        trace_id: id of the trace, in hex.
        at: when it was recorded, in seconds since the epoch.
    """

    value: float
    trace_id: str
    at: float


def without_shapes(part: Drained) -> Drained:
    """The part without distributions: of several models each replaces the other's."""
    cells, declared = part
    return {place: cell for place, cell in cells.items() if cell.shape is None}, declared


class Recorder:
    """Accumulates samples of declared metrics, and of an application's own. Thread safe.

    A process has one recorder for all its samples. Its host drains it now and then, and each part goes to all
    listeners (`listen`).

    Args:
        max_names: bound on distinct (metric, label) pairs; past it samples of a new pair are dropped and counted as
            ``metrics_dropped``, so that a metric named after a session id cannot fill the memory. Metrics of
            `METRICS` without a label always have room.
        max_labels: bound on labels of one metric; past it samples of a new label go under ``other``, and are counted
            as ``labels_folded`` too.
    """

    def __init__(self, max_names: int = 1024, max_labels: int = MAX_LABELS) -> None:
        self._cells: Part = {}
        self._own: dict[str, Metric] = {}
        self._labels: Counter[str] = Counter()
        self._max_names = max_names
        self._max_labels = max_labels
        self._lock = threading.Lock()
        self._draining = threading.Lock()
        self._listeners: list[Callable[[Drained], None]] = []
        self._own_listeners: list[Callable[[Drained], None]] = []
        self._included: list[Recorder] = []
        self._traced: dict[tuple[str, int], Traced] = {}

    def listen(self, listener: Callable[[Drained], None]) -> None:
        """Passes every part drained from now on, even an empty one, to ``listener``, which must not change it."""
        self._listeners.append(listener)

    def listen_apart(self, own: Callable[[Drained], None], included: Callable[[Drained], None]) -> None:
        """As `listen`, but samples of the recorders included so far go to ``included``."""
        self._own_listeners.append(own)
        for other in self._included:
            other.listen(included)

    def include(self, other: Recorder) -> None:
        """Adds the samples of another recorder, which has no other reader, to every part drained from now on."""
        self._included.append(other)

    def add(
        self,
        name: str,
        value: float,
        *,
        label: str = "",
        kind: Kind | None = None,
        weight: float = 1.0,
        note: str = "",
    ) -> None:
        """Records one sample; drops and counts it when there are too many names.

        Args:
            name: a metric of `METRICS`, or an application's own name.
            value: the sample, in the metric's unit.
            label: one short word that splits the metric (a reason, an agent's name).
            kind: for a name that is not in `METRICS`: how its samples combine (default: mean).
            weight: number of samples that this one represents.
            note: a line for people that explains the sample (an error's message and location); the newest is kept.
        """
        with self._lock:
            cell = self._cells.get((name, label))
            if cell is None:
                if (place := self._place(name, label, weight)) is None:
                    return
                if name not in METRICS:
                    self._own.setdefault(name, Metric(name, "", kind_of(kind or Kind.MEAN), "application metric"))
                cell = self._cells.get(place)
                if cell is None:
                    cell = self._cells[place] = Cell.of_metric(self.metric(name))
            cell.add(float(value), weight)
            if note:
                cell.note = note[:MAX_NOTE]

    def add_all(self, name: str, values: Sequence[float]) -> None:
        """Records many samples of a metric of `METRICS`, much faster than `add` for each.

        Args:
            name: the metric; it has no label.
            values: the samples, at least one, in the metric's unit.
        """
        with self._lock:
            cell = self._cells.get((name, ""))
            if cell is None:
                cell = self._cells[name, ""] = Cell.of_metric(METRICS[name])
            cell.add_all(values)

    def add_shapes(self, name: str, shapes: Mapping[str, Bars]) -> None:
        """Records the newest distributions, by label, of a metric of `METRICS` whose kind is `Kind.SHAPE`.

        They stay together: no drain comes in between.
        """
        with self._lock:
            for label, shape in shapes.items():
                cell = self._cells.get((name, label))
                if cell is None:
                    if (place := self._place(name, label, 1.0)) is None:
                        continue
                    cell = self._cells.setdefault(place, Cell())
                cell.shape = shape

    def trace(self, name: str, value: float, trace_id: str) -> None:
        """Names the trace of a sample that is recorded elsewhere.

        Args:
            name: a metric of `METRICS` with `Kind.PERCENTILE`, without a label.
            value, trace_id: as for `Traced`.
        """
        with self._lock:
            self._traced[name, bisect.bisect_left(BOUNDS, value)] = Traced(value, trace_id, time.time())

    def traced(self) -> list[tuple[str, Traced]]:
        """The newest traced sample of each bucket, with its metric's name; those of included recorders, too."""
        with self._lock:
            own = [(name, sample) for (name, _), sample in self._traced.items()]
        return own + [sample for other in self._included for sample in other.traced()]

    def last(self, name: str) -> float | None:
        """The newest sample of a metric without a label; None: there is none since the last drain."""
        with self._lock:
            cell = self._cells.get((name, ""))
            return None if cell is None else cell.last

    def metric(self, name: str) -> Metric:
        """The declaration of ``name``; an application's own defaults to a mean."""
        return METRICS.get(name) or self._own.get(name) or Metric(name, "", Kind.MEAN, "application metric")

    def drain(self) -> Drained:
        """Removes and returns the samples since the last drain; the listeners get them, too."""
        with self._draining:  # so that parts come to a listener one after another
            if self._own_listeners:
                part = self._take()
                for listener in self._own_listeners:
                    listener(part)
                self.merge(part)
            for other in self._included:
                self.merge(other.drain())
            part = self._take()
            for listener in self._listeners:
                listener(part)
        return part

    def _take(self) -> Drained:
        with self._lock:
            part = self._cells, self._own
            self._cells, self._own = {}, {}
            self._labels.clear()
        return part

    def merge(self, part: Drained) -> None:
        """Adds the samples that another recorder drained."""
        cells, declared = part
        with self._lock:
            for key, cell in cells.items():
                name, label = key
                merged = self._cells.get(key)
                if merged is None:
                    if (place := self._place(name, label, cell.count)) is None:
                        continue
                    key, merged = place, self._cells.get(place)
                if name in declared:
                    self._own[name] = declared[name]
                if merged is not None:
                    merged.merge(cell)
                else:
                    self._cells[key] = cell.copy()

    @property
    def empty(self) -> bool:
        """Whether nothing was gathered since the last drain."""
        return not self._cells

    def summary(self) -> dict[str, float]:
        """Numbers by name: ``name`` or ``name.label``; percentiles and histograms have several, after a dot."""
        numbers: dict[str, float] = {}
        with self._lock:
            cells = {place: cell.copy() for place, cell in self._cells.items()}
        for (name, label), cell in cells.items():
            key = f"{name}.{label}" if label else name
            match self.metric(name).kind:
                case Kind.MEAN:
                    numbers[key] = cell.total / cell.count
                case Kind.SUM:
                    numbers[key] = cell.total
                case Kind.MAX:
                    numbers[key] = cell.maximum
                case Kind.LAST:
                    numbers[key] = cell.last
                case Kind.PERCENTILE:
                    numbers[f"{key}.p50"] = cell.quantile(0.5)
                    numbers[f"{key}.p99"] = cell.quantile(0.99)
                case Kind.HISTOGRAM:
                    numbers.update({f"{key}.{part}": cell.quantile(q) for part, q in QUANTILES.items()})
                    ends = {"mean": cell.total / cell.count, "min": cell.minimum, "max": cell.maximum}
                    numbers.update({f"{key}.{part}": value for part, value in ends.items()})
        return numbers

    def notes(self) -> dict[str, str]:
        """The newest note of each metric that has one, by ``name`` or ``name.label``."""
        cells = self._cells.items()
        return {f"{name}.{label}" if label else name: cell.note for (name, label), cell in cells if cell.note}

    def histograms(self) -> dict[str, dict[str, list[float]]]:
        """Bars of every `Kind.HISTOGRAM`, by ``name`` or ``name.label``: ``edges`` ``[n + 1]``, ``counts`` ``[n]``."""
        return {
            f"{name}.{label}" if label else name: cell.bars()
            for (name, label), cell in self._cells.items()
            if cell.kind is Kind.HISTOGRAM and cell.buckets
        }

    def _place(self, name: str, label: str, samples: float) -> tuple[str, str] | None:
        """The name and label under which samples of a new pair count; None: they are dropped, and counted as such."""
        if label and label != OTHER and self._labels[name] >= self._max_labels:
            self._count(FOLDED, samples)
            label = OTHER
        if (name, label) in self._cells:
            return name, label
        if len(self._cells) >= self._max_names and (label or name not in METRICS):
            self._count(DROPPED, samples)
            return None
        if label and label != OTHER:
            self._labels[name] += 1
        return name, label

    def _count(self, name: str, samples: float) -> None:
        self._cells.setdefault((name, ""), Cell()).add(samples, 1.0)
