"""The lease: between its end and its renewal no session is answered."""

import asyncio
import math

import pytest

from brayx.actor.ownership import Lease, Ownership
from brayx.errors import (
    Overloaded,
    SessionLost,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from tests.unit.actor.bench import Bench, Shared
from tests.waiting import until_awaited as until

pytestmark = pytest.mark.usefixtures("whence")


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
        requests = {
            "next": lambda: bench.number(1, b"1"),
            "repeat": lambda: bench.number(0, b"again"),
            "unnumbered": lambda: bench.ask("tick", body=b"1"),
            "stop": lambda: bench.ask("stop", body=b"1"),
        }
        answer = asyncio.ensure_future(requests[request_]())
        done, _ = await asyncio.wait([answer], timeout=0.2)
        assert not done
        assert lease.wanted.is_set(), "a renewal is requested at once"
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
        lease.ends = math.inf  # and the tasks that wait for the renewal have not run yet
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
    async def test_requests_that_wait_for_a_lost_session_are_answered_by_its_new_owner(self, kind: str) -> None:
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
        assert seen == ["moved"], "the doors make their clients retry"
        numbers = bench.recorder.summary()
        assert not [name for name in numbers if name.startswith("sessions_ended")], "its new owner counts its end"

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

    async def test_a_lease_that_is_not_renewed_is_reported_and_the_tick_is_kept_for_its_repeat(self) -> None:
        lease = Lease()
        bench = Bench(ownership=Ownership(lease), tick_timeout_s=0.1)
        await bench.ask("start")
        lease.renew(0.0)
        with pytest.raises(Overloaded, match="has not been renewed") as raised:
            await bench.number(0, b"0")
        assert raised.value.details == {"layer": "directory", "maybe_applied": True}
        lease.renew(math.inf)
        assert await bench.number(0, b"0") == b"s:0"
        assert bench.actors[0].seen == [b"", b"0"], "applied once"

    async def test_a_stop_without_a_renewed_lease_ends_its_session(self) -> None:
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
