"""Renders a process's metrics as OpenMetrics text, which Prometheus scrapes without Ray.

Names, labels and buckets are those of the cluster's export through Ray, prefix included: one dashboard and one set of
alerts fit both. Knows nothing of doors, nor of sessions.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate

from brayx.metrics import Drained, Recorder
from brayx.metrics.prometheus import Declared, Fold, MetricUpdate, Type, clean
from brayx.metrics.recorder import Traced

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_Labels = tuple[tuple[str, str], ...]


class OpenMetrics:
    """The totals of all samples of recorders since `follow`, as text. Thread safe.

    Args:
        tags: labels of every series.
    """

    def __init__(self, **tags: str) -> None:
        self._tags = self._labels_of(tags)
        self._fold = Fold(observations=math.inf)
        self._lock = threading.Lock()
        self._followed: list[Recorder] = []
        self._values: dict[Declared, dict[_Labels, float]] = {}
        self._histograms: dict[Declared, dict[_Labels, _Histogram]] = {}

    def follow(self, recorder: Recorder, **tags: str) -> None:
        """Renders the samples of ``recorder`` from now on; `text` drains it.

        Args:
            recorder: the recorder.
            tags: further labels of these series; series of recorders that it includes so far do not get them.
        """
        own = self._labels_of(tags)
        recorder.listen_apart(lambda part: self._add(part, own), self._add)
        self._followed.append(recorder)

    def text(self, levels: Iterable[tuple[str, str, float]]) -> str:
        """All series.

        Args:
            levels: the current levels: a metric of `METRICS`, its label, its value.
        """
        current = Recorder()
        for name, label, value in levels:
            current.add(name, value, label=label)
        for recorder in self._followed:
            recorder.drain()
        self._add(current.drain())
        traced: dict[str, list[Traced]] = defaultdict(list)
        for name, sample in (found for recorder in self._followed for found in recorder.traced()):
            traced[f"brayx_{name}"].append(sample)
        with self._lock:
            lines = [line for declared, series in self._values.items() for line in _family(declared, series)]
            for declared, histograms in self._histograms.items():
                lines += _head(declared)
                for labels, histogram in histograms.items():
                    lines += histogram.lines(declared.series, labels, traced[declared.name])
        return "\n".join((*lines, "# EOF\n"))

    @staticmethod
    def _labels_of(tags: Mapping[str, str]) -> _Labels:
        return tuple((tag, clean(value)) for tag, value in tags.items())

    def _add(self, part: Drained, tags: _Labels = ()) -> None:
        with self._lock:
            for update in self._fold.points(part):
                self._take(update, tags)

    def _take(self, update: MetricUpdate, tags: _Labels) -> None:
        declared = update.of
        labels = (*self._tags, *tags, *((tag, update.tags[tag]) for tag in declared.tags))
        if declared.type is Type.HISTOGRAM:
            histograms = self._histograms.setdefault(declared, {})
            if labels not in histograms:
                histograms[labels] = _Histogram(declared.bounds)
            histograms[labels].observe(update.value, update.count)
        else:
            series = self._values.setdefault(declared, defaultdict(float))
            series[labels] = update.value + (series[labels] if declared.type is Type.COUNTER else 0.0)


class _Histogram:
    """Counts of observations by bucket; the last bucket has no upper bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._is_signed = False

    def observe(self, value: float, count: int) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count
        self._is_signed |= value < 0

    def lines(self, series: tuple[str, ...], labels: _Labels, traced: Iterable[Traced]) -> list[str]:
        """The series of this histogram, with the newest traced sample of each bucket as its exemplar.

        OpenMetrics allows no sum, hence no count, if values may be below zero.
        """
        bucket, total, number = series
        counts = list(accumulate(self._counts))
        exemplars = [""] * len(counts)
        for value, trace_id, at in sorted(traced, key=lambda sample: sample.at):
            slot = bisect.bisect_left(self._bounds, value)
            if self._counts[slot]:
                exemplars[slot] = f" # {_braces((('trace_id', trace_id),))} {value!r} {at:.3f}"
        lines = [
            f"{bucket}{_braces((*labels, ('le', '+Inf' if math.isinf(bound) else repr(bound))))} {count}{exemplar}"
            for bound, count, exemplar in zip(self._bounds, counts, exemplars, strict=True)
        ]
        if not self._is_signed:
            lines.append(f"{number}{_braces(labels)} {counts[-1]}")
            lines.append(f"{total}{_braces(labels)} {self._sum!r}")
        return lines


def _head(declared: Declared) -> list[str]:
    name = declared.family
    return [f"# HELP {name} {_escaped(declared.help)}", f"# TYPE {name} {declared.type}"]


def _family(declared: Declared, series: dict[_Labels, float]) -> list[str]:
    (name,) = declared.series
    return _head(declared) + [f"{name}{_braces(labels)} {value!r}" for labels, value in series.items()]


def _braces(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
