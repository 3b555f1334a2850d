"""Sessions on every door while their service is hurt in every way: no reply is wrong, and no end is silent.

300 clients with numbered ticks play against three replicas of `tests.chaos.ledger`, each computing what its session's
state must be, while replicas and the ingress are killed, and the application is scaled and deployed anew.
``BRAYX_CHAOS_SECONDS`` and ``BRAYX_CHAOS_SESSIONS`` change how long, and how many.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from brayx.errors import (
    BrayxError,
    ConnectFailed,
    DeadlineExceeded,
    OutOfSequence,
    Overloaded,
    SessionResumed,
    SessionUnknown,
    TransportError,
)
from brayx.gamecore.client import AsyncClient
from brayx.ports import free_port
from tests.chaos.ledger import ROOT, Entry, Event, Wish, chained, events, pid_of, replace
from tests.end_to_end.jobs import Command, said_on_failure

pytestmark = pytest.mark.chaos

SECONDS = float(os.environ.get("BRAYX_CHAOS_SECONDS", "120"))
SESSIONS = int(os.environ.get("BRAYX_CHAOS_SESSIONS", "300"))
START_S = 120.0
REQUEST_S = 30.0
OUTAGE_S = 55.0
"""Less than the service keeps a session whose client is away."""
IDLE_S = 60.0
THINK_S = 0.6
"""Mean time between two ticks of a session: two cores serve and play."""


@dataclass
class Told:
    """A client was told that its session's replica is gone."""

    session: str
    at: float
    code: str
    run: str
    """Where its last reply came from."""


@dataclass
class Records:
    """What all players have seen.

    Attributes:
        wrong: what must not be.
        told: losses and resumptions, to be held against what was killed.
        stopped: sessions that were stopped, with the reply to it or not.
        doubtful: sessions whose start was not answered, so that nobody knows of them.
        counts: of what happened, for people.
    """

    wrong: list[str] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)


class Player:
    """Plays one session after the other over one door, and knows what each reply must say."""

    def __init__(self, door: str, url: str, records: Records, seed: int) -> None:
        self._door = door
        self._client = AsyncClient(url, timeout_s=REQUEST_S, reconnect_s=OUTAGE_S)
        self._records = records
        self._random = random.Random(seed)
        self._session = ""
        self._digests: list[str] = []
        self._run = ""

    async def play(self, over: asyncio.Event) -> None:
        await asyncio.sleep(self._random.uniform(0, THINK_S * 2))
        while not over.is_set():
            if await self._start():
                running = True
                for _ in range(self._random.randrange(5, 150)):
                    await asyncio.sleep(self._random.uniform(0, THINK_S * 2))
                    running = await self._tick()
                    if over.is_set() or not running:
                        break
                if running:
                    await self._stop()
            else:
                await asyncio.sleep(1.0)
        await self._client.close()

    async def _start(self) -> bool:
        self._session = uuid.uuid4().hex
        try:
            reply = await self._client.start(session=self._session)
        except (TransportError, Overloaded, DeadlineExceeded) as error:
            # There is no session yet, and a start is never sent twice.
            self._count(f"start {error.code}")
            if not isinstance(error, ConnectFailed | Overloaded):
                self._records.doubtful.add(self._session)
            return False
        except BrayxError as error:
            self._wrong(f"start: {error!r}")
            return False
        self._digests = [self._session]
        self._check(reply, "start")
        self._count("sessions")
        return True

    async def _tick(self) -> bool:
        """One tick; whether the session goes on."""
        body = f"{self._session} {self._random.getrandbits(64):x}".encode()
        try:
            reply = await self._client.tick(body)
        except BrayxError as error:
            return self._failed("tick", error)
        self._digests.append(chained(self._digests[-1], body))
        self._check(reply, "tick")
        self._count(f"ticks {self._door}")
        return True

    async def _stop(self) -> None:
        while True:
            try:
                reply = await self._client.stop()
                break
            except BrayxError as error:
                if not self._failed("stop", error):
                    return
        self._records.stopped.add(self._session)
        if reply:
            self._check(reply, "stop")

    def _failed(self, what: str, error: BrayxError) -> bool:
        """Judges an error; whether the session goes on after it."""
        told = Told(self._session, time.time(), error.code, self._run)
        ticks = len(self._digests) - 1
        if isinstance(error, SessionResumed | OutOfSequence):
            # The latter: the word of the resumption was lost with its connection, and the tick was sent again.
            tick = error.details.get("tick", error.details.get("expected"))
            if not isinstance(tick, int) or not 0 <= tick <= ticks:
                self._wrong(f"{what} {ticks}: {error!r} {error.details}")
                return False
            self._count(f"ticks taken back, {error.code}", ticks - tick)
            del self._digests[tick + 1 :]
        elif not isinstance(error, SessionUnknown) and error.details.get("reason") != "owner_died":
            self._wrong(f"{what} {ticks}: {error!r} {error.details}")
            return False
        self._records.told.append(told)
        self._count(f"told {error.code}")
        return isinstance(error, SessionResumed | OutOfSequence)

    def _check(self, reply: bytes, what: str) -> None:
        try:
            entry = Entry.decode(reply)
        except ValueError:
            self._wrong(f"{what}: the reply is {reply!r}")
            return
        expected = (self._session, len(self._digests) - 1, self._digests[-1])
        if (entry.session, entry.ticks, entry.digest) != expected:
            self._wrong(f"{what}: the reply is {entry}, expected {expected}")
        self._run = entry.run

    def _wrong(self, what: str) -> None:
        self._records.wrong.append(f"{time.time():.3f} {self._door} {self._session} (last run {self._run}): {what}")

    def _count(self, what: str, number: int = 1) -> None:
        self._records.counts[what] += number


