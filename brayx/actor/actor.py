"""The `Actor` interface: the code that answers one session.

`brayx.actor.session` calls each method from the session's own task, and owns time limits and the order of requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from brayx.actor.logs import SessionLog
from brayx.errors import ConfigError, LeagueError, ProtocolError


class Actor:
    """Answers one session: ``start``, then ``tick`` any number of times, then ``stop``; finally always `on_end`.

    All calls of one session come from one task. An actor of a session that ran elsewhere gets `restore` instead of
    ``start``.

    Attributes:
        arrived: when the request that is answered arrived, by `brayx.clock`; its session sets it.
    """

    arrived = 0.0

    def ask(self, opponent: str) -> None:
        """Called before ``start``, if that asks for an opponent outside of its body.

        Args:
            opponent: ``KEY=VALUE``, not checked.

        Raises:
            LeagueError: opponents cannot be requested.
        """
        raise LeagueError("a start cannot request an opponent: this service has no league")

    def record(self) -> None:
        """Called before ``start``, if that asks for the session to be recorded.

        Raises:
            ProtocolError: sessions are not recorded on request.
        """
        raise ProtocolError("this service does not record sessions on request", header="record")

    def trace(self, traceparent: str) -> None:
        """Called before a start or tick whose request has a ``traceparent``, which is not checked."""

    async def start(self, session: str, body: bytes) -> bytes:
        """Begins the session ``session``."""
        raise NotImplementedError

    async def tick(self, body: bytes) -> bytes:
        """Answers one tick."""
        raise NotImplementedError

    async def stop(self, body: bytes) -> bytes:
        """Answers the stop."""
        raise NotImplementedError

    async def on_end(self, reason: str) -> None:
        """Called once at the session's end, for any reason, after the reply to the last request."""

    def on_moved(self) -> None:
        """Called once instead of `on_end` when the session moves to another actor."""

    def fallback(self, tick: int, body: bytes) -> bytes | None:
        """Reply to a tick that is late, running or not; None: there is none, wait for the tick.

        Args:
            tick: number of the tick.
            body: body of the tick.
        """
        return None

    def forwarded(self) -> None:
        """Called before a tick that came through another process."""

    async def missed(self) -> None:
        """Called after a tick that was late: its client has acted on the fallback's reply."""

    async def skipped(self, ticks: int) -> None:
        """Called when ``ticks`` late ticks are skipped: the next tick's number is higher by as many."""

    def facts(self) -> dict[str, Any]:
        """What a console shows of the session, as JSON values; see `brayx.actor.agent_actor.AgentActor.facts`."""
        return {}

    def attach(self, log: SessionLog) -> bytes:
        """Adds a log to the running session, from its next tick on, and returns the body of the session's start.

        Raises:
            ConfigError: this kind of actor keeps no logs.
        """
        raise ConfigError(f"a session of {type(self).__name__} cannot be followed: it has no agents")

    def detach(self, log: SessionLog) -> None:
        """Removes a log; does nothing if the session does not have it, or no longer."""

    async def snapshot(self) -> bytes | None:
        """State from which another actor continues the session after the last tick; None: it cannot be moved."""
        return None

    async def restore(self, session: str, snapshot: bytes) -> None:
        """Continues a session from a snapshot, possibly in another process."""
        raise NotImplementedError

    async def call(self, body: bytes) -> bytes:
        """Answers a stateless call (a request without ``step_kind``); calls of many clients run concurrently."""
        raise ProtocolError(f"{type(self).__name__} answers sessions only: send the header 'step_kind'")


def is_cancelled() -> bool:
    """Whether this task itself is being cancelled, not only something that an actor or agent awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
