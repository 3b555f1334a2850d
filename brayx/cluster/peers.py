"""Connections between the replicas of an application: both ends of them.

`Peers` forwards requests and recognises a dead replica. `PeerDoors` are the listeners where the others reach this one:
an HTTP door with more paths, for requests that carry a secret. Knows nothing of the session directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import ray

from brayx.actor.doors.answers import JSON, Answer
from brayx.actor.doors.http1 import HttpConnection
from brayx.actor.doors.native import Listener
from brayx.actor.doors.ports import NativeDoors
from brayx.actor.doors.ws1 import WebSockets
from brayx.actor.service import Reply
from brayx.errors import BrayxError, ConnectFailed, DeadlineExceeded, Overloaded, TransportError, Unauthorized
from brayx.gamecore.protocol import STEP_PATH, StepRequest, text_of
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.http import AsyncHttpTransport

FORWARDED_PREFIX = "/-/peer"
"""Path prefix of requests that a replica forwards to a session's owner, which never forwards them again. Only listeners
for peers have it."""
LEFT_PREFIX = "/-/left"
"""Path prefix by which a replica notifies a peer that the connection of one of the peer's sessions is gone; with a
body, for good."""
ENDED_PREFIX = "/-/ended"
"""Path prefix by which a replica notifies a peer that one of the peer's connections lost its session; the body is the
reason."""
CONSOLE_PREFIX = "/-/console"
"""Path prefix of a console's questions to a replica; the body is a JSON list of a verb and its arguments."""
SECRET_HEADER = "peer-secret"
"""Header with the secret by which a replica proves to a peer that it is a replica."""
PEER = "peer"
"""Layer of the errors on the way from replica to replica."""

_SECRET = SECRET_HEADER.encode()
_FORWARDED_STEP = (FORWARDED_PREFIX + STEP_PATH).encode()
_LOOPBACK = "127.0.0.1"
_PROBE_TIMEOUT_S = 2.0
_PROBE_AGAIN_S = 0.01
_QUESTION = b"GET / HTTP/1.1\r\nhost: peer\r\n\r\n"
"""The peer refuses it for lack of the secret, which proves that it is alive."""
_MAX_IDLE = 64
_DEAD = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED)
"""Errors that prove that the listener, and so its process, has ended. A missing answer proves nothing: a peer that is
stopped or cut off may continue to answer until its lease ends. Errors of this node's own network prove nothing either.
"""


class PeerDied(Exception):
    """No process listens at a replica's address any more."""


