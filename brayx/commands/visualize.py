"""Draws the curves of one or several trials into one picture.

    python -m pipelines.visualize TRIAL... --out curves.png
    python -m pipelines.visualize --logdir ./logs --save-fig true

A trial is an id, as the last line of `pipelines.ppo` has it, or a name: the newest run of that name, in any project.
Without TRIAL, it draws all trials that have the metric.
"""

from __future__ import annotations

import argparse
import bisect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from brayx.command_line import Parser, Switch, print_result
from brayx.errors import ConfigError
from brayx.metrics import XAxis
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.tracking import Trial, find_trial, tracking_uri
from brayx.tracking.finding import newest_runs
from brayx.tracking.store import DEFAULT_FILE, client_of, telling
from brayx.urls import sqlite_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

Curve = Sequence[tuple[float, float]]


def curve(trial: Trial, metric: str, against: str) -> Curve:
    """Points of a metric over ``env_steps``, ``updates`` or ``seconds``, in order, for any ``x_axis`` of the trial.

    Raises:
        ConfigError: the trial has none of them.
        TrackingError: the store could not be read.
    """
    values = _history(trial, metric)
    if not values:
        raise ConfigError(f"trial {trial.name!r} has no metric {metric!r}", trial=trial.name, metric=metric)
    # All three are metrics, too. A sum is written when it has grown: until it is again, it is what it was.
    passed = _history(trial, CHARTS[against])
    if not passed and against == "env_steps":  # written without brayx's hub
        passed = [(at, step, float(step)) for at, step, _ in values]
    written = [at for at, _, _ in passed]
    places = [bisect.bisect_right(written, at) for at, _, _ in values]
    points = [(passed[place - 1][2], value) for place, (_, _, value) in zip(places, values, strict=True) if place]
    if not points:
        raise ConfigError(
            f"trial {trial.name!r} has no metric {CHARTS[against]!r}", trial=trial.name, metric=CHARTS[against]
        )
    return sorted(points)


def _history(trial: Trial, metric: str) -> list[tuple[int, int, float]]:
    """Time (Unix, in ms; equal for values that were written together), step and value of each point, in order."""
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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(prog="brayx visualize", description="Draw the curves of trials.")
    made.add_argument("trials", nargs="*", metavar="TRIAL", help="id or name of a trial (default: all)")
    made.add_argument("--out", type=Path, help="the picture: .png, .svg or .pdf (default: curves.png beside mlflow.db)")
    made.add_argument(
        "--save-fig",
        action=Switch,
        default=True,
        help="write a picture; with false, print the last point of each curve (default: true)",
    )
    made.add_argument("--metric", default=RETURN_CHART, help="metric's name in MLflow (default: %(default)s)")
    made.add_argument("--x", choices=get_args(XAxis), default="env_steps", help="(default: %(default)s)")
    made.add_argument(
        "--tracking",
        "--logdir",
        "--log-dir",
        help="MLflow's URI, or its sqlite file, or the folder of that file (default: ./mlflow.db)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the curves, and prints the picture's path; returns 0.

    Raises:
        BrayxError: the picture could not be drawn.
    """
    options = parser().parse_args(argv)
    uri = tracking_uri(options.tracking)
    trials = [find_trial(reference, uri) for reference in options.trials] or _all_with(options.metric, uri)
    several = len({trial.project for trial in trials}) > 1
    curves = [
        (f"{trial.project}: {trial.name}" if several else trial.name, curve(trial, options.metric, options.x))
        for trial in trials
    ]
    if not options.save_fig:
        print_result("\n".join(f"{label}: {points[-1][1]:g} at {points[-1][0]:,.0f}" for label, points in curves))
        return 0
    out = options.out or (sqlite_path(uri) or Path(DEFAULT_FILE)).with_name("curves.png")
    _save(draw(curves, metric=options.metric, against=options.x), out)
    print(out)
    return 0


def _all_with(metric: str, uri: str) -> list[Trial]:
    """The trials that have the metric, oldest first."""
    runs = [run for run in newest_runs(uri)[1] if metric in run.data.metrics]
    if not runs:
        raise ConfigError(f"no trial in {uri} has the metric {metric!r}: see `brayx trials`", metric=metric)
    return [Trial.attach(uri, run.info.run_id) for run in reversed(runs)]


def _save(figure: Figure, out: Path) -> None:
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out} cannot be written: {error}", out=str(out)) from error
