"""Declares every metric with its name, unit, kind and labels, and accumulates samples into numbers.

A process records samples (`Recorder.add`). Its host drains them (`Recorder.drain`) to listeners: the trial's `Books`
merge those parts (`Recorder.merge`) and read the result (`Recorder.summary`). Merging is exact for counts, sums, maxima
and histograms; only the choice of the newest samples depends on the order in which processes report. Knows nothing of
Ray, MLflow or Prometheus.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise, repeat
from typing import Literal, NamedTuple

from brayx.errors import ConfigError
from brayx.names import escape_of, shortened

BOUNDS: tuple[float, ...] = tuple(10 ** (exponent / 10) for exponent in range(-70, 71))
"""Histogram bounds, ten per decade from 1e-7 to 1e7. A percentile lies in the bucket of the exact one: its error is at
most 26 per cent, and mostly a few per cent."""
SIGNED_BOUNDS: tuple[float, ...] = (*(-bound for bound in reversed(BOUNDS)), 0.0, *BOUNDS)
"""The same bounds on both sides of zero, for `Kind.HISTOGRAM`."""


class Kind(StrEnum):
    """How samples of a metric combine."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    LAST = "last"
    PERCENTILE = "percentile"
    """Percentiles of values above zero: ``.p50`` and ``.p99``."""
    HISTOGRAM = "histogram"
    """Distribution of any values: `QUANTILES`, ``.mean``, ``.min`` and ``.max``; `Recorder.histograms` has the bars."""
    SHAPE = "shape"
    """The newest distribution as `Bars`, see `Recorder.add_shapes`; it has no numbers. Only of brayx's own metrics."""


class Bars(NamedTuple):
    """A distribution.

    Attributes:
        edges: ``[n + 1]``, ascending.
        counts: ``[n]``: samples between two edges.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def middles(self) -> list[float]:
        """``[n]``: the middle between each two edges."""
        return [(low + high) / 2 for low, high in pairwise(self.edges)]


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric."""

    name: str
    unit: str
    kind: Kind
    help: str


XAxis = Literal["env_steps", "updates", "seconds"]
"""X axis of metrics: transitions that reached replay, learner batches learned from, or time."""

