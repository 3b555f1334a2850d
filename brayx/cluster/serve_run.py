"""``serve run MODULE:app`` before Ray starts: the door's port is free, the Ray to join is alive, errors are one line.

Otherwise the user waits for Ray, for minutes if it is gone, and then reads a traceback. ``serve run MODULE:app`` builds
the application in its own process, where these checks can run; ``serve run`` with a Serve config does not. Knows
nothing of applications.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from ray.serve.config import HTTPOptions

from brayx.cluster.start import check_address
from brayx.errors import BrayxError, StartupError

_TIMEOUT_S = 1.0


@contextlib.contextmanager
def serve_run(argv: Sequence[str] = (), host: str = "", port: int = 0) -> Iterator[None]:
    """Decorates a function that builds an application: under ``serve run`` a typed error ends the command with one
    line, and after the function it checks the door's port and the Ray to join.

    Does nothing in any other command.

    Args:
        argv: command line; empty: of this process.
        host, port: address of Serve; empty: Serve's defaults.

    Raises:
        SystemExit: with the message of a typed error; with ``BRAYX_TRACEBACK`` set, the error itself comes instead.
    """
    argv = argv or sys.argv
    if Path(argv[0]).name != "serve" or "run" not in argv:
        yield
        return
    options = HTTPOptions()
    elsewhere = any(word.startswith(("--address", "-a")) for word in argv)
    try:
        yield
        if not elsewhere and not ray.is_initialized():
            check_address(None)
        check_port(host or str(options.host), port or options.port)
    except BrayxError as error:
        if os.environ.get("BRAYX_TRACEBACK"):
            raise
        raise SystemExit(f"brayx: {error}") from None


def check_port(host: str, port: int) -> None:
    """Checks that a port is free, or that a Serve listens there, which ``serve run`` joins.

    Raises:
        StartupError: another program does.
    """
    try:
        with socket.create_connection((host, port), _TIMEOUT_S):
            pass
    except OSError:
        return
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/-/healthz")
        if connection.getresponse().status == http.client.OK:
            return
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()
    raise StartupError(
        f"port {port} of {host}, where Serve is to listen, is taken: stop what listens there, or run a Serve config "
        f"with another http_options.port (docs/guide-serve.md)",
        port=port,
    )
