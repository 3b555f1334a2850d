"""Writes trials' metrics and checkpoints in a separate process, since MLflow takes seconds to import and to open.

`Clerk` is one trial, in the training process: it is the loop's `Keeper`, takes drained metrics, and never imports
MLflow. The trials of one job share one process (`brayx.tracking.clerk_process`), which has them and their hubs. Knows
nothing of learning.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from brayx.errors import TrackingError
from brayx.metrics import BEST_METRIC, Drained, Recorder, XAxis
from brayx.metrics.totals import Totals
from brayx.tracking import Status, Trial
from brayx.tracking.clerk_process import SEND_EVERY_S, ClerkProcess, Key
from brayx.tracking.options import Options
from brayx.tracking.pending import PendingCheckpoints
from brayx.tracking.trial import PARENT_TAG
from brayx.urls import read_only_url, sqlite_path

log = logging.getLogger(__name__)

_ANSWER_S = 120.0
"""Longest time for an answer. MLflow takes long to start and creates its tables, on a machine that is busy training."""
_EARLY = 120
"""Seconds of metrics that wait separately for MLflow to start; later ones are merged into the last."""
_NEWEST_RUN = f"""
    SELECT runs.run_uuid, runs.status FROM runs JOIN experiments USING (experiment_id)
    LEFT JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = '{PARENT_TAG}'
    WHERE experiments.name = ? AND runs.name = ? AND tags.value IS ? AND runs.lifecycle_stage = 'active'
    ORDER BY runs.start_time DESC LIMIT 1
"""
"""The run that `Trial.open` finds: takes a project, a name and the parent's run, which may be NULL."""


