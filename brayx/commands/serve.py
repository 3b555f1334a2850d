"""``brayx serve``: `brayx.local.serving` serves the job."""

from __future__ import annotations

import argparse

from brayx.command_line import announced
from brayx.commands.arguments import SHIPPED_JOBS, add_actor, add_league_trial, add_set, add_tracking, add_trust
from brayx.jobs.shipped import job_file

HELP = "serve a job's champion in this process; `serve run` does it on Ray"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "config", type=job_file,
        help=f"YAML of the job, or name of a shipped one: {SHIPPED_JOBS}; or a version: models:/NAME@ALIAS, of the job "
        "in its checkpoint",
    )  # fmt: skip
    add_set(parser)
    add_actor(parser)
    parser.add_argument(
        "--model", dest="models", action="append", default=[], metavar="[NAME=]MODEL",
        help="version that a model serves: models:/NAME@ALIAS, which it follows, or models:/NAME/3 (default: champion)",
    )  # fmt: skip
    add_league_trial(parser)
    add_tracking(parser)
    add_trust(parser, "with models:/NAME: ")


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is interrupted."""
    with announced(arguments.config, "before it was served"):
        from brayx.jobs.config import JobConfig, only
        from brayx.local.serving import serve
        from brayx.tracking import tracking_uri

        models = {}
        if arguments.config.startswith("models:/"):
            from brayx.jobs.env_door import job_of_version

            uri = tracking_uri(arguments.tracking)
            job, model = job_of_version(arguments.config, uri, arguments.overrides, arguments.trust)
            models[model] = arguments.config
        else:
            job = JobConfig.load(arguments.config, arguments.overrides)
            uri = tracking_uri(arguments.tracking or job.tracking.uri)
        for reference in arguments.models:
            name, named, version = reference.partition("=models:/")
            models[only("model", job.models, name if named else "")] = f"models:/{version}" if named else reference
        serve(job, uri, actor=arguments.actor, models=models, trial=arguments.trial)
    return 0
