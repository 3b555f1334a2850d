"""TCP ports: finds free ones, checks that chosen ones are free, and recognises loopback addresses."""

from __future__ import annotations

import contextlib
import errno
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
    # Processes with one seed would try the same ports at the same time.
    for port in random.SystemRandom().sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise StartupError(f"no free port from {_PORTS[0]} to {_PORTS[-1]} on {host}")


def listen(host: str, port: int, name: str, backlog: int | None = None) -> socket.socket:
    """A listening TCP socket.

    Args:
        host: address to bind.
        port: number of the port; 0: a free one.
        name: what the port is called in errors.
        backlog: maximum number of connections that wait; None: the system's default.

    Raises:
        StartupError: the port is taken, cannot be opened, or is no port.
    """
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog
        )
    except OverflowError:
        raise StartupError(f"{name} is {port}, expected 0 to 65535", port=port) from None
    except OSError as error:
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
        raise StartupError(f"{name} {port} of {host} {why}", port=port) from None


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
