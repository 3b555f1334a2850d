"""The ASGI application of an actor replica: routes to the HTTP and WebSocket doors, and a status page.

Plain ASGI instead of a framework: a tick passes here thousands of times a second, and three routes need no router.
Knows nothing of Serve; any ASGI server can run it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from brayx.actor.doors.answers import is_preflight, other
from brayx.actor.doors.http import Receive, Scope, Send, headers_of, refuse, step, write
from brayx.actor.doors.websocket import session
from brayx.actor.service import Service
from brayx.errors import BrayxError, ProtocolError
from brayx.gamecore.protocol import DEFAULT_MAX_BODY_BYTES, SESSION_PATH, STEP_PATH


class DoorApp:
    """ASGI application over a `Service`.

    Args:
        service: answers the requests.
        max_body_bytes: limit on a request's body or a WebSocket message.
        idle_timeout_s: a WebSocket connection without a session for this long is closed.
    """

    def __init__(
        self, service: Service, *, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES, idle_timeout_s: float = 60.0
    ) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._idle_timeout_s = idle_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await _lifespan(receive, send)
            return
        service = self._service
        try:
            headers = headers_of(scope)
            service.hosts.check(headers.get("host"))
        except BrayxError as error:
            if kind == "http":
                await refuse(service, send, error.http_status, error)
            else:
                await _refuse_opening(service, error, error.http_status, receive, send, scope)
            return
        path = _path(scope)
        if kind == "http":
            method = scope["method"]
            if service.cors.is_on:
                send = _with_headers(send, service.cors.headers(headers.get("origin"), method))
            if path == STEP_PATH and not is_preflight(service, method):
                await step(service, self._max_body_bytes, headers, scope, receive, send)
            else:
                answer = other(service, method, path, headers)
                await write(send, answer.status, answer.body, content_type=answer.content_type)
        elif path == SESSION_PATH:
            await session(service, self._max_body_bytes, self._idle_timeout_s, headers, scope, receive, send)
        else:
            elsewhere = ProtocolError(f"only {SESSION_PATH} is a WebSocket")
            await _refuse_opening(service, elsewhere, 426, receive, send, scope)


async def _refuse_opening(
    service: Service, error: BrayxError, status: int, receive: Receive, send: Send, scope: Scope
) -> None:
    """Refuses a WebSocket handshake."""

    async def respond(message: MutableMapping[str, Any]) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await receive()
    if "websocket.http.response" in (scope.get("extensions") or {}):
        await refuse(service, respond, status, error)
    else:  # this server can only answer with an empty 403
        service.refused(error)
        await send({"type": "websocket.close"})


def _with_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    """Sends as ``send``, with more headers."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return sent


def _path(scope: Scope) -> str:
    """The path below the prefix that the application is mounted at."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root) else path


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
            return
