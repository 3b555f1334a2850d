"""Pushes to a buffer that never wait: they queue here, and each shard has at most one call in flight.

The replays of a failed call are lost; queued ones are sent with the next call, and so is what a table did not admit
yet. Knows nothing of how shards store them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from brayx.cluster.buffer import Taken
from brayx.cluster.shards import Shard
from brayx.errors import called_from, first_line
from brayx.metrics import Recorder
from brayx.replay.packing import transitions
from brayx.replay.waiters import Waiters
from brayx.types import Columns, Fragment

logger = logging.getLogger(__name__)

Replay: TypeAlias = Fragment | Columns

_MAX_SENT = 64
"""Most replays of one call: those that a table does not admit yet are sent again with the next."""
RETRY_S = 0.2
"""Pause after a failed push before its shard, which restarts by itself, is tried again."""


@dataclass
class Lane:
    """The connection to one shard.

    Attributes:
        shard: the actor.
        call: number of the last call.
        sending: replays of the call in flight, and where each was pushed; empty: there is no such call.
        since: time of that call, on the monotonic clock.
        room: the shard had room, by its last answer.
        down_until: time on the monotonic clock; no call before then, because the last one failed.
    """

    shard: Shard
    call: int = 0
    sending: list[tuple[Replay, str]] = field(default_factory=list)
    since: float = 0.0
    room: bool = True
    down_until: float = 0.0


class Outbox:
    """Queues replays for the shards of one buffer, and sends them.

    Args:
        lanes: connections to the shards, nearest first.
        max_pending: limit on queued replays, unless one push has more; past it the oldest is dropped.
        push_timeout_s: deadline of one call; without an answer it counts as failed, though it may still arrive.
        recorder: counts every drop as ``replay_dropped``, by reason: ``full``, ``buffer_lost``, or ``closed``. None:
            they are in `dropped` only.

    Attributes:
        dropped: transitions dropped, by reason.
        closed: `close` was called.
        waiters: games that wait while replays are queued.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        max_pending: int,
        push_timeout_s: float,
        recorder: Recorder | None,
    ) -> None:
        self._lanes = lanes
        self._max_pending = max_pending
        self._push_timeout_s = push_timeout_s
        self._recorder = recorder
        self._pending: deque[tuple[Replay, str]] = deque()
        self._name_places = False
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._retry: threading.Timer | None = None
        self.dropped: Counter[str] = Counter()
        self.closed = False
        self.waiters = Waiters(lambda: bool(self._pending))

    def push(self, replays: tuple[Replay, ...]) -> None:
        """Sends replays with the next call; returns at once. Safe from any thread."""
        # Only once a replay was refused: walking the stack costs some 3 µs, which good pushes need not pay.
        place = called_from() if self._name_places else ""
        with self._lock:
            self._max_pending = max(self._max_pending, len(replays))
            self._pending.extend((replay, place) for replay in replays)
        self._drop_surplus()
        self._give_up_if_overdue()
        self._send()

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything pushed so far has reached the buffer; False after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self._idle:
            while self._pending or any(lane.sending for lane in self._lanes):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def close(self, timeout_s: float) -> None:
        """Sends queued replays for up to ``timeout_s``, then drops all that it has or gets."""
        self.flush(timeout_s)
        with self._lock:
            self.closed = True
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
        self._drop_surplus()

    def drop(self, reason: str, transitions: int) -> None:
        """Counts dropped transitions."""
        with self._lock:
            self.dropped[reason] += transitions
        if self._recorder is not None:
            self._recorder.add("replay_dropped", transitions, label=reason)

    def _drop_surplus(self) -> None:
        """Drops the oldest of more than ``max_pending`` queued replays; after `close` all of them."""
        lost = 0
        with self._lock:
            reason, most = ("closed", 0) if self.closed else ("full", self._max_pending)
            while len(self._pending) > most:
                lost += transitions(self._pending.popleft()[0])
        if lost:
            self.drop(reason, lost)
        if not self._pending:
            self.waiters.wake()

    def _send(self) -> None:
        while True:
            with self._lock:
                lane = self._next_lane()
                if lane is None:
                    self._retry_if_stuck()
                    return
                count = min(len(self._pending), _MAX_SENT)
                lane.sending, lane.since = [self._pending.popleft() for _ in range(count)], time.monotonic()
                lane.call += 1
                call = lane.call
                replays, places = ([*parts] for parts in zip(*lane.sending, strict=True))
            if not self._pending:
                self.waiters.wake()
            try:
                future = lane.shard.actor.push.remote(replays, places=places).future()
            except Exception as error:  # Ray's errors for an invalid handle
                self._failed(lane, call, error)
                return
            future.add_done_callback(lambda done, lane=lane, call=call: self._sent(lane, call, done))

    def _next_lane(self) -> Lane | None:
        """The shard for the queued pushes; None: no shard is free."""
        if self.closed or not self._pending:
            return None
        now = time.monotonic()
        up = [lane for lane in self._lanes if lane.down_until <= now]
        with_room = [lane for lane in up if lane.room] or up
        if not with_room:
            return None
        if not with_room[0].sending:
            return with_room[0]
        if len(self._pending) > self._max_pending // 2:  # the nearest shard is too slow
            return next((lane for lane in [*with_room, *up] if not lane.sending), None)
        return None

    def _sent(self, lane: Lane, call: int, done: Any) -> None:
        error = done.exception()
        if error is not None:
            self._failed(lane, call, error)
            return
        answer: Taken = done.result()
        lane.room = answer.room
        self._name_places = self._name_places or answer.refused > 0
        if self._done(lane, call, answer) is not None:
            self._drop_surplus()
            self._send()

    def _failed(self, lane: Lane, call: int, error: BaseException) -> None:
        replays = self._done(lane, call)
        if replays is None:
            return
        logger.warning("a push to the replay buffer failed: %s", first_line(error))
        self.drop("buffer_lost", sum(transitions(replay) for replay, _ in replays))
        with self._lock:
            lane.down_until = time.monotonic() + RETRY_S
        self._send()

    def _retry_if_stuck(self) -> None:
        """Schedules a send of queued pushes if no call is in flight to trigger it; the caller holds the lock."""
        if self.closed or not self._pending or any(lane.sending for lane in self._lanes):
            return
        if self._retry is not None:
            self._retry.cancel()
        self._retry = threading.Timer(RETRY_S, self._send)
        self._retry.daemon = True
        self._retry.start()

    def _give_up_if_overdue(self) -> None:
        with self._lock:
            now = time.monotonic()
            overdue = [
                (lane, lane.call) for lane in self._lanes if lane.sending and now - lane.since > self._push_timeout_s
            ]
        for lane, call in overdue:
            self._failed(lane, call, TimeoutError(f"no answer within {self._push_timeout_s:g} s"))

    def _done(self, lane: Lane, call: int, answer: Taken | None = None) -> list[tuple[Replay, str]] | None:
        """Settles the call in flight and returns its replays; None if it was settled before. Those for which ``answer``
        says that there was no room are queued again."""
        with self._idle:
            if call != lane.call or not lane.sending:
                return None
            replays, lane.sending = lane.sending, []
            if answer is not None:
                rest = answer.rest_of([replay for replay, _ in replays])
                places = [place for _, place in replays[answer.whole :]]
                self._pending.extendleft(reversed([*zip(rest, places, strict=True)]))
            self._idle.notify_all()
            return replays
