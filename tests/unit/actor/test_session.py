"""The session table: order, isolation, ends. No server, no Ray."""

import asyncio
import contextvars
import inspect

import pytest

from brayx.actor.config import SessionConfig
from brayx.actor.table import SessionTable
from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
    ModelError,
    OutOfSequence,
    ProtocolError,
    QueueFull,
    ServiceFull,
    SessionExists,
    SessionLost,
    SessionUnknown,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.metrics import Recorder
from tests.unit.actor.bench import Bench, Script, Shared
from tests.waiting import until_awaited as until

pytestmark = pytest.mark.usefixtures("whence")


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
    ticks = []
    for _ in range(3):  # one runs, two wait
        ticks.append(asyncio.ensure_future(bench.ask("tick", body=b"wait")))
        await asyncio.sleep(0.01)
    with pytest.raises(QueueFull, match="at most 2"):
        await bench.ask("tick")
    bench.actors[0].gate.set()
    await asyncio.gather(*ticks)


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
        assert f"ValueError: agent's own [{__file__ if actor is _Unmade else inspect.getfile(Script)}:" in line


class _Model(Script):
    """Fails like a model, with an error that wraps its module's exception."""

    async def _do(self, body: bytes) -> None:
        try:
            await super()._do(body)
        except ValueError as error:
            raise ModelError(f"the model failed on a batch of 1: ValueError: {error}", layer="model") from error


@pytest.mark.parametrize("show", [True, False])
@pytest.mark.parametrize("kind", ["tick", ""])
async def test_a_models_failure_hides_its_details_like_an_agents(
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


async def test_two_concurrent_starts_make_one_session() -> None:
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


async def test_a_cancelled_wait_for_a_tick_leaves_the_session_unchanged() -> None:
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


async def test_close_ends_every_session_and_refuses_new_ones() -> None:
    bench = Bench()
    await bench.ask("start", "a")
    await bench.ask("start", "b")
    await bench.table.close()
    assert [actor.reasons for actor in bench.actors] == [["drained"], ["drained"]]
    with pytest.raises(ServiceFull, match="is ending"):
        await bench.ask("start", "c")


async def test_the_wait_of_one_tick_in_eight_is_sampled() -> None:
    recorder = Recorder()
    bench = Bench(recorder=recorder)
    for session in ("a", "b"):
        await bench.ask("start", session)
    for count in range(1, 33):
        await bench.ask("tick", "ab"[count % 2], b"x")
        cells, windows = recorder.drain()
        recorder.merge((cells, windows))
        waits = cells.get(("tick_wait_seconds", ""))
        assert (waits.count if waits else 0) == count // 8 * 8


async def test_events_are_counted() -> None:
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
    requests = [asyncio.ensure_future(bench.ask(*words)) for words in (("tick", "s", b"wait"), ("stop",), ("tick",))]
    await asyncio.sleep(0.01)
    bench.actors[0].gate.set()
    results = await asyncio.gather(*requests, return_exceptions=True)
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
    assert await running == b"s:wait", "a tick that ran at the end is answered"
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
        requests = [asyncio.ensure_future(bench.number(0, b"wait")) for _ in range(3)]
        await asyncio.sleep(0.01)
        bench.actors[0].gate.set()
        assert await asyncio.gather(*requests) == [b"s:wait"] * 3
        assert bench.actors[0].seen == [b"", b"wait"]

    @pytest.mark.parametrize("seq", [0, 3, 7])
    async def test_any_other_number_is_refused_and_changes_nothing(self, seq: int) -> None:
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


async def test_stops_that_wait_are_bounded_like_ticks() -> None:
    bench = Bench(max_waiting=2)
    await bench.ask("start")
    requests = [asyncio.ensure_future(bench.ask("tick", body=b"wait"))]
    await asyncio.sleep(0.01)
    requests += [asyncio.ensure_future(bench.ask("stop")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="at most 2"):
        await bench.ask("stop")
    bench.actors[0].gate.set()
    results = await asyncio.gather(*requests, return_exceptions=True)
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
    ids=["nothing waits", "a tick that is never sent again", "a numbered tick, which may be"],
)
async def test_the_reason_of_an_end_is_kept_unless_it_was_reported_for_good(
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
    async with asyncio.timeout(60):
        assert await bench.ask("stop") == b"stopped"
    await until(lambda: bench.actors[0].reasons == ["stop"])
    with pytest.raises(AgentError):
        await bench.ask("start", body=b"raise")


async def test_sessions_taken_over_elsewhere_are_lost_here() -> None:
    bench = Bench()
    await bench.ask("start", "a")
    await bench.ask("start", "b")
    bench.table.lose(["b", "unknown"])
    await until(lambda: bench.actors[1].reasons == ["lost"])
    assert bench.table.sessions == ["a"]


_CALLER = contextvars.ContextVar("caller", default="default")


class Noting(Script):
    """Answers with the caller that its context names."""

    async def tick(self, body: bytes) -> bytes:
        await asyncio.sleep(0)
        return _CALLER.get().encode()


async def test_a_session_does_not_run_in_the_context_of_the_request_that_started_it() -> None:
    """Ray would else cancel the session's Ray calls together with the request that started it."""
    table = SessionTable(Noting)
    _CALLER.set("request")
    await table.step(StepRequest(StepKind.START, "s", b""))
    assert await table.step(StepRequest(StepKind.TICK, "s", b"")) == b"default"


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


async def test_a_start_with_a_number_other_than_0_is_refused() -> None:
    with pytest.raises(ProtocolError, match="seq 7"):
        await Bench().step(StepRequest(StepKind.START, "s", b"", seq=7))


async def test_a_stop_that_may_be_a_repeat_gets_the_loss_each_time() -> None:
    bench = Bench()
    await bench.ask("start")
    await bench.table.disconnect("s", for_good=True)
    for _ in range(2):
        with pytest.raises(SessionLost, match="disconnect"):
            await bench.ask("stop")


async def test_an_actor_that_cannot_be_made_is_an_error_and_leaves_the_id_free() -> None:
    def make() -> Script:
        raise OSError("no memory left")

    table = SessionTable(make, SessionConfig(show_errors=True))
    start = StepRequest(StepKind.START, "s", b"")
    for _ in range(2):
        with pytest.raises(AgentError, match="no memory left"):
            await table.step(start)
    assert len(table) == 0


async def test_a_stateless_call_without_an_actor_is_an_error() -> None:
    def make() -> Script:
        raise OSError("no memory left")

    with pytest.raises(AgentError, match="no memory left"):
        async with asyncio.timeout(60):
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


async def test_concurrent_stateless_calls_are_bounded_and_their_actor_is_notified_of_the_end() -> None:
    bench = Bench(actors_per_worker=2)
    calls = [asyncio.ensure_future(bench.ask("", "", b"wait")) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFull, match="at most 2"):
        await bench.ask("", "")
    bench.actors[0].gate.set()
    assert await asyncio.gather(*calls) == [b":wait", b":wait"]
    await bench.table.close()
    assert bench.actors[0].reasons == ["drained"]
