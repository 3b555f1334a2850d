"""``brayx train``: `brayx.front` trains the job."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path

from brayx.command_line import SWITCH, announced
from brayx.commands.arguments import add_job, add_set, add_tracking
from brayx.jobs.shipped import TEMPLATES

HELP = "run a job's training"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_job(parser)
    training_options(parser)


def training_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every command that trains a job."""
    add_set(parser)
    parser.add_argument("--trial", help="name of the MLflow run; an interrupted one of that name is resumed")
    parser.add_argument("--new", help="start a new run even if there is one to resume", **SWITCH)
    add_tracking(parser)
    parser.add_argument(
        "--cluster", nargs="?", const="", metavar="ADDRESS",
        help="run on Ray instead of in this process: join the cluster at ADDRESS (auto: this machine's), or start one",
    )  # fmt: skip
    parser.add_argument(
        "--ingress", choices=["haproxy", "serve"], default="haproxy",
        help="Serve's ingress when Ray is started here (default: %(default)s)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns 0, or 130 if it was interrupted."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(announced(arguments.config, "before training began"))
        if arguments.cluster is None:
            from brayx.tracking.clerk_process import started_early

            stack.enter_context(started_early())
        from brayx.garbage import importing

        with importing("torch"):
            from brayx.front import train_job
            from brayx.jobs.config import JobConfig

        job = JobConfig.load(arguments.config, arguments.overrides)
        result = train_job(
            job,
            cluster=arguments.cluster,
            ingress=arguments.ingress,
            trial_name=arguments.trial,
            resume=not arguments.new,
            tracking=arguments.tracking,
        )
    print(result.summary())
    if result.version is not None and len(job.actors or job.rollouts) == 1:
        print(f"next: {shlex.join(_serve(arguments))}")
    return 0 if result.finished else 130


def _serve(arguments: argparse.Namespace) -> list[str]:
    """The command that serves what this one has trained."""
    file = Path(arguments.config)
    words = ["brayx", "serve", file.name if file.parent == TEMPLATES else arguments.config]
    for override in arguments.overrides:
        words += ["--set", override]
    return words if arguments.tracking is None else [*words, "--tracking", arguments.tracking]
