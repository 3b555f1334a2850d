"""A replay buffer between the event loop that fills it and the learner's thread that empties it.

`ReplayBuffer` is the logic; this adds that neither side holds up the other. Knows nothing of who waits for batches.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

import numpy as np

from brayx.errors import BadFragment
from brayx.logs import limited
from brayx.metrics import Sink
from brayx.replay.buffer import ReplayBuffer
from brayx.replay.config import BufferConfig
from brayx.replay.importance import Importance
from brayx.replay.packing import READY_KEY, Batch, Layout, transitions
from brayx.types import Columns, Fragment

logger = limited(__name__)


class LocalBuffer:
    """A `ReplayBuffer` for several threads. Its methods never wait for another thread but for the time of one batch,
    and `push` not even that.

    Args:
        config: sizes, and how to sample.
        layout: what fragments must look like.
        sink: is told of ``env_steps``, ``fragments_pushed``, ``replay_dropped``, ``replay_batches`` and
            ``replay_reused``.
        learned: what comes out is learned from. Otherwise the sink is told of ``eval_dropped`` alone.
        changed: called when there may be a batch, or the end, that was not there before.
    """

    def __init__(
        self,
        config: BufferConfig,
        layout: Layout | None,
        sink: Sink,
        *,
        learned: bool = True,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.changed = changed
        self._config = config
        self._buffer = ReplayBuffer(config, layout)
        self._sink = sink
        self._learned = learned
        self._lock = threading.Lock()
        self._pushed: deque[Fragment | Columns] = deque()
        self._told: Counter[str] = Counter()
        self._told_steps = self._told_reused = 0
        self._ready_since = math.nan
        self._ended = self._stopped = False

    @property
    def importance(self) -> Importance:
        """How far whoever learns from this is to correct."""
        return self._config.importance

    @property
    def refusal(self) -> str:
        """What the newest refused fragment was refused for; empty when none was."""
        return self._buffer.last_refusal

    @property
    def over(self) -> bool:
        """No batch comes any more."""
        return self._stopped or (self._ended and self._buffer.exhausted and not self._pushed)

    def push(self, *replays: Fragment | Columns) -> None:
        """Takes fragments and columns in; when there is no room, the oldest are dropped and counted.

        Never waits: while another thread is in the buffer, that one takes them in when it is done.
        """
        self._pushed.extend(replays)
        lost = 0
        while len(self._pushed) > self._config.max_pending:
            with contextlib.suppress(IndexError):  # who is in the buffer has just taken it
                lost += transitions(self._pushed.popleft())
        if lost:
            self._count("replay_dropped", lost, "full")
        self._take_in()

    def pop(self) -> Batch | None:
        """The next batch, with the Unix time since when it could have been given as `READY_KEY`; None: wait."""
        with self._turn():
            if self._stopped:
                return None
            since = np.asarray(self._ready_since)
            batch = self._buffer.pop(reuse=not self._ended)
            self._count("replay_reused", self._buffer.reused - self._told_reused)
            self._told_reused = self._buffer.reused
        return None if batch is None else {**batch, READY_KEY: since}

    def published(self, version: int) -> None:
        """Tells that the policy has this version: what is too old is dropped, what claims to be newer refused."""
        with self._turn():
            self._buffer.published(version)

    def update_priorities(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities ``[n]`` of columns, by the ``index`` ``[n]`` of their batch."""
        with self._turn():
            self._buffer.update_priorities(index, priorities)

    def end(self, *, drain: bool = False) -> None:
        """Ends the stream: at once, or with ``drain`` after what waits, the unfinished batch included."""
        with self._turn():
            if drain and not self._ended:
                self._buffer.flush()
            self._ended = True
            self._stopped = self._stopped or not drain
        self.changed()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """A turn in the buffer, after which what was pushed meanwhile is taken in."""
        with self._lock:
            yield
            self._look()
        self._take_in()

    def _take_in(self) -> None:
        """Packs what was pushed, unless another thread is in the buffer, which does so when it leaves."""
        while self._pushed and self._lock.acquire(blocking=False):
            try:
                count = 0
                with contextlib.suppress(IndexError):  # there is no more
                    while True:
                        count += self._pack(self._pushed.popleft())
                self._count("env_steps", self._buffer.pushed - self._told_steps)
                self._told_steps = self._buffer.pushed
                self._count("fragments_pushed", count)
                self._count("replay_batches", len(self._buffer))
                self._look()
            finally:
                self._lock.release()
            if not self._buffer.exhausted:
                self.changed()

    def _pack(self, replay: Fragment | Columns) -> int:
        """Takes one in; gives how many were."""
        if self._ended:
            self._buffer.dropped_elsewhere("ended", transitions(replay))
            return 0
        try:
            self._buffer.push(replay)
        except BadFragment as error:
            logger.warning("replay refused a fragment: %s", error.message)
            return 0
        return 1

    def _look(self) -> None:
        """Notes since when there is something to give, and tells of what was dropped."""
        if self._buffer.exhausted:
            self._ready_since = math.nan
        elif math.isnan(self._ready_since):
            self._ready_since = time.time()
        if self._told != self._buffer.dropped:
            for reason, count in (self._buffer.dropped - self._told).items():
                self._count("replay_dropped", count, reason)
            self._told = self._buffer.dropped.copy()

    def _count(self, name: str, value: float, label: str = "") -> None:
        """Records a sample; where nothing is learned from, only of drops: all else would be taken for the learner's."""
        if self._learned:
            self._sink.add(name, value, label=label)
        elif name == "replay_dropped":
            self._sink.add("eval_dropped", value, label=label)
