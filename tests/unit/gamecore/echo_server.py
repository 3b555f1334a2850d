"""A small service that follows the protocol in full, for the tests of the clients and of the compliance suite.

Plain ASGI under uvicorn in a thread, and the TCP framing on asyncio's streams in another. What a tick answers is a
function of its body, the body itself by default.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import uvicorn

from brayx.errors import (
    BodyTooLarge,
    BrayxError,
    OutOfSequence,
    ProtocolError,
    SessionExists,
    SessionLost,
    SessionUnknown,
)
from brayx.gamecore.protocol import (
    KIND_OF_FRAME,
    SESSION_PATH,
    STEP_PATH,
    WS_SUBPROTOCOL,
    FrameKind,
    StepKind,
    StepRequest,
    add_header,
    check_credentials,
    check_session,
    close_code,
    decode_numbered,
    encode_frame,
    parse_request,
)
from brayx.gamecore.tcp import NO_REQUEST, MalformedFrame, RequestReader, encode_error, encode_reply

MAX_BODY_BYTES = 2 * 1024 * 1024

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class EchoApp:
    """The ASGI application.

    Args:
        answer: gives the reply to a tick or a stateless call; may raise.
        prefix: path before ``/step`` and ``/session``.

    Attributes:
        running: ids of the sessions.
        requests: what came, in order.
        applied: ``(session, seq, body)`` of the ticks that were answered, and not with a kept reply.
        reconnect_timeout_s: how long a numbered session outlives its WebSocket connection.
        holders: the WebSocket connection that holds a session.
        taken: by connection that may still hold a session, a function that tells it that another took its session
            over, and closes it.
    """

    def __init__(self, answer: Callable[[bytes], bytes] = lambda body: body, prefix: str = "") -> None:
        self.answer = answer
        self.prefix = prefix
        self.running: set[str] = set()
        self.requests: list[StepRequest] = []
        self.applied: list[tuple[str, int | None, bytes]] = []
        self.kept: dict[str, tuple[int, bytes]] = {}
        self.reconnect_timeout_s = 10.0
        self.holders: dict[str, str] = {}
        self.taken: dict[str, Callable[[], None]] = {}

    def step(self, request: StepRequest) -> bytes:
        if len(request.body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"body has {len(request.body)} bytes, at most {MAX_BODY_BYTES} are allowed")
        if len(self.requests) < 10_000:
            self.requests.append(request)
        session = request.session
        if request.holder and request.holder not in self.taken:
            raise SessionLost(f"session {session} was taken over", reason="taken")
        if request.kind is StepKind.CALL:
            return self.answer(request.body)
        if request.kind is StepKind.START:
            if session in self.running:
                raise SessionExists(f"session {session} is running", session=session)
            self.running.add(session)
            self.kept.pop(session, None)
            self.hold(session, request.holder)
            return b"started"
        if session not in self.running:
            raise SessionUnknown(f"session {session} was never started, or has ended", session=session)
        if request.seq is not None:
            self.hold(session, request.holder)
        if request.kind is StepKind.STOP:
            self.running.discard(session)
            self.holders.pop(session, None)
            return b"stopped"
        if request.holder and self.holders.get(session) != request.holder:
            raise SessionUnknown(f"the connection does not hold session {session}")
        last, reply = self.kept.get(session, (-1, b""))
        if request.seq is not None and request.seq != last + 1:
            if request.seq == last:
                return reply
            message = f"tick {request.seq} is out of sequence, expected {last + 1}"
            raise OutOfSequence(message, expected=last + 1, got=request.seq)
        reply = self.answer(request.body)
        if request.seq is not None:
            self.kept[session] = (request.seq, reply)
        if len(self.applied) < 10_000:
            self.applied.append((session, request.seq, request.body))
        return reply

    def hold(self, session: str, holder: str) -> None:
        """Makes that connection the session's holder; with an empty name, the session has none."""
        before = self.holders.get(session, "")
        self.holders[session] = holder
        if before and before != holder:
            self.taken.pop(before)()

    async def answered(self, request: StepRequest) -> bytes:
        """`step` for `serving_tcp` and for the clients without a network."""
        return self.step(request)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")[: MAX_BODY_BYTES + 1 - len(body)]
            more = message.get("more_body", False)
        if scope["path"] != self.prefix + STEP_PATH:
            await _respond(send, 404, ProtocolError(f"no such path: {scope['path']}").to_wire())
        elif scope["method"] != "POST":
            await _respond(send, 405, ProtocolError(f"method {scope['method']}, expected POST").to_wire())
        else:
            try:
                await _respond(send, 200, self.step(parse_request(_headers(scope), bytes(body))))
            except BrayxError as error:
                await _respond(send, error.http_status, error.to_wire())

    async def _websocket(self, scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] != self.prefix + SESSION_PATH:
            await send({"type": "websocket.http.response.start", "status": 404, "headers": []})
            await send({"type": "websocket.http.response.body", "body": ProtocolError("no such path").to_wire()})
            return
        envelope = WS_SUBPROTOCOL in scope["subprotocols"]
        accept = {"type": "websocket.accept", "subprotocol": WS_SUBPROTOCOL if envelope else None}
        named = [_headers(scope).get("session"), *parse_qs(scope["query_string"].decode()).get("session", [])]
        session, *others = list(filter(None, named)) or [""]
        credentials = {name: _headers(scope).get(name, "") for name in ("key", "time", "token")}
        accepted, started, code = False, False, 1006
        loop = asyncio.get_running_loop()

        def taken() -> None:
            closing = send({"type": "websocket.close", "code": 4410, "reason": "session ended: taken"})
            loop.call_soon_threadsafe(loop.create_task, closing)

        holder = uuid.uuid4().hex
        self.taken[holder] = taken
        try:
            check_session(session)
            if any(other != session for other in others):
                raise ProtocolError(f"header 'session' is {session!r} and {others}, expected one value")
            check_credentials(*(credentials.get(name, "") for name in ("key", "time", "token")))
            if not envelope:
                self.step(StepRequest(StepKind.START, session, b"", **credentials, holder=holder))
                started = True
            accepted = True
            await send(accept)  # after the start: an open connection means that its session runs
            while (message := await receive())["type"] == "websocket.receive":
                text = message.get("text")
                data = text.encode() if text is not None else message["bytes"]
                kind, body, seq = StepKind.TICK, data, None
                try:
                    if envelope:
                        mark, body = data[:1].decode("latin-1"), data[1:]
                        if mark == FrameKind.NUMBERED.value:
                            seq, body = decode_numbered(body)
                            started = session in self.running
                        elif mark in KIND_OF_FRAME:
                            kind = KIND_OF_FRAME[mark]
                        else:
                            raise ProtocolError(f"message starts with {mark!r}, expected S, T, N or P")
                    reply = self.step(StepRequest(kind, session, body, **credentials, seq=seq, holder=holder))
                except BrayxError as error:
                    if kind is StepKind.START:
                        raise
                    await _send_error(send, error, envelope)
                    continue
                started = kind is not StepKind.STOP
                reply = encode_frame(FrameKind.REPLY, reply) if envelope else reply
                await send(
                    {"type": "websocket.send", **({"text": reply.decode()} if text is not None else {"bytes": reply})}
                )
                if not started:
                    await send({"type": "websocket.close", "code": 1000})
                    return
            code = message.get("code", 1006)
        except BrayxError as error:
            if not accepted:
                await send(accept)
            await _send_error(send, error, envelope)
            reason = error.to_wire()[:123].decode(errors="ignore")
            await send({"type": "websocket.close", "code": close_code(error.http_status), "reason": reason})
        finally:
            if started:
                numbered = session in self.kept or bool(_headers(scope).get("seq"))
                wait_s = self.reconnect_timeout_s if numbered and code not in (1000, 1001) else 0.0
                loop.call_later(wait_s, self._disconnected, session, holder)

    def _disconnected(self, session: str, holder: str) -> None:
        if self.holders.get(session) == holder:
            del self.holders[session]
            self.running.discard(session)


