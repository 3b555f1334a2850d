"""A replica that hangs for longer than its lease, and wakes up: it answers for no session that another has by then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from brayx.cluster.directory import LEASE_S, RENEW_S
from brayx.errors import (
    DeadlineExceeded,
    OutOfSequence,
    SessionLost,
    SessionResumed,
    SessionUnknown,
    TransportError,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.http import AsyncHttpTransport
from brayx.ports import free_port
from tests.chaos.ledger import PLAIN, ROOT, Entry, Wish, events, pid_of, replace
from tests.end_to_end.jobs import Command, said_on_failure
from tests.waiting import until_awaited as until

pytestmark = pytest.mark.chaos

SESSIONS = 20
WAIT_S = 60.0


class Door:
    """The door of one replica for its peers, which it shares with no other; it is open on loopback."""

    def __init__(self, pid: int, shared: set[int]) -> None:
        self.pid = pid
        listening = {c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        self._ports = listening - shared
        self._url = ""

    async def find(self) -> None:
        """Finds the door among the ports of its process."""
        for port in self._ports:
            self._url = f"http://127.0.0.1:{port}"
            with contextlib.suppress(TransportError, DeadlineExceeded):
                try:
                    await self.ask(StepKind.TICK, "unknown", timeout_s=5.0)
                except SessionUnknown:
                    return
        raise AssertionError(f"{self.pid} has no door at {self._ports}")

    async def ask(
        self, kind: StepKind, session: str, body: bytes = b"", seq: int | None = None, timeout_s: float = WAIT_S
    ) -> Entry:
        """One request over a separate connection."""
        transport = AsyncHttpTransport(Endpoint.parse(self._url))
        try:
            return Entry.decode(await transport.step(StepRequest(kind, session, body, seq=seq), timeout_s))
        finally:
            await transport.close()


async def test_a_replica_paused_past_its_lease_answers_for_no_session_of_another(tmp_path: Path) -> None:
    http, grpc, native, tcp = ports = [free_port() for _ in range(4)]
    words = ["python", "-m", "tests.chaos.ledger", str(tmp_path), *map(str, (http, grpc, native, tcp))]
    replace(tmp_path / "wish.json", asdict(Wish(replicas=2)))
    with Command(words, tmp_path, {"PYTHONPATH": str(ROOT)}) as command, said_on_failure(command):
        await asyncio.to_thread(command.until, (tmp_path / "done.json").exists, "two replicas ran")
        victim, other = (Door(pid, set(ports)) for pid in sorted(command.pids("ray::ServeReplica:")))
        for door in (victim, other):
            await door.find()
        ids = [uuid.uuid4().hex for _ in range(SESSIONS)]
        plain = set(ids[1::2])
        for session in ids:
            began = await victim.ask(StepKind.START, session, PLAIN if session in plain else b"")
            assert pid_of(began.run) == victim.pid
            for seq in range(7):  # a snapshot after five
                await victim.ask(StepKind.TICK, session, b"%d" % seq, seq)

        os.kill(victim.pid, signal.SIGSTOP)
        # On a busy machine, its threads go on until one of them has seen the signal.
        await until(lambda: psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED, "it stops")
        # Its clients do not know, and continue to send; their requests wait for it.
        late = {session: asyncio.create_task(victim.ask(StepKind.TICK, session, b"7", 7)) for session in ids}
        await asyncio.sleep(LEASE_S + RENEW_S)
        errors: Counter[str] = Counter()
        for session in ids:
            with pytest.raises(SessionLost if session in plain else SessionResumed) as refused:
                await other.ask(StepKind.TICK, session, b"7", 7)
            errors[refused.value.code] += 1
            for seq in (8, 9) if session not in plain else ():
                assert pid_of((await other.ask(StepKind.TICK, session, b"after", seq)).run) == other.pid
        assert errors == {"session_lost": SESSIONS / 2, "session_resumed": SESSIONS / 2}

        os.kill(victim.pid, signal.SIGCONT)
        await asyncio.wait(late.values(), timeout=WAIT_S)
        for session, answer in late.items():
            error = answer.exception()
            assert error is not None, f"{answer.result()} of {session} came beside its successor's"
            assert isinstance(error, SessionLost | SessionUnknown if session in plain else OutOfSequence), error
        for session in set(ids) - plain:
            entry = await victim.ask(StepKind.TICK, session, b"last", 10)
            assert (pid_of(entry.run), entry.ticks) == (other.pid, 8), "the tick is passed on to the new owner"
            await victim.ask(StepKind.STOP, session)
        free = ids[1]
        assert pid_of((await victim.ask(StepKind.START, free)).run) == victim.pid, "the replica takes part again"
        await victim.ask(StepKind.STOP, free)

        folder = tmp_path / "events"
        ends: Counter[tuple[str, int, str]] = Counter()

        def ended() -> bool:
            ends.clear()
            ends.update((e.session, pid_of(e.run), e.reason) for e in events(folder) if e.what == "end")
            return sum(ends.values()) >= SESSIONS + SESSIONS // 2 + 1

        await until(ended, "every run's end")
        expected = {(session, victim.pid, "lost") for session in ids}
        expected |= {(session, other.pid, "stop") for session in set(ids) - plain} | {(free, victim.pid, "stop")}
        assert ends == Counter(expected), "each run gets its end once"
