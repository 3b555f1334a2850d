"""The clerk's process, which writes trials to MLflow: both ends of its pipes.

`ClerkProcess` is the training process's end: it starts the process, and sends requests from a thread, in order. `main`
runs in the process: it has the trials with their hubs, and answers. Both send pickles. Knows nothing of what a trial
does when; that is `brayx.tracking.clerk`'s.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from brayx.children import how_it_ended, start_module
from brayx.errors import BrayxError, TrackingError
from brayx.metrics import BEST_METRIC, Drained, XAxis
from brayx.shutdown import leave
from brayx.tracking import Status, Trial
from brayx.tracking.store import import_mlflow, telling

if TYPE_CHECKING:
    from brayx.tracking.hub import Hub

log = logging.getLogger(__name__)

SEND_EVERY_S = 1.0
"""Seconds between two points of a metric."""
_LEAVE_S = 2.0
_WAITING = 8
"""Requests that may wait before background tasks are dropped."""
_MOST_WAITING = 1000
"""Maximum number of waiting requests; further ones are refused."""
_RESTART_S = 10.0
"""Minimum time between two restarts, so that a process that dies at once is not restarted in a loop. Requests wait."""
_BACKGROUND_S = 2.0
"""Time for background tasks to finish after the last write."""
_NICE = 5
"""Training has priority, but MLflow's process must not starve."""

Key = tuple[str, ...]
"""A trial in the process: the names of its parents, the outermost first, and its own."""


