"""The rollout workers of a job: started, watched, replaced when they die, scaled while they run, ended with the job.

A worker works on leases: it collects for a second or two, reports, and gets the next lease. So the owner knows each
worker's progress and last answer, and a worker stops by itself when its owner has ended. A worker that dies loses at
most one fragment and one push, which are counted. Knows nothing of environments or models; `brayx.rollout.worker` does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from brayx.cluster.named import end_actor, is_done, unwrap
from brayx.cluster.rollout_worker import RolloutWorker, WorkerSpec
from brayx.errors import BrayxError, ConfigError, ModelError, StartupError, first_line
from brayx.metrics import Recorder
from brayx.rollout.component import MAX_WORKERS
from brayx.rollout.spec import counts_that_fit, rounds
from brayx.rollout.worker import START_S, Failures, WorkerProgress

log = logging.getLogger(__name__)

LEASE_S = 1.0
"""Seconds that a worker collects before it answers."""
_TURN_S = 0.2
_STOP_S = 3.0
"""Deadline for workers to finish when the job ends; their current fragments are not used any more."""
_THERE_S = 0.1
"""Least time to fetch a finished call's result."""
_ANSWER_S = 5.0
"""Deadline to fetch a finished call's result."""
_AGAIN_S = 0.5
_LAST_AGAIN_S = 15.0
_FINAL = (ConfigError, ModelError)
"""Errors that another worker would not fix."""


@dataclass(eq=False)
class _Slot:
    """A place for one worker, and the calls to the worker in it."""

    index: int
    spec: WorkerSpec
    lease_s: float
    raised: Failures
    handle: Any = None
    lease: Any = None
    requested_at: float = 0.0
    leave: Any = None
    """The call that makes the worker finish and push the rest; None: it was not requested."""
    done: WorkerProgress = field(default_factory=WorkerProgress)
    """Progress of the current worker."""
    idle_failures: int = 0
    """Consecutive workers that ended before they had collected anything."""
    start_at: float = 0.0

    @property
    def who(self) -> str:
        return f"worker {self.index} of rollout {self.spec.name!r} ({self.spec.env_name})"

    @property
    def patience_s(self) -> float:
        """Deadline of a lease: its own time, plus a fragment that was started in it."""
        return self.lease_s + self.spec.config.fragment_timeout_s + (0.0 if self.done.fragments else START_S)

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.requested_at > self.patience_s

    @property
    def in_hand(self) -> int:
        """Most transitions that are lost with the worker: its current fragment, if any, and one push."""
        return self.spec.fragment_steps * ((self.lease is not None) + (self.done.fragments > 0))

    def start(self, number: int, workers: int) -> None:
        """Starts the place's worker of that number, and its first lease."""
        groups: dict[str, Any] = {"concurrency_groups": {"control": 1}}  # missing in Ray's type hints
        actor: Any = ray.remote(**groups)(RolloutWorker)
        cpus = self.spec.config.cpus_per_worker
        actor = actor.options(num_cpus=cpus, max_restarts=0, scheduling_strategy="SPREAD")
        self.handle = actor.remote(self.spec, self.index, number)
        self.ask(workers)

    def ask(self, workers: int) -> None:
        """Starts a lease; the rollout has so many workers."""
        self.lease = self.handle.collect.remote(self.lease_s, workers)
        self.requested_at = time.monotonic()

    def dismiss(self) -> None:
        """Asks the worker to finish, and to push the rest."""
        if self.leave is None:
            self.handle.stop.options(concurrency_group="control").remote()
            self.leave = self.handle.leave.remote()

    def last_answers(self, late: str, ends: float) -> str:
        """Adds a dismissed worker's last progress; returns why the rest is lost, ``late`` if it has not finished.

        Does not wait, unless the worker's node hangs: then until ``ends``, on the monotonic clock.
        """

        def answer(call: Any) -> Any:
            return ray.get(call, timeout=max(ends - time.monotonic(), _THERE_S))

        try:
            finished = self.leave is not None and is_done(self.leave)
            # The lease's result first: its fragments were pushed, even if the rest is lost.
            if finished or is_done(self.lease):
                self.done += answer(self.lease)
                self.lease = None
            if finished:
                answer(self.leave)
                return ""
        except (RayError, BrayxError) as error:
            return first_line(error)
        return late