QUANTILES: Mapping[str, float] = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
"""Quantiles of a `Kind.HISTOGRAM`, written in addition to its mean, minimum and maximum."""
WINDOWED = ("episode_return", "episode_length")
"""Metrics with a second mean over the last games, ``NAME.last100``; their samples are kept one by one."""
WINDOW_GAMES = 100
"""Maximum number of those games."""
BEST_METRIC = "episode_return"
"""Name of a checkpoint's mean return."""
GAMES_OF_BEST = "games"
"""Name of the number of games in that mean."""
_BOUNDS: Mapping[Kind, tuple[float, ...]] = {Kind.PERCENTILE: BOUNDS, Kind.HISTOGRAM: SIGNED_BOUNDS}

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("ticks", "ticks", Kind.SUM, "ticks answered"),
        Metric("tick_seconds", "s", Kind.PERCENTILE, "from the request at the replica to its reply"),
        Metric("tick_wait_seconds", "s", Kind.PERCENTILE, "until the session takes the request, of one tick in eight"),
        Metric("sessions_started", "sessions", Kind.SUM, "sessions started by their clients; not those resumed"),
        Metric(
            "sessions_ended", "sessions", Kind.SUM, "sessions ended, by reason; moved: continues at another replica"
        ),
        Metric("sessions_active", "sessions", Kind.LAST, "sessions running now"),
        Metric("sessions_resumed", "sessions", Kind.SUM, "sessions taken over from another replica's snapshot"),
        Metric("snapshots_failed", "snapshots", Kind.SUM, "snapshots of sessions that could not be taken or kept"),
        Metric("ticks_forwarded", "ticks", Kind.SUM, "requests that the owner's replica answered for another"),
        Metric("forwarded_seconds", "s", Kind.PERCENTILE, "time from forwarding a request to its reply"),
        Metric("ticks_fallen_back", "ticks", Kind.SUM, "ticks past their deadline, answered by the fallback, by which"),
        Metric("ticks_skipped", "ticks", Kind.SUM, "of these, ticks that an agent too far behind skipped"),
        Metric("ticks_repeated", "ticks", Kind.SUM, "numbered ticks that came again and got the kept reply"),
        Metric("requests_refused", "requests", Kind.SUM, "requests answered with a typed error, by its code"),
        Metric("episode_return", "reward", Kind.MEAN, "undiscounted return of a finished game"),
        Metric("episode_length", "ticks", Kind.MEAN, "ticks of a finished game"),
        Metric("games_failed", "games", Kind.SUM, "games that an error ended or left without a return, by its place"),
        Metric("games_without_return", "games", Kind.SUM, "games that stopped without a recorded return"),
        Metric("gamecores_failed", "processes", Kind.SUM, "game processes of the job that ended in failure"),
        Metric("recordings", "sessions", Kind.SUM, "recorded sessions, by reason"),
        Metric("recording_lost", "ticks", Kind.SUM, "ticks that could not be recorded, by reason"),
        Metric("recording_frames_lost", "frames", Kind.SUM, "frames that their ticks lack, by reason"),
        Metric("arm_sessions", "sessions", Kind.SUM, "sessions begun, by model, arm and version"),
        Metric("arm_ticks", "ticks", Kind.SUM, "ticks answered, by model, arm and version"),
        Metric("arm_return", "reward", Kind.MEAN, "return of a finished game, by model, arm and version"),
        Metric("arm_refusals", "forwards", Kind.SUM, "forwards answered with a typed error, by model, arm and version"),
        Metric("arm_errors", "sessions", Kind.SUM, "sessions that an error ended, by model, arm and version"),
        Metric("forward_batch_size", "observations", Kind.MEAN, "observations in one engine call"),
        Metric("forward_seconds", "s", Kind.PERCENTILE, "one engine call"),
        Metric("forward_wait_seconds", "s", Kind.PERCENTILE, "time a forward waited for its batch at the engine"),
        Metric("model_call_size", "observations", Kind.MEAN, "observations in one call to a model deployment"),
        Metric("model_call_seconds", "s", Kind.PERCENTILE, "one call to a model deployment, with its queue there"),
        Metric("model_call_wait_seconds", "s", Kind.PERCENTILE, "time a forward waited for its call to a deployment"),
        Metric("fragments_pushed", "fragments", Kind.SUM, "fragments that reached the replay buffer"),
        Metric("agent_errors", "errors", Kind.SUM, "exceptions raised in hooks of agents, by hook"),
        Metric("fragments_dropped", "fragments", Kind.SUM, "fragments that errors or load took, by reason"),
        Metric("env_steps", "steps", Kind.SUM, "transitions that reached the replay buffer"),
        Metric("replay_dropped", "transitions", Kind.SUM, "transitions dropped in the buffer or before it, by reason"),
        Metric("eval_dropped", "transitions", Kind.SUM, "transitions that evaluation buffers dropped, by reason"),
        Metric("replay_reused", "batches", Kind.SUM, "batches the learner got again because there was no other"),
        Metric("replay_restarts", "shards", Kind.SUM, "buffer shards that died and restarted empty"),
        Metric("replay_batches", "batches", Kind.LAST, "learner batches waiting in the buffer"),
        Metric("rollout_wait_seconds", "s", Kind.PERCENTILE, "a rollout worker's wait before a fragment"),
        Metric(
            "rollout_waits_overdue", "waits", Kind.SUM, "waits of rollout workers for weights or room that timed out"
        ),
        Metric("rollout_workers", "workers", Kind.LAST, "target number of rollout workers, by component"),
        Metric("rollout_workers_lost", "workers", Kind.SUM, "rollout workers that ended unexpectedly, by reason"),
        Metric(
            "rollout_steps_lost", "transitions", Kind.SUM, "transitions lost with rollout workers, at most, by reason"
        ),
        Metric("learner_wait_fraction", "1", Kind.MEAN, "share of an update's time spent waiting for its batch"),
        Metric("learner_idle_fraction", "1", Kind.MEAN, "share of the time without learning while a batch was ready"),
        Metric("evaluate_seconds", "s", Kind.PERCENTILE, "one evaluation of the model that learns"),
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
        Metric("epochs", "1", Kind.MEAN, "passes over a learner batch"),
        Metric("grad_norm", "1", Kind.MEAN, "gradient norm before clipping"),
        Metric("checkpoints_failed", "checkpoints", Kind.SUM, "checkpoints that could not be saved in their turn"),
        Metric("metrics_dropped", "samples", Kind.SUM, "samples dropped because there were too many metric names"),
        Metric("labels_folded", "samples", Kind.SUM, "samples put under `other`: their metric had too many labels"),
        Metric("actions", "1", Kind.SHAPE, "actions of a learner batch, by their component"),
        Metric("advantages", "1", Kind.SHAPE, "advantages of a learner batch, before they are normalised"),
        Metric("weights", "1", Kind.SHAPE, "weights of the model that learns, by parameter"),
        Metric("learning_rate", "1", Kind.LAST, "of the last optimiser step"),
        Metric("league_games", "games", Kind.SUM, "games of a league that have ended, by outcome"),
        Metric("league_games_per_s", "games/s", Kind.MEAN, "rate of these games"),
        Metric("league_points", "points", Kind.LAST, "rating of a league's player or script, by name"),
        Metric("league_pool", "snapshots", Kind.LAST, "snapshots of a league that can be drawn"),
        Metric("league_champion", "versions", Kind.LAST, "registered version of a league's champion"),
    )
}


OVERLOADED = "overloaded"
"""Label of ``games_failed`` and ``fragments_dropped``: a model was full or late. That shows load, and is no error."""
DROPPED = "metrics_dropped"
"""Counts samples of names past a bound."""
FOLDED = "labels_folded"
"""Counts samples of labels past a bound."""
OTHER = "other"
"""The label of samples whose own label had no room."""
MAX_LABELS = 64
"""Labels that a metric may have; further ones are `OTHER`."""
MAX_NOTE = 500
"""Longest note kept, in characters; the rest is cut."""

