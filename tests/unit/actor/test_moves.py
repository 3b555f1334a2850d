"""Requests that meet their session on its way from one replica to another: none is lost, none is applied twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from brayx.actor.ends import BETWEEN
from brayx.actor.ownership import SessionSnapshot
from brayx.errors import BrayxError, OutOfSequence, Overloaded, SessionLost, SessionResumed
from brayx.gamecore.protocol import StepKind, StepRequest
from tests.unit.actor.bench import Bench, Shared
from tests.waiting import until_awaited as until


def tick(seq: int, body: bytes) -> StepRequest:
    return StepRequest(StepKind.TICK, "s", body, seq=seq)


async def resumed(bench: Bench, snapshot: SessionSnapshot, request: StepRequest) -> bytes | BrayxError:
    answer: asyncio.Future[bytes | BrayxError] = asyncio.get_running_loop().create_future()
    bench.table.resume("s", snapshot, request, answer.set_result)
    return await answer


async def test_a_tick_that_comes_while_its_session_moves_must_be_retried() -> None:
    bench = Bench()
    snapshots: list[SessionSnapshot] = []
    parking, parked = asyncio.Event(), asyncio.Event()

    async def park(session: str, snapshot: SessionSnapshot) -> None:
        snapshots.append(snapshot)
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
        with pytest.raises(Overloaded, match="try again") as raised:
            await late
        assert raised.value.details == {"layer": BETWEEN}
    assert bench.actors[0].seen == [b"", b"0"], "a refused tick was applied"
    elsewhere = Bench()
    assert await resumed(elsewhere, snapshots[0], tick(1, b"1")) == b"s:1"
    assert elsewhere.actors[0].seen == [b"", b"0", b"1"]


async def test_a_repeat_of_the_last_tick_before_a_snapshot_gets_its_reply_after_the_owner_died() -> None:
    bench = Bench()
    assert await resumed(bench, SessionSnapshot(2, 2, b"s:1", b"|0|1"), tick(1, b"1")) == b"s:1"
    assert bench.actors[0].seen == [b"", b"0", b"1"], "it was applied twice"
    assert await bench.number(2, b"2") == b"s:2"


@pytest.mark.usefixtures("whence")
class TestSnapshots:
    def bench(
        self, release: Callable[[str, str], Awaitable[None]] | None = None, **options: object
    ) -> tuple[Bench, list[tuple[str, SessionSnapshot]]]:
        others = Shared(release=release)
        return Bench(ownership=others, **options), others.kept

    async def resumed(self, bench: Bench, snapshot: SessionSnapshot, request: StepRequest) -> bytes:
        answer: asyncio.Future[bytes | BrayxError] = asyncio.get_running_loop().create_future()
        bench.table.resume("s", snapshot, request, answer.set_result)
        result = await answer
        if isinstance(result, BrayxError):
            raise result
        return result

    async def test_one_is_taken_every_so_many_ticks(self) -> None:
        bench, snapshots = self.bench(snapshot_every=2)
        await bench.ask("start")
        for number in range(5):
            await bench.number(number, b"%d" % number)
        await until(lambda: len(snapshots) == 2)
        assert snapshots == [
            ("s", SessionSnapshot(2, 2, b"s:1", b"|0|1")),
            ("s", SessionSnapshot(4, 4, b"s:3", b"|0|1|2|3")),
        ]

    async def test_a_session_resumed_from_one_reports_its_tick_once(self) -> None:
        bench, _ = self.bench()
        tick = StepRequest(StepKind.TICK, "s", b"9", seq=9)
        with pytest.raises(SessionResumed) as raised:
            await self.resumed(bench, SessionSnapshot(4, 4, b"s:3", b"|0|1|2|3"), tick)
        assert raised.value.details == {"tick": 10, "restored": 4}
        assert await bench.number(10, b"4") == b"s:4"
        assert bench.actors[0].seen == [b"", b"0", b"1", b"2", b"3", b"4"]

    @pytest.mark.parametrize("seq", [3, 4, 6, 7, 8, 9, 11])
    async def test_after_a_resumption_no_number_that_was_used_before_it_is_applied(self, seq: int) -> None:
        """A tick may be on its way to the former owner, and come when the client has gone on."""
        bench, _ = self.bench()
        with pytest.raises(SessionResumed):
            await self.resumed(
                bench, SessionSnapshot(4, 4, b"s:3", b"|0|1|2|3"), StepRequest(StepKind.TICK, "s", b"9", seq=9)
            )
        with pytest.raises(OutOfSequence) as raised:
            await bench.number(seq, b"late")
        assert raised.value.details == {"expected": 10, "got": seq}
        assert bench.actors[0].seen == [b"", b"0", b"1", b"2", b"3"]

    async def test_a_late_request_that_resumes_a_session_takes_no_reply_from_its_client(self) -> None:
        bench, _ = self.bench()
        with pytest.raises(SessionResumed) as raised:
            await self.resumed(
                bench, SessionSnapshot(4, 4, b"s:3", b"|0|1|2|3"), StepRequest(StepKind.TICK, "s", b"1", seq=1)
            )
        assert raised.value.details == {"tick": 4, "restored": 4}
        assert await bench.number(3, b"3") == b"s:3"
        assert await bench.number(4, b"4") == b"s:4"

    async def test_a_moved_session_continues_without_an_error(self) -> None:
        bench, _ = self.bench()
        tick = StepRequest(StepKind.TICK, "s", b"1", seq=1)
        assert await self.resumed(bench, SessionSnapshot(1, 1, b"s:0", b"|0", exact=True), tick) == b"s:1"
        numbers = bench.recorder.summary()
        assert (numbers["sessions_resumed"], numbers.get("sessions_started", 0)) == (1, 0)

    async def test_sessions_are_moved_between_two_requests_and_their_actors_get_no_end(self) -> None:
        bench, _ = self.bench()
        parked: dict[str, SessionSnapshot] = {}

        async def park(session: str, snapshot: SessionSnapshot) -> None:
            parked[session] = snapshot

        heard: list[str] = []
        holder = bench.table.holder(heard.append)
        await bench.step(StepRequest(StepKind.START, "s", b"", holder=holder.name))
        await bench.number(0, b"0", holder)
        busy = asyncio.ensure_future(bench.number(1, b"wait", holder))
        await asyncio.sleep(0.01)
        bench.table.move(park)
        assert not parked, "a session is not moved in the middle of a tick"
        bench.actors[0].gate.set()
        await busy
        bench.table.move(park)
        await until(lambda: heard == ["moved"])
        assert parked == {"s": SessionSnapshot(2, 2, b"s:wait", b"|0|wait", exact=True, holder=holder.name)}
        assert bench.actors[0].reasons == []
        assert len(bench.table) == 0

    async def test_one_that_cannot_be_restored_is_lost(self) -> None:
        bench, _ = self.bench()
        with pytest.raises(SessionLost, match="cannot read"):
            await self.resumed(bench, SessionSnapshot(1, 1, None, b"rubbish"), StepRequest(StepKind.TICK, "s", b""))
        assert len(bench.table) == 0
        numbers = bench.recorder.summary()
        assert numbers["sessions_ended.lost"] == 1
        assert "sessions_started" not in numbers

    @pytest.mark.parametrize(("seq", "left"), [(None, "stop"), (1, "owner_died")])
    async def test_the_loss_of_one_that_cannot_be_restored_is_reported_again_only_to_a_repeat(
        self, seq: int | None, left: str
    ) -> None:
        freed: list[str] = []

        async def release(session: str, reason: str) -> None:
            freed.append(reason)

        bench, _ = self.bench(release=release)
        with pytest.raises(SessionLost):
            await self.resumed(
                bench, SessionSnapshot(1, 1, None, b"rubbish"), StepRequest(StepKind.TICK, "s", b"", seq=seq)
            )
        assert freed == [left]
