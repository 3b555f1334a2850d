"""The client of a game: start, tick, stop, over whatever door the URL names. Blocking `Client`, asyncio `AsyncClient`.

    with Client("http://127.0.0.1:8000") as client:      # or ws://127.0.0.1:8000
        client.start()
        action = client.tick(observation)                # bytes in, bytes out; the agent reads them

Knows nothing of Ray, of torch, or of what the bodies hold. A request is never sent twice on its own: when a
connection breaks, `ConnectionLost` tells that the tick may or may not have been applied, and the game decides.
"""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import Self

from brayx.errors import BrayxError, SessionExists, SessionUnknown
from brayx.gamecore import transports
from brayx.gamecore.protocol import StepKind, StepRequest, check_session
from brayx.gamecore.transports.base import AsyncTransport, Transport, ends_session

Body = bytes | str


class _Session:
    """What both clients keep: the running session and the credentials."""

    def __init__(self, url: str, timeout_s: float, key: str, time: str, token: str) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._key = key
        self._time = time
        self._token = token
        self._session: str | None = None

    @property
    def session(self) -> str | None:
        """Id of the running session, None when none is running."""
        return self._session

    def _request(self, kind: StepKind, session: str, body: Body) -> StepRequest:
        data = body.encode() if isinstance(body, str) else body
        return StepRequest(kind, session, data, self._key, self._time, self._token)

    def _starting(self, session: str | None, body: Body) -> StepRequest:
        if self._session is not None:
            raise SessionExists(
                f"this client's session {self._session} is running; stop it, or use another client",
                session=self._session,
            )
        return self._request(StepKind.START, check_session(uuid.uuid4().hex if session is None else session), body)

    def _running(self, kind: StepKind, body: Body) -> StepRequest:
        if self._session is None:
            raise SessionUnknown(f"{kind.value} without a running session: call start first")
        return self._request(kind, self._session, body)

    def _after(self, error: BrayxError, *, holds_session: bool) -> None:
        if ends_session(error) or not holds_session:
            self._session = None


class Client(_Session):
    """A blocking client with one session at a time; play several games at once with several clients.

    Args:
        url: ``http://host:port`` or ``ws://host:port``; a path (a Serve route prefix) is kept.
        timeout_s: how long one request may take, connecting included.
        key, time, token: credentials, sent when given.

    As a context manager it stops a running session on a clean exit, and just closes when an exception leaves.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0, key: str = "", time: str = "", token: str = "") -> None:
        super().__init__(url, timeout_s, key, time, token)
        self._transport: Transport = transports.connect(url)

    def start(self, body: Body = b"", session: str | None = None) -> bytes:
        """Open a session (a fresh id when ``session`` is None) and give the service's answer.

        Raises:
            SessionExists: one is running, here or under this id at the service.
            ServiceFull: the service has no room for another.
            ConnectFailed: the service cannot be reached; nothing was sent.
        """
        request = self._starting(session, body)
        reply = self._transport.step(request, self.timeout_s)
        self._session = request.session
        return reply

    def tick(self, body: Body) -> bytes:
        """Send one observation and give the action.

        Raises:
            SessionUnknown: none is running.
            SessionLost, AgentError: the session has ended; start another.
            ConnectionLost, DeadlineExceeded: the tick may or may not have been applied.
        """
        request = self._running(StepKind.TICK, body)
        try:
            return self._transport.step(request, self.timeout_s)
        except BrayxError as error:
            self._after(error, holds_session=self._transport.holds_session)
            raise

    def stop(self, body: Body = b"") -> bytes:
        """End the session, with the last observation perhaps, and give the service's answer. Errors as of `tick`."""
        request = self._running(StepKind.STOP, body)
        try:
            reply = self._transport.step(request, self.timeout_s)
        except BrayxError as error:
            self._after(error, holds_session=self._transport.holds_session)
            raise
        self._session = None
        return reply

    def call(self, body: Body) -> bytes:
        """One stateless request, without a session.

        Raises:
            ProtocolError: the URL is a WebSocket's, where a connection is a session.
        """
        return self._transport.step(self._request(StepKind.CALL, "", body), self.timeout_s)

    def close(self) -> None:
        """Close the connection. Over WebSocket that ends a running session; over HTTP the service waits for more."""
        self._session = None
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._session is not None:
                self.stop()
        finally:
            self.close()


class AsyncClient(_Session):
    """`Client` for asyncio: the same calls, awaited. Belongs to one event loop.

    Requests of one client go one after the other; cancelling one gives its connection up.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0, key: str = "", time: str = "", token: str = "") -> None:
        super().__init__(url, timeout_s, key, time, token)
        self._transport: AsyncTransport = transports.connect_async(url)

    async def start(self, body: Body = b"", session: str | None = None) -> bytes:
        """As `Client.start`."""
        request = self._starting(session, body)
        reply = await self._transport.step(request, self.timeout_s)
        self._session = request.session
        return reply

    async def tick(self, body: Body) -> bytes:
        """As `Client.tick`."""
        request = self._running(StepKind.TICK, body)
        try:
            return await self._transport.step(request, self.timeout_s)
        except BrayxError as error:
            self._after(error, holds_session=self._transport.holds_session)
            raise

    async def stop(self, body: Body = b"") -> bytes:
        """As `Client.stop`."""
        request = self._running(StepKind.STOP, body)
        try:
            reply = await self._transport.step(request, self.timeout_s)
        except BrayxError as error:
            self._after(error, holds_session=self._transport.holds_session)
            raise
        self._session = None
        return reply

    async def call(self, body: Body) -> bytes:
        """As `Client.call`."""
        return await self._transport.step(self._request(StepKind.CALL, "", body), self.timeout_s)

    async def close(self) -> None:
        """As `Client.close`."""
        self._session = None
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._session is not None:
                await self.stop()
        finally:
            await self.close()
