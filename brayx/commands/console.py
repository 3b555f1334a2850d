"""``brayx console``: `brayx.console.serve` serves the page."""

from __future__ import annotations

import argparse
import contextlib

from brayx.commands.arguments import add_tracking, add_trust
from brayx.console.port import PORT
from brayx.gamecore.auth import add_options

HELP = "a web page of trials, models and recordings; with a URL, of a running job"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "url",
        nargs="?",
        default="",
        help="URL of a job's console, as the job prints it (default: the tracking store alone)",
    )
    parser.add_argument(
        "--port", type=int, help=f"port of the page on this machine (default: {PORT}, or if it is taken a free one)"
    )
    add_tracking(parser)
    add_trust(parser)
    parser.add_argument(
        "--recordings", default="recordings", help="without a URL: folder of recordings (default: %(default)s)"
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves the page until it is interrupted."""
    from brayx.console.serve import console
    from brayx.tracking import tracking_uri

    with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
        console(
            arguments.url,
            uri=tracking_uri(arguments.tracking),
            recordings=arguments.recordings,
            port=arguments.port,
            keys_file=arguments.keys_file,
            key=arguments.key,
            trust=arguments.trust,
        )
    return 0
