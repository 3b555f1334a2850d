"""The native doors of a service: HTTP with WebSocket on one port, TCP framing on another. Both hosts open them so.

Knows nothing of Ray, nor of sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from brayx.actor.config import ActorConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.http1 import HttpConnection
from brayx.actor.doors.native import DoorLimits, Listener
from brayx.actor.doors.shared_ports import HeldPort, check_shared_port
from brayx.actor.doors.tcp import TcpConnection
from brayx.actor.doors.ws1 import WebSockets
from brayx.actor.service import Service
from brayx.gamecore.auth import Keys
from brayx.gamecore.doors import DOORS, http_urls
from brayx.ports import is_loopback

_CONNECTIONS = {"tcp": TcpConnection}
"""Connection class of each native door other than HTTP."""
_HTTP_OPTION = DOORS["http"].option
NATIVE_OPTIONS = (_HTTP_OPTION, *(DOORS[name].option for name in _CONNECTIONS))
"""Options with the ports of the native doors."""
OPEN = "any machine that reaches these doors may play: require keys, see `brayx keys new`"
"""What a person must know of doors that are `open_to_all`."""
_LEAST_IDLE_S = 300.0
"""Minimum idle time before a connection is closed."""


class NativeDoors:
    """The listeners that a process opens itself.

    Args:
        service: answers the requests.
        app: ASGI application of the service, for WebSocket connections.
        config: the actor's options.
        application: processes that serve the application of this name share the ports; None: no other process may.

    Attributes:
        urls: URL of each native door that is open, by its name; a host adds its others.
    """

    def __init__(self, service: Service, app: DoorApp, config: ActorConfig, application: str | None = None) -> None:
        self.urls: dict[str, str] = {}
        self._service = service
        self._config = config
        self._application = application
        self._limits = DoorLimits(
            max_body_bytes=config.max_body_bytes,
            idle_s=max(config.idle_timeout_s, _LEAST_IDLE_S),
        )
        self._websockets = WebSockets(app, self._limits, config.websocket_window_bits)
        self._listeners: list[Listener] = []
        self._held: list[HeldPort] = []

    async def open(self) -> None:
        """Opens the ports that are configured.

        Raises:
            StartupError: one is taken. Those opened before it stay open until `close`.
        """
        host, application = self._config.native_host, self._application
        ports = {option: port for option, port in self._config.own_ports.items() if option in NATIVE_OPTIONS}
        if application is not None:
            for port in ports.values():
                self._held.append(await asyncio.to_thread(HeldPort, port, application))
        http_port = ports.get(_HTTP_OPTION)
        if http_port is not None:
            if application is not None:
                await asyncio.to_thread(check_shared_port, host, http_port, application)
            self.urls |= http_urls(await self.open_http(host, http_port))
        for name, connection in _CONNECTIONS.items():
            if DOORS[name].option in ports:
                listener = Listener(self._service, connection, self._limits)
                self.urls[name] = f"{name}://{await self._listen(listener, host, ports[DOORS[name].option])}"

    async def open_http(self, host: str, port: int) -> str:
        """Opens an HTTP and WebSocket door at an address; returns the address for clients on this machine."""
        return await self._listen(self.http(), host, port)

    def http(self, make: Callable[[Listener, WebSockets], HttpConnection] = HttpConnection) -> Listener:
        """A listener for HTTP and WebSocket that its caller opens and closes; ``make`` makes its connections."""
        return Listener(self._service, lambda listener: make(listener, self._websockets), self._limits)

    async def _listen(self, listener: Listener, host: str, port: int) -> str:
        await listener.open(host, port, shared=self._application is not None)
        self._listeners.append(listener)
        return shown(host, listener.address[1])

    def shut(self) -> None:
        """Accepts no more connections."""
        for listener in self._listeners:
            listener.shut()
        for port in self._held:
            port.release()

    async def close(self) -> None:
        """Closes all listeners and connections."""
        self._websockets.close()
        self.shut()
        for listener in self._listeners:
            await listener.close()


def on_loopback(config: ActorConfig, host: str | None) -> bool:
    """Whether no other machine can reach a door: the native ones, and the main one at ``host``."""
    return is_loopback(host) and (not config.own_ports or is_loopback(config.native_host))


def open_to_all(config: ActorConfig) -> bool:
    """Whether any machine that reaches a door may play: it needs no key, and another machine can reach it."""
    return not on_loopback(config, config.host) and Keys.configured(config.keys_file) is None


def shown(host: str, port: int) -> str:
    """An address that a client on this machine can connect to."""
    return f"127.0.0.1:{port}" if host == "0.0.0.0" else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
