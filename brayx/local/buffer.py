"""A replay buffer between the event loop that pushes and the learner's thread that pops.

`ReplayBuffer` is the logic; this file adds the lock, and makes sure that a push never waits for it. Knows nothing of
the threads on either side.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

import numpy as np

from brayx.errors import BadFragment, ReplayError, called_from
from brayx.faults import note_of
from brayx.metrics import Recorder
from brayx.replay.buffer import ReplayBuffer
from brayx.replay.config import MAX_PENDING, BufferConfig
from brayx.replay.packing import READY_KEY, Batch, Layout, transitions
from brayx.replay.samplers import Importance
from brayx.types import Columns, Fragment


class LocalBuffer:
    """A `ReplayBuffer` for several threads. A call waits for another thread at most as long as one batch takes; `push`
    never waits for the buffer.

    Args:
        config: sizes and sampling.
        layout: shapes and dtypes of fragments.
        sink: counts ``env_steps``, ``fragments_pushed``, ``fragments_dropped``, ``replay_dropped``, ``replay_batches``
            and ``replay_reused``.
        learned: the learner learns from this buffer; otherwise only ``eval_dropped`` is counted.

    Attributes:
        changed: called when a batch may have become ready, or the stream may have ended.
        behind: called by a pushing thread after a push if the buffer `is_ahead`.
    """

    def __init__(self, config: BufferConfig, layout: Layout | None, sink: Recorder, *, learned: bool = True) -> None:
        self.changed: Callable[[], None] = lambda: None
        self.behind: Callable[[], None] | None = None
        self._config = config
        self._buffer = ReplayBuffer(config, layout)
        self._sink = sink
        self._learned = learned
        self._lock = threading.Lock()
        self._made_room = threading.Condition()
        self._removals = 0
        self._most_pending = MAX_PENDING
        self._pushed: deque[tuple[Fragment | Columns, str]] = deque()
        self._held: deque[tuple[Fragment | Columns, str]] = deque()  # what a table has no room for yet
        self._is_fifo = config.sampler == "fifo"
        self._name_places = False
        self._counted: Counter[str] = Counter()
        self._counted_steps = self._counted_reused = 0
        self._ready_since = math.nan
        self._ended = self._stopped = False

    @property
    def importance(self) -> Importance:
        """Importance correction of prioritised sampling."""
        return self._config.importance

    @property
    def is_ahead(self) -> bool:
        """Whether the learner is behind: a whole batch waits for it, or data that the rate limiter of a table does not
        admit yet. More data would be old, and finally dropped. A buffer for evaluation is read seldom.
        """
        return self._learned and not self._ended and (len(self._buffer) > 0 if self._is_fifo else bool(self._held))

    @property
    def over(self) -> bool:
        """Whether the stream has ended."""
        return self._stopped or (self._ended and self._buffer.exhausted and not self._pushed)

    def push(self, *replays: Fragment | Columns) -> None:
        """Adds fragments and columns; when there is no room, the oldest are dropped and counted. Those that come faster
        than the rate limiter of a table admits wait for it.

        If another thread holds the buffer, that thread adds them when it is done. Waits only in `behind`.
        """
        # Only after a push was refused, as in `brayx.cluster.outbox`: walking the stack is too slow for every push.
        place = called_from() if self._name_places else ""
        self._most_pending = max(self._most_pending, len(replays))  # one of many agents has thousands
        self._pushed.extend((replay, place) for replay in replays)
        lost = 0
        while len(self._pushed) > self._most_pending:
            with contextlib.suppress(IndexError):  # another thread has just taken it
                lost += transitions(self._pushed.popleft()[0])
        if lost:
            self._count("replay_dropped", lost, "full")
        self._take_in(pushing=True)
        if self.behind is not None and self.is_ahead:
            self.behind()

    def offer(self, *replays: Fragment | Columns, timeout_s: float) -> list[Fragment | Columns]:
        """Stores as many as have room within ``timeout_s``; returns the rest. Drops none.

        Raises:
            BadFragment: one was refused, and counted; those before it were stored.
            ReplayError: the stream has ended.
        """
        left, deadline = list(replays), time.monotonic() + timeout_s
        while left:
            seen = self._removals
            with self._turn():
                if self._ended:
                    raise ReplayError("the buffer takes no more: its stream has ended", ended=True)
                try:
                    rest = self._buffer.push_what_fits(left[0])
                except BadFragment as error:
                    self._refused(error, called_from())
                    raise
                self._count_pushed(rest is None)
            self.changed()
            if rest is None:
                left.pop(0)
                continue
            left[0] = rest
            with self._made_room:
                left_s = max(0.0, deadline - time.monotonic())
                if not self._made_room.wait_for(lambda: self._removals != seen, left_s):  # noqa: B023
                    break
        return left

    def has_room(self, timeout_s: float) -> bool:
        """Whether a column can be stored without dropping one."""
        with self._lock:
            return self._buffer.has_room

    def pop(self) -> Batch | None:
        """The next batch, with the Unix time at which it became ready as `READY_KEY`; None: there is none yet."""
        with self._turn():
            if self._stopped:
                return None
            since = np.asarray(self._ready_since)
            batch = self._buffer.pop(reuse=not self._ended)
            if self._held:
                self._pack_pushed()
            self._count("replay_reused", self._buffer.reused - self._counted_reused)
            self._counted_reused = self._buffer.reused
        self._removed()
        return None if batch is None else {**batch, READY_KEY: since}

    def published(self, version: int) -> None:
        """Sets the newest policy version: the buffer drops data that is too old, and refuses data of newer versions."""
        with self._turn():
            self._buffer.published(version)

    def update_priorities(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities ``[n]`` of columns, by the ``index`` ``[n]`` of their batch."""
        with self._turn():
            self._buffer.update_priorities(index, priorities)

    def end(self, *, drain: bool = False) -> None:
        """Ends the stream: at once, or with ``drain`` after the waiting data, the incomplete batch included."""
        with self._turn():
            if drain and not self._ended:
                self._pack_pushed()  # pushed while another thread held the buffer
                self._buffer.flush()
            self._ended = True
            self._stopped = self._stopped or not drain
            self._pack_pushed()  # counts what has had no room
        self._removed()
        self.changed()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the buffer, then adds the data pushed in the meantime."""
        try:
            with self._lock:
                try:
                    yield
                finally:
                    self._look()
        finally:
            self._take_in()

    def _removed(self) -> None:
        """Wakes calls that wait for room."""
        with self._made_room:
            self._removals += 1
            self._made_room.notify_all()

    def _take_in(self, *, pushing: bool = False) -> None:
        """Packs pushed data, unless another thread holds the buffer: that thread does so when it releases it.

        Args:
            pushing: the caller is `push`. Refused data of unknown origin is then reported with the line of that push,
                its likely source. Otherwise it is reported without a line, since that of a sampling thread would
                mislead.
        """
        while self._pushed and self._lock.acquire(blocking=False):
            try:
                self._pack_pushed(pushing)
                self._look()
            finally:
                self._lock.release()
            if not self._buffer.exhausted:
                self.changed()

    def _pack_pushed(self, pushing: bool = False) -> None:
        """Packs all pushed data that has room; the caller holds the buffer."""
        with contextlib.suppress(IndexError):  # there is no more
            while True:
                self._held.append(self._pushed.popleft())
        count = 0
        while self._held:
            replay, place = self._held.popleft()
            if self._ended:
                self._buffer.dropped_elsewhere("ended", transitions(replay))
                continue
            rest = None
            try:
                if self._is_fifo:
                    self._buffer.push(replay)
                else:
                    rest = self._buffer.push_what_fits(replay)
            except BadFragment as error:
                self._refused(error, place or (called_from() if pushing else ""))
                continue
            if rest is not None:
                self._held.appendleft((rest, place))
                break
            count += 1
        while len(self._held) > self._most_pending:
            self._buffer.dropped_elsewhere("rate_limited", transitions(self._held.popleft()[0]))
        self._count_pushed(count)

    def _refused(self, error: BadFragment, place: str) -> None:
        """Counts a fragment that does not fit, with the reason and the line of the caller's code."""
        self._name_places = True
        self._sink.add("fragments_dropped", 1.0, label="refused", note=note_of(error, place))

    def _count_pushed(self, count: int) -> None:
        """Counts ``count`` fragments or columns, and the transitions stored since the last time."""
        self._count("env_steps", self._buffer.pushed - self._counted_steps)
        self._counted_steps = self._buffer.pushed
        self._count("fragments_pushed", count)
        self._count("replay_batches", len(self._buffer))

    def _look(self) -> None:
        """Notes when a batch became ready, and counts dropped data."""
        if self._buffer.exhausted:
            self._ready_since = math.nan
        elif math.isnan(self._ready_since):
            self._ready_since = time.time()
        if self._counted != self._buffer.dropped:
            for reason, count in (self._buffer.dropped - self._counted).items():
                self._count("replay_dropped", count, reason)
            self._counted = self._buffer.dropped.copy()

    def _count(self, name: str, value: float, label: str = "") -> None:
        """Records a sample. A buffer for evaluation records drops only, since the rest would count as the learner's."""
        if self._learned:
            self._sink.add(name, value, label=label)
        elif name == "replay_dropped":
            self._sink.add("eval_dropped", value, label=label)
