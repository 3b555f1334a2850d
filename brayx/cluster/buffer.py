"""A shard of a replay buffer as a Ray actor: pushes wait for room, readers for batches; credits limit the stream.

`BufferActor` is undecorated and calls Ray only to look up actors by name, so its tests need no cluster. Knows nothing
of Ray Data, nor of what the learner does with a batch.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ray.exceptions import RayError

from brayx.cluster.hub import HubClient
from brayx.cluster.named import WEIGHT_STORE, get_actor, is_restarted
from brayx.errors import BadFragment, BrayxError, StartupError
from brayx.faults import note_of
from brayx.logs import limited
from brayx.replay.buffer import ReplayBuffer
from brayx.replay.config import BufferConfig
from brayx.replay.packing import READY_KEY, Batch, Layout, rows, transitions
from brayx.types import Columns, Fragment

logger = limited(__name__)

MAX_WAIT_S = 5.0
"""Longest that one call waits inside the actor."""
_STORE_ANSWER_S = 5.0


class Next(NamedTuple):
    """Reply to a reader: a batch, the end of the stream, or neither (call again).

    Attributes:
        batch: the next batch.
        ended: the stream is over.
        unknown: the buffer restarted since the reader attached; it should attach again.
    """

    batch: Batch | None
    ended: bool = False
    unknown: bool = False


class Taken(NamedTuple):
    """Reply to a push.

    Attributes:
        refused: number of refused replays.
        why: reason of the first refusal.
        whole: number of replays, from the first, that are finished: taken, refused, or dropped.
        part: size of the part of the next replay that was taken before the room ran out, in columns, or in transitions
            of a fragment.
        room: the buffer has room now.
        ended: the buffer takes no more.
    """

    refused: int
    why: str
    whole: int
    part: int
    room: bool
    ended: bool

    def rest_of(self, replays: Sequence[Fragment | Columns]) -> list[Fragment | Columns]:
        """What had no room of the replays that were pushed."""
        left = list(replays[self.whole :])
        if left and self.part:
            left[0] = left[0].after(self.part)
        return left


class BufferActor:
    """A shard: pushes wait for room, readers wait for batches, and credits limit the batches in flight.

    Only one reader reads at a time. A new one (`attach`) takes over: the stream of its predecessor ends, and the
    predecessor's batches in flight are not sent again. They count as dropped (``reader_lost``) unless they were
    sampled.

    Args:
        config: sizes, and how to sample.
        layout: layout of fragments; what it leaves open is taken from the first valid fragment. None: everything is.
        hub: name of the trial's hub. It gets the metrics ``env_steps``, ``fragments_pushed``, ``replay_dropped``,
            ``replay_batches``, ``replay_reused`` and ``replay_restarts``. Empty: none. It is not a handle, because an
            actor that restarts must not depend on one.
        weights: name of the weight store, to refuse replays with a policy version newer than the store's. Empty: accept
            any version.
        number: number of this shard.
        learned: batches are learned from. Otherwise the hub only gets ``eval_dropped``.
        restarted: this actor replaces one that died.
    """

    def __init__(
        self,
        config: BufferConfig,
        layout: Layout | None = None,
        hub: str = "",
        weights: str = "",
        number: int = 0,
        learned: bool = True,
        restarted: bool | None = None,
    ) -> None:
        self._buffer = ReplayBuffer(config, layout, shard=number)
        self._config = config
        self._changed = asyncio.Condition()
        # Start at a random number, to tell readers of this process from those of one that died.
        self._first = secrets.randbits(60)
        self._reader = self._first
        self._in_flight: deque[int] = deque()  # per batch: transitions lost if it does not arrive
        self._ended = False
        self._stopping = False
        self._failure: BrayxError | None = None
        self._hub = HubClient.of(hub)
        self._learned = learned
        self._reported: Counter[str] = Counter()
        self._reported_steps = 0
        self._ready_since = float("nan")
        self._reused = 0
        self._weights = weights
        self._store: Any = None
        if is_restarted() if restarted is None else restarted:
            self._count("replay_restarts", 1)

    async def config(self) -> BufferConfig:
        """The options of this buffer."""
        return self._config

    async def push(
        self,
        replays: Sequence[Fragment | Columns],
        drop: bool = True,
        timeout_s: float = 0.0,
        places: Sequence[str] = (),
    ) -> Taken:
        """Stores fragments and columns; after `end` it drops them all.

        Args:
            replays: fragments and columns.
            drop: make room by dropping; otherwise wait for it. A table does not drop: it admits data only as fast as
                its rate limiter says, and a push waits for that for 5 s.
            timeout_s: longest wait for room if not ``drop``; at most 5 s.
            places: where each replay was pushed, as ``FILE:LINE`` or empty, for the note of a refusal; none: unknown.
        """
        deadline = time.monotonic() + (MAX_WAIT_S if drop else min(timeout_s, MAX_WAIT_S))
        refused, why, note, whole, part = 0, "", "", 0, 0
        for replay, place in zip(replays, places or [""] * len(replays), strict=True):
            part = 0
            if self._is_over():
                self._buffer.dropped_elsewhere("ended", transitions(replay))
                whole += 1
                continue
            await self._learn_of(replay)
            try:
                rest: Fragment | Columns | None = replay
                if drop and self._buffer.table is None and not self._is_over():
                    self._buffer.push(replay)
                    rest = None
                while rest is not None and not self._is_over():
                    before = _parts(rest)
                    rest = self._buffer.push_what_fits(rest)
                    taken = before - _parts(rest)
                    part += taken
                    if rest is None:
                        break
                    if taken:
                        self._look()
                        await self._notify()  # a waiting reader takes a batch, which makes room
                    if not await self._wait(deadline):
                        break
                if rest is not None:
                    if not self._is_over():
                        break
                    self._buffer.dropped_elsewhere("ended", transitions(rest))
            except BadFragment as error:
                refused, why, note = refused + 1, why or error.message, note_of(error, place)
            whole += 1
        else:
            part = 0
        if refused and self._learned:
            self._hub.add("fragments_dropped", 1.0, label="refused", weight=refused, note=note)
        # Use the reported counts: other pushes may have been stored while this one waited.
        self._count("env_steps", self._buffer.pushed - self._reported_steps)
        self._reported_steps = self._buffer.pushed
        self._count("fragments_pushed", whole - refused)
        self._count("replay_batches", len(self._buffer))
        self._report_dropped()
        self._look()
        await self._notify()
        return Taken(refused, why, whole, part, self._buffer.has_room, self._ended)

    async def attach(self) -> int:
        """Makes the caller the only reader, and returns its reader number."""
        self._reader += 1
        lost = sum(self._in_flight)
        self._in_flight.clear()
        if lost:
            self._buffer.dropped_elsewhere("reader_lost", lost)
            self._report_dropped()
        await self._notify()
        return self._reader

    async def next_batch(self, reader: int, timeout_s: float) -> Next:
        """Waits for a batch and a credit, and returns the batch.

        Args:
            reader: the number from `attach`.
            timeout_s: longest wait; at most 5 s.
        """
        deadline = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        while True:
            if not self._first < reader <= self._reader:
                return Next(None, unknown=True)
            if reader < self._reader or self._stopping:
                return Next(None, ended=True)
            if len(self._in_flight) < self._config.max_in_flight:
                since = np.asarray(self._ready_since)
                batch = self._buffer.pop(reuse=not self._ended and not self._in_flight)
                self._report_dropped()  # those that were too old
                if batch is not None:
                    once = self._buffer.table is None and self._buffer.reused == self._reused
                    self._in_flight.append(int(np.count_nonzero(batch["mask"])) if once else 0)
                    self._count("replay_reused", self._buffer.reused - self._reused)
                    self._reused = self._buffer.reused
                    self._look()
                    await self._notify()  # now there is room for waiting pushes
                    return Next({**batch, READY_KEY: since})
                if self._ended:
                    return Next(None, ended=True)
            if not await self._wait(deadline):
                return Next(None)

    async def ack(self, count: int = 1, reader: int | None = None, newest: int | None = None) -> None:
        """Returns the credits of ``count`` batches that the learner has taken.

        Args:
            count: number of batches.
            reader: reader number that got them; a reader that was replaced has no credits to return. None: the current
                reader.
            newest: the policy's version, as for `expire`. It is passed here too because Ray may reorder the calls of an
                asyncio actor, and the next batch must not be too old. None: the last known version.
        """
        if newest is not None:
            self._expire(newest)
        if reader is not None and reader != self._reader:
            return
        for _ in range(min(count, len(self._in_flight))):
            self._in_flight.popleft()
        await self._notify()

    async def expire(self, newest: int) -> None:
        """Sets the policy's version, for ``max_policy_lag``."""
        self._expire(newest)
        await self._notify()  # there may be room

    async def update_priorities(self, index: np.ndarray, priorities: np.ndarray) -> int:
        """Sets priorities of columns by the ``index`` of their batch; returns how many of them this shard has."""
        return self._buffer.update_priorities(index, priorities)

    async def end(self, *, drain: bool = False) -> None:
        """Ends the stream.

        Args:
            drain: take no more, but first send the waiting batches, including the unfinished one; a sampled buffer
                sends as many as its rate allows. Otherwise the stream ends at once.
        """
        if drain and not self._ended:
            self._buffer.flush()
        self._ended = True
        self._stopping = self._stopping or not drain
        await self._notify()

    async def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    async def stopped(self) -> bool:
        """Whether the stream is over, so that no reader gets another batch."""
        return self._stopping

    async def fail(self, error: BrayxError) -> None:
        """Stores the learner's permanent error; the first one is kept."""
        self._failure = self._failure or error

    async def failure(self) -> BrayxError | None:
        """The learner's permanent error."""
        return self._failure

    async def stats(self) -> dict[str, float]:
        """Counters of the buffer, and ``in_flight``."""
        return {**self._buffer.stats(), "in_flight": len(self._in_flight)}

    async def has_room(self) -> bool:
        """Whether a replay can be stored without dropping."""
        return self._buffer.has_room

    async def flush_metrics(self, timeout_s: float) -> bool:
        """Sends pending metrics to the hub now instead of within half a second; False if the hub is too slow."""
        return await asyncio.to_thread(self._hub.flush, timeout_s)

    def _count(self, name: str, value: float, label: str = "") -> None:
        """Records a metric. An evaluation buffer records only drops, since the rest would count as the learner's."""
        if self._learned:
            self._hub.add(name, value, label=label)
        elif name == "replay_dropped":
            self._hub.add("eval_dropped", value, label=label)

    def _expire(self, newest: int) -> None:
        self._buffer.expire(newest)
        self._report_dropped()
        self._look()

    def _report_dropped(self) -> None:
        """Records the drops since the last call."""
        if self._reported == self._buffer.dropped:
            return
        for reason, count in (self._buffer.dropped - self._reported).items():
            self._count("replay_dropped", count, label=reason)
        self._reported = self._buffer.dropped.copy()

    def _is_over(self) -> bool:
        return self._ended

    def _look(self) -> None:
        """Records the time since which a batch is ready."""
        if self._buffer.exhausted:
            self._ready_since = float("nan")
        elif math.isnan(self._ready_since):
            self._ready_since = time.time()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, deadline: float) -> bool:
        """Waits until something changes; False past the deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        try:
            async with asyncio.timeout(left), self._changed:
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _learn_of(self, replay: Any) -> None:
        """Gets the newest version from the weight store, if ``replay`` has a version unknown to this shard."""
        claimed = _claimed(replay) if self._weights else None
        known = self._buffer.newest_version
        if claimed is None or (known is not None and claimed <= known):
            return
        try:
            if self._store is None:
                self._store = get_actor(self._weights, WEIGHT_STORE)
            newest = await asyncio.wait_for(self._store.newest.remote(), _STORE_ANSWER_S)
        except (StartupError, TimeoutError, RayError) as error:
            self._store = None
            logger.warning("the weight store does not say which versions there are: %s", error)
            return
        if newest is not None:
            self._buffer.published(newest[0])


def _parts(replay: Fragment | Columns | None) -> int:
    """The size of a replay, in the unit of `Taken.part`."""
    if isinstance(replay, Columns):
        return rows(replay)
    return transitions(replay) if isinstance(replay, Fragment) else 0


def _claimed(replay: Any) -> int | None:
    """The newest policy version in a push; None if it has no valid one, which packing refuses."""
    try:
        if isinstance(replay, Columns):
            versions, mask = np.asarray(replay.arrays["policy_version"]), np.asarray(replay.arrays["mask"])
        else:
            versions, mask = np.asarray(replay.policy_version), np.ones(())
        return int(versions.max(where=mask > 0, initial=-1)) if versions.dtype.kind == "i" else None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
