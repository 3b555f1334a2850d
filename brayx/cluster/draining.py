"""Drains a replica: when Serve ends it, its sessions move to other replicas or finish within a deadline.

Knows nothing of the sessions' new replicas.
"""

from __future__ import annotations

import asyncio
import time

from ray import serve
from ray.serve.schema import ApplicationStatus

from brayx.actor.ownership import Park
from brayx.actor.serving import ActorService
from brayx.cluster.ray_private import replica_is_ending
from brayx.logs import limited

logger = limited(__name__)

_CHECK_S = 0.2
_STATUS_S = 2.0


class Draining:
    """The drain of one replica.

    Args:
        service: the replica's sessions and doors.
        park: as for `Session.move`.
        application: name of the application in Serve.
        timeout_s: deadline for sessions that cannot be moved.
    """

    def __init__(self, service: ActorService, park: Park, application: str, timeout_s: float) -> None:
        self._service = service
        self._park = park
        self._application = application
        self._timeout_s = timeout_s

    async def run(self) -> None:
        """Refuses new sessions and connections, moves the sessions that can be moved, and waits for the others.

        If the whole application is deleted, no replica is left to take a session, so all of them may finish.
        """
        table = self._service.table
        if table.is_shut:
            return
        table.is_shut = True
        self._service.doors.shut()
        deadline = time.monotonic() + self._timeout_s
        while len(table) and time.monotonic() < deadline:
            if not await _is_going(self._application):
                table.move(self._park)
            await asyncio.sleep(_CHECK_S)
        await table.close("drained")

    async def watch(self) -> None:
        """Drains as soon as Serve ends this replica.

        Serve calls a replica's shutdown hook only when no request is running, which is too late for WebSockets. So this
        polls the mark that Serve sets first; without the mark (in a later version of Ray) draining starts at once.
        """
        while not replica_is_ending():  # noqa: ASYNC110 (Serve's mark, not an event)
            await asyncio.sleep(_CHECK_S)
        await self.run()


async def _is_going(application: str) -> bool:
    """Whether Serve is deleting the application with all its replicas; False if Serve does not answer."""
    try:
        async with asyncio.timeout(_STATUS_S):
            of = (await asyncio.to_thread(serve.status)).applications.get(application)
    except Exception as error:  # the controller does not answer; Ray documents only some of its errors
        logger.warning(
            "Serve did not say whether the application is being deleted: %s: %s", type(error).__name__, error
        )
        return False
    return of is None or of.status == ApplicationStatus.DELETING
