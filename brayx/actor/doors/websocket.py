"""The WebSocket door: one connection is one session. Plain ASGI; knows nothing of sessions beyond the `Service`.

Bare mode (no subprotocol): opening is the start, answered once the session runs; each message is a tick, its reply a
message of the same type, closing with 1000 or 1001 the stop. An error is a text message with the error document; if
it ended the session, the close follows with 4000 + its HTTP status.

Envelope mode (subprotocol ``brayx.v1``): each message is a kind byte and a body, so that start and stop have bodies
and replies of their own (`brayx.gamecore.protocol.FrameKind`).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from brayx.actor.doors.http import Receive, Scope, Send, check_headers
from brayx.actor.service import Service, attaches, leaves_running, to_typed
from brayx.errors import BodyTooLarge, BrayxError, OutOfSequence, ProtocolError, SessionError
from brayx.gamecore.protocol import (
    KIND_OF_FRAME,
    WS_SUBPROTOCOL,
    FrameKind,
    StepKind,
    StepRequest,
    add_header,
    check_credentials,
    check_session,
    close_code,
    decode_frame,
    decode_numbered,
    encode_frame,
    parse_record,
    parse_seq,
)

_CLOSE_NORMAL = 1000
_CLOSE_GOING_AWAY = 1001
_CLOSE_SERVICE_RESTART = 1012
_MAX_REASON_BYTES = 123
_TIMEOUT_STATUS = 408
_EARLY_MESSAGES, _EARLY_BYTES = 64, 65_536
"""Maximum messages, and about the maximum bytes, that are read while a start waits: the door notices that the client
leaves only after it has read what the client sent before."""
_FIELDS = ("session", "key", "time", "token", "seq", "opponent", "record", "traceparent")


async def session(
    service: Service,
    max_body_bytes: int,
    idle_timeout_s: float,
    headers: Mapping[str, str],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Serves one WebSocket connection from its handshake to its end; ``headers`` are from `headers_of`."""
    await receive()
    connection = _Connection(service, max_body_bytes, idle_timeout_s, headers, scope, receive, send)
    try:
        await connection.open()
        while True:
            message = await connection.next()
            if message["type"] == "websocket.disconnect":
                await connection.closed_by_client(message.get("code", 1005))
                return
            data = message.get("bytes")
            if data is None:
                await connection.message(message["text"].encode(), text=True)
            else:
                await connection.message(data, text=False)
    except _Closed:
        return
    finally:
        await connection.abandon()


def fields_of(headers: Mapping[str, str], query: bytes) -> dict[str, str]:
    """The fields of an opening, from headers or the query; empty if both lack one.

    Raises:
        ProtocolError: a field has two values.
    """
    fields: dict[str, str] = {}
    given = [(name, value) for name, value in headers.items() if value] + parse_qsl(query.decode("latin-1"))
    for name, value in given:
        if name in _FIELDS:
            add_header(fields, name, value)
    return {name: fields.get(name, "") for name in _FIELDS}


def _check_subprotocols(offered: Iterable[str]) -> None:
    """Raises `ProtocolError` for an envelope of another version alone: its messages would pass for bare ticks."""
    ours = [name for name in offered if name.startswith(WS_SUBPROTOCOL.partition(".")[0] + ".")]
    if ours and WS_SUBPROTOCOL not in ours:
        raise ProtocolError(
            f"the subprotocol is {ours[0]!r:.40}, expected {WS_SUBPROTOCOL!r} or none", field="subprotocol"
        )


class _Closed(Exception):
    """The door has closed the connection; nothing more is read from it."""


