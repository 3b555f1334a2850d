"""Replay buffers as one stream of learner batches: directly, or through Ray Data, where one block is one batch.

`read` joins the shards of one buffer, or of several with weights (`mix.py`), into one stream. Each shard has one
pending call. The next batch is taken in turn from the shards that have one ready. `Stream` is the consumer's end. It
tracks the shard of each batch, for credits and priorities, and counts batches, for the schedule of importance weights.

A Ray Data row of this stream holds a batch under every key, so a consumer gets ``[1, B, T + 1, ...]`` and takes
``[0]``. Ray Data shapes the yields of a read task to ``DataContext.target_max_block_size``: it joins smaller yields and
slices larger ones *between rows*. With a target of one byte every yield is sent at once, and a block of one row cannot
be sliced. So batches may have any size, and N ranks share the stream by whole batches.

Ray Data assumes that a read can be repeated, and retries it forever. This read cannot be repeated, so retries are off.
The consumer restarts a broken stream: its new reader takes over at the buffer (`BufferActor.attach`). The buffer limits
the batches in flight, because Ray Data reads several blocks ahead. `STREAM_ENVIRONMENT` reduces latency. Knows nothing
of models or learning.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import ray
import ray.data
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import RayError, RayTaskError

from brayx.cluster.buffer import Next
from brayx.cluster.housekeeping import keep_house
from brayx.cluster.shards import Shards
from brayx.errors import DeadlineExceeded, ReplayError, first_line
from brayx.replay.mix import StreamMix
from brayx.replay.packing import Batch

Buffers: TypeAlias = str | Mapping[str, float]
"""The name of a buffer, or names of several with weights."""

_POLL_S = 0.5
"""Longest single wait for a batch. Actor calls cannot be cancelled, so this bounds how long a read takes to stop."""
_ANSWER_S = 30.0
"""Seconds without an answer after which a shard is lost; also the deadline to find all buffers of a stream."""
_FETCH_S = 5.0
"""Deadline to fetch a finished call's result; the other shards' batches wait meanwhile."""
_ORIGIN = "_origin"
"""Key of a block that holds its batch's `BatchOrigin`."""


class BatchOrigin(NamedTuple):
    """The origin of a batch.

    Attributes:
        shard: number of the shard, counted over all buffers of the `Stream`.
        reader: reader number that the batch was read with; needed to return its credit.
    """

    shard: int
    reader: int


class _Lane:
    """The state of reading from one shard.

    Attributes:
        coming: the pending call; None: none yet.
        batch: a batch that was read and waits for its turn.
        origin: origin of that batch.
    """

    def __init__(self, buffer: str, shards: Shards, place: int, number: int) -> None:
        self.buffer, self._place = buffer, place
        self._shards, self._actor = shards, shards[number].actor
        self._reader: int | None = None
        self._requested_at = time.monotonic()
        self._down_since: float | None = None
        self._attaching = False
        self._resume_at = 0.0
        self.coming: Any = None
        self.batch: Batch | None = None
        self.origin = BatchOrigin(place, 0)
        self.ended = False
        self.given = 0

    def ask(self) -> None:
        """Starts a call, unless one is pending or a batch waits."""
        if self.coming is None and self.batch is None and not self.ended and time.monotonic() >= self._resume_at:
            self._attaching = self._reader is None
            self.coming = (
                self._actor.attach.remote() if self._attaching else self._actor.next_batch.remote(self._reader, _POLL_S)
            )
            self._requested_at = time.monotonic()

    def answer(self) -> None:
        """Handles the result of a finished call. Raises ReplayError if the buffer has ended for good."""
        call, self.coming = self.coming, None
        try:
            answer: Any = ray.get(call, timeout=_FETCH_S)
        except RayTaskError:
            raise
        except RayError as error:
            # A dead actor may be restarting; one that was killed for good never answers again. A batch is also lost
            # with its node, even after its actor has answered.
            if self._shards.gone():
                raise self.lost(first_line(error)) from error
            now = time.monotonic()
            self._reader, self._resume_at = None, now + 0.1
            self._down_since = self._down_since or now
            return
        if self._attaching:  # an attached shard may still fail to deliver batches
            self._reader = answer
            return
        assert isinstance(answer, Next)
        self._down_since = None
        if answer.unknown:
            self._reader = None
        elif self._reader is not None:
            self.origin = BatchOrigin(self._place, self._reader)
        self.ended, self.batch = answer.ended, answer.batch

    @property
    def is_lost(self) -> bool:
        """Whether it has not answered for longer than a restart takes."""
        now = time.monotonic()
        hangs = self.coming is not None and now - self._requested_at > _ANSWER_S + _POLL_S
        return hangs or (self._down_since is not None and now - self._down_since > _ANSWER_S)

    def lost(self, why: str = "it does not answer") -> ReplayError:
        """The error to raise for a lost shard."""
        return ReplayError(f"the stream of buffer {self.buffer!r} broke: {why}", buffer=self.buffer)


