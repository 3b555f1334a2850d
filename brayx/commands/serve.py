"""``brayx serve``: `brayx.local.serving` serves the job."""

from __future__ import annotations

import argparse

from brayx.command_line import announced
from brayx.commands.arguments import add_actor, add_job, add_league_trial, add_set, add_tracking

HELP = "serve a job's champion in this process; `serve run` does it on Ray"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_job(parser)
    add_set(parser)
    add_actor(parser)
    parser.add_argument(
        "--model", dest="models", action="append", default=[], metavar="[NAME=]MODEL",
        help="version that a model serves: models:/NAME@ALIAS, which it follows, or models:/NAME/3 (default: champion)",
    )  # fmt: skip
    add_league_trial(parser)
    add_tracking(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is interrupted."""
    with announced(arguments.config, "before it was served"):
        from brayx.jobs.config import JobConfig, only
        from brayx.local.serving import serve
        from brayx.tracking import tracking_uri

        job = JobConfig.load(arguments.config, arguments.overrides)
        models = {}
        for reference in arguments.models:
            name, named, version = reference.partition("=models:/")
            models[only("model", job.models, name if named else "")] = f"models:/{version}" if named else reference
        serve(
            job,
            tracking_uri(arguments.tracking or job.tracking.uri),
            actor=arguments.actor,
            models=models,
            trial=arguments.trial,
        )
    return 0
