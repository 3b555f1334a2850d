"""The client of a game: start, tick, stop, over whatever door the URL names. Blocking `Client`, asyncio `AsyncClient`.

    with Client("http://127.0.0.1:8000") as client:      # or ws://, tcp://, grpc://
        client.start()
        action = client.tick(observation)                # bytes in, bytes out; the agent reads them

Knows nothing of Ray, of torch, or of what the bodies hold. Without ``reconnect_s`` a request is never sent twice: when
a connection breaks, `ConnectionLost` tells that the tick may or may not have been applied, and the game decides. With
it ticks are numbered, so that one sent again is applied once, and the client does that on its own.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time as clock
import uuid
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from brayx.errors import (
    BrayxError,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    OutOfSequence,
    Overloaded,
    SessionExists,
    SessionResumed,
    SessionUnknown,
    TransportError,
)
from brayx.gamecore import transports
from brayx.gamecore.protocol import StepKind, StepRequest, check_session
from brayx.gamecore.transports.base import AsyncTransport, Transport, ends_session
from brayx.gamecore.transports.local import LOCAL_URL, ServiceThread, StepService

Body = bytes | str

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class _Session:
    """What both clients keep and judge: the running session, its numbers, the credentials, what an error means."""

    def __init__(
        self,
        url: object,
        timeout_s: float,
        reconnect_s: float | None,
        key: str,
        secret: bytes | str,
        time: str,
        token: str,
    ) -> None:
        self.url = url if isinstance(url, str) else LOCAL_URL
        self.timeout_s = timeout_s
        self._credentials = _Credentials(key, secret, time, token)
        self._reconnect_s = reconnect_s
        self._session: str | None = None
        self._seq = 0
        self._outage: _Outage | None = None

    @property
    def session(self) -> str | None:
        """Id of the running session, None when none is running."""
        return self._session

    def _request(self, kind: StepKind, session: str, body: Body, seq: int | None = None) -> StepRequest:
        data = body.encode() if isinstance(body, str) else body
        return StepRequest(kind, session, data, *self._credentials.of(session), seq)

    def _starting(self, session: str | None, body: Body) -> StepRequest:
        if self._session is not None:
            raise SessionExists(
                f"this client's session {self._session} is running; stop it, or use another client",
                session=self._session,
            )
        session = check_session(uuid.uuid4().hex if session is None else session)
        return self._request(StepKind.START, session, body, None if self._reconnect_s is None else 0)

    def _running(self, kind: StepKind, body: Body) -> StepRequest:
        if self._session is None:
            raise SessionUnknown(f"{kind.value} without a running session: call start first")
        self._outage = None
        numbered = self._reconnect_s is not None and kind is StepKind.TICK
        return self._request(kind, self._session, body, self._seq if numbered else None)

    def _again(self, request: StepRequest) -> StepRequest:
        """``request`` for another try, with credentials of now."""
        return self._request(request.kind, request.session, request.body, request.seq)

    def _answered(self, request: StepRequest) -> None:
        if request.kind is StepKind.STOP:
            self._session = None
        elif request.seq is not None:
            self._seq = request.seq + 1

    def _failed(self, request: StepRequest, error: BrayxError, *, holds_session: bool) -> float | None:
        """What an error of a tick or a stop means: the seconds to wait before another try, or None when an earlier
        one is known to have been applied. Raises ``error`` when it is for the game to hear.
        """
        if self._reconnect_s is None:
            if ends_session(error) or not holds_session:
                self._session = None
            raise error
        outage = self._outage
        if request.kind is StepKind.STOP and type(error) is SessionUnknown and outage and outage.maybe_applied:
            return None
        if _may_pass(error):
            if outage is None:
                outage = self._outage = _Outage(self._reconnect_s)
            return outage.pause_after(error)
        if ends_session(error):
            self._session = None
        elif isinstance(error, SessionResumed):
            self._go_on_from(error.details.get("tick"))
        elif isinstance(error, OutOfSequence):
            self._go_on_from(error.details.get("expected"))
        raise error

    def _go_on_from(self, number: object) -> None:
        if isinstance(number, int) and number >= 0:
            self._seq = number


class _Credentials:
    """Bray's key, time and token: as given, or signed with the key's secret, then good for a second."""

    def __init__(self, key: str, secret: bytes | str, time: str, token: str) -> None:
        if secret and (time or token or not key):
            raise ConfigError("secret needs key beside it, and neither time nor token: those are made from it")
        self._key = key
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._made: tuple[str, int] | None = None
        self._fields = (key, time, token)

    def of(self, session: str) -> tuple[str, str, str]:
        """key, time and token of a request of ``session`` sent now."""
        if self._secret:
            now = int(clock.time())
            if self._made != (session, now):
                from brayx.gamecore.auth import sign

                self._made = (session, now)
                self._fields = (self._key, str(now), sign(self._secret, self._key, session, str(now)))
        return self._fields


class _Outage:
    """The time since a request first failed to get through, and how to wait in it: longer and longer, never in step
    with other clients.

    Attributes:
        maybe_applied: a try may have reached the service, though its reply did not come back.
    """

    def __init__(self, window_s: float) -> None:
        self.maybe_applied = False
        self._deadline = clock.monotonic() + window_s
        self._longest_s = 0.0

    def pause_after(self, error: BrayxError) -> float:
        """Seconds to wait after ``error``; the first time none, as most breaks are of one connection only. Raises
        ``error`` once the window has passed.
        """
        remaining = self._deadline - clock.monotonic()
        if remaining <= 0:
            raise error
        self.maybe_applied = self.maybe_applied or error.details.get("maybe_applied") is True
        if isinstance(error, TransportError) and not isinstance(error, ConnectFailed):
            self.maybe_applied = True
        elif self._longest_s == 0.0:
            self._longest_s = _FIRST_PAUSE_S  # a service that is full, or gone, will be so for a moment yet
        pause_s = random.uniform(self._longest_s / 2, self._longest_s)
        self._longest_s = min(_LONGEST_PAUSE_S, self._longest_s * 2 or _FIRST_PAUSE_S)
        return min(remaining, pause_s)


def _may_pass(error: BrayxError) -> bool:
    """Whether a later try of the same request may get through."""
    connecting = isinstance(error, DeadlineExceeded) and error.details.get("layer") == "connect"
    return connecting or isinstance(error, TransportError | Overloaded)


class Client(_Session):
    """A blocking client with one session at a time; play several games at once with several clients.

    Args:
        url: ``http://host:port``, ``ws://host:port`` (a path, a Serve route prefix, is kept), ``tcp://host:port``
            or ``grpc://host:port``; or a running `ServiceThread`, which needs no network.
        timeout_s: how long one request may take, connecting included.
        reconnect_s: None: a request is sent once, and a connection that breaks is the game's to judge. A number:
            ticks are numbered, and for so long after a connection broke, or the service was overloaded, the client
            connects anew and sends the same tick or stop again; it is applied exactly once. 0 numbers only.
        key, secret: a key's id and its secret, with which each request is signed.
        time, token: a signature made beforehand, sent with ``key`` as it is.

    A tick that raised keeps its number: `tick` with the same body tries it again, whether it was applied or not.

    As a context manager it stops a running session on a clean exit, and just closes when an exception leaves.

    Raises:
        ConfigError: the URL cannot be used, or the credentials do not go together.
    """

    def __init__(
        self,
        url: str | ServiceThread,
        *,
        timeout_s: float = 30.0,
        reconnect_s: float | None = None,
        key: str = "",
        secret: bytes | str = b"",
        time: str = "",
        token: str = "",
    ) -> None:
        super().__init__(url, timeout_s, reconnect_s, key, secret, time, token)
        self._transport: Transport = transports.connect(url)
        # Two threads must not take the same number; without numbers the transport's own turns are enough.
        self._turn: AbstractContextManager[object] = nullcontext() if reconnect_s is None else threading.Lock()

    def start(self, body: Body = b"", session: str | None = None) -> bytes:
        """Open a session (a fresh id when ``session`` is None) and give the service's answer. Never sent twice.

        Raises:
            SessionExists: one is running, here or under this id at the service.
            ServiceFull: the service has no room for another.
            Unauthorized: the service wants credentials, or others.
            ConnectFailed: the service cannot be reached; nothing was sent.
        """
        request = self._starting(session, body)
        reply = self._transport.step(request, self.timeout_s)
        self._session, self._seq = request.session, 0
        return reply

    def tick(self, body: Body) -> bytes:
        """Send one observation and give the action.

        Raises:
            SessionUnknown: none is running.
            SessionLost, AgentError: the session has ended; start another.
            SessionResumed: this tick was not applied, nor may earlier ones be: the session goes on from the number of
                ``details["tick"]``, and the next tick gets that number. Told once.
            OutOfSequence: somebody else ticks this session; the next tick gets the number that was expected.
            ConnectionLost, DeadlineExceeded: the tick may or may not have been applied.
        """
        return self._send(StepKind.TICK, body)

    def stop(self, body: Body = b"") -> bytes:
        """End the session, with the last observation perhaps, and give the service's answer. Errors as of `tick`.

        The answer is empty when it was lost with its connection, and the service knows the session no more.
        """
        return self._send(StepKind.STOP, body)

    def call(self, body: Body) -> bytes:
        """One stateless request, without a session. Never sent twice.

        Raises:
            ProtocolError: the URL is a WebSocket's, where a connection is a session.
        """
        return self._transport.step(self._request(StepKind.CALL, "", body), self.timeout_s)

    def close(self) -> None:
        """Close the connection. Over WebSocket that ends a running session; elsewhere the service waits for more."""
        self._session = None
        self._transport.close()

    def _send(self, kind: StepKind, body: Body) -> bytes:
        with self._turn:
            request = self._running(kind, body)
            while True:
                try:
                    reply = self._transport.step(request, self.timeout_s)
                    break
                except BrayxError as error:
                    pause_s = self._failed(request, error, holds_session=self._transport.holds_session)
                if pause_s is None:
                    reply = b""
                    break
                clock.sleep(pause_s)
                request = self._again(request)
            self._answered(request)
            return reply

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

    ``url`` may be any service with ``async step(request)`` too: it is awaited on this loop, without a network.
    Requests of one client go one after the other; cancelling one gives its connection up.
    """

    def __init__(
        self,
        url: str | StepService,
        *,
        timeout_s: float = 30.0,
        reconnect_s: float | None = None,
        key: str = "",
        secret: bytes | str = b"",
        time: str = "",
        token: str = "",
    ) -> None:
        super().__init__(url, timeout_s, reconnect_s, key, secret, time, token)
        self._transport: AsyncTransport = transports.connect_async(url)
        self._turn: AbstractAsyncContextManager[object] = nullcontext() if reconnect_s is None else asyncio.Lock()

    async def start(self, body: Body = b"", session: str | None = None) -> bytes:
        """As `Client.start`."""
        request = self._starting(session, body)
        reply = await self._transport.step(request, self.timeout_s)
        self._session, self._seq = request.session, 0
        return reply

    async def tick(self, body: Body) -> bytes:
        """As `Client.tick`."""
        return await self._send(StepKind.TICK, body)

    async def stop(self, body: Body = b"") -> bytes:
        """As `Client.stop`."""
        return await self._send(StepKind.STOP, body)

    async def call(self, body: Body) -> bytes:
        """As `Client.call`."""
        return await self._transport.step(self._request(StepKind.CALL, "", body), self.timeout_s)

    async def close(self) -> None:
        """As `Client.close`."""
        self._session = None
        await self._transport.close()

    async def _send(self, kind: StepKind, body: Body) -> bytes:
        async with self._turn:
            request = self._running(kind, body)
            while True:
                try:
                    reply = await self._transport.step(request, self.timeout_s)
                    break
                except BrayxError as error:
                    pause_s = self._failed(request, error, holds_session=self._transport.holds_session)
                if pause_s is None:
                    reply = b""
                    break
                await asyncio.sleep(pause_s)
                request = self._again(request)
            self._answered(request)
            return reply

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