class ClerkProcess:
    """Starts the process, and talks to it in a thread. Thread safe.

    The next request restarts a process that has died, for example because the system ran out of memory, and is sent
    again. The new process continues the same runs. Metrics that the old one had not written, of a second or two, are
    lost.

    Attributes:
        popen: the process.
        restart_s: minimum time between two restarts, in seconds.
    """

    def __init__(self) -> None:
        self.restart_s = _RESTART_S
        self._ended = threading.Event()
        self._opened: dict[Key, tuple[Trial, XAxis]] = {}
        self._known: set[Key] = set()
        """Trials that the running process has opened."""
        self._death = ""
        self._restarted = -math.inf
        self._lock = threading.Lock()
        self._waiting: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue()
        self._senders: list[Callable[[], None]] = []
        self.popen = start_module("brayx.tracking.clerk_process")
        self._thread = threading.Thread(target=self._work, name="brayx-clerk", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Calls ``function`` in the thread, after those that came before; it may call `exchange`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._ended.is_set():
                future.set_exception(TrackingError("MLflow's process was ended"))
            elif self._waiting.qsize() >= _MOST_WAITING:
                future.set_exception(TrackingError(f"MLflow is slow: {_MOST_WAITING:,} requests wait for it"))
            else:
                self._waiting.put((function, future))
        return future

    @property
    def busy(self) -> bool:
        """Whether many requests wait."""
        return self._waiting.qsize() >= _WAITING

    def every_second(self, send: Callable[[], None]) -> None:
        """Calls ``send`` in the thread once a second, until `forget`; it may call `exchange`."""
        with self._lock:
            self._senders.append(send)

    def forget(self, send: Callable[[], None]) -> None:
        """Stops calling ``send``."""
        with self._lock:
            self._senders = [each for each in self._senders if each != send]

    @property
    def down(self) -> bool:
        """Whether the process has died and is not restarted yet."""
        return bool(self._death)

    def exchange(self, verb: str, key: Key, *arguments: Any) -> Any:
        """Sends a request of a trial and returns the answer. Only for functions that the thread calls.

        Raises:
            BrayxError: the request failed, or it ended the process twice.
        """
        with telling(f"MLflow's process cannot {verb}"):
            request = pickle.dumps((verb, key, *arguments))
        try:
            answer = self._send(verb, key, request)
        except _Died:
            answer = self._send(verb, key, request, is_last=True)
        if verb == "open":
            *_, x_axis, _ = arguments
            self._opened[key] = (answer, x_axis)
            self._known.add(key)
        elif verb == "finish":
            del self._opened[key]
        return answer

    def _send(self, verb: str, key: Key, request: bytes, *, is_last: bool = False) -> Any:
        """Sends a request and returns the answer. First restarts the process if needed, and reopens the trial in it."""
        try:
            self._restart()
            for end in range(1, len(key) + 1):
                if (parent := key[:end]) in self._opened and parent not in self._known:
                    self._answer("reopen", pickle.dumps(("reopen", parent, *self._opened[parent])))
                    self._known.add(parent)
            return self._answer(verb, request)
        except _Died as died:
            self._death = died.message
            if is_last:
                raise TrackingError(died.message) from None
            raise

    def _answer(self, verb: str, request: bytes) -> Any:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        try:
            _write(self.popen.stdin, request)
            reply = pickle.load(self.popen.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self.popen.kill()  # it may have closed its pipes without ending
            self.popen.wait()
            raise _Died(f"MLflow's process {how_it_ended(self.popen.returncode)}") from None
        with telling(f"MLflow's process cannot {verb}"):
            answer, error = pickle.loads(reply)
        if error is not None:
            raise error
        return answer

    def _restart(self) -> None:
        """Starts the process again if it has died, at least `restart_s` after the last time."""
        if not self._death:
            return
        self._ended.wait(max(0.0, self._restarted + self.restart_s - time.monotonic()))
        with self._lock:
            if self._ended.is_set():
                raise TrackingError("MLflow's process was ended")
            for pipe in (self.popen.stdin, self.popen.stdout):
                with contextlib.suppress(OSError):  # the rest of a request that was cut off
                    pipe.close()  # type: ignore[union-attr]
            with telling(f"{self._death}, and cannot be restarted"):
                self.popen = start_module("brayx.tracking.clerk_process")
        log.warning("%s: it is restarted; the last metrics may be missing in MLflow", self._death)
        self._restarted, self._death, self._known = time.monotonic(), "", set()

    def end(self) -> None:
        """Kills the process. Idempotent."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            self._waiting.put(None)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self.popen.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_LEAVE_S)
                break
        self._thread.join(5.0)

    def _work(self) -> None:
        """The thread."""
        due = time.monotonic() + SEND_EVERY_S
        while True:
            if time.monotonic() >= due:  # also while requests of other trials wait
                with self._lock:
                    senders = self._senders
                for send in senders:
                    with contextlib.suppress(BrayxError):  # a sender keeps what it could not send
                        send()
                due = time.monotonic() + SEND_EVERY_S
            try:
                item = self._waiting.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if item is None:
                with contextlib.suppress(OSError):
                    self.popen.stdin.close()  # type: ignore[union-attr]
                return
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class _Died(TrackingError):
    """The process has died; the request may be repeated."""


class _Opened(NamedTuple):
    """An open trial, in the process."""

    trial: Trial
    hub: Hub


class _RequestHandler:
    """Answers requests, in the process. Each method with a key answers requests of its name."""

    def __init__(self) -> None:
        self._opened: dict[Key, _Opened] = {}
        self._background: threading.Thread | None = None
        self._background_of: Key = ()

    def answer(self, verb: str, key: Key, *arguments: Any) -> Any:
        """Carries out a request of a trial."""
        return getattr(self, f"_{verb}")(key, *arguments)

    def _open(
        self,
        key: Key,
        project: str,
        uri: str,
        params: dict[str, Any],
        resume: bool,
        x_axis: XAxis,
        tensorboard: str,
    ) -> Trial:
        from brayx.tracking import initialise
        from brayx.tracking.hub import Hub

        parent = self._opened[key[:-1]].trial if len(key) > 1 else None
        uri = uri if parent else initialise(uri)
        trial = Trial.open(project, key[-1], uri, resume=resume, parent=parent, tensorboard=tensorboard)
        trial.log_params(params)
        self._opened[key] = _Opened(trial, Hub(trial, x_axis=x_axis))
        return trial

    def _reopen(self, key: Key, trial: Trial, x_axis: XAxis) -> None:
        """Continues a trial that a process which has died had opened."""
        from brayx.tracking.hub import Hub

        trial.take_over()
        self._opened[key] = _Opened(trial, Hub(trial, x_axis=x_axis))

    def _push(self, key: Key, part: Drained) -> None:
        self._opened[key].hub.push(part)

    def _write(self, key: Key, part: Drained) -> None:
        self._push(key, part)
        self._opened[key].hub.flush()

    def _latest(self, key: Key) -> Path | None:
        return self._opened[key].trial.latest_checkpoint()

    def _save(self, key: Key, folder: Path, step: int, metrics: dict[str, float], kept: int) -> None:
        trial = self._opened[key].trial
        trial.save_checkpoint(folder, step, metrics)
        trial.prune_checkpoints(kept, best_by=BEST_METRIC)

    def _totals(self, key: Key) -> dict[str, float]:
        from brayx.tracking.hub import totals_of

        return totals_of(self._opened[key].trial)

    def _call(self, key: Key, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(self._opened[key].trial, *args)

    def _run(self, key: Key, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*args)

    def _in_background(self, key: Key, pickled: bytes) -> None:
        if self._background is None or not self._background.is_alive():
            arguments = (self._opened[key].trial, pickled)
            self._background = threading.Thread(target=_run_in_background, args=arguments, daemon=True)
            self._background_of = key
            self._background.start()

    def _finish(self, key: Key, status: Status) -> None:
        if self._background is not None and self._background_of == key:
            self._background.join(_BACKGROUND_S)
        opened = self._opened[key]
        opened.hub.close()
        opened.trial.finish(status)
        del self._opened[key]


def _run_in_background(trial: Trial, pickled: bytes) -> None:
    try:
        function, args = pickle.loads(pickled)
        function(trial, *args)
    except Exception:
        log.exception("a background task of MLflow's process failed")


def _write(pipe: IO[bytes], message: bytes) -> None:
    """Sends a pickled message in a second pickle, which can always be read: if the first cannot, only its request
    fails."""
    pickle.dump(message, pipe)
    pipe.flush()


def main() -> int:
    """Answers requests on standard input until that ends, as when the training process dies."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not mix with the replies
    with contextlib.suppress(Exception):  # the first request fails with it again, and reports it
        import_mlflow()  # while the training process imports torch
    handler = _RequestHandler()
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return 0
        try:
            with telling("MLflow's process cannot read a request"):
                verb, key, *arguments = pickle.loads(request)
            with telling(f"MLflow's process cannot {verb}"):
                reply = pickle.dumps((handler.answer(verb, key, *arguments), None))
        except BrayxError as error:
            reply = pickle.dumps((None, error))
        try:
            _write(answers, reply)
        except BrokenPipeError:
            return 0


if __name__ == "__main__":
    leave(main())
