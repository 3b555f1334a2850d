"""TCP ports: finds free ones, checks that chosen ones are free, and recognises loopback addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from collections.abc import Mapping

from brayx.errors import StartupError

_PORTS = range(20_000, 32_000)


def is_loopback(host: str | None) -> bool:
    """Whether an address is on loopback, so that only this machine reaches it; the only such name is localhost."""
    if not host or host == "localhost":
        return host == "localhost"
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that no process listens on now.

    It is below the range for outgoing connections: Ray opens many of those before the caller binds the port, and one of
    them would occasionally take it.

    Raises:
        StartupError: none was found.
    """
    for port in random.sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise StartupError(f"no free port from {_PORTS[0]} to {_PORTS[-1]} on {host}")


def check_ports(ports: Mapping[str, tuple[str, int]]) -> None:
    """Checks that doors can open their ports.

    Args:
        ports: host and number by the option that sets them, such as ``actor.port``.

    Raises:
        StartupError: a port is taken; the message names all taken ports, and the processes that hold them if visible.
    """
    taken = {}
    for option, (host, port) in ports.items():
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, port))
        except OSError as error:
            taken[option] = f"port {port} of {host} is taken{_holder(port)} ({error.strerror})"
    if taken:
        free = " ".join(f"--set {option}=0" for option in taken)
        raise StartupError(
            f"{'; '.join(taken.values())}: stop that, or take free ports with {free}",
            ports=[ports[option][1] for option in taken],
        )


def _holder(port: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""
