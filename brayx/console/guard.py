"""Decides who may use the console: keys with scopes, and protection from other sites' pages in a viewer's browser.
Also refuses large bodies.

A key is a line ``SCOPE/NAME: secret`` of a keys file (`brayx keys new --scope control`); a request has it as HTTP Basic
credentials. ``read`` may only read, ``control`` may also change things. Without keys, everybody on this machine may do
both; others may not: the console then answers only to loopback names. Otherwise a web page could reach it through
a domain name that resolves to this machine. No page may show the console in a frame: an invisible frame could catch a
viewer's clicks.
"""

from __future__ import annotations

import base64
import functools
from typing import Literal
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from brayx.errors import BodyTooLarge, BrayxError, ConfigError, Forbidden, Unauthorized
from brayx.gamecore.auth import Keys
from brayx.gamecore.browser import Hosts

KeyScope = Literal["read", "control"]
SCOPES: tuple[KeyScope, ...] = ("read", "control")
_MAX_BODY_BYTES = 1 << 20
_FORBID_FRAMES = {"Content-Security-Policy": "frame-ancestors 'none'", "X-Frame-Options": "DENY"}
"""Headers of every response."""
_LOCAL = Hosts((), "this console has no keys and answers to localhost only")
_CLIENT_GONE = 499
"""Status of a response whose client has gone; nginx's code for it."""
_PAGE = "/_nicegui"
"""Prefix of the page's own traffic. The page calls the API with the viewer's credentials, which are checked there."""


class ConsoleKeys:
    """The console's keys, each with a scope.

    Args:
        keys: keys whose ids begin with ``read/`` or ``control/``.

    Raises:
        ConfigError: a key has neither scope.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        for key in keys.ids:
            if key.partition("/")[0] not in SCOPES:
                raise ConfigError(
                    f"key {key!r} has no scope for the console: make a key with `brayx keys new --scope control`, or "
                    "`--scope read`"
                )

    def scope_of(self, authorization: str) -> KeyScope:
        """The scope of the credentials in an ``Authorization`` header.

        Raises:
            Unauthorized: there are none, or they are wrong.
        """
        key = self._keys.basic(authorization)
        return "control" if key.startswith("control/") else "read"


def basic(key: str, secret: bytes) -> str:
    """The ``Authorization`` header for a key."""
    return "Basic " + base64.b64encode(f"{key}:{secret.decode()}".encode()).decode()


class AccessGuard:
    """ASGI middleware that refuses callers who may not use the console, and forbids showing it in frames.

    Args:
        app: the console.
        keys: the keys; None: everybody on this machine may use it, by a loopback name.
    """

    def __init__(self, app: ASGIApp, keys: ConsoleKeys | None) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            self._check(HTTPConnection(scope))
        except BrayxError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 4000 + error.http_status, "reason": error.code})
                return
            await refusal(error)(scope, receive, send)
            return
        passed_on = self._app
        if scope["type"] == "http" and scope["path"].startswith(_PAGE):
            passed_on = functools.partial(_always_answered, self._app)
        await passed_on(scope, _bounded(receive), _forbidding_frames(send))

    def _check(self, request: HTTPConnection) -> None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if self._keys is None:
            _LOCAL.check(host)
        if origin is not None and urlsplit(origin).netloc != host:
            raise Forbidden(f"a web page of {origin[:80]!r} may not use this console")
        if self._keys is None:
            return
        scope = self._keys.scope_of(request.headers.get("authorization", ""))
        changes = request.scope["type"] == "http" and request.scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if changes and scope != "control" and not request.url.path.startswith(_PAGE):
            raise Forbidden("this key may read only: control calls need a key of scope control", scope=scope)


def _bounded(receive: Receive) -> Receive:
    """Limits a request's body. FastAPI's own limit would answer with plain text."""
    size = 0

    async def receive_and_count() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > _MAX_BODY_BYTES:
            raise HTTPException(BodyTooLarge.http_status, f"body of more than {_MAX_BODY_BYTES} bytes")
        return message

    return receive_and_count


async def _always_answered(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers for Engine.IO if a browser is gone before its request is read, as after an abandoned load: Engine.IO then
    fails or sends nothing, and each of NiceGUI's middlewares would raise "No response returned".
    """
    is_gone = has_begun = False

    async def receive_and_note() -> Message:
        nonlocal is_gone
        message = await receive()
        is_gone = is_gone or message["type"] == "http.disconnect"
        return message

    async def send_and_note(message: Message) -> None:
        nonlocal has_begun
        has_begun = True
        await send(message)

    try:
        await app(scope, receive_and_note, send_and_note)
    except Exception:
        if has_begun or not is_gone:
            raise
    if is_gone and not has_begun:
        await Response(status_code=_CLIENT_GONE)(scope, receive, send)


def _forbidding_frames(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            MutableHeaders(scope=message).update(_FORBID_FRAMES)
        await send(message)

    return send_with_headers


def refusal(error: BrayxError) -> Response:
    """The response for a typed error. If the key is missing or wrong, browsers ask for one."""
    headers = {"WWW-Authenticate": 'Basic realm="brayx console"'} if isinstance(error, Unauthorized) else {}
    return Response(error.to_wire(), error.http_status, headers | _FORBID_FRAMES, "application/json")