def read(buffers: Buffers) -> Generator[tuple[Batch, BatchOrigin] | None]:
    """Yields batches with their origins until all streams end, and None when no batch arrived for a moment.

    The next batch is requested early, so it travels while the caller works. Each shard has at most ``max_in_flight``
    batches that are not acknowledged. A shard that restarts or hangs is skipped until it answers.

    Raises:
        ReplayError: a buffer has ended for good, or does not answer.
    """
    weights = weights_of(buffers)
    mix = StreamMix(weights)
    lanes: list[_Lane] = []
    for shards in _found(weights):
        lanes += [_Lane(shards.name, shards, len(lanes) + number, number) for number in range(len(shards))]
    while True:
        for lane in lanes:
            lane.ask()
        calls = {lane.coming: lane for lane in lanes if lane.coming is not None}
        has_batches = any(lane.batch is not None for lane in lanes)
        if calls:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=0 if has_batches else _POLL_S)
            if len(lanes) > 1:
                done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
            for call in done:
                calls[call].answer()
                calls[call].ask()
        elif not has_batches:
            time.sleep(0.05)  # all remaining shards are restarting
        if all(lane.ended and lane.batch is None for lane in lanes):
            return
        if all(lane.is_lost for lane in lanes if not lane.ended) and not has_batches:
            raise next(lane for lane in lanes if not lane.ended).lost()
        ready = {lane.buffer for lane in lanes if lane.batch is not None}
        if not ready:
            yield None
            continue
        chosen = mix.choose(ready)
        lane = min((x for x in lanes if x.buffer == chosen and x.batch is not None), key=lambda lane: lane.given)
        batch, origin, lane.batch = lane.batch, lane.origin, None
        lane.given += 1
        lane.ask()
        assert batch is not None
        yield batch, origin


def _found(names: Iterable[str]) -> list[Shards]:
    """Finds the buffers' shards, all within one deadline."""
    deadline = time.monotonic() + _ANSWER_S
    return [Shards.find(name, timeout_s=max(0.0, deadline - time.monotonic())) for name in names]


