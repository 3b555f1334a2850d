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
from brayx.actor.ownership import SessionSnapshot
from brayx.actor.serving import Runtime
from brayx.cluster.directory import Directory, DirectoryRecovering, Location
from brayx.cluster.replica import ActorReplica, Draining
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
from tests.unit.actor.test_games import Exchanger, body
from tests.waiting import until_awaited as until


class DirectoryHandle:
    """The directory behind the interface of a Ray actor's handle. Records its calls; a test may set a claim's reply.

    Each method in ``late`` is called once without an answer.
    """

    def __init__(self) -> None:
        self.directory = Directory()
        self.calls: list[str] = []
        self.claims: dict[tuple[str, str], Location | None] = {}
        self.hold: asyncio.Event | None = None
        self.late: list[str] = []
        self.refused: Counter[str] = Counter()

    def __getattr__(self, method: str) -> Any:
        async def remote(*args: Any) -> Any:
            self.calls.append(method)
            if method == "release" and self.hold is not None:
                await self.hold.wait()
            if method == "claim" and args[:2] in self.claims:
                return self.claims.pop(args[:2])
            try:
                return getattr(self.directory, method)(*args)
            finally:
                if method in self.late:
                    self.late.remove(method)
                    await asyncio.sleep(math.inf)

        return SimpleNamespace(remote=remote)


class Replica(ActorReplica):
    """A replica without Serve: its table, the door for its peers, and its routing to others."""

    closed = True
    """Whether its door refuses clients that are not peers."""

    def __init__(  # not Serve's, so no coroutine
        self, name: str, handle: DirectoryHandle, share: str, max_sessions: int, keys: Keys | None = None
    ) -> None:
        self.games = Games() if share == "game" else None
        factory = AgentActorFactory({"agent": Exchanger}, {"mode": "serve"}, Services(), games=self.games)
        config = ActorConfig(agents=["agent"], share=share, actors_per_worker=max_sessions)  # type: ignore[arg-type]
        self.runtime = Runtime(factory if share == "game" else EchoActor)
        self._assemble(self.runtime, config, "application", handle, keys)
        self.handle = handle
        self._member.owner = name
        self._member._secret = "between us"
        self._member.lease.renew(math.inf)

    def __del__(self) -> None:
        """Not Serve's hook."""

    async def open(self) -> None:
        self.listener = self._peer_doors.listener(closed=self.closed)
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
            self.handle.refused[error.code] += 1
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
def handle() -> DirectoryHandle:
    return DirectoryHandle()


@pytest.fixture
async def replicas(handle: DirectoryHandle) -> AsyncIterator[Open]:
    """Opens a replica for each name. Checks at the end that each refusal was counted once, by one of them."""
    made: list[Replica] = []
    async with contextlib.AsyncExitStack() as stack:

        async def opened(names: str, share: str = "game", max_sessions: int = 8) -> list[Replica]:
            made.extend(Replica(name, handle, share, max_sessions) for name in names)
            for replica in made:
                await replica.open()
                stack.push_async_callback(replica.close)
            handle.calls.clear()
            return made

        yield opened
    counted: Counter[str] = Counter()
    for replica in made:
        counted.update(_refusals(replica))
    assert counted == handle.refused


async def test_sessions_that_start_together_on_two_replicas_meet_on_one_and_talk(replicas: Open) -> None:
    a, b = await replicas("ab")
    for number in range(4):
        left, right = f"g{number}-agent-left", f"g{number}-agent-right"
        first, second = (a, b) if number % 2 else (b, a)
        assert set(await asyncio.gather(first.ask("start", left), second.ask("start", right))) == {b"Game Started"}
        for tick in range(3):
            ticks = first.ask("tick", left, body(tick)), second.ask("tick", right, body(10 + tick))
            replies = await asyncio.gather(*ticks)
            assert [json.loads(reply)["action"] for reply in replies] == [10 + tick, tick]
        await second.ask("stop", right)
        await first.ask("stop", left)
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
async def test_other_sessions_stay_where_they_start_with_one_call_to_the_directory(
    replicas: Open, handle: DirectoryHandle, share: str, session: str
) -> None:
    a, b = await replicas("ab", share)
    await a.ask("start", "g-agent-left")
    handle.calls.clear()
    await b.ask("start", session)
    assert (a.sessions, b.sessions) == (["g-agent-left"], [session])
    assert handle.calls == ["claim"]


