"""``brayx trials``: `brayx.tracking.trials` reads the trials."""

from __future__ import annotations

import argparse
import sys

from brayx.command_line import print_result
from brayx.commands.arguments import add_tracking

HELP = "list the trials: status, env steps, return, and which is champion"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--project", default="", help="only trials of this project (default: all)")
    add_tracking(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    from brayx.tracking import tracking_uri
    from brayx.tracking.finding import NEWEST
    from brayx.tracking.trials import table, trials

    rows = trials(tracking_uri(arguments.tracking), arguments.project)
    print_result(table(rows))
    if len(rows) == NEWEST:
        print(f"only the newest {NEWEST:,} are listed; --project lists those of one project", file=sys.stderr)
    return 0
