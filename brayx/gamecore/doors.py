"""The table of doors: the protocols by which a game reaches a service, one row each.

A new door is a row here, a transport in `brayx.gamecore.transports` and a connection in `brayx.actor.doors`. Imports no
protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Door:
    """A protocol of the service.

    Attributes:
        name: its name in options, in a gamecore's placeholders and among the URLs of a job; the scheme of its URLs.
        schemes: the default port of each scheme, without and with TLS.
        option: option of `brayx.actor.config.ActorConfig` with the service's own port for it.
        module: file of `brayx.gamecore.transports` with its transport.
        transport: name of its class; the asyncio class has the prefix ``Async``.
        package: module and package that its transport needs besides the standard library; None: none.
        has_status: its address also answers HTTP, with the status page.
        has_paths: a path in its URL names the application.
        holds_sessions: one connection is one session, which ends with it.
        answers_calls: a request may be a stateless call.
        compresses: messages may be compressed.
    """

    name: str
    schemes: Mapping[str, int]
    option: str
    module: str
    transport: str
    package: tuple[str, str] | None = None
    has_status: bool = False
    has_paths: bool = True
    holds_sessions: bool = False
    answers_calls: bool = True
    compresses: bool = False


DOORS = {
    door.name: door
    for door in (
        Door("http", {"http": 80, "https": 443}, "native_port", "http", "HttpTransport", has_status=True),
        Door(
            "ws",
            {"ws": 80, "wss": 443},
            "native_port",
            "websocket",
            "WebSocketTransport",
            package=("websockets", "websockets"),
            has_status=True,
            holds_sessions=True,
            answers_calls=False,
            compresses=True,
        ),
        Door("tcp", {"tcp": 8101}, "tcp_port", "tcp", "TcpTransport", has_paths=False),
        Door(
            "grpc",
            {"grpc": 9000},
            "grpc_port",
            "grpc",
            "GrpcTransport",
            package=("grpc", "grpcio"),
            holds_sessions=True,
        ),
    )
}
"""The doors by name."""

BY_SCHEME = {scheme: door for door in DOORS.values() for scheme in door.schemes}
"""The doors by the scheme of a URL."""
SECURE = ("https", "wss")
"""Schemes with TLS."""
ON_HTTP_PORT = tuple(door.name for door in DOORS.values() if door.has_status)
"""Names of the doors that share a port with HTTP."""
PORT_OPTIONS = tuple(dict.fromkeys(door.option for door in DOORS.values()))
"""Options of `brayx.actor.config.ActorConfig` with the service's own ports."""


def http_urls(address: str) -> dict[str, str]:
    """URL of each door at an HTTP port, by name.

    Args:
        address: host and port, and perhaps a path.
    """
    return {name: f"{name}://{address}" for name in ON_HTTP_PORT}
