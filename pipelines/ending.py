"""The promise that an interrupted command is gone in time: what still runs when its time is over is killed.

The temporary files of all that it started go with it, since whoever is killed cannot remove its own.

A command ends what it started in order, all parts within one `Deadline`; should it not keep that, this is what ends the
wait. Knows nothing of what the processes do: all carry a mark of the command in their environment, which they inherit,
orphans and process groups of their own included.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import psutil

END_S = 8.0
"""Seconds from the interrupt to the last process's end."""

_MARK = "BRAYX_COMMAND"
_REMOVAL_S = 1.0
_folders: list[str] = []
"""Those of `temporary_files` that are in use."""


class Deadline:
    """One for all that an ending waits for, so that several parts which hang do not add up.

    Args:
        seconds: how long all may take together, from the first question on.
        clock: seconds, for tests.
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
        """Leaves no more than so many."""
        self._until = self._clock() + self.left(seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which time does not count: what is waited for there has a deadline of its own."""
        left_s = self.left()
        try:
            yield
        finally:
            self._until = self._clock() + left_s


def side_by_side(stops: Sequence[Callable[[float], object]], timeout_s: float) -> None:
    """Calls all at the same time, each with the whole ``timeout_s``; raises what one of them raised."""
    with ThreadPoolExecutor(max(1, len(stops))) as pool:
        for done in [pool.submit(stop, timeout_s) for stop in stops]:
            done.result()


def mark() -> None:
    """Marks this process, and so everything that it starts from now on."""
    os.environ[_MARK] = secrets.token_hex(8)


def end_within(seconds: float = END_S) -> None:
    """Kills what this command started and is still there after ``seconds``, and ends it with exit code 130."""
    timer = threading.Timer(seconds, _kill)
    timer.daemon = True  # a command that is done sooner takes it along
    timer.start()


@contextlib.contextmanager
def temporary_files() -> Iterator[str]:
    """A context: temporary files of this process, and of what it starts meanwhile, are in a folder that goes with it.

    Ray's own stay where they were: the paths of its sockets must be short, and others look for a running Ray there.
    So does what torch compiles: it is kept for the next time, and torch makes its folder anew when that is gone.
    """
    # Beside the folder, as without it.
    variables = {
        "RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"),
    }
    folder, found = tempfile.mkdtemp(prefix="brayx-"), tempfile.tempdir
    variables["TMPDIR"] = folder
    before = {name: os.environ.get(name) for name in variables}
    _folders.append(folder)
    os.environ.update(variables)
    tempfile.tempdir = folder
    try:
        yield folder
    finally:
        tempfile.tempdir = found
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _remove(folder)
        _folders.remove(folder)


def _remove(folder: str) -> None:
    """Removes a folder, again while a process that is just ending writes into it."""
    deadline = time.monotonic() + _REMOVAL_S
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.exists(folder):
            time.sleep(0.05)


def leave(code: int) -> NoReturn:
    """Ends this process as ``sys.exit`` would, but without taking every module apart.

    With Ray, torch and MLflow loaded that takes the interpreter three or four seconds, at the end of each command.
    """
    with contextlib.suppress(OSError):  # whoever read what it says may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def _kill() -> None:
    left = marked(_MARK, os.environ.get(_MARK, ""))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=0.5)
    for folder in _folders[:]:  # the main thread may be removing one
        _remove(folder)
    print(f"brayx: ending took too long: {len(left)} processes were killed", file=sys.stderr, flush=True)
    os._exit(130)


def marked(name: str, value: str, *words: str) -> list[psutil.Process]:
    """Living processes that were started with ``name=value`` in their environment, this one left out.

    Args:
        words: all of them are in the command line.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.environ().get(name) != value:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            line = " ".join(process.cmdline()) if words else ""
            if all(word in line for word in words):
                found.append(process)
    return found
