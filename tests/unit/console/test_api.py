"""What every call of the console's API refuses, and how."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from brayx import tracking
from brayx.console.api import create_app
from brayx.console.source import Source


async def test_a_body_that_is_too_large_or_nested_is_refused(tracking_db: str) -> None:
    transport = httpx.ASGITransport(create_app(Source(tracking_db)))

    async def in_chunks() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b" " * 2**20

    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for body, refused in (
            (b" " * 2**21, (413, "body_too_large")),
            (in_chunks(), (413, "body_too_large")),
            (b"[" * 100_000, (400, "bad_request")),
            (b"{", (400, "bad_request")),
        ):
            reply = await client.post("/api/games", content=body, headers={"content-type": "application/json"})
            assert (reply.status_code, reply.json()["error"]) == refused


async def test_an_unexpected_error_is_an_answer_of_the_api(tracking_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "registered_models", lambda uri: 1 / 0)
    transport = httpx.ASGITransport(create_app(Source(tracking_db)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.get("/api/models")
    assert (reply.status_code, reply.json()["error"]) == (500, "internal")
    assert reply.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert reply.json()["message"] == "the console failed: ZeroDivisionError: division by zero"
