"""Every metric once: its name, unit, kind and labels; and the accumulator that turns samples into numbers.

A process records samples (`Recorder.add`), hands over what it has gathered (`Recorder.drain`), and whoever keeps
the trial's books merges those parts (`Recorder.merge`) and reads the result (`Recorder.summary`). Merging is exact
for counts, sums, maxima and histograms, so the order in which processes report does not matter. Knows nothing of
Ray, MLflow or Prometheus.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

BOUNDS: tuple[float, ...] = tuple(10 ** (exponent / 10) for exponent in range(-70, 71))
"""Histogram bounds, ten a decade from 1e-7 to 1e7: a percentile is right to 13 per cent."""


class Kind(StrEnum):
    """How samples of a metric combine."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    LAST = "last"
    PERCENTILE = "percentile"


@dataclass(frozen=True)
class Metric:
    """A metric's one declaration."""

    name: str
    unit: str
    kind: Kind
    help: str


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("ticks", "ticks", Kind.SUM, "ticks answered"),
        Metric("tick_seconds", "s", Kind.PERCENTILE, "from the request at the replica to its reply"),
        Metric("tick_wait_seconds", "s", Kind.PERCENTILE, "until the session takes the request, of one tick in eight"),
        Metric("sessions_started", "sessions", Kind.SUM, "sessions started by their clients; not those resumed"),
        Metric("sessions_ended", "sessions", Kind.SUM, "sessions ended, by reason; moved: goes on elsewhere"),
        Metric("sessions_active", "sessions", Kind.LAST, "sessions running now"),
        Metric("sessions_resumed", "sessions", Kind.SUM, "sessions taken over from another replica's snapshot"),
        Metric("snapshots_failed", "snapshots", Kind.SUM, "snapshots of sessions that could not be taken or kept"),
        Metric("ticks_forwarded", "ticks", Kind.SUM, "requests that the owner's replica answered for another"),
        Metric("forwarded_seconds", "s", Kind.PERCENTILE, "from passing a request on to its answer"),
        Metric("ticks_fallen_back", "ticks", Kind.SUM, "ticks past their deadline, answered by the fallback, by which"),
        Metric("ticks_repeated", "ticks", Kind.SUM, "numbered ticks that came again and got the kept reply"),
        Metric("requests_refused", "requests", Kind.SUM, "requests answered with a typed error, by its code"),
        Metric("episode_return", "reward", Kind.MEAN, "undiscounted return of a finished game"),
        Metric("episode_length", "ticks", Kind.MEAN, "ticks of a finished game"),
        Metric("forward_batch_size", "observations", Kind.MEAN, "observations in one engine call"),
        Metric("forward_seconds", "s", Kind.PERCENTILE, "one engine call"),
        Metric("forward_wait_seconds", "s", Kind.PERCENTILE, "time a forward waited for its batch at the engine"),
        Metric("model_call_size", "observations", Kind.MEAN, "observations in one call to a model deployment"),
        Metric("model_call_seconds", "s", Kind.PERCENTILE, "one call to a model deployment, with its queue there"),
        Metric("model_call_wait_seconds", "s", Kind.PERCENTILE, "time a forward waited for its call to a deployment"),
        Metric("fragments_pushed", "fragments", Kind.SUM, "fragments that reached the replay buffer"),
        Metric("fragments_dropped", "fragments", Kind.SUM, "fragments dropped on the way to replay, by reason"),
        Metric("env_steps", "steps", Kind.SUM, "transitions that reached the replay buffer"),
        Metric("replay_dropped", "transitions", Kind.SUM, "transitions the buffer dropped, by reason"),
        Metric("replay_batches", "batches", Kind.LAST, "learner batches waiting in the buffer"),
        Metric("learner_wait_fraction", "1", Kind.MEAN, "share of an update's time spent waiting for its batch"),
        Metric("update_seconds", "s", Kind.PERCENTILE, "one learner batch, all its epochs"),
        Metric("updates", "batches", Kind.SUM, "learner batches learned from"),
        Metric("policy_version", "versions", Kind.LAST, "newest published weights"),
        Metric("acting_version", "versions", Kind.LAST, "weights that a replica acts with, by model"),
        Metric("lag_versions", "versions", Kind.MEAN, "policy versions published between acting and learning"),
        Metric("loss", "1", Kind.MEAN, "total loss"),
        Metric("policy_loss", "1", Kind.MEAN, "surrogate loss"),
        Metric("value_loss", "1", Kind.MEAN, "half the squared error of the value"),
        Metric("entropy", "nats", Kind.MEAN, "entropy of the policy"),
        Metric("approx_kl", "nats", Kind.MEAN, "k3 estimate of KL(acting || learning)"),
        Metric("clip_fraction", "1", Kind.MEAN, "share of ratios outside the clip range"),
        Metric("explained_variance", "1", Kind.MEAN, "1 - Var(target - value) / Var(target)"),
        Metric("grad_norm", "1", Kind.MEAN, "gradient norm before clipping"),
        Metric("checkpoints_failed", "checkpoints", Kind.SUM, "checkpoints that could not be saved in their turn"),
        Metric("metrics_dropped", "samples", Kind.SUM, "samples dropped because there were too many metric names"),
        Metric("learning_rate", "1", Kind.LAST, "of the last optimiser step"),
    )
}


DROPPED = "metrics_dropped"
"""Counts samples of names past a bound."""