@pytest.mark.parametrize("full", [True, False])
async def test_a_game_whose_owner_takes_no_more_is_not_split(
    replicas: Open, handle: DirectoryHandle, full: bool
) -> None:
    a, b = await replicas("ab", max_sessions=1)
    await a.ask("start", "g-agent-left")
    a.table.is_shut = not full
    for replica in (a, b):
        with pytest.raises(ServiceFull, match="at most 1" if full else "is ending"):
            await replica.ask("start", "g-agent-right")
    assert handle.directory.locate("g-agent-right") is None
    assert b.sessions == []


async def test_a_first_start_that_is_refused_leaves_the_game_to_others(replicas: Open) -> None:
    a, b = await replicas("ab", max_sessions=1)
    await a.ask("start", "other")
    with pytest.raises(ServiceFull):
        await a.ask("start", "g-agent-left")
    await b.ask("start", "g-agent-left")
    assert b.sessions == ["g-agent-left"]


async def test_a_replica_that_takes_over_from_a_dead_owner_has_the_game(
    replicas: Open, handle: DirectoryHandle
) -> None:
    a, b, c = await replicas("abc")
    await a.ask("start", "g-agent-left")
    await a.listener.close()
    await b.ask("start", "g-agent-right")
    await c.ask("start", "g-agent-left")
    assert (b.sessions, c.sessions) == (["g-agent-left", "g-agent-right"], [])
    assert "bury" in handle.calls


async def test_a_start_sent_to_the_old_owner_of_a_game_finds_the_new_one(
    replicas: Open, handle: DirectoryHandle
) -> None:
    """The game ended on a and started on c while the start was on its way from b to a."""
    a, b, c = await replicas("abc")
    await c.ask("start", "g-agent-left")
    stale = Location("a", handle.directory._address["a"])
    handle.claims["g-agent-right", "b"] = stale
    await b.ask("start", "g-agent-right")
    assert (a.sessions, b.sessions, c.sessions) == ([], [], ["g-agent-left", "g-agent-right"])


async def test_a_start_whose_game_is_lost_between_the_two_claims_must_be_retried(
    replicas: Open, handle: DirectoryHandle
) -> None:
    a, c = await replicas("ac")
    await c.ask("start", "g-agent-left")
    handle.claims["g-agent-right", "a"] = None
    with pytest.raises(Overloaded, match="try again"):
        await a.ask("start", "g-agent-right")
    assert a.sessions == []
    assert len(a.games) == 0


