"""Starts Ray, with retries for busy machines, or joins a running one.

Ray ends its own node if one of its processes is not up within 15 s, and no option changes that. `ray.init` notices 15 s
later, and leaves the processes it has started running. Knows nothing of jobs and applications.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from brayx.cluster import ray_private
from brayx.errors import ConnectFailed, StartupError, first_line

logger = logging.getLogger(__name__)

_TRIES = 5
_REACH_S = 3.0
_END_S = 5.0


def start_ray(tell: Callable[[str], object] = logger.warning, **options: Any) -> None:
    """Starts a new Ray cluster, and connects to it.

    Args:
        tell: called with a line for each failed start, before the next try.
        options: options of ``ray.init``, without ``address``.

    Raises:
        StartupError: it failed five times; the message gives the reason of the last failure.
    """
    import ray

    ray_private.warn_if_unchecked()
    for tries in range(1, _TRIES + 1):
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:  # Ray raises the bare class when its node is too slow to come up
            why = f"{first_line(error)}{_node_failure()}"
        ray.shutdown()
        _end(set(psutil.Process().children(recursive=True)) - before)
        if tries < _TRIES:
            tell(f"Ray did not start, trying again ({tries} of {_TRIES} tries failed): {why}")
    raise StartupError(f"Ray did not start in {_TRIES} tries: {why}")


def join_ray(address: str, **options: Any) -> None:
    """Connects to a running Ray.

    Args:
        address: ``host:port``, or ``auto`` for the one on this machine.
        options: options of ``ray.init``, without ``address``.

    Raises:
        StartupError: nothing listens there, which is noticed at once, or Ray refuses this process.
    """
    import ray

    try:
        check_address(address)
        ray_private.warn_if_unchecked()
        ray.init(address=address, **options)
    except StartupError:
        raise
    except Exception as error:  # Ray raises bare classes here, and its own for a wrong token
        raise StartupError(f"cannot join Ray at {address}: {first_line(error)}") from error


def nodes_and_own() -> tuple[list[dict[str, Any]], str]:
    """Ray's nodes, as `ray.nodes` describes them, and the id of this process's node."""
    import ray

    return ray.nodes(), ray.get_runtime_context().get_node_id()  # type: ignore[no-untyped-call]


def where_ray_is() -> dict[str, str]:
    """Arguments of `connected` with which another process joins this process's Ray, and ``host`` for display."""
    import ray

    return {
        "address": ray.get_runtime_context().gcs_address,
        "auth": os.environ.get("RAY_AUTH_MODE", ""),
        "host": socket.gethostname(),
    }


@contextlib.contextmanager
def connected(address: str, auth: str, **options: Any) -> Iterator[None]:
    """A context in which this process is connected to a running Ray; keeps a connection that exists.

    Args:
        address: ``host:port`` of the Ray.
        auth: ``RAY_AUTH_MODE`` of the Ray; empty: Ray's default.
        options: options of ``ray.init``, without ``address``.

    Raises:
        ConnectFailed: this process is connected to another Ray, or the Ray refuses it.
    """
    if auth:
        os.environ.setdefault("RAY_AUTH_MODE", auth)  # read when Ray is imported
    import ray

    if ray.is_initialized():
        current = ray.get_runtime_context().gcs_address
        if current != address:
            raise ConnectFailed(f"this process is connected to Ray at {current}, not at {address}")
        yield
        return
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises bare classes here, and its own for a wrong token
        raise ConnectFailed(f"cannot join Ray at {address}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str | None) -> None:
    """Checks that a process listens where ``ray.init`` would join; Ray itself would wait two minutes for a dead one.

    Args:
        address: as for ``ray.init``; None: its default.

    Raises:
        StartupError: nothing listens. A Ray of `ray start` that died leaves a file with its address behind.
    """
    resolved = ray_private.address_of_ray(address)
    if resolved is None or answers(resolved):
        return
    file = ray_private.address_file()
    if file.is_file() and ray_private.address_of_ray(file.read_text().strip()) == resolved:
        raise StartupError(
            f"nothing listens at {resolved}, where Ray was started last according to {file}: remove that file, or "
            "start Ray again"
        )
    raise StartupError(f"cannot join Ray at {resolved}: nothing listens there")


def answers(address: str) -> bool:
    """Whether something listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S):
            return True
    except OSError:
        return False


def _node_failure() -> str:
    """Why the node of this process's newest session ended, if its log has the reason."""
    sessions = glob.glob(f"{glob.escape(ray_private.sessions_folder())}/session_*_{os.getpid()}")
    for session in sorted(sessions)[-1:]:
        log = Path(session, "logs", "raylet.out")
        with contextlib.suppress(OSError):
            failed = re.findall(r"Check failed: \S+ (.*)", log.read_text(errors="replace"))
            return f" Its node ended: {failed[-1]} ({log})" if failed else f" See {log.parent}"
    return ""


def _end(processes: set[psutil.Process]) -> None:
    """Ends Ray's processes among ``processes``, left by a failed start, so that they do not slow down the next one."""
    killed = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if any("/ray/" in word for word in process.cmdline()):  # another thread may have started others meanwhile
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=_END_S)
