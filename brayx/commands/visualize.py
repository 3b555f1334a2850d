"""``brayx visualize``, also ``python -m pipelines.visualize``: one picture of the curves of trials.

A trial is an id, as the last line of ``brayx ppo`` has it, or a name: the newest run of that name, in any project.
Without TRIAL, it draws all trials that have the metric.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from brayx.command_line import Switch, print_result
from brayx.metrics import XAxis
from brayx.metrics.charts import RETURN_CHART

HELP = "draw the curves of one or several trials"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.description = "Draw the curves of trials."
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help="id or name of a trial (default: all)")
    parser.add_argument(
        "--out", type=Path, help="the picture: .png, .svg or .pdf (default: curves.png next to mlflow.db)"
    )
    parser.add_argument(
        "--save-fig",
        action=Switch,
        default=True,
        help="write a picture; with false, print the last point of each curve (default: true)",
    )
    parser.add_argument("--metric", default=RETURN_CHART, help="metric's name in MLflow (default: %(default)s)")
    parser.add_argument("--x", choices=get_args(XAxis), default="env_steps", help="(default: %(default)s)")
    parser.add_argument(
        "--tracking",
        "--logdir",
        "--log-dir",
        help="MLflow's URI, or its sqlite file, or the folder of that file (default: ./mlflow.db)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Draws the curves, and prints the picture's path."""
    from brayx.tracking import find_trial, tracking_uri
    from brayx.tracking.curves import curve, draw, labels, save, trials_with
    from brayx.tracking.store import DEFAULT_FILE
    from brayx.urls import sqlite_path

    uri = tracking_uri(arguments.tracking)
    trials = [find_trial(reference, uri) for reference in arguments.trials] or trials_with(arguments.metric, uri)
    named = zip(labels(trials), trials, strict=True)
    curves = [(label, curve(trial, arguments.metric, arguments.x)) for label, trial in named]
    if not arguments.save_fig:
        print_result("\n".join(f"{label}: {points[-1][1]:g} at {points[-1][0]:,.0f}" for label, points in curves))
        return 0
    out = arguments.out or (sqlite_path(uri) or Path(DEFAULT_FILE)).with_name("curves.png")
    save(draw(curves, metric=arguments.metric, against=arguments.x), out)
    print(out)
    return 0
