"""A trial's totals: sums since it began, windows over the last games, rates over the last seconds.

Pure arithmetic over the metrics of processes or threads. Knows nothing of recorders, nor of where metrics are written.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, get_args

from brayx.errors import ConfigError
from brayx.metrics import (
    DROPPED,
    FOLDED,
    MAX_LABELS,
    METRICS,
    OTHER,
    OVERLOADED,
    WINDOW_GAMES,
    WINDOWED,
    Bars,
    Drained,
    Kind,
    Part,
    Recorder,
    XAxis,
    games_text,
    significant,
)

RATED = {"ticks": "ticks_per_s", "env_steps": "env_steps_per_s"}
"""Sums also kept as a rate over the last seconds."""
QUIET_S = "quiet_s"
"""Time since the newest env step, or else since this hub started."""
FAILED_S = "failed_s"
"""Time since the newest game failed, load aside; with one at least since this hub started."""
TICKS_THIS_RUN = "ticks_this_run"
"""Ticks answered since this hub started, without the trial's earlier ones."""
GAMES = "games"
"""Finished games since the trial began. A league's game counts once, even if several of its seats record a return."""
ARM_GAMES, ARM_RETURNS = "arm_games", "arm_returns"
"""Number of the finished games, and sum of their returns, by model, arm and version; no metrics, since Prometheus's
counters cannot fall."""
GAMES_IN_WINDOW = "games_in_window"
"""Games that ``episode_return.last100`` is the mean of: at most `WINDOW_GAMES`, and fewer than `GAMES` if a trial or
its hub was resumed, or if games failed."""
RETURN_ERROR = "episode_return.error100"
"""Standard error of ``episode_return.last100``; with two games at least."""
FAILED_IN_WINDOW = "games_failed_in_window"
"""Games that failed, among the last `WINDOW_GAMES` that finished or failed."""
OVERLOADED_IN_WINDOW = "games_overloaded_in_window"
"""Games among those that failed because a model was full or late."""
FRAGMENTS_IN_WINDOW, LOST_IN_WINDOW = "fragments_in_window", "fragments_lost_in_window"
"""Number of the newest fragments, `WINDOW_FRAGMENTS` or a few more, and how many of them were lost by errors."""
WINDOW_FRAGMENTS = 100

SECONDS = "seconds"
"""How long the trial has been trained, by its learner's clock: the one duration of it that is shown anywhere."""

_ERROR = "error"
_RETURN = "episode_return.last100"
_ADDED = {GAMES, GAMES_IN_WINDOW, FAILED_IN_WINDOW, OVERLOADED_IN_WINDOW, FRAGMENTS_IN_WINDOW, LOST_IN_WINDOW}
_ADDED |= {TICKS_THIS_RUN, *RATED.values()}
BEHAVIOUR_RETURN, BEHAVIOUR_POINTS = "behaviour_return.", "behaviour_points."
"""Prefixes of the mean returns and ratings of several behaviours, see `joined`."""


def mean_return(numbers: Mapping[str, float]) -> str:
    """The mean return of the newest games, and their number: ``0.8123 (100 games, 2 failed)``."""
    mean, failed = numbers.get(_RETURN, math.nan), numbers.get(FAILED_IN_WINDOW, 0.0)
    games = games_text(numbers.get(GAMES_IN_WINDOW, 0.0)) + (f", {failed:.0f} failed" if failed else "")
    return f"{'-' if math.isnan(mean) else significant(mean)} ({games})"


def points_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """The ratings of a league's players by their names; empty without a league."""
    return {name.partition(".")[2]: value for name, value in numbers.items() if name.startswith("league_points.")}


