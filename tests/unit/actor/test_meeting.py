"""Sessions of a game meet on one replica: several replicas with real doors, one directory, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from brayx.actor.agent import Agent, Services, State
from brayx.actor.agent_actor import AgentActorFactory
from brayx.actor.config import ActorConfig, SessionConfig
from brayx.actor.games import Games
from brayx.actor.moving import Snapshot
from brayx.actor.serving import Runtime
from brayx.cluster.directory import Directory, DirectoryRecovering, Location
from brayx.cluster.draining import Draining
from brayx.cluster.replica import ActorReplica
from brayx.errors import (
    BrayxError,
    DeadlineExceeded,
    Overloaded,
    ServiceFull,
    SessionExists,
    SessionLost,
    SessionResumed,
    SessionUnknown,
    from_wire,
)
from brayx.gamecore.auth import Keys
from brayx.gamecore.protocol import WS_SUBPROTOCOL, StepKind, StepRequest, encode_numbered
from brayx.gamecore.v1 import gamecore_pb2 as pb
from deployments.echo import EchoActor
from tests.unit.actor.test_games import Teller, body
from tests.waiting import until_awaited as until


class Asked:
    """The directory with the interface of its Ray actor; keeps the calls, and claims as a test says."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.calls: list[str] = []
        self.told: dict[tuple[str, str], Location | None] = {}
        self.hold: asyncio.Event | None = None
        self.refused: Counter[str] = Counter()

    def __getattr__(self, method: str) -> Any:
        async def remote(*args: Any) -> Any:
            self.calls.append(method)
            if method == "release" and self.hold is not None:
                await self.hold.wait()
            if method == "claim" and args[:2] in self.told:
                return self.told.pop(args[:2])
            return getattr(self.directory, method)(*args)

        return SimpleNamespace(remote=remote)


class Replica(ActorReplica):
    """A replica without Serve around it: its table, its peers' door, and the way to others."""

    closed = True
    """Its door, to whoever is no peer."""

    def __init__(  # not Serve's, so no coroutine
        self, name: str, asked: Asked, share: str, max_sessions: int, keys: Keys | None = None
    ) -> None:
        self.games = Games() if share == "game" else None
        factory = AgentActorFactory({"agent": Teller}, {"mode": "serve"}, Services(), games=self.games)
        config = ActorConfig(agents=["agent"], share=share, actors_per_worker=max_sessions)  # type: ignore[arg-type]
        self.runtime = Runtime(factory if share == "game" else EchoActor)
        self._assemble(self.runtime, config, "application", asked, keys)
        self.asked = asked
        self._member.owner = name
        self._member._secret = "between us"
        self._member.lease.renew(math.inf)

    def __del__(self) -> None:
        """Not Serve's hook."""

    async def open(self) -> None:
        self.listener = self.doors.http(self.for_peers(closed=self.closed))
        await self.listener.open("127.0.0.1", 0)
        self._member.address = await self.listening()
        await self._member.ask("renew", self._member.owner, self._member.address, [])

    def use_keys(self, keys: Keys) -> None:
        self._keys = self._routing._keys = keys

    async def listening(self) -> str:
        return "http://{}:{}".format(*self.listener.address)

    async def close(self) -> None:
        await self.listener.close()
        await self._member.peers.close()
        await self.table.close()

    async def ask(self, kind: str, session: str, body: bytes = b"") -> bytes:
        try:
            async with asyncio.timeout(30):
                return await self.step(StepRequest(StepKind(kind), session, body))
        except BrayxError as error:
            self.asked.refused[error.code] += 1
            raise

    @property
    def sessions(self) -> list[str]:
        return sorted(self.table.sessions)


Open = Callable[..., Any]


def _refusals(replica: Replica) -> dict[str, int]:
    """Refusals that a replica has counted, by the error's code."""
    numbers = replica.runtime.recorder.summary()
    prefix = "requests_refused."
    return {name.removeprefix(prefix): int(count) for name, count in numbers.items() if name.startswith(prefix)}


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
async def replicas(asked: Asked) -> AsyncIterator[Open]:
    """Opens as many replicas as there are names; what they refuse is counted once, whichever of them found it."""
    made: list[Replica] = []
    async with contextlib.AsyncExitStack() as stack:

        async def opened(names: str, share: str = "game", max_sessions: int = 8) -> list[Replica]:
            made.extend(Replica(name, asked, share, max_sessions) for name in names)
            for replica in made:
                await replica.open()
                stack.push_async_callback(replica.close)
            asked.calls.clear()
            return made

        yield opened
    counted: Counter[str] = Counter()
    for replica in made:
        counted.update(_refusals(replica))
    assert counted == asked.refused


