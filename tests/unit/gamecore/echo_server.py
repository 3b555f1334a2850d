"""A small service that follows the protocol in full, for the tests of the clients and of the compliance suite.

Plain ASGI under uvicorn, in a thread. What a tick answers is a function of its body, the body itself by default.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import uvicorn

from brayx.errors import BodyTooLarge, BrayxError, ProtocolError, SessionExists, SessionUnknown
from brayx.gamecore.protocol import (
    KIND_OF_FRAME,
    SESSION_PATH,
    STEP_PATH,
    WS_SUBPROTOCOL,
    Frame,
    StepKind,
    StepRequest,
    check_session,
    close_code,
    encode_frame,
    parse_request,
)

MAX_BODY_BYTES = 2 * 1024 * 1024

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class EchoApp:
    """The ASGI application.

    Args:
        answer: gives the reply to a tick or a stateless call; may raise.
        prefix: path before ``/step`` and ``/session``.
    """

    def __init__(self, answer: Callable[[bytes], bytes] = lambda body: body, prefix: str = "") -> None:
        self.answer = answer
        self.prefix = prefix
        self.running: set[str] = set()
        self.requests: list[StepRequest] = []

    def step(self, request: StepRequest) -> bytes:
        if len(request.body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"body has {len(request.body)} bytes, at most {MAX_BODY_BYTES} are allowed")
        if len(self.requests) < 10_000:
            self.requests.append(request)
        session = request.session
        if request.kind is StepKind.CALL:
            return self.answer(request.body)
        if request.kind is StepKind.START:
            if session in self.running:
                raise SessionExists(f"session {session} is running", session=session)
            self.running.add(session)
            return b"started"
        if session not in self.running:
            raise SessionUnknown(f"session {session} was never started, or has ended", session=session)
        if request.kind is StepKind.STOP:
            self.running.discard(session)
            return b"stopped"
        return self.answer(request.body)

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
        await send({"type": "websocket.accept", "subprotocol": WS_SUBPROTOCOL if envelope else None})
        session = _headers(scope).get("session") or parse_qs(scope["query_string"].decode()).get("session", [""])[0]
        started = False
        try:
            check_session(session)
            if not envelope:
                self.step(StepRequest(StepKind.START, session, b""))
                started = True
            while (message := await receive())["type"] == "websocket.receive":
                text = message.get("text")
                data = text.encode() if text is not None else message["bytes"]
                kind, body = StepKind.TICK, data
                try:
                    if envelope:
                        if (mark := data[:1].decode("latin-1")) not in KIND_OF_FRAME:
                            raise ProtocolError(f"message starts with {mark!r}, expected S, T or P")
                        kind, body = KIND_OF_FRAME[mark], data[1:]
                    reply = self.step(StepRequest(kind, session, body))
                except BrayxError as error:
                    if kind is StepKind.START:
                        raise
                    await _send_error(send, error, envelope)
                    continue
                started = kind is not StepKind.STOP
                reply = encode_frame(Frame.REPLY, reply) if envelope else reply
                await send(
                    {"type": "websocket.send", **({"text": reply.decode()} if text is not None else {"bytes": reply})}
                )
                if not started:
                    await send({"type": "websocket.close", "code": 1000})
                    return
        except BrayxError as error:
            await _send_error(send, error, envelope)
            reason = error.to_wire()[:123].decode(errors="ignore")
            await send({"type": "websocket.close", "code": close_code(error.http_status), "reason": reason})
        finally:
            if started:
                self.running.discard(session)


def _headers(scope: Message) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def _send_error(send: Send, error: BrayxError, envelope: bool) -> None:
    document = error.to_wire()
    if envelope:
        await send({"type": "websocket.send", "bytes": encode_frame(Frame.ERROR, document)})
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
    deadline = time.monotonic() + 10
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline, "the echo server did not start"
        time.sleep(0.01)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive(), "the echo server did not stop"


def main() -> None:
    """For measurements: serve on the port given as argument, in a process of its own."""
    import sys

    uvicorn.run(EchoApp(), port=int(sys.argv[1]), log_level="error", lifespan="off")


if __name__ == "__main__":
    main()
