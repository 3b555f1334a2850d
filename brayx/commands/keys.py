"""``brayx keys``: `brayx.gamecore.auth` makes the keys."""

from __future__ import annotations

import argparse

HELP = "make keys for a service or a console"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the verbs."""
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    new = verbs.add_parser("new", help="append a key with a fresh secret to a file, and print its id")
    new.add_argument("--file", default="keys.txt", help="created if it is missing (default: %(default)s)")
    new.add_argument("--id", default=None, help="id of the key (default: a generated one)")
    new.add_argument(
        "--scope",
        choices=["read", "control"],
        default="",
        help="make a key for the console: may only read, or also control",
    )


def run(arguments: argparse.Namespace) -> int:
    """Makes the key; prints its id."""
    from brayx.gamecore.auth import new_key

    print(new_key(arguments.file, arguments.id, arguments.scope))
    return 0