async def test_sessions_that_start_at_once_on_two_replicas_meet_on_one_and_talk(replicas: Open) -> None:
    a, b = await replicas("ab")
    for number in range(4):
        left, right = f"g{number}-agent-left", f"g{number}-agent-right"
        one, other = (a, b) if number % 2 else (b, a)
        assert set(await asyncio.gather(one.ask("start", left), other.ask("start", right))) == {b"Game Started"}
        for tick in range(3):
            ticks = one.ask("tick", left, body(tick)), other.ask("tick", right, body(10 + tick))
            replies = await asyncio.gather(*ticks)
            assert [json.loads(reply)["action"] for reply in replies] == [10 + tick, tick]
        await other.ask("stop", right)
        await one.ask("stop", left)
    assert a.sessions == b.sessions == []
    assert len(a.games) == len(b.games) == 0


async def test_either_replica_may_own_a_game(replicas: Open) -> None:
    a, b = await replicas("ab")
    await a.ask("start", "g-agent-left")
    await b.ask("start", "h-agent-left")
    await a.ask("start", "h-agent-right")
    await b.ask("start", "g-agent-right")
    assert (a.sessions, b.sessions) == (["g-agent-left", "g-agent-right"], ["h-agent-left", "h-agent-right"])
    with pytest.raises(SessionExists):
        await b.ask("start", "g-agent-left")


@pytest.mark.parametrize(("share", "session"), [("none", "g-agent-right"), ("game", "plain")])
async def test_other_sessions_stay_where_they_start_and_the_directory_is_asked_once(
    replicas: Open, asked: Asked, share: str, session: str
) -> None:
    a, b = await replicas("ab", share)
    await a.ask("start", "g-agent-left")
    asked.calls.clear()
    await b.ask("start", session)
    assert (a.sessions, b.sessions) == (["g-agent-left"], [session])
    assert asked.calls == ["claim"]


@pytest.mark.parametrize("full", [True, False])
async def test_a_game_whose_owner_takes_no_more_is_not_split(replicas: Open, asked: Asked, full: bool) -> None:
    a, b = await replicas("ab", max_sessions=1)
    await a.ask("start", "g-agent-left")
    a.table.is_shut = not full
    for replica in (a, b):
        with pytest.raises(ServiceFull, match="at most 1" if full else "is ending"):
            await replica.ask("start", "g-agent-right")
    assert asked.directory.locate("g-agent-right") is None
    assert b.sessions == []


async def test_a_first_start_that_is_refused_leaves_the_game_to_others(replicas: Open) -> None:
    a, b = await replicas("ab", max_sessions=1)
    await a.ask("start", "other")
    with pytest.raises(ServiceFull):
        await a.ask("start", "g-agent-left")
    await b.ask("start", "g-agent-left")
    assert b.sessions == ["g-agent-left"]


async def test_who_takes_over_from_a_dead_owner_has_the_game(replicas: Open, asked: Asked) -> None:
    a, b, c = await replicas("abc")
    await a.ask("start", "g-agent-left")
    await a.listener.close()
    await b.ask("start", "g-agent-right")
    await c.ask("start", "g-agent-left")
    assert (b.sessions, c.sessions) == (["g-agent-left", "g-agent-right"], [])
    assert "bury" in asked.calls


async def test_a_start_that_comes_to_where_the_game_is_no_more_finds_it(replicas: Open, asked: Asked) -> None:
    """The game ended on a and began on c, while the start was on its way from b to a."""
    a, b, c = await replicas("abc")
    await c.ask("start", "g-agent-left")
    stale = Location("a", asked.directory._address["a"])
    asked.told["g-agent-right", "b"] = stale
    await b.ask("start", "g-agent-right")
    assert (a.sessions, b.sessions, c.sessions) == ([], [], ["g-agent-left", "g-agent-right"])


async def test_a_game_lost_between_the_two_claims_is_told_to_try_again(replicas: Open, asked: Asked) -> None:
    a, c = await replicas("ac")
    await c.ask("start", "g-agent-left")
    asked.told["g-agent-right", "a"] = None
    with pytest.raises(Overloaded, match="try again"):
        await a.ask("start", "g-agent-right")
    assert a.sessions == []
    assert len(a.games) == 0


