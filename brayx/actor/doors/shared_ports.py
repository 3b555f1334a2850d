"""Ports that the replicas of one application share: no other application of the same machine gets them.

Knows nothing of what is served there.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from brayx import systems
from brayx.errors import StartupError

CHOOSE_OTHERS = "set this actor's native_port and tcp_port to others, or to null for none"
_PROBE_TIMEOUT_S = 1.0
_HOLD_TIMEOUT_S = 1.0
_HOLD_RETRY_S = 0.02


class HeldPort:
    """This process's part of a port that the replicas of one application share, on any address of this machine.

    ``SO_REUSEPORT`` would let two applications of one user share it, and clients of one would reach the other; TCP
    framing cannot identify the server. So the replicas of the application whose name is in a file lock that file
    together, for as long as they listen. The locks end with the processes, whatever ends those.

    Args:
        port: number of the port.
        application: name of the application whose replicas may share it.
        folder: folder of the files; all processes of one user on one machine must use the same.

    Raises:
        StartupError: another application holds it.
    """

    def __init__(self, port: int, application: str, folder: Path | None = None) -> None:
        # Not a job's own TMPDIR, where other applications would not look; each user has a separate folder.
        shared = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        folder = folder or Path(shared) / f"brayx-ports-{systems.user()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(folder / str(port), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartupError(f"cannot find out what holds port {port}: {error}", port=port) from error
        deadline = time.monotonic() + _HOLD_TIMEOUT_S
        try:
            while not self._take(application):  # another process's check may hold it briefly
                if time.monotonic() > deadline:
                    raise StartupError(
                        f"native port {port} is taken by the actor {self._holder()!r}: {CHOOSE_OTHERS}",
                        port=port,
                    )
                time.sleep(_HOLD_RETRY_S)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Releases the port; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _take(self, application: str) -> bool:
        if systems.lock(self._file):  # no process listens: the name is stale
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, application.encode())
        # Changing from one lock to the other releases it briefly, so the name is checked in any case.
        if systems.lock(self._file, shared=True) and self._holder() == application:
            return True
        systems.unlock(self._file)
        return False

    def _holder(self) -> str:
        return systems.read_at(self._file, 4096, 0).decode(errors="replace")


def check_shared_port(host: str, port: int, application: str) -> None:
    """Checks that a process that already listens at a shared HTTP port is a replica of the same application.

    ``SO_REUSEPORT`` would let two applications share a port, and clients of one would reach the other.

    Raises:
        StartupError: another program listens there.
    """
    try:
        with socket.create_connection((host, port), _PROBE_TIMEOUT_S):
            pass
    except OSError:
        return  # no process listens
    said: Any = None
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/", timeout=_PROBE_TIMEOUT_S) as reply:
            said = json.load(reply)
    except (OSError, ValueError):
        pass
    if not isinstance(said, dict) or said.get("application") != application:
        who = f"the actor {said['application']!r}" if isinstance(said, dict) and "application" in said else "another"
        raise StartupError(f"native port {port} of {host} is taken by {who}: {CHOOSE_OTHERS}", port=port)
