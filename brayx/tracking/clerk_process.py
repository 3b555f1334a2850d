"""The clerk's process, which writes trials to MLflow: both of its ends.

`ClerkProcess` is the training process's end: it starts the process, and sends requests from a thread, in order. `main`
runs in the process: it holds the trials and their hubs, and answers. Knows nothing of when a trial
is opened, written or ended: `brayx.tracking.clerk` decides that.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from brayx import systems
from brayx.children import Channel, Child, ChildDied, RequestFailed
from brayx.errors import BrayxError, TrackingError
from brayx.garbage import importing
from brayx.metrics import BEST_METRIC, Drained, XAxis
from brayx.temporary import temporary_files
from brayx.tracking import Status, Trial
from brayx.tracking.options import Options
from brayx.tracking.store import import_mlflow, telling

if TYPE_CHECKING:
    from brayx.tracking.hub import Hub

log = logging.getLogger(__name__)

SEND_EVERY_S = 1.0
"""Seconds between two points of a metric."""
_NICE = 10
_LEAVE_S = 2.0
"""Time for the process to end by itself."""
_WAITING = 8
"""Requests that may wait before background tasks are dropped."""
_MOST_WAITING = 1000
"""Maximum number of waiting requests; further ones are refused."""
_RESTART_S = 10.0
"""Minimum time between a start and the second after it. Requests wait."""
_BACKGROUND_S = 2.0
"""Time for background tasks to finish after the last write."""

Key = tuple[str, ...]
"""A trial in the process: the names of its parents, the outermost first, and its own."""


def _child() -> Child:
    return Child("brayx.tracking.clerk_process", finishes=True, restart_s=_RESTART_S)


_early: list[Child] = []


@contextlib.contextmanager
def started_early() -> Iterator[None]:
    """Starts the process of the block's first `ClerkProcess` now, and ends it if there is none.

    It imports MLflow for two seconds, which would otherwise fall into the first steps of games and learner.
    """
    with temporary_files():  # also MLflow's: its ONNX Runtime leaves a file there
        child = _child()
        child.start()
        _early.append(child)
        try:
            yield
        finally:
            if child in _early:
                _early.remove(child)
                child.end()


class ClerkProcess:
    """Starts the process, and talks to it in a thread. Thread safe.

    The next request restarts a process that has died, for example because the system ran out of memory, and is sent
    again. The new process continues the same runs. Metrics that the old one had not written, of a second or two, are
    lost.

    Attributes:
        child: the process.
        ended: `end` was called.
    """

    def __init__(self) -> None:
        self.ended = False
        self._opened: dict[Key, tuple[Trial, XAxis]] = {}
        self._known: set[Key] = set()
        """Trials that the running process has opened."""
        self._lock = threading.Lock()
        self._waiting: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue()
        self._senders: list[Callable[[], None]] = []
        self.child = _early.pop() if _early else _child()
        self.child.start()
        self._thread = threading.Thread(target=self._work, name="brayx-clerk", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Calls ``function`` in the thread, after those that came before; it may call `exchange`."""
        future: Future[Any] = Future()
        with self._lock:
            if self.ended:
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
            self._senders = [sender for sender in self._senders if sender != send]

    @property
    def down(self) -> bool:
        """Whether the process has died and is not restarted yet."""
        return not self.child.runs

    def exchange(self, verb: str, key: Key, *arguments: Any) -> Any:
        """Sends a request of a trial and returns the answer. Only for functions that the thread calls.

        Raises:
            BrayxError: the request failed, or it ended the process twice.
        """
        try:
            try:
                answer = self._ask(verb, key, *arguments)
            except ChildDied:
                answer = self._ask(verb, key, *arguments)
        except RequestFailed as error:
            raise TrackingError(f"MLflow's process {error}") from None
        if verb == "open":
            *_, x_axis, _, _ = arguments
            self._opened[key] = (answer, x_axis)
            self._known.add(key)
        elif verb == "finish":
            del self._opened[key]
        return answer

    def _ask(self, verb: str, key: Key, *arguments: Any) -> Any:
        """Sends a request and returns the answer. First restarts the process if needed, and reopens the trial in it."""
        if not self.child.runs:
            death, self._known = self.child.death, set()
            with telling("MLflow's process cannot be restarted"):
                self.child.start()
            log.warning("MLflow's process %s: it is restarted; the last metrics may be missing in MLflow", death)
        for end in range(1, len(key) + 1):
            if (parent := key[:end]) in self._opened and parent not in self._known:
                self.child.ask("reopen", parent, *self._opened[parent])
                self._known.add(parent)
        with telling(f"MLflow's process cannot {verb}"):
            return self.child.ask(verb, key, *arguments)

    def end(self) -> None:
        """Ends the process, and kills it if that takes too long. Idempotent."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
            self._waiting.put(None)
        self._thread.join(_LEAVE_S)  # it ends the process after what it does now
        self.child.close()
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
                self.child.end(_LEAVE_S)
                return
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
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
        with telling(f"MLflow's process cannot {verb}"):
            return getattr(self, f"_{verb}")(key, *arguments)

    def _open(
        self,
        key: Key,
        project: str,
        uri: str,
        options: Options,
        resume: bool,
        x_axis: XAxis,
        tensorboard: str,
        began_s: float,
    ) -> Trial:
        from brayx.tracking import initialise
        from brayx.tracking.hub import Hub

        parent = self._opened[key[:-1]].trial if len(key) > 1 else None
        uri = uri if parent else initialise(uri)
        trial = Trial.open(
            project, key[-1], uri, resume=resume, parent=parent, tensorboard=tensorboard, began_s=began_s
        )
        trial.log_options(options)
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


def main(parent: Channel) -> None:
    """Answers requests until the training process closes its end, as when it dies."""
    systems.lower_priority(_NICE)
    with importing("mlflow"), contextlib.suppress(Exception):  # the first request fails with it again, and reports it
        import_mlflow()  # while the training process imports torch
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  # a third of what it takes
    parent.serve(_RequestHandler().answer)