class Workers:
    """Runs rollout workers and replaces those that fail; a context manager.

    Args:
        spec: the workers' settings.
        count: number of workers; default: the component's. `scale` changes it.
        numbers: records ``rollout_workers``, ``rollout_workers_lost``, and ``rollout_steps_lost``: the transitions lost
            with them, with label ``scaled`` for a surplus worker, and ``stopped`` for one that took too long to end
            with its job.
        lease_s: see `LEASE_S`.

    Attributes:
        error: a permanent error; once it is set, workers are not replaced any more.
        num: the wanted number of workers.
        messages: newest messages about ended workers, for display.
        failures: number of workers that ended by themselves.
        lost: the same by reason: ``died``, ``failed`` (their environment raised), ``hung``.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        numbers: Recorder,
        count: int | None = None,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self._spec = spec
        self.num = spec.config.num_workers if count is None else count
        self._numbers = numbers
        self._lease_s = lease_s
        self._slots: dict[int, _Slot] = {}
        self._leaving: list[_Slot] = []
        self._started: Counter[int] = Counter()  # workers started so far, by index
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"brayx-rollout-{spec.name}", daemon=True)
        self.error: BrayxError | None = None
        self._past = WorkerProgress()
        self.messages: deque[str] = deque(maxlen=20)
        self.lost: Counter[str] = Counter()

    def __enter__(self) -> Workers:
        self._thread.start()
        self._numbers.add("rollout_workers", self.num, label=self._spec.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> int:
        """Number of workers that run now and have collected something."""
        with self._lock:
            return sum(slot.done.fragments > 0 for slot in self._slots.values())

    @property
    def failures(self) -> int:
        """Number of workers that ended by themselves."""
        return sum(self.lost.values())

    @property
    def collected(self) -> WorkerProgress:
        """The total progress that workers have reported."""
        with self._lock:
            total = self._past
            for slot in (*self._slots.values(), *self._leaving):
                total = total + slot.done
            return total

    def scale(self, count: int) -> None:
        """Changes the number of workers. Surplus workers end after their current fragment, which is lost if it takes
        longer than ``fragment_timeout_s``.

        Raises:
            ConfigError: ``count`` is not an integer, negative or too large; the cluster lacks the CPUs that
                ``cpus_per_worker`` reserves for new workers; or so many blocking workers would wait for each other.
                Names the counts that fit.
        """
        config, cannot = self._spec.config, f"rollout {self._spec.name!r} cannot have {count!r} workers"
        if type(count) is not int or not 0 <= count <= MAX_WORKERS:
            raise ConfigError(f"{cannot}, expected 0 to {MAX_WORKERS}", key="num_workers")
        if count and config.mode == "blocking":
            try:
                rounds(self._spec, count)
            except ConfigError as error:
                fit = ", ".join(map(str, counts_that_fit(self._spec)))
                raise ConfigError(f"{cannot}, but {fit}: {error.message}", key="num_workers") from error
        if count > self.num and config.cpus_per_worker:
            there = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
            free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
            # Check now: a worker that waits too long for resources would end the job.
            if max(count * config.cpus_per_worker - there, (count - self.num) * config.cpus_per_worker - free) > 0:
                raise ConfigError(
                    f"{cannot} with cpus_per_worker {config.cpus_per_worker:g}: the cluster has {there:g} CPUs, "
                    f"{free:g} of them free, and the rollout has {self.num} workers",
                    key="num_workers",
                )
        self.num = count
        self._numbers.add("rollout_workers", count, label=self._spec.name)

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """Lets every worker finish and push the rest, then ends those that take longer. May be called again."""
        deadline = time.monotonic() + timeout_s
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=timeout_s)
        with self._lock:
            slots, self._slots = [*self._slots.values(), *self._leaving], {}
            self._leaving = []
        self._end(slots, max(0.0, deadline - time.monotonic()))

    def _watch(self) -> None:
        while not self._stopping.is_set():
            if not ray.is_initialized():
                return
            try:
                self._fill()
                self._look()
            except Exception as error:  # if this thread ended, no worker would be replaced
                log.exception("rollout %s: its workers are not watched any more", self._spec.name)
                self.error = StartupError(f"rollout {self._spec.name!r}: {type(error).__name__}: {first_line(error)}")
                return

    def _fill(self) -> None:
        """Starts missing workers, and asks surplus ones to leave."""
        wanted, now = self.num, time.monotonic()
        with self._lock:
            surplus = [self._slots.pop(index) for index in sorted(self._slots) if index >= wanted]
            for index in range(wanted):
                if index not in self._slots:
                    self._slots[index] = _Slot(index, self._spec, self._lease_s, Failures())
            empty = [slot for slot in self._slots.values() if slot.handle is None and now >= slot.start_at]
            surplus = [slot for slot in surplus if slot.handle is not None]
            self._leaving += surplus
        for slot in surplus:
            slot.dismiss()
        self._end_leaving()
        if self.error is not None:
            return
        for slot in empty:
            slot.start(self._started[slot.index], wanted)
            self._started[slot.index] += 1

    def _end_leaving(self) -> None:
        """Ends surplus workers that have finished, or exceeded the time for it."""
        for slot in self._leaving:
            if not is_done(slot.leave) and not slot.is_late:
                continue
            if why := self._let_go(slot, "scaled", slot.patience_s, time.monotonic() + _ANSWER_S):
                self._say(f"{slot.who} was surplus, and lost its current fragment: {why}")
        with self._lock:
            self._leaving = [slot for slot in self._leaving if slot.handle is not None]

    def _look(self) -> None:
        """Handles the calls that have finished."""
        with self._lock:
            slots = {slot.lease: slot for slot in self._slots.values() if slot.lease is not None}
        if not slots:
            self._stopping.wait(_TURN_S)
            return
        ready, _ = ray.wait(list(slots), num_returns=len(slots), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(slots), num_returns=1, timeout=_TURN_S)
        for lease in ready:
            self._answered(slots[lease])
        for lease, slot in slots.items():
            if lease not in ready and slot.is_late:
                self._gone(slot, "hung", f"has not answered for {slot.patience_s:.0f} s")

    def _answered(self, slot: _Slot) -> None:
        try:
            progress: WorkerProgress = ray.get(slot.lease, timeout=_ANSWER_S)
        except RayTaskError as error:
            cause = unwrap(error)
            ours = cause if isinstance(cause, BrayxError) else None
            config = self._spec.config
            # Count per place and within a window: otherwise rare errors would end a job of days or of many workers.
            raised = slot.raised.add(time.monotonic())
            if isinstance(ours, _FINAL) or raised > config.max_failures:
                self._fail(ours or StartupError(f"{slot.who} failed: {first_line(error)}"))
            self._gone(slot, "failed", f"failed: {ours.message if ours is not None else first_line(error)}")
        except RayError as error:
            self._gone(slot, "died", f"died: {first_line(error)}")
        else:
            slot.idle_failures = 0 if progress.fragments else slot.idle_failures
            with self._lock:
                slot.done = slot.done + progress
            slot.ask(self.num)

    def _gone(self, slot: _Slot, reason: str, why: str) -> None:
        """Frees the place for the next worker, and counts what was lost with this one."""
        said = f"{slot.who} {why}"
        self._say(said)
        self.lost[reason] += 1
        self._numbers.add("rollout_workers_lost", 1, label=reason)
        self._numbers.add("rollout_steps_lost", slot.in_hand, label=reason)
        if not slot.done.fragments:
            slot.idle_failures += 1
            if slot.idle_failures > self._spec.config.max_failures:
                self._fail(StartupError(f"{said}; the last {slot.idle_failures} ended before they collected anything"))
        end_actor(slot.handle)
        self._book(slot)
        with self._lock:
            slot.handle = slot.lease = None
            wait_s = min(_LAST_AGAIN_S, _AGAIN_S * 2**slot.idle_failures) if slot.idle_failures else 0.0
            slot.start_at = time.monotonic() + wait_s

    def _say(self, said: str) -> None:
        log.warning("%s", said)
        self.messages.append(said)

    def _fail(self, error: BrayxError) -> None:
        self.error = self.error or error

    def _end(self, slots: list[_Slot], timeout_s: float) -> None:
        """Ends these workers."""
        with_worker = [slot for slot in slots if slot.handle is not None]
        if not with_worker or not ray.is_initialized():
            return
        ends = time.monotonic() + timeout_s
        with contextlib.suppress(RayError):
            for slot in with_worker:
                slot.dismiss()
            ray.wait([slot.leave for slot in with_worker], num_returns=len(with_worker), timeout=timeout_s)
        lost = [why for slot in with_worker if (why := self._let_go(slot, "stopped", timeout_s, ends))]
        if lost:
            log.info("rollout %s: %d workers lost what they were at: %s", self._spec.name, len(lost), lost[0])

    def _let_go(self, slot: _Slot, reason: str, patience_s: float, ends: float) -> str:
        """Ends a leaving worker and counts its lost transitions; returns why they were lost, empty if none were.

        Args:
            slot: the worker's place.
            reason: metric label of the lost transitions.
            patience_s: time that the worker had to finish, for the message.
            ends: deadline for answers, on the monotonic clock.
        """
        with self._lock:
            handle, slot.handle = slot.handle, None
        if handle is None:  # another thread has ended it
            return ""
        why = slot.last_answers(f"it took longer than {patience_s:.0f} s", ends)
        end_actor(handle)
        if why:
            self._numbers.add("rollout_steps_lost", slot.in_hand, label=reason)
        self._book(slot)
        return why

    def _book(self, slot: _Slot) -> None:
        """Adds an ended worker's progress to the rollout's."""
        with self._lock:
            self._past, slot.done = self._past + slot.done, WorkerProgress()
