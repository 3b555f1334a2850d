"""CPU seconds of a process and its descendants, over time and by thread, read with psutil.

Knows nothing of what the processes do.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from types import TracebackType
from typing import Self

import psutil

_EVERY_S = 0.5


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty once it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def by_thread(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process, by the system's thread id; empty once it has ended."""
    try:
        return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}
    except psutil.NoSuchProcess:
        return {}


class CpuClock:
    """A context in which the CPU time of a process tree is sampled, by a thread.

    Processes that have ended count with what they had at the last sample.

    Args:
        pid: root of the tree.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used: dict[tuple[int, float], float] = {}
        self._samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def at(self, time_s: float) -> float:
        """CPU seconds used up to a moment on the epoch's clock, linear between samples."""
        after = bisect.bisect_left(self._samples, (time_s, 0.0))
        (t0, c0), (t1, c1) = self._samples[max(after - 1, 0)], self._samples[min(after, len(self._samples) - 1)]
        return c0 if t1 <= t0 else c0 + (c1 - c0) * min((time_s - t0) / (t1 - t0), 1.0)

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            for process in tree(self._pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    self._used[process.pid, process.create_time()] = times.user + times.system
            self._samples.append((time.time(), sum(self._used.values())))
