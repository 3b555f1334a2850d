"""`breakpoint()` in the process of a job: Python's debugger on the terminal, while the job's deadlines wait.

The prompt holds the event loop, and with it every session. Knows nothing of what runs there.
"""

from __future__ import annotations

import _thread
import os
import pdb  # noqa: T100, it is what this file is about
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import brayx.clock as clock


class Breakpoints:
    """A context that sets the hook of `breakpoint()`, unless another debugger has set its own.

    Args:
        on_hold: called before each prompt, in the thread that is stopped: frees the terminal.
    """

    def __init__(self, on_hold: Callable[[], None]) -> None:
        self.on_hold = on_hold
        self.prompt = threading.RLock()
        self.is_over = False

    def __enter__(self) -> Breakpoints:
        if sys.breakpointhook is sys.__breakpointhook__ and not os.environ.get("PYTHONBREAKPOINT"):
            sys.breakpointhook = self._break_in_caller
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        if getattr(sys.breakpointhook, "__self__", None) is self:
            sys.breakpointhook = sys.__breakpointhook__

    def _break_in_caller(self, *args: Any, **options: Any) -> None:
        if not self.is_over:
            _Debugger(self).set_trace(sys._getframe(1))


class _Debugger(pdb.Pdb):
    """pdb that stops the clock at its prompt, and whose ``q`` ends the job as Ctrl-C does."""

    def __init__(self, breakpoints: Breakpoints) -> None:
        super().__init__()
        self._breakpoints = breakpoints

    def interaction(self, frame: FrameType | None, *args: Any) -> None:
        with self._breakpoints.prompt, clock.hold():
            if self._breakpoints.is_over:  # another thread's prompt has ended the job meanwhile
                self.set_continue()
                return
            self._breakpoints.on_hold()
            self.stdout = sys.stdout  # which a live display may have had in its hands until now
            super().interaction(frame, *args)

    def do_quit(self, arg: str) -> bool:
        """Ends the job."""
        self._breakpoints.is_over = True
        self.set_continue()
        _thread.interrupt_main()
        return True

    do_q = do_exit = do_EOF = do_quit
