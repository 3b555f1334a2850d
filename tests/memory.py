"""Memory growth of processes: samples them from outside, and fits a line to the samples after the warm-up.

It samples each process's private memory (USS) and open descriptors, and the total memory of all with shared memory
counted once (PSS), because Ray's object store and weights in shared memory are private to no process. Pages of files
do not count in that total: a process's share of a library rises when somebody else who has it mapped ends. A process
that ends early is judged by its samples, if they are enough.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import psutil

MIB = 2**20
_LEAST = 10
"""Samples that a line is fitted to at least."""
_IDLE = "ray::IDLE"
"""As Ray calls a worker that has nothing to do."""


@dataclass
class Course:
    """Samples of one process.

    Attributes:
        name: its number and its command line, shortened; of a Ray worker what it did when it was last seen at work.
        samples: ``(seconds since the watch began, bytes)``.
        descriptors: ``(seconds since the watch began, open descriptors)``.
    """

    name: str
    samples: list[tuple[float, int]] = field(default_factory=list)
    descriptors: list[tuple[float, int]] = field(default_factory=list)

    def growth(self, after_s: float) -> tuple[float, float] | None:
        """Bytes that the fitted line rises from ``after_s`` on, and its mean; None: too few samples."""
        return _growth(self.samples, after_s)

    def descriptor_growth(self, after_s: float) -> tuple[float, float] | None:
        """The same of open descriptors."""
        return _growth(self.descriptors, after_s)


def _growth(samples: Sequence[tuple[float, int]], after_s: float) -> tuple[float, float] | None:
    late = [(time_s, size) for time_s, size in samples if time_s >= after_s]
    if len(late) < _LEAST:
        return None
    times, sizes = np.array(late, float).T
    slope = float(np.polyfit(times - times.mean(), sizes, 1)[0])
    return slope * (times[-1] - times[0]), float(sizes.mean())


def _held(number: int) -> int:
    """Bytes of a process's anonymous and shared memory, each page divided by the processes that have it mapped."""
    try:
        rollup = Path(f"/proc/{number}/smaps_rollup").read_text()
    except OSError as error:
        raise psutil.NoSuchProcess(number) from error
    sizes = dict(line.split(":") for line in rollup.splitlines()[1:])
    return 1024 * sum(int(sizes[kind].split()[0]) for kind in ("Pss_Anon", "Pss_Shmem"))


class MemoryWatch:
    """Samples what processes hold in a thread, as a context.

    Args:
        processes: returns the current processes.
        every_s: between two samples.

    Attributes:
        together: all of them, shared memory counted once.
    """

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]], every_s: float = 0.5) -> None:
        self._processes = processes
        self._every_s = every_s
        self._courses: dict[tuple[int, float], Course] = {}
        self.together = Course("all together")
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30)

    @property
    def courses(self) -> Sequence[Course]:
        """Of every process that was seen."""
        return list(self._courses.values())

    def growing(self, warm_up_s: float, *, mib: float, share: float, descriptors: float) -> list[str]:
        """Rises, a line for each: memory by more than ``mib`` and by more than ``share`` of it; or descriptors.

        Args:
            warm_up_s: seconds at the beginning that do not count.
            mib: MiB that the fitted line may rise in the rest.
            share: of the mean memory that it may rise.
            descriptors: that the fitted line of a process may rise in the rest.
        """
        growing = []
        for course in (*self.courses, self.together):
            grown = course.growth(warm_up_s)
            if grown is not None and grown[0] > max(mib * MIB, share * grown[1]):
                growing.append(f"{course.name}: +{grown[0] / MIB:.1f} MiB at {grown[1] / MIB:.0f} MiB")
            descriptors_grown = course.descriptor_growth(warm_up_s)
            if descriptors_grown is not None and descriptors_grown[0] > descriptors:
                growing.append(f"{course.name}: +{descriptors_grown[0]:.1f} descriptors at {descriptors_grown[1]:.0f}")
        return growing

    def table(self, warm_up_s: float) -> str:
        """Everything watched with its mean and its growth, for people."""
        lines = []
        for course in (*self.courses, self.together):
            grown, descriptors = course.growth(warm_up_s), course.descriptor_growth(warm_up_s)
            if grown is not None:
                shown = "" if descriptors is None else f"{descriptors[1]:4.0f} {descriptors[0]:+5.1f}"
                lines.append(f"{grown[1] / MIB:8.1f} MiB {grown[0] / MIB:+7.2f} MiB {shown:>10}  {course.name}")
        return "\n".join(sorted(lines, reverse=True))

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            together = 0
            for process in self._processes():
                with contextlib.suppress(psutil.Error):
                    key = (process.pid, process.create_time())
                    name = f"{process.pid} {' '.join(' '.join(process.cmdline()).split())[:200]}"
                    course = self._courses.setdefault(key, Course(name))
                    course.name = course.name if _IDLE in name else name
                    sizes, elapsed_s = process.memory_full_info(), time.monotonic() - self._began
                    course.samples.append((elapsed_s, sizes.uss))
                    course.descriptors.append((elapsed_s, process.num_fds()))
                    together += _held(process.pid)
            self.together.samples.append((time.monotonic() - self._began, together))