class _Connection:
    def __init__(
        self,
        service: Service,
        max_body_bytes: int,
        idle_timeout_s: float,
        headers: Mapping[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._idle_timeout_s = idle_timeout_s
        self._receive = receive
        self._ahead: asyncio.Future[MutableMapping[str, Any]] | None = None
        self._early: deque[MutableMapping[str, Any]] = deque()
        self._server_send = send
        self._enveloped = WS_SUBPROTOCOL in scope.get("subprotocols", ())
        self._fields = dict.fromkeys(_FIELDS, "")
        self._headers = headers
        self._scope = scope
        self._numbers: int | None = None
        self._record = False
        self._running = False
        self._may_hold = False
        self._holder = service.holder(self._ended_elsewhere)
        self._let_in = False
        self._stopping = False
        self._closing: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        refusal: BrayxError | None = None
        named = []
        try:
            self._fields = fields_of(self._headers, self._scope.get("query_string", b""))
            session = self._fields["session"] = self._fields["session"] or uuid.uuid4().hex
            check_session(session)
            check_headers(self._scope)
            _check_subprotocols(self._scope.get("subprotocols", ()))
            check_credentials(*(self._fields[name] for name in ("key", "time", "token", "opponent")))
            self._numbers = parse_seq(self._fields["seq"])
            self._record = parse_record(self._fields["record"])
            named = [(b"session", session.encode("ascii"))]
        except ProtocolError as error:
            self._service.refused(error)
            refusal = error
        if refusal is None and not self._enveloped:
            refusal = await self._begin()
        subprotocol = WS_SUBPROTOCOL if self._enveloped else None
        await self._send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": named})
        if refusal is not None:
            await self._fail(refusal, text=not self._enveloped, over=True)
        if self._enveloped:
            self._wait_for_start()

    async def _begin(self) -> BrayxError | None:
        """Starts a bare connection's session before it accepts the handshake: open means that the session runs."""
        try:
            await self._service.step(self._request(StepKind.START, b"", self._numbers))
        except Exception as failure:
            return to_typed(failure)
        self._attach()
        return None

    async def next(self) -> MutableMapping[str, Any]:
        """Receives the next message."""
        if self._early:
            return self._early.popleft()
        ahead, self._ahead = self._ahead, None
        return await (self._receive() if ahead is None else ahead)

    async def _start(self, request: StepRequest) -> bytes:
        """Passes a start to the service, and withdraws it if the client leaves before the reply."""
        opening = asyncio.create_task(self._service.step(request, let_in=self._let_in))
        left = _EARLY_BYTES
        try:
            while not opening.done() and left > 0 and len(self._early) < _EARLY_MESSAGES:
                if self._ahead is None:
                    self._ahead = asyncio.ensure_future(self._receive())
                await asyncio.wait((opening, self._ahead), return_when=asyncio.FIRST_COMPLETED)
                if not self._ahead.done():
                    break
                if self._ahead.exception() or self._ahead.result()["type"] == "websocket.disconnect":
                    self._service.withdraw(request.session, request.holder)
                    break
                early, self._ahead = self._ahead.result(), None
                self._early.append(early)
                left -= len(early.get("bytes") or early.get("text") or "")
            return await opening
        finally:
            opening.cancel()

    def _request(self, kind: StepKind, body: bytes, seq: int | None) -> StepRequest:
        fields, holder = self._fields, self._holder
        return StepRequest(
            kind,
            fields["session"],
            body,
            fields["key"],
            fields["time"],
            fields["token"],
            seq,
            holder.name,
            holder.attached,
            fields["opponent"] if kind is StepKind.START else "",
            kind is StepKind.START and self._record,
            fields["traceparent"] if kind is StepKind.START else "",
        )

    async def message(self, data: bytes, *, text: bool) -> None:
        if self._closing is not None:
            return
        kind, body, seq = StepKind.TICK, data, None
        try:
            if self._enveloped:
                kind, body, seq = _parse(data)
            if len(body) > self._max_body_bytes:
                limit = self._max_body_bytes
                raise BodyTooLarge(f"body has {len(body)} bytes, at most {limit} are allowed", limit=limit)
        except ProtocolError as error:
            self._service.refused(error)
            await self._fail(error, text=text, over=False)
            return
        await self._step(kind, body, text=text, seq=seq)

    async def _step(self, kind: StepKind, body: bytes, *, text: bool, seq: int | None = None) -> None:
        """Passes a step to the service; a numbered tick attaches a connection without a session to the running one."""
        attaching = not self._running
        try:
            if kind is StepKind.START:
                if self._running:
                    running = SessionError("this connection's session is running: one connection is one session")
                    self._service.refused(running)
                    raise running
                self._wait_no_more()
                seq = self._numbers
            self._stopping = kind is StepKind.STOP
            request = self._request(kind, body, seq)
            if kind is StepKind.START:
                reply = await self._start(request)
            else:
                reply = await self._service.step(request, let_in=self._let_in)
        except Exception as failure:
            error = to_typed(failure)
            self._stopping = False
            if attaching and kind is not StepKind.START and attaches(error):
                self._attach()
            self._may_hold = isinstance(error, OutOfSequence)
            survives = (
                isinstance(error, ProtocolError) or leaves_running(error) or (self._running and kind is StepKind.START)
            )
            await self._fail(error, text=text, over=not survives or (not self._enveloped and not self._running))
            if not self._running:
                self._wait_for_start()
            elif self._holder.ended:  # during its own stop
                self._ended_elsewhere(self._holder.ended)
            return
        if kind is StepKind.STOP:
            self._running = False
            self._holder = self._service.holder(self._ended_elsewhere)
            self._wait_for_start()
        elif attaching:
            self._attach()
        await self._write(FrameKind.REPLY, reply, text=text)

    def _attach(self) -> None:
        """Makes this connection the session's holder."""
        self._wait_no_more()
        self._running = self._let_in = self._holder.attached = True
        if self._holder.ended:
            self._ended_elsewhere(self._holder.ended)

    async def _write(self, frame: FrameKind, body: bytes, *, text: bool) -> None:
        data = encode_frame(frame, body) if self._enveloped else body
        if text:
            await self._send({"type": "websocket.send", "text": data.decode("utf-8", "replace")})
        else:
            await self._send({"type": "websocket.send", "bytes": data})

    async def _send(self, message: dict[str, object]) -> None:
        try:
            await self._server_send(message)
        except RuntimeError:
            raise _Closed from None  # uvicorn raises this for a client that left during the handshake

    async def _fail(self, error: BrayxError, *, text: bool, over: bool) -> None:
        """Sends the error's document; ``over`` also closes the connection, whose session has ended."""
        await self._write(FrameKind.ERROR, error.to_wire(), text=text or not self._enveloped)
        if over:
            self._running = False
            await self._close(close_code(error.http_status), error.to_wire())
            raise _Closed

    def _ended_elsewhere(self, reason: str) -> None:
        """Closes the connection after its session ended without its stop: idle, drained, taken over..."""
        if self._running and not self._stopping and reason != "error":
            self._running = False
            code = _CLOSE_SERVICE_RESTART if reason == "moved" else close_code(410)
            self._closing = asyncio.create_task(self._close(code, f"session ended: {reason}".encode()))

    def _wait_for_start(self) -> None:
        """Limits the time until a start, since an idle connection occupies a slot."""
        if self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(self._idle_timeout_s, self._no_start)

    def _wait_no_more(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _no_start(self) -> None:
        reason = f"no session for {self._idle_timeout_s:g} s"
        self._closing = asyncio.create_task(self._close(close_code(_TIMEOUT_STATUS), reason.encode()))

    async def _close(self, code: int, reason: bytes) -> None:
        text = reason[:_MAX_REASON_BYTES].decode("utf-8", "ignore")
        with contextlib.suppress(_Closed, OSError):  # it is gone already
            await self._send({"type": "websocket.close", "code": code, "reason": text})

    async def closed_by_client(self, code: int) -> None:
        """A bare connection that closes in an orderly way stops its session; any other end is a disconnect."""
        if not self._running or code not in (_CLOSE_NORMAL, _CLOSE_GOING_AWAY):
            return
        self._running = False
        if self._enveloped:
            await self._service.disconnect(self._fields["session"], self._holder.name, for_good=True)
        else:
            with contextlib.suppress(BrayxError):  # the client is gone: no answer can reach it
                await self._service.step(self._request(StepKind.STOP, b"", None), let_in=True)

    async def abandon(self) -> None:
        """Cleans up: a session that still runs has lost its client, also one that a refused tick has taken over."""
        self._wait_no_more()
        if self._ahead is not None:
            self._ahead.cancel()
        if self._running or self._may_hold:
            self._running = False
            await self._service.disconnect(self._fields["session"], self._holder.name)
        if self._closing is not None:
            await asyncio.wait([self._closing], timeout=1.0)


def _parse(message: bytes) -> tuple[StepKind, bytes, int | None]:
    """Step kind, body and tick number of an enveloped message.

    Raises:
        ProtocolError: a client cannot send such a message.
    """
    frame, body = decode_frame(message)
    seq = None
    if frame is FrameKind.NUMBERED:
        seq, body = decode_numbered(body)
    kind = KIND_OF_FRAME.get(frame.value)
    if kind is None:
        raise ProtocolError(f"kind {frame.value!r} is sent by the service only, expected S, T, N or P")
    return kind, body, seq
