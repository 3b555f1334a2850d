"""Starts a module of this installation as a child process, with pipes to its standard input and output.

Knows nothing of what is sent over the pipes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence


def start_module(module: str, *words: str, files: Sequence[int] = (), **variables: str) -> subprocess.Popen[bytes]:
    """Runs ``python -m module`` in a child that imports from where this process does.

    The child has a process group of its own, so Ctrl-C in a terminal does not reach it, not even while it starts: the
    process that started it ends it.

    Args:
        module: dotted name.
        *words: its arguments.
        files: file descriptors that the child gets under the same numbers.
        **variables: environment variables to set in addition to those of this process.

    Returns:
        The child; its standard input and output are pipes.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],  # -P: do not import from the current folder first
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=files,
        process_group=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables},
    )


def how_it_ended(status: int) -> str:
    """Describes how a process ended, given its `subprocess.Popen.returncode`."""
    if status >= 0:
        return f"ended with exit code {status}"
    by = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    return f"was killed by {by}" + (" (the system does this when memory runs out)" if by == "SIGKILL" else "")
