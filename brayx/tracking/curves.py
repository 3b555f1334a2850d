"""Curves of trials: a metric over env steps, updates or seconds, and their picture."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from brayx.errors import ConfigError
from brayx.metrics.charts import CHARTS
from brayx.tracking import Trial
from brayx.tracking.finding import newest_runs
from brayx.tracking.store import client_of, telling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]
Point = tuple[int, int, float]
"""Unix time in ms (equal for values that were written together), step, and value."""


def curve(trial: Trial, metric: str, against: str) -> Curve:
    """Points of a metric, as from `curves`.

    Raises:
        ConfigError: the trial has none of them.
        TrackingError: the store could not be read.
    """
    points = curves(trial, [metric], against)[metric]
    if not points:
        missing = CHARTS[against] if metric in trial.metrics() else metric
        raise ConfigError(f"trial {trial.name!r} has no metric {missing!r}", trial=trial.name, metric=missing)
    return points


def curves(trial: Trial, metrics: Sequence[str], against: str) -> dict[str, Curve]:
    """Points of metrics over ``env_steps``, ``updates`` or ``seconds``, in order, for any ``x_axis``; empty
    ones of metrics that the trial does not have.

    Raises:
        TrackingError: the store could not be read.
    """
    passed = _history(trial, CHARTS[against])
    return {metric: _over(_history(trial, metric), passed, against) for metric in metrics}


def _over(values: Sequence[Point], passed: Sequence[Point], against: str) -> Curve:
    # Both are metrics. A sum is written when it has grown: until it is again, it is what it was.
    if not passed and against == "env_steps":  # written without brayx's hub
        passed = [(time_ms, step, float(step)) for time_ms, step, _ in values]
    written = [time_ms for time_ms, _, _ in passed]
    places = [bisect.bisect_right(written, time_ms) for time_ms, _, _ in values]
    return sorted((passed[place - 1][2], value) for place, (_, _, value) in zip(places, values, strict=True) if place)


def _history(trial: Trial, metric: str) -> list[Point]:
    with telling(f"cannot read metric {metric!r} of trial {trial.name!r}"):
        points = client_of(trial.uri).get_metric_history(trial.run_id, metric)
    return sorted((point.timestamp, point.step, point.value) for point in points)


def draw(curves: Sequence[tuple[str, Curve]], *, metric: str, against: str) -> Figure:
    """Draws one line per curve, with its label in the legend."""
    from brayx.figures import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, points in curves:
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.5)
    axes.set_xlabel(against.replace("_", " "))
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def labels(trials: Sequence[Trial]) -> list[str]:
    """Names of trials in a legend: with the project if there are several, and with what tells apart those of one name:
    the settings that differ, or else the id."""
    projects = len({trial.project for trial in trials})
    names = [f"{trial.project}: {trial.name}" if projects > 1 else trial.name for trial in trials]
    for name in {name for name in names if names.count(name) > 1}:
        places = [place for place, other in enumerate(names) if other == name]
        settings = [trials[place].params() for place in places]
        keys = sorted({key for params in settings for key in params if len({its.get(key) for its in settings}) > 1})
        marks = [", ".join(f"{key}={params.get(key, 'default')}" for key in keys[:3]) for params in settings]
        if len(set(marks)) < len(marks):
            marks = [trials[place].run_id[:8] for place in places]
        for place, mark in zip(places, marks, strict=True):
            names[place] = f"{name} ({mark})"
    return names


def trials_with(metric: str, uri: str) -> list[Trial]:
    """The trials that have the metric, oldest first.

    Raises:
        ConfigError: there is none.
    """
    runs = [run for run in newest_runs(uri)[1] if metric in run.data.metrics]
    if not runs:
        raise ConfigError(f"no trial in {uri} has the metric {metric!r}: see `brayx trials`", metric=metric)
    return [Trial.attach(uri, run.info.run_id) for run in reversed(runs)]


def save(figure: Figure, out: Path) -> None:
    """Writes a picture: PNG, SVG or PDF, by the file's name.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out} cannot be written: {error}", out=str(out)) from error
