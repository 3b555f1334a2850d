"""The first step of what a waiting task does next, taken at once instead of a turn of the event loop later.

Most ticks are answered in one go. Waking a session's task up for one costs a future, a callback and a turn of the loop,
several times what such a tick costs itself. Python 3.12 has eager tasks for the same reason, but a session has one task
for all its ticks. Knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task  # documented for whoever steps coroutines, in asyncio's "Extending"
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any


class Rest:
    """What is left of a coroutine after its first step; the task that it was begun for awaits it, once."""

    __slots__ = ("_coroutine", "_raised", "_thrown", "_waits_for")

    def __init__(
        self, coroutine: Coroutine[Any, None, None], waits_for: Any, raised: BaseException | None = None
    ) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for
        self._raised = raised
        self._thrown: BaseException | None = None

    def cancel(self) -> None:
        """Cancels what it waits for, as cancelling the task would have done."""
        if self._waits_for is None or not self._waits_for.cancel():
            self._thrown = asyncio.CancelledError()

    def __await__(self) -> Generator[Any, None, None]:
        if self._raised is not None:
            raise self._raised
        waits_for, thrown = self._waits_for, self._thrown
        try:
            while True:
                if thrown is None:
                    try:
                        yield waits_for
                    except BaseException as error:
                        thrown = error
                if thrown is None:
                    waits_for = self._coroutine.send(None)
                else:
                    throwing, thrown = thrown, None
                    waits_for = self._coroutine.throw(throwing)
        except StopIteration:
            return


def begin(task: asyncio.Task[Any], context: Context, coroutine: Coroutine[Any, None, None]) -> Rest | None:
    """Runs ``coroutine`` as if ``task`` did, until it first waits for something.

    Args:
        task: must be waiting for a future that only its waking up by the caller sets.
        context: the one the task was made with.
        coroutine: not begun yet.

    Returns:
        None if the coroutine is done; else what the task has to await, which also raises what the first step raised.
    """
    loop = task.get_loop()
    _enter_task(loop, task)
    try:
        return Rest(coroutine, context.run(coroutine.send, None))
    except StopIteration:
        return None
    except BaseException as error:
        return Rest(coroutine, None, error)
    finally:
        _leave_task(loop, task)
