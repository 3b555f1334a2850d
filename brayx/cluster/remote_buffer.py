"""`RemoteBuffer`: a buffer by its name, from anywhere in the cluster. Pushes go to the nearest shard with room.

The constructor creates the buffer or attaches to it. A push that may drop never waits; otherwise it waits for room,
with a deadline. `brayx.cluster.stream` reads.
"""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from brayx.cluster.buffer import MAX_WAIT_S, Taken
from brayx.cluster.outbox import RETRY_S, Lane, Outbox, Replay
from brayx.cluster.shards import Shards
from brayx.errors import BadFragment, DeadlineExceeded, ReplayError, first_line
from brayx.metrics import Recorder
from brayx.replay.config import MAX_PENDING, BufferConfig
from brayx.replay.packing import READY_KEY, Batch, Layout, transitions

_LOOK_AGAIN_S = 0.5
"""Interval at which a waiting push checks whether the handle was closed."""
_MAX_WAITING = 64
"""Most pushes of a handle that wait at the same time in `RemoteBuffer.push_async`; others wait for one of them."""
_LOOK_S = 1.0
"""Longest wait for room in one of several shards before the next is tried."""


class RemoteBuffer:
    """A replay buffer: push from anywhere, iterate in a notebook, stream to a trainer.

    A push with ``drop`` returns at once. Each shard has at most one call in flight; pushes in the meantime are queued
    and sent with the next calls, after what a table did not admit yet. If more than ``max_pending`` pushes wait, the
    oldest is dropped and counted. The replays of a failed call are lost; queued ones are sent soon after. A call
    without an answer for ``push_timeout_s`` counts as failed, though it may still arrive.

    Args:
        name: name of the buffer.
        config: options of a buffer to create; a running buffer keeps its own.
        layout: layout of fragments; what it leaves open is taken from the first valid fragment. None: everything is.
        hub: name of the trial's hub; empty: metrics are not sent.
        weights: name of the weight store with the policy's versions; empty: versions are not checked.
        learned: only for a new buffer: its batches are learned from. Otherwise the hub only gets drops.
        shards: shards of a running buffer; None: find or create it.
        max_pending: limit on queued pushes.
        recorder: counts every drop here as ``replay_dropped``, by reason: ``full``, ``buffer_lost``, or ``closed``.
            None: only in ``dropped``.
        push_timeout_s: deadline of one call.
        **options: fields of `BufferConfig`, instead of ``config``: ``size``, ``batch_size``, ``num_workers``,
            ``density``, ``sampler`` and so on.

    Attributes:
        name, config: name and options of the buffer.
        shards: the buffer's actors.
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
        layout: Layout | None = None,
        hub: str = "",
        weights: str = "",
        learned: bool = True,
        shards: Shards | None = None,
        max_pending: int = MAX_PENDING,
        recorder: Recorder | None = None,
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
                hub=hub,
                weights=weights,
                learned=learned,
                get_if_exists=True,
            )
        shards.check(given)
        self.name, self.config, self.shards = name, shards.config, shards
        self._lanes = _nearest_first(shards)[: self.config.density]
        self._push_timeout_s = push_timeout_s
        self._outbox = Outbox(self._lanes, max_pending, push_timeout_s, recorder)
        self._waiting = ThreadPoolExecutor(_MAX_WAITING, "brayx-push")  # starts a thread when one is needed
        self.dropped = self._outbox.dropped

    @classmethod
    def attach(cls, name: str, **arguments: Any) -> RemoteBuffer:
        """Attaches to a running buffer; arguments as for the class.

        Raises:
            ReplayError: no buffer of that name runs.
        """
        return cls(name, shards=Shards.find(name, located=True), **arguments)

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
            self._outbox.push(replays)
        else:
            self._push_all(replays, timeout_s, time.monotonic() + timeout_s, threading.Event())

    async def push_async(self, *replays: Replay, drop: bool = True, timeout_s: float = 60.0) -> None:
        """As `push`, without blocking the event loop. A cancelled push sends nothing after the call in flight."""
        if drop:
            self._outbox.push(replays)
            return
        if self._outbox.closed:
            raise self._is_closed()
        cancelled = threading.Event()
        # The wait for a thread counts, too.
        work = functools.partial(self._push_all, replays, timeout_s, time.monotonic() + timeout_s, cancelled)
        try:
            await asyncio.get_running_loop().run_in_executor(self._waiting, work)
        finally:
            cancelled.set()

    def offer(self, *replays: Replay, timeout_s: float) -> list[Replay]:
        """Pushes as many as find room within ``timeout_s`` and returns the rest; returns all while the buffer restarts.
        Drops nothing.

        Raises:
            BadFragment: some were refused; all others are stored.
            ReplayError: the buffer has ended or was lost, or this handle was closed. Replays of the call in flight may
                have been stored.
        """
        return self._offer(replays, time.monotonic() + timeout_s, threading.Event())

    async def caught_up(self, timeout_s: float) -> None:
        """Waits, at most ``timeout_s``, while pushes queue here for a table's rate limiter: more data would be old, and
        finally dropped."""
        if self.config.samples_per_insert is not None:
            await self._outbox.waiters.wait(timeout_s)

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

        stream = read_buffer(self.name, timeout_s=timeout_s)
        try:
            for batch in stream:
                stream.took()
                yield {key: array for key, array in batch.items() if key != READY_KEY}
        finally:
            stream.close()

    def dataset(self) -> Any:
        """The stream as a `ray.data.Dataset`, one block a batch; iterate it with `brayx.cluster.stream.batches_of`."""
        from brayx.cluster.stream import replay_dataset

        return replay_dataset(self.name)

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
        return self._outbox.flush(timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Sends queued pushes for up to ``timeout_s``, then takes no more. The buffer keeps running.

        A push that waits in another thread fails with a `ReplayError`.
        """
        self._outbox.close(timeout_s)
        self._waiting.shutdown(wait=False)  # what waits there sees that the handle was closed

    def _push_all(
        self, replays: Sequence[Replay], timeout_s: float, deadline: float, cancelled: threading.Event
    ) -> None:
        if left := self._offer(replays, deadline, cancelled):
            count = sum(map(transitions, left))
            said = f"buffer {self.name!r} had no room for {count} transitions within {timeout_s:g} s"
            raise DeadlineExceeded(said, left=count)

    def _offer(self, replays: Sequence[Replay], deadline: float, cancelled: threading.Event) -> list[Replay]:
        left = list(replays)
        refused, why, turn = 0, "", 0
        first = next((number for number, lane in enumerate(self._lanes) if lane.room), 0)
        while left and not cancelled.is_set():
            if self._outbox.closed:
                raise self._is_closed()
            lane = self._lanes[(first + turn) % len(self._lanes)]
            # Try every shard once before waiting for one.
            longest = MAX_WAIT_S if len(self._lanes) == 1 else _LOOK_S if turn >= len(self._lanes) else 0.0
            turn += 1
            wait_s = max(0.0, min(deadline - time.monotonic(), longest))
            try:
                answer = self._answer(lane.shard.actor.push.remote(left, False, wait_s))
            except ray.exceptions.RayError as error:
                lane.room = False
                # Its stored part was lost with it, so a retry duplicates nothing. It has no room until it is back.
                if isinstance(error, ray.exceptions.RayActorError) and not self.shards.gone():
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(RETRY_S)
                    continue
                self._outbox.drop("buffer_lost", sum(map(transitions, left)))
                said = f"buffer {self.name!r} was lost during a push: {type(error).__name__}: {first_line(error)}"
                raise ReplayError(said, buffer=self.name) from error
            lane.room = answer.room
            refused, why = refused + answer.refused, why or answer.why
            left = answer.rest_of(left)
            if answer.ended:
                said = f"buffer {self.name!r} takes no more: its stream has ended"
                raise ReplayError(said, buffer=self.name, ended=True)
            if left and time.monotonic() >= deadline:
                break
        if refused:
            raise BadFragment(why, refused=refused)
        return left

    def _answer(self, call: Any) -> Taken:
        """Waits for a push's answer until this handle is closed, so that closing never waits for a hanging shard."""
        deadline = time.monotonic() + self._push_timeout_s
        while not ray.wait([call], timeout=max(0.0, min(_LOOK_AGAIN_S, deadline - time.monotonic())))[0]:
            if self._outbox.closed:
                raise self._is_closed()
            if time.monotonic() >= deadline:
                raise ray.exceptions.GetTimeoutError(f"no answer within {self._push_timeout_s:g} s")
        answer: Taken = ray.get(call)
        return answer

    def _is_closed(self) -> ReplayError:
        return ReplayError(f"buffer {self.name!r} takes no more: this handle to it was closed", ended=True)


def _nearest_first(shards: Shards) -> list[Lane]:
    """Connections to the shards: this node's first; equally near ones in a random order per process."""
    here = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    lanes = [Lane(shard) for shard in shards]
    random.shuffle(lanes)
    return sorted(lanes, key=lambda lane: lane.shard.node_id != here)
