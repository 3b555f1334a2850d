"""The HTTP door: Bray's ``POST /step``, one request per step. Plain ASGI; knows nothing of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from brayx.actor.service import Service, to_typed
from brayx.errors import BodyTooLarge, BrayxError, DeadlineExceeded, HeaderTooLarge, Overloaded, ProtocolError
from brayx.gamecore.protocol import MAX_HEADER_BYTES, STEP_PATH, add_header, parse_request, text_of
from brayx.logs import limited

logger = limited(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_STALL_S = 30.0
"""Deadline for the whole of a body that arrives in pieces."""


class _ClientGone(Exception):
    """The client closed the connection in the middle of its request."""


async def step(
    service: Service, max_body_bytes: int, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers one ``POST /step``; ``headers`` are from `headers_of`."""
    if scope["method"] != "POST":
        await refuse(service, send, 405, ProtocolError(f"{STEP_PATH} takes POST, not {scope['method']}"))
        return
    try:
        check_headers(scope)
        body = await _read(receive, headers.get("content-length", ""), max_body_bytes)
        request = parse_request(headers, body)
    except _ClientGone:
        return
    except BrayxError as refusal:
        await refuse(service, send, refusal.http_status, refusal)
        return
    try:
        reply = await service.step(request)
    except Exception as failure:
        error = to_typed(failure)
        await write(send, error.http_status, error.to_wire(), retry_after=isinstance(error, Overloaded))
        return
    await write(send, 200, reply, content_type=b"application/octet-stream")


def headers_of(scope: Scope) -> dict[str, str]:
    """A request's headers by lower-case name.

    Raises:
        ProtocolError: as for `add_header`.
    """
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        add_header(headers, name.decode("latin-1"), text_of(value).strip(" \t"))
    return headers


def check_headers(scope: Scope) -> None:
    """Refuses a request whose line and headers exceed `MAX_HEADER_BYTES`; the servers in front of this allow more.

    Raises:
        HeaderTooLarge: they do.
    """
    size = len(scope["path"]) + len(scope.get("query_string", b""))
    for name, value in scope["headers"]:
        size += len(name) + len(value)
    if size > MAX_HEADER_BYTES:
        raise headers_too_large(MAX_HEADER_BYTES)


def headers_too_large(limit: int) -> HeaderTooLarge:
    """The error for a request whose line and headers exceed ``limit`` bytes."""
    return HeaderTooLarge(f"request line and headers have more than {limit} bytes", limit=limit)


async def _read(receive: Receive, content_length: str, limit: int) -> bytes:
    if content_length.isdigit() and int(content_length) > limit:
        raise BodyTooLarge(f"body has {content_length} bytes, at most {limit} are allowed", limit=limit)
    message = await receive()
    if message["type"] != "http.request":
        raise _ClientGone
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit:
            raise BodyTooLarge(f"body has {len(body)} bytes, at most {limit} are allowed", limit=limit)
        return body
    parts, size = [body], len(body)
    try:
        async with asyncio.timeout(_STALL_S):
            while message.get("more_body", False):
                message = await receive()
                if message["type"] != "http.request":
                    raise _ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise BodyTooLarge(f"body has more than the {limit} bytes that are allowed", limit=limit)
    except TimeoutError:
        raise DeadlineExceeded(f"the body was incomplete after {_STALL_S:g} s", layer="door") from None
    return b"".join(parts)


async def refuse(service: Service, send: Send, status: int, error: BrayxError) -> None:
    """Answers with an error of the door itself, and counts it."""
    service.refused(error)
    await write(send, status, error.to_wire())


async def write(
    send: Send, status: int, body: bytes, *, content_type: bytes = b"application/json", retry_after: bool = False
) -> None:
    """Sends a whole response."""
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    if retry_after:
        headers.append((b"retry-after", b"1"))
    try:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
    except RuntimeError as error:
        logger.debug("a client disconnected before its reply: %s", error)  # uvloop raises this for a closed transport
