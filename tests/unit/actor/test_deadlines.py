"""Deadlines: the fallback answers late ticks, calls that take too long are cancelled, idle sessions end."""

import asyncio
import time
from collections.abc import Awaitable

import pytest

from brayx.actor.config import SessionConfig
from brayx.errors import (
    BadBody,
    DeadlineExceeded,
    OutOfSequence,
    ServiceFull,
    SessionLost,
)
from brayx.metrics import Recorder
from tests.unit.actor.bench import Bench, Shared
from tests.waiting import until_awaited as until

pytestmark = pytest.mark.usefixtures("whence")


async def test_a_tick_past_its_deadline_ends_the_session() -> None:
    bench = Bench(tick_timeout_s=0.05)
    await bench.ask("start")
    with pytest.raises(DeadlineExceeded, match=r"0.05 s for tick"):
        await bench.ask("tick", body=b"wait")
    await until(lambda: bench.actors[0].reasons == ["error"])


@pytest.mark.parametrize("left", [False, True])
async def test_clients_are_not_idle_while_the_event_loop_is_blocked(left: bool) -> None:
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


async def test_idle_sessions_end_with_their_reason_and_busy_ones_go_on() -> None:
    bench = Bench(idle_timeout_s=0.2)
    await bench.ask("start", "idle")
    await bench.ask("start", "busy")
    async with asyncio.timeout(60):
        while not bench.actors[0].reasons:
            await bench.ask("tick", "busy", b"1")
            await asyncio.sleep(0.01)
    assert bench.actors[0].reasons == ["idle"]
    assert bench.actors[1].reasons == []
    with pytest.raises(SessionLost) as lost:
        await bench.ask("tick", "idle")
    assert lost.value.details == {"reason": "idle"}


async def test_games_that_never_stop_are_named_in_a_warning_and_where_they_fill_the_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(idle_timeout_s=40.0, actors_per_worker=20)
    for number in range(20):
        await bench.ask("start", str(number))
    for session in bench.table._sessions.values():
        session.last_seen -= 30.0  # silent, and not idle yet
    silence = "20 of 20 sessions have sent nothing for 10 s: does your game send stop at the end of each game?"
    await until(lambda: silence in caplog.text)
    with pytest.raises(ServiceFull) as full:
        await bench.ask("start", "one more")
    assert "at most 20 may (actor.actors_per_worker); " + silence in str(full.value)
    assert "actor.idle_timeout_s (40 s)" in str(full.value)
    for number in range(20):
        await bench.ask("tick", str(number), b"1")
    await until(lambda: not bench.table._sweeper.silence)
    assert caplog.text.count(silence) == 1, "one warning, however long it lasts"


async def test_a_release_that_hangs_is_given_up_after_the_ticks_deadline() -> None:
    async def release(session: str, reason: str) -> None:
        await asyncio.sleep(600)

    bench = Bench(ownership=Shared(release=release), tick_timeout_s=0.05)
    await bench.ask("start")
    async with asyncio.timeout(60):
        assert await bench.ask("stop") == b"stopped"
    await until(lambda: bench.actors[0].reasons == ["stop"])


class TestFallback:
    @pytest.mark.parametrize(("fallback", "expected"), [("last", b"s:first"), ("default", b"wait!"), ("agent", b"own")])
    async def test_a_late_tick_is_answered_by_the_fallback_and_the_session_goes_on(
        self, fallback: str, expected: bytes
    ) -> None:
        recorder = Recorder()
        bench = Bench(tick_deadline_ms=200, fallback=fallback, fallback_body="wait!", recorder=recorder)
        await bench.ask("start")
        assert await bench.number(0, b"first") == b"s:first"
        assert await bench.number(1, b"wait") == expected
        late = asyncio.ensure_future(bench.number(1, b"wait"))
        await asyncio.sleep(0.01)
        bench.actors[0].gate.set()
        assert await late == expected, "a repeat gets the same answer"
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

        async with asyncio.timeout(60):  # the agent never continues, so a wait for it would never end
            assert await tick(0, b"wait") == b"own"
            assert await tick(1, b"1") == b"own 1:1"
            if numbered:
                assert await tick(1, b"1") == b"own 1:1", "a repeat gets the same answer"
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
        async with asyncio.timeout(60):
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
        snapshots = [snapshot for _, snapshot in others.kept]
        assert (snapshots[0].tick, snapshots[0].seq, snapshots[0].kept) in ((5, 5, b"-"), (6, 6, b"-"))
        assert snapshots[0].actor.endswith(b"skipped %d" % (snapshots[0].tick - 1))
        assert (snapshots[1].tick, snapshots[1].seq, snapshots[1].kept) == (8, 8, b"s:7")
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
        snapshot = others.kept[0][1]
        assert (snapshot.tick, snapshot.seq, snapshot.kept, snapshot.actor) == (2, 2, b"own", b"|0|wait")

    async def test_a_stop_runs_after_the_ticks_answered_before_it(self) -> None:
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

    async def test_an_answered_tick_is_not_answered_again_when_its_session_ends(self) -> None:
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

    async def test_a_late_body_that_the_agent_refuses_still_counts_as_a_tick(self) -> None:
        bench = Bench(tick_deadline_ms=10, fallback="default")
        await bench.ask("start")
        for seq, body in enumerate((b"wait", b"bad")):
            assert await bench.number(seq, body) == b""
        bench.actors[0].gate.set()
        assert await bench.number(2, b"2") == b"s:2"
        assert bench.actors[0].seen == [b"", b"wait", b"skipped 1", b"2"]

    async def test_no_tick_is_answered_before_an_earlier_one_without_a_fallback(self) -> None:
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
        async with asyncio.timeout(60):
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


def test_a_game_waits_for_its_learner_only_if_no_tick_of_it_can_become_late() -> None:
    assert SessionConfig().longest_wait_s == 5.0
    assert SessionConfig(tick_timeout_s=1.0).longest_wait_s == 0.5
    assert SessionConfig(tick_deadline_ms=20.0).longest_wait_s == 0.0
