"""Collects concurrent requests into one call: bounded, with deadlines, fair to callers when there are too many.

Knows nothing of models, engines or Ray: it calls a function with a list of rows and gives each caller its result.
One call runs at a time, so that rows gather meanwhile; ``max_calls`` allows more for work in another process. A call
runs in one of three ways:

- ``run`` is a coroutine function (for work in another process): it is awaited;
- calls of that batch size take less than ``inline_below_s``, in the median: on the event loop itself, because the hop
  to a thread and back costs more (60-150 us on 2 cores) than such a call blocks the loop;
- otherwise: in the batcher's own thread, so that the loop stays responsive.

With ``max_wait_s`` 0 a batch has the rows that wait when the engine is free: rows of one iteration of the event loop
share a call, and so do rows that arrived during the previous call. All methods must be called on one event loop.

Rows may have a *key*, such as a policy version: a call has rows of one key only. `brayx.model.queue` chooses the rows
of a call, and those that a full queue refuses.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import brayx.clock as clock
from brayx.errors import DeadlineExceeded, ModelError
from brayx.model.queue import FairQueue, Row, WaitingRow

Result = TypeVar("Result")


_STEP = 1.05
"""Each call moves the estimate of the median by this factor, up or down. A mean would follow the few calls that
allocate memory, or are the first with new weights."""
_LEAST_S = 1e-6
"""Least first estimate: a coarse clock can read 0, which no factor would move."""


class RowsFailed(Exception):
    """Raised by a batcher's ``run`` if some rows of a call failed.

    Attributes:
        results: one for each row, in order; an exception for a row that failed.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        super().__init__(f"some of {len(results)} rows failed")
        self.results = results


def repeat_last(rows: list[Any], size: int) -> None:
    """Pads ``rows`` to ``size`` with the last of them."""
    rows.extend([rows[-1]] * (size - len(rows)))