class Clerk:
    """Writes one trial to MLflow in another process, which its children share.

    The process starts at once, since MLflow takes long to import. It opens the trial at the first request, so that a
    job that is refused before its training leaves no trial.

    Its errors are raised by `trial`, `latest`, `close` and `check`. What fails for one trial does not affect others.

    Args:
        project, name: names of the trial.
        uri: tracking store, as from `tracking_uri`.
        options: the trial's options.
        resume: resume an unfinished trial of that name.
        kept: newest checkpoints kept, in addition to the best.
        x_axis: x axis of metrics.
        parent: the trial that this one is a child of, see `child`; None: it has the process.
        tensorboard: folder of all trials' event files; empty: there are none.

    Attributes:
        options: the trial's options; may be replaced until the first request.
        may_resume: there may be an unfinished trial of that name, and of that parent.
    """

    def __init__(
        self,
        project: str,
        name: str,
        uri: str,
        options: Options,
        *,
        resume: bool = True,
        kept: int = 2,
        x_axis: XAxis = "env_steps",
        parent: Clerk | None = None,
        tensorboard: str = "",
    ) -> None:
        self._project, self._uri, self._kept, self._x_axis = project, uri, kept, x_axis
        self._resumes, self._parent = resume, parent
        self._key: Key = (name,) if parent is None else (*parent._key, name)
        self._children: dict[str, Clerk] = {}
        self._recorder = Recorder()
        self._early: deque[Drained] = deque()
        self._cut = time.monotonic()
        self._lock = threading.Lock()
        self._pending = PendingCheckpoints(kept)
        self._closed = False
        self.may_resume = resume and may_resume(uri, project, *self._key)
        self.options = options
        self._tensorboard = tensorboard
        self._opened: Future[Any] | None = None
        self._process: ClerkProcess = ClerkProcess() if parent is None else parent._process

    def child(self, name: str, options: Options, *, kept: int | None = None, x_axis: XAxis | None = None) -> Clerk:
        """Another trial of the project in the same process; its run is a child of this trial's run.

        It has separate metrics, checkpoints, totals and status. It resumes the newest child of that name that this
        trial's run has, unless that is finished; so it never resumes if this trial is new.

        Its `close` ends its trial only, and its `end` does nothing. Children that are not closed end with this trial:
        as ``FINISHED`` if it is, otherwise as ``KILLED``, since they did not fail.

        Args:
            name, options: name and options of the trial.
            kept, x_axis: as in the constructor; None: as in this trial.

        Raises:
            TrackingError: this trial is closed, or has a child of that name that is not.
        """
        with self._lock:
            if self._closed:
                raise self._is_closed()
            if name in self._children:
                raise TrackingError(f"trial {self._key[-1]!r} already has an open child {name!r}", trial=name)
            child = Clerk(
                self._project,
                name,
                self._uri,
                options,
                resume=self._resumes,
                kept=self._kept if kept is None else kept,
                x_axis=x_axis or self._x_axis,
                parent=self,
            )
            self._children[name] = child
        return child

    def trial(self) -> Trial:
        """The trial; waits until it is open.

        Raises:
            TrackingError: it could not be opened.
        """
        opened: Trial = self._result(self._begun(), _ANSWER_S)
        return opened

    def push(self, part: Drained) -> None:
        """Takes a recorder's drained metrics; they are written within a second or two."""
        if not part[0]:
            return
        now, opened = time.monotonic(), self._begun()
        with self._lock:
            self._recorder.merge(part)
            # Separate points also for a training that ends before MLflow has started.
            if not opened.done() and now - self._cut >= SEND_EVERY_S and len(self._early) < _EARLY:
                self._early.append(self._recorder.drain())
                self._cut = now

    def early_curve(self) -> list[tuple[float, float]]:
        """``(env steps, mean return of the last 100 games)`` of what waits for MLflow to start, in order."""
        with self._lock:
            parts = list(self._early)
        totals, points = Totals(), []
        for part in parts:
            totals.merge(part)
            if math.isfinite(mean := totals.take_interval().get("episode_return.last100", math.nan)):
                points.append((totals.sums.get("env_steps", 0.0), mean))
        return points

    def totals(self) -> dict[str, float]:
        """The trial's initial sums, see `brayx.tracking.hub.totals_of`; waits as `latest` does."""
        self._begun()
        totals: dict[str, float] = self._result(self._ask("totals"), _ANSWER_S) if self.may_resume else {}
        return totals

    def opened(self, timeout_s: float = 0.0) -> bool:
        """Whether the trial is open; waits up to ``timeout_s`` if it was requested. If not, nothing is saved yet."""
        with contextlib.suppress(TimeoutError):
            return self._opened is not None and self._opened.exception(timeout_s) is None
        return False

    def call(self, function: Callable[..., Any], *args: Any, start_s: float = _ANSWER_S) -> Any:
        """Runs ``function(trial, *args)`` in the clerk's process; the function must pickle.

        Args:
            start_s: longest time until it runs: other requests, or a restart of the process, may come first.

        Raises:
            TrackingError: it failed, or was dropped because it did not start in time.
        """
        future = self.request(function, *args)
        with contextlib.suppress(TimeoutError):
            return future.result(start_s)
        if future.cancel():
            raise TrackingError(f"MLflow's process was busy for {start_s:g} s")
        return self._result(future, _ANSWER_S)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs ``function(*args)`` in the clerk's process, without opening the trial; errors as for `call`."""
        return self._result(self._ask("run", function, args), _ANSWER_S)

    def request(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """As `call`, but does not wait: neither for the trial to open, nor for the end. Returns the result's future."""
        self._begun()
        return self._ask("call", function, args)

    def later(self, function: Callable[..., Any], *args: Any) -> None:
        """As `request`, without the result. A failure is logged."""
        self.request(function, *args).add_done_callback(self._log_failure)

    def in_background(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """As `call`, in a thread of the process and without the result. Returns the future of the request.

        One at a time for all trials: calls meanwhile, or while the process is busy, are dropped.
        """
        self._begun()
        future: Future[Any] = Future()
        if self._process.busy:
            future.set_result(None)
            return future
        try:
            pickled = pickle.dumps((function, args))
        except Exception as error:
            future.set_exception(error)
            return future
        return self._ask("in_background", pickled)

    def settle(self) -> None:
        """Waits until all checkpoints and metrics so far are written. Those that come meanwhile may be written later.

        Raises:
            TrackingError: they could not be.
        """
        self.trial()
        self._result(self._ask("write"), _ANSWER_S)
        self._pending.check()

    def check(self) -> None:
        """Raises the error that kept this trial from opening, if there is one."""
        if self._opened is not None and self._opened.done() and (error := self._opened.exception()) is not None:
            raise error

    def latest(self) -> Path | None:
        """As `Keeper.latest`; waits for MLflow only if a trial of that name may have been interrupted."""
        self._begun()
        if not self.may_resume:
            return None
        folder: Path | None = self._result(self._ask("latest"), _ANSWER_S)
        return folder

    def best(self) -> Path | None:
        """Folder of the checkpoint with the best return; None: it is the newest one, or none has a return."""
        self.settle()
        folder: Path | None = self.call(_best_before_newest)
        return folder

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """As `Keeper.save`, but never waits for MLflow: copies the folder, and saves it as soon as MLflow can.

        Until then it keeps the newest checkpoints and the best. A failure is counted and logged, because the disk may
        have room again later; `close` and `settle` raise the error of the last checkpoint.
        """
        self._begun()
        self._pending.add(folder, step, metrics)

    def close(self, status: Status) -> Trial:
        """Writes the rest, ends the trial and, if it is no child, the process. Ends its children first, see `child`.

        Raises:
            TrackingError: something could not be written, or there is no trial, because there was no request, or it is
                closed already; the process of a trial that is no child has ended in any case.
        """
        if self._closed:
            raise self._is_closed()
        try:
            if self._opened is None:
                raise TrackingError("no trial was opened")
            trial = self.trial()
            lost = self._close_children("FINISHED" if status == "FINISHED" else "KILLED")
            try:
                self._result(self._ask("write"), _ANSWER_S)
            finally:  # also if something is lost; otherwise MLflow would show the trial as running
                self._result(self._ask("finish", status), _ANSWER_S)
            if lost is not None:
                raise lost
            self._pending.check()
            return trial
        finally:
            self.end()
            self._leave()

    def end(self) -> None:
        """Kills the process; the trials are not changed. Idempotent. Does nothing for a child."""
        if self._parent is None:
            self._process.end()
            self._leave()

    def _close_children(self, status: Status) -> TrackingError | None:
        """Ends children that are open; returns the first error."""
        with self._lock:
            children = list(self._children.values())
        lost = None
        for child in children:
            if child.opened(_ANSWER_S):
                try:
                    child.close(status)
                except TrackingError as error:
                    lost = lost or error
        return lost

    def _leave(self) -> None:
        """Takes no more requests, and removes copies of checkpoints. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            children = list(self._children.values())
        self._process.forget(self._send)
        for child in children:
            child._leave()
        self._pending.close()
        if self._parent is not None:
            with self._parent._lock:
                self._parent._children.pop(self._key[-1], None)

    def _begun(self) -> Future[Any]:
        if self._parent is not None:
            self._parent._begun()
        with self._lock:
            if self._opened is None:
                settings = (self.options, self._resumes, self._x_axis, self._tensorboard, time.time())
                self._opened = self._ask("open", self._project, self._uri, *settings)
                self._process.every_second(self._send)
            return self._opened

    def _log_failure(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None and not self._process.ended:  # what an interrupt gives up is said once, by the job
            log.warning("something of trial %r is not written: %s", self._key[-1], error)

    def _ask(self, verb: str, *arguments: Any) -> Future[Any]:
        return self._process.submit(partial(self._carry_out, verb, *arguments))

    def _result(self, future: Future[Any], timeout_s: float) -> Any:
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise TrackingError(f"MLflow's process gave no answer for {timeout_s:g} s") from None

    def _is_closed(self) -> TrackingError:
        return TrackingError(f"trial {self._key[-1]!r} is closed", trial=self._key[-1])

    # In the process's thread, in the order of requests: a trial's request comes after its parent's and its own opening.

    def _carry_out(self, verb: str, *arguments: Any) -> Any:
        if self._closed:
            raise self._is_closed()
        if verb == "open":
            if self._parent is not None:
                self._parent._begun().result(0)
        elif verb != "run":
            self._begun().result(0)
            if verb == "finish":  # first, so that no checkpoint comes between the last saved one and the end
                self._pending.end()
            self._catch_up()
        if verb == "write":
            return self._write("write")
        return self._process.exchange(verb, self._key, *arguments)

    def _send(self) -> None:
        """Sends the waiting metrics and checkpoints."""
        if self.opened():
            self._catch_up()
            self._write("push")

    def _write(self, verb: str) -> None:
        """Sends the metrics since the last call; keeps them if that fails."""
        with self._lock:
            part = self._recorder.drain()
        if part[0] or verb == "write":
            try:
                self._process.exchange(verb, self._key, part)
            except TrackingError:
                with self._lock:
                    self._recorder.merge(part)
                raise

    def _catch_up(self) -> None:
        """Sends the metrics that arrived while MLflow started, and the waiting checkpoints."""
        while self._early:
            self._process.exchange("write", self._key, self._early[0])
            self._early.popleft()
        self._pending.save(
            lambda pending: self._process.exchange("save", self._key, *pending, self._kept),
            self._on_lost,
            may_retry=lambda: self._process.down,
        )

    def _on_lost(self, error: TrackingError) -> None:
        with self._lock:
            self._recorder.add("checkpoints_failed", 1)
        log.warning("a checkpoint of trial %r is not kept: %s", self._key[-1], error)


def _best_before_newest(trial: Trial) -> Path | None:
    best = trial.best_checkpoint(BEST_METRIC)
    return None if best is None or best == trial.checkpoints()[-1] else trial.local(best)


def may_resume(uri: str, project: str, *names: str) -> bool:
    """Whether there may be an unfinished trial. Reads a sqlite file without MLflow.

    True for any other store, and for a file that cannot be read.

    Args:
        names: names of the trial's parents, the outermost first, and its own.
    """
    path = sqlite_path(uri)
    if path is None:
        return True
    if not path.exists():
        return False
    run_id: str | None = None
    try:
        with contextlib.closing(sqlite3.connect(read_only_url(path), uri=True, timeout=5.0)) as connection:
            for name in names:
                run = connection.execute(_NEWEST_RUN, (project, name, run_id)).fetchone()
                if run is None or run[1] == "FINISHED":
                    return False
                run_id = run[0]
    except sqlite3.Error:
        return True
    return True
