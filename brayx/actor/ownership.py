"""Ownership of sessions: a session table's interface to the processes that share its sessions.

`Ownership` itself is for a process that owns all its sessions. The cluster's replicas share theirs through a session
directory, as long as they hold a `Lease`. `Holders` notifies the connections that hold sessions. Pure asyncio; knows
nothing of Ray, nor of doors.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from brayx.actor.ends import over
from brayx.actor.service import Holder, Reply
from brayx.gamecore.protocol import StepRequest
from brayx.logs import limited

logger = limited(__name__)

HOLDER_MARK = "#"
"""Separates the process's address from the rest of a connection's name."""


@dataclass(frozen=True)
class SessionSnapshot:
    """State from which a session continues in another process.

    Attributes:
        tick: number of answered ticks, which is the number of the next one if all are numbered.
        seq: number of the next numbered tick.
        kept: reply to the previous numbered tick; a repeat gets it.
        actor: result of `Actor.snapshot`.
        exact: it is up to date, because the session was moved, not lost.
        announced: the client's start said that it numbers its ticks.
        holder: name of the connection that held it; empty: none did. None: unknown, since it may have been taken over
            after the snapshot.
    """

    tick: int
    seq: int
    kept: bytes | None
    actor: bytes
    exact: bool = False
    announced: bool = False
    holder: str | None = None


class Position(NamedTuple):
    """Progress of a session after a tick; fields as in `SessionSnapshot`."""

    tick: int
    seq: int
    kept: bytes | None


Park = Callable[[str, SessionSnapshot], Awaitable[None]]
"""Stores a session's exact snapshot, and its id, for the process that continues it."""


class Lease:
    """The time until which a process may answer for its sessions; later another process may have taken them over.

    A suspended or starved process does not notice the time that passed. So it checks the clock before every answer, and
    waits for the renewal if it is late.

    Args:
        ends: seconds of `time.monotonic`; infinite for a table without peers.

    Attributes:
        ends: the end as given or renewed.
        wanted: a request waits for the renewal; the renewal clears it.
    """

    __slots__ = ("_renewed", "ends", "wanted")

    def __init__(self, ends: float = math.inf) -> None:
        self.ends = ends
        self.wanted = asyncio.Event()
        self._renewed = asyncio.Event()

    def renew(self, ends: float) -> None:
        """Extends the lease, and wakes waiting requests."""
        self.ends = ends
        renewed, self._renewed = self._renewed, asyncio.Event()
        renewed.set()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, by the real clock, as other processes see it."""
        return time.monotonic() > self.ends

    async def held(self) -> None:
        """Waits until the lease is held; the caller has the deadline."""
        while self.is_over:
            self.wanted.set()
            await self._renewed.wait()


class Ownership:
    """One process owns every session.

    Args:
        lease: no request is answered after it has expired.

    Attributes:
        shared: other processes share the sessions; they keep snapshots, and remember why a session ended.
    """

    shared = False

    def __init__(self, lease: Lease | None = None) -> None:
        self.lease = lease if lease is not None else Lease()

    async def claim(self, session: str) -> None:
        """Claims a session's id for this process.

        Raises:
            BrayxError: another process has it, or the claim could not be made.
        """

    async def release(self, session: str, reason: str) -> None:
        """Frees the id of a session that ended for ``reason``, which later requests get."""

    def keep(self, session: str, snapshot: SessionSnapshot) -> None:
        """Keeps a snapshot, from which another process can resume the session."""

    def hand_on(self, request: StepRequest, reply: Reply) -> None:
        """Forwards a tick or stop to the process that has taken the session over."""
        reply(over(request.session, request.kind.value, "lost"))

    def notify(self, holder: str, reason: str) -> None:
        """Notifies a connection of another process that it lost its session."""


class Holders:
    """The connections of this process that may hold a session.

    Args:
        ownership: reaches the connections of other processes.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._here: weakref.WeakValueDictionary[str, Holder] = weakref.WeakValueDictionary()

    def add(self, on_end: Callable[[str], None], address: str = "") -> Holder:
        """Registers a connection; its name starts with ``address``, the address of this process."""
        holder = Holder(f"{address}{HOLDER_MARK}{uuid.uuid4().hex}", on_end)
        self._here[holder.name] = holder
        return holder

    def end(self, holder: str, reason: str) -> bool:
        """Notifies a connection of this process that it lost its session; False: there is no such connection."""
        connection = self._here.get(holder)
        if connection is None:
            return False
        connection.end(reason)
        return True

    def notify(self, holder: str | None, reason: str) -> None:
        """Notifies a connection of any process; an empty name is no connection."""
        try:
            if holder and not self.end(holder, reason):
                self._ownership.notify(holder, reason)
        except Exception:
            logger.exception("connection %s was not notified that it lost its session: %s", holder, reason)
