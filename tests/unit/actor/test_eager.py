"""A first step taken for a waiting task: what it may await, who it is taken for, and how it is cancelled."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from brayx.actor.eager import Rest, begin

_LEVEL = contextvars.ContextVar("level", default=0)


class Waiting:
    """A task that awaits the rest of whatever is begun for it."""

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self.wake = asyncio.get_running_loop().create_future()
        self.rest: Rest | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), context=self.context)

    async def begin(self, work: Coroutine[Any, Any, None]) -> Rest | None:
        """Begins ``work`` out of a callback of the loop, as a door does."""
        begun: asyncio.Future[Rest | None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: begun.set_result(begin(self.task, self.context, work)))
        self.rest = await begun
        return self.rest

    async def _run(self) -> None:
        try:
            await self.wake
        except asyncio.CancelledError:
            if self.rest is None:
                raise
            self.rest.cancel()
        if self.rest is not None:
            await self.rest


@pytest.fixture
async def waiting() -> AsyncIterator[Waiting]:
    waiting = Waiting()
    await asyncio.sleep(0)
    yield waiting
    waiting.task.cancel()
    await asyncio.wait([waiting.task])


async def test_what_never_waits_is_done_at_once_and_the_task_waits_on(waiting: Waiting) -> None:
    seen = []

    async def work() -> None:
        seen.append(asyncio.current_task())

    assert await waiting.begin(work()) is None
    assert seen == [waiting.task]
    assert not waiting.task.done()


async def test_the_rest_goes_on_as_the_same_task_in_the_same_context(waiting: Waiting) -> None:
    gate = asyncio.Event()
    seen: list[Any] = []

    async def work() -> None:
        token = _LEVEL.set(1)
        await gate.wait()
        await asyncio.sleep(0)
        seen.extend([asyncio.current_task(), _LEVEL.get()])
        _LEVEL.reset(token)

    await waiting.begin(work())
    gate.set()
    waiting.wake.set_result(None)
    await waiting.task
    assert seen == [waiting.task, 1]
    assert _LEVEL.get() == 0


@pytest.mark.parametrize("done_first", [False, True])
async def test_several_may_wait_for_the_same_future(done_first: bool) -> None:
    shared: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    seen: list[int] = []

    async def work() -> None:
        seen.append(await shared)

    tasks = [Waiting() for _ in range(3)]
    ordinary = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    for one in tasks:
        await one.begin(work())
    if done_first:
        shared.set_result(7)
    for one in tasks:
        one.wake.set_result(None)
    if not done_first:
        await asyncio.sleep(0)
        shared.set_result(7)
    await asyncio.gather(ordinary, *(one.task for one in tasks))
    assert seen == [7] * 4


async def test_a_context_that_is_entered_already_begins_it_in_the_task(waiting: Waiting) -> None:
    seen = []

    async def work() -> None:
        seen.append(asyncio.current_task())

    begun: asyncio.Future[Rest | None] = asyncio.get_running_loop().create_future()
    call = lambda: begun.set_result(begin(waiting.task, waiting.context, work()))  # noqa: E731
    asyncio.get_running_loop().call_soon(call, context=waiting.context)
    waiting.rest = await begun
    assert seen == []
    waiting.wake.set_result(None)
    await waiting.task
    assert seen == [waiting.task]


async def test_a_time_limit_begun_in_the_first_step_holds_in_the_rest(waiting: Waiting) -> None:
    seen = []

    async def work() -> None:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("late")

    await waiting.begin(work())
    waiting.wake.set_result(None)
    await waiting.task
    assert seen == ["late"]


@pytest.mark.parametrize("before", ["before the task wakes up", "after"])
async def test_cancelling_the_task_cancels_what_the_rest_waits_for(waiting: Waiting, before: str) -> None:
    seen = []
    inner = asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            await inner
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    await waiting.begin(work())
    waiting.wake.set_result(None)
    if before == "after":
        await asyncio.sleep(0)
    waiting.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.task
    assert seen == ["cancelled"]
    assert inner.cancelled()


async def test_cancelling_reaches_a_rest_that_only_gave_way(waiting: Waiting) -> None:
    seen = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            seen.append("cancelled")

    await waiting.begin(work())
    waiting.wake.set_result(None)
    waiting.task.cancel()
    await waiting.task
    assert seen == ["cancelled"]


@pytest.mark.parametrize("waits", [False, True])
async def test_what_it_raises_is_raised_in_the_task(waiting: Waiting, waits: bool) -> None:
    async def work() -> None:
        if waits:
            await asyncio.sleep(0)
        raise KeyError("its own")

    assert await waiting.begin(work()) is not None
    waiting.wake.set_result(None)
    with pytest.raises(KeyError, match="its own"):
        await waiting.task


async def test_what_it_awaits_may_fail(waiting: Waiting) -> None:
    inner: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seen = []

    async def work() -> None:
        try:
            await inner
        except ValueError as error:
            seen.append(str(error))
        await asyncio.sleep(0)
        seen.append("went on")

    await waiting.begin(work())
    waiting.wake.set_result(None)
    inner.set_exception(ValueError("inner"))
    await waiting.task
    assert seen == ["inner", "went on"]
