"""Declares every metric with its name, unit, kind and labels, and accumulates samples into numbers.

A process records samples (`Recorder.add`). Its host drains them (`Recorder.drain`) to listeners: the trial's `Totals`
merge those parts (`Recorder.merge`) and read the result (`Recorder.summary`). Knows nothing of Ray, MLflow or
Prometheus.
"""

from brayx.metrics.cell import BOUNDS, SIGNED_BOUNDS
from brayx.metrics.declarations import (
    BEST_METRIC,
    DROPPED,
    ERROR_OF_BEST,
    FOLDED,
    GAMES_OF_BEST,
    MAX_LABELS,
    MAX_NOTE,
    METRICS,
    OTHER,
    OVERLOADED,
    STEPS_OF_CHECKPOINT,
    WINDOW_GAMES,
    WINDOWED,
    Bars,
    Kind,
    Metric,
    XAxis,
    games_text,
    kind_of,
    label_of,
    significant,
)
from brayx.metrics.recorder import Drained, Part, Recorder, without_shapes

__all__ = [
    "BEST_METRIC",
    "BOUNDS",
    "DROPPED",
    "ERROR_OF_BEST",
    "FOLDED",
    "GAMES_OF_BEST",
    "MAX_LABELS",
    "MAX_NOTE",
    "METRICS",
    "OTHER",
    "OVERLOADED",
    "SIGNED_BOUNDS",
    "STEPS_OF_CHECKPOINT",
    "WINDOWED",
    "WINDOW_GAMES",
    "Bars",
    "Drained",
    "Kind",
    "Metric",
    "Part",
    "Recorder",
    "XAxis",
    "games_text",
    "kind_of",
    "label_of",
    "significant",
    "without_shapes",
]