_MAX_WORD = 64
_name_of_label, _value_of_label = escape_of(r"[^\w-]"), escape_of(r"[^\w. -]")


def label_of(labels: Mapping[str, object]) -> str:
    """Joins several labels into the one label of a sample: ``{"side": "left", "hero": 3}`` is ``hero:3.side:left``.

    The labels are sorted by name, so their order does not matter. Characters other than letters, digits, ``-`` and
    ``_`` are escaped (``_u0025_`` is a per cent sign), so different labels stay different; values may also have ``.``
    and spaces.
    """
    return ".".join(
        f"{shortened(_name_of_label(name), _MAX_WORD)}:{shortened(_value_of_label(str(value)), _MAX_WORD)}"
        for name, value in sorted(labels.items())
    )


def kind_of(kind: Kind | str) -> Kind:
    """The kind of that name.

    Raises:
        ConfigError: there is none.
    """
    known = [each for each in Kind if each is not Kind.SHAPE]
    if kind not in known:
        raise ConfigError(f"kind is {kind!r}, expected one of {', '.join(known)}", key="kind")
    return Kind(kind)


def significant(value: float, digits: int = 4) -> str:
    """A number with ``digits`` significant digits and never an exponent: ``0.8123``, ``21.5``, ``-1204``."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def games_text(count: float) -> str:
    """A number of games: ``1 game``, ``20 games``."""
    return f"{count:.0f} {'game' if count == 1 else 'games'}"


@dataclass(slots=True)
class _Cell:
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

    def add(self, value: float, weight: float) -> None:
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
        self.count += len(values)
        self.total += sum(values)
        self.maximum = max(self.maximum, *values)
        self.last = values[-1]
        if self.kind is not None:
            self.minimum = min(self.minimum, *values)
            bounds = _BOUNDS[self.kind]
            ordered = sorted(values)  # so that one search finds all values of a bucket
            at = 0
            while at < len(ordered):
                slot = bisect.bisect_left(bounds, ordered[at])
                end = bisect.bisect_right(ordered, bounds[slot], at) if slot < len(bounds) else len(ordered)
                self.buckets[slot] = self.buckets.get(slot, 0.0) + end - at
                at = end
        if self.window is not None:
            self.window.extend(values)

    def merge(self, other: _Cell) -> None:
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

    def copy(self) -> _Cell:
        """A copy that shares no data with this cell."""
        window = None if self.window is None else self.window.copy()
        return replace(self, buckets=dict(self.buckets), window=window)

    def quantile(self, q: float) -> float:
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


Part = dict[tuple[str, str], _Cell]
"""Drained samples: cells by metric name and label."""


Drained = tuple[Part, dict[str, Metric]]
"""Result of `Recorder.drain`: the samples, and the declarations of an application's own metrics among them."""


def without_shapes(part: Drained) -> Drained:
    """The part without distributions: of several models each replaces the other's."""
    cells, own = part
    return {place: cell for place, cell in cells.items() if cell.shape is None}, own


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

    def listen(self, listener: Callable[[Drained], None]) -> None:
        """Passes every part drained from now on, even an empty one, to ``listener``, which must not change it."""
        self._listeners.append(listener)

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
                    cell = self._cells[place] = _cell(self.metric(name))
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
                cell = self._cells[name, ""] = _cell(METRICS[name])
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
                    cell = self._cells.setdefault(place, _Cell())
                cell.shape = shape

    def metric(self, name: str) -> Metric:
        """The declaration of ``name``; an application's own defaults to a mean."""
        return METRICS.get(name) or self._own.get(name) or Metric(name, "", Kind.MEAN, "application metric")

    def drain(self) -> Drained:
        """Removes and returns the samples since the last drain; the listeners get them, too."""
        with self._draining:  # so that parts come to a listener one after another
            with self._lock:
                part = self._cells, self._own
                self._cells, self._own = {}, {}
                self._labels.clear()
            for listener in self._listeners:
                listener(part)
        return part

    def merge(self, part: Drained) -> None:
        """Adds the samples that another recorder drained."""
        cells, own = part
        with self._lock:
            for key, cell in cells.items():
                name, label = key
                mine = self._cells.get(key)
                if mine is None:
                    if (place := self._place(name, label, cell.count)) is None:
                        continue
                    key, mine = place, self._cells.get(place)
                if name in own:
                    self._own[name] = own[name]
                if mine is not None:
                    mine.merge(cell)
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
        self._cells.setdefault((name, ""), _Cell()).add(samples, 1.0)


def _cell(metric: Metric) -> _Cell:
    return _Cell(
        kind=metric.kind if metric.kind in _BOUNDS else None,
        window=deque(maxlen=WINDOW_GAMES) if metric.name in WINDOWED else None,
    )
