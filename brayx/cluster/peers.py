"""Connections to the other replicas of the application: forwards requests, and recognises a dead replica.

Knows nothing of sessions, nor of the session directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable
from urllib.parse import urlsplit

from brayx.errors import BrayxError, ConnectFailed, DeadlineExceeded, Overloaded, TransportError, Unauthorized
from brayx.gamecore.protocol import StepRequest
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
