"""The session table: order, isolation, ends. No server, no Ray."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from brayx.actor.actor import Actor
from brayx.actor.session import SessionTable
from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
    DeadlineExceeded,
    QueueFull,
    ServiceFull,
    SessionExists,
    SessionLost,
    SessionUnknown,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.metrics import Recorder


class Script(Actor):
    """Does what the body says, and keeps what it saw."""

    made: list["Script"]

    def __init__(self) -> None:
        self.session = ""
        self.seen: list[bytes] = []
        self.reasons: list[str] = []
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

    async def on_end(self, reason: str) -> None:
        self.reasons.append(reason)

    async def _do(self, body: bytes) -> None:
        if body == b"raise":
            raise ValueError("agent's own")
        if body == b"bad":
            raise BadBody("not that")
        if body == b"wait":
            await self.gate.wait()
        self.seen.append(body)


class Bench:
    """A table, the actors it made, and short words for requests."""

    def __init__(self, **options: object) -> None:
        self.actors: list[Script] = []
        self.table = SessionTable(self._make, **options)  # type: ignore[arg-type]

    def _make(self) -> Script:
        self.actors.append(Script())
        return self.actors[-1]

    def ask(self, kind: str, session: str = "s", body: bytes = b"") -> Awaitable[bytes]:
        return self.table.step(StepRequest(StepKind(kind), session, body))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (any condition, not one event)
            await asyncio.sleep(0.005)


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
    held = [asyncio.ensure_future(bench.ask("tick", body=b"wait")) for _ in range(3)]
    await asyncio.sleep(0)
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

    async def release(session: str) -> None:
        claims.append(f"-{session}")

    bench = Bench(claim=claim, release=release)
    with pytest.raises(AgentError):
        await bench.ask("start", body=b"raise")
    assert claims == ["+s", "-s"]
    await bench.ask("start")
    await bench.ask("stop")
    await until(lambda: claims == ["+s", "-s", "+s", "-s"])


async def test_a_claim_refused_elsewhere_refuses_the_start() -> None:
    async def claim(session: str) -> None:
        raise SessionExists(f"{session} runs elsewhere")

    bench = Bench(claim=claim)
    with pytest.raises(SessionExists, match="elsewhere"):
        await bench.ask("start")
    assert not bench.actors


async def test_two_starts_at_once_make_one_session() -> None:
    bench = Bench()
    results = await asyncio.gather(*(bench.ask("start") for _ in range(5)), return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["SessionExists"] * 4 + ["bytes"]
    assert len(bench.actors) == 1


async def test_a_full_replica_refuses_starts_never_ticks() -> None:
    bench = Bench(max_sessions=1)
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


async def test_a_client_that_goes_away_in_a_tick_ends_the_session_as_disconnect() -> None:
    bench = Bench()
    await bench.ask("start")
    tick = asyncio.ensure_future(bench.ask("tick", body=b"wait"))
    await asyncio.sleep(0.01)
    tick.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tick
    await until(lambda: bench.actors[0].reasons == ["disconnect"])


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
    with pytest.raises(ServiceFull):
        await bench.ask("start", "c")


async def test_watchers_hear_of_the_end_once() -> None:
    bench = Bench()
    await bench.ask("start")
    heard: list[str] = []
    entry = bench.table.get("s")
    assert entry is not None
    entry.on_end.append(heard.append)
    await bench.ask("stop")
    bench.table.end(entry, "idle")
    await until(lambda: heard == ["stop"])
    assert bench.actors[0].reasons == ["stop"]


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
    entry = bench.table.get("s")
    assert entry is not None
    await entry.lock.acquire()
    stop = asyncio.ensure_future(bench.ask("stop", body=b"end"))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(bench.ask("tick", body=b"late"))
    entry.lock.release()  # the tick runs before the stop wakes up, and finds the lock free
    assert await stop == b"stopped"
    with pytest.raises(SessionUnknown):
        await late
    assert bench.actors[0].seen == [b"", b"end"]


async def test_a_tick_that_waited_does_not_run_on_the_old_actor_of_a_restarted_session() -> None:
    bench = Bench()
    await bench.ask("start")
    entry = bench.table.get("s")
    assert entry is not None
    async with entry.lock:
        queued = asyncio.ensure_future(bench.ask("tick", body=b"old"))
        await asyncio.sleep(0)
        bench.table.end(entry, "idle")
        await bench.ask("start")
    with pytest.raises(SessionUnknown):
        await queued
    assert [actor.seen for actor in bench.actors] == [[b""], [b""]]


async def test_stops_that_wait_are_bounded_like_ticks() -> None:
    bench = Bench(max_waiting=2)
    await bench.ask("start")
    held = [asyncio.ensure_future(bench.ask("tick", body=b"wait"))]
    await asyncio.sleep(0)
    held += [asyncio.ensure_future(bench.ask("stop")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="at most 2"):
        await bench.ask("stop")
    bench.actors[0].gate.set()
    results = await asyncio.gather(*held, return_exceptions=True)
    assert [type(result) for result in results] == [bytes, bytes, SessionUnknown]


async def test_a_stop_is_answered_once_the_id_is_free() -> None:
    freeing, freed = asyncio.Event(), asyncio.Event()

    async def release(session: str) -> None:
        freeing.set()
        await freed.wait()

    bench = Bench(release=release)
    await bench.ask("start")
    stop = asyncio.ensure_future(bench.ask("stop"))
    await freeing.wait()
    await asyncio.sleep(0.01)
    assert not stop.done()
    freed.set()
    assert await stop == b"stopped"


async def test_an_id_that_cannot_be_freed_holds_up_neither_the_stop_nor_the_end() -> None:
    async def release(session: str) -> None:
        raise RuntimeError("the directory's own")

    bench = Bench(release=release)
    await bench.ask("start")
    async with asyncio.timeout(5):
        assert await bench.ask("stop") == b"stopped"
    await until(lambda: bench.actors[0].reasons == ["stop"])
    with pytest.raises(AgentError):
        await bench.ask("start", body=b"raise")


async def test_a_release_that_hangs_is_given_up_after_the_ticks_deadline() -> None:
    async def release(session: str) -> None:
        await asyncio.sleep(60)

    bench = Bench(release=release, tick_timeout_s=0.05)
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
