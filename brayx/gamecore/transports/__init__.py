"""Transports: how one request travels to a door and its reply back. The URL's scheme picks one.

``http`` and ``https`` need the standard library alone; ``ws`` and ``wss`` need the package ``websockets``, which is
imported only when such a URL is used.
"""

from __future__ import annotations

from brayx.errors import ConfigError
from brayx.gamecore.transports.base import AsyncTransport, Endpoint, Transport
from brayx.gamecore.transports.http import AsyncHttpTransport, HttpTransport

__all__ = ["AsyncTransport", "Endpoint", "Transport", "connect", "connect_async"]


def connect(url: str) -> Transport:
    """The blocking transport for ``url``; nothing is sent, nor is a connection opened, before the first request.

    Raises:
        ConfigError: the URL cannot be used, or its scheme needs a package that is not installed.
    """
    endpoint = Endpoint.parse(url)
    if not endpoint.is_websocket:
        return HttpTransport(endpoint)
    _require_websockets(url)
    from brayx.gamecore.transports.websocket import WebSocketTransport

    return WebSocketTransport(endpoint)


def connect_async(url: str) -> AsyncTransport:
    """The asyncio transport for ``url``; as `connect` in all else."""
    endpoint = Endpoint.parse(url)
    if not endpoint.is_websocket:
        return AsyncHttpTransport(endpoint)
    _require_websockets(url)
    from brayx.gamecore.transports.websocket import AsyncWebSocketTransport

    return AsyncWebSocketTransport(endpoint)


def _require_websockets(url: str) -> None:
    try:
        import websockets  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{url} needs the package 'websockets', which is not installed: pip install websockets, or use http://"
        ) from None