class Peers:
    """Idle connections to other replicas, by address.

    Args:
        secret: proves that this is a replica, or asks for one's application.
        max_idle: connections kept open to each of them.
        prefix: path prefix of what `forward` sends.
    """

    def __init__(self, secret: Callable[[], str], max_idle: int = _MAX_IDLE, *, prefix: str = FORWARDED_PREFIX) -> None:
        self._secret = secret
        self._max_idle = max_idle
        self._prefix = prefix
        self._idle: dict[str, list[AsyncHttpTransport]] = {}

    def knows(self, address: str) -> bool:
        """Whether the replica at this address has answered, and was not found dead since."""
        return address in self._idle

    async def forward(self, address: str, request: StepRequest, timeout_s: float) -> bytes | BrayxError:
        """Forwards a request to the replica at this address and returns its answer.

        Raises:
            PeerDied: the replica is dead.
            Overloaded: the replica could not be reached.
        """
        transport = self.take(address)
        try:
            answer: bytes | BrayxError = await _step(transport, f"{address}{self._prefix}", request, timeout_s)
        except TransportError as error:
            await transport.close()
            sent = not isinstance(error, ConnectFailed)
            if _shows_death(await _probe(address) if sent else error.__cause__):
                await self.drop(address)
                raise PeerDied from error
            # Do not pass it on unchanged: transport errors would describe the client's own connection.
            raise Overloaded(
                f"session {request.session!r}: its replica could not be reached ({error.__cause__ or error}); "
                f"the request {'may have been' if sent else 'was not'} applied; try again",
                layer=PEER,
                maybe_applied=sent,
            ) from error
        except BrayxError as error:
            answer = error
            if isinstance(error, Unauthorized) and error.details.get("layer") == PEER:
                await transport.close()
                raise Overloaded(
                    "this replica and its peer have not agreed on a secret yet; try again",
                    layer=PEER,
                    maybe_applied=False,
                ) from error
        except BaseException:
            await transport.close()
            raise
        await self.put_back(address, transport)
        return answer

    def take(self, address: str) -> AsyncHttpTransport:
        """An idle connection, or a new one."""
        idle = self._idle.get(address)
        return idle.pop() if idle else self._open(f"{address}{self._prefix}")

    def _open(self, url: str) -> AsyncHttpTransport:
        return AsyncHttpTransport(Endpoint.parse(url), {SECRET_HEADER: self._secret()})

    async def put_back(self, address: str, transport: AsyncHttpTransport) -> None:
        """Keeps a connection for the next request, or closes it if enough are kept."""
        idle = self._idle.setdefault(address, [])
        if len(idle) < self._max_idle:
            idle.append(transport)
        else:
            await transport.close()

    async def tell(self, address: str, prefix: str, message: StepRequest) -> None:
        """Sends a message to a replica at ``prefix`` (`LEFT_PREFIX` or `ENDED_PREFIX`), over a new connection."""
        transport = self._open(f"{address}{prefix}")
        try:
            await transport.step(message, _PROBE_TIMEOUT_S)
        finally:
            await transport.close()

    async def drop(self, address: str) -> None:
        """Closes the connections to a replica that has ended."""
        for transport in self._idle.pop(address, ()):
            await transport.close()

    async def close(self) -> None:
        """Closes all connections."""
        for address in list(self._idle):
            await self.drop(address)


async def _step(transport: AsyncHttpTransport, url: str, request: StepRequest, timeout_s: float) -> bytes:
    """As `AsyncHttpTransport.step`; a missed deadline of this call is a `TransportError`, the owner's is unchanged."""
    try:
        return await transport.step(request, timeout_s)
    except DeadlineExceeded as error:
        if error.details.get("url") != url:
            raise
        late = TimeoutError(f"no answer within {timeout_s:g} s")
        raise (ConnectFailed if error.details["layer"] == "connect" else TransportError)(str(late)) from late


async def _probe(address: str) -> OSError | None:
    """The error of a new connection to a peer; None: the peer answers there, or is silent.

    A broken connection does not prove that the peer is dead, nor an open one that it is alive: a killed process closes
    its files one by one, and the kernel accepts connections until it has closed the listener. So the probe asks until
    it gets an answer.
    """
    url = urlsplit(address)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(url.hostname, url.port)
                except OSError as error:
                    return error
                with contextlib.closing(writer), contextlib.suppress(OSError):
                    writer.write(_QUESTION)
                    if await reader.read(1):
                        return None
                await asyncio.sleep(_PROBE_AGAIN_S)
    return None


def _shows_death(error: BaseException | None) -> bool:
    """Whether a connection failed because no process listens there any more."""
    return isinstance(error, OSError) and error.errno in _DEAD


Handler = Callable[[StepRequest], Awaitable[bytes | None]]
"""Answers a peer's message; None: with an empty body."""


@dataclass(frozen=True)
class ForPeers:
    """What a listener for peers calls to answer.

    Attributes:
        forward: takes a request that a peer forwarded, as `Service.submit`.
        left: handles messages about sessions whose connection is gone.
        ended: handles messages about connections that lost their session.
        console: answers a console's questions.
        secret: gives the secret that a peer's requests carry.
    """

    forward: Callable[[StepRequest, Reply], None]
    left: Handler
    ended: Handler
    console: Handler
    secret: Callable[[], str]

    @functools.cached_property
    def handlers(self) -> Mapping[bytes, Handler]:
        """The handler of each path for messages."""
        by_prefix = {LEFT_PREFIX: self.left, ENDED_PREFIX: self.ended, CONSOLE_PREFIX: self.console}
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
