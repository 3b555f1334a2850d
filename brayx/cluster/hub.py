"""The trial's hub: every process's samples meet in one actor, which keeps the books and writes them to MLflow.

`Hub` writes the trial's `Books` once a second and becomes a Ray actor in `create_hub`; `HubClient` is what a process
records into. Samples cross as merged parts, so a busy process costs one small call each half second. Knows nothing of
who records what.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from brayx.books import Books
from brayx.charts import NUMBERS_FILE, charted, sums_of
from brayx.errors import BrayxError, DeadlineExceeded, TrackingError
from brayx.inbox import Inbox
from brayx.metrics import Drained, Recorder, XAxis
from brayx.tracking import Trial

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = logging.getLogger(__name__)

HISTOGRAMS_FILE = "histograms.json"
"""Artifact with the bars of every histogram, of all samples since the hub started; written when it closes."""

_NUMBERS_EVERY_S = 5.0
_ANSWER_S = 5.0
"""Beyond the time in which the job must take a request: until it has answered."""
_ANSWER_POLL_S = 0.1
_SUM_TAG = "brayx.sum."
"""Begins the tags that say which of an application's own metrics are sums: a resumed trial counts on."""


class Hub(Inbox):
    """Books that are written to MLflow every ``interval_s`` by a thread of its own. Thread safe.

    A write that fails is not fatal: its numbers are in the totals and the next write goes on; failures are counted as
    ``hub_write_failures`` in the snapshot, and logged once until writing works again.

    As an inbox it takes what the trial's job is asked from outside, since it is found by the trial's id.

    Args:
        trial: where to write; None keeps the books in memory only.
        interval_s: seconds between writes.
        x_axis: what metrics are written over.
    """

    def __init__(self, trial: Trial | None, *, interval_s: float = 1.0, x_axis: XAxis = "env_steps") -> None:
        super().__init__()
        self._trial = trial
        self._books = Books(totals_of(trial), x_axis=x_axis)
        self._told_sums: set[str] = set()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._failures = 0
        self._failing = False
        self._numbers_written = 0.0
        self._stopped = threading.Event()
        self._interval_s = interval_s
        self._writer = threading.Thread(target=self._write_until_stopped, name="brayx-hub-writer", daemon=True)
        self._writer.start()

    def push(self, part: Drained) -> None:
        """Adds what one process recorded."""
        with self._lock:
            self._books.merge(part)

    def snapshot(self) -> dict[str, float]:
        """The newest number of every metric, by summary name; sums count from the trial's beginning.

        Beside the metrics: ``episode_return.last100``, ``episode_length.last100`` (means of the last 100 games),
        ``games_in_window`` (how many those are), ``games``, ``seconds``, ``ticks_per_s``, ``env_steps_per_s``
        (of the last 5 s), ``hub_write_failures``; and since this hub started: ``ticks_this_run``, and ``.run.p50`` and
        ``.run.p99`` of every metric with percentiles.
        """
        with self._lock:
            return {**self._books.snapshot(), "hub_write_failures": float(self._failures)}

    def notes(self) -> dict[str, str]:
        """The newest note of each metric that has one, by summary name; of samples since this hub started."""
        with self._lock:
            return dict(self._books.notes)

    def flush(self) -> None:
        """Writes now what has come since the last write."""
        with self._writing:
            with self._lock:
                numbers, step = charted(self._books.take_interval(), self._books.totals), self._books.step
                own_sums = self._books.own_sums - self._told_sums
            if self._trial is None or not numbers:
                return
            try:
                self._trial.log_metrics(numbers, step)
                for name in sorted(own_sums):
                    self._trial.set_tag(f"{_SUM_TAG}{name}", "1")
                    self._told_sums.add(name)
                if time.monotonic() - self._numbers_written >= _NUMBERS_EVERY_S:
                    self._write_numbers(self._trial)
                self._failing = False
            except TrackingError as error:
                self._failures += 1
                if not self._failing:
                    log.warning("metrics are not written for now: %s", error)
                self._failing = True

    def close(self) -> dict[str, float]:
        """Stops the writer after one last write, and returns the last snapshot. May be called again."""
        self._stopped.set()
        self._writer.join(timeout=30)
        self.flush()
        with self._lock:
            histograms = self._books.histograms()
        if self._trial is not None:
            with contextlib.suppress(TrackingError):  # the metrics have most of it
                self._write_numbers(self._trial)
                if histograms:
                    self._trial.log_dict(histograms, HISTOGRAMS_FILE)
        return self.snapshot()

    def _write_numbers(self, trial: Trial) -> None:
        self._numbers_written = time.monotonic()
        numbers = {name: value for name, value in self.snapshot().items() if math.isfinite(value)}
        trial.log_dict(numbers, NUMBERS_FILE)

    def _write_until_stopped(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.flush()


def totals_of(trial: Trial | None) -> dict[str, float]:
    """Sums that an interrupted trial (or a hub that died) had written."""
    if trial is None:
        return {}
    own = [name.removeprefix(_SUM_TAG) for name in trial.tags() if name.startswith(_SUM_TAG)]
    return sums_of(trial.metrics(), own)


def create_hub(
    name: str, namespace: str, trial: Trial | None, *, interval_s: float = 1.0, x_axis: XAxis = "env_steps"
) -> ActorHandle[Hub]:
    """Starts the trial's hub as a named actor that Ray restarts; a restarted one goes on from the totals in MLflow.

    It stays on the node of who calls: a trial's books may be a file there, and on another machine its path would name
    another, empty one.

    Returns:
        A handle for `HubClient`; it keeps the actor alive, as the actor ends with its creator's job.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from brayx.cluster.named import named_actor

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = named_actor(Hub, name, namespace, max_concurrency=4, scheduling_strategy=here)
    handle: ActorHandle[Hub] = actor.remote(trial, interval_s=interval_s, x_axis=x_axis)
    return handle


def get_hub(name: str, namespace: str) -> ActorHandle[Hub]:
    """The hub of that name.

    Raises:
        TrackingError: there is none.
    """
    from brayx.cluster.named import find_actor

    handle: ActorHandle[Hub] | None = find_actor(name, namespace)
    if handle is None:
        raise TrackingError(f"no hub {name!r} in namespace {namespace!r}: its trial is not running")
    return handle


def numbers_of(hub: Any, timeout_s: float = 2.0) -> tuple[dict[str, float], dict[str, str]] | None:
    """A hub's snapshot and notes; None while it is slow or being restarted."""
    from brayx.cluster.named import result_or

    found = result_or(None, [hub.snapshot.remote(), hub.notes.remote()], timeout_s)
    return None if found is None else (found[0], found[1])


def end_hub(hub: Any, timeout_s: float) -> tuple[dict[str, float], dict[str, str]]:
    """Has a hub write what is left, and gives its last snapshot and notes; empty ones if it does not answer in time."""
    from brayx.cluster.named import result_or

    numbers, notes = result_or(({}, {}), [hub.close.remote(), hub.notes.remote()], timeout_s)
    return numbers, notes


def take_requests(hub: Any, timeout_s: float = 2.0) -> list[tuple[str, Any]]:
    """What `ask_job` has put into a hub since the last call, by key; none while the hub is slow or being restarted."""
    from brayx.cluster.named import result_or

    found: list[tuple[str, Any]] = result_or([], hub.take.remote(), timeout_s)
    return found


def ask_job(hub: str, namespace: str, request: Any, timeout_s: float) -> Any:
    """Puts a request into a trial's hub, for the process that runs the trial's job, and waits for the answer.

    Args:
        hub, namespace: of the hub.
        request: what `Inbox.take` gives to the job.
        timeout_s: for the job to take the request; later it takes it no more.

    Raises:
        TrackingError: there is no such hub.
        BrayxError: the job refused the request.
        DeadlineExceeded: the job did not take it in time.
    """
    from brayx.cluster.named import result_or

    deadline, key = time.monotonic() + timeout_s + _ANSWER_S, ""
    while time.monotonic() < deadline:
        handle: Any = get_hub(hub, namespace)
        if not key:
            key = result_or("", handle.ask.remote(request, deadline - _ANSWER_S - time.monotonic()), _ANSWER_S)
        answer = result_or(None, handle.answered.remote(key), _ANSWER_S) if key else None
        if isinstance(answer, BrayxError):
            raise answer
        if answer is not None:
            return answer
        time.sleep(_ANSWER_POLL_S)
    raise DeadlineExceeded(f"the job did not take the request within {timeout_s:g} s")


class HubClient(Recorder):
    """The recorder of a process on a cluster. A call costs a dictionary look-up and never waits on Ray.

    A thread drains it every ``interval_s``, if anything listens. The hub gets the parts with at most one call in
    flight; while it is slow or being restarted, they merge here and take no more room.

    Args:
        handle: the hub's; None: there is none, as in a server without a trial.
        interval_s: seconds between hand-overs.
    """

    def __init__(self, handle: ActorHandle[Hub] | None, *, interval_s: float = 0.5) -> None:
        super().__init__()
        self._handle = handle
        self._pending = Recorder()
        self._sending = threading.Lock()
        self._in_flight: tuple[Any, Drained] | None = None
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if handle is not None:
            self.listen(self._pending.merge)

    def listen(self, listener: Callable[[Drained], None]) -> None:
        """As `Recorder.listen`; starts the thread."""
        super().listen(listener)
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_until_stopped, name="brayx-hub-client", daemon=True)
            self._thread.start()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Hands over everything and waits until the hub has it; False if that took longer, or there is none, and
        nothing is lost."""
        if self._handle is None:
            self._send(0.0)
            return False
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if self._send(left_s) and self.empty and self._pending.empty and self._in_flight is None:
                return True
            if left_s == 0.0:
                return False
            time.sleep(min(0.02, left_s))

    def close(self, timeout_s: float = 5.0) -> None:
        """Hands over what is left and ends the thread; a hub too slow to say so gets it all the same."""
        deadline = time.monotonic() + timeout_s
        self._stopped.set()
        if self._thread is None:
            return
        self._thread.join(timeout=timeout_s)
        # Whatever Ray raises here, nothing is left to try.
        with contextlib.suppress(Exception):
            if not self.flush(max(0.0, deadline - time.monotonic())) and self._handle is not None:
                part = self._pending.drain()
                if part[0]:
                    self._handle.push.remote(part)

    def _send(self, wait_s: float) -> bool:
        """Drains; settles the call in flight, waiting for it at most ``wait_s``; then starts the next if needed."""
        with self._sending:
            self.drain()
            if self._handle is None:
                return False
            import ray

            from brayx.cluster.named import result_or

            if self._in_flight is not None:
                call, part = self._in_flight
                ready, _ = ray.wait([call], timeout=wait_s)
                if not ready:
                    return False
                self._in_flight = None
                if result_or(False, call) is False:
                    self._pending.merge(part)  # the hub died with the call: the samples join the next one
                    return False
            part = self._pending.drain()
            if part[0]:
                self._in_flight = (self._handle.push.remote(part), part)
            return True

    def _send_until_stopped(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._send(0.0)
            except Exception:
                # Ray is shutting down under this process; what was gathered stays here.
                log.debug("a hand-over to the hub failed", exc_info=True)
