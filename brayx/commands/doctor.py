"""``brayx doctor``: `brayx.gamecore.doctor` tries the layers."""

from __future__ import annotations

import argparse
from pathlib import Path

from brayx.command_line import SWITCH
from brayx.errors import ConfigError
from brayx.gamecore.auth import add_options, credentials

HELP = "try a service layer by layer, and say which one is broken"


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("url", help="URL of a door: http://, ws://, tcp:// or grpc://host:port")
    parser.add_argument("--body", help="body of the tried tick; @FILE: a file's content (default: the job's example)")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="deadline of each layer (default: %(default)s)")
    parser.add_argument("--json", help="print one JSON document", **SWITCH)
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Examines the service, and prints the findings."""
    from brayx.gamecore.doctor import examine, report

    body = None if arguments.body is None else arguments.body.encode()
    if body is not None and body.startswith(b"@"):
        try:
            body = Path(arguments.body[1:]).read_bytes()
        except OSError as error:
            raise ConfigError(f"--body: {arguments.body[1:]} cannot be read: {error.strerror}") from error
    findings = examine(
        arguments.url,
        body=body,
        timeout_s=arguments.timeout_s,
        **credentials(arguments.keys_file, arguments.key),
    )
    return report(findings, arguments.url, as_json=arguments.json)