class TestPassedOn:
    async def test_the_directory_is_called_once_for_all_ticks_of_a_session(
        self, replicas: Open, handle: DirectoryHandle
    ) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        handle.calls.clear()
        for number in range(5):
            assert await b.ask("tick", "s", body(number)) == body(number)
        assert handle.calls == ["locate"]
        await b.ask("stop", "s")
        assert a.sessions == []

    async def test_a_session_that_has_gone_to_a_third_replica_is_found_again(
        self, replicas: Open, handle: DirectoryHandle
    ) -> None:
        a, b, c = await replicas("abc", share="none")
        await a.ask("start", "s")
        await b.ask("tick", "s", body(0))
        await a.ask("stop", "s")
        await c.ask("start", "s")
        handle.calls.clear()
        await b.ask("tick", "s", body(1))
        assert c.sessions == ["s"]
        assert handle.calls == ["locate"] * 2, "by the former owner, and then by the replica that the client has called"

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
        self, replicas: Open, handle: DirectoryHandle, monkeypatch: pytest.MonkeyPatch
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
            handle.refused["session_lost"] += 1
        for for_good in (False, True):
            await b.disconnect("s", old.name, for_good=for_good)
        assert await a.step(StepRequest(StepKind.TICK, "s", b"2", seq=2)) == b"2"

    async def test_an_end_is_reported_once_although_the_owner_is_known(self, replicas: Open) -> None:
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
        self, replicas: Open, handle: DirectoryHandle
    ) -> None:
        (a,) = await replicas("a", share="none")
        await a.ask("start", "s")
        handle.directory.keep("s", "a", SessionSnapshot(1, 1, b"kept", b""))
        handle.hold = asyncio.Event()
        await a.table.disconnect("s")
        with pytest.raises(SessionLost) as lost:
            await a.ask("tick", "s", body(1))
        assert lost.value.details["reason"] == "disconnect"
        assert a.sessions == []
        handle.hold.set()

    async def test_a_disconnect_at_another_replica_does_not_use_up_the_report_of_a_loss(
        self, replicas: Open, handle: DirectoryHandle
    ) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        handle.directory.bury("a")
        await b.disconnect("s")
        with pytest.raises(SessionLost):
            await b.ask("tick", "s", body(1))

    async def test_an_owner_that_wakes_up_after_its_lease_passes_its_clients_to_its_successor(
        self, replicas: Open, handle: DirectoryHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("brayx.cluster.membership.RENEW_S", 60.0)
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        handle.directory.keep("s", "a", SessionSnapshot(1, 1, b"kept", b""))
        a._member.lease.renew(time.monotonic() - 1.0)
        handle.directory.bury("a")
        with pytest.raises(SessionResumed):
            await b.ask("tick", "s", body(0))
        late = asyncio.ensure_future(a.ask("tick", "s", body(1)))
        done, _ = await asyncio.wait([late], timeout=0.1)
        assert not done, "it does not answer before its lease is renewed"
        renewal = asyncio.create_task(a._member.renew(a.table, a.listening))
        assert await late == body(1)
        renewal.cancel()
        assert (a.sessions, b.sessions) == ([], ["s"])
        assert handle.directory.locate("s") == Location("b", await b.listening())
        assert "lease was over for 1." in caplog.text
        assert "lost 1 of its sessions" in caplog.text

    async def test_a_dead_owner_is_not_called_again(self, replicas: Open, handle: DirectoryHandle) -> None:
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
        self, replicas: Open, handle: DirectoryHandle
    ) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, allowed[1]))
        try:
            with pytest.raises(Overloaded, match="was not applied") as raised:
                await b.ask("tick", "s", body(0))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
        assert raised.value.details == {"layer": "peer", "maybe_applied": False}
        assert "bury" not in handle.calls
        assert await b.ask("tick", "s", body(1)) == body(1)

    @pytest.mark.parametrize(
        ("answer", "said"),
        [(b"", ""), (b"not HTTP at all, and for long enough to tell", ""), (None, r"1\.01 s")],
        ids=["closes", "no HTTP", "never answers"],
    )
    async def test_a_live_owner_that_does_not_answer_is_reported_as_overload(
        self, replicas: Open, handle: DirectoryHandle, answer: bytes | None, said: str
    ) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if answer is None:
                await reader.read()
            elif await reader.read(1):
                writer.write(answer)
                await writer.drain()
            writer.close()

        (b,) = await replicas("b", share="none")
        b._routing._timeout_s = 1.01 if answer is None else b._routing._timeout_s
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            handle.directory.renew("owner", "http://{}:{}".format(*server.sockets[0].getsockname()), ["s"])
            with pytest.raises(Overloaded, match=said) as raised:
                await b.ask("tick", "s", body(0))
        assert raised.value.details == {"layer": "peer", "maybe_applied": True}
        assert "bury" not in handle.calls

    async def test_an_owner_that_accepts_no_connection_in_time_is_not_taken_for_dead(
        self, replicas: Open, handle: DirectoryHandle
    ) -> None:
        """It may be paused and continue later; only its lease tells whether it is dead."""
        (b,) = await replicas("b", share="none")
        b._routing._timeout_s = 1.01
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(3):  # the kernel answers for the process until nothing more fits
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listening.getsockname())
            handle.directory.renew("owner", "http://{}:{}".format(*listening.getsockname()), ["s"])
            with pytest.raises(Overloaded, match="was not applied"):
                await b.ask("tick", "s", body(0))
        assert "bury" not in handle.calls

    async def test_an_owners_own_deadline_is_passed_on_unchanged(self, replicas: Open) -> None:
        a, b = await replicas("ab", share="none")
        a.table._services.config = SessionConfig(tick_timeout_s=0.05)

        async def never(body: bytes) -> bytes:
            await asyncio.sleep(30)
            return body

        await a.ask("start", "s")
        session = a.table.get("s")
        assert session is not None
        session.actor.tick = never  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded, match="the actor took longer") as raised:
            await b.ask("tick", "s", body(0))
        assert raised.value.details == {"layer": "actor"}

    async def test_replicas_that_do_not_know_one_secret_do_not_serve_each_other(
        self, replicas: Open, handle: DirectoryHandle
    ) -> None:
        a, b = await replicas("ab", share="none")
        await a.ask("start", "s")
        b._member._secret = "another"
        with pytest.raises(Overloaded, match="secret") as raised:
            await b.ask("tick", "s", body(0))
        assert raised.value.details == {"layer": "peer", "maybe_applied": False}
        assert "bury" not in handle.calls
        await a._member.agree()
        await b._member.agree(fresh=True)
        assert await b.ask("tick", "s", body(1)) == body(1)
        handle.directory = Directory(recovery_s=60.0)  # as after a restart
        b._member._secret = "of a replica that starts just then"
        with pytest.raises(DirectoryRecovering):
            await b._member.agree(fresh=True)
        await a._member.agree()
        await b._member.agree(fresh=True)
        assert a._member.secret() == b._member.secret() == "between us"