def joined(numbers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The numbers of several behaviours as of one training: counts and rates are added, all others are the first one's.

    Args:
        numbers: of each behaviour, as from `Totals.snapshot`.

    Returns:
        With several behaviours also the mean return of each, as ``behaviour_return.NAME``, and the rating of each that
        has self-play, as ``behaviour_points.NAME``.
    """
    first, *others = numbers.values()
    whole = dict(first)
    for other in others:
        for name, value in other.items():
            metric = name.partition(".")[0]
            if metric in _ADDED or (metric in METRICS and METRICS[metric].kind is Kind.SUM):
                whole[name] = whole.get(name, 0.0) + value
    if others:
        for name, part in numbers.items():
            whole[f"{BEHAVIOUR_RETURN}{name}"] = part.get(_RETURN, math.nan)
            if points := points_of(part):
                whole[f"{BEHAVIOUR_POINTS}{name}"] = max(points.values())
    return whole


class Totals:
    """Sums, windows and rates of a trial. Not thread safe; pure arithmetic.

    Args:
        sums: initial ones by summary name, from an interrupted trial.
        rate_window_s: seconds that rates look back.
        max_names: bound on distinct names; past it samples of a new name are dropped, and counted as
            ``metrics_dropped``. Metrics of `METRICS` without a label always have room.
        max_labels: bound on labels of one metric; past it samples of a new label count under ``other``, and also as
            ``labels_folded``.
        x_axis: unit of `step`.
        clock: seconds, monotonic.

    Attributes:
        own: names of an application's own metrics, up to their first dot.
        own_sums: names of those that are sums.
        sums: every sum since the trial began, by summary name.
        notes: the newest note of each metric that has one, by summary name.

    Raises:
        ConfigError: there is no such x axis.
    """

    def __init__(
        self,
        sums: Mapping[str, float] | None = None,
        *,
        rate_window_s: float = 5.0,
        max_names: int = 4096,
        max_labels: int = MAX_LABELS,
        x_axis: XAxis = "env_steps",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if x_axis not in get_args(XAxis):
            raise ConfigError(f"x_axis is {x_axis!r}, expected one of {', '.join(get_args(XAxis))}", key="x_axis")
        self.sums = dict(sums or {})
        self._x_axis = x_axis
        self.own = {name.partition(".")[0] for name in self.sums} - METRICS.keys() - {GAMES}
        self.own_sums: set[str] = set()
        self._known = set(self.sums)
        self._max_labels = max_labels
        # A label of an own metric whose name has a dot is counted under another name: the bound is then a little off.
        self._labels = Counter(name for name, _, label in (key.partition(".") for key in self._known) if label)
        self._max_names = max_names
        self._room = max_names + len(self._known)
        self._interval = self._recorder()
        self._run = self._recorder()
        self._ticks = 0.0
        self._latest: dict[str, float] = {SECONDS: self.sums.pop(SECONDS, 0.0)}
        self.notes: dict[str, str] = {}
        self._shapes: dict[tuple[str, str], Bars] = {}
        self._outcomes = deque[float | str](maxlen=WINDOW_GAMES)
        """Returns of the newest games; for a failed one, `OVERLOADED` or `_ERROR`."""
        self._explained = 0.0
        self._fragments = deque[tuple[float, float]]()
        """Numbers of fragments, stored or lost, and of lost ones."""
        self._windows = {name: deque[float](maxlen=WINDOW_GAMES) for name in WINDOWED if name != "episode_return"}
        self._rates: dict[str, deque[tuple[float, float]]] = {name: deque() for name in RATED}
        self._rate_window_s = rate_window_s
        self._clock = clock
        self._started = self._stepped = clock()
        self._failed: float | None = None

    def merge(self, part: Drained) -> None:
        """Merges the metrics that one process has recorded."""
        cells, declared = self._bounded(part)
        self._interval.merge((cells, declared))
        now = self._clock()
        failed = overloaded = processes = pushed = lost = 0.0
        for (name, label), cell in cells.items():
            kind = METRICS[name].kind if name in METRICS else declared[name].kind if name in declared else Kind.MEAN
            key = _key(name, label)
            if name not in METRICS:
                self.own.add(name.partition(".")[0])
            if cell.note:
                self.notes[key] = cell.note
            if cell.shape is not None:
                self._shapes[name, label] = cell.shape
            if kind in (Kind.PERCENTILE, Kind.HISTOGRAM):
                self._run.merge(({(name, label): cell}, declared))
            if name == "ticks":
                self._ticks += cell.total
            if kind is Kind.SUM:
                self.sums[key] = self.sums.get(key, 0.0) + cell.total
                if name not in METRICS:
                    self.own_sums.add(name)
            if name in self._rates:
                self._rates[name].append((now, cell.total))
            if name == "env_steps":
                self._stepped = now
            if name in self._windows and cell.window is not None:
                self._windows[name].extend(cell.window)
            if name == "episode_return" and cell.window is not None:
                self._outcomes.extend(_ERROR if math.isnan(value) else value for value in cell.window)
            failed += cell.total if name == "games_failed" else 0
            overloaded += cell.total if name == "games_failed" and label == OVERLOADED else 0
            processes += cell.total if name == "gamecores_failed" else 0
            pushed += cell.total if name == "fragments_pushed" else 0
            lost += cell.total if name == "fragments_dropped" and label != OVERLOADED else 0
            if name == "episode_return":
                self.sums[GAMES] = self.sums.get(GAMES, 0.0) + cell.count
            if name == "arm_return":
                for sum_of, value in ((ARM_GAMES, float(cell.count)), (ARM_RETURNS, cell.total)):
                    self.sums[_key(sum_of, label)] = self.sums.get(_key(sum_of, label), 0.0) + value
        # A game process often ends of what failed in its session: that is one game.
        self._explained = min(self._explained + failed, WINDOW_GAMES)
        unexplained = max(processes - self._explained, 0.0)
        self._explained -= processes - unexplained
        for reason, count in ((OVERLOADED, overloaded), (_ERROR, failed - overloaded + unexplained)):
            self._outcomes.extend(itertools.repeat(reason, min(round(count), WINDOW_GAMES)))
        if failed - overloaded + unexplained:
            self._failed = now
        if pushed or lost:
            self._fragments.append((pushed + lost, lost))
            while sum(count for count, _ in self._fragments) - self._fragments[0][0] >= WINDOW_FRAGMENTS:
                self._fragments.popleft()

    def take_interval(self) -> dict[str, float]:
        """Numbers of the metrics with samples since the last call: sums as totals, all others for the interval."""
        fresh = self._numbers(self._interval.summary())
        self._latest.update(fresh)
        if fresh:
            fresh.update(self._derived())
        self._interval = self._recorder()
        return fresh

    def take_shapes(self) -> dict[tuple[str, str], Bars]:
        """The newest distributions since the last call, by metric and label."""
        fresh, self._shapes = self._shapes, {}
        return fresh

    def snapshot(self) -> dict[str, float]:
        """The newest number of everything, and counts since this object was created.

        ``NAME.p50`` and ``NAME.p99`` are of the last interval, ``NAME.run.p50`` and ``NAME.run.p99`` of every sample
        since this object was created; so is ``ticks_this_run``.
        """
        numbers = {**self._latest, **self._numbers(self._interval.summary()), **self.sums, **self._derived()}
        for name, value in self._run.summary().items():
            metric, _, percentile = name.rpartition(".")
            numbers[f"{metric}.run.{percentile}"] = value
        return {**numbers, TICKS_THIS_RUN: self._ticks}

    @property
    def step(self) -> int:
        """The x axis: env steps, updates or seconds since the trial began."""
        return int(self._latest[SECONDS] if self._x_axis == SECONDS else self.sums.get(self._x_axis, 0))

    def histograms(self) -> dict[str, dict[str, list[float]]]:
        """Bars of every histogram over all samples since this object was created, as `Recorder.histograms`."""
        return self._run.histograms()

    def _recorder(self) -> Recorder:
        """A recorder that accepts everything that `_bounded` returns."""
        return Recorder(self._room, max_labels=self._room)

    def _bounded(self, part: Drained) -> Drained:
        """The part without names that there is no room for, and with counts of the dropped samples."""
        cells, declared = part
        bounded_cells: Part = {}
        folded: list[tuple[tuple[str, str], Any]] = []
        refused = 0.0
        for (name, label), cell in cells.items():
            key = _key(name, label)
            new = key not in self._known
            if new and label not in ("", OTHER) and self._labels[name] >= self._max_labels:
                folded.append(((name, OTHER), cell))
            elif not new or len(self._known) < self._max_names or (name in METRICS and not label):
                self._known.add(key)
                self._labels[name] += new and label not in ("", OTHER)
                bounded_cells[name, label] = cell
            else:
                refused += cell.count
        if not (refused or folded):
            return bounded_cells, declared
        bounded = self._recorder()
        bounded.merge((bounded_cells, declared))
        for place, cell in folded:
            bounded.merge(({place: cell}, declared))
            self._known.add(_key(*place))
            bounded.add(FOLDED, cell.count)
        if refused:
            bounded.add(DROPPED, refused)
        return bounded.drain()

    def _numbers(self, summary: Mapping[str, float]) -> dict[str, float]:
        return {name: self.sums.get(name, value) for name, value in summary.items()}

    def _derived(self) -> dict[str, float]:
        returns = [outcome for outcome in self._outcomes if not isinstance(outcome, str)]
        derived: dict[str, float] = {
            GAMES_IN_WINDOW: len(returns),
            FAILED_IN_WINDOW: len(self._outcomes) - len(returns),
            OVERLOADED_IN_WINDOW: self._outcomes.count(OVERLOADED),
            FRAGMENTS_IN_WINDOW: sum(count for count, _ in self._fragments),
            LOST_IN_WINDOW: sum(lost for _, lost in self._fragments),
        }
        if returns:
            derived[_RETURN] = sum(returns) / len(returns)
        if len(returns) > 1:
            derived[RETURN_ERROR] = statistics.stdev(returns) / math.sqrt(len(returns))
        now = self._clock()
        for name, window in self._windows.items():
            if window:
                derived[f"{name}.last100"] = sum(window) / len(window)
        for name, events in self._rates.items():
            while events and events[0][0] < now - self._rate_window_s:
                events.popleft()
            span = min(self._rate_window_s, max(now - self._started, 0.5))
            derived[RATED[name]] = sum(total for _, total in events) / span
        league = [count for name, count in self.sums.items() if name.partition(".")[0] == "league_games"]
        derived[GAMES] = sum(league) if league else self.sums.get(GAMES, 0.0)
        derived[QUIET_S] = now - self._stepped
        if self._failed is not None:
            derived[FAILED_S] = now - self._failed
        return derived


def _key(name: str, label: str) -> str:
    return f"{name}.{label}" if label else name
