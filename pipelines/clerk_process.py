"""The clerk's process, which writes trials to MLflow: both ends of its pipes.

`ClerkProcess` is the training process's end: it starts the process, and sends requests from a thread, in order. `main`
runs in the process: it has the trials with their hubs, and answers. Both send pickles. Knows nothing of what a trial
does when; that is `pipelines.clerk`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from brayx.children import start_module
from brayx.errors import BrayxError, TrackingError
from brayx.metrics import BEST_METRIC, Drained, XAxis
from brayx.tracking import Status, Trial
from brayx.tracking.store import import_mlflow, telling
from pipelines.shutdown import leave

if TYPE_CHECKING:
    from brayx.tracking.hub import Hub

log = logging.getLogger(__name__)

SEND_EVERY_S = 1.0
"""Seconds between two points of a metric."""
_LEAVE_S = 2.0
_WAITING = 8
"""Requests that may wait before background tasks are dropped."""
_BACKGROUND_S = 2.0
"""Time for background tasks to finish after the last write."""
_NICE = 5
"""Training has priority, but MLflow's process must not starve."""

Key = tuple[str, ...]
"""A trial in the process: the names of its parents, the outermost first, and its own."""


class ClerkProcess:
    """Starts the process, and talks to it in a thread. Thread safe.

    Attributes:
        popen: the process.
        failure: why the process no longer answers; None: it answers.
    """

    def __init__(self) -> None:
        self.failure: TrackingError | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._waiting: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue()
        self._senders: list[Callable[[], None]] = []
        self.popen = start_module("pipelines.clerk_process")
        self._thread = threading.Thread(target=self._work, name="brayx-clerk", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Calls ``function`` in the thread, after those that came before; it may call `exchange`."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._ended:
                self._waiting.put((function, future))
                return future
        future.set_exception(TrackingError("MLflow's process was ended"))
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

    def check(self) -> None:
        """Raises a `TrackingError` if the process has died."""
        if self.failure is None and not self._ended and self.popen.poll() is not None:
            self.failure = self._death()
        if self.failure is not None:
            raise self.failure

    def exchange(self, verb: str, key: Key, *arguments: Any) -> Any:
        """Sends a request of a trial and returns the answer. Only for functions that the thread calls.

        Raises:
            BrayxError: the request failed, or the process has died.
        """
        self.check()
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        with telling(f"MLflow's process cannot {verb}"):
            request = pickle.dumps((verb, key, *arguments))
        try:
            _write(self.popen.stdin, request)
            reply = pickle.load(self.popen.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as broken:
            self.failure = self._death()
            raise self.failure from broken
        with telling(f"MLflow's process cannot {verb}"):
            answer, error = pickle.loads(reply)
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Kills the process. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._waiting.put(None)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self.popen.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_LEAVE_S)
                break
        self._thread.join(5.0)

    def _death(self) -> TrackingError:
        return TrackingError(f"MLflow's process has ended with {self.popen.poll()}")

    def _work(self) -> None:
        """The thread."""
        due = time.monotonic() + SEND_EVERY_S
        while True:
            if time.monotonic() >= due:  # also while requests of other trials wait
                with self._lock:
                    senders = self._senders
                for send in senders:
                    with contextlib.suppress(BrayxError):  # `check` reports a dead process
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
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


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

    def _push(self, key: Key, part: Drained) -> None:
        self._opened[key].hub.push(part)

    def _write(self, key: Key, part: Drained) -> None:
        self._push(key, part)
        self._opened[key].hub.flush()

    def _latest(self, key: Key) -> Path | None:
        return self._opened[key].trial.latest_checkpoint()

    def _save(self, key: Key, folder: Path, step: int, metrics: dict[str, float], kept: int) -> None:
        trial = self._opened[key].trial
        try:
            trial.save_checkpoint(folder, step, metrics)
            trial.prune_checkpoints(kept, best_by=BEST_METRIC)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # it would only make a full disk fuller

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
        opened = self._opened.pop(key)
        opened.hub.close()
        opened.trial.finish(status)


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