def _headers(scope: Message) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        add_header(headers, name.decode("latin-1"), value.decode("latin-1").strip(" \t"))
    return headers


async def _send_error(send: Send, error: BrayxError, envelope: bool) -> None:
    document = error.to_wire()
    if envelope:
        await send({"type": "websocket.send", "bytes": encode_frame(FrameKind.ERROR, document)})
    else:
        await send({"type": "websocket.send", "text": document.decode()})


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """Run ``app`` on a free port; gives ``127.0.0.1:port``."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off", ws_max_size=4 * MAX_BODY_BYTES, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline, "the echo server did not start"
        time.sleep(0.01)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive(), "the echo server did not stop"


Step = Callable[[StepRequest], Awaitable[bytes]]


@contextlib.contextmanager
def serving_tcp(step: Step, max_body_bytes: int = MAX_BODY_BYTES) -> Iterator[str]:
    """Serve the TCP framing on a free port, on a loop in a separate thread; gives ``127.0.0.1:port``.

    Requests of one connection are answered one after the other.
    """

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = RequestReader(max_body_bytes)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            try:
                while data := await reader.read(1 << 16):
                    for session, time, request in frames.feed(data):
                        writer.write(await _frame(step, session, time, request))
                    await writer.drain()
            except MalformedFrame as error:
                writer.write(encode_error(b"", error, ~NO_REQUEST))

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        runner = stack.enter_context(loop_in_thread())
        future = asyncio.run_coroutine_threadsafe(asyncio.start_server(connected, sock=listener), runner)
        server = future.result(60)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        runner.call_soon_threadsafe(server.close)


async def _frame(step: Step, session: bytes, time: int, request: StepRequest | ProtocolError) -> bytes:
    try:
        if isinstance(request, ProtocolError):
            raise request
        return encode_reply(session, await step(request), time)
    except BrayxError as error:
        return encode_error(session, error, time)


@contextlib.contextmanager
def loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """A running event loop in a separate thread; its remaining tasks are cancelled at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def cancel_all() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        assert not thread.is_alive(), "the TCP echo server did not stop"
        loop.close()


def main() -> None:
    """For measurements: serve on the port given as argument, in a separate process."""
    import sys

    uvicorn.run(EchoApp(), port=int(sys.argv[1]), log_level="error", lifespan="off")


if __name__ == "__main__":
    main()
