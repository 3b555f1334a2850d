"""The session table: order, isolation, ends. No server, no Ray."""

import asyncio
import contextvars
import math
import time
from collections.abc import Awaitable, Callable

import pytest

from brayx.actor.actor import Actor
from brayx.actor.config import SessionConfig
from brayx.actor.holders import Holder
from brayx.actor.lease import Lease
from brayx.actor.moving import Snapshot
from brayx.actor.ownership import Ownership
from brayx.actor.service import Reply, into
from brayx.actor.table import MAX_WAITING, SessionTable
from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
    DeadlineExceeded,
    ModelError,
    OutOfSequence,
    Overloaded,
    ProtocolError,
    QueueFull,
    ServiceFull,
    SessionExists,
    SessionLost,
    SessionResumed,
    SessionUnknown,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.metrics import Recorder
from tests.waiting import until_awaited as until


class Script(Actor):
    """Does what the body says, and keeps what it saw."""

    hold_end = False

    def __init__(self) -> None:
        self.session = ""
        self.seen: list[bytes] = []
        self.reasons: list[str] = []
        self.missed_after: list[bytes] = []
        self.gate = asyncio.Event()

    async def start(self, session: str, body: bytes) -> bytes:
        self.session = session
        await self._do(body)
        return b"started"

    async def tick(self, body: bytes) -> bytes:
        await self._do(body)
        return self.session.encode() + b":" + body

    async def stop(self, body: bytes) -> bytes:
        await self._do(body)
        return b"stopped"

    def fallback(self, tick: int, body: bytes) -> bytes:
        if body == b"unreadable":
            raise BadBody("not that")
        return b"own" if body == b"wait" else b"own %d:%s" % (tick, body)

    async def missed(self) -> None:
        self.missed_after.append(self.seen[-1])

    async def skipped(self, ticks: int) -> None:
        self.seen.append(b"skipped %d" % ticks)

    async def snapshot(self) -> bytes:
        return b"|".join(self.seen)

    async def restore(self, session: str, snapshot: bytes) -> None:
        if not snapshot.startswith(b"|"):
            raise ValueError("cannot read that")
        self.session, self.seen = session, snapshot.split(b"|")

    call = tick

    async def on_end(self, reason: str) -> None:
        if self.hold_end:
            await self.gate.wait()
        self.reasons.append(reason)

    async def _do(self, body: bytes) -> None:
        if body == b"raise":
            raise ValueError("agent's own")
        if body == b"bad":
            raise BadBody("not that")
        if body in (b"wait", b"wait and raise"):
            await self.gate.wait()
        if body == b"wait and raise":
            raise ValueError("agent's own")
        self.seen.append(body)


class Shared(Ownership):
    """Sessions that other processes share: keeps what they are given, and claims and frees ids as a test says.

    Attributes:
        kept: snapshots, each with its session.
        handed_on: requests for sessions that another process has taken over.
    """

    shared = True

    def __init__(
        self,
        *,
        claim: Callable[[str], Awaitable[None]] | None = None,
        release: Callable[[str, str], Awaitable[None]] | None = None,
        lease: Lease | None = None,
    ) -> None:
        super().__init__(lease)
        self._claim = claim
        self._release = release
        self.kept: list[tuple[str, Snapshot]] = []
        self.handed_on: list[StepRequest] = []

    async def claim(self, session: str) -> None:
        if self._claim is not None:
            await self._claim(session)

    async def release(self, session: str, reason: str) -> None:
        if self._release is not None:
            await self._release(session, reason)

    def keep(self, session: str, snapshot: Snapshot) -> None:
        self.kept.append((session, snapshot))

    def hand_on(self, request: StepRequest, reply: Reply) -> None:
        self.handed_on.append(request)
        reply(b"from elsewhere")


class Bench:
    """A table, the actors it made, and short words for requests."""

    from_callback = False
    """Requests come as from a native port, out of a callback of the loop; else as from Serve, out of a task."""

    def __init__(
        self,
        *,
        recorder: Recorder | None = None,
        ownership: Ownership | None = None,
        max_waiting: int = MAX_WAITING,
        **options: object,
    ) -> None:
        self.actors: list[Script] = []
        self.recorder = recorder if recorder is not None else Recorder()
        config = SessionConfig(**{"show_errors": True, **options})  # type: ignore[arg-type]
        self.table = SessionTable(self._make, config, self.recorder, ownership, max_waiting)

    def step(self, request: StepRequest) -> Awaitable[bytes]:
        if not self.from_callback:
            return self.table.step(request)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()

        def reply(result: bytes | BrayxError) -> None:
            if isinstance(result, BrayxError):
                self.table.refused(result)
            into(answer)(result)

        loop.call_soon(self.table.submit, request, reply)
        return answer

    def _make(self) -> Script:
        self.actors.append(Script())
        return self.actors[-1]

    def number(self, seq: int, body: bytes, holder: Holder | None = None) -> Awaitable[bytes]:
        name, attached = (holder.name, holder.attached) if holder is not None else ("", False)
        return self.step(StepRequest(StepKind.TICK, "s", body, seq=seq, holder=name, attached=attached))

    def ask(self, kind: str, session: str = "s", body: bytes = b"") -> Awaitable[bytes]:
        return self.step(StepRequest(StepKind(kind), session, body))


@pytest.fixture(autouse=True, params=["task", "callback"])
def _whence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "from_callback", request.param == "callback")


async def test_start_tick_stop() -> None:
    bench = Bench()
    assert await bench.ask("start") == b"started"
    assert await bench.ask("tick", body=b"1") == b"s:1"
    assert await bench.ask("stop", body=b"end") == b"stopped"
    await until(lambda: bench.actors[0].reasons == ["stop"])
    with pytest.raises(SessionUnknown, match="start first"):
        await bench.ask("tick")
    assert await bench.ask("start") == b"started"
    assert len(bench.actors) == 2


async def test_start_twice_and_stop_twice() -> None:
    bench = Bench()
    await bench.ask("start")
    with pytest.raises(SessionExists):
        await bench.ask("start")
    assert await bench.ask("tick", body=b"still here") == b"s:still here"
    await bench.ask("stop")
    with pytest.raises(SessionUnknown):
        await bench.ask("stop")


