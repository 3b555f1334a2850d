"""Ownership of sessions: a session table's interface to the processes that share its sessions, and their snapshots.

`Ownership` itself is for a process that owns all its sessions. The cluster's replicas share theirs through a
session directory. Pure asyncio; knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from brayx.actor.ends import over
from brayx.actor.lease import Lease
from brayx.actor.service import Reply
from brayx.gamecore.protocol import StepRequest


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
