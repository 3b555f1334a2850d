"""Stateless calls: one actor for all of a replica's, as many at once as may be, each with a deadline.

Pure asyncio; knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from brayx.actor.actor import Actor
from brayx.actor.faults import report
from brayx.actor.service import Reply
from brayx.errors import BrayxError, DeadlineExceeded, QueueFull


class Calls:
    """A replica's stateless calls.

    Args:
        make_actor: makes the actor that answers the calls, at the first call.
        most: calls that may run at once; further ones get `QueueFull`.
        timeout_s: deadline of each.
        refuse: counts a refusal and replies with it.
        show_errors: clients get the text of the actor's exceptions.

    Attributes:
        tasks: the running calls.
    """

    def __init__(
        self,
        make_actor: Callable[[], Actor],
        most: int,
        timeout_s: float,
        refuse: Callable[[Reply, BrayxError], None],
        show_errors: bool,
    ) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._make_actor = make_actor
        self._most = most
        self._timeout_s = timeout_s
        self._refuse = refuse
        self._show_errors = show_errors
        self._actor: Actor | None = None

    def submit(self, body: bytes, reply: Reply) -> None:
        """Starts a call; ``reply`` gets its result or error."""
        if len(self.tasks) >= self._most:
            told = f"this replica answers {len(self.tasks)} stateless calls, at most {self._most} at once"
            self._refuse(reply, QueueFull(told))
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
            told = f"the actor took longer than {self._timeout_s} s for a stateless call"
            self._refuse(reply, DeadlineExceeded(told, layer="actor"))
        except Exception as error:
            what = "the actor raised in call"
            self._refuse(reply, report(error, what, "stateless call", show_text=self._show_errors))

    async def close(self, reason: str, timeout_s: float) -> None:
        """Tells the actor, after the last call."""
        if self._actor is not None:
            actor, self._actor = self._actor, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await actor.on_end(reason)