async def test_ticks_of_one_session_run_in_order_of_arrival() -> None:
    bench = Bench()
    await bench.ask("start")
    first = asyncio.ensure_future(bench.ask("tick", body=b"wait"))
    await asyncio.sleep(0)
    rest = [asyncio.ensure_future(bench.ask("tick", body=b"%d" % i)) for i in range(5)]
    await asyncio.sleep(0)
    assert bench.actors[0].seen == [b""]
    bench.actors[0].gate.set()
    await asyncio.gather(first, *rest)
    assert bench.actors[0].seen == [b"", b"wait", b"0", b"1", b"2", b"3", b"4"]


async def test_one_slow_session_does_not_hold_up_another() -> None:
    bench = Bench()
    await bench.ask("start", "slow")
    await bench.ask("start", "fast")
    slow = asyncio.ensure_future(bench.ask("tick", "slow", b"wait"))
    await asyncio.sleep(0)
    assert await bench.ask("tick", "fast", b"1") == b"fast:1"
    assert not slow.done()
    bench.actors[0].gate.set()
    await slow


async def test_requests_waiting_in_one_session_are_bounded() -> None:
    bench = Bench(max_waiting=2)
    await bench.ask("start")
    held = []
    for _ in range(3):  # one runs, two wait
        held.append(asyncio.ensure_future(bench.ask("tick", body=b"wait")))
        await asyncio.sleep(0.01)
    with pytest.raises(QueueFull, match="at most 2"):
        await bench.ask("tick")
    bench.actors[0].gate.set()
    await asyncio.gather(*held)


async def test_an_agent_that_raises_ends_its_session_only_and_says_why_once() -> None:
    bench = Bench()
    await bench.ask("start", "bad")
    await bench.ask("start", "good")
    with pytest.raises(AgentError, match="ValueError: agent's own"):
        await bench.ask("tick", "bad", b"raise")
    await until(lambda: bench.actors[0].reasons == ["error"])
    with pytest.raises(SessionLost, match="error"):
        await bench.ask("tick", "bad")
    with pytest.raises(SessionUnknown):
        await bench.ask("tick", "bad")
    assert await bench.ask("tick", "good", b"1") == b"good:1"


class _Unmade(Script):
    def __init__(self) -> None:
        raise ValueError("agent's own")


class _Agents(Script):
    """Raises as an `AgentActor` does."""

    async def _do(self, body: bytes) -> None:
        try:
            await super()._do(body)
        except ValueError as error:
            raise AgentError("agent 'a' raised in here", agent="a") from error


@pytest.mark.parametrize("actor", [Script, _Agents, _Unmade])
@pytest.mark.parametrize("kind", ["start", "tick", "stop", ""])
async def test_a_client_gets_an_exceptions_type_and_an_id_that_is_in_the_log(
    actor: type[Script], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = SessionTable(actor)
    if kind in ("tick", "stop") and actor is not _Unmade:
        await table.step(StepRequest(StepKind.START, "s", b""))
    elif actor is _Unmade:
        kind = kind and "start"
    ids = set()
    for session in ("s", "t"):
        if kind in ("tick", "stop") and session == "t":
            await table.step(StepRequest(StepKind.START, session, b""))
        with pytest.raises(AgentError) as failed:
            await table.step(StepRequest(StepKind(kind), session if kind else "", b"raise"))
        ids.add(failed.value.details["id"])
        assert failed.value.details["type"] == "ValueError"
        assert failed.value.details.get("agent") == ("a" if actor is _Agents else None)
        assert "agent's own" not in failed.value.to_wire().decode()
        assert "ValueError; the service's log has more" in failed.value.message
    (fault,) = ids  # the same each time, so the log has it even if it leaves out most repeats
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"fault {fault}: ")
        assert f"ValueError: agent's own [{__file__}:" in line


class _Model(Script):
    """Fails as a model does that wraps what its module raised."""

    async def _do(self, body: bytes) -> None:
        try:
            await super()._do(body)
        except ValueError as error:
            raise ModelError(f"the model failed on a batch of 1: ValueError: {error}", layer="model") from error


@pytest.mark.parametrize("show", [True, False])
@pytest.mark.parametrize("kind", ["tick", ""])
async def test_a_models_failure_hides_what_it_quotes_as_an_agents_does(
    kind: str, show: bool, caplog: pytest.LogCaptureFixture
) -> None:
    table = SessionTable(_Model, SessionConfig(show_errors=show))
    if kind:
        await table.step(StepRequest(StepKind.START, "s", b""))
    with pytest.raises(ModelError) as failed:
        await table.step(StepRequest(StepKind(kind), "s" if kind else "", b"raise"))
    assert failed.value.details["type"] == "ModelError"
    assert ("agent's own" in failed.value.to_wire().decode()) is show
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"fault {failed.value.details['id']}: ")
    assert "batch of 1: ValueError: agent's own" in line


async def test_a_bad_body_costs_the_tick_not_the_session() -> None:
    bench = Bench()
    await bench.ask("start")
    with pytest.raises(BadBody):
        await bench.ask("tick", body=b"bad")
    assert await bench.ask("tick", body=b"1") == b"s:1"


async def test_a_start_that_fails_leaves_the_id_free() -> None:
    claims: list[str] = []

    async def claim(session: str) -> None:
        claims.append(f"+{session}")

    async def release(session: str, reason: str) -> None:
        claims.append(f"-{session}")

    bench = Bench(ownership=Shared(claim=claim, release=release))
    with pytest.raises(AgentError):
        await bench.ask("start", body=b"raise")
    assert claims == ["+s", "-s"]
    await bench.ask("start")
    await bench.ask("stop")
    await until(lambda: claims == ["+s", "-s", "+s", "-s"])


async def test_a_claim_refused_elsewhere_refuses_the_start() -> None:
    async def claim(session: str) -> None:
        raise SessionExists(f"{session} runs elsewhere")

    bench = Bench(ownership=Shared(claim=claim))
    with pytest.raises(SessionExists, match="elsewhere"):
        await bench.ask("start")
    assert not bench.actors


