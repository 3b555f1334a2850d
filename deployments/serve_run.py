"""Checks of ``serve run MODULE:app`` before it starts Ray: the door's port is free, and the Ray to join is alive.

Without them the user waits for Ray, for minutes if it is gone, and then reads a traceback. ``serve run MODULE:app``
builds the application in its own process, where these checks can run; ``serve run`` with a Serve config does not. Knows
nothing of applications.
"""

from __future__ import annotations

import http.client
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.serve.config import HTTPOptions

from brayx.cluster.start import check_address
from brayx.errors import StartupError

_TIMEOUT_S = 1.0


def check_door(argv: Sequence[str] = sys.argv, host: str = "", port: int = 0) -> None:
    """Ends ``serve run`` with one line if another program has Serve's port, or if the Ray it would join is gone.

    Does nothing in any other command.

    Args:
        argv: command line of this process.
        host, port: where Serve listens; empty: Serve's defaults.
    """
    if Path(argv[0]).name != "serve" or "run" not in argv:
        return
    options = HTTPOptions()
    elsewhere = any(word.startswith(("--address", "-a")) for word in argv)
    try:
        if not elsewhere and not ray.is_initialized():
            check_address(None)
        check_port(host or str(options.host), port or options.port)
    except StartupError as error:
        raise SystemExit(f"{error.code}: {error}") from None  # a traceback would say no more


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
