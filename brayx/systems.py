"""Functions that differ between Linux, macOS and Windows, for the client, the bridges and the local host.

These import and type-check on all three systems (`tests/unit/test_systems.py`), but have only run on Linux. Each
function says what a system lacks. `brayx.cluster` is for Linux and macOS.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File of Linux's control groups, version 2: the microseconds of CPU allowed, or ``max``, and their period."""
_LOOK_S = 0.005
_WIND_UP_S = 0.2

if sys.platform == "win32":
    import _thread
    import _winapi
    import msvcrt

    _timers: list[threading.Timer] = []

    def cores() -> int:
        """Number of cores that this process may use."""
        return os.cpu_count() or 1

    def can_fork() -> bool:
        """Whether a fork of this process could run; never on Windows."""
        return False

    def user() -> int:
        """Id of this process's user; 0 on Windows, where folders for temporary files belong to one user."""
        return 0

    def open_folder(path: str | os.PathLike[str], *, follow: bool = True) -> int:
        """Descriptor of a folder, for `lock`; a link only if ``follow``. -1 on Windows, where folders have none."""
        return -1

    def lock(descriptor: int, *, shared: bool = False) -> bool:
        """Takes an advisory lock, which ends with the process; False: another process has it. Takes none on Windows."""
        return True

    def unlock(descriptor: int) -> None:
        """Releases the lock."""

    def close(descriptor: int) -> None:
        """Closes a descriptor of `open_folder`."""

    def share_port(sock: socket.socket) -> None:
        """Lets further sockets listen at the same port, each for a share of the connections; no effect on Windows."""

    def can_lock() -> bool:
        """Whether `lock` does anything."""
        return False

    def read_at(descriptor: int, size: int, offset: int) -> bytes:
        """Reads at most ``size`` bytes at an offset; the descriptor has no other reader."""
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)

    def read_into(descriptor: int, buffer: memoryview) -> int:
        """Reads into a buffer; returns the number of bytes."""
        data = os.read(descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def wait_readable(descriptor: int, timeout_s: float) -> bool:
        """Waits until a pipe has something to read or is closed; False: neither happened in time."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                if _winapi.PeekNamedPipe(msvcrt.get_osfhandle(descriptor), 0)[0]:
                    return True
            except OSError:
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)

    def wait_closed(descriptor: int) -> None:
        """Waits until the other end of a pipe is closed."""
        with contextlib.suppress(OSError):
            while True:
                _winapi.PeekNamedPipe(msvcrt.get_osfhandle(descriptor), 0)
                time.sleep(_WIND_UP_S)

    def readable(sock: socket.socket) -> Callable[[], bool]:
        """A function that tells, without waiting, whether ``sock`` has something to read."""
        return lambda: bool(select.select([sock], [], [], 0)[0])

    def lower_priority(niceness: int) -> None:
        """Lowers this process's priority; no effect on Windows."""

    def endings_held() -> contextlib.AbstractContextManager[None]:
        """No effect on Windows, where a signal reaches one process alone."""
        return contextlib.nullcontext()

    def ignore_endings() -> None:
        """Ignores the signals `ENDING` from now on, in the main thread."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    def signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
        """Signals a process and its children, which may outlive it: it leads a process group.

        Returns:
            Whether a process of the group exists; signal 0 only checks. On Windows the process alone counts, and each
            other signal kills it.
        """
        if number and process.poll() is None:
            process.kill()
        return process.poll() is None

    def interrupt_after(seconds: float) -> None:
        """Raises KeyboardInterrupt in the main thread after this many seconds; 0 cancels it."""
        for timer in _timers:
            timer.cancel()
        _timers.clear()
        if seconds:
            _timers.append(threading.Timer(seconds, _thread.interrupt_main))
            _timers[0].daemon = True
            _timers[0].start()

    KILL = signal.SIGTERM
    ENDING = (signal.SIGINT, signal.SIGTERM)
else:
    import fcntl

    def cores() -> int:
        """Number of cores that this process may use: in a container with a limit of CPUs, at most that."""
        if sys.platform != "linux":
            return os.cpu_count() or 1
        allowed = len(os.sched_getaffinity(0))
        with contextlib.suppress(OSError, ValueError):  # no control groups, and "max", no limit
            quota, period = map(int, _QUOTA.read_text().split())
            allowed = max(1, min(allowed, quota // period))
        return allowed

    def can_fork() -> bool:
        """Whether a fork of this process would work. Only the forking thread continues in it, so locks that other
        threads hold stay locked. On macOS, frameworks have threads that Python does not know."""
        return sys.platform == "linux" and threading.active_count() == 1

    def user() -> int:
        """Id of this process's user."""
        return os.geteuid()

    def open_folder(path: str | os.PathLike[str], *, follow: bool = True) -> int:
        """Descriptor of a folder, for `lock`; a link only if ``follow``.

        Raises:
            OSError: there is no such folder.
        """
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW))

    def lock(descriptor: int, *, shared: bool = False) -> bool:
        """Takes an advisory lock, which ends with the process; False: another process has it.

        Raises:
            OSError: the file system has no locks.
        """
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(descriptor: int) -> None:
        """Releases the lock."""
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    def share_port(sock: socket.socket) -> None:
        """Lets further sockets listen at the same port, each for a share of the connections."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def close(descriptor: int) -> None:
        """Closes a descriptor of `open_folder`."""
        os.close(descriptor)

    def can_lock() -> bool:
        """Whether `lock` does anything."""
        return True

    def read_at(descriptor: int, size: int, offset: int) -> bytes:
        """Reads at most ``size`` bytes at an offset."""
        return os.pread(descriptor, size, offset)

    def read_into(descriptor: int, buffer: memoryview) -> int:
        """Reads into a buffer; returns the number of bytes."""
        return os.readv(descriptor, [buffer])

    def wait_readable(descriptor: int, timeout_s: float) -> bool:
        """Waits until a pipe has something to read or is closed; False: neither happened in time."""
        ready = select.poll()  # `select.select` fails beyond 1024 open files, and a door has one for each session
        ready.register(descriptor, select.POLLIN)
        return bool(ready.poll(max(0.0, timeout_s) * 1000))

    def wait_closed(descriptor: int) -> None:
        """Waits until the other end of a pipe is closed."""
        closed = select.poll()
        closed.register(descriptor, 0)  # only the hang-up, which is always reported
        closed.poll()

    def readable(sock: socket.socket) -> Callable[[], bool]:
        """A function that tells, without waiting, whether ``sock`` has something to read."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return lambda: bool(poll.poll(0))

    def lower_priority(niceness: int) -> None:
        """Lowers this process's priority to a niceness, unless it is that low already."""
        with contextlib.suppress(OSError):
            os.nice(max(0, niceness - os.nice(0)))

    @contextlib.contextmanager
    def endings_held() -> Iterator[None]:
        """Holds the signals `ENDING` back from a child that is started here, until it calls `ignore_endings`: one that
        comes before would kill it."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ignore_endings() -> None:
        """Ignores the signals `ENDING` from now on, in the main thread, and those that were held back."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
        """Signals a process and its children, which may outlive it: it leads a process group.

        Returns:
            Whether a process of the group exists; signal 0 only checks.
        """
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def interrupt_after(seconds: float) -> None:
        """Raises KeyboardInterrupt in the main thread after this many seconds; 0 cancels it."""
        signal.signal(signal.SIGALRM, _interrupt if seconds else signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    KILL = signal.SIGKILL
    """The signal that no process can ignore."""
    ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    """The signals by which a terminal or a service manager ends a process."""
