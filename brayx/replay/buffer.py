"""Where fragments wait for the learner: first in first out, each once, bounded, and honest about what it drops.

`ReplayBuffer` is the logic, without any waiting. `create_buffer` puts it into a named Ray actor (`BufferActor`) that
lets readers wait, and `RemoteBuffer` is the handle that acting processes push through. Knows nothing of Ray Data
(`source.py` does), of models, or of what the learner does with a batch.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from brayx.errors import BadFragment, BrayxError, ReplayError
from brayx.hub import HubClient, get_hub
from brayx.replay.config import BufferConfig
from brayx.replay.packing import Batch, Layout, Packer
from brayx.types import Fragment

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 5.0
"""Longest that one call of a reader waits inside the actor."""
_RETRY_S = 0.2
"""After a push that failed, until what waits is sent: the actor restarts by itself."""


class ReplayBuffer:
    """FIFO replay: packs fragments into learner batches and gives each batch once.

    Args:
        config: sizes.
        layout: what fragments must look like; what it does not know, or None, is as in the first good one.

    Attributes:
        pushed: transitions accepted so far.
        dropped: transitions dropped so far, by reason (``full``, ``bad_fragment``).
    """

    def __init__(self, config: BufferConfig, layout: Layout | None = None) -> None:
        self._config = config
        self._packer = Packer(config.batch_size, config.unroll_length, layout)
        self._batches: deque[Batch] = deque()
        self.pushed = 0
        self.dropped: Counter[str] = Counter()
        self.last_refusal = ""

    def __len__(self) -> int:
        """Whole batches waiting."""
        return len(self._batches)

    def push(self, fragment: Fragment) -> None:
        """Takes one fragment in; when the buffer is full, its oldest batch goes.

        Raises:
            BadFragment: names the field. Counted, and nothing is packed.
        """
        try:
            full = self._packer.add(fragment)
        except BadFragment as error:
            self.dropped["bad_fragment"] += len(fragment) if isinstance(fragment, Fragment) else 1
            self.last_refusal = error.message
            raise
        self.pushed += len(fragment)
        for batch in full:
            self._append(batch)

    def pop(self) -> Batch | None:
        """The oldest batch, or None."""
        return self._batches.popleft() if self._batches else None

    def flush(self) -> None:
        """Makes a batch of what was packed so far, its rest masked out."""
        batch = self._packer.flush()
        if batch is not None:
            self._append(batch)

    def stats(self) -> dict[str, float]:
        """Counters by name: ``pushed``, ``waiting`` transitions of the unfinished batch, ``batches``, ``dropped.*``."""
        return {
            "pushed": self.pushed,
            "waiting": self._packer.waiting,
            "batches": len(self._batches),
            **{f"dropped.{reason}": count for reason, count in self.dropped.items()},
        }

    def _append(self, batch: Batch) -> None:
        self._batches.append(batch)
        while len(self._batches) > self._config.size:
            self.dropped["full"] += int(self._batches.popleft()["mask"].sum())


class Next(NamedTuple):
    """Answer to a reader: a batch, the end of the stream, or neither (ask again).

    Attributes:
        batch: the oldest.
        ended: no more will come.
        unknown: this buffer restarted since the reader attached: attach again.
    """

    batch: Batch | None
    ended: bool = False
    unknown: bool = False


class BufferActor:
    """The Ray actor around a `ReplayBuffer`: readers wait here, and credits bound what is on its way to the learner.

    One reader reads at a time. A new one (`attach`) takes over: the credits of the batches that its predecessor had
    in flight are forgotten, and the predecessor is told that its stream ended.

    Args:
        config: sizes.
        layout: what fragments must look like; what it does not know, or None, is as in the first good one.
        hub: name of the trial's hub, which is told of ``env_steps``, ``fragments_pushed``, ``replay_dropped`` and
            ``replay_batches``; empty: nobody is. No handle, because an actor that restarts must not depend on one.
        namespace: of the hub.
    """

    def __init__(self, config: BufferConfig, layout: Layout | None = None, hub: str = "", namespace: str = "") -> None:
        self._buffer = ReplayBuffer(config, layout)
        self._config = config
        self._changed = asyncio.Condition()
        # A random start tells the readers of a process that died from those of this one.
        self._first = secrets.randbits(60)
        self._reader = self._first
        self._in_flight = 0
        self._ended = False
        self._stopping = False
        self._failure: BrayxError | None = None
        self._books = HubClient(get_hub(hub, namespace) if hub else None)
        self._told: Counter[str] = Counter()

    async def push(self, fragments: Sequence[Fragment]) -> int:
        """Takes fragments in and says how many were refused; after `end` all are dropped."""
        refused, before = 0, self._buffer.pushed
        for fragment in fragments:
            if self._ended:
                self._buffer.dropped["ended"] += len(fragment)
                continue
            try:
                self._buffer.push(fragment)
            except BadFragment as error:
                refused += 1
                if refused == 1:
                    logger.warning("replay refused a fragment: %s", error.message)
        self._books.add("env_steps", self._buffer.pushed - before)
        self._books.add("fragments_pushed", len(fragments) - refused)
        self._books.add("replay_batches", len(self._buffer))
        for reason, count in (self._buffer.dropped - self._told).items():
            self._books.add("replay_dropped", count, label=reason)
        self._told = self._buffer.dropped.copy()
        await self._notify()
        return refused

    async def attach(self) -> int:
        """Makes the caller the one reader, and gives it the number to read with."""
        self._reader += 1
        self._in_flight = 0
        await self._notify()
        return self._reader

    async def next_batch(self, reader: int, timeout_s: float) -> Next:
        """The oldest batch, as soon as there is one and a credit for it.

        Args:
            reader: number that `attach` gave.
            timeout_s: how long to wait; at most 5 s.
        """
        deadline = time.monotonic() + min(timeout_s, _MAX_WAIT_S)
        async with self._changed:
            while True:
                if not self._first < reader <= self._reader:
                    return Next(None, unknown=True)
                if reader < self._reader or self._stopping:
                    return Next(None, ended=True)
                if self._in_flight < self._config.max_in_flight:
                    batch = self._buffer.pop()
                    if batch is not None:
                        self._in_flight += 1
                        return Next(batch)
                    if self._ended:
                        return Next(None, ended=True)
                left = deadline - time.monotonic()
                if left <= 0:
                    return Next(None)
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    return Next(None)

    async def ack(self, count: int = 1) -> None:
        """The learner took ``count`` batches: as many more may leave."""
        self._in_flight = max(0, self._in_flight - count)
        await self._notify()

    async def end(self, *, drain: bool = False) -> None:
        """Ends the stream.

        Args:
            drain: give what waits first, the unfinished batch included; otherwise the stream ends at once.
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
        """Whether the stream is over: no reader is given another batch."""
        return self._stopping

    async def fail(self, error: BrayxError) -> None:
        """Keeps what the learner failed with for good; the first counts."""
        self._failure = self._failure or error

    async def failure(self) -> BrayxError | None:
        """What the learner failed with for good."""
        return self._failure

    async def stats(self) -> dict[str, float]:
        """Counters of the buffer, and ``in_flight``."""
        return {**self._buffer.stats(), "in_flight": self._in_flight}

    async def refusal(self) -> str:
        """What the newest refused fragment was refused for; empty when none was."""
        return self._buffer.last_refusal

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def create_buffer(
    name: str,
    config: BufferConfig,
    layout: Layout | None = None,
    *,
    namespace: str = "",
    hub: str = "",
) -> Any:
    """Starts the named buffer actor and returns its handle.

    It takes no CPU, and restarts empty when its process dies. Whoever created it ends it with ``ray.kill``.

    Args:
        name: of the actor, unique in its namespace.
        config: sizes.
        layout: what fragments must look like; what it does not know, or None, is as in the first good one.
        namespace: of the actor and of the hub; empty: the caller's, and no hub.
        hub: name of the trial's hub; empty: metrics go nowhere.

    Raises:
        ReplayError: the actor did not start; or the name is taken.
    """
    import ray

    options: dict[str, Any] = {
        "name": name,
        "namespace": namespace or None,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 1000,
    }
    try:
        actor: Any = ray.remote(BufferActor).options(**options)
        actor = actor.remote(config, layout, hub, namespace)
        ray.get(actor.stats.remote(), timeout=60)
    except (ValueError, ray.exceptions.RayError) as error:
        raise ReplayError(f"buffer {name!r} did not start: {error}") from error
    return actor


