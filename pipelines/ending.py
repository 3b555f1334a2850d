"""The promise that an interrupted command is gone in time: what still runs when its time is over is killed.

A command ends what it started in order, each part within a deadline of its own; should several of them hang at once,
this is what ends the wait. Knows nothing of what the processes do: all carry a mark of the command in their
environment, which they inherit, orphans and process groups of their own included.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import threading
from typing import NoReturn

import psutil

END_S = 8.0
"""Seconds from the interrupt to the last process's end."""

_MARK = "BRAYX_COMMAND"


def mark() -> None:
    """Marks this process, and so everything that it starts from now on."""
    os.environ[_MARK] = secrets.token_hex(8)


def end_within(seconds: float = END_S) -> None:
    """Kills what this command started and is still there after ``seconds``, and ends it with exit code 130."""
    timer = threading.Timer(seconds, _kill)
    timer.daemon = True  # a command that is done sooner takes it along
    timer.start()


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
