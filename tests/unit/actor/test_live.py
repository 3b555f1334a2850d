"""The running sessions as a console sees them."""

from __future__ import annotations

import asyncio

import pytest

from brayx.actor.live import LiveTable, silent
from brayx.errors import ConfigError, SessionUnknown
from tests.unit.actor.bench import Bench, Shared


async def test_a_session_that_is_about_to_start_is_not_shown_but_can_be_ended() -> None:
    claiming, claimed = asyncio.Event(), asyncio.Event()

    async def claim(session: str) -> None:
        claiming.set()
        await claimed.wait()

    bench = Bench(ownership=Shared(claim=claim))
    live = LiveTable(bench.table)
    starting = asyncio.ensure_future(bench.ask("start"))
    async with asyncio.timeout(60):
        await claiming.wait()
    assert live.sessions() == []
    with pytest.raises(SessionUnknown):
        live.newer("s", 0)
    live.end("s")
    claimed.set()
    assert await starting == b"started"
    with pytest.raises(SessionUnknown):
        await bench.ask("tick")
    assert bench.recorder.summary()["sessions_ended.ended"] == 1


async def test_a_session_without_agents_cannot_be_followed() -> None:
    bench = Bench()
    await bench.ask("start")
    live = LiveTable(bench.table)
    assert [row["session"] for row in live.sessions()] == ["s"]
    assert (silent(live.sessions()), silent([{"idle_s": 11.0}, {"idle_s": 1.0}])) == (0, 1)
    with pytest.raises(ConfigError):
        live.newer("s", 0)
    await bench.table.close()
