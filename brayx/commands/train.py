"""``brayx train``: `brayx.front` trains the job."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path

from brayx.command_line import SWITCH, announced
from brayx.commands.arguments import add_job, add_set, add_tracking
from brayx.jobs.shipped import is_shipped, read_job

HELP = "run a job's training"
_DECIDES_MODEL = ("trainer.algorithm", "trainer.model")
"""Options of the trainer by which a model is built."""


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
        read_job(arguments.config)  # an error before the imports, which take seconds
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
        engines = any(gamecore.engine for actor in job.actors.values() for gamecore in actor.gamecores)
        print(f"next: {shlex.join(_serve(arguments, engines))}")
    return 0 if result.finished else 130


def _serve(arguments: argparse.Namespace, engines: bool) -> list[str]:
    """The command that serves what this one has trained, without options of the training; ``engines``: ``game`` has the
    options of an engine's builds, which play while training only."""
    words = ["brayx", "serve", Path(arguments.config).name if is_shipped(arguments.config) else arguments.config]
    for override in arguments.overrides:
        is_needed = override.startswith(_DECIDES_MODEL) or not override.startswith("trainer.")
        if is_needed and not (engines and override.startswith("game.")):
            words += ["--set", override]
    return words if arguments.tracking is None else [*words, "--tracking", arguments.tracking]