class TestPassedOn:
    async def test_the_directory_is_asked_once_for_the_ticks_of_a_session(self, replicas: Open, asked: Asked) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        asked.calls.clear()
        for number in range(5):
            assert await b.ask("tick", "s", body(number)) == body(number)
        assert asked.calls == ["locate"]
        await b.ask("stop", "s")
        assert a.sessions == []

    async def test_a_session_that_has_gone_to_a_third_replica_is_found_again(
        self, replicas: Open, asked: Asked
    ) -> None:
        a, b, c = await replicas("abc", share="none")
        await a.ask("start", "s")
        await b.ask("tick", "s", body(0))
        await a.ask("stop", "s")
        await c.ask("start", "s")
        asked.calls.clear()
        await b.ask("tick", "s", body(1))
        assert c.sessions == ["s"]
        assert asked.calls == ["locate"]

    @pytest.mark.parametrize("held", ["websocket", "stream"])
    async def test_a_takeover_is_reported_to_a_connection_of_another_replica(
        self, replicas: Open, held: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The session runs on one replica; two connections reach it through two others, one after the other."""
        monkeypatch.setattr(Replica, "closed", False)
        a, b, c = await replicas("abc", share="none")
        await a.ask("start", "s")
        goes_on = asyncio.Event()

        async def requests() -> AsyncIterator[pb.StepRequest]:
            yield pb.StepRequest(session="s", kind=pb.STEP_KIND_TICK, seq=0, body=b"0")
            await goes_on.wait()
            yield pb.StepRequest(kind=pb.STEP_KIND_TICK, seq=2, body=b"2")

        def websocket(replica: Replica) -> connect:
            url = "ws://{}:{}/session".format(*replica.listener.address)
            return connect(f"{url}?session=s", subprotocols=[Subprotocol(WS_SUBPROTOCOL)], proxy=None)

        async with websocket(b) as old, websocket(c) as new, asyncio.timeout(30):
            stream = b.Play(requests(), SimpleNamespace())
            if held == "stream":
                assert (await anext(stream)).body == b"0"
            else:
                await old.send(encode_numbered(0, b"0"))
                assert await old.recv() == b"R0"
            await new.send(encode_numbered(1, b"1"))
            assert await new.recv() == b"R1"
            if held == "stream":
                error = from_wire((await anext(stream)).error)
                assert isinstance(error, SessionLost)
                assert error.details["reason"] == "taken"
            else:
                with pytest.raises(ConnectionClosed) as closed:
                    await old.recv()
                assert closed.value.rcvd is not None
                assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4410, "session ended: taken")
            goes_on.set()
            await new.send(encode_numbered(2, b"mine"))
            assert await new.recv() == b"Rmine"
            await stream.aclose()
            assert a.sessions == ["s"]
        await until(lambda: not a.sessions)

    async def test_an_old_connection_of_another_replica_touches_nothing_if_the_report_is_lost(
        self, replicas: Open, asked: Asked, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = await replicas("ab", share="none")
        monkeypatch.setattr(a._routing, "notify", lambda holder, reason: None)  # as if the report were lost
        old = b.holder(lambda reason: None)
        await a.ask("start", "s")
        await b.step(StepRequest(StepKind.TICK, "s", b"0", seq=0, holder=old.name))
        assert await a.step(StepRequest(StepKind.TICK, "s", b"1", seq=1)) == b"1"
        for kind in (StepKind.TICK, StepKind.STOP):
            with pytest.raises(SessionLost) as lost:
                await b.step(StepRequest(kind, "s", b"2", holder=old.name, attached=True))
            assert lost.value.details["reason"] == "taken"
            asked.refused["session_lost"] += 1
        for for_good in (False, True):
            await b.disconnect("s", old.name, for_good=for_good)
        assert await a.step(StepRequest(StepKind.TICK, "s", b"2", seq=2)) == b"2"

    async def test_an_end_is_told_once_though_its_owner_is_known(self, replicas: Open) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        await b.ask("tick", "s", body(0))
        await a.table.disconnect("s")
        await until(lambda: not a.table._living)
        with pytest.raises(SessionLost) as lost:
            await b.ask("tick", "s", body(1))
        assert lost.value.details["reason"] == "disconnect"
        with pytest.raises(SessionUnknown):
            await b.ask("tick", "s", body(1))

    async def test_a_session_that_is_ending_is_not_brought_back_from_its_snapshot(
        self, replicas: Open, asked: Asked
    ) -> None:
        (a,) = await replicas("a", share="none")
        await a.ask("start", "s")
        asked.directory.keep("s", "a", Snapshot(1, 1, b"kept", b""))
        asked.hold = asyncio.Event()
        await a.table.disconnect("s")
        with pytest.raises(SessionLost) as lost:
            await a.ask("tick", "s", body(1))
        assert lost.value.details["reason"] == "disconnect"
        assert a.sessions == []
        asked.hold.set()

    async def test_a_broken_connection_elsewhere_does_not_use_up_what_its_client_is_to_be_told(
        self, replicas: Open, asked: Asked
    ) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        asked.directory.bury("a")
        await b.disconnect("s")
        with pytest.raises(SessionLost):
            await b.ask("tick", "s", body(1))

    async def test_an_owner_that_wakes_up_after_its_lease_has_its_clients_answered_by_its_successor(
        self, replicas: Open, asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("brayx.cluster.membership.RENEW_S", 60.0)
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        asked.directory.keep("s", "a", Snapshot(1, 1, b"kept", b""))
        a._member.lease.renew(time.monotonic() - 1.0)
        asked.directory.bury("a")
        with pytest.raises(SessionResumed):
            await b.ask("tick", "s", body(0))
        late = asyncio.ensure_future(a.ask("tick", "s", body(1)))
        done, _ = await asyncio.wait([late], timeout=0.1)
        assert not done, "it does not answer, and nobody has renewed its lease"
        renewal = asyncio.create_task(a._member.renew(a.table, a.listening))
        assert await late == body(1)
        renewal.cancel()
        assert (a.sessions, b.sessions) == ([], ["s"])
        assert asked.directory.locate("s") == Location("b", await b.listening())
        assert "lease was over for 1." in caplog.text
        assert "lost 1 of its sessions" in caplog.text

    async def test_an_owner_that_has_died_is_not_asked_again(self, replicas: Open, asked: Asked) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        await b.ask("tick", "s", body(0))
        await a.listener.close()
        await b._member.peers.close()
        with pytest.raises(SessionLost) as lost:
            await b.ask("tick", "s", body(1))
        assert lost.value.details["reason"] == "owner_died"
        assert not b._routing._known

    async def test_a_replica_out_of_descriptors_does_not_take_its_peers_for_dead(
        self, replicas: Open, asked: Asked
    ) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, allowed[1]))
        try:
            with pytest.raises(Overloaded, match="was not applied") as told:
                await b.ask("tick", "s", body(0))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
        assert told.value.details == {"layer": "peer", "maybe_applied": False}
        assert "bury" not in asked.calls
        assert await b.ask("tick", "s", body(1)) == body(1)

    @pytest.mark.parametrize("answer", [b"", b"not HTTP at all, and for long enough to tell"])
    async def test_an_owner_that_lives_and_does_not_answer_is_told_as_overload(
        self, replicas: Open, asked: Asked, answer: bytes
    ) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await reader.read(1):
                writer.write(answer)
                await writer.drain()
            writer.close()

        (b,) = await replicas("b", share="none")
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            asked.directory.renew("owner", "http://{}:{}".format(*server.sockets[0].getsockname()), ["s"])
            with pytest.raises(Overloaded, match="may have been applied") as told:
                await b.ask("tick", "s", body(0))
        assert told.value.details == {"layer": "peer", "maybe_applied": True}
        assert "bury" not in asked.calls

    async def test_an_owner_that_takes_connections_and_never_answers_is_told_as_overload(
        self, replicas: Open, asked: Asked
    ) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        (b,) = await replicas("b", share="none")
        b._routing._timeout_s = 1.01
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            asked.directory.renew("owner", "http://{}:{}".format(*server.sockets[0].getsockname()), ["s"])
            with pytest.raises(Overloaded, match=r"no answer within 1.01 s.*may have been applied") as told:
                await b.ask("tick", "s", body(0))
        assert told.value.details == {"layer": "peer", "maybe_applied": True}
        assert "bury" not in asked.calls

    async def test_an_owner_whom_no_connection_reaches_in_time_is_not_taken_for_dead(
        self, replicas: Open, asked: Asked
    ) -> None:
        """It may be stopped, and go on; whether it is dead its lease tells."""
        (b,) = await replicas("b", share="none")
        b._routing._timeout_s = 1.01
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(3):  # the kernel answers for the process until nothing more fits
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listening.getsockname())
            asked.directory.renew("owner", "http://{}:{}".format(*listening.getsockname()), ["s"])
            with pytest.raises(Overloaded, match="was not applied"):
                await b.ask("tick", "s", body(0))
        assert "bury" not in asked.calls

    async def test_an_owners_own_deadline_is_told_as_it_is(self, replicas: Open) -> None:
        a, b = await replicas("ab", share="none")
        a.table._shared.config = SessionConfig(tick_timeout_s=0.05)

        async def never(body: bytes) -> bytes:
            await asyncio.sleep(30)
            return body

        await a.ask("start", "s")
        session = a.table.get("s")
        assert session is not None
        session.actor.tick = never  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded, match="the actor took longer") as told:
            await b.ask("tick", "s", body(0))
        assert told.value.details == {"layer": "actor"}

    async def test_replicas_that_do_not_know_one_secret_do_not_serve_each_other(
        self, replicas: Open, asked: Asked
    ) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        b._member._secret = "another"
        with pytest.raises(Overloaded, match="secret") as told:
            await b.ask("tick", "s", body(0))
        assert told.value.details == {"layer": "peer", "maybe_applied": False}
        assert "bury" not in asked.calls
        await a._member.agree()
        await b._member.agree(fresh=True)
        assert await b.ask("tick", "s", body(1)) == body(1)
        asked.directory = Directory(recovery_s=60.0)  # as after a restart
        b._member._secret = "of a replica that starts just then"
        with pytest.raises(DirectoryRecovering):
            await b._member.agree(fresh=True)
        await a._member.agree()
        await b._member.agree(fresh=True)
        assert a._member.secret() == b._member.secret() == "between us"


class Mover(Agent):
    """Can be moved, and keeps its calls."""

    told: list[Any]

    async def on_tick(self, state: State) -> None:
        state.output = {}

    async def on_episode(self, episode: list[State], done: bool) -> None:
        self.told.append((len(episode), done, episode[-1].end))

    async def on_session_end(self, reason: str) -> None:
        self.told.append(reason)

    def snapshot(self) -> bytes:
        return b"all of it"

    def restore(self, snapshot: bytes) -> None:
        assert snapshot == b"all of it"


@pytest.mark.parametrize("status", ["DELETING", "none", "DEPLOYING", "away"])
async def test_sessions_of_a_replica_that_ends_are_moved_only_if_the_application_stays(
    replicas: Open, asked: Asked, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    def of_serve() -> Any:
        if status == "away":
            raise ConnectionError("no controller")
        return SimpleNamespace(applications={} if status == "none" else {"application": SimpleNamespace(status=status)})

    monkeypatch.setattr(serve, "status", of_serve)  # Serve is not there to ask
    told: list[Any] = []
    agents = {"agent": type("Mover", (Mover,), {"told": told})}
    (a,) = await replicas("a", "none")
    a.table._make_actor = AgentActorFactory(agents, {"mode": "serve"}, Services())
    await a.ask("start", "s")
    for _ in range(3):
        await a.ask("tick", "s")
    await Draining(a, a._routing.park, "application", 0.3).run()
    ended = {name: count for name, count in a.runtime.recorder.summary().items() if name.startswith("sessions_ended")}
    if status in ("DELETING", "none"):
        assert told == [(3, True, "drained"), "drained"], "nobody is left to go on with it"
        assert "park" not in asked.calls
        assert ended == {"sessions_ended.drained": 1}
    else:
        assert told == [(3, False, "")]
        assert isinstance(asked.directory.locate("s", "b"), Snapshot)
        assert ended == {"sessions_ended.moved": 1}


async def test_a_replica_counts_the_sessions_that_the_directory_forgot(
    replicas: Open, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brayx.cluster.membership.RENEW_S", 0.0)
    (a,) = await replicas("a")
    now = time.monotonic()
    asked.directory._clock = lambda: now
    asked.directory.claim("s", "a")
    asked.directory.park("s", "a", Snapshot(1, 1, None, b"", exact=True))
    now += 700.0
    renewal = asyncio.create_task(a._member.renew(a.table, a.listening))
    await until(lambda: "sessions_ended.lost" in a.runtime.recorder.summary())
    calls = len(asked.calls)
    await until(lambda: len(asked.calls) > calls + 4)
    renewal.cancel()
    assert a.runtime.recorder.summary()["sessions_ended.lost"] == 1