class Batcher(Generic[Row, Result]):
    """Turns many `submit` calls into few calls of ``run``.

    Args:
        run: takes a non-empty list of rows, and their key as a second argument if they have one; returns as many
            results in the same order. Or a coroutine function that does so. An exception it raises goes to every
            caller of that batch and to no other. With `RowsFailed`, each caller gets the result of its row.
        max_batch_size: maximum rows of one call; negative: exactly that many, padded.
        max_wait_s: how long the first row of an incomplete batch waits for more rows while the engine is free.
        max_queue: rows that may wait; more are refused.
        deadline_s: a row without a result after this long fails, whether it waits or runs.
        inline_below_s: median duration under which a call runs on the event loop; 0 for never. In the thread its CPU
            time counts: there a call also waits for the interpreter's lock, and short ones would never come back.
        max_calls: maximum concurrent calls, if ``run`` is a coroutine function.
        count: amount of work in the rows of a call, if a row may contain several observations.
        pad: pads the rows of a call in place up to a size; by default it repeats the last.
        on_batch: called after each call with its rows by ``count``, without padding; its seconds; and the seconds that
            its first row waited.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        *,
        max_batch_size: int = 64,
        max_wait_s: float = 0.0,
        max_queue: int = 1024,
        deadline_s: float = 10.0,
        inline_below_s: float = 200e-6,
        max_calls: int = 1,
        count: Callable[[list[Row]], int] = len,
        pad: Callable[[list[Row], int], None] | None = None,
        on_batch: Callable[[int, float, float], None] | None = None,
    ) -> None:
        if max_calls < 1 or (max_calls > 1 and not inspect.iscoroutinefunction(run)):
            raise ValueError("max_calls must be at least 1, and 1 unless run is a coroutine function")
        if max_batch_size == 0 or max_queue < 1 or max_wait_s < 0 or deadline_s <= 0:
            raise ValueError("max_batch_size must not be 0, max_queue at least 1, max_wait_s >= 0, deadline_s > 0")
        self._run = run
        self._run_is_async = inspect.iscoroutinefunction(run)
        self._max_batch_size = abs(max_batch_size)
        self._pads = max_batch_size < 0
        self._max_wait_s = max_wait_s
        self._deadline_s = deadline_s
        self._inline_below_s = inline_below_s
        self._count = count
        self._pad = pad or repeat_last
        self._on_batch = on_batch
        self._queue: FairQueue[Row] = FairQueue(max_queue, self._max_batch_size)
        self._calls: dict[asyncio.Task[None], list[WaitingRow[Row]]] = {}
        self._max_calls = max_calls
        self._busy = False
        self._flush_handle: asyncio.Handle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline_at = float("inf")  # of that timer
        self._held_s = clock.held_s()
        self._executor: ThreadPoolExecutor | None = None
        self._typical_s: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def __len__(self) -> int:
        """Number of waiting rows."""
        return len(self._queue)

    async def submit(
        self,
        row: Row,
        deadline_s: float | None = None,
        *,
        key: Hashable = None,
        caller: Hashable = None,
        whole: bool = False,
    ) -> Result:
        """The result of one row.

        Args:
            row: passed to ``run`` unchanged; do not change it before the result.
            deadline_s: replaces the batcher's own.
            key: only rows of equal keys share a call.
            caller: the row's caller; None: a separate caller for this row.
            whole: no other row has that key: this row is a whole call, and does not wait for others.

        Raises:
            QueueFull: ``max_queue`` rows wait already; or the queue filled up, and this caller had the most rows.
            DeadlineExceeded: no result in time.
            ModelError: the batcher is closed.
        """
        future = self.enqueue(row, deadline_s, key, caller, whole)
        try:
            result: Result = await future
        except asyncio.CancelledError:
            self.abandon()
            raise
        return result

    def at_once(self, row: Row, key: Hashable = None) -> Result | None:
        """Computes a row in a separate call, at once. None: other rows wait or run, or such a call would hold up the
        event loop for too long; then use `submit`.

        Raises:
            Exception: what ``run`` raised.
        """
        if self._run_is_async or self._closed or self._calls or len(self._queue):
            return None
        rows, count = [row], self._count([row])
        if self._pads and count <= self._max_batch_size:
            self._pad(rows, self._max_batch_size)
        if not self._is_short(rows):
            return None
        (result,), seconds = self._timed(rows, key, time.perf_counter)
        if self._on_batch is not None:
            self._on_batch(count, seconds, 0.0)
        done: Result = result
        return done

    async def submit_many(
        self, rows: Sequence[Row], deadline_s: float | None = None, *, key: Hashable = None
    ) -> list[Result]:
        """The results of one caller's rows, which may end up in different batches; fails if one of them does."""
        self._queue.check_room(len(rows))
        caller = object()
        futures = [self.enqueue(row, deadline_s, key, caller) for row in rows]
        try:
            results: list[Result] = await asyncio.gather(*futures)
            return results
        finally:
            for future in futures:  # if one fails, the others are not needed
                if future.cancel() or future.cancelled():  # by the caller's own end, which cancels all of them
                    self.abandon()

    async def close(self) -> None:
        """Fails rows that wait, lets a running call end within its deadline, and frees timers and the thread."""
        self._closed = True
        for handle in (self._flush_handle, self._deadline_timer):
            if handle is not None:
                handle.cancel()
        self._flush_handle = self._deadline_timer = None
        for request in self._queue:
            if not request.future.done():
                request.future.set_exception(ModelError("the batcher was closed"))
        self._queue.clear()
        if self._calls:
            _, hanging = await asyncio.wait(self._calls, timeout=self._deadline_s)
            for call in hanging:
                _expire(self._calls[call], float("inf"), "in its call")
                call.cancel()
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def enqueue(
        self,
        row: Row,
        deadline_s: float | None = None,
        key: Hashable = None,
        caller: Hashable = None,
        whole: bool = False,
    ) -> asyncio.Future[Any]:
        """As `submit`, but returns a future, which saves a coroutine thousands of times a second. Immediate errors of
        `submit` are raised here, others by the future. A caller that is cancelled calls `abandon`.
        """
        if self._closed:
            raise ModelError("the batcher is closed")
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        now = loop.time()
        deadline = now + (self._deadline_s if deadline_s is None else deadline_s)
        future = loop.create_future()
        self._queue.add(WaitingRow(row, future, now, deadline, key, caller, whole))
        if deadline < self._deadline_at:
            self._set_deadline_timer(deadline)
        if not self._busy:
            if self._flush_handle is None:
                self._schedule()
            elif self._max_wait_s and (whole or len(self._queue) >= self._max_batch_size):
                self._flush_handle.cancel()
                self._flush_handle = loop.call_soon(self._flush)
        return future

    def abandon(self) -> None:
        """Marks that a caller no longer waits for its rows, so that the next row that needs room takes theirs."""
        self._queue.abandoned = True

    def _schedule(self) -> None:
        """Schedules the next call; rows wait and no call runs."""
        assert self._loop is not None
        if self._max_wait_s and len(self) < self._max_batch_size:
            waiting = list(self._queue)
            if not any(request.whole for request in waiting):
                oldest = min(request.arrived for request in waiting)
                self._flush_handle = self._loop.call_at(oldest + self._max_wait_s, self._flush)
                return
        self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_handle = None
        assert self._loop is not None
        batch = self._queue.take()
        if not batch:
            return
        rows = [request.row for request in batch]
        if self._pads and self._count(rows) <= self._max_batch_size:
            self._pad(rows, self._max_batch_size)
        if not self._run_is_async and self._is_short(rows):
            self._run_inline(batch, rows)
        else:
            call = self._loop.create_task(self._run_away(batch, rows))
            self._calls[call] = batch
            self._busy = len(self._calls) >= self._max_calls
            call.add_done_callback(self._on_end)
            if not self._busy and len(self):
                self._schedule()

    def _run_inline(self, batch: list[WaitingRow[Row]], rows: list[Row]) -> None:
        started = time.perf_counter()
        try:
            results, seconds = self._timed(rows, batch[0].key, time.perf_counter)
        except Exception as error:
            _fail(batch, error)
        else:
            self._finish(batch, rows, results, started, seconds)
        if len(self):
            self._schedule()

    async def _run_away(self, batch: list[WaitingRow[Row]], rows: list[Row]) -> None:
        started = time.perf_counter()
        try:
            if self._run_is_async:
                results = await self._call_run(rows, batch[0].key)
                seconds = time.perf_counter() - started
            else:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(1, thread_name_prefix="brayx-batcher")
                loop, call = asyncio.get_running_loop(), (rows, batch[0].key, time.thread_time)
                results, seconds = await loop.run_in_executor(self._executor, self._timed, *call)
        except Exception as error:
            _fail(batch, error)
        else:
            self._finish(batch, rows, results, started, seconds)

    def _on_end(self, call: asyncio.Task[None]) -> None:
        del self._calls[call]
        self._busy = False
        if len(self) and not self._closed and self._flush_handle is None:
            self._schedule()

    def _call_run(self, rows: list[Row], key: Hashable) -> Any:
        return self._run(rows) if key is None else self._run(rows, key)

    def _is_short(self, rows: list[Row]) -> bool:
        """Whether calls like this one belong on the event loop."""
        return self._typical_s.get(self._count(rows).bit_length(), float("inf")) < self._inline_below_s

    def _timed(self, rows: list[Row], key: Hashable, clock: Callable[[], float]) -> tuple[Any, float]:
        """The results of a call and its seconds; notes how long it took by ``clock``.

        Calls of 1, 2-3, 4-7, ... rows are alike. The first may take a hundred times as long as the next, so it counts
        as at most ``inline_below_s``: otherwise as many calls would follow it into the thread.
        """
        started, began = time.perf_counter(), clock()
        results = self._call_run(rows, key)
        took_s, seconds = clock() - began, time.perf_counter() - started
        size_class = self._count(rows).bit_length()
        typical_s = self._typical_s.get(size_class, min(max(took_s, _LEAST_S), self._inline_below_s))
        self._typical_s[size_class] = typical_s * _STEP if took_s > typical_s else typical_s / _STEP
        return results, seconds

    def _finish(
        self, batch: list[WaitingRow[Row]], rows: list[Row], results: Sequence[Result], started: float, seconds: float
    ) -> None:
        if len(results) != len(rows):
            _fail(batch, ModelError(f"{len(rows)} rows came back as {len(results)} results"))
            return
        for request, result in zip(batch, results, strict=False):
            if not request.future.done():
                request.future.set_result(result)
        if self._on_batch is not None:
            assert self._loop is not None
            waited = self._loop.time() - batch[0].arrived - (time.perf_counter() - started)
            count = self._count([request.row for request in batch])
            self._on_batch(count, seconds, max(0.0, waited))

    def _set_deadline_timer(self, deadline: float) -> None:
        """One timer for the earliest deadline: a timer per row would cost more than the rest of `submit`."""
        assert self._loop is not None
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_at = deadline
        self._deadline_timer = self._loop.call_at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline_timer, self._deadline_at = None, float("inf")
        assert self._loop is not None
        # The timer may fire up to the clock's resolution early.
        now = self._loop.time() + 1e-3
        running = [request for batch in self._calls.values() for request in batch]
        if (held_s := clock.held_s()) != self._held_s:  # a debugger's prompt stopped all of this
            for request in (*self._queue, *running):
                request.deadline += held_s - self._held_s
            self._held_s = held_s
        _expire(self._queue, now, "for its batch")
        _expire(running, now, "in its call")
        self.abandon()
        pending = [r.deadline for r in (*self._queue, *running) if not r.future.done()]
        if pending:
            self._set_deadline_timer(min(pending))


def _fail(batch: list[WaitingRow[Row]], error: Exception) -> None:
    results = error.results if isinstance(error, RowsFailed) else [error] * len(batch)
    for request, result in zip(batch, results, strict=False):
        if request.future.done():
            continue
        if isinstance(result, Exception):
            request.future.set_exception(result)
        else:
            request.future.set_result(result)


def _expire(requests: Iterable[WaitingRow[Row]], now: float, where: str) -> None:
    for request in requests:
        if request.deadline <= now and not request.future.done():
            waited = min(now, request.deadline) - request.arrived
            request.future.set_exception(DeadlineExceeded(f"a forward waited {waited:.3g} s {where}"))
