"""Moving a session to another process: its snapshots, and the hand-over.

Pure asyncio; knows nothing of where snapshots are kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import brayx.clock as clock
from brayx.errors import BrayxError, SessionResumed
from brayx.gamecore.protocol import StepRequest
from brayx.logs import limited
from brayx.metrics import Recorder

if TYPE_CHECKING:
    from brayx.actor.ownership import Ownership
    from brayx.actor.service import Reply
    from brayx.actor.session import Session

logger = limited(__name__)


@dataclass(frozen=True)
class Snapshot:
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
    """Progress of a session after a tick; fields as in `Snapshot`."""

    tick: int
    seq: int
    kept: bytes | None


Park = Callable[[str, Snapshot], Awaitable[None]]
"""Stores a session's exact snapshot, and its id, for the process that continues it."""


async def keep_snapshot(session: Session, at: Position, ownership: Ownership, recorder: Recorder) -> None:
    """Stores a snapshot of a session's actor, whose progress is ``at``. Failures are counted."""
    try:
        data = await session.guard(session.actor.snapshot(), "snapshot")
    except BrayxError as error:
        recorder.add("snapshots_failed", 1.0)
        logger.warning("session %s: no snapshot: %s", session.id, error)
        return
    if data is not None:
        ownership.keep(session.id, Snapshot(*at, data, announced=session.announced))


async def hand_over(session: Session, park: Park) -> None:
    """Parks a session between two requests and ends it as ``moved``; if parking fails it continues here."""
    try:
        data = await session.guard(session.actor.snapshot(), "snapshot")
        if data is None or session.ended:
            return
        at = session.position
        await park(session.id, Snapshot(*at, data, exact=True, announced=session.announced, holder=session.holder))
    except BrayxError as error:
        logger.warning("session %s: it could not be moved: %s", session.id, error)
        return
    session.end("moved")


def after_resume(session: Session, snapshot: Snapshot, request: StepRequest, reply: Reply) -> None:
    """Handles the request that resumed a session; it gets `SessionResumed` if ticks may be lost."""
    if snapshot.exact or (snapshot.kept is not None and request.seq == snapshot.seq - 1):
        # Nothing is lost: at most the client lacks the reply to the snapshot's last tick, and sends that tick again.
        session.inbox.appendleft((request, reply, clock.now(), None))
    else:
        following = snapshot.seq or snapshot.tick
        message = f"session {session.id!r} was resumed from a snapshot: tick {following} comes next"
        reply(SessionResumed(message, tick=following))
