"""Players of `tests.chaos.ledger` who know the doors of several machines, and what each reply must say.

A player's session starts at its first door and is played at its own doors in turn, so that replicas pass on the ticks
of some. If a door fails, the player repeats the tick at the next door of all. Knows nothing of machines.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from brayx.errors import (
    BrayxError,
    DeadlineExceeded,
    OutOfSequence,
    Overloaded,
    SessionLost,
    SessionResumed,
    SessionUnknown,
    TransportError,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.http import AsyncHttpTransport
from tests.chaos.ledger import PLAIN, Entry, chained, pid_of

TRY_S = 3.0
"""A door that does not answer within this time is left for the next one."""
OUTAGE_S = 240.0
"""A tick that nobody answers for this long is a failure."""
_PAUSE_S = 0.1


@dataclass(frozen=True)
class Played:
    """A tick that was answered.

    Attributes:
        at: when it was sent, by `time.monotonic`.
        took_s: until its answer, with all repetitions.
        tries: how often it was sent.
        pid: process that applied it.
    """

    at: float
    took_s: float
    tries: int
    pid: int


class Player:
    """One player, who plays one session after the other.

    Args:
        doors: URLs of the doors that it uses in turn; its sessions start at the first.
        others: doors that it uses if one of its own fails.
        think_s: mean time between two ticks.
        plain: its sessions give no snapshots.

    Attributes:
        played: its answered ticks.
        interruptions: reports that its session was lost or resumed, with their time and the process that ran it.
        wrong: replies that are not allowed.
    """

    def __init__(
        self, doors: Sequence[str], others: Sequence[str], think_s: float, seed: int, *, plain: bool = False
    ) -> None:
        self.doors = tuple(doors)
        self.plain = plain
        self.played: list[Played] = []
        self.interruptions: list[tuple[float, BrayxError, int]] = []
        self.wrong: list[str] = []
        self._others = [door for door in others if door not in doors]
        self._think_s = think_s
        self._random = random.Random(seed)
        self._transports: dict[str, AsyncHttpTransport] = {}
        self._session = ""
        self._digests: list[str] = []
        self._number = self._failed_starts = 0
        self._resumed = False

    @property
    def pid(self) -> int:
        """The process that applied its last tick; 0: none did yet."""
        return self.played[-1].pid if self.played else 0

    async def play(self, over: asyncio.Event) -> None:
        """Plays until it is over."""
        try:
            while not over.is_set() and not self.wrong:
                if self._session and await self._tick():
                    await asyncio.sleep(self._random.uniform(0, 2 * self._think_s))
                elif not self._session:
                    await self._start()
            if self._session and not self.wrong:
                await self._send(StepKind.STOP, b"", None, itertools.cycle(self.doors))
        finally:
            for transport in self._transports.values():
                await transport.close()

    async def _start(self) -> None:
        """Starts a session at the first door, or at any if that fails.

        A start is not repeated, since it may have been applied: the next one has another id.
        """
        self._session = uuid.uuid4().hex
        self._digests, self._number, self._resumed = [self._session], 0, False
        door = self.doors[0] if self._failed_starts % 2 == 0 else self._random.choice([*self.doors, *self._others])
        try:
            await self._step(door, StepKind.START, PLAIN if self.plain else b"", 0)
            self._failed_starts = 0
        except (TransportError, DeadlineExceeded, Overloaded):
            self._session = ""
            self._failed_starts += 1
            await asyncio.sleep(_PAUSE_S)

    async def _tick(self) -> bool:
        """Plays one tick; returns whether the session goes on."""
        body = f"{self._session} {self._random.getrandbits(64):x}".encode()
        first = len(self.played) % len(self.doors)
        doors = itertools.cycle([*self.doors[first:], *self.doors[:first], *self._others])
        reply = await self._send(StepKind.TICK, body, self._number, doors)
        if reply is not None:
            self._check(reply, body)
            self._number += 1
        return bool(self._session) and not self.wrong

    def _check(self, reply: bytes, body: bytes) -> None:
        """Checks a tick's reply. After a resumption the session may have lost ticks, but the others are in order."""
        entry = Entry.decode(reply)
        if self._resumed and 0 < entry.ticks < len(self._digests):
            del self._digests[entry.ticks :]
        self._resumed = False
        self._digests.append(chained(self._digests[-1], body))
        expected = (self._session, len(self._digests) - 1, self._digests[-1])
        if (entry.session, entry.ticks, entry.digest) != expected:
            self.wrong.append(f"tick {self._number} was answered {entry}, expected {expected}")

    async def _send(self, kind: StepKind, body: bytes, number: int | None, doors: itertools.cycle[str]) -> bytes | None:
        """Sends a request until a door answers it; None: the session was resumed, or is over."""
        began = time.monotonic()
        tries = 0
        while time.monotonic() - began < OUTAGE_S:
            tries += 1
            try:
                reply = await self._step(next(doors), kind, body, number)
            except (TransportError, Overloaded, DeadlineExceeded):
                await asyncio.sleep(_PAUSE_S)
            except (SessionResumed, OutOfSequence) as error:
                self._resume(error)
                return None
            except (SessionLost, SessionUnknown) as error:
                # Unknown: the report of its loss was an answer that did not arrive. A stop may be a repeat.
                if kind is not StepKind.STOP:
                    self.interruptions.append((time.monotonic(), error, self.pid))
                self._session = ""
                return None
            except BrayxError as error:
                self.wrong.append(f"the {kind.value} {number} of {self._session} was answered {error!r}")
                return None
            else:
                if kind is StepKind.TICK:
                    entry = Entry.decode(reply)
                    self.played.append(Played(began, time.monotonic() - began, tries, pid_of(entry.run)))
                return reply
        self.wrong.append(f"nobody answered the {kind.value} {number} of {self._session} within {OUTAGE_S:g} s")
        return None

    async def _step(self, door: str, kind: StepKind, body: bytes, number: int | None) -> bytes:
        transport = self._transports.get(door)
        if transport is None:
            transport = self._transports[door] = AsyncHttpTransport(Endpoint.parse(door))
        return await transport.step(StepRequest(kind, self._session, body, seq=number), TRY_S)

    def _resume(self, error: SessionResumed | OutOfSequence) -> None:
        """Goes on with the number that comes next."""
        self.interruptions.append((time.monotonic(), error, self.pid))
        self._number = int(str(error.details["tick" if isinstance(error, SessionResumed) else "expected"]))
        self._resumed = True


def percentile(players: Sequence[Player], share: float, since: float, until: float = float("inf")) -> float:
    """Latency that this share of the players' ticks between two moments did not exceed, in seconds."""
    times = sorted(tick.took_s for player in players for tick in player.played if since <= tick.at < until)
    return times[min(len(times) - 1, int(share * len(times)))]
