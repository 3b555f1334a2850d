"""Ownership of sessions: a session table's interface to the processes that share its sessions.

`Ownership` itself is for a process that owns all its sessions. The cluster's replicas share theirs through a
session directory. Pure asyncio; knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from brayx.actor.ends import over
from brayx.actor.lease import Lease
from brayx.actor.moving import Snapshot
from brayx.actor.service import Reply
from brayx.errors import Overloaded
from brayx.gamecore.protocol import StepKind, StepRequest

if TYPE_CHECKING:
    from brayx.actor.session import Session


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

    def keep(self, session: str, snapshot: Snapshot) -> None:
        """Keeps a snapshot, from which another process can resume the session."""

    async def may_answer(self, session: Session, request: StepRequest, reply: Reply) -> bool:
        """Waits for the lease's renewal; False: another process has the session, or the lease was not renewed.

        If False, the request is already answered: by the process that has the session, or by an error.
        """
        unanswered, session.unanswered = session.unanswered, True
        try:
            async with asyncio.timeout(session.shared.config.tick_timeout_s):
                await self.lease.held()
        except TimeoutError:
            message = f"session {session.id!r}: this replica's lease has not been renewed"
            message += "; the request may have been applied; try again"
            reply(Overloaded(message, layer="directory", maybe_applied=True))
            return False
        except asyncio.CancelledError as error:
            session.failed(error, reply)
        finally:
            session.unanswered = unanswered
        if session.ended != "lost":
            return True
        if request.kind is StepKind.START:
            reply(over(session.id, request.kind.value, session.ended))
        else:
            self.hand_on(request, reply)
        return False

    def hand_on(self, request: StepRequest, reply: Reply) -> None:
        """Forwards a tick or stop to the process that has taken the session over."""
        reply(over(request.session, request.kind.value, "lost"))

    def notify(self, holder: str, reason: str) -> None:
        """Notifies a connection of another process that it lost its session."""
