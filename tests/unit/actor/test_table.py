"""Connections that hold sessions: they break, others take over, and a session ends with its own."""

import asyncio

import pytest

from brayx.actor.ends import over
from brayx.actor.ownership import SessionSnapshot
from brayx.actor.service import Holder, into
from brayx.errors import (
    BadBody,
    BrayxError,
    OutOfSequence,
    QueueFull,
    SessionLost,
    SessionResumed,
    SessionUnknown,
)
from brayx.gamecore.protocol import PROBE, StepKind, StepRequest
from brayx.jobs.progress import error_lines
from brayx.metrics import Recorder
from tests.unit.actor.bench import Bench, Shared
from tests.waiting import until_awaited as until

pytestmark = pytest.mark.usefixtures("whence")


async def test_the_connection_that_holds_a_session_is_notified_of_the_end_once() -> None:
    bench = Bench()
    heard: list[str] = []
    holder = bench.table.holder(heard.append)
    await bench.step(StepRequest(StepKind.START, "s", b"", holder=holder.name))
    entry = bench.table.get("s")
    assert entry is not None
    await bench.ask("stop")
    entry.end("idle")
    await until(lambda: heard == ["stop"])
    assert bench.actors[0].reasons == ["stop"]


async def test_a_refused_request_is_counted_with_what_its_client_did_wrong() -> None:
    bench = Bench(recorder=(recorder := Recorder()))
    table = bench.table
    await bench.ask("start")
    with pytest.raises(BadBody):
        await bench.ask("tick", body=b"bad")
    assert recorder.notes() == {"requests_refused.bad_body": "not that (session s)"}
    table.refused(BadBody("obs.ball[2] is nan, expected a finite number"))
    table.refused(QueueFull("no fault of the client"))
    table.refused(over(f"{PROBE}1", "tick", ""))
    table.refused(over("s", "tick", ""))
    numbers = recorder.summary()
    assert (numbers["requests_refused.bad_body"], numbers["requests_refused.queue_full"]) == (2, 1)
    assert numbers["requests_refused.session_unknown"] == 1, "but not of a client that only asks whether we are there"
    notes = recorder.notes()
    assert notes["requests_refused.bad_body"] == "obs.ball[2] is nan, expected a finite number"
    assert error_lines(numbers, recorder.notes()) == [
        "2 requests refused (bad_body); the newest: obs.ball[2] is nan, expected a finite number"
    ]


class TestBrokenConnections:
    async def test_a_session_whose_ticks_are_numbered_waits_for_another_connection(self) -> None:
        bench = Bench(reconnect_timeout_s=0.1)
        await bench.ask("start")
        await bench.number(0, b"0")
        for seq in (1, 2):
            await bench.table.disconnect("s")
            await asyncio.sleep(0.05)
            await bench.number(seq, b"on")
        assert bench.actors[0].reasons == []
        await bench.table.disconnect("s")
        await until(lambda: bench.actors[0].reasons == ["disconnect"])

    @pytest.mark.parametrize("moved", [False, True])
    async def test_a_start_may_say_that_ticks_will_be_numbered(self, moved: bool) -> None:
        bench = Bench()
        await bench.step(StepRequest(StepKind.START, "s", b"|", seq=0))
        if moved:
            parked: list[SessionSnapshot] = []

            async def park(session: str, snapshot: SessionSnapshot) -> None:
                parked.append(snapshot)

            bench.table.move(park)
            await until(lambda: parked)
            bench = Bench()
            waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            bench.table.resume("s", parked[0], StepRequest(StepKind.TICK, "s", b"bad", seq=0), into(waiter))
            with pytest.raises(BadBody):
                await waiter
        await bench.table.disconnect("s")
        await asyncio.sleep(0.02)
        assert await bench.number(0, b"0") == b"s:0"
        assert bench.actors[0].reasons == []

    async def test_every_numbered_tick_gets_the_reason_why_its_session_ended(self) -> None:
        bench = Bench()
        for session in ("s", "plain"):
            await bench.ask("start", session)
            await bench.table.disconnect(session, for_good=True)
        for _ in range(2):
            with pytest.raises(SessionLost, match="disconnect"):
                await bench.number(3, b"")
        with pytest.raises(SessionLost, match="disconnect"):
            await bench.ask("tick", "plain")
        with pytest.raises(SessionUnknown):
            await bench.ask("tick", "plain")
        await bench.ask("start")
        assert await bench.number(0, b"0") == b"s:0"

    async def test_unnumbered_sessions_and_sessions_left_for_good_end_at_once(self) -> None:
        bench = Bench()
        for session in ("plain", "s"):
            await bench.ask("start", session)
        await bench.number(0, b"0")
        await bench.table.disconnect("plain")
        await bench.table.disconnect("s", for_good=True)
        await until(lambda: [actor.reasons for actor in bench.actors] == [["disconnect"], ["disconnect"]])


