"""A game's client: start, tick and stop over the door in the URL. Blocking `Client`, asyncio `AsyncClient`.

    with Client("http://127.0.0.1:8000") as client:      # or ws://, tcp://, grpc://
        client.start()
        action = client.tick(observation)                # bytes in, bytes out; the agent decodes them

Knows nothing of Ray, torch, or the contents of bodies. Without ``reconnect_s`` a request is never sent twice: when a
connection breaks, the client raises `ConnectionLost`, since the tick may or may not have been applied, and the game
decides. With ``reconnect_s`` ticks are numbered, and the client itself repeats a lost tick, which is applied once.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time as clock
import uuid
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from types import TracebackType
from typing import Generic, Self, TypeVar

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
_Url = TypeVar("_Url")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class _BaseClient(Generic[_Url]):
    """State and rules that both clients share: the running session, its tick numbers, credentials, and retries."""

    def __init__(
        self,
        url: _Url,
        *,
        timeout_s: float = 30.0,
        reconnect_s: float | None = None,
        key: str = "",
        secret: bytes | str = b"",
        time: str = "",
        token: str = "",
        compress: bool = False,
    ) -> None:
        self.url = url if isinstance(url, str) else LOCAL_URL
        self.timeout_s = timeout_s
        self._credentials = _Credentials(key, secret, time, token)
        self._reconnect_s = reconnect_s
        self._session: str | None = None
        self._seq = 0
        self._outage: _Outage | None = None
        self._open(url, compress)

    def _open(self, url: _Url, compress: bool) -> None:
        raise NotImplementedError

    @property
    def session(self) -> str | None:
        """Id of the running session, None when none is running."""
        return self._session

    def _request(self, kind: StepKind, session: str, body: Body, seq: int | None = None) -> StepRequest:
        data = body.encode() if isinstance(body, str) else body
        return StepRequest(kind, session, data, *self._credentials.of(session), seq)

    def _starting(
        self, session: str | None, body: Body, opponent: Mapping[str, object] | None, record: bool
    ) -> StepRequest:
        if self._session is not None:
            raise SessionExists(
                f"this client's session {self._session} is running; stop it, or use another client",
                session=self._session,
            )
        session = check_session(uuid.uuid4().hex if session is None else session)
        request = self._request(StepKind.START, session, body, None if self._reconnect_s is None else 0)
        request = request._replace(record=record)
        if opponent is None:
            return request
        if len(opponent) != 1:
            raise ConfigError(f'opponent is {opponent!r}, expected one key and its value, as in {{"rating": 1200}}')
        ((key, value),) = opponent.items()
        return request._replace(opponent=f"{key}={value}")

    def _running(self, kind: StepKind, body: Body) -> StepRequest:
        if self._session is None:
            raise SessionUnknown(f"{kind.value} without a running session: call start first")
        self._outage = None
        numbered = self._reconnect_s is not None and kind is StepKind.TICK
        return self._request(kind, self._session, body, self._seq if numbered else None)

    def _again(self, request: StepRequest) -> StepRequest:
        """``request`` for another try, with renewed credentials."""
        return self._request(request.kind, request.session, request.body, request.seq)

    def _answered(self, request: StepRequest) -> None:
        if request.kind is StepKind.STOP:
            self._session = None
        elif request.seq is not None:
            self._seq = request.seq + 1

    def _failed(self, request: StepRequest, error: BrayxError, *, holds_session: bool) -> float | None:
        """Handles an error of a tick or a stop: the seconds to wait before another try, or None if an earlier try was
        applied. Raises ``error`` if the game must handle it.
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
    """Bray's key, time and token: as given, or signed with the key's secret once a second."""

    def __init__(self, key: str, secret: bytes | str, time: str, token: str) -> None:
        if secret and (time or token or not key):
            raise ConfigError("secret needs key, and neither time nor token: they are computed from it")
        self._key = key
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._made: tuple[str, int] | None = None
        self._fields = (key, time, token)

    def of(self, session: str) -> tuple[str, str, str]:
        """key, time and token for a request of ``session`` sent now."""
        if self._secret:
            now = int(clock.time())
            if self._made != (session, now):
                from brayx.gamecore.auth import sign

                self._made = (session, now)
                self._fields = (self._key, str(now), sign(self._secret, self._key, session, str(now)))
        return self._fields


class _Outage:
    """Backoff since a request first failed: growing pauses with jitter, up to a time limit.

    Attributes:
        maybe_applied: a try may have reached the service, although no reply arrived.
    """

    def __init__(self, window_s: float) -> None:
        self.maybe_applied = False
        self._deadline = clock.monotonic() + window_s
        self._longest_s = 0.0

    def pause_after(self, error: BrayxError) -> float:
        """Seconds to wait after ``error``; 0 the first time, since most often just one connection broke. Raises
        ``error`` once the window has passed.
        """
        remaining = self._deadline - clock.monotonic()
        if remaining <= 0:
            raise error
        self.maybe_applied = self.maybe_applied or error.details.get("maybe_applied") is True
        if isinstance(error, TransportError) and not isinstance(error, ConnectFailed):
            self.maybe_applied = True
        elif self._longest_s == 0.0:
            self._longest_s = _FIRST_PAUSE_S  # a service that is full or gone stays so for a moment
        pause_s = random.uniform(self._longest_s / 2, self._longest_s)
        self._longest_s = min(_LONGEST_PAUSE_S, self._longest_s * 2 or _FIRST_PAUSE_S)
        return min(remaining, pause_s)


