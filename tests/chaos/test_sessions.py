"""Sessions on every door during all kinds of failures: no reply is wrong, and no session ends silently.

300 clients with numbered ticks play against three replicas of `tests.chaos.ledger`, and each computes its session's
expected state. Meanwhile replicas and the ingress are killed, and the application is scaled and deployed again. Some
sessions give no snapshots and end with their replica; some play games of two, which start on the same replica.
``BRAYX_CHAOS_SECONDS`` and ``BRAYX_CHAOS_SESSIONS`` change the duration and the number of sessions.
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
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from brayx.errors import (
    BrayxError,
    ConnectFailed,
    DeadlineExceeded,
    OutOfSequence,
    Overloaded,
    SessionLost,
    SessionResumed,
    SessionUnknown,
    TransportError,
)
from brayx.gamecore.client import AsyncClient
from brayx.gamecore.protocol import AGENT_MARK, StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.http import AsyncHttpTransport
from tests.chaos.ledger import PLAIN, Entry, Wish, at_free_ports, chained, events, replace
from tests.chaos.verdict import Game, Interruption, Records, check_ends, check_games, check_interruptions
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


class Player:
    """Plays one session after the other over one door, and knows what each reply must say.

    Args:
        door, url: where it plays.
        http: URL of an HTTP door, to ask for a session that is over.
        plain: its sessions give no snapshots.
    """

    def __init__(self, door: str, url: str, http: str, records: Records, seed: int, *, plain: bool) -> None:
        self._door = door
        self._http = http
        self._plain = plain
        self._client = AsyncClient(url, timeout_s=REQUEST_S, reconnect_s=OUTAGE_S)
        self._records = records
        self._random = random.Random(seed)
        self._session = ""
        self._digests: list[str] = []
        self._body = b""
        self._resumed = False
        self.run = ""

    async def play(self, over: asyncio.Event) -> None:
        """Plays until it is over."""
        await self.think()
        while not over.is_set():
            if await self.start(uuid.uuid4().hex):
                await self.go_on(over)
            else:
                await asyncio.sleep(1.0)
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def think(self) -> None:
        await asyncio.sleep(self._random.uniform(0, THINK_S * 2))

    async def go_on(self, over: asyncio.Event) -> None:
        """Plays a session that has been started to its end."""
        for _ in range(self._random.randrange(5, 150)):
            await self.think()
            if not await self._tick():
                return
            if over.is_set():
                break
        await self.stop()

    async def start(self, session: str) -> bool:
        """Starts a session; returns whether it runs."""
        self._session = session
        try:
            reply = await self._client.start(PLAIN if self._plain else b"", session=session)
        except (TransportError, Overloaded, DeadlineExceeded) as error:
            # There is no session yet, and a start is never sent twice.
            self._count(f"start {error.code}")
            if not isinstance(error, ConnectFailed | Overloaded):
                self._records.doubtful.add(self._session)
            return False
        except BrayxError as error:
            self._wrong(f"start: {error!r}")
            return False
        self._digests, self._resumed = [self._session], False
        self._check(reply, "start")
        self._count("sessions without snapshots" if self._plain else "sessions with snapshots")
        return True

    async def _tick(self) -> bool:
        """Sends one tick; returns whether the session goes on."""
        self._body = body = f"{self._session} {self._random.getrandbits(64):x}".encode()
        try:
            reply = await self._client.tick(body)
        except BrayxError as error:
            return await self._failed("tick", error)
        self._digests.append(chained(self._digests[-1], body))
        self._check(reply, "tick")
        self._count(f"ticks {self._door}")
        return True

    async def stop(self) -> None:
        """Stops the session."""
        while True:
            try:
                reply = await self._client.stop()
                break
            except BrayxError as error:
                if not await self._failed("stop", error):
                    return
        self._records.stopped[self._session] = time.time()
        if reply:
            self._check(reply, "stop")

    async def _failed(self, what: str, error: BrayxError) -> bool:
        """Checks an error; returns whether the session goes on after it."""
        report = Interruption(self._session, time.time(), error.code, str(error.details.get("reason", "")), self.run)
        ticks = len(self._digests) - 1
        if isinstance(error, SessionResumed | OutOfSequence) and not self._plain:
            # OutOfSequence: the report of the resumption was lost with its connection, and the tick was repeated.
            self._resumed = True
        elif isinstance(error, SessionLost) and report.reason in ("owner_died", *(["drained"] if self._plain else ())):
            await self._ask_again()
        elif not isinstance(error, SessionUnknown):
            self._wrong(f"{what} {ticks}: {error!r} {error.details}")
            return False
        self._records.interruptions.append(report)
        self._count(f"reported {error.code} {report.reason}".rstrip())
        return isinstance(error, SessionResumed | OutOfSequence)

    async def _ask_again(self) -> None:
        """A loss is reported to each numbered tick, to unnumbered ticks once; then the session is unknown."""
        transport = AsyncHttpTransport(Endpoint.parse(self._http))
        deadline, losses = time.monotonic() + OUTAGE_S, 0
        try:
            while time.monotonic() < deadline:
                try:
                    reply = await transport.step(StepRequest(StepKind.TICK, self._session, b"?"), REQUEST_S)
                    self._wrong(f"it was reported lost, and then answered {reply!r}")
                    return
                except SessionLost:
                    losses += 1
                except (TransportError, Overloaded, DeadlineExceeded):
                    await asyncio.sleep(0.5)
                except SessionUnknown:
                    if losses > 1:
                        self._wrong(f"it was reported lost {losses} times to ticks without a number")
                    return
                except BrayxError as error:
                    self._wrong(f"it was reported lost, and then {error!r} {error.details}")
                    return
            self._wrong(f"it was reported lost {losses} times, and never unknown")
        finally:
            await transport.close()

    def _check(self, reply: bytes, what: str) -> None:
        try:
            entry = Entry.decode(reply)
        except ValueError:
            self._wrong(f"{what}: the reply is {reply!r}")
            return
        if self._resumed:
            self._resumed = False
            self._take_back(entry.ticks, what)
        expected = (self._session, len(self._digests) - 1, self._digests[-1])
        if (entry.session, entry.ticks, entry.digest) != expected:
            self._wrong(f"{what}: the reply is {entry}, expected {expected}")
        self.run = entry.run

    def _take_back(self, ticks: int, what: str) -> None:
        """Takes back the ticks that the session has lost: after its ``what`` it has this number of them."""
        lost = len(self._digests) - 1 - ticks
        if lost > 0 and what == "tick":
            self._digests[ticks:] = [chained(self._digests[ticks - 1], self._body)]
        elif lost > 0:
            del self._digests[ticks + 1 :]
        self._count("ticks taken back", max(0, lost))

    def _wrong(self, what: str) -> None:
        self._records.wrong.append(f"{time.time():.3f} {self._door} {self._session} (last run {self.run}): {what}")

    def _count(self, what: str, number: int = 1) -> None:
        self._records.counts[what] += number


class Pair:
    """Two players that play one game after the other: their sessions start together, and then play separately."""

    def __init__(self, players: tuple[Player, Player], records: Records) -> None:
        self._players = players
        self._records = records

    async def play(self, over: asyncio.Event) -> None:
        """Plays until it is over."""
        await self._players[0].think()
        while not over.is_set():
            name = uuid.uuid4().hex
            starts = (player.start(f"{name}{AGENT_MARK}{number}") for number, player in enumerate(self._players))
            started = await asyncio.gather(*starts)
            running = [player for player, runs in zip(self._players, started, strict=True) if runs]
            if all(started):
                self._records.games.append(Game(name, time.time(), [player.run for player in running]))
                await asyncio.gather(*(player.go_on(over) for player in running))
            else:
                for player in running:
                    await player.stop()
                await asyncio.sleep(1.0)
        for player in self._players:
            await player.close()


class Chaos:
    """Harms the service in one way after another.

    Attributes:
        killed: time of the kill, by replica.
        hurt: time from which a replica was being killed, or shut down in order.
    """

    def __init__(self, command: Command, folder: Path, seed: int) -> None:
        self._command = command
        self._folder = folder
        self._random = random.Random(seed)
        self._wish = Wish(replicas=3)
        self.killed: dict[int, float] = {}
        self.hurt: dict[int, float] = {}
        self.log: list[str] = []

    async def run(self, seconds: float) -> None:
        """Uses each way at least once, and repeats them until the time is over."""
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
        """Kills one replica with -9, and waits for Serve to start another."""
        before = self._replicas()
        self._kill_one(before)
        await self._until(lambda: len(self._replicas() - before) > 0, "another replica")

    async def kill_proxy(self) -> None:
        """Kills HAProxy with -9, and waits for another."""
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
        self._kill_one(self._replicas())
        await deploying

    def _replicas(self) -> set[int]:
        return self._command.pids("ray::ServeReplica:")

    def _kill_one(self, pids: set[int]) -> None:
        pid = self._random.choice(sorted(pids))
        self.hurt.setdefault(pid, time.time())
        os.kill(pid, signal.SIGKILL)
        self.killed[pid] = time.time()
        self._say(f"killed {pid} of {sorted(pids)}")

    async def _bring_about(self, wish: Wish) -> None:
        self._wish = wish
        before, began = self._replicas(), time.time()
        replace(self._folder / "wish.json", asdict(wish))
        done = self._folder / "done.json"

        def is_done() -> bool:
            """Also those that end must have ended, or they would not be among `hurt`."""
            return json.loads(done.read_text()) == asdict(wish) and len(self._replicas()) == wish.replicas

        await self._until(is_done, str(wish))
        for pid in before - self._replicas():
            self.hurt.setdefault(pid, began)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(self._command.until, condition, what, START_S)

    def _say(self, what: str) -> None:
        self.log.append(f"{time.time():.3f} {what}")
        print(self.log[-1], flush=True)


def playing(doors: dict[str, str], records: Records, seed: int) -> list[Player | Pair]:
    """`SESSIONS` players on all doors. Of four, one gives no snapshots, and two play a game over different doors.

    In every other game the second session gives none.
    """
    names = list(doors)

    def player(number: int, place: int, *, plain: bool) -> Player:
        door = names[place % len(names)]
        return Player(door, doors[door], doors["http"], records, seed + number, plain=plain)

    made: list[Player | Pair] = []
    for number in range(0, SESSIONS, 4):
        place = number // 4
        made.append(player(number, place, plain=False))
        made.append(player(number + 1, place, plain=True))
        two = (player(number + 2, place, plain=False), player(number + 3, place + 1, plain=bool(place % 2)))
        made.append(Pair(two, records))
    return made


async def test_sessions_survive_kills_scaling_and_redeployment(tmp_path: Path) -> None:
    words, environment, doors = at_free_ports(tmp_path)
    replace(tmp_path / "wish.json", asdict(Wish(replicas=3)))
    seed = int(os.environ.get("BRAYX_CHAOS_SEED", str(random.getrandbits(32))))
    print(f"seed {seed}")
    records = Records()
    with Command(words, tmp_path, environment) as command, said_on_failure(command):
        await asyncio.to_thread(command.until, (tmp_path / "done.json").exists, "three replicas ran")
        chaos = Chaos(command, tmp_path, seed)
        over = asyncio.Event()
        players = [asyncio.create_task(player.play(over)) for player in playing(doors, records, seed)]
        try:
            await asyncio.sleep(5.0)
            await chaos.run(SECONDS)
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
    split = check_games(records, chaos.hurt)
    wrong = [*records.wrong, *check_interruptions(records, seen, chaos.killed, chaos.hurt), *split, *silent]
    summary = "\n".join([f"seed {seed}", *chaos.log, *(f"{what}: {n}" for what, n in sorted(records.counts.items()))])
    print(f"{summary}\nended: {dict(reasons)}\ndoubtful starts: {len(records.doubtful)}\ngames: {len(records.games)}")
    assert not wrong, f"{len(wrong)} violations, the first:\n" + "\n".join(wrong[:40])
    assert len({run.run.partition(".")[0] for run in seen}) >= 8, "few replicas ever had sessions"
    for door in doors:
        assert records.counts[f"ticks {door}"] > SESSIONS / len(doors) * 10, f"door {door} was hardly used"
    assert records.counts["reported session_resumed"] > 0, "no kill hit a session"
    assert records.counts["reported session_lost owner_died"] > 0, "no kill hit a session without snapshots"
    assert len(records.games) > SESSIONS / 10, "few games ever started"