def get_buffer(name: str, *, namespace: str | None = None) -> Any:
    """Handle of a running buffer actor.

    Raises:
        ReplayError: there is none of that name.
    """
    import ray

    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError as error:
        raise ReplayError(f"no buffer named {name!r} is running in this Ray namespace") from error


class RemoteBuffer:
    """Pushes fragments to a buffer actor from anywhere, without ever waiting for it.

    At most one call is on its way; what is pushed meanwhile goes with the next one, all of it. Past ``max_pending``
    fragments the oldest is dropped and counted. A call that fails takes its fragments along, what waits goes with the
    next one soon after; one without an answer for ``push_timeout_s`` counts as failed, though it may yet arrive.

    Args:
        name: of the buffer actor.
        namespace: None: the caller's.
        max_pending: fragments kept while a call is on its way.
        on_dropped: told ``(reason, transitions)`` of every drop: ``full``, ``buffer_lost``, or ``closed``.
        push_timeout_s: for one call; looked at when something is pushed.

    Attributes:
        pushed: fragments handed to `push`.
        dropped: transitions dropped here, by reason.
    """

    def __init__(
        self,
        name: str,
        *,
        namespace: str | None = None,
        max_pending: int = 1024,
        on_dropped: Callable[[str, int], None] | None = None,
        push_timeout_s: float = 60.0,
    ) -> None:
        self._handle = get_buffer(name, namespace=namespace)
        self._pending: deque[Fragment] = deque()
        self._max_pending = max_pending
        self._on_dropped = on_dropped
        self._lock = threading.Lock()
        self._push_timeout_s = push_timeout_s
        self._calls = 0
        self._sending: list[Fragment] = []
        self._sending_since = 0.0
        self._retry: threading.Timer | None = None
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self.pushed = 0
        self.dropped: Counter[str] = Counter()

    def push(self, *fragments: Fragment) -> None:
        """Hands fragments over and returns at once. Safe from any thread."""
        lost = 0
        with self._lock:
            closed = self._closed
            self.pushed += len(fragments)
            if not closed:
                self._pending.extend(fragments)
            while len(self._pending) > self._max_pending:
                lost += len(self._pending.popleft())
        if closed:
            self._drop("closed", sum(map(len, fragments)))
            return
        if lost:
            self._drop("full", lost)
        self._give_up_if_overdue()
        self._send()

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything pushed so far has reached the buffer; False when the time ran out first."""
        deadline = time.monotonic() + timeout_s
        with self._idle:
            while self._sending or self._pending:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """Delivers what is pending if that takes no longer than ``timeout_s``, and takes no more."""
        self.flush(timeout_s)
        with self._lock:
            self._closed = True
            lost = sum(map(len, self._pending))
            self._pending.clear()
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
        if lost:
            self._drop("closed", lost)

    def _send(self) -> None:
        with self._lock:
            if self._sending or not self._pending:
                return
            fragments = list(self._pending)
            self._pending.clear()
            self._calls += 1
            call = self._calls
            self._sending, self._sending_since = fragments, time.monotonic()
        try:
            future = self._handle.push.remote(fragments).future()
        except Exception as error:  # Ray's own errors for a handle that cannot be used any more
            self._failed(call, error)
            return
        future.add_done_callback(lambda done: self._sent(call, done.exception()))

    def _sent(self, call: int, error: BaseException | None) -> None:
        if error is not None:
            self._failed(call, error)
        elif self._done(call) is not None:
            self._send()

    def _failed(self, call: int, error: BaseException) -> None:
        fragments = self._done(call)
        if fragments is None:
            return
        logger.warning("a push to the replay buffer failed: %s", str(error).splitlines()[0] if str(error) else error)
        self._drop("buffer_lost", sum(map(len, fragments)))
        with self._lock:
            if self._closed or not self._pending:
                return
            if self._retry is not None:
                self._retry.cancel()
            self._retry = threading.Timer(_RETRY_S, self._send)
            self._retry.daemon = True
            self._retry.start()

    def _give_up_if_overdue(self) -> None:
        with self._lock:
            overdue = bool(self._sending) and time.monotonic() - self._sending_since > self._push_timeout_s
            call = self._calls
        if overdue:
            self._failed(call, TimeoutError(f"no answer within {self._push_timeout_s:g} s"))

    def _done(self, call: int) -> list[Fragment] | None:
        """Settles the call on its way and gives its fragments; None when that one was settled before."""
        with self._idle:
            if call != self._calls or not self._sending:
                return None
            fragments, self._sending = self._sending, []
            self._idle.notify_all()
            return fragments

    def _drop(self, reason: str, transitions: int) -> None:
        with self._lock:
            self.dropped[reason] += transitions
        if self._on_dropped is not None:
            self._on_dropped(reason, transitions)
