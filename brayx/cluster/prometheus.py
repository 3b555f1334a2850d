"""A replica's samples in Ray's Prometheus export. Knows nothing of sessions, models or readers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from brayx.metrics import Drained, Recorder
from brayx.metrics.prometheus import Declared, Fold, MetricUpdate, Type, clean

logger = logging.getLogger(__name__)


class Exporter:
    """Exports a recorder's drained metrics to Prometheus: pass `show` to `Recorder.listen`.

    Args:
        levels: returns current levels as (metric of `METRICS`, label, value); called by the thread that drains.
        tags: tags of every series, which identify the replica.
    """

    def __init__(self, levels: Callable[[], Iterable[tuple[str, str, float]]] = tuple, **tags: str) -> None:
        self._levels = levels
        self._handing = threading.Lock()
        self._fold = Fold()
        self._tags = {tag: clean(value) for tag, value in tags.items()}
        self._metrics: dict[str, Any] = {}
        self._gauges: dict[tuple[str, str, str], MetricUpdate] = {}
        self._failing = False

    def show(self, part: Drained) -> None:
        """Exports one part through Ray; a failure is logged once."""
        try:
            with self._handing:
                self._export(part)
            self._failing = False
        except Exception:
            # A failed export must not stop counting: the recorder's other listeners get the numbers.
            if not self._failing:
                logger.warning("metrics are not exported for now", exc_info=True)
            self._failing = True

    def _export(self, part: Drained) -> None:
        levels = Recorder()
        for name, label, value in self._levels():
            levels.add(name, value, label=label)
        for point in (*self._fold.points(part), *self._fold.points(levels.drain())):
            if point.of.type is Type.GAUGE:
                self._gauges[point.of.name, point.tags["label"], point.tags.get("metric", "")] = point
            else:
                self._give(point)
        # Ray forgets a level that is not repeated.
        for point in self._gauges.values():
            self._give(point)

    def _give(self, point: MetricUpdate) -> None:
        metric = self._metrics.get(point.of.name)
        if metric is None:
            metric = self._metrics[point.of.name] = _create(point.of, tuple(self._tags))
        tags = {**self._tags, **point.tags}
        match point.of.type:
            case Type.COUNTER:
                metric.inc(point.value, tags)
            case Type.GAUGE:
                metric.set(point.value, tags)
            case Type.HISTOGRAM:
                for _ in range(point.count):
                    metric.observe(point.value, tags)


def _create(declared: Declared, tags: tuple[str, ...]) -> Any:
    from ray.util import metrics

    keys = (*tags, *declared.tags)
    match declared.type:
        case Type.COUNTER:
            return metrics.Counter(declared.name, declared.help, keys)
        case Type.GAUGE:
            return metrics.Gauge(declared.name, declared.help, keys)
        case Type.HISTOGRAM:
            return metrics.Histogram(declared.name, declared.help, list(declared.bounds), keys)
