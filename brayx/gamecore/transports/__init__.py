"""Transports carry a request to a door and its reply back; the URL's scheme selects one.

``http``, ``https`` and ``tcp`` need the standard library alone; ``ws`` and ``wss`` need the package ``websockets`` and
``grpc`` needs ``grpcio``, each imported only when such a URL is used. A service in place of a URL needs no network.
"""

from __future__ import annotations

import importlib

from brayx.errors import ConfigError
from brayx.gamecore.transports.base import AsyncTransport, Endpoint, Transport
from brayx.gamecore.transports.http import AsyncHttpTransport, HttpTransport
from brayx.gamecore.transports.local import AsyncLocalTransport, LocalTransport, ServiceThread, StepService
from brayx.gamecore.transports.tcp import AsyncTcpTransport, TcpTransport

__all__ = ["AsyncTransport", "Endpoint", "ServiceThread", "StepService", "Transport", "connect", "connect_async"]


def connect(target: str | ServiceThread, *, compress: bool = False) -> Transport:
    """The blocking transport for ``target``; it connects at the first request.

    ``compress`` offers compression, which only WebSockets have.

    Raises:
        ConfigError: the URL cannot be used, or its scheme needs a package that is not installed.
    """
    if isinstance(target, ServiceThread) and not compress:
        return LocalTransport(target)
    endpoint = _endpoint(target, "a ServiceThread, in which a service runs", compress)
    if endpoint.scheme == "tcp":
        return TcpTransport(endpoint)
    if endpoint.is_websocket:
        from brayx.gamecore.transports.websocket import WebSocketTransport

        return WebSocketTransport(endpoint)
    if endpoint.scheme == "grpc":
        from brayx.gamecore.transports.grpc import GrpcTransport

        return GrpcTransport(endpoint)
    return HttpTransport(endpoint)


def connect_async(target: str | StepService, *, compress: bool = False) -> AsyncTransport:
    """The asyncio transport for ``target``; otherwise like `connect`."""
    if not isinstance(target, str) and isinstance(target, StepService) and not compress:
        return AsyncLocalTransport(target)
    endpoint = _endpoint(target, "a service with `async step(request)`", compress)
    if endpoint.scheme == "tcp":
        return AsyncTcpTransport(endpoint)
    if endpoint.is_websocket:
        from brayx.gamecore.transports.websocket import AsyncWebSocketTransport

        return AsyncWebSocketTransport(endpoint)
    if endpoint.scheme == "grpc":
        from brayx.gamecore.transports.grpc import AsyncGrpcTransport

        return AsyncGrpcTransport(endpoint)
    return AsyncHttpTransport(endpoint)


def _endpoint(url: object, other: str, compress: bool) -> Endpoint:
    """The endpoint of ``url``, after checking for its scheme's package; ``other`` names the alternative, for
    messages."""
    if compress and not isinstance(url, str):
        raise ConfigError(f"compress=True needs a ws:// URL, got {type(url).__name__}: only WebSockets are compressed")
    if not isinstance(url, str):
        raise ConfigError(f"a client needs a URL or {other}, got {type(url).__name__}")
    endpoint = Endpoint.parse(url, compress=compress)
    if endpoint.is_websocket:
        _require("websockets", "websockets", url)
    elif endpoint.scheme == "grpc":
        _require("grpc", "grpcio", url)
    return endpoint


def _require(module: str, package: str, url: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{url} needs the package {package!r}, which is not installed: pip install {package}, or use http://"
        ) from None
