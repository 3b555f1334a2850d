"""Runs a module of this installation in a child process, and exchanges messages with it over pipes.

`Child` is this process's end. In the child, the module's ``main(parent, *words)`` gets the other end, a `Channel`. A
message is anything that pickles; at either end, `Channel.ask` sends requests that the other end's `Channel.serve`
answers. Knows nothing of what is sent.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import logging
import math
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from brayx import systems
from brayx.errors import BrayxError, first_line

log = logging.getLogger(__name__)

_HEADER = struct.Struct(">QQ")
"""Precedes each message: its number, which an answer repeats, and its size in bytes."""
_CLOSED = -1
_DYING_S = 1.0
"""Time that a child has to exit once its pipes are closed, before it is killed."""
_RUN = "from brayx.children import run_module; run_module()"


class RequestFailed(BrayxError):
    """The other process gave no answer. The message is the rest of a sentence about it: ``failed: ValueError``."""


class ChildDied(RequestFailed):
    """The child has ended, or was closed."""


class Channel:
    """One end of two pipes to another process.

    `send` and `receive` may each be called by one thread at a time; `ask` by any thread, if nothing else is received.

    Args:
        incoming, outgoing: file descriptors of the pipes.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._asking = threading.Lock()
        self._asked = 0

    def send(self, message: Any) -> bool:
        """Sends a message; returns whether it could: if not, the other end is closed, which `receive` reports."""
        return self._write(0, _pickled(message))

    def receive(self, timeout_s: float = math.inf) -> Any:
        """Waits for a message.

        Raises:
            EOFError: the other end is closed; for a `Child`, `ChildDied`.
            TimeoutError: no message arrived in time.
        """
        return pickle.loads(self._read(timeout_s)[1])

    def ask(self, *request: Any, timeout_s: float = math.inf) -> Any:
        """Sends a request, and returns the answer of the other end's `serve`.

        Raises:
            BrayxError: the other end refused the request.
            RequestFailed: it could not read it, or failed unexpectedly.
            EOFError, TimeoutError: as for `receive`.
        """
        data, until = _pickled(request), time.monotonic() + timeout_s
        if not self._asking.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise TimeoutError
        try:
            self._asked += 1
            self._write(self._asked, data)
            number = 0
            while number != self._asked:  # an answer to an earlier request, which came too late
                number, reply = self._read(until - time.monotonic())
        finally:
            self._asking.release()
        answer, error = pickle.loads(reply)
        if error is not None:
            raise error
        return answer

    def serve(self, answer: Callable[..., Any]) -> None:
        """Answers requests, one after the other, until the other end is closed.

        Args:
            answer: called with the parts of a request; a `BrayxError` that it raises is raised at the other end.
        """
        while True:
            try:
                number, data = self._read(math.inf)
            except (EOFError, ChildDied):
                return
            try:
                request = pickle.loads(data)
            except Exception as error:
                reply = _refusal(f"cannot read a request: {type(error).__name__}: {first_line(error)}")
            else:
                reply = _reply(answer, request)
            self._write(number, reply)

    def exit_when_closed(self) -> NoReturn:
        """Waits until the other end is closed, and ends this process, whatever its other threads do."""
        systems.wait_closed(self._incoming)
        os._exit(0)

    def _write(self, number: int, parts: Sequence[memoryview]) -> bool:
        try:
            for rest in (memoryview(_HEADER.pack(number, sum(map(len, parts)))), *parts):
                while rest:
                    rest = rest[os.write(self._outgoing, rest) :]
        except OSError:
            return False
        return True

    def _read(self, timeout_s: float) -> tuple[int, bytearray]:
        """The number and the content of the next message."""
        if self._incoming == _CLOSED:
            raise EOFError("this end is closed")
        if timeout_s < math.inf and not systems.wait_readable(self._incoming, timeout_s):
            raise TimeoutError
        number, size = _HEADER.unpack(self._read_bytes(_HEADER.size))
        return number, self._read_bytes(size)

    def _read_bytes(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = systems.read_into(self._incoming, rest)
            except OSError:
                count = 0
            if not count:
                raise EOFError("the other end is closed")
            rest = rest[count:]
        return data


class Child(Channel):
    """A module of this installation in a child process, which imports from where this process does.

    The child has its own process group, so Ctrl-C in a terminal does not reach it, not even while it starts: its
    owner ends it. All methods but `close` belong to the owner's thread.

    Args:
        module: dotted name of a module with a function ``main(parent: Channel, *words: str)``. What the function
            prints goes to standard error; the child ends when it returns.
        *words: its arguments.
        files: file descriptors that the child gets under the same numbers.
        finishes: if this process ends, the child finishes what it does first, whatever a service manager signals to
            all processes; otherwise it exits at once.
        forks: fork this process instead of starting Python again, where that is possible (`systems.can_fork`). A fork
            runs at once, since it shares what is imported with this process, and gets no ``variables``; its function
            does not run in its main thread.
        restart_s: minimum time between a start and the second after it: a child that died is restarted at once, but not
            in a loop.
        **variables: environment variables to set in addition to those of this process.

    Attributes:
        restart_s: as above.
        pid: process id of the last start.
        death: how it last ended, as the rest of a sentence: ``was killed by SIGKILL``.
    """

    def __init__(
        self,
        module: str,
        *words: str,
        files: Sequence[int] = (),
        finishes: bool = False,
        forks: bool = False,
        restart_s: float = 0.0,
        **variables: str,
    ) -> None:
        super().__init__(_CLOSED, _CLOSED)
        program = [sys.executable, "-P", "-c", _RUN]  # -P: do not import from the current folder first
        self._words = [str(int(finishes)), module, *words]
        self._argv = [*program, *self._words]
        self._finishes, self._forks = finishes, forks
        self._files, self._variables = tuple(files), variables
        self._popen: subprocess.Popen[bytes] | _Fork | None = None
        self._starts = (-math.inf, -math.inf)
        """Times of the last two starts."""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.restart_s = restart_s
        self.pid = 0
        self.death = "has not started"

    @property
    def runs(self) -> bool:
        """Whether it was started and is not known to have ended."""
        return self._popen is not None

    @property
    def ends(self) -> list[int]:
        """File descriptors of the pipes to it that are open."""
        return [end for end in (self._incoming, self._outgoing) if end != _CLOSED]

    @property
    def wait_s(self) -> float:
        """Seconds until it may be started."""
        return max(0.0, self._starts[0] + self.restart_s - time.monotonic())

    def start(self) -> None:
        """Starts it unless it is running; first waits for `wait_s`.

        Raises:
            ChildDied: it was closed.
            OSError: the system starts no process.
        """
        if self.runs:
            return
        self._closed.wait(self.wait_s)
        with self._lock:
            if self._closed.is_set():
                raise ChildDied("was ended")
            self._starts = (self._starts[1], time.monotonic())
            popen = self._started()
            self._popen, self.pid = popen, popen.pid
        assert popen.stdin is not None
        assert popen.stdout is not None
        self._incoming, self._outgoing = popen.stdout.fileno(), popen.stdin.fileno()
        _started.add(self)

    def _started(self) -> subprocess.Popen[bytes] | _Fork:
        if self._forks and systems.can_fork():
            return _Fork(self._words)
        paths = os.pathsep.join(path for path in sys.path if path)
        with systems.endings_held() if self._finishes else contextlib.nullcontext():
            return subprocess.Popen(
                self._argv,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=self._files,
                process_group=0,
                env={**os.environ, "PYTHONPATH": paths, **self._variables},
            )

    def end(self, timeout_s: float = 0.0) -> None:
        """Closes its input, so that it ends, and kills it after ``timeout_s``. Idempotent; it may be started again."""
        popen = self._popen
        if popen is None:
            return
        self._incoming = self._outgoing = _CLOSED
        assert popen.stdin is not None
        assert popen.stdout is not None
        popen.stdin.close()
        try:
            popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        popen.stdout.close()
        self._popen, self.death = None, how_it_ended(popen.returncode)

    def close(self) -> None:
        """Kills it for good: it cannot be started again. Idempotent; may be called from any thread."""
        self._closed.set()
        with self._lock:
            if self._popen is not None:
                self._popen.kill()

    def _read(self, timeout_s: float) -> tuple[int, bytearray]:
        try:
            return super()._read(timeout_s)
        except EOFError:
            self.end(_DYING_S)
            raise ChildDied(self.death) from None


_started: weakref.WeakSet[Child] = weakref.WeakSet()


class _Fork:
    """A fork of this process that runs a module, with what `Child` uses of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str]) -> None:
        (their_incoming, outgoing), (incoming, their_outgoing) = os.pipe(), os.pipe()

        def run() -> None:
            # Linux may share cores by session: in this process's, a busy child would slow the doors.
            os.setsid()
            for number in systems.ENDING:
                signal.signal(number, signal.SIG_DFL)
            atexit._clear()  # the fork must not run this process's exit handlers
            # Otherwise the fork and the other children would never see this process close its ends.
            for pipe in (outgoing, incoming, *(end for child in _started for end in child.ends)):
                os.close(pipe)
            # A fork lacks the threads with which its parent's thread computed, and would wait for them in vain; a new
            # thread has its own.
            with ThreadPoolExecutor(1, thread_name_prefix="brayx-fork") as pool:
                pool.submit(_run, Channel(their_incoming, their_outgoing), words).result()

        self._process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        self._process.start()
        os.close(their_incoming)
        os.close(their_outgoing)
        self.stdin, self.stdout = io.FileIO(outgoing, "w"), io.FileIO(incoming)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int:
        return self._process.exitcode or 0

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> None:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout_s or 0.0)


class _PickledParts(list[memoryview]):
    """A file that keeps what a pickler writes to it, without copying."""

    def write(self, part: Any) -> None:
        self.append(part.raw() if isinstance(part, pickle.PickleBuffer) else memoryview(part))


def _pickled(message: Any) -> _PickledParts:
    """A pickled message in parts: a large array or bytes object is a separate part, uncopied."""
    parts = _PickledParts()
    pickle.Pickler(parts, protocol=5).dump(message)
    return parts


def _reply(answer: Callable[..., Any], request: tuple[Any, ...]) -> _PickledParts:
    try:
        value = answer(*request)
    except BrayxError as error:
        return _pickled((None, error))
    except Exception as error:
        log.exception("a request of another process failed")
        return _refusal(f"failed: {type(error).__name__}; the log has more")
    try:
        return _pickled((value, None))
    except Exception as error:
        return _refusal(f"cannot send its answer: {type(error).__name__}: {first_line(error)}")


def _refusal(predicate: str) -> _PickledParts:
    return _pickled((None, RequestFailed(predicate)))


def how_it_ended(status: int) -> str:
    """Describes how a process ended, given its `subprocess.Popen.returncode`."""
    if status >= 0:
        return f"ended with exit code {status}"
    by = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    return f"was killed by {by}" + (" (the system does this when memory runs out)" if by == "SIGKILL" else "")


def run_module() -> None:
    """The child's side of `Child`: runs ``main`` of the module that the command line names."""
    if int(sys.argv[1]):
        systems.ignore_endings()
    _run(Channel(os.dup(0), os.dup(1)), sys.argv[1:])


def _run(parent: Channel, arguments: Sequence[str]) -> NoReturn:
    finishes, module, *words = arguments
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # prints must not mix with the messages
    if not int(finishes):
        threading.Thread(target=parent.exit_when_closed, name="brayx-parent", daemon=True).start()
    importlib.import_module(module).main(parent, *words)
    # Skip the interpreter's clean-up of modules, which takes seconds with torch or MLflow loaded.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    atexit._run_exitfuncs()
    os._exit(0)
