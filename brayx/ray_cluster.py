"""Ray's start, tried again where a busy machine is too slow for it; joining one that runs; and whether it is shut.

Ray ends its own node when a process of it is not up within 15 s, which is no option of Ray's, and `ray.init` finds that
out 15 s later. What it had started by then it leaves running. Knows nothing of jobs and applications.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from brayx.errors import StartupError, first_line

logger = logging.getLogger(__name__)

_TRIES = 5
_REACH_S = 3.0
_END_S = 5.0


def start_ray(tell: Callable[[str], object] = logger.warning, **options: Any) -> None:
    """Starts a Ray of this process's own, and connects to it.

    Args:
        tell: is told, in a line, of each start that failed before another is tried.
        options: of ``ray.init``, but for ``address``.

    Raises:
        StartupError: it failed five times; the message says what happened the last time.
    """
    import ray

    for tries in range(1, _TRIES + 1):
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:  # Ray raises the bare class when its node is too slow to come up
            why = f"{first_line(error)}{_last_words()}"
        ray.shutdown()
        _end(set(psutil.Process().children(recursive=True)) - before)
        if tries < _TRIES:
            tell(f"Ray did not start, which is tried again ({tries} of {_TRIES} tries failed): {why}")
    raise StartupError(f"Ray did not start in {_TRIES} tries: {why}")


def join_ray(address: str, **options: Any) -> None:
    """Connects to a Ray that runs.

    Args:
        address: ``host:port``, or ``auto`` for the one on this machine.
        options: of ``ray.init``, but for ``address``.

    Raises:
        StartupError: nobody answers there, which is found out at once, or this process is not let in.
    """
    import ray

    try:
        check_address(address)
        ray.init(address=address, **options)
    except StartupError:
        raise
    except Exception as error:  # Ray raises bare classes here, and its own for a token that is not right
        raise StartupError(f"cannot join Ray at {address}: {first_line(error)}") from error


def check_address(address: str | None) -> None:
    """Makes sure that somebody answers where ``ray.init`` would join a Ray; it waits two minutes for one that is gone.

    Args:
        address: as of ``ray.init``; None: what it does without.

    Raises:
        StartupError: nobody does. One that `ray start` has started and that died leaves the file with its address.
    """
    from ray._common.utils import get_ray_address_file
    from ray._private.services import canonicalize_bootstrap_address

    found = canonicalize_bootstrap_address(address)  # type: ignore[arg-type]  # None is allowed
    if found is None or answers(found):
        return
    file = Path(get_ray_address_file(None))
    if file.is_file() and file.read_text().strip() == found:
        raise StartupError(
            f"nobody answers at {found}, where by {file} Ray was started last: remove that file, or start Ray again"
        )
    raise StartupError(f"nobody answers at {found}, where Ray is to be joined")


def warn_if_open(log: logging.Logger) -> None:
    """Warns if this process's Ray asks for no token: it and each replica of Serve listen on every interface and take
    pickles, so whoever reaches them runs code here. It is no error, since a network may keep others out."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if not is_token_auth_enabled():
        log.warning(
            "Ray asks for no token here: whoever reaches its ports, or those of Serve's replicas, runs code on this "
            "machine. Keep others out, or have RAY_AUTH_MODE=token in the environment (docs/guide-serve.md)"
        )


def answers(address: str) -> bool:
    """Whether somebody listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S):
            return True
    except OSError:
        return False


def _last_words() -> str:
    """Why the node of this process's newest session ended, where its log tells that."""
    from ray._common.utils import get_default_ray_temp_dir

    folder: str = get_default_ray_temp_dir()  # type: ignore[no-untyped-call]
    sessions = glob.glob(f"{glob.escape(folder)}/session_*_{os.getpid()}")
    for session in sorted(sessions)[-1:]:
        log = Path(session, "logs", "raylet.out")
        with contextlib.suppress(OSError):
            failed = re.findall(r"Check failed: \S+ (.*)", log.read_text(errors="replace"))
            return f" Its node ended: {failed[-1]} ({log})" if failed else f" See {log.parent}"
    return ""


def _end(processes: set[psutil.Process]) -> None:
    """Ends what a failed start has left, so that the next has the machine for itself."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=_END_S)