class Chaos:
    """Hurts the service, one way after the other."""

    def __init__(self, command: Command, folder: Path, seed: int) -> None:
        self._command = command
        self._folder = folder
        self._random = random.Random(seed)
        self._wish = Wish(replicas=3)
        self.killed: set[int] = set()
        self.log: list[str] = []

    async def hurt(self, seconds: float) -> None:
        """All ways at least once, and again until the time is over."""
        ways: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("kill", self.kill),
            ("proxy", self.kill_proxy),
            ("scale 2", lambda: self.scale(2)),
            ("kill", self.kill),
            ("scale 4", lambda: self.scale(4)),
            ("kill", self.kill),
            ("scale 2", lambda: self.scale(2)),
            ("redeploy", self.redeploy),
            ("scale 3", lambda: self.scale(3)),
            ("redeploy and kill", self.redeploy_and_kill),
        ]
        began = time.monotonic()
        while True:
            for what, way in ways:
                await asyncio.sleep(seconds / 40)
                self._say(what)
                await way()
                self._say(f"{what}: done")
            if time.monotonic() - began >= seconds:
                return

    async def kill(self) -> None:
        """One replica, with -9; waits for Serve to have started another."""
        pid = self._random.choice(sorted(self._command.pids("ray::ServeReplica:")))
        before = self._command.pids("ray::ServeReplica:")
        self.killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        self._say(f"killed {pid} of {sorted(before)}")
        await self._until(lambda: len(self._command.pids("ray::ServeReplica:") - before) > 0, "another replica")

    async def kill_proxy(self) -> None:
        """HAProxy, with -9; waits for another."""
        before = {process.pid for process in self._command.processes() if process.name() == "haproxy"}
        for pid in before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._say(f"killed haproxy {sorted(before)}")

        def back() -> bool:
            return bool({p.pid for p in self._command.processes() if p.name() == "haproxy"} - before)

        await self._until(back, "another HAProxy")

    async def scale(self, replicas: int) -> None:
        await self._bring_about(Wish(replicas, self._wish.generation))

    async def redeploy(self) -> None:
        await self._bring_about(Wish(self._wish.replicas, self._wish.generation + 1))

    async def redeploy_and_kill(self) -> None:
        """A replica is killed while others are being replaced."""
        deploying = asyncio.create_task(
            self._bring_about(Wish(self._wish.replicas, self._wish.generation + 1)), name="deploying"
        )
        await asyncio.sleep(3.0)
        pid = self._random.choice(sorted(self._command.pids("ray::ServeReplica:")))
        self.killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        self._say(f"killed {pid}")
        await deploying

    async def _bring_about(self, wish: Wish) -> None:
        self._wish = wish
        replace(self._folder / "wish.json", asdict(wish))
        done = self._folder / "done.json"
        await self._until(lambda: json.loads(done.read_text()) == asdict(wish), str(wish))

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(self._command.until, condition, what, START_S)

    def _say(self, what: str) -> None:
        self.log.append(f"{time.time():.3f} {what}")
        print(self.log[-1], flush=True)


