"""``brayx convert``: `brayx.jobs.converting` converts the job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from brayx.command_line import print_result
from brayx.errors import ConfigError

HELP = "convert a job of Bray: brayx convert config.yaml > job.yaml"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML of a job of Bray")


def run(arguments: argparse.Namespace) -> int:
    """Prints the job with a comment at each line whose meaning changed; returns 1 if something is left to fill in."""
    from brayx.jobs.converting import convert
    from brayx.text_files import read_text

    try:
        text = read_text(arguments.file)
    except OSError as error:
        raise ConfigError(f"{arguments.file}: cannot be read: {error.strerror}", file=str(arguments.file)) from None
    conversion = convert(text, arguments.file)
    print_result(conversion.text, end="")
    for problem in conversion.left:
        print(f"brayx: to do: {problem}", file=sys.stderr)
    return 1 if conversion.left else 0
