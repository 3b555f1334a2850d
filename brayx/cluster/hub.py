"""The trial's hub as a named actor, and other processes' access to it: they record and read metrics, and send requests.

`brayx.tracking.hub.Hub` becomes a Ray actor in `create_hub`; `HubClient` is the recorder of a process. Samples cross as
merged parts, so a busy process costs one small call each half second. Knows nothing of the recording code.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import ray

from brayx.cluster.named import get_actor, named_actor, on_this_node, result_or
from brayx.errors import BrayxError, DeadlineExceeded
from brayx.metrics import Drained, Recorder, XAxis, without_shapes

if TYPE_CHECKING:
    from brayx.tracking import Trial

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Time for the job to answer, in addition to the time in which it must take a request."""
_ANSWER_POLL_S = 0.1
_LAST_COUNTS_S, _LAST_NUMBERS_S = 5.0, 10.0
"""Deadlines for a process to send its last samples, and for the hub to write them."""
_HUB = "the hub"


def create_hub(
    name: str,
    trial: Trial | None,
    *,
    interval_s: float = 1.0,
    x_axis: XAxis = "env_steps",
    part_of: str = "",
) -> Any:
    """Starts the trial's hub as a named actor that Ray restarts; a restarted one continues from the totals in MLflow.

    It runs on the caller's node: the MLflow store may be a file there, whose path another machine does not have.

    Args:
        name: name of the actor.
        trial, interval_s, x_axis: as for `Hub`.
        part_of: name of another hub, which gets all samples of this one, too; empty: none.

    Returns:
        A handle for `HubClient`. The actor ends with its creator's job.
    """
    from brayx.tracking.hub import Hub  # MLflow, which a process that only records does not need

    options = {"max_concurrency": 4, "scheduling_strategy": on_this_node()}
    if not part_of:
        return named_actor(Hub, name, **options).remote(trial, interval_s=interval_s, x_axis=x_axis)

    class PartHub(Hub):
        """A hub that also forwards its samples to another one."""

        def __init__(self) -> None:
            super().__init__(trial, interval_s=interval_s, x_axis=x_axis)
            self._whole = HubClient.of(part_of)

        def push(self, part: Drained) -> None:
            super().push(part)
            self._whole.merge(without_shapes(part))

        def close(self) -> dict[str, float]:
            self._whole.close()
            return super().close()

    return named_actor(PartHub, name, **options).remote()


def numbers_of(hub: Any, timeout_s: float = 2.0) -> tuple[dict[str, float], dict[str, str]] | None:
    """A hub's snapshot and notes; None while it is slow or being restarted."""
    reply = result_or(None, [hub.snapshot.remote(), hub.notes.remote()], timeout_s)
    return None if reply is None else (reply[0], reply[1])


def end_hub(hub: Any, client: HubClient, within: Callable[[float], float]) -> tuple[dict[str, float], dict[str, str]]:
    """Makes this process send its last samples, and the hub write the rest.

    Args:
        hub, client: the hub, and its recorder in this process.
        within: shortens the seconds that a step may take.

    Returns:
        The hub's last snapshot and notes, or empty ones if it does not answer in time.
    """
    client.close(within(_LAST_COUNTS_S))
    numbers, notes = result_or(({}, {}), [hub.close.remote(), hub.notes.remote()], within(_LAST_NUMBERS_S))
    return numbers, notes


def take_requests(hub: Any, timeout_s: float = 2.0) -> list[tuple[str, Any]]:
    """Requests that `ask_job` has put into a hub since the last call, by key; none while the hub is slow."""
    requests: list[tuple[str, Any]] = result_or([], hub.take.remote(), timeout_s)
    return requests


def ask_job(hub: str, request: Any, timeout_s: float) -> Any:
    """Puts a request into a trial's hub, for the process that runs the trial's job, and waits for the answer.

    Args:
        hub: name of the hub.
        request: the request, which the job gets from `Inbox.take`.
        timeout_s: deadline for the job to take the request; it does not take it later.

    Raises:
        StartupError: there is no such hub.
        BrayxError: the job refused the request.
        DeadlineExceeded: the job did not take it in time.
    """
    deadline, key = time.monotonic() + timeout_s + _ANSWER_S, ""
    while time.monotonic() < deadline:
        handle: Any = get_actor(hub, _HUB)
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

    A thread drains it every ``interval_s``, if it has a listener. At most one call to the hub is in flight; while the
    hub is slow or being restarted, parts merge here and take no more room.

    Args:
        handle: handle of the hub; None: there is none, as in a server without a trial.
        interval_s: seconds between hand-overs.
    """

    def __init__(self, handle: Any | None, *, interval_s: float = 0.5) -> None:
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

    @classmethod
    def of(cls, name: str) -> Self:
        """The recorder that sends to the hub of that name; an empty name: there is none.

        Raises:
            StartupError: the hub is not running.
        """
        return cls(get_actor(name, _HUB) if name else None)

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
        """Hands over the rest and ends the thread; a hub that is too slow to confirm gets it too."""
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
