"""The choice of free TCP ports, and the check for loopback addresses. Standard library only."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket

from brayx.errors import StartupError

_PORTS = range(20_000, 32_000)


def is_loopback(host: str | None) -> bool:
    """Whether an address is on loopback, where only this machine reaches it; of names only localhost is."""
    if not host or host == "localhost":
        return host == "localhost"
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that no process listens on just now.

    It lies below the ports that systems give to outgoing connections: Ray opens many of those before the port is
    taken, and one of them would get it now and then.

    Raises:
        StartupError: none was found.
    """
    for port in random.sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise StartupError(f"no free port from {_PORTS[0]} to {_PORTS[-1]} on {host}")
