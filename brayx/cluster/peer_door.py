"""The listeners where other replicas reach this one: an HTTP door with more paths, for requests that carry a secret.

Knows nothing of the session directory.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import ray

from brayx.actor.doors.answers import JSON, Answer
from brayx.actor.doors.http1 import HttpConnection
from brayx.actor.doors.native import Listener
from brayx.actor.doors.ports import NativeDoors
from brayx.actor.doors.ws1 import WebSockets
from brayx.actor.service import Reply
from brayx.cluster.peers import CONSOLE_PREFIX, ENDED_PREFIX, FORWARDED_PREFIX, LEFT_PREFIX, PEER, SECRET_HEADER
from brayx.errors import BrayxError, Unauthorized
from brayx.gamecore.protocol import STEP_PATH, StepRequest, text_of

_SECRET = SECRET_HEADER.encode()
_FORWARDED_STEP = (FORWARDED_PREFIX + STEP_PATH).encode()
_LOOPBACK = "127.0.0.1"

Handler = Callable[[StepRequest], Awaitable[bytes | None]]
"""Answers a peer's message; None: with an empty body."""


@dataclass(frozen=True)
class ForPeers:
    """What a listener for peers calls to answer.

    Attributes:
        forward: takes a request that a peer forwarded, as `Service.submit`.
        left: handles messages about sessions whose connection is gone.
        ended: handles messages about connections that lost their session.
        asked: answers a console's questions.
        secret: gives the secret that a peer's requests carry.
    """

    forward: Callable[[StepRequest, Reply], None]
    left: Handler
    ended: Handler
    asked: Handler
    secret: Callable[[], str]

    @functools.cached_property
    def handlers(self) -> Mapping[bytes, Handler]:
        """The handler of each path for messages."""
        by_prefix = {LEFT_PREFIX: self.left, ENDED_PREFIX: self.ended, CONSOLE_PREFIX: self.asked}
        return {(prefix + STEP_PATH).encode(): handler for prefix, handler in by_prefix.items()}


class PeerConnection(HttpConnection):
    """One connection of a peer, or of a client if the listener is not ``closed`` to them."""

    def __init__(self, listener: Listener, websockets: WebSockets, peers: ForPeers, *, closed: bool) -> None:
        self._peers = peers
        self._closed = closed
        self._handling: asyncio.Task[None] | None = None
        self._peers_paths = (_FORWARDED_STEP, *peers.handlers)
        self.steps = (*HttpConnection.steps, *self._peers_paths)
        super().__init__(listener, websockets)

    def clear(self) -> None:
        """See `HttpConnection.clear`."""
        super().clear()
        self._proved = False
        self._holder, self._attached = "", False

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `HttpConnection.on_header`."""
        super().on_header(name, value)
        name, value = name.lower(), value.strip(b" \t")
        if name == _SECRET:
            self._proved = hmac.compare_digest(value, self._peers.secret().encode())
        elif name == b"holder":
            self._holder = text_of(value)
        elif name == b"attached":
            self._attached = True

    def check_host(self, host: str | None) -> None:
        """See `HttpConnection.check_host`; peers may call this node by any address."""
        if not self._closed:
            super().check_host(host)

    def request(self, path: bytes) -> StepRequest | BrayxError | Answer:
        """See `HttpConnection.request`. A refused client is not counted: it is no client of this port."""
        is_peers = path in self._peers_paths
        if not self._proved and (is_peers or self._closed):
            error = _not_a_peer()
            return Answer(error.http_status, JSON, error.to_wire())
        request = super().request(path)
        if is_peers and isinstance(request, StepRequest):
            return request._replace(holder=self._holder, attached=self._attached)
        return request

    def upgrade(self, path: bytes, data: bytes, early: int) -> None:
        """See `HttpConnection.upgrade`."""
        if self._closed and not self._proved:
            self.fail(_not_a_peer())
        else:
            super().upgrade(path, data, early)

    def submit(self, path: bytes, request: StepRequest, connection: bytes) -> None:
        """See `HttpConnection.submit`."""
        if path == _FORWARDED_STEP:
            self._peers.forward(request, functools.partial(self.reply, connection=connection, count=False))
        elif (handler := self._peers.handlers.get(path)) is not None:
            self._handling = asyncio.get_running_loop().create_task(self._handle(handler, request, connection))
        else:
            super().submit(path, request, connection)

    async def _handle(self, handler: Handler, request: StepRequest, connection: bytes) -> None:
        answer: bytes | BrayxError
        try:
            answer = await handler(request) or b""
        except BrayxError as error:
            answer = error
        self.reply(answer, connection, count=False)


class PeerDoors:
    """The listeners of one replica for its peers.

    Args:
        doors: makes listeners.
        peers: what they answer with.
    """

    def __init__(self, doors: NativeDoors, peers: ForPeers) -> None:
        self._doors = doors
        self._peers = peers
        self._listeners: dict[str, Listener] = {}

    async def open(self) -> str:
        """Opens the listener and returns its URL: on loopback while the cluster has one node, else on the node's IP."""
        nodes = await asyncio.to_thread(ray.nodes)
        host = _LOOPBACK if len(nodes) == 1 else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        if host not in self._listeners:
            # On loopback the listener is a normal door too, like the native ports. On another interface it would be a
            # door that is not configured, so there it refuses clients.
            listener = self.listener(closed=host != _LOOPBACK)
            await listener.open(host, 0)
            self._listeners[host] = listener
        return f"http://{host}:{self._listeners[host].address[1]}"

    def listener(self, *, closed: bool) -> Listener:
        """A listener for peers that its caller opens and closes; ``closed``: it refuses clients."""
        return self._doors.http(functools.partial(PeerConnection, peers=self._peers, closed=closed))

    async def close(self) -> None:
        """Closes the listeners and their connections."""
        for listener in self._listeners.values():
            await listener.close()


def _not_a_peer() -> Unauthorized:
    return Unauthorized("this port accepts requests of the application's replicas only", layer=PEER)
