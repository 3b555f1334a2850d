"""Writes a trial's metrics and checkpoints in a separate process, since MLflow takes seconds to import and to open.

`Clerk` is the training process's side: it is the loop's `Keeper`, takes drained metrics, and never imports MLflow. Its
process has the trial and its `Hub`. They exchange pickles through private pipes. Knows nothing of learning.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import queue
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from brayx.errors import BrayxError, TrackingError, first_line
from brayx.metrics import BEST_METRIC, Drained, Recorder, XAxis
from brayx.tracking import Status, Trial
from brayx.tracking.store import import_mlflow, sqlite_path
from pipelines.shutdown import leave

log = logging.getLogger(__name__)

_OPEN_S = 120.0
"""Time for MLflow to start: it creates its tables, on a machine that is busy training."""
_ANSWER_S = 60.0
_SEND_EVERY_S = 1.0
_LEAVE_S = 2.0
_EARLY = 120
"""Seconds of metrics that wait separately for MLflow to start; later ones are merged into the last."""
_WAITING = 8
"""Requests that may wait for the process."""
_BESIDE_S = 2.0
"""Time for background tasks to finish after the last write."""
_NICE = 5
"""Training has priority, but MLflow's process must not starve."""


class _Save(NamedTuple):
    """A checkpoint that is about to be saved."""

    folder: Path
    step: int
    metrics: dict[str, float]


