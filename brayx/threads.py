"""Threads that run native code. Before the interpreter exits, it stops them and waits for them.

A daemon thread that is inside torch or ONNX Runtime when the interpreter exits aborts the whole process (SIGABRT).
Knows nothing of what the threads do.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

_END_S = 30.0
"""Deadline for all threads together. An export to ONNX takes 3 to 10 s and cannot be interrupted."""

_running: set[NativeThread] = set()


class NativeThread(threading.Thread):
    """A daemon thread that is stopped and joined when the interpreter exits, unless it has ended.

    Args:
        target: runs in the thread.
        name: name of the thread.
        stop: makes ``target`` return soon; called when the interpreter exits, when no new thread can start.
    """

    def __init__(self, target: Callable[[], object], name: str, stop: Callable[[], object] = lambda: None) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.stop = stop

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


@atexit.register
def end_threads() -> None:
    """Stops all threads that still run, and waits for them until the deadline."""
    threads, deadline = list(_running), time.monotonic() + _END_S
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
