"""`brayx.console.guard`: who may use the console, and what every answer has."""

from __future__ import annotations

import engineio
import httpx
import pytest
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from brayx.console.guard import AccessGuard, ConsoleKeys, basic
from brayx.errors import ConfigError
from brayx.gamecore.auth import Keys

SECRETS = {"read/viewer": b"r" * 64, "control/owner": b"c" * 64}
READ, CONTROL = (basic(key, secret) for key, secret in SECRETS.items())


async def console(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)


async def answer(
    keys: ConsoleKeys | None, method: str = "GET", path: str = "/api/job", **headers: str
) -> tuple[int, str | None]:
    """Status of an answer, and the code of its error."""
    transport = httpx.ASGITransport(AccessGuard(console, keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8265") as client:
        reply = await client.request(method, path, headers=headers)
    assert reply.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert ("WWW-Authenticate" in reply.headers) == (reply.status_code == 401), "browsers ask for a key"
    return reply.status_code, None if reply.is_success else reply.json()["error"]


async def test_without_keys_only_loopback_names_and_their_own_pages_are_answered() -> None:
    assert await answer(None, "POST") == (200, None)
    assert await answer(None, host="127.0.0.1:8265") == (200, None)
    assert await answer(None, host="rebound.example:8265") == (403, "forbidden")
    assert await answer(None, origin="http://localhost:8265") == (200, None)
    assert await answer(None, origin="http://elsewhere.example") == (403, "forbidden")


async def test_with_keys_a_request_may_do_what_its_keys_scope_says() -> None:
    keys = ConsoleKeys(Keys(SECRETS))
    for method in ("GET", "HEAD", "OPTIONS", "POST", "DELETE"):
        reads = method in ("GET", "HEAD", "OPTIONS")
        assert await answer(keys, method, authorization=CONTROL, host="console.example") == (200, None)
        expected = (200, None) if reads else (403, "forbidden")
        assert await answer(keys, method, authorization=READ, host="console.example") == expected
    assert await answer(keys, "POST", "/_nicegui/client", authorization=READ) == (200, None), "the page's own traffic"
    assert await answer(keys, authorization=CONTROL, origin="http://elsewhere.example") == (403, "forbidden")


@pytest.mark.parametrize(
    "authorization",
    ["", "Basic", "Basic !", "Basic /w==", "Bearer " + CONTROL[6:], basic("control/owner", b"w" * 64),
     basic("control/owner", b""), basic("control/nobody", b"c" * 64)],
)  # fmt: skip
async def test_a_key_that_is_missing_or_wrong_is_asked_for(authorization: str) -> None:
    assert await answer(ConsoleKeys(Keys(SECRETS)), authorization=authorization) == (401, "unauthorized")


def test_a_key_of_the_console_has_a_scope() -> None:
    with pytest.raises(ConfigError, match="'game'"):
        ConsoleKeys(Keys(SECRETS | {"game": b"g" * 64}))


async def test_a_load_that_the_browser_abandons_is_answered_quietly() -> None:
    server = engineio.ASGIApp(engineio.AsyncServer(async_mode="asgi"), engineio_path="/_nicegui_ws/socket.io/")

    async def passed_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)  # as NiceGUI's middlewares do

    app = BaseHTTPMiddleware(AccessGuard(server, None), passed_on)
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/_nicegui_ws/socket.io/", "query_string": b"EIO=4",
             "headers": [(b"host", b"localhost")], "http_version": "1.1", "server": ("localhost", 1)}  # fmt: skip
    await app(scope, receive, send)
    assert sent[0]["type"] == "http.response.start"