@dataclass(slots=True)
class _Cell:
    """Samples of one metric and one label set, in a form that merges."""

    count: float = 0.0
    total: float = 0.0
    maximum: float = -math.inf
    last: float = math.nan
    buckets: dict[int, float] = field(default_factory=dict)
    histogram: bool = False

    def add(self, value: float, weight: float) -> None:
        self.count += weight
        self.total += value * weight
        if value > self.maximum:
            self.maximum = value
        self.last = value
        if self.histogram:
            slot = bisect.bisect_left(BOUNDS, value)
            self.buckets[slot] = self.buckets.get(slot, 0.0) + weight

    def add_all(self, values: Sequence[float]) -> None:
        self.count += len(values)
        self.total += sum(values)
        self.maximum = max(self.maximum, *values)
        self.last = values[-1]
        if self.histogram:
            for slot, count in Counter([bisect.bisect_left(BOUNDS, value) for value in values]).items():
                self.buckets[slot] = self.buckets.get(slot, 0.0) + count

    def merge(self, other: _Cell) -> None:
        self.count += other.count
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)
        self.last = other.last
        for slot, count in other.buckets.items():
            self.buckets[slot] = self.buckets.get(slot, 0.0) + count

    def quantile(self, q: float) -> float:
        rank, seen = q * self.count, 0.0
        for slot in sorted(self.buckets):
            seen += self.buckets[slot]
            if seen >= rank:
                return min(BOUNDS[min(slot, len(BOUNDS) - 1)], self.maximum)
        return self.maximum


Part = dict[tuple[str, str], _Cell]
"""What `Recorder.drain` hands over: cells by metric name and label."""


class Sink(Protocol):
    """Where samples go: a `Recorder`, or a client that hands them on."""

    def add(self, name: str, value: float, *, label: str = "", kind: Kind | None = None, weight: float = 1.0) -> None:
        """Records one sample, as `Recorder.add`."""

    def add_all(self, name: str, values: Sequence[float]) -> None:
        """Records samples of one of brayx's metrics, as `Recorder.add_all`."""

    def merge(self, part: tuple[Part, dict[str, Metric]]) -> None:
        """Adds what a recorder drained, as `Recorder.merge`."""


class Recorder:
    """Accumulates samples of declared metrics, and of an application's own.

    Args:
        max_names: bound on distinct (metric, label) pairs; past it samples of a new pair are dropped and counted as
            ``metrics_dropped``, so that a metric named after a session id cannot fill the memory. Metrics of
            `METRICS` without a label always have room.
    """

    def __init__(self, max_names: int = 1024) -> None:
        self._cells: Part = {}
        self._own: dict[str, Metric] = {}
        self._max_names = max_names

    def add(self, name: str, value: float, *, label: str = "", kind: Kind | None = None, weight: float = 1.0) -> None:
        """Records one sample; drops and counts it when there are too many names.

        Args:
            name: a metric of `METRICS`, or an application's own name.
            value: the sample, in the metric's unit.
            label: one short word that splits the metric (a reason, an agent's name).
            kind: for a name that is not in `METRICS`: how its samples combine (default: mean).
            weight: how many samples this one stands for.
        """
        cell = self._cells.get((name, label))
        if cell is None:
            if not self._has_room(name, label):
                self._drop(weight)
                return
            if name not in METRICS:
                self._own[name] = Metric(name, "", kind or Kind.MEAN, "application metric")
            cell = self._cells[name, label] = _Cell(histogram=self.metric(name).kind is Kind.PERCENTILE)
        cell.add(float(value), weight)

    def add_all(self, name: str, values: Sequence[float]) -> None:
        """Records many samples of a metric of `METRICS`, at a small part of what `add` costs for each.

        Args:
            name: the metric; it has no label.
            values: the samples, one at least, in the metric's unit.
        """
        cell = self._cells.get((name, ""))
        if cell is None:
            cell = self._cells[name, ""] = _Cell(histogram=METRICS[name].kind is Kind.PERCENTILE)
        cell.add_all(values)

    def metric(self, name: str) -> Metric:
        """The declaration of ``name``; an application's own defaults to a mean."""
        return METRICS.get(name) or self._own.get(name) or Metric(name, "", Kind.MEAN, "application metric")

    def drain(self) -> tuple[Part, dict[str, Metric]]:
        """What was gathered since the last drain, and forgets it."""
        cells, self._cells = self._cells, {}
        own, self._own = self._own, {}
        return cells, own

    def merge(self, part: tuple[Part, dict[str, Metric]]) -> None:
        """Adds what another recorder drained."""
        cells, own = part
        for key, cell in cells.items():
            name, label = key
            mine = self._cells.get(key)
            if mine is None and not self._has_room(name, label):
                self._drop(cell.count)
                continue
            if name in own:
                self._own[name] = own[name]
            if mine is not None:
                mine.merge(cell)
            else:
                self._cells[key] = _copy(cell)

    def summary(self) -> dict[str, float]:
        """Numbers by name: ``name`` or ``name.label``; a percentile metric gives ``.p50`` and ``.p99``."""
        numbers: dict[str, float] = {}
        for (name, label), cell in self._cells.items():
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
        return numbers

    def _has_room(self, name: str, label: str) -> bool:
        return len(self._cells) < self._max_names or (name in METRICS and not label)

    def _drop(self, count: float) -> None:
        self._cells.setdefault((DROPPED, ""), _Cell()).add(count, 1.0)


def _copy(cell: _Cell) -> _Cell:
    return _Cell(cell.count, cell.total, cell.maximum, cell.last, dict(cell.buckets), cell.histogram)