def settings(file: Path) -> dict[str, str | None]:
    """The variables that an env file sets."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def check_tidings(records: Records, seen: list[Event], killed: set[int]) -> list[str]:
    """Losses and resumptions that no kill explains: the session's replica, or one that took it over, must be dead."""
    runs = {event.run: event for event in seen if event.what == "begin"}
    of_session: dict[str, list[str]] = defaultdict(list)
    for run, event in runs.items():
        of_session[event.session].append(run)
    wrong = []
    for told in records.told:
        known = of_session[told.session]
        since = known[known.index(told.run) :] if told.run in known else known
        if not any(pid_of(run) in killed for run in since):
            wrong.append(f"{told} came, but of its runs {since} none was killed")
    return wrong


def check_ends(records: Records, seen: list[Event], killed: set[int]) -> tuple[list[str], Counter[str]]:
    """Sessions without exactly one reason, and how many ended with which."""
    begun = {event.run: event for event in seen if event.what == "begin"}
    continued = {event.before for event in begun.values()}
    ends: dict[str, list[Event]] = defaultdict(list)
    reasons: dict[str, list[str]] = defaultdict(list)
    for event in seen:
        if event.what == "end":
            ends[event.run].append(event)
            reasons[event.session].append(event.reason)
    wrong = []
    for run, event in begun.items():
        told = [end.reason for end in ends[run]]
        if len(told) > 1:
            wrong.append(f"run {run} of session {event.session} was told {told}")
        if not told and pid_of(run) not in killed and run not in continued and event.session not in records.doubtful:
            wrong.append(f"run {run} of session {event.session} never ended")
    for session, told in reasons.items():
        if len(told) != 1:
            wrong.append(f"session {session} ended with {told}")
    last = {event.session: run for run, event in begun.items()}
    wrong += [
        f"session {session} was stopped, and ended with {reasons.get(session)}"
        for session in records.stopped
        if reasons.get(session) != ["stop"] and pid_of(last[session]) not in killed
    ]
    return wrong, Counter(told[0] for told in reasons.values())


async def test_sessions_survive_kills_scaling_and_redeployment(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(6)]
    http, grpc, native, tcp, metrics, stats = ports
    environment = settings(ROOT / "docker" / "serve.env") | {
        "PYTHONPATH": str(ROOT),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    doors = {
        "http": f"http://127.0.0.1:{http}",
        "ws": f"ws://127.0.0.1:{http}",
        "native http": f"http://127.0.0.1:{native}",
        "native ws": f"ws://127.0.0.1:{native}",
        "tcp": f"tcp://127.0.0.1:{tcp}",
        "grpc": f"grpc://127.0.0.1:{grpc}",
    }
    replace(tmp_path / "wish.json", asdict(Wish(replicas=3)))
    seed = int(os.environ.get("BRAYX_CHAOS_SEED", str(random.getrandbits(32))))
    print(f"seed {seed}")
    words = ["python", "-m", "tests.chaos.ledger", str(tmp_path), *map(str, (http, grpc, native, tcp))]
    records = Records()
    with Command(words, tmp_path, environment) as command, said_on_failure(command):
        await asyncio.to_thread(command.until, (tmp_path / "done.json").exists, "three replicas ran")
        chaos = Chaos(command, tmp_path, seed)
        over = asyncio.Event()
        players = []
        for number in range(SESSIONS):
            door = list(doors)[number % len(doors)]
            players.append(asyncio.create_task(Player(door, doors[door], records, seed + number).play(over)))
        try:
            await asyncio.sleep(5.0)
            await chaos.hurt(SECONDS)
            await asyncio.sleep(5.0)
        finally:
            over.set()
            await asyncio.wait(players, timeout=OUTAGE_S + REQUEST_S)
        for player in players:
            assert player.done(), "a player still waits"
            player.result()
        folder = tmp_path / "events"
        deadline = time.monotonic() + IDLE_S + 15.0
        while True:
            seen = events(folder)
            silent, reasons = check_ends(records, seen, chaos.killed)
            if not silent or time.monotonic() > deadline:
                break
            await asyncio.sleep(2.0)
    wrong = [*records.wrong, *check_tidings(records, seen, chaos.killed), *silent]
    told = "\n".join([f"seed {seed}", *chaos.log, *(f"{what}: {n}" for what, n in sorted(records.counts.items()))])
    print(f"{told}\nended: {dict(reasons)}\ndoubtful starts: {len(records.doubtful)}")
    assert not wrong, f"{len(wrong)} violations, the first:\n" + "\n".join(wrong[:40])
    assert len({run.run.partition(".")[0] for run in seen}) >= 8, "few replicas ever had sessions"
    for door in doors:
        assert records.counts[f"ticks {door}"] > SESSIONS / len(doors) * 10, f"door {door} was hardly used"
    assert records.counts["told session_resumed"] > 0, "no kill hit a session"
