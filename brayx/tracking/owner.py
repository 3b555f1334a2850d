"""Which process has a trial: a running one of this machine must not share it. Knows nothing of MLflow."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from brayx.errors import TrackingError

OWNER_TAG = "brayx.owner"
"""Tag of a run: the process that has it."""


def owner_of(pid: int) -> str:
    """``host:pid:start time`` of a process of this machine; pids are used again, with another start time."""
    return f"{socket.gethostname()}:{pid}:{_started(pid)}"


def _started(pid: int) -> str:
    """Start time of a process from its system; empty: it has ended; ``?``: it runs, but the time is unknown."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "?"


def owner_is_gone(tags: Mapping[str, str]) -> bool:
    """Whether the process that owns the run with these tags has ended; False if it was not one of this machine."""
    owner = tags.get(OWNER_TAG, "")
    pid = pid_here(owner)
    return pid is not None and not _is_running(pid, owner)


def pid_here(owner: str) -> int | None:
    """The pid of an owner that is a process of this machine; None: it is on another machine, or unknown."""
    host, _, process = owner.partition(":")
    pid = process.partition(":")[0]
    return int(pid) if pid.isdigit() and host == socket.gethostname() else None


def _is_running(pid: int, owner: str) -> bool:
    return bool(_started(pid)) and owner_of(pid) == owner


def refuse_if_owned(name: str, run_id: str, owner: str) -> None:
    """Raises `TrackingError` if another running process of this machine has the run."""
    pid = pid_here(owner)
    if pid is not None and pid != os.getpid() and _is_running(pid, owner):
        raise TrackingError(
            f"trial {name!r} (run {run_id}) is running in process {pid}: stop that, or name another trial",
            pid=pid,
            run_id=run_id,
        )
