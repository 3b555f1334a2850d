"""Threads that run native code, which stop before the interpreter exits, and threads that run an event loop.

A daemon thread that is inside torch or ONNX Runtime when the interpreter exits aborts the whole process (SIGABRT).
Knows nothing of what the threads do.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from brayx.errors import DeadlineExceeded

_END_S = 30.0
"""Deadline for all threads together. An export to ONNX takes 3 to 10 s and cannot be interrupted."""

LOOP_END_S = 2.0

Result = TypeVar("Result")

_running: set[NativeThread] = set()


class NativeThread(threading.Thread):
    """A daemon thread that is stopped and joined when the interpreter exits, unless it has ended.

    After a Ctrl-C during `join` it is still alive: Python 3.11 takes another thread for one that has ended.

    Args:
        target: runs in the thread.
        name: name of the thread.
        stop: makes ``target`` return soon; called when the interpreter exits, when no new thread can start.
    """

    def __init__(self, target: Callable[[], object], name: str, stop: Callable[[], object] = lambda: None) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.stop = stop
        self._over = threading.Event()

    def start(self) -> None:
        """As `threading.Thread.start`."""
        _running.add(self)
        try:
            super().start()
        except BaseException:
            _running.discard(self)
            raise

    def run(self) -> None:
        """As `threading.Thread.run`."""
        try:
            super().run()
        finally:
            _running.discard(self)
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        """As `threading.Thread.join`."""
        self._over.wait(timeout)

    def is_alive(self) -> bool:
        """As `threading.Thread.is_alive`."""
        return self.ident is not None and not self._over.is_set()


@atexit.register
def end_threads() -> None:
    """Stops all threads that still run, and waits for them until the deadline."""
    threads, deadline = list(_running), time.monotonic() + _END_S
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class LoopThread:
    """An event loop in a daemon thread, for callers in other threads.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Starts a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result], timeout_s: float, what: str = "it") -> Result:
        """Runs a coroutine on the loop and waits for its result.

        Raises:
            DeadlineExceeded: it did not end in time, and is cancelled; the message calls it ``what``.
        """
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"{what} gave no answer within {timeout_s:g} s") from None

    def close(self) -> None:
        """Ends the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LOOP_END_S)