class Mover(Agent):
    """Can be moved, and records its calls."""

    calls: list[Any]

    async def on_tick(self, state: State) -> None:
        state.output = {}

    async def on_episode(self, episode: list[State], done: bool) -> None:
        self.calls.append((len(episode), done, episode[-1].end))

    async def on_session_end(self, reason: str) -> None:
        self.calls.append(reason)

    def snapshot(self) -> bytes:
        return b"all of it"

    def restore(self, snapshot: bytes) -> None:
        assert snapshot == b"all of it"


@pytest.mark.parametrize("status", ["DELETING", "none", "DEPLOYING", "away"])
async def test_sessions_of_a_replica_that_ends_are_moved_only_if_the_application_stays(
    replicas: Open, handle: DirectoryHandle, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    def of_serve() -> Any:
        if status == "away":
            raise ConnectionError("no controller")
        return SimpleNamespace(applications={} if status == "none" else {"application": SimpleNamespace(status=status)})

    monkeypatch.setattr(serve, "status", of_serve)  # Serve is not there to ask
    calls: list[Any] = []
    agents = {"agent": type("Mover", (Mover,), {"calls": calls})}
    (a,) = await replicas("a", "none")
    a.table._make_actor = AgentActorFactory(agents, {"mode": "serve"}, Services())
    await a.ask("start", "s")
    for _ in range(3):
        await a.ask("tick", "s")
    await Draining(a, a._routing.park, "application", 0.3).run()
    ended = {name: count for name, count in a.runtime.recorder.summary().items() if name.startswith("sessions_ended")}
    if status in ("DELETING", "none"):
        assert calls == [(3, True, "drained"), "drained"], "no replica is left to continue the session"
        assert "park" not in handle.calls
        assert ended == {"sessions_ended.drained": 1}
    else:
        assert calls == [(3, False, "")]
        assert isinstance(handle.directory.locate("s", "b"), SessionSnapshot)
        assert ended == {"sessions_ended.moved": 1}


async def test_a_replica_that_ends_has_another_answer_for_the_sessions_that_it_has_moved(
    replicas: Open, handle: DirectoryHandle
) -> None:
    a, b, c = await replicas("abc", "none", 16)
    games = [f"g{number}" for number in range(8)]
    sessions = [f"{game}-agent-{side}" for game in games for side in ("left", "right")]
    for session in sessions:
        await a.ask("start", session)
    a.table.is_shut = True
    a.table.move(a._routing.park)
    await until(lambda: not a.sessions)
    c.table.is_shut = True  # it ends, too, and takes none
    for session in sessions:
        with contextlib.suppress(Overloaded):  # it had c answer; a client tries again
            assert await a.ask("tick", session, body(1)) == body(1)
    await c.listener.close()
    handle.directory.leave("c")
    for session in sessions:
        assert await a.ask("tick", session, body(2)) == body(2)
    assert b.sessions == sorted(sessions)


async def test_sessions_are_moved_a_few_at_a_time(replicas: Open) -> None:
    (a,) = await replicas("a", "none")
    for number in range(8):
        await a.ask("start", f"s{number}")
    for left in (5, 2, 0, 0):
        a.table.move(a._routing.park, 3)
        await until(lambda left=left: len(a.sessions) == left)


@pytest.mark.parametrize("late", ["locate", "acknowledge"])
async def test_a_loss_reaches_the_client_once_if_an_answer_of_the_directory_comes_too_late(
    replicas: Open, handle: DirectoryHandle, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    monkeypatch.setattr("brayx.cluster.membership._ANSWER_S", 0.2)
    (a,) = await replicas("a", "none")
    handle.directory.claim("s", "dead")
    handle.late = [late]
    if late == "locate":
        with pytest.raises(Overloaded, match="did not answer locate"):
            await a.ask("tick", "s")
    with pytest.raises(SessionLost) as lost:
        await a.ask("tick", "s")
    assert lost.value.details["reason"] == "owner_died"
    with pytest.raises(SessionUnknown):
        await a.ask("tick", "s")


async def test_a_replica_counts_the_sessions_that_the_directory_forgot(
    replicas: Open, handle: DirectoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brayx.cluster.membership.RENEW_S", 0.0)
    (a,) = await replicas("a")
    now = time.monotonic()
    handle.directory._clock = lambda: now
    handle.directory.claim("s", "a")
    handle.directory.park("s", "a", SessionSnapshot(1, 1, None, b"", exact=True))
    now += 700.0
    renewal = asyncio.create_task(a._member.renew(a.table, a.listening))
    await until(lambda: "sessions_ended.lost" in a.runtime.recorder.summary())
    count = len(handle.calls)
    await until(lambda: len(handle.calls) > count + 4)
    renewal.cancel()
    assert a.runtime.recorder.summary()["sessions_ended.lost"] == 1