def _may_pass(error: BrayxError) -> bool:
    """Whether a later try of the same request may succeed."""
    connecting = isinstance(error, DeadlineExceeded) and error.details.get("layer") == "connect"
    return connecting or isinstance(error, TransportError | Overloaded)


class Client(_BaseClient["str | ServiceThread"]):
    """A blocking client with one session at a time; play several games at once with several clients.

    Args:
        url: ``http://host:port``, ``ws://host:port`` (a path, a Serve route prefix, is kept), ``tcp://host:port``
            or ``grpc://host:port``; or a running `ServiceThread`, which needs no network.
        timeout_s: time limit of one request, connecting included.
        reconnect_s: None: a request is sent once, and the game handles a broken connection. A number: ticks are
            numbered, and for this long after a connection broke, or the service was overloaded, the client reconnects
            and repeats the tick or stop, which is applied exactly once. 0: number ticks, but do not reconnect.
        key, secret: a key's id and its secret; they sign each request.
        time, token: a ready-made signature, sent with ``key`` unchanged.
        compress: offer compression; only over WebSocket, and only if the service has ``websocket_window_bits``.

    A tick that raised keeps its number: call `tick` with the same body to repeat it, whether it was applied or not.

    As a context manager, the client stops a running session on a clean exit, and only closes after an exception.

    Raises:
        ConfigError: the URL cannot be used, or the credentials are inconsistent.
    """

    def _open(self, url: str | ServiceThread, compress: bool) -> None:
        self._transport: Transport = transports.connect(url, compress=compress)
        # Two threads must not take the same number; without numbers the transport's lock is enough.
        self._turn: AbstractContextManager[object] = nullcontext() if self._reconnect_s is None else threading.Lock()

    def start(
        self,
        body: Body = b"",
        session: str | None = None,
        *,
        opponent: Mapping[str, object] | None = None,
        record: bool = False,
        timeout_s: float | None = None,
    ) -> bytes:
        """Starts a session and returns the service's answer. Never sent twice.

        Args:
            body: what the agent reads of the start.
            session: the session's id; None: a new one.
            opponent: whom to play against, where a league is served: one of ``level``, ``rating``, ``player`` and
                ``version`` with its value. Over TCP it must stand in the body.
            record: ask for the session to be recorded, where the service does that on request.
            timeout_s: time limit of this request; None: the client's.

        Raises:
            ProtocolError: the service does not record sessions on request.
            BadBody: the key is unknown, or its value is not valid.
            LeagueError, VersionUnknown: there is no such opponent; or no league.
            SessionExists: a session is running in this client, or under this id at the service.
            ServiceFull: the service has no room for another session.
            Unauthorized: credentials are missing or wrong.
            ConnectFailed: the service cannot be reached; nothing was sent.
        """
        request = self._starting(session, body, opponent, record)
        reply = self._transport.step(request, self.timeout_s if timeout_s is None else timeout_s)
        self._session, self._seq = request.session, 0
        return reply

    def tick(self, body: Body) -> bytes:
        """Sends one observation and returns the action.

        Raises:
            SessionUnknown: no session is running.
            SessionLost, AgentError: the session has ended; start another.
            SessionResumed: this tick was not applied, and earlier ones may be undone: the session continues after its
                first ``details["restored"]`` ticks, and the next one gets the number ``details["tick"]``. Raised once.
            OutOfSequence: another client ticks this session; the next tick gets the expected number.
            ConnectionLost, DeadlineExceeded: the tick may or may not have been applied.
        """
        return self._send(StepKind.TICK, body)

    def stop(self, body: Body = b"") -> bytes:
        """Ends the session, optionally with the last observation; returns the service's answer. Errors as for `tick`.

        The answer is empty if it was lost with its connection and the session is gone at the service.
        """
        return self._send(StepKind.STOP, body)

    def call(self, body: Body) -> bytes:
        """Sends one stateless request, without a session. Never sent twice.

        Raises:
            ProtocolError: the URL is a WebSocket's, where each connection is a session.
        """
        return self._transport.step(self._request(StepKind.CALL, "", body), self.timeout_s)

    def close(self) -> None:
        """Closes the connection. Over WebSocket this ends a running session; over other doors it stays open."""
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


class AsyncClient(_BaseClient["str | StepService"]):
    """`Client` for asyncio: the same calls, awaited. Belongs to one event loop.

    ``url`` may also be a service with ``async step(request)``: it is awaited on this loop, without a network. Requests
    of one client run one at a time; cancelling one drops its connection.
    """

    def _open(self, url: str | StepService, compress: bool) -> None:
        self._transport: AsyncTransport = transports.connect_async(url, compress=compress)
        self._turn: AbstractAsyncContextManager[object] = nullcontext() if self._reconnect_s is None else asyncio.Lock()

    async def start(
        self,
        body: Body = b"",
        session: str | None = None,
        *,
        opponent: Mapping[str, object] | None = None,
        record: bool = False,
        timeout_s: float | None = None,
    ) -> bytes:
        """As `Client.start`."""
        request = self._starting(session, body, opponent, record)
        reply = await self._transport.step(request, self.timeout_s if timeout_s is None else timeout_s)
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
