"""`RemoteBuffer`: a buffer by its name, from anywhere in the cluster. Pushes go to the nearest shard that has room.

The constructor creates the buffer or attaches to it. A push that may drop never waits; one that may not waits for room,
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
"""After a push that failed, until its shard is tried again: it restarts by itself."""
_LOOK_AGAIN_S = 0.5
"""Who waits for an answer looks so often whether the handle was closed."""
_LOOK_S = 1.0
"""Where there are several shards, one without room is waited for so long before the next is asked."""


@dataclass
class _Lane:
    """The way to one shard."""

    shard: Shard
    call: int = 0
    sending: list[Replay] = field(default_factory=list)
    since: float = 0.0
    room: bool = True
    down_until: float = 0.0


class RemoteBuffer:
    """A replay buffer: push from anywhere, iterate in a notebook, stream to a trainer.

    A push with ``drop`` hands over and returns: to each shard at most one call is on its way, what is pushed meanwhile
    goes with the next one, all of it. Past ``max_pending`` pushes the oldest is dropped and counted. A call that fails
    takes its replays along, what waits goes with the next one soon after; one without an answer for ``push_timeout_s``
    counts as failed, though it may yet arrive.

    Args:
        name: same name, same buffer.
        config: options of a buffer that is created; of one that is there they are its own.
        namespace: None: the caller's.
        layout: what fragments must look like; what it does not know, or None, is as in the first good one.
        hub: name of the trial's hub; empty: metrics go nowhere.
        weights: name of the weight store that knows the policy's versions; empty: they are not checked.
        learned: of a buffer that is created: what comes out is learned from; else the hub is told of drops alone.
        shards: of a buffer that is there; None: find it, or create it.
        max_pending: pushes kept while a call is on its way; None: the buffer's option.
        on_dropped: told ``(reason, transitions)`` of every drop here: ``full``, ``buffer_lost``, or ``closed``.
        push_timeout_s: for one call.
        **options: fields of `BufferConfig`, instead of ``config``: ``size``, ``batch_size``, ``num_workers``,
            ``density``, ``sampler`` and so on.

    Attributes:
        name, config: of the buffer.
        shards: its actors.
        pushed: pushes handed over.
        dropped: transitions dropped here, by reason.

    Raises:
        ConfigError: the buffer is there, with another value of one of these options.
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
        """A buffer that is running; arguments as of the class.

        Raises:
            ReplayError: there is none of that name.
        """
        return cls(name, namespace=namespace, shards=Shards.find(name, namespace=namespace, located=True), **arguments)

    def push(self, *replays: Replay, drop: bool = True, timeout_s: float = 60.0) -> None:
        """Hands fragments and columns over. Safe from any thread.

        Args:
            replays: what to push.
            drop: return at once, and drop the oldest of what has no room. Otherwise wait until all is taken.
            timeout_s: how long to wait; only without ``drop``.

        Raises:
            BadFragment: without ``drop``: some were refused, the message says what the first was refused for; the rest
                is taken.
            DeadlineExceeded: without ``drop``: the time ran out; ``details["left"]`` transitions were not taken.
            ReplayError: without ``drop``: the buffer has ended, or is gone.
        """
        if drop:
            self._hand_over(replays)
        else:
            self._all_taken(self.offer(*replays, timeout_s=timeout_s), timeout_s)

    async def push_async(self, *replays: Replay, drop: bool = True, timeout_s: float = 60.0) -> None:
        """As `push`, in an event loop, which goes on while this waits."""
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
        """Pushes what there is room for within ``timeout_s`` and gives back the rest, all of it while the buffer is
        being restarted. Drops nothing.

        Raises:
            BadFragment: all are taken, but for those that were refused.
            ReplayError: the buffer has ended, is gone, or this handle was closed; whether it took what it was just
                being handed is not known then.
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
        """Learner batches until the stream ends; for notebooks. Whoever else reads this buffer is told that it ended.

        Args:
            timeout_s: longest wait for one batch.

        Raises:
            DeadlineExceeded: no batch came for that long.
            ReplayError: the buffer is gone for good.
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
        """Counters of all shards (`ReplayBuffer.stats`), and how many ``shards`` answered."""
        return self.shards.stats(timeout_s)

    def has_room(self, timeout_s: float = 30.0) -> bool:
        """Whether something can be pushed without dropping what is there, by a shard that answers in time.

        True when none does: it is being restarted, empty, and what is pushed meanwhile is lost, and counted.
        """
        try:
            return self.shards.has_room(timeout_s)
        except DeadlineExceeded:
            return True

    def end(self, *, drain: bool = False) -> None:
        """Ends the stream for whoever reads it, see `BufferActor.end`."""
        self.shards.end(drain=drain)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything pushed so far has reached the buffer; False when the time ran out first."""
        deadline = time.monotonic() + timeout_s
        with self._idle:
            while self._pending or any(lane.sending for lane in self._lanes):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """Delivers what is pending if that takes no longer than ``timeout_s``, and takes no more. The buffer stays.

        A push that waits, in another thread, is given up with a `ReplayError`.
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
        """Waits for a push's answer, unless this is closed meanwhile: who ends does not wait for a shard that hangs."""
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
        """Gives calls, whose answers it is sent, or what they raised thrown; None: wait a moment."""
        deadline = time.monotonic() + timeout_s
        refused, why, turn = 0, "", 0
        at = next((number for number, lane in enumerate(self._lanes) if lane.room), 0)
        while left:
            if self._closed:
                raise self._is_closed()
            lane = self._lanes[(at + turn) % len(self._lanes)]
            # All are asked once; only then one is waited for.
            longest = MAX_WAIT_S if len(self._lanes) == 1 else _LOOK_S if turn >= len(self._lanes) else 0.0
            turn += 1
            try:
                answer = yield lane.shard.actor.push.remote(
                    left, False, max(0.0, min(deadline - time.monotonic(), longest))
                )
            except (ray.exceptions.RayError, TimeoutError) as error:
                lane.room = False
                # What it had taken went with it: nothing comes twice. Until it is back it has no room.
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
            except Exception as error:  # Ray's own errors for a handle that cannot be used any more
                self._failed(lane, call, error)
                return
            future.add_done_callback(lambda done, lane=lane, call=call: self._sent(lane, call, done))

    def _next_lane(self) -> _Lane | None:
        """Where what is pending goes now; None: nowhere yet."""
        if not self._pending:
            return None
        now = time.monotonic()
        up = [lane for lane in self._lanes if lane.down_until <= now]
        with_room = [lane for lane in up if lane.room] or up
        if not with_room:
            return None
        if not with_room[0].sending:
            return with_room[0]
        if len(self._pending) > self._max_pending // 2:  # it is too slow for what comes
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
        """Sends what waits in a while, where no answer will; the caller holds the lock."""
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
        """Settles the call on its way and gives its replays; None when that one was settled before."""
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
    """Ways to the shards: this node's first; those equally near in an order of this process's own."""
    here = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    lanes = [_Lane(shard) for shard in shards]
    random.shuffle(lanes)
    return sorted(lanes, key=lambda lane: lane.shard.node_id != here)