class Stream:
    """The consumer's end: an iterator of learner batches. Arrays may be read-only views of shared memory.

    Args:
        items: batches with their origins, or None when no batch arrived for a moment.
        buffers: the buffers they come from.
        timeout_s: longest wait for one batch; None: no limit, only for a learner that others can end.

    Attributes:
        holds: for a single reader that learns from each batch before it requests the next. With ``max_policy_lag`` 0
            the buffer then sends a batch only on request, because only then the required version is known.
        before: number of earlier learner batches, for ``importance_batches``; includes those of an interrupted
            training, and of all readers of the stream.
        readers: number of readers that share the stream equally.
    """

    def __init__(
        self,
        items: Generator[tuple[Batch, BatchOrigin] | None],
        buffers: Buffers,
        timeout_s: float | None = None,
    ) -> None:
        self._items = items
        self._shards = _found(weights_of(buffers))
        self._origins = [(shards, number) for shards in self._shards for number in range(len(shards))]
        self._taken: deque[BatchOrigin] = deque()
        self._timeout_s = timeout_s
        self._held: list[BatchOrigin] = []
        self._version: int | None = None
        self.holds = False
        self.before = 0
        self.readers = 1

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        while self._held:
            self._ack(self._held.pop())
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        for item in self._items:
            if item is not None:
                batch, origin = item
                self._taken.append(origin)
                shards, _ = self._origins[origin.shard]
                batch = shards.config.importance.weigh(batch, self.before)
                self.before += self.readers
                return batch
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineExceeded(f"no batch came from the replay buffer within {self._timeout_s:g} s")
        raise StopIteration

    def took(self) -> None:
        """Returns the credit of the oldest batch that the learner has not taken yet. Does not wait."""
        if self._taken:
            origin = self._taken.popleft()
            if self.holds and self._origins[origin.shard][0].config.max_policy_lag == 0:
                self._held.append(origin)
            else:
                self._ack(origin)

    def published(self, version: int) -> None:
        """Reports the policy's new version to the buffers, for their ``max_policy_lag``. Does not wait."""
        self._version = version
        for shards in self._shards:
            if shards.config.max_policy_lag is not None:
                shards.expire(version)

    def update_priorities(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """Sets new priorities ``[n]`` of columns, by the ``index`` ``[n]`` of their batch. Does not wait."""
        for shards in self._shards:
            shards.update_priorities(np.asarray(index), np.asarray(priorities))

    def end(self) -> None:
        """Ends the streams of its buffers, for all readers. Does not wait."""
        for shards in self._shards:
            shards.end()

    def _ack(self, origin: BatchOrigin) -> None:
        shards, number = self._origins[origin.shard]
        bounded = shards.config.max_policy_lag is not None
        shards.ack(number, reader=origin.reader, newest=self._version if bounded else None)

    def close(self) -> None:
        """Stops reading; batches in flight are lost."""
        self._items.close()


def read_buffer(buffers: Buffers, *, timeout_s: float | None = None) -> Stream:
    """The stream of buffers, read in this process.

    Args:
        buffers: a name, or names with weights.
        timeout_s: longest wait for one batch; None: until the stream ends.

    Raises:
        ReplayError: there is no such buffer; later, by the iterator: it is gone for good.
    """
    return Stream(read(buffers), buffers, timeout_s)


def batches_of(shard: Any, buffers: Buffers) -> Stream:
    """The stream of a dataset of `replay_dataset`, or of a rank's shard of it; arguments as there."""
    return Stream(_items_of(shard), buffers)


def _items_of(shard: Any) -> Generator[tuple[Batch, BatchOrigin] | None]:
    for block in shard.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
        origins = block.pop(_ORIGIN)
        for row in range(len(origins)):
            yield {key: array[row] for key, array in block.items()}, BatchOrigin(*map(int, origins[row]))


class ReplaySource(Datasource):
    """Reads buffers until their streams end.

    Args:
        buffers: a name, or names with weights.
    """

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers

    def estimate_inmemory_data_size(self) -> int | None:
        """None: the size of a stream is unknown."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """One task. Ray Data calls this several times, so it has no side effects."""
        buffers = self._buffers

        def blocks() -> Iterator[Block]:
            for item in read(buffers):
                if item is not None:
                    batch, origin = item
                    row = {key: array[np.newaxis] for key, array in batch.items()}
                    yield BlockAccessor.batch_to_block({**row, _ORIGIN: np.array([origin], np.int64)})

        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(blocks, metadata)]


def _for_streams(context: DataContext) -> None:
    """Sets the execution options of a dataset for an endless stream."""
    context.target_max_block_size = 1
    context.execution_options.preserve_order = True
    context.execution_options.verbose_progress = False
    context.execution_no_progress_timeout_s = -1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    keep_house(context)


def replay_dataset(buffers: Buffers) -> Any:
    """The stream of buffers as a `ray.data.Dataset`.

    Iterate it with `batches_of`. It has a separate `DataContext`, so other datasets of the process are not affected.

    Args:
        buffers: a name, or names with weights, which set the share of each buffer that has batches.
    """
    weights_of(buffers)
    with warnings.catch_warnings():
        # Ray deprecates this option in favour of named arguments, but has none for retries.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        dataset = ray.data.read_datasource(
            ReplaySource(buffers),
            override_num_blocks=1,
            num_cpus=0,
            ray_remote_args={"max_retries": 0},
        )
    # A copy of the process's context. `streaming_split` uses it too. Ray Train uses it except for the execution
    # options, which it takes as an argument.
    _for_streams(dataset.context)
    return dataset


def weights_of(buffers: Buffers) -> dict[str, float]:
    """Weight by name. Raises ValueError for a weight that is not positive."""
    weights = {buffers: 1.0} if isinstance(buffers, str) else dict(buffers)
    StreamMix(weights)  # validates the weights
    return weights
