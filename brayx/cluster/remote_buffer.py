"""`RemoteBuffer`: a buffer by its name, from anywhere in the cluster. Pushes go to the nearest shard with room.

The constructor creates the buffer or attaches to it. A push that may drop never waits; otherwise it waits for room,
with a deadline. `brayx.cluster.stream` reads.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ray

from brayx.cluster.buffer import MAX_WAIT_S, Taken
from brayx.cluster.shards import Shard, Shards
from brayx.errors import BadFragment, DeadlineExceeded, ReplayError, first_line
from brayx.replay.config import BufferConfig
from brayx.replay.packing import READY_KEY, Batch, Layout, transitions
from brayx.types import Columns, Fragment

logger = logging.getLogger(__name__)

Replay: TypeAlias = Fragment | Columns

_RETRY_S = 0.2
"""Pause after a failed push before its shard, which restarts by itself, is tried again."""
_LOOK_AGAIN_S = 0.5
"""Interval at which a waiting push checks whether the handle was closed."""
_LOOK_S = 1.0
"""With several shards, longest wait for room in one before the next is tried."""


@dataclass
class _Lane:
    """The connection to one shard."""

    shard: Shard
    call: int = 0
    sending: list[Replay] = field(default_factory=list)
    since: float = 0.0
    room: bool = True
    down_until: float = 0.0


class RemoteBuffer:
    """A replay buffer: push from anywhere, iterate in a notebook, stream to a trainer.

    A push with ``drop`` returns at once. Each shard has at most one call in flight; pushes in the meantime are queued
    and all sent with the next call. If more than ``max_pending`` pushes wait, the oldest is dropped and counted. The
    replays of a failed call are lost; queued ones are sent soon after. A call without an answer for
    ``push_timeout_s`` counts as failed, though it may still arrive.

    Args:
        name: name of the buffer, unique in the namespace.
        config: options of a buffer to create; a running buffer keeps its own.
        namespace: Ray namespace; None: the caller's.
        layout: layout of fragments; what it leaves open is taken from the first valid fragment. None: everything is.
        hub: name of the trial's hub; empty: metrics are not sent.
        weights: name of the weight store with the policy's versions; empty: versions are not checked.
        learned: for a buffer to create: its batches are learned from. Otherwise the hub only gets drops.
        shards: shards of a running buffer; None: find or create it.
        max_pending: limit on queued pushes; None: the buffer's option.
        on_dropped: called with ``(reason, transitions)`` for every drop here: ``full``, ``buffer_lost``, or ``closed``.
        push_timeout_s: deadline of one call.
        **options: fields of `BufferConfig`, instead of ``config``: ``size``, ``batch_size``, ``num_workers``,
            ``density``, ``sampler`` and so on.

    Attributes:
        name, config: name and options of the buffer.
        shards: its actors.
        pushed: number of pushes sent.
        dropped: transitions dropped here, by reason.

    Raises:
        ConfigError: the buffer runs with another value of one of these options.
        ReplayError: it could not be started.
    """

    def __init__(
        self,
        name: str,
        config: BufferConfig | None = None,
        *,
        namespace: str | None = None,
        layout: Layout | None = None,
        hub: str = "",
        weights: str = "",
        learned: bool = True,
        shards: Shards | None = None,
        max_pending: int | None = None,
        on_dropped: Callable[[str, int], None] | None = None,
        push_timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        given = config.model_dump() if config is not None else options
        if shards is None:
            config = config or BufferConfig(**options)
            shards = Shards.start(
                name,
                config,
                layout,
                namespace=namespace,
                hub=hub,
                weights=weights,
                learned=learned,
                get_if_exists=True,
            )
        shards.check(given)
        self.name, self.config, self.shards = name, shards.config, shards
        self._namespace = namespace
        self._lanes = _nearest_first(shards)[: self.config.density]
        self._pending: deque[Replay] = deque()
        self._max_pending = max_pending or self.config.max_pending
        self._on_dropped = on_dropped
        self._lock = threading.Lock()
        self._push_timeout_s = push_timeout_s
        self._retry: threading.Timer | None = None
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self.pushed = 0
        self.dropped: Counter[str] = Counter()

    @classmethod
    def attach(cls, name: str, *, namespace: str | None = None, **arguments: Any) -> RemoteBuffer:
        """Attaches to a running buffer; arguments as for the class.

        Raises:
            ReplayError: no buffer of that name runs.
        """
        return cls(name, namespace=namespace, shards=Shards.find(name, namespace=namespace, located=True), **arguments)

    def push(self, *replays: Replay, drop: bool = True, timeout_s: float = 60.0) -> None:
        """Pushes fragments and columns. Safe from any thread.

        Args:
            replays: fragments and columns.
            drop: return at once, and drop the oldest if the buffer is full. Otherwise wait until all are stored.
            timeout_s: longest wait; only without ``drop``.

        Raises:
            BadFragment: without ``drop``: some were refused, and the message gives the reason of the first; the rest
                are stored.
            DeadlineExceeded: without ``drop``: the time ran out; ``details["left"]`` transitions were not stored.
            ReplayError: without ``drop``: the buffer has ended or was lost.
        """
        if drop:
            self._hand_over(replays)
        else:
            self._all_taken(self.offer(*replays, timeout_s=timeout_s), timeout_s)

    async def push_async(self, *replays: Replay, drop: bool = True, timeout_s: float = 60.0) -> None:
        """As `push`, without blocking the event loop."""
        if drop:
            self._hand_over(replays)
            return
        steps = self._offer(list(replays), timeout_s)
        try:
            call = next(steps)
            while True:
                if call is None:
                    await asyncio.sleep(_RETRY_S)
                    call = next(steps)
                    continue
                try:
                    answer = await asyncio.wait_for(call, self._push_timeout_s)
                except (ray.exceptions.RayError, TimeoutError) as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as done:
            self._all_taken(done.value, timeout_s)

    def offer(self, *replays: Replay, timeout_s: float) -> list[Replay]:
        """Pushes as many as find room within ``timeout_s`` and returns the rest; returns all while the buffer restarts.
        Drops nothing.

        Raises:
            BadFragment: some were refused; all others are stored.
            ReplayError: the buffer has ended or was lost, or this handle was closed. Replays of the call in flight may
                have been stored.
        """
        steps = self._offer(list(replays), timeout_s)
        try:
            call = next(steps)
            while True:
                if call is None:
                    time.sleep(_RETRY_S)
                    call = next(steps)
                    continue
                try:
                    answer = self._answer(call)
                except ray.exceptions.RayError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as done:
            left: list[Replay] = done.value
            return left

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, timeout_s: float = 300.0) -> Iterator[Batch]:
        """Learner batches until the stream ends; for notebooks. The stream of any other reader ends.

        Args:
            timeout_s: longest wait for one batch.

        Raises:
            DeadlineExceeded: no batch arrived within ``timeout_s``.
            ReplayError: the buffer has ended for good.
        """
        from brayx.cluster.stream import read_buffer

        stream = read_buffer(self.name, self._namespace, timeout_s=timeout_s)
        try:
            for batch in stream:
                stream.took()
                yield {key: array for key, array in batch.items() if key != READY_KEY}
        finally:
            stream.close()

    def dataset(self) -> Any:
        """The stream as a `ray.data.Dataset`, one block a batch; iterate it with `brayx.cluster.stream.batches_of`."""
        from brayx.cluster.stream import replay_dataset

        return replay_dataset(self.name, namespace=self._namespace)

    def stats(self, timeout_s: float = 30.0) -> dict[str, float]:
        """Counters of all shards (`ReplayBuffer.stats`), and the number of ``shards`` that answered."""
        return self.shards.stats(timeout_s)

    def has_room(self, timeout_s: float = 30.0) -> bool:
        """Whether a shard that answers in time has room to store a push without dropping.

        True if no shard answers: it restarts empty, and pushes in the meantime are lost and counted.
        """
        try:
            return self.shards.has_room(timeout_s)
        except DeadlineExceeded:
            return True

    def end(self, *, drain: bool = False) -> None:
        """Ends the stream for its readers, see `BufferActor.end`."""
        self.shards.end(drain=drain)

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

    def close(self, timeout_s: float = 1.0) -> None:
        """Sends queued pushes for up to ``timeout_s``, then takes no more. The buffer keeps running.

        A push that waits in another thread fails with a `ReplayError`.
        """
        self.flush(timeout_s)
        with self._lock:
            self._closed = True
            lost = sum(map(transitions, self._pending))
            self._pending.clear()
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
        if lost:
            self._drop("closed", lost)

    def _hand_over(self, replays: tuple[Replay, ...]) -> None:
        lost = 0
        with self._lock:
            closed = self._closed
            self.pushed += len(replays)
            if not closed:
                self._pending.extend(replays)
            while len(self._pending) > self._max_pending:
                lost += transitions(self._pending.popleft())
        if closed:
            self._drop("closed", sum(map(transitions, replays)))
            return
        if lost:
            self._drop("full", lost)
        self._give_up_if_overdue()
        self._send()

    def _all_taken(self, left: list[Replay], timeout_s: float) -> None:
        if left:
            count = sum(map(transitions, left))
            said = f"buffer {self.name!r} had no room for {count} transitions within {timeout_s:g} s"
            raise DeadlineExceeded(said, left=count)

    def _answer(self, call: Any) -> Taken:
        """Waits for a push's answer until this handle is closed, so that closing never waits for a hanging shard."""
        deadline = time.monotonic() + self._push_timeout_s
        while not ray.wait([call], timeout=max(0.0, min(_LOOK_AGAIN_S, deadline - time.monotonic())))[0]:
            if self._closed:
                raise self._is_closed()
            if time.monotonic() >= deadline:
                raise ray.exceptions.GetTimeoutError(f"no answer within {self._push_timeout_s:g} s")
        answer: Taken = ray.get(call)
        return answer

    def _is_closed(self) -> ReplayError:
        return ReplayError(f"buffer {self.name!r} takes no more: this handle to it was closed", ended=True)

    def _offer(self, left: list[Replay], timeout_s: float) -> Generator[Any, Taken, list[Replay]]:
        """Yields calls to make, and gets their answers sent or their errors thrown; yields None to pause."""
        deadline = time.monotonic() + timeout_s
        refused, why, turn = 0, "", 0
        at = next((number for number, lane in enumerate(self._lanes) if lane.room), 0)
        while left:
            if self._closed:
                raise self._is_closed()
            lane = self._lanes[(at + turn) % len(self._lanes)]
            # Try every shard once before waiting for one.
            longest = MAX_WAIT_S if len(self._lanes) == 1 else _LOOK_S if turn >= len(self._lanes) else 0.0
            turn += 1
            try:
                answer = yield lane.shard.actor.push.remote(
                    left, False, max(0.0, min(deadline - time.monotonic(), longest))
                )
            except (ray.exceptions.RayError, TimeoutError) as error:
                lane.room = False
                # Its stored part was lost with it, so a retry duplicates nothing. It has no room until it is back.
                if isinstance(error, ray.exceptions.RayActorError) and not self.shards.gone():
                    if time.monotonic() >= deadline:
                        break
                    yield None
                    continue
                self._drop("buffer_lost", sum(map(transitions, left)))
                said = f"buffer {self.name!r} was lost during a push: {type(error).__name__}: {first_line(error)}"
                raise ReplayError(said, buffer=self.name) from error
            lane.room = answer.room
            refused, why = refused + answer.refused, why or answer.why
            left = left[answer.whole :]
            if left and answer.part:
                left[0] = left[0].after(answer.part)
            if answer.ended:
                said = f"buffer {self.name!r} takes no more: its stream has ended"
                raise ReplayError(said, buffer=self.name, ended=True)
            if left and time.monotonic() >= deadline:
                break
        if refused:
            raise BadFragment(why, refused=refused)
        return left

    def _send(self) -> None:
        while True:
            with self._lock:
                lane = self._next_lane()
                if lane is None:
                    self._retry_if_stuck()
                    return
                replays = list(self._pending)
                self._pending.clear()
                lane.call += 1
                call = lane.call
                lane.sending, lane.since = replays, time.monotonic()
            try:
                future = lane.shard.actor.push.remote(replays).future()
            except Exception as error:  # Ray's errors for an invalid handle
                self._failed(lane, call, error)
                return
            future.add_done_callback(lambda done, lane=lane, call=call: self._sent(lane, call, done))

    def _next_lane(self) -> _Lane | None:
        """The shard for the queued pushes; None: no shard is free."""
        if not self._pending:
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

    def _sent(self, lane: _Lane, call: int, done: Any) -> None:
        error = done.exception()
        if error is not None:
            self._failed(lane, call, error)
            return
        answer = done.result()
        if isinstance(answer, Taken):
            lane.room = answer.room
        if self._done(lane, call) is not None:
            self._send()

    def _failed(self, lane: _Lane, call: int, error: BaseException) -> None:
        replays = self._done(lane, call)
        if replays is None:
            return
        logger.warning("a push to the replay buffer failed: %s", first_line(error))
        self._drop("buffer_lost", sum(map(transitions, replays)))
        with self._lock:
            lane.down_until = time.monotonic() + _RETRY_S
        self._send()

    def _retry_if_stuck(self) -> None:
        """Schedules a send of queued pushes if no call is in flight to trigger it; the caller holds the lock."""
        if self._closed or not self._pending or any(lane.sending for lane in self._lanes):
            return
        if self._retry is not None:
            self._retry.cancel()
        self._retry = threading.Timer(_RETRY_S, self._send)
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

    def _done(self, lane: _Lane, call: int) -> list[Replay] | None:
        """Settles the call in flight and returns its replays; None if it was settled before."""
        with self._idle:
            if call != lane.call or not lane.sending:
                return None
            replays, lane.sending = lane.sending, []
            self._idle.notify_all()
            return replays

    def _drop(self, reason: str, transitions: int) -> None:
        with self._lock:
            self.dropped[reason] += transitions
        if self._on_dropped is not None:
            self._on_dropped(reason, transitions)


def _nearest_first(shards: Shards) -> list[_Lane]:
    """Connections to the shards: this node's first; equally near ones in a random order per process."""
    here = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    lanes = [_Lane(shard) for shard in shards]
    random.shuffle(lanes)
    return sorted(lanes, key=lambda lane: lane.shard.node_id != here)
