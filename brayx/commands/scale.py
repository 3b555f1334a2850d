"""``brayx scale``: `brayx.cluster.scale` reaches the training."""

from __future__ import annotations

import argparse

from brayx.command_line import count
from brayx.commands.arguments import add_tracking

HELP = "change the number of rollout workers of a running training"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("trial", metavar="TRIAL", help="id or name of the trial")
    parser.add_argument("num_workers", metavar="WORKERS", type=count, help="how many it is to have from now on")
    parser.add_argument("--rollout", metavar="NAME", help="the component, of a job that has several")
    add_tracking(parser)
    parser.add_argument(
        "--timeout-s", type=float, default=30.0, help="deadline for the job to take the request (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Changes the number, and prints both."""
    from brayx.cluster.scale import scale

    done = scale(
        arguments.trial,
        arguments.num_workers,
        rollout=arguments.rollout,
        tracking=arguments.tracking,
        timeout_s=arguments.timeout_s,
    )
    print(f"workers of rollout {done.rollout!r}: {done.now} from now on; before, {done.before}")
    return 0
