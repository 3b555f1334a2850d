"""``brayx new``: `brayx.jobs.new` writes the files."""

from __future__ import annotations

import argparse

from brayx.jobs.new import KINDS, new_project

HELP = "make a project's folder: a game, an agent, a model and a job that trains as it is"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "name", help="name of the project and its folder: small letters of any language, digits, underscores"
    )
    parser.add_argument(
        "--template",
        choices=list(KINDS),
        default="rl",
        help=f"{'; '.join(f'{kind}: {what}' for kind, what in KINDS.items())} (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Makes the project; prints its files and the next command."""
    for file in new_project(arguments.name, arguments.template):
        print(file)
    # In its folder: there mlflow.db is to be, as its README has it.
    print(f"next: cd {arguments.name} && brayx train {arguments.name}.yaml")
    return 0
