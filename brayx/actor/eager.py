"""The first step of what a waiting task does next, taken at once instead of a turn of the event loop later.

Most ticks are answered in one go. Waking a session's task up for one costs a future, a callback and a turn of the loop,
several times what such a tick costs itself. Python 3.12 has eager tasks for the same reason, but a session has one task
for all its ticks. Knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import inspect
from asyncio.tasks import _enter_task, _leave_task  # documented for whoever steps coroutines, in asyncio's "Extending"
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any

_NOT_BEGUN = object()


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
        cancel = getattr(self._waits_for, "cancel", None)
        if cancel is None or not cancel():
            self._thrown = asyncio.CancelledError()

    def __await__(self) -> Generator[Any, None, None]:
        if self._raised is not None:
            raise self._raised
        waits_for, thrown = self._waits_for, self._thrown
        begun = waits_for is not _NOT_BEGUN
        _mark(waits_for, awaited=True)
        try:
            while True:
                if thrown is None and begun:
                    try:
                        yield waits_for
                    except BaseException as error:
                        thrown = error
                begun = True
                if thrown is None:
                    waits_for = self._coroutine.send(None)
                else:
                    throwing, thrown = thrown, None
                    waits_for = self._coroutine.throw(throwing)
        except StopIteration:
            return


def _mark(future: Any, *, awaited: bool) -> None:
    """A future that is yielded to a task has the mark that it was awaited, and is not awaited again until the task has
    taken the mark off. Nobody else may find it there before the rest is awaited.
    """
    if getattr(future, "_asyncio_future_blocking", None) is not None:
        future._asyncio_future_blocking = awaited


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
        waits_for = context.run(coroutine.send, None)
        _mark(waits_for, awaited=False)
        return Rest(coroutine, waits_for)
    except StopIteration:
        return None
    except BaseException as error:
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            return Rest(coroutine, _NOT_BEGUN)  # the context is entered already, by a callback of the session's own
        return Rest(coroutine, None, error)
    finally:
        _leave_task(loop, task)
