"""Ends an interrupted command in time: kills processes that still run at the deadline, and removes temporary files.

A command ends its parts in order, all within one `Deadline`; `end_within` handles parts that hang. It finds the
command's processes by a mark in their environment, which all inherit, including orphans and separate process groups.
Knows nothing of what the processes do.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn, Protocol

from brayx.temporary import remove_temporary_files
from brayx.threads import end_threads

if TYPE_CHECKING:
    import psutil

END_S = 8.0
"""Seconds from the interrupt to the last process's end."""

INTERRUPTED_S = END_S - 1.0
"""Seconds for an interrupted training to end in order; then its processes are killed."""
_PARTS_END_S = 3.0
"""Seconds of these for the parts that produce data."""

_SAVE_S = 120.0
"""Maximum wait for MLflow to start, which takes up to a minute on a busy machine."""

_MARK = "BRAYX_COMMAND"
_timer: threading.Timer | None = None
"""The timer of `end_within`."""
_is_killing = threading.Event()
"""`end_within` is about to end this process."""


class Deadline:
    """One deadline for all waits of a shutdown, so that several hanging parts do not add up.

    Args:
        seconds: time for all parts together, from the first call of `left` on.
        clock: returns seconds, for tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._until: float | None = None

    def left(self, at_most: float = math.inf) -> float:
        """Seconds that the next part may take, 0 when the time is over."""
        if self._until is None:
            self._until = self._clock() + self._seconds
        return max(0.0, min(at_most, self._until - self._clock()))

    def shorten(self, seconds: float) -> None:
        """Shortens the deadline to at most ``seconds`` from now."""
        self._until = self._clock() + self.left(seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context that stops the clock, for a wait with a separate deadline."""
        left_s = self.left()
        try:
            yield
        finally:
            self._until = self._clock() + left_s


def side_by_side(stops: Sequence[Callable[[float], object]], timeout_s: float) -> None:
    """Calls all concurrently, each with the whole ``timeout_s``; raises the exception of one of them."""
    with ThreadPoolExecutor(max(1, len(stops))) as pool:
        for done in [pool.submit(stop, timeout_s) for stop in stops]:
            done.result()


class JobPart(Protocol):
    """A part of a job that produces data: gamecores, rollouts, sources."""

    def __enter__(self) -> object:
        """Starts it."""

    def stop(self, timeout_s: float) -> None:
        """Ends it, within this time."""


@contextlib.contextmanager
def running_parts(
    parts: Sequence[JobPart], end: Deadline, stopping: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """A context in which the parts of a job run; at its end, or if one fails to start, all stop concurrently.

    Args:
        parts: started in order.
        end: deadline of the job's shutdown, which starts at the end of the context.
        stopping: called before the parts stop.
    """
    started: list[JobPart] = []
    try:
        for part in parts:
            part.__enter__()
            started.append(part)
        yield
    except KeyboardInterrupt:
        end.shorten(INTERRUPTED_S)
        raise
    finally:
        stopping()
        side_by_side([part.stop for part in started], end.left(_PARTS_END_S))


def mark() -> None:
    """Marks this process, and so all processes that it starts from now on."""
    os.environ[_MARK] = secrets.token_hex(8)


def is_ending() -> bool:
    """Whether this command was interrupted: `end_within` was called."""
    return _timer is not None


def end_within(seconds: float = END_S) -> None:
    """After ``seconds``, kills the processes of this command and ends it with exit code 130. Another call restarts the
    time."""
    global _timer
    if _timer is not None:
        _timer.cancel()
    _timer = threading.Timer(seconds, _kill)
    _timer.daemon = True  # ends with a command that finishes sooner
    _timer.start()


def wait_to_save(opened: Callable[[float], bool], say: Callable[[str], None]) -> bool:
    """Waits for MLflow to start, so that an interrupted training keeps its last checkpoint; returns whether it started.

    Afterwards the command has as long again to end, because a machine that starts MLflow slowly also saves slowly.
    Another Ctrl-C ends the wait, and the checkpoint is lost.

    Args:
        opened: waits up to the given number of seconds for MLflow, and returns whether it has started.
        say: prints a line.
    """
    if opened(0.0):
        return True
    say(f"waiting up to {_SAVE_S:g} s for MLflow to start, to save the last checkpoint; another Ctrl-C stops waiting")
    if not is_ending():  # not a command: Python raises KeyboardInterrupt for each Ctrl-C
        return opened(_SAVE_S)
    end_within(_SAVE_S + END_S)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    began, has_opened = time.monotonic(), False
    with contextlib.suppress(KeyboardInterrupt):
        has_opened = opened(_SAVE_S)
    signal.signal(signal.SIGINT, previous)
    end_within(max(END_S, time.monotonic() - began) if has_opened else END_S)
    return has_opened


def leave(code: int) -> NoReturn:
    """Ends this process like ``sys.exit``, but skips the interpreter's clean-up of modules.

    With Ray, torch and MLflow loaded, that clean-up takes three or four seconds.
    """
    while _is_killing.is_set():  # the code may come from the death of a killed process
        time.sleep(1.0)
    with contextlib.suppress(OSError):  # the reader of the output may have ended
        sys.stdout.flush()
        sys.stderr.flush()
    atexit.unregister(end_threads)  # `os._exit` below ends threads safely, so do not wait for them
    atexit._run_exitfuncs()
    os._exit(code)


def _kill() -> None:
    import psutil

    _is_killing.set()
    left = marked(_MARK, os.environ.get(_MARK, ""))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=0.5)
    remove_temporary_files()
    print(f"brayx: ending took too long: {len(left)} processes were killed", file=sys.stderr, flush=True)
    os._exit(130)


def marked(name: str, value: str, *words: str) -> list[psutil.Process]:
    """Running processes, except this one, that were started with ``name=value`` in their environment.

    Args:
        words: words that the process's command line must all contain.
    """
    import psutil  # not on a machine with a game only, whose commands do not come here

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.environ().get(name) != value:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            line = " ".join(process.cmdline()) if words else ""
            if all(word in line for word in words):
                processes.append(process)
    return processes