class Clerk:
    """Writes one trial to MLflow in another process.

    The process starts at once, since MLflow takes long to import. It opens the trial at the first request, so that a
    job that is refused before its training leaves no trial.

    Its errors are raised by `trial`, `latest`, `close` and `check`.

    Args:
        project, name: names of the trial.
        uri: tracking store, as from `tracking_uri`.
        params: the trial's params.
        resume: resume an unfinished trial of that name.
        kept: newest checkpoints kept, in addition to the best.
        x_axis: x axis of metrics.

    Attributes:
        may_resume: there may be an unfinished trial of that name.
    """

    def __init__(
        self,
        project: str,
        name: str,
        uri: str,
        params: Mapping[str, Any],
        *,
        resume: bool = True,
        kept: int = 2,
        x_axis: XAxis = "env_steps",
    ) -> None:
        self._kept = kept
        self._recorder = Recorder()
        self._early: deque[Drained] = deque()
        self._cut = time.monotonic()
        self._lock = threading.Lock()
        self._requests: queue.Queue[tuple[tuple[Any, ...], Future[Any]] | None] = queue.Queue(maxsize=_WAITING)
        self._saving: Future[Any] | None = None
        self._early_saves: list[_Save] = []
        self._failure: BaseException | None = None
        self._closed = False
        self.may_resume = resume and may_resume(uri, project, name)
        self._folder = tempfile.TemporaryDirectory(prefix="brayx-clerk-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines.clerk"],  # -P: no module of the current folder comes first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._thread = threading.Thread(target=self._talk, name="brayx-clerk", daemon=True)
        self._thread.start()
        self._open = ("open", project, name, uri, dict(params), resume, x_axis)
        self._opened: Future[Any] | None = None

    def trial(self) -> Trial:
        """The trial; waits until it is open.

        Raises:
            TrackingError: it could not be opened.
        """
        opened: Trial = self._result(self._begun(), _OPEN_S)
        return opened

    def push(self, part: Drained) -> None:
        """Takes a recorder's drained metrics; they are written within a second or two."""
        if not part[0]:
            return
        now, opened = time.monotonic(), self._begun()
        with self._lock:
            self._recorder.merge(part)
            # Separate points also for a training that ends before MLflow has started.
            if not opened.done() and now - self._cut >= _SEND_EVERY_S and len(self._early) < _EARLY:
                self._early.append(self._recorder.drain())
                self._cut = now

    def totals(self) -> dict[str, float]:
        """The trial's initial sums, see `brayx.tracking.hub.totals_of`; waits as `latest` does."""
        self._begun()
        found: dict[str, float] = self._result(self._ask("totals"), _OPEN_S) if self.may_resume else {}
        return found

    def opened(self, timeout_s: float = 0.0) -> bool:
        """Whether the trial is open; waits up to ``timeout_s`` if it was requested. If not, nothing is saved yet."""
        if self._opened is None:
            return False
        with contextlib.suppress(TimeoutError):
            return self._opened.exception(timeout_s) is None
        return False

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs ``function(trial, *args)`` in the clerk's process; the function must pickle.

        Raises:
            TrackingError: it failed.
        """
        self._begun()
        return self._result(self._ask("call", function, args), _OPEN_S)

    def aside(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """As `call`, in a thread of the process and without the result, one at a time: calls meanwhile, or while the
        process is busy, are dropped. Returns the future of the request."""
        future: Future[Any] = Future()
        try:
            self._requests.put_nowait((("aside", pickle.dumps((function, args))), future))
        except queue.Full:
            future.set_result(None)
        except Exception as error:  # of pickling
            future.set_exception(error)
        return future

    def settle(self) -> None:
        """Waits until the last checkpoint and all metrics are written.

        Raises:
            TrackingError: they could not be.
        """
        self._begun()
        self._saved()
        self._flush()

    def check(self) -> None:
        """Raises the error that ended the clerk's process, if there is one."""
        if self._failure is not None:
            raise self._failure

    def latest(self) -> Path | None:
        """As `Keeper.latest`; waits for MLflow only if a trial of that name may have been interrupted."""
        self._begun()
        if not self.may_resume:
            return None
        found: Path | None = self._result(self._ask("latest"), _OPEN_S)
        return found

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """As `Keeper.save`: copies the folder now, and saves it later. Waits for the previous one. A failure is counted
        and logged, since the disk may have room again; `close` raises the last one's. While MLflow starts it does not
        wait, and keeps the newest and the best."""
        opened = self._begun()
        try:
            self._saved()
        except TrackingError as error:
            self.check()
            self._not_kept(error)
        copy = Path(tempfile.mkdtemp(prefix=f"{step:012d}-", dir=self._folder.name))  # a step may be saved twice
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        made = _Save(copy, step, dict(metrics))
        if opened.done():
            self._saving = self._ask("save", *made, self._kept)
            return
        with self._lock:
            saves = [*self._early_saves, made]
            best = max(saves, key=lambda save: save.metrics.get(BEST_METRIC, -math.inf))
            self._early_saves = [save for save in saves if save is best or save in saves[-self._kept :]]
            dropped = [save for save in saves if save not in self._early_saves]
        for save in dropped:
            shutil.rmtree(save.folder, ignore_errors=True)

    def close(self, status: Status) -> Trial:
        """Writes the rest, ends the trial and the process.

        Raises:
            TrackingError: something could not be written, or there is no trial, because there was no request; the
                process has ended in any case.
        """
        try:
            if self._opened is None:
                raise TrackingError("no trial was opened")
            trial = self.trial()
            lost: TrackingError | None = None
            try:
                self._saved()
            except TrackingError as error:  # end the trial anyway, or it would stay running in MLflow
                lost = error
            self._flush()
            self._result(self._ask("finish", status), _ANSWER_S)
            if lost is not None:
                raise lost
            return trial
        finally:
            self.end()

    def end(self) -> None:
        """Kills the process; the trial is not changed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._requests.put_nowait(None)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S)
                break
        self._thread.join(5.0)
        self._folder.cleanup()

    def _begun(self) -> Future[Any]:
        with self._lock:
            if self._opened is None:
                self._opened = self._ask(*self._open)
            return self._opened

    def _saved(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self._result(saving, _OPEN_S)

    def _not_kept(self, error: TrackingError) -> None:
        with self._lock:
            self._recorder.add("checkpoints_failed", 1)
        log.warning("a checkpoint is not kept: %s", error)

    def _flush(self) -> None:
        with self._lock:
            part = self._recorder.drain()
        self._result(self._ask("write", part), _ANSWER_S)

    def _ask(self, *request: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            self._requests.put((request, future), timeout=_ANSWER_S)
        except queue.Full:
            future.set_exception(TrackingError(f"MLflow's process was busy for {_ANSWER_S:g} s"))
        return future

    def _result(self, future: Future[Any], timeout_s: float) -> Any:
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise TrackingError(f"MLflow's process gave no answer for {timeout_s:g} s") from None

    def _talk(self) -> None:
        """The thread: sends requests in order, and metrics once a second."""
        while True:
            try:
                item = self._requests.get(timeout=_SEND_EVERY_S)
            except queue.Empty:
                with self._lock:
                    part = self._recorder.drain()
                if not part[0]:
                    continue
                item = (("push", part), Future())
            if item is None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()  # type: ignore[union-attr]
                return
            request, future = item
            try:
                if self._failure is not None:
                    raise self._failure
                if request[0] != "open":
                    self._catch_up()
                future.set_result(self._exchange(request))
            except BaseException as error:
                if request[0] == "open" or not isinstance(error, BrayxError):
                    self._failure = self._failure or error
                future.set_exception(error)

    def _catch_up(self) -> None:
        """Sends the metrics that arrived while MLflow started."""
        while self._early:
            self._exchange(("write", self._early.popleft()))
        while self._early_saves:
            with self._lock:
                save = self._early_saves.pop(0)
            try:
                self._exchange(("save", *save, self._kept))
            except TrackingError as error:
                self.check()
                self._not_kept(error)

    def _exchange(self, request: tuple[Any, ...]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            answer, error = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as broken:
            failure = TrackingError(f"MLflow's process has ended with {self._process.poll()}")
            self._failure = failure
            raise failure from broken
        if error is not None:
            raise error
        return answer


def may_resume(uri: str, project: str, name: str) -> bool:
    """Whether there may be an unfinished trial of that name. Reads a sqlite file without MLflow.

    True for any other store, and for a file that cannot be read.
    """
    path = sqlite_path(uri)
    if path is None:
        return True
    if not path.exists():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)) as connection:
            found = connection.execute(
                "SELECT runs.status FROM runs JOIN experiments USING (experiment_id) "
                "WHERE experiments.name = ? AND runs.name = ? ORDER BY runs.start_time DESC LIMIT 1",
                (project, name),
            ).fetchone()
    except sqlite3.Error:
        return True
    return found is not None and found[0] != "FINISHED"


class _Desk:
    """The side of the clerk's process: answers requests."""

    def __init__(self) -> None:
        self._trial: Trial | None = None
        self._hub: Any = None
        self._beside: threading.Thread | None = None

    def answer(self, verb: str, *arguments: Any) -> Any:
        """Carries out a request."""
        return getattr(self, f"_{verb}")(*arguments)

    def _open(self, project: str, name: str, uri: str, params: dict[str, Any], resume: bool, x_axis: XAxis) -> Trial:
        from brayx.tracking import initialise
        from brayx.tracking.hub import Hub

        self._trial = Trial.open(project, name, initialise(uri), resume=resume)
        self._trial.log_params(params)
        self._hub = Hub(self._trial, x_axis=x_axis)
        return self._trial

    def _push(self, part: Drained) -> None:
        self._hub.push(part)

    def _write(self, part: Drained) -> None:
        self._hub.push(part)
        self._hub.flush()

    def _latest(self) -> Path | None:
        assert self._trial is not None
        return self._trial.latest_checkpoint()

    def _save(self, folder: Path, step: int, metrics: dict[str, float], kept: int) -> None:
        assert self._trial is not None
        try:
            self._trial.save_checkpoint(folder, step, metrics)
            self._trial.prune_checkpoints(kept, best_by=BEST_METRIC)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # it would only make a full disk fuller

    def _totals(self) -> dict[str, float]:
        from brayx.tracking.hub import totals_of

        return totals_of(self._trial)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(self._trial, *args)

    def _aside(self, pickled: bytes) -> None:
        if self._beside is None or not self._beside.is_alive():
            self._beside = threading.Thread(target=self._run_beside, args=(pickled,), daemon=True)
            self._beside.start()

    def _run_beside(self, pickled: bytes) -> None:
        try:
            function, args = pickle.loads(pickled)
            function(self._trial, *args)
        except Exception:
            log.exception("a background task of MLflow's process failed")

    def _finish(self, status: Status) -> None:
        assert self._trial is not None
        if self._beside is not None:
            self._beside.join(_BESIDE_S)
        self._hub.close()
        self._trial.finish(status)


def main() -> int:
    """Answers requests on standard input until that ends, as when the training process dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process decides when to close
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not mix with the replies
    with contextlib.suppress(Exception):  # the first request fails with it again, and reports it
        import_mlflow()  # while the training process imports torch
    desk = _Desk()
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return 0
        try:
            answer: tuple[Any, BaseException | None] = (desk.answer(*request), None)
        except BrayxError as error:
            answer = (None, error)
        except Exception as error:
            answer = (None, TrackingError(f"MLflow's process cannot {request[0]}: {first_line(error)}"))
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:
            return 0


if __name__ == "__main__":
    leave(main())
