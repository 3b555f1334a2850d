"""Requests that meet their session on its way from one replica to another: none is lost, none is applied twice."""

from __future__ import annotations

import asyncio

import pytest

from brayx.actor.ends import BETWEEN
from brayx.actor.moving import Snapshot
from brayx.errors import BrayxError, Overloaded
from brayx.gamecore.protocol import StepKind, StepRequest
from tests.unit.actor.test_session import Bench


def tick(seq: int, body: bytes) -> StepRequest:
    return StepRequest(StepKind.TICK, "s", body, seq=seq)


async def resumed(bench: Bench, snapshot: Snapshot, request: StepRequest) -> bytes | BrayxError:
    answer: asyncio.Future[bytes | BrayxError] = asyncio.get_running_loop().create_future()
    bench.table.resume("s", snapshot, request, answer.set_result)
    return await answer


async def test_a_tick_that_comes_while_its_session_is_moved_is_told_to_come_again() -> None:
    bench = Bench()
    kept: list[Snapshot] = []
    parking, parked = asyncio.Event(), asyncio.Event()

    async def park(session: str, snapshot: Snapshot) -> None:
        kept.append(snapshot)
        parking.set()
        await parked.wait()

    await bench.ask("start")
    assert await bench.number(0, b"0") == b"s:0"
    bench.table.move(park)
    await parking.wait()
    early = asyncio.ensure_future(bench.number(1, b"1"))
    await asyncio.sleep(0)
    parked.set()
    for late in (early, bench.number(1, b"1"), bench.number(1, b"1")):
        with pytest.raises(Overloaded, match="try again") as told:
            await late
        assert told.value.details == {"layer": BETWEEN}
    assert bench.actors[0].seen == [b"", b"0"], "what was refused has been applied"
    elsewhere = Bench()
    assert await resumed(elsewhere, kept[0], tick(1, b"1")) == b"s:1"
    assert elsewhere.actors[0].seen == [b"", b"0", b"1"]


async def test_a_repeat_of_the_last_tick_before_a_snapshot_gets_its_reply_after_the_owner_died() -> None:
    bench = Bench()
    assert await resumed(bench, Snapshot(2, 2, b"s:1", b"|0|1"), tick(1, b"1")) == b"s:1"
    assert bench.actors[0].seen == [b"", b"0", b"1"], "it was applied twice"
    assert await bench.number(2, b"2") == b"s:2"
