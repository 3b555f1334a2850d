"""Transports carry a request to a door and its reply back; the URL's scheme selects one.

``http``, ``https`` and ``tcp`` need the standard library alone; ``ws`` and ``wss`` need the package ``websockets`` and
``grpc`` needs ``grpcio``, each imported only when such a URL is used. A service in place of a URL needs no network.
"""

from __future__ import annotations

import importlib
from typing import cast

from brayx.errors import ConfigError
from brayx.gamecore.transports.base import AsyncTransport, Endpoint, Transport
from brayx.gamecore.transports.local import AsyncLocalTransport, LocalTransport, ServiceThread, StepService

__all__ = ["AsyncTransport", "Endpoint", "ServiceThread", "StepService", "Transport", "connect", "connect_async"]


def connect(target: str | ServiceThread, *, compress: bool = False) -> Transport:
    """The blocking transport for ``target``; it connects at the first request.

    ``compress`` offers compression, which only WebSockets have.

    Raises:
        ConfigError: the URL cannot be used, or its scheme needs a package that is not installed.
    """
    if isinstance(target, ServiceThread) and not compress:
        return LocalTransport(target)
    return cast(Transport, _made(target, "", "a ServiceThread, in which a service runs", compress))


def connect_async(target: str | StepService, *, compress: bool = False) -> AsyncTransport:
    """The asyncio transport for ``target``; otherwise like `connect`."""
    if not isinstance(target, str) and isinstance(target, StepService) and not compress:
        return AsyncLocalTransport(target)
    return cast(AsyncTransport, _made(target, "Async", "a service with `async step(request)`", compress))


def _made(url: object, prefix: str, alternative: str, compress: bool) -> object:
    """The transport of ``url``, of the class whose name starts with ``prefix``.

    Args:
        alternative: what a client accepts instead of a URL, for messages.
    """
    if compress and not isinstance(url, str):
        raise ConfigError(f"compress=True needs a ws:// URL, got {type(url).__name__}: only WebSockets are compressed")
    if not isinstance(url, str):
        raise ConfigError(f"a client needs a URL or {alternative}, got {type(url).__name__}")
    endpoint = Endpoint.parse(url, compress=compress)
    door = endpoint.door
    if door.package is not None:
        module, package = door.package
        try:
            importlib.import_module(module)
        except ImportError:
            raise ConfigError(
                f"{url} needs the package {package!r}, which is not installed: pip install {package}, or use HTTP"
            ) from None
    return getattr(importlib.import_module(f"{__name__}.{door.module}"), prefix + door.transport)(endpoint)
