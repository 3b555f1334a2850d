"""TCP ports: the choice of free ones, whether chosen ones are free, and the check for loopback addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from collections.abc import Mapping

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


def check_ports(ports: Mapping[str, tuple[str, int]]) -> None:
    """Makes sure that doors can be opened.

    Args:
        ports: host and number of each by the option that chooses it, as ``actor.port``.

    Raises:
        StartupError: somebody listens at one of them already; the message names all that are taken, and who has them
            if that can be seen.
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