async def test_two_starts_at_once_make_one_session() -> None:
    bench = Bench()
    results = await asyncio.gather(*(bench.ask("start") for _ in range(5)), return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["SessionExists"] * 4 + ["bytes"]
    assert len(bench.actors) == 1


async def test_a_full_replica_refuses_starts_never_ticks() -> None:
    bench = Bench(actors_per_worker=1)
    await bench.ask("start", "a")
    with pytest.raises(ServiceFull, match="at most 1"):
        await bench.ask("start", "b")
    assert await bench.ask("tick", "a", b"1") == b"a:1"
    await bench.ask("stop", "a")
    await bench.ask("start", "b")


async def test_a_tick_past_its_deadline_ends_the_session() -> None:
    bench = Bench(tick_timeout_s=0.05)
    await bench.ask("start")
    with pytest.raises(DeadlineExceeded, match=r"0.05 s for tick"):
        await bench.ask("tick", body=b"wait")
    await until(lambda: bench.actors[0].reasons == ["error"])


async def test_who_stops_waiting_for_a_tick_leaves_its_session_as_it_is() -> None:
    bench = Bench()
    await bench.ask("start")
    tick = asyncio.ensure_future(bench.ask("tick", body=b"wait"))
    await asyncio.sleep(0.01)
    tick.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tick
    bench.actors[0].gate.set()
    assert await bench.ask("tick", body=b"next") == b"s:next"
    assert bench.actors[0].seen == [b"", b"wait", b"next"]


@pytest.mark.parametrize("left", [False, True])
async def test_a_loop_that_stood_still_does_not_take_that_for_its_clients_silence(left: bool) -> None:
    bench = Bench(idle_timeout_s=60.0 if left else 0.2, reconnect_timeout_s=0.2)
    await bench.ask("start")
    await bench.number(0, b"")
    if left:
        await bench.table.disconnect("s")
    await asyncio.sleep(0.06)  # the sweeper waits
    time.sleep(0.5)  # noqa: ASYNC251 (an agent that blocks, or a process that was stopped)
    for _ in range(5):
        await asyncio.sleep(0)
    assert await bench.number(1, b"1") == b"s:1"
    if left:
        await bench.table.disconnect("s")
    await until(lambda: bench.actors[0].reasons == ["disconnect" if left else "idle"])


async def test_idle_sessions_are_reaped_and_told_and_busy_ones_are_not() -> None:
    bench = Bench(idle_timeout_s=0.2)
    await bench.ask("start", "idle")
    await bench.ask("start", "busy")
    async with asyncio.timeout(5):
        while not bench.actors[0].reasons:
            await bench.ask("tick", "busy", b"1")
            await asyncio.sleep(0.01)
    assert bench.actors[0].reasons == ["idle"]
    assert bench.actors[1].reasons == []
    with pytest.raises(SessionLost) as lost:
        await bench.ask("tick", "idle")
    assert lost.value.details == {"reason": "idle"}


async def test_close_tells_every_session_and_takes_no_more() -> None:
    bench = Bench()
    await bench.ask("start", "a")
    await bench.ask("start", "b")
    await bench.table.close()
    assert [actor.reasons for actor in bench.actors] == [["drained"], ["drained"]]
    with pytest.raises(ServiceFull, match="is ending"):
        await bench.ask("start", "c")


async def test_the_connection_that_holds_a_session_hears_of_the_end_once() -> None:
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


async def test_the_wait_of_one_tick_in_eight_is_timed_and_stands_for_all() -> None:
    recorder = Recorder()
    bench = Bench(recorder=recorder)
    for session in ("a", "b"):
        await bench.ask("start", session)
    for count in range(1, 33):
        await bench.ask("tick", "ab"[count % 2], b"x")
        cells, own = recorder.drain()
        recorder.merge((cells, own))
        waits = cells.get(("tick_wait_seconds", ""))
        assert (waits.count if waits else 0) == count // 8 * 8


async def test_what_happens_is_counted() -> None:
    recorder = Recorder()
    bench = Bench(recorder=recorder)
    await bench.ask("start")
    for _ in range(3):
        await bench.ask("tick", body=b"1")
    with pytest.raises(BrayxError):
        await bench.ask("start")
    await bench.ask("stop")
    numbers = recorder.summary()
    assert numbers["ticks"] == 3
    assert numbers["sessions_started"] == 1
    assert numbers["sessions_ended.stop"] == 1
    assert numbers["requests_refused.session_exists"] == 1
    assert numbers["tick_seconds.p50"] > 0


async def test_no_tick_runs_on_a_session_that_ended_while_it_waited() -> None:
    bench = Bench()
    await bench.ask("start")
    asked = [asyncio.ensure_future(bench.ask(*words)) for words in (("tick", "s", b"wait"), ("stop",), ("tick",))]
    await asyncio.sleep(0.01)
    bench.actors[0].gate.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert results[:2] == [b"s:wait", b"stopped"]
    assert isinstance(results[2], SessionUnknown)
    assert bench.actors[0].seen == [b"", b"wait", b""]


async def test_a_tick_that_waited_does_not_run_on_the_old_actor_of_a_restarted_session() -> None:
    bench = Bench()
    await bench.ask("start")
    entry = bench.table.get("s")
    assert entry is not None
    running = asyncio.ensure_future(bench.ask("tick", body=b"wait"))
    await asyncio.sleep(0.01)
    queued = asyncio.ensure_future(bench.ask("tick", body=b"old"))
    await asyncio.sleep(0)
    entry.end("idle")
    await bench.ask("start")
    bench.actors[0].gate.set()
    assert await running == b"s:wait", "what ran when the session ended is answered"
    with pytest.raises(SessionLost, match="idle"):
        await queued
    assert [actor.seen for actor in bench.actors] == [[b"", b"wait"], [b""]]


async def test_the_end_of_a_session_does_not_free_the_id_of_the_one_started_after_it() -> None:
    owned: list[str] = []

    async def claim(session: str) -> None:
        owned.append(session)

    async def release(session: str, reason: str) -> None:
        owned.remove(session)

    bench = Bench(ownership=Shared(claim=claim, release=release))
    await bench.ask("start")
    entry = bench.table.get("s")
    assert entry is not None
    running = asyncio.ensure_future(bench.ask("tick", body=b"wait"))
    await asyncio.sleep(0.01)
    entry.end("idle")
    owned.clear()
    await bench.ask("start")
    bench.actors[0].gate.set()
    await running
    await until(lambda: bench.actors[0].reasons == ["idle"])
    assert owned == ["s"]


class TestNumberedTicks:
    async def test_a_repeat_gets_the_kept_reply_and_does_not_reach_the_actor(self) -> None:
        bench = Bench()
        await bench.ask("start")
        assert await bench.number(0, b"a") == b"s:a"
        assert await bench.number(0, b"other") == b"s:a"
        assert await bench.number(1, b"b") == b"s:b"
        assert await bench.number(1, b"b") == b"s:b"
        assert bench.actors[0].seen == [b"", b"a", b"b"]

    async def test_a_repeat_that_comes_while_the_first_still_runs_gets_the_same_reply(self) -> None:
        bench = Bench()
        await bench.ask("start")
        asked = [asyncio.ensure_future(bench.number(0, b"wait")) for _ in range(3)]
        await asyncio.sleep(0.01)
        bench.actors[0].gate.set()
        assert await asyncio.gather(*asked) == [b"s:wait"] * 3
        assert bench.actors[0].seen == [b"", b"wait"]

    @pytest.mark.parametrize("seq", [0, 3, 7])
    async def test_any_other_number_is_told_and_changes_nothing(self, seq: int) -> None:
        bench = Bench()
        await bench.ask("start")
        for number in range(2):
            await bench.number(number, b"%d" % number)
        with pytest.raises(OutOfSequence) as wrong:
            await bench.number(seq, b"x")
        assert wrong.value.details == {"expected": 2, "got": seq}
        assert await bench.number(2, b"2") == b"s:2"
        assert bench.actors[0].seen == [b"", b"0", b"1", b"2"]

    async def test_a_tick_refused_for_its_body_does_not_use_its_number_up(self) -> None:
        bench = Bench()
        await bench.ask("start")
        with pytest.raises(BadBody):
            await bench.number(0, b"bad")
        assert await bench.number(0, b"good") == b"s:good"

    async def test_ticks_without_a_number_leave_the_numbering_alone(self) -> None:
        bench = Bench()
        await bench.ask("start")
        await bench.number(0, b"a")
        await bench.ask("tick", body=b"plain")
        assert await bench.number(0, b"a") == b"s:a"
        assert await bench.number(1, b"b") == b"s:b"


class TestSnapshots:
    def bench(
        self, release: Callable[[str, str], Awaitable[None]] | None = None, **options: object
    ) -> tuple[Bench, list[tuple[str, Snapshot]]]:
        others = Shared(release=release)
        return Bench(ownership=others, **options), others.kept

    async def resumed(self, bench: Bench, snapshot: Snapshot, request: StepRequest) -> bytes:
        answer: asyncio.Future[bytes | BrayxError] = asyncio.get_running_loop().create_future()
        bench.table.resume("s", snapshot, request, answer.set_result)
        result = await answer
        if isinstance(result, BrayxError):
            raise result
        return result

    async def test_one_is_taken_every_so_many_ticks(self) -> None:
        bench, kept = self.bench(snapshot_every=2)
        await bench.ask("start")
        for number in range(5):
            await bench.number(number, b"%d" % number)
        await until(lambda: len(kept) == 2)
        assert kept == [("s", Snapshot(2, 2, b"s:1", b"|0|1")), ("s", Snapshot(4, 4, b"s:3", b"|0|1|2|3"))]

    async def test_a_session_resumed_from_one_is_told_once_where_it_is(self) -> None:
        bench, _ = self.bench()
        tick = StepRequest(StepKind.TICK, "s", b"9", seq=9)
        with pytest.raises(SessionResumed) as told:
            await self.resumed(bench, Snapshot(4, 4, b"s:3", b"|0|1|2|3"), tick)
        assert told.value.details == {"tick": 4}
        assert await bench.number(3, b"3") == b"s:3"
        assert await bench.number(4, b"4") == b"s:4"
        assert bench.actors[0].seen == [b"", b"0", b"1", b"2", b"3", b"4"]

    async def test_a_session_that_was_moved_goes_on_as_if_nothing_were(self) -> None:
        bench, _ = self.bench()
        tick = StepRequest(StepKind.TICK, "s", b"1", seq=1)
        assert await self.resumed(bench, Snapshot(1, 1, b"s:0", b"|0", exact=True), tick) == b"s:1"
        numbers = bench.recorder.summary()
        assert (numbers["sessions_resumed"], numbers.get("sessions_started", 0)) == (1, 0)

    async def test_sessions_are_moved_between_two_requests_and_not_told_that_they_ended(self) -> None:
        bench, _ = self.bench()
        parked: dict[str, Snapshot] = {}

        async def park(session: str, snapshot: Snapshot) -> None:
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
        assert parked == {"s": Snapshot(2, 2, b"s:wait", b"|0|wait", exact=True, holder=holder.name)}
        assert bench.actors[0].reasons == []
        assert len(bench.table) == 0

    async def test_one_that_cannot_be_restored_is_lost(self) -> None:
        bench, _ = self.bench()
        with pytest.raises(SessionLost, match="cannot read"):
            await self.resumed(bench, Snapshot(1, 1, None, b"rubbish"), StepRequest(StepKind.TICK, "s", b""))
        assert len(bench.table) == 0
        numbers = bench.recorder.summary()
        assert numbers["sessions_ended.lost"] == 1
        assert "sessions_started" not in numbers

    @pytest.mark.parametrize(("seq", "left"), [(None, "stop"), (1, "owner_died")])
    async def test_the_loss_of_one_that_cannot_be_restored_is_told_again_only_to_a_repeat(
        self, seq: int | None, left: str
    ) -> None:
        freed: list[str] = []

        async def release(session: str, reason: str) -> None:
            freed.append(reason)

        bench, _ = self.bench(release=release)
        with pytest.raises(SessionLost):
            await self.resumed(bench, Snapshot(1, 1, None, b"rubbish"), StepRequest(StepKind.TICK, "s", b"", seq=seq))
        assert freed == [left]


async def test_stops_that_wait_are_bounded_like_ticks() -> None:
    bench = Bench(max_waiting=2)
    await bench.ask("start")
    held = [asyncio.ensure_future(bench.ask("tick", body=b"wait"))]
    await asyncio.sleep(0.01)
    held += [asyncio.ensure_future(bench.ask("stop")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="at most 2"):
        await bench.ask("stop")
    bench.actors[0].gate.set()
    results = await asyncio.gather(*held, return_exceptions=True)
    assert [type(result) for result in results] == [bytes, bytes, SessionUnknown]


async def test_a_stop_is_answered_once_the_id_is_free() -> None:
    freeing, freed = asyncio.Event(), asyncio.Event()

    async def release(session: str, reason: str) -> None:
        freeing.set()
        await freed.wait()

    bench = Bench(ownership=Shared(release=release))
    await bench.ask("start")
    stop = asyncio.ensure_future(bench.ask("stop"))
    await freeing.wait()
    await asyncio.sleep(0.01)
    assert not stop.done()
    freed.set()
    assert await stop == b"stopped"


@pytest.mark.parametrize(
    ("waits", "left"),
    [
        (None, "error"),
        (StepRequest(StepKind.TICK, "s", b""), "stop"),
        (StepRequest(StepKind.TICK, "s", b"", seq=0), "error"),
    ],
    ids=["nobody waits", "a tick that is never sent again", "a numbered tick, which may be"],
)
async def test_why_a_session_ended_is_left_to_tell_only_if_it_has_not_been_told_for_good(
    waits: StepRequest | None, left: str
) -> None:
    freed: list[str] = []

    async def release(session: str, reason: str) -> None:
        freed.append(reason)

    bench = Bench(ownership=Shared(release=release))
    await bench.ask("start")
    entry = bench.table.get("s")
    assert entry is not None
    running = asyncio.ensure_future(bench.ask("tick", body=b"wait and raise"))
    await until(lambda: entry.began)
    waiting = asyncio.ensure_future(bench.step(waits)) if waits is not None else None
    await until(lambda: waiting is None or len(entry.inbox) == 1)
    bench.actors[0].gate.set()
    with pytest.raises(AgentError):
        await running
    if waiting is not None:
        with pytest.raises(SessionLost, match="error"):
            await waiting
    await until(lambda: bench.actors[0].reasons == ["error"])
    assert freed == [left]


async def test_an_id_that_cannot_be_freed_holds_up_neither_the_stop_nor_the_end() -> None:
    async def release(session: str, reason: str) -> None:
        raise RuntimeError("the directory's own")

    bench = Bench(ownership=Shared(release=release))
    await bench.ask("start")
    async with asyncio.timeout(5):
        assert await bench.ask("stop") == b"stopped"
    await until(lambda: bench.actors[0].reasons == ["stop"])
    with pytest.raises(AgentError):
        await bench.ask("start", body=b"raise")


async def test_a_release_that_hangs_is_given_up_after_the_ticks_deadline() -> None:
    async def release(session: str, reason: str) -> None:
        await asyncio.sleep(60)

    bench = Bench(ownership=Shared(release=release), tick_timeout_s=0.05)
    await bench.ask("start")
    async with asyncio.timeout(5):
        assert await bench.ask("stop") == b"stopped"
    await until(lambda: bench.actors[0].reasons == ["stop"])


async def test_sessions_taken_over_elsewhere_are_lost_here() -> None:
    bench = Bench()
    await bench.ask("start", "a")
    await bench.ask("start", "b")
    bench.table.lose(["b", "unknown"])
    await until(lambda: bench.actors[1].reasons == ["lost"])
    assert bench.table.sessions == ["a"]


_CALLER = contextvars.ContextVar("caller", default="nobody")


class Noting(Script):
    """Notes whose context it is called in."""

    async def tick(self, body: bytes) -> bytes:
        await asyncio.sleep(0)
        return _CALLER.get().encode()


async def test_a_session_does_not_run_in_the_context_of_the_request_that_started_it() -> None:
    """What it asks of Ray is not the request's that began it: Ray would cancel it with that request."""
    table = SessionTable(Noting)
    _CALLER.set("request")
    await table.step(StepRequest(StepKind.START, "s", b""))
    assert await table.step(StepRequest(StepKind.TICK, "s", b"")) == b"nobody"


async def test_ticks_that_come_in_one_piece_are_bounded_too() -> None:
    bench = Bench(max_waiting=4)
    await bench.ask("start")
    replies: list[bytes | BrayxError] = []

    def a_chunk() -> None:
        for number in range(12):
            bench.table.submit(StepRequest(StepKind.TICK, "s", b"%d" % number), replies.append)

    asyncio.get_running_loop().call_soon(a_chunk)
    await until(lambda: len(replies) == 12)
    answered = [reply for reply in replies if isinstance(reply, bytes)]
    assert answered == [b"s:%d" % number for number in range(4)]
    assert [type(reply) for reply in replies if not isinstance(reply, bytes)] == [QueueFull] * 8
    assert await bench.ask("tick", body=b"on") == b"s:on"


async def test_a_start_with_a_number_but_0_is_refused() -> None:
    with pytest.raises(ProtocolError, match="seq 7"):
        await Bench().step(StepRequest(StepKind.START, "s", b"", seq=7))


async def test_a_stop_that_may_be_a_repeat_hears_of_the_loss_each_time() -> None:
    bench = Bench()
    await bench.ask("start")
    await bench.table.disconnect("s", for_good=True)
    for _ in range(2):
        with pytest.raises(SessionLost, match="disconnect"):
            await bench.ask("stop")


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
            parked: list[Snapshot] = []

            async def park(session: str, snapshot: Snapshot) -> None:
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

    async def test_a_numbered_tick_is_told_each_time_why_its_session_ended(self) -> None:
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

    async def test_others_end_at_once_and_so_do_those_left_for_good(self) -> None:
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
        assert await self.ask(StepKind.TICK, new, 0) == b"s:0", "it sends the tick again whose reply was lost"
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

    async def test_the_tick_after_those_under_way_and_waiting_takes_the_session_over(self) -> None:
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

    async def resumed(self, snapshot: Snapshot, holder: Holder | None, seq: int | None = None) -> bytes | BrayxError:
        """The answer to a tick that comes for a session which is not here yet; without a connection: as by HTTP."""
        name, attached = (holder.name, holder.attached) if holder is not None else ("", False)
        answer: asyncio.Future[bytes | BrayxError] = asyncio.get_running_loop().create_future()
        request = StepRequest(StepKind.TICK, "s", b"", seq=seq, holder=name, attached=attached)
        self.bench.table.resume("s", snapshot, request, answer.set_result)
        return await answer

    async def moved(self) -> tuple[Snapshot, Holder, Holder]:
        """Gives a session as it was moved here, its old and its present holder."""
        old, new = await self.taken()
        parked: list[Snapshot] = []

        async def park(session: str, snapshot: Snapshot) -> None:
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
        assert len(self.bench.actors) == 2, "one that is refused brings the session back all the same"
        assert self.heard == [["taken"], ["moved"], []]

    async def test_a_moved_session_is_taken_over_as_any(self) -> None:
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

    async def test_the_loss_of_a_moved_session_is_told_to_who_asks_after_the_one_that_was_refused(self) -> None:
        freed: list[str] = []

        async def release(session: str, reason: str) -> None:
            freed.append(reason)

        self.bench = Bench(ownership=Shared(release=release))
        stranger = self.connect()
        snapshot = Snapshot(1, 1, None, b"rubbish", exact=True, holder="another")
        assert isinstance(await self.resumed(snapshot, stranger), SessionUnknown)
        await until(lambda: freed == ["owner_died"])
        assert len(self.bench.table) == 0

    async def test_a_session_whose_owner_died_goes_to_the_first_connection_that_asks(self) -> None:
        """Its snapshot may be older than the last takeover."""
        holder, other = self.connect(), self.connect()
        holder.attached = other.attached = True  # to where it ran before
        assert isinstance(await self.resumed(Snapshot(1, 1, b"s:0", b"|0"), None), SessionResumed)
        assert await self.bench.ask("tick", body=b"beside") == b"s:beside"
        assert await self.ask(StepKind.TICK, holder, 1) == b"s:1"
        with pytest.raises(SessionLost, match="taken over"):
            await self.ask(StepKind.TICK, other)


class TestFallback:
    @pytest.mark.parametrize(("fallback", "expected"), [("last", b"s:first"), ("default", b"wait!"), ("agent", b"own")])
    async def test_a_late_tick_is_answered_by_the_fallback_and_the_session_goes_on(
        self, fallback: str, expected: bytes
    ) -> None:
        recorder = Recorder()
        bench = Bench(tick_deadline_ms=50, fallback=fallback, fallback_body="wait!", recorder=recorder)
        await bench.ask("start")
        assert await bench.number(0, b"first") == b"s:first"
        assert await bench.number(1, b"wait") == expected
        late = asyncio.ensure_future(bench.number(1, b"wait"))
        await asyncio.sleep(0.01)
        bench.actors[0].gate.set()
        assert await late == expected, "a repeat gets what was answered"
        assert await bench.number(2, b"next") == b"s:next"
        assert bench.actors[0].missed_after == [b"wait"]
        await bench.ask("stop")
        numbers = recorder.summary()
        assert numbers[f"ticks_fallen_back.{fallback}"] == 1
        assert numbers["ticks"] == 3

    @pytest.mark.parametrize("numbered", [True, False])
    async def test_each_tick_has_its_own_deadline_and_the_agent_runs_them_all_later(self, numbered: bool) -> None:
        recorder = Recorder()
        bench = Bench(tick_deadline_ms=20, fallback="agent", recorder=recorder)
        await bench.ask("start")

        def tick(seq: int, body: bytes) -> Awaitable[bytes]:
            return bench.number(seq, body) if numbered else bench.ask("tick", body=body)

        async with asyncio.timeout(5):  # the agent is never let go: whoever waits for it waits for ever
            assert await tick(0, b"wait") == b"own"
            assert await tick(1, b"1") == b"own 1:1"
            if numbered:
                assert await tick(1, b"1") == b"own 1:1", "a repeat gets what was answered"
                with pytest.raises(OutOfSequence, match="expected 2"):
                    await tick(0, b"wait")
            both = asyncio.gather(tick(2, b"2"), tick(3, b"3"))
            assert list(await both) == [b"own 2:2", b"own 3:3"]
            with pytest.raises(BadBody):
                await tick(4, b"unreadable")
        assert bench.actors[0].seen == [b""]
        bench.actors[0].gate.set()
        assert await tick(4, b"4") == b"s:4"
        assert bench.actors[0].seen == [b"", b"wait", b"1", b"2", b"3", b"4"]
        assert bench.actors[0].missed_after == [b"wait", b"1", b"2", b"3"]
        await bench.ask("stop")
        numbers = recorder.summary()
        assert numbers["ticks_fallen_back.agent"] == 4
        assert numbers["ticks"] == 5
        assert "ticks_skipped" not in numbers

    async def test_an_agent_too_far_behind_skips_the_oldest_and_the_game_goes_on(self) -> None:
        recorder, others = Recorder(), Shared()
        bench = Bench(
            tick_deadline_ms=10,
            fallback="default",
            fallback_body="-",
            max_waiting=2,
            recorder=recorder,
            snapshot_every=4,
            ownership=others,
        )
        await bench.ask("start")
        async with asyncio.timeout(5):
            assert await bench.number(0, b"wait") == b"-"
            for seq in range(1, 7):
                assert await bench.number(seq, b"%d" % seq) == b"-"
            bench.actors[0].gate.set()
            assert await bench.number(7, b"7") == b"s:7"
        # The inbox holds two; 7 made room for itself, too, unless the agent was faster.
        seen = bench.actors[0].seen
        assert seen == [b"", b"wait", b"skipped 5", b"6", b"7"] or seen == [
            b"",
            b"wait",
            b"skipped 4",
            b"5",
            b"6",
            b"7",
        ]
        assert recorder.summary()["ticks_skipped"] in (4, 5)
        await until(lambda: len(others.kept) == 2)
        kept = [snapshot for _, snapshot in others.kept]
        assert (kept[0].tick, kept[0].seq, kept[0].kept) in ((5, 5, b"-"), (6, 6, b"-"))
        assert kept[0].actor.endswith(b"skipped %d" % (kept[0].tick - 1))
        assert (kept[1].tick, kept[1].seq, kept[1].kept) == (8, 8, b"s:7")
        await bench.ask("stop")
        assert recorder.summary()["ticks"] == 8

    async def test_a_snapshot_says_where_the_agent_is_not_where_its_client_is(self) -> None:
        others = Shared()
        bench = Bench(tick_deadline_ms=10, fallback="agent", snapshot_every=2, ownership=others)
        await bench.ask("start")
        for seq, body in enumerate((b"0", b"wait", b"2")):
            await bench.number(seq, body)
        bench.actors[0].gate.set()
        await until(lambda: bool(others.kept))
        kept = others.kept[0][1]
        assert (kept.tick, kept.seq, kept.kept, kept.actor) == (2, 2, b"own", b"|0|wait")

    async def test_a_stop_comes_after_what_was_answered_before_it(self) -> None:
        bench = Bench(tick_deadline_ms=10, fallback="default")
        await bench.ask("start")
        for body in (b"wait", b"1"):
            await bench.ask("tick", body=body)
        stop = asyncio.ensure_future(bench.ask("stop", body=b"end"))
        await asyncio.sleep(0.03)
        assert not stop.done()
        bench.actors[0].gate.set()
        assert await stop == b"stopped"
        assert bench.actors[0].seen == [b"", b"wait", b"1", b"end"]

    async def test_what_was_answered_is_not_answered_again_when_its_session_ends(self) -> None:
        recorder = Recorder()
        bench = Bench(tick_deadline_ms=10, fallback="default", recorder=recorder)
        await bench.ask("start")
        for body in (b"wait and raise", b"1"):
            await bench.ask("tick", body=body)
        bench.actors[0].gate.set()
        await until(lambda: bench.actors[0].reasons == ["error"])
        assert bench.actors[0].seen == [b""]
        assert recorder.summary().get("requests_refused.session_lost", 0) == 0
        with pytest.raises(SessionLost, match="error"):
            await bench.ask("tick")

    async def test_a_late_body_that_the_agent_refuses_is_a_tick_of_the_game_all_the_same(self) -> None:
        bench = Bench(tick_deadline_ms=10, fallback="default")
        await bench.ask("start")
        for seq, body in enumerate((b"wait", b"bad")):
            assert await bench.number(seq, body) == b""
        bench.actors[0].gate.set()
        assert await bench.number(2, b"2") == b"s:2"
        assert bench.actors[0].seen == [b"", b"wait", b"skipped 1", b"2"]

    async def test_nobody_is_answered_before_a_tick_that_has_no_fallback(self) -> None:
        bench = Bench(tick_deadline_ms=10, fallback="last")
        await bench.ask("start")
        order: list[int] = []

        async def tick(seq: int, body: bytes) -> None:
            await bench.number(seq, body)
            order.append(seq)

        ticks = [asyncio.ensure_future(tick(seq, body)) for seq, body in enumerate((b"wait", b"1", b"2"))]
        await asyncio.sleep(0.05)
        assert not order
        bench.actors[0].gate.set()
        async with asyncio.timeout(5):
            await asyncio.gather(*ticks)
        assert order == [0, 1, 2]
        assert bench.actors[0].seen == [b"", b"wait", b"1", b"2"]

    async def test_without_a_last_reply_the_first_tick_is_waited_for(self) -> None:
        bench = Bench(tick_deadline_ms=20)
        await bench.ask("start")
        tick = asyncio.ensure_future(bench.ask("tick", body=b"wait"))
        await asyncio.sleep(0.1)
        bench.actors[0].gate.set()
        assert await tick == b"s:wait"

    async def test_an_actor_that_raises_after_its_deadline_still_ends_its_session(self) -> None:
        bench = Bench(tick_deadline_ms=20, fallback="default", tick_timeout_s=0.1)
        await bench.ask("start")
        assert await bench.ask("tick", body=b"wait") == b""
        await until(lambda: bench.actors[0].reasons == ["error"])


async def test_an_actor_that_cannot_be_made_is_told_and_leaves_the_id_free() -> None:
    def make() -> Script:
        raise OSError("no memory left")

    table = SessionTable(make, SessionConfig(show_errors=True))
    start = StepRequest(StepKind.START, "s", b"")
    for _ in range(2):
        with pytest.raises(AgentError, match="no memory left"):
            await table.step(start)
    assert len(table) == 0


async def test_a_stateless_call_without_an_actor_is_told() -> None:
    def make() -> Script:
        raise OSError("no memory left")

    with pytest.raises(AgentError, match="no memory left"):
        async with asyncio.timeout(5.0):
            await SessionTable(make, SessionConfig(show_errors=True)).step(StepRequest(StepKind.CALL, "", b""))


async def test_sessions_that_are_ending_are_bounded_too() -> None:
    bench = Bench(actors_per_worker=2)
    for session in "abcd":
        await bench.ask("start", session)
        bench.actors[-1].hold_end = True
        await bench.ask("stop", session)
    with pytest.raises(ServiceFull, match="are ending"):
        await bench.ask("start", "e")
    for actor in bench.actors:
        actor.gate.set()
    await until(lambda: all(actor.reasons for actor in bench.actors))
    await bench.ask("start", "e")


async def test_stateless_calls_at_once_are_bounded_and_their_actor_is_told_of_the_end() -> None:
    bench = Bench(actors_per_worker=2)
    calls = [asyncio.ensure_future(bench.ask("", "", b"wait")) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFull, match="at most 2"):
        await bench.ask("", "")
    bench.actors[0].gate.set()
    assert await asyncio.gather(*calls) == [b":wait", b":wait"]
    await bench.table.close()
    assert bench.actors[0].reasons == ["drained"]


class TestLease:
    """A replica whose lease is over may have a successor: it answers nothing before the renewal."""

    @pytest.mark.parametrize("fallback", [None, "last", "default", "agent"])
    @pytest.mark.parametrize("request_", ["next", "repeat", "unnumbered", "stop"])
    async def test_nothing_is_answered_between_the_leases_end_and_its_renewal(
        self, request_: str, fallback: str | None
    ) -> None:
        lease = Lease()
        limits: dict[str, object] = {} if fallback is None else {"fallback": fallback, "tick_deadline_ms": 20}
        bench = Bench(ownership=Ownership(lease), **limits)
        await bench.ask("start")
        assert await bench.number(0, b"0") == b"s:0"
        lease.renew(0.0)
        asked = {
            "next": lambda: bench.number(1, b"1"),
            "repeat": lambda: bench.number(0, b"again"),
            "unnumbered": lambda: bench.ask("tick", body=b"1"),
            "stop": lambda: bench.ask("stop", body=b"1"),
        }
        answer = asyncio.ensure_future(asked[request_]())
        done, _ = await asyncio.wait([answer], timeout=0.2)
        assert not done
        assert lease.wanted.is_set(), "who renews it is told to hurry"
        lease.renew(math.inf)
        assert await answer == {"repeat": b"s:0", "stop": b"stopped"}.get(request_, b"s:1")
        assert "ticks_fallen_back" not in str(bench.recorder.summary())

    async def test_a_late_ticks_fallback_does_not_come_before_the_answer_that_waits(self) -> None:
        lease, order = Lease(), list[int]()
        bench = Bench(ownership=Ownership(lease), fallback="default", fallback_body="late", tick_deadline_ms=20)
        await bench.ask("start")
        lease.renew(0.0)
        answers = [asyncio.ensure_future(bench.number(seq, b"")) for seq in (0, 1)]
        for seq, answer in enumerate(answers):
            answer.add_done_callback(lambda _, seq=seq: order.append(seq))
        await asyncio.sleep(0.1)
        lease.ends = math.inf  # and who waits for the renewal has not run yet
        await asyncio.sleep(0.2)
        lease.renew(math.inf)
        assert (await asyncio.gather(*answers))[0] == b"s:"
        assert order == [0, 1]

    async def test_a_start_is_not_answered_either(self) -> None:
        lease = Lease(0.0)
        bench = Bench(ownership=Ownership(lease))
        answer = asyncio.ensure_future(bench.ask("start"))
        done, _ = await asyncio.wait([answer], timeout=0.1)
        assert not done
        lease.renew(math.inf)
        assert await answer == b"started"

    @pytest.mark.parametrize("kind", ["tick", "stop"])
    async def test_what_waits_for_a_session_that_was_lost_is_answered_where_it_is_now(self, kind: str) -> None:
        lease, seen = Lease(), list[str]()
        elsewhere = Shared(lease=lease)
        bench = Bench(ownership=elsewhere)
        holder = bench.table.holder(seen.append)
        await bench.step(StepRequest(StepKind.START, "s", b"", holder=holder.name))
        lease.renew(0.0)
        answers = [asyncio.ensure_future(bench.ask(kind)), asyncio.ensure_future(bench.ask("tick", body=b"behind"))]
        await asyncio.sleep(0.05)
        bench.table.lose(["s"])
        lease.renew(math.inf)
        assert await asyncio.gather(*answers) == [b"from elsewhere"] * 2
        assert {request.kind.value for request in elsewhere.handed_on} == {kind, "tick"}
        await until(lambda: bench.actors[0].reasons == ["lost"])
        assert seen == ["moved"], "the doors have their clients ask again"
        numbers = bench.recorder.summary()
        assert not [name for name in numbers if name.startswith("sessions_ended")], "who has it counts its end"

    async def test_a_start_that_was_lost_is_refused(self) -> None:
        lease = Lease(0.0)
        bench = Bench(ownership=Shared(lease=lease))
        answer = asyncio.ensure_future(bench.ask("start"))
        await until(lambda: "s" in bench.table and lease.wanted.is_set())
        bench.table.lose(["s"])
        lease.renew(math.inf)
        with pytest.raises(SessionLost):
            await answer
        await until(lambda: bench.actors[0].reasons == ["lost"])

    async def test_a_lease_that_nobody_renews_is_told_and_the_tick_is_kept_for_its_repeat(self) -> None:
        lease = Lease()
        bench = Bench(ownership=Ownership(lease), tick_timeout_s=0.1)
        await bench.ask("start")
        lease.renew(0.0)
        with pytest.raises(Overloaded, match="has not been renewed") as told:
            await bench.number(0, b"0")
        assert told.value.details == {"layer": "directory", "maybe_applied": True}
        lease.renew(math.inf)
        assert await bench.number(0, b"0") == b"s:0"
        assert bench.actors[0].seen == [b"", b"0"], "applied once"

    async def test_a_stop_that_nobody_may_answer_ends_its_session(self) -> None:
        lease = Lease()
        bench = Bench(ownership=Ownership(lease), tick_timeout_s=0.1)
        await bench.ask("start")
        lease.renew(0.0)
        with pytest.raises(Overloaded):
            await bench.ask("stop")
        await until(lambda: bench.actors[0].reasons == ["error"])

    async def test_a_table_that_closes_meanwhile_says_so(self) -> None:
        lease = Lease()
        bench = Bench(ownership=Ownership(lease))
        await bench.ask("start")
        lease.renew(0.0)
        answer = asyncio.ensure_future(bench.ask("tick"))
        await asyncio.sleep(0.05)
        await bench.table.close(timeout_s=0.1)
        with pytest.raises(SessionLost, match="drained"):
            await answer
        assert bench.actors[0].reasons == ["drained"]
