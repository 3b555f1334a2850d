"""The page's client of the API stops the work for a viewer who has gone."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from nicegui import Client, ui

from brayx.console.page.caller import ApiCaller


@pytest.mark.parametrize("status", [200, 500])
async def test_a_call_whose_viewer_has_gone_is_cancelled(status: int) -> None:
    app, viewer = FastAPI(), Client(ui.page(""), request=None)

    @app.get("/leave", status_code=status)
    async def leave() -> str:
        viewer.delete()
        return "left"

    @app.get("/stay")
    async def stay() -> str:
        return "stayed"

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        caller = ApiCaller(client, viewer)
        assert await caller.get(str, "/stay") == "stayed"
        with pytest.raises(asyncio.CancelledError):
            await caller.get(str, "/leave")
