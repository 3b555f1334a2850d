"""``brayx check``: the checks are in `brayx.jobs.checks`, the printed options in `brayx.jobs.options`."""

from __future__ import annotations

import argparse
import sys

from brayx.command_line import print_result
from brayx.commands.arguments import add_job, add_set

HELP = "validate a job's YAML and print it with every option, its default and its meaning"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_job(parser)
    add_set(parser)


def run(arguments: argparse.Namespace) -> int:
    """Checks the job, and prints it."""
    from brayx.jobs.checks import check_files, check_learning
    from brayx.jobs.code import check_code
    from brayx.jobs.config import JobConfig
    from brayx.jobs.options import documented
    from brayx.jobs.sources import Opened

    job = JobConfig.load(arguments.config, arguments.overrides)
    check_code(job, job.actors, mode="train")
    opened: Opened = {}
    check_files(job, opened)
    if len(job.trainers) == 1:
        check_learning(job, opened)
    print_result(documented(job), end="")
    if job.rollouts:
        from brayx.jobs.environments import lag_notes

        for note in lag_notes(job):
            print(f"brayx: note: {note}", file=sys.stderr)
    print(f"{arguments.config}: ok", file=sys.stderr)
    return 0
