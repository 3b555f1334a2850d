"""What answers a session: the `Actor` interface.

`brayx.actor.session` calls each method from the session's own task, and owns time limits and the order of requests.
"""

from __future__ import annotations

import asyncio

from brayx.errors import ProtocolError


class Actor:
    """Answers one session: ``start``, then ``tick`` any number of times, then ``stop``; then `on_end`, always.

    All calls of one session come from one task. An actor of a session that ran elsewhere gets `restore` instead of
    ``start``.
    """

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
        """Called once when the session is over, for whatever reason, after the reply to the last request."""

    def on_moved(self) -> None:
        """Called once instead of `on_end` when the session goes on in another actor."""

    def fallback(self, tick: int, body: bytes) -> bytes | None:
        """What to answer instead of a tick that is late, under way or not begun; None: nothing, wait for it.

        Args:
            tick: its number.
            body: its body.
        """
        return None

    async def missed(self) -> None:
        """The tick just answered was late: its client has acted on something else."""

    async def skipped(self, ticks: int) -> None:
        """The next ``ticks`` ticks were late and will not come: the one after them has a number so much higher."""

    async def snapshot(self) -> bytes | None:
        """What another actor needs to go on with the session after the last tick; None: it cannot be moved."""
        return None

    async def restore(self, session: str, snapshot: bytes) -> None:
        """Goes on with a session from what `snapshot` gave, perhaps in another process."""
        raise NotImplementedError

    async def call(self, body: bytes) -> bytes:
        """Answers a stateless call (a request without ``step_kind``); calls of many clients run side by side."""
        raise ProtocolError(f"{type(self).__name__} answers sessions only: send the header 'step_kind'")


def is_cancelled() -> bool:
    """Whether this task itself is being cancelled, not only something that an actor or agent awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
