"""What a session takes along when it goes on in another process: its snapshots, and the handing over of a session.

Pure asyncio; knows nothing of who keeps a snapshot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from brayx import clock
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
    """What a session needs to go on elsewhere.

    Attributes:
        tick: how many ticks have been answered, which is the number of the next one if all are numbered.
        seq: number of the next numbered tick.
        kept: reply to the numbered tick before that; a repeat gets it.
        actor: what `Actor.snapshot` gave.
        exact: nothing has happened since it was taken: the session was moved, not lost.
        announced: its client had said at the start that it numbers its ticks.
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
    """Where a session stands after a tick; as in `Snapshot`."""

    tick: int
    seq: int
    kept: bytes | None


Park = Callable[[str, Snapshot], Awaitable[None]]
"""Keeps the exact snapshot of a session for the process that goes on with it, its id included."""


async def keep_snapshot(session: Session, at: Position, ownership: Ownership, recorder: Recorder) -> None:
    """Has the state of a session's actor kept; ``at`` is where the actor is. One that fails is counted."""
    try:
        data = await session.guard(session.actor.snapshot(), "snapshot")
    except BrayxError as error:
        recorder.add("snapshots_failed", 1.0)
        logger.warning("session %s: no snapshot: %s", session.id, error)
        return
    if data is not None:
        ownership.keep(session.id, Snapshot(*at, data, announced=session.announced))


async def hand_over(session: Session, park: Park) -> None:
    """Parks a session between two requests and ends it as ``moved``; one that cannot be parked goes on here."""
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


def go_on(session: Session, snapshot: Snapshot, request: StepRequest, reply: Reply) -> None:
    """Takes the request that brought a session back; it gets `SessionResumed` if ticks may be lost."""
    if snapshot.exact or (snapshot.kept is not None and request.seq == snapshot.seq - 1):
        # Nothing is lost: at most its client has no reply to the last tick in the snapshot, and sends it again.
        session.inbox.appendleft((request, reply, clock.now(), None))
    else:
        following = snapshot.seq or snapshot.tick
        message = f"session {session.id!r} was resumed from a snapshot: tick {following} comes next"
        reply(SessionResumed(message, tick=following))
