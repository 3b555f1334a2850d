"""Stateless calls: one actor answers all calls of a replica, a bounded number at once, each with a deadline.

Pure asyncio; knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from brayx.actor.actor import Actor
from brayx.actor.config import SessionConfig
from brayx.actor.service import Reply
from brayx.errors import DeadlineExceeded, QueueFull
from brayx.faults import report


class Calls:
    """A replica's stateless calls.

    Args:
        make_actor: makes the actor that answers the calls, at the first call.
        config: the actor's options: as many calls run at once as sessions may; further ones get `QueueFull`.

    Attributes:
        tasks: the running calls.
    """

    def __init__(self, make_actor: Callable[[], Actor], config: SessionConfig) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._make_actor = make_actor
        self._most = config.actors_per_worker
        self._timeout_s = config.tick_timeout_s
        self._show_errors = bool(config.show_errors)
        self._actor: Actor | None = None

    def submit(self, body: bytes, reply: Reply) -> None:
        """Starts a call; ``reply`` gets its result or error."""
        if len(self.tasks) >= self._most:
            reply(QueueFull(f"this replica answers {len(self.tasks)} stateless calls, at most {self._most} at once"))
            return
        task = asyncio.get_running_loop().create_task(self._answer(body, reply))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, body: bytes, reply: Reply) -> None:
        try:
            if self._actor is None:
                self._actor = self._make_actor()
            async with asyncio.timeout(self._timeout_s):
                reply(await self._actor.call(body))
        except TimeoutError:
            message = f"the actor took longer than {self._timeout_s} s for a stateless call"
            reply(DeadlineExceeded(message, layer="actor"))
        except Exception as error:
            reply(report(error, "the actor raised in call", "stateless call", show_text=self._show_errors))

    async def close(self, reason: str, timeout_s: float) -> None:
        """Tells the actor, after the last call."""
        if self._actor is not None:
            actor, self._actor = self._actor, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await actor.on_end(reason)