class TestTakeovers:
    """The connection that attached last holds a session; no other connection can touch it afterwards."""

    def setup_method(self) -> None:
        self.bench = Bench()
        self.heard: list[list[str]] = []

    def connect(self) -> Holder:
        self.heard.append([])
        return self.bench.table.holder(self.heard[-1].append)

    async def ask(self, kind: StepKind, holder: Holder, seq: int | None = None) -> bytes:
        body = b"" if seq is None else b"%d" % seq
        reply = await self.bench.step(StepRequest(kind, "s", body, "", "", "", seq, holder.name, holder.attached))
        holder.attached = True
        return reply

    async def taken(self) -> tuple[Holder, Holder]:
        """Gives the old and the new holder of a session that was taken over."""
        old, new = self.connect(), self.connect()
        await self.ask(StepKind.START, old)
        await self.ask(StepKind.TICK, old, 0)
        assert await self.ask(StepKind.TICK, new, 0) == b"s:0", "it repeats the tick whose reply was lost"
        return old, new

    async def test_the_old_connection_is_notified_and_cannot_touch_the_session(self) -> None:
        old, new = await self.taken()
        assert self.heard == [["taken"], []]
        for kind, seq in ((StepKind.TICK, None), (StepKind.TICK, 1), (StepKind.STOP, None)):
            with pytest.raises(SessionLost) as lost:
                await self.ask(kind, old, seq)
            assert lost.value.details["reason"] == "taken"
        for for_good in (False, True):
            await self.bench.table.disconnect("s", old.name, for_good=for_good)
        assert await self.ask(StepKind.TICK, new, 1) == b"s:1"
        assert self.bench.actors[0].seen == [b"", b"0", b"1"]
        assert self.bench.actors[0].reasons == []

    async def test_the_new_connection_ends_the_session(self) -> None:
        _, new = await self.taken()
        await self.bench.table.disconnect("s", new.name, for_good=True)
        await until(lambda: self.bench.actors[0].reasons == ["disconnect"])
        assert self.heard == [["taken"], []]

    async def test_an_old_connection_does_not_touch_a_new_session_of_its_id_either(self) -> None:
        old, new = await self.taken()
        await self.ask(StepKind.STOP, new)
        await self.bench.ask("start")
        for connection in (old, new):
            with pytest.raises(SessionLost, match="taken over"):
                await self.ask(StepKind.TICK, connection)
        assert self.bench.actors[1].seen == [b""]

    async def test_a_numbered_tick_without_a_connection_leaves_the_session_without_a_holder(self) -> None:
        old = self.connect()
        await self.ask(StepKind.START, old)
        assert await self.bench.ask("tick", body=b"beside") == b"s:beside"
        assert self.heard == [[]], "a tick without a number takes nothing over"
        assert await self.bench.number(0, b"0") == b"s:0"
        assert self.heard == [["taken"]]
        await self.bench.table.disconnect("s", old.name, for_good=True)
        assert await self.bench.number(1, b"1") == b"s:1"

    async def test_a_tick_without_a_number_takes_no_session_over(self) -> None:
        holder, other = self.connect(), self.connect()
        await self.ask(StepKind.START, holder)
        with pytest.raises(SessionUnknown, match="without a number"):
            await self.ask(StepKind.TICK, other)
        assert self.bench.actors[0].seen == [b""]
        await self.ask(StepKind.TICK, holder)
        assert self.heard == [[], []]

    @pytest.mark.parametrize("seq", [1, 55])
    async def test_a_tick_out_of_sequence_takes_no_session_over(self, seq: int) -> None:
        holder, other = self.connect(), self.connect()
        await self.ask(StepKind.START, holder)
        for name in ("", other.name):
            request = StepRequest(StepKind.TICK, "s", b"", seq=seq, holder=name)
            with pytest.raises(OutOfSequence):
                await self.bench.step(request)
        await self.bench.table.disconnect("s", other.name, for_good=True)
        assert await self.ask(StepKind.TICK, holder, 0) == b"s:0"
        assert self.heard == [[], []]
        assert await self.ask(StepKind.TICK, other, 1) == b"s:1", "the corrected tick takes it over"
        assert self.heard == [["taken"], []]

    async def test_the_tick_after_the_running_and_waiting_ones_takes_the_session_over(self) -> None:
        holder, other = self.connect(), self.connect()
        await self.ask(StepKind.START, holder)
        session = self.bench.table.get("s")
        assert session is not None
        first = asyncio.ensure_future(self.bench.number(0, b"wait", holder))
        await until(lambda: session.began)
        second = asyncio.ensure_future(self.bench.number(1, b"1", holder))
        await until(lambda: session.inbox)
        too_far = asyncio.ensure_future(self.bench.number(3, b"3", other))
        await until(lambda: len(session.inbox) == 2)
        self.bench.actors[0].gate.set()
        with pytest.raises(OutOfSequence):
            await too_far
        assert self.heard == [[], []]
        assert (await first, await second) == (b"s:wait", b"s:1")
        self.bench.actors[0].gate.clear()
        first = asyncio.ensure_future(self.bench.number(2, b"wait", holder))
        await until(lambda: session.began)
        second = asyncio.ensure_future(self.bench.number(3, b"3", other))
        await until(lambda: self.heard == [["taken"], []])
        self.bench.actors[0].gate.set()
        assert (await first, await second) == (b"s:wait", b"s:3")

    async def test_a_tick_that_finds_the_queue_full_takes_no_session_over(self) -> None:
        self.bench = Bench(max_waiting=1)
        holder, other = self.connect(), self.connect()
        await self.ask(StepKind.START, holder)
        session = self.bench.table.get("s")
        assert session is not None
        busy = [asyncio.ensure_future(self.bench.number(0, b"wait", holder))]
        await until(lambda: session.began)
        busy.append(asyncio.ensure_future(self.bench.number(1, b"wait", holder)))
        await until(lambda: session.inbox)
        with pytest.raises(QueueFull):
            await self.bench.number(2, b"2", other)
        self.bench.actors[0].gate.set()
        assert await asyncio.gather(*busy) == [b"s:wait", b"s:wait"]
        assert self.heard == [[], []]

    async def resumed(
        self, snapshot: SessionSnapshot, holder: Holder | None, seq: int | None = None
    ) -> bytes | BrayxError:
        """The answer to a tick for a session that is still a snapshot; ``holder`` is None as over HTTP."""
        name, attached = (holder.name, holder.attached) if holder is not None else ("", False)
        answer: asyncio.Future[bytes | BrayxError] = asyncio.get_running_loop().create_future()
        request = StepRequest(StepKind.TICK, "s", b"", seq=seq, holder=name, attached=attached)
        self.bench.table.resume("s", snapshot, request, answer.set_result)
        return await answer

    async def moved(self) -> tuple[SessionSnapshot, Holder, Holder]:
        """Gives the snapshot of a moved session, its old holder and its present one."""
        old, new = await self.taken()
        parked: list[SessionSnapshot] = []

        async def park(session: str, snapshot: SessionSnapshot) -> None:
            parked.append(snapshot)

        self.bench.table.move(park)
        await until(lambda: parked and not len(self.bench.table))
        old.attached = new.attached = True
        return parked[0], old, new

    async def test_a_moved_session_keeps_its_holder(self) -> None:
        snapshot, old, new = await self.moved()
        stranger = self.connect()
        for connection, refusal in ((old, SessionLost), (stranger, SessionUnknown)):
            assert isinstance(await self.resumed(snapshot, connection), refusal)
        assert await self.resumed(snapshot, None) == b"s:", "a tick without a number, over HTTP"
        assert await self.ask(StepKind.TICK, new, 1) == b"s:1"
        assert self.bench.actors[1].seen == [b"", b"0", b"", b"1"]
        assert len(self.bench.actors) == 2, "a refused tick restores the session, too"
        assert self.heard == [["taken"], ["moved"], []]

    async def test_a_moved_session_is_taken_over_like_any_other(self) -> None:
        snapshot, _, new = await self.moved()
        assert await self.resumed(snapshot, self.connect(), 1) == b"s:"
        assert self.heard == [["taken"], ["moved", "taken"], []]
        with pytest.raises(SessionLost, match="taken over"):
            await self.ask(StepKind.TICK, new)

    async def test_a_tick_that_comes_while_a_moved_session_is_restored_takes_it_over(self) -> None:
        snapshot, _, new = await self.moved()
        beside = asyncio.ensure_future(self.resumed(snapshot, None))
        other = self.connect()
        await asyncio.sleep(0)
        assert await self.ask(StepKind.TICK, other, 1) == b"s:1"
        assert await beside == b"s:"
        with pytest.raises(SessionLost, match="taken over"):
            await self.ask(StepKind.TICK, new)

    async def test_the_loss_of_a_moved_session_is_reported_to_the_request_after_a_refused_one(self) -> None:
        freed: list[str] = []

        async def release(session: str, reason: str) -> None:
            freed.append(reason)

        self.bench = Bench(ownership=Shared(release=release))
        stranger = self.connect()
        snapshot = SessionSnapshot(1, 1, None, b"rubbish", exact=True, holder="another")
        assert isinstance(await self.resumed(snapshot, stranger), SessionUnknown)
        await until(lambda: freed == ["owner_died"])
        assert len(self.bench.table) == 0

    async def test_a_session_whose_owner_died_goes_to_the_first_connection_that_asks(self) -> None:
        """Its snapshot may be older than the last takeover."""
        holder, other = self.connect(), self.connect()
        holder.attached = other.attached = True  # to its former replica
        assert isinstance(await self.resumed(SessionSnapshot(1, 1, b"s:0", b"|0"), None), SessionResumed)
        assert await self.bench.ask("tick", body=b"beside") == b"s:beside"
        assert await self.ask(StepKind.TICK, holder, 1) == b"s:1"
        with pytest.raises(SessionLost, match="taken over"):
            await self.ask(StepKind.TICK, other)
