"""Replay buffers as one stream of learner batches: directly, or through Ray Data, where one block is one batch.

`read` joins the shards of one buffer, or of several with weights (`mix.py`), into one stream. Each shard has one call
under way, and the next batch comes from the shard whose turn it is among those that have one. `Stream` is the
consumer's end: it knows which shard each batch came from, for credits and priorities, and how many came before, which
importance weights grow with.

A Ray Data row of this stream holds a batch under every key, so a consumer sees ``[1, B, T + 1, ...]`` and takes
``[0]``. Ray Data shapes what a read task yields to ``DataContext.target_max_block_size``: it joins smaller yields and
slices larger ones *between rows*. With a target of one byte every yield leaves at once, and a block of one row cannot
be sliced; so batches may have any size, and N ranks share the stream by whole batches.

Ray Data assumes that a read can be repeated, and retries it for ever. This one cannot be, so retries are off, and a
consumer restarts a stream that breaks: the new reader takes over at the buffer (`BufferActor.attach`). The buffer
bounds what is in flight, because Ray Data reads several blocks ahead. `STREAM_ENVIRONMENT` makes it quick. Knows
nothing of models or learning.
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
from brayx.replay.mix import Mix
from brayx.replay.packing import Batch

Buffers: TypeAlias = str | Mapping[str, float]
"""A buffer's name, or the names of several with their weights."""

_POLL_S = 0.5
"""One wait for a batch; actor calls cannot be cancelled by force, so a task that must go waits no longer than this."""
_ANSWER_S = 30.0
"""Past this a shard counts as lost, and so long all buffers of a stream together may take to be found."""
_FETCH_S = 5.0
"""For an answer that is there; the other shards' batches wait meanwhile."""
_ORIGIN = "_origin"
"""Key of a block that says where its batch is from, as `Origin`."""


class Origin(NamedTuple):
    """Where a batch is from.

    Attributes:
        shard: its number, over all buffers as `Stream` counts them.
        reader: number that it was read with, which gives its credit back.
    """

    shard: int
    reader: int


class _Lane:
    """What is under way with one shard.

    Attributes:
        coming: the call that is waiting there; None: attach first.
        batch: what it gave, until its turn comes, and
        origin: where that is from.
    """

    def __init__(self, buffer: str, shards: Shards, place: int, number: int) -> None:
        self.buffer, self._place = buffer, place
        self._shards, self._actor = shards, shards[number].actor
        self._reader: int | None = None
        self._asked_at = time.monotonic()
        self._down_since: float | None = None
        self._attaching = False
        self._resume_at = 0.0
        self.coming: Any = None
        self.batch: Batch | None = None
        self.origin = Origin(place, 0)
        self.ended = False
        self.given = 0

    def ask(self) -> None:
        """Has a call waiting, if it can and nothing else is there."""
        if self.coming is None and self.batch is None and not self.ended and time.monotonic() >= self._resume_at:
            self._attaching = self._reader is None
            self.coming = (
                self._actor.attach.remote() if self._attaching else self._actor.next_batch.remote(self._reader, _POLL_S)
            )
            self._asked_at = time.monotonic()

    def answer(self) -> None:
        """Takes the answer of the call that is done. Raises ReplayError when the buffer is gone for good."""
        call, self.coming = self.coming, None
        try:
            answer: Any = ray.get(call, timeout=_FETCH_S)
        except RayTaskError:
            raise
        except RayError as error:
            # An actor that died takes a moment to restart; one that was killed for good never answers again. A batch
            # that was made on a node which has died since is lost with it, though its actor had answered.
            if self._shards.gone():
                raise self.lost(first_line(error)) from error
            now = time.monotonic()
            self._reader, self._resume_at = None, now + 0.1
            self._down_since = self._down_since or now
            return
        if self._attaching:  # that it can be attached to does not say that its batches come
            self._reader = answer
            return
        assert isinstance(answer, Next)
        self._down_since = None
        if answer.unknown:
            self._reader = None
        elif self._reader is not None:
            self.origin = Origin(self._place, self._reader)
        self.ended, self.batch = answer.ended, answer.batch

    @property
    def is_lost(self) -> bool:
        """It has not answered for longer than one that lives, or is being restarted, would take."""
        now = time.monotonic()
        hangs = self.coming is not None and now - self._asked_at > _ANSWER_S + _POLL_S
        return hangs or (self._down_since is not None and now - self._down_since > _ANSWER_S)

    def lost(self, why: str = "it does not answer") -> ReplayError:
        """What to raise then."""
        return ReplayError(f"the stream of buffer {self.buffer!r} broke: {why}", buffer=self.buffer)


def read(buffers: Buffers, namespace: str | None = None) -> Generator[tuple[Batch, Origin] | None]:
    """Batches and where they are from, until all streams end; None now and then.

    A batch is asked for before it is needed, so it travels while the caller works. Of each shard, no more than
    ``max_in_flight`` come that are not acknowledged. A shard whose process dies is left out until Ray has started
    another in its place, and one that hangs until it answers: nobody waits for it.

    Raises:
        ReplayError: a buffer is gone for good, or does not answer.
    """
    weights = weights_of(buffers)
    mix = Mix(weights)
    lanes: list[_Lane] = []
    for shards in _found(weights, namespace):
        lanes += [_Lane(shards.name, shards, len(lanes) + number, number) for number in range(len(shards))]
    while True:
        for lane in lanes:
            lane.ask()
        calls = {lane.coming: lane for lane in lanes if lane.coming is not None}
        held = any(lane.batch is not None for lane in lanes)
        if calls:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=0 if held else _POLL_S)
            if len(lanes) > 1:
                done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
            for call in done:
                calls[call].answer()
                calls[call].ask()
        elif not held:
            time.sleep(0.05)  # all that have not ended are being restarted
        if all(lane.ended and lane.batch is None for lane in lanes):
            return
        if all(lane.is_lost for lane in lanes if not lane.ended) and not held:
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


def _found(names: Iterable[str], namespace: str | None) -> list[Shards]:
    """The buffers' shards, all within one deadline."""
    deadline = time.monotonic() + _ANSWER_S
    return [Shards.find(name, namespace=namespace, timeout_s=max(0.0, deadline - time.monotonic())) for name in names]


class Stream:
    """The consumer's end: an iterator of learner batches, whose arrays may be views of shared memory: read only.

    Args:
        items: batches and where they are from, or None where nothing came for a moment.
        buffers: that they are of.
        namespace: None: the caller's.
        timeout_s: longest wait for one batch; None: for ever, which only a learner that others end may do.

    Attributes:
        holds: a buffer with ``max_policy_lag`` 0 sends no batch before the next one is asked for: only then is known
            which version it must be of. For a reader that learns from each, alone, before it asks for the next.
        before: learner batches before the next one, by which ``importance_batches`` counts: those of an interrupted
            training, and of all who share the stream.
        readers: how many do, each with as many batches as this one.
    """

    def __init__(
        self,
        items: Generator[tuple[Batch, Origin] | None],
        buffers: Buffers,
        namespace: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._items = items
        self._shards = _found(weights_of(buffers), namespace)
        self._origins = [(shards, number) for shards in self._shards for number in range(len(shards))]
        self._taken: deque[Origin] = deque()
        self._timeout_s = timeout_s
        self._held: list[Origin] = []
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
        """The learner took a batch, the oldest it had not: as many more may be sent. Does not wait."""
        if self._taken:
            origin = self._taken.popleft()
            if self.holds and self._origins[origin.shard][0].config.max_policy_lag == 0:
                self._held.append(origin)
            else:
                self._ack(origin)

    def published(self, version: int) -> None:
        """The policy has this version now: buffers with a ``max_policy_lag`` count by it. Does not wait."""
        self._version = version
        for shards in self._shards:
            if shards.config.max_policy_lag is not None:
                shards.expire(version)

    def update_priorities(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities ``[n]`` of columns, by the ``index`` ``[n]`` of their batch. Does not wait."""
        for shards in self._shards:
            shards.update_priorities(np.asarray(index), np.asarray(priorities))

    def end(self) -> None:
        """Ends the streams of its buffers for whoever reads them. Does not wait."""
        for shards in self._shards:
            shards.end()

    def _ack(self, origin: Origin) -> None:
        shards, number = self._origins[origin.shard]
        bounded = shards.config.max_policy_lag is not None
        shards.ack(number, reader=origin.reader, newest=self._version if bounded else None)

    def close(self) -> None:
        """Ends the reading; what is under way is lost."""
        self._items.close()


def read_buffer(buffers: Buffers, namespace: str | None = None, *, timeout_s: float | None = None) -> Stream:
    """The stream of buffers, read in this process.

    Args:
        buffers: a name, or names with weights.
        namespace: None: the caller's.
        timeout_s: longest wait for one batch; None: until the stream ends.

    Raises:
        ReplayError: there is no such buffer; later, by the iterator: it is gone for good.
    """
    return Stream(read(buffers, namespace), buffers, namespace, timeout_s)


def batches_of(shard: Any, buffers: Buffers, namespace: str | None = None) -> Stream:
    """The stream of a dataset of `replay_dataset`, or of a rank's shard of it; arguments as there."""
    return Stream(_items_of(shard), buffers, namespace)


def _items_of(shard: Any) -> Generator[tuple[Batch, Origin] | None]:
    for block in shard.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
        origins = block.pop(_ORIGIN)
        for row in range(len(origins)):
            yield {key: array[row] for key, array in block.items()}, Origin(*map(int, origins[row]))


class ReplaySource(Datasource):
    """Reads buffers until their streams end.

    Args:
        buffers: a name, or names with weights.
        namespace: Ray namespace they live in. A read task runs in the job's namespace, which need not be the same.
    """

    def __init__(self, buffers: Buffers, namespace: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers
        self._namespace = namespace

    def estimate_inmemory_data_size(self) -> int | None:
        """None: nobody knows how much will come."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """One task. Called several times by Ray Data, so it has no effect of its own."""
        buffers, namespace = self._buffers, self._namespace

        def blocks() -> Iterator[Block]:
            for item in read(buffers, namespace):
                if item is not None:
                    batch, origin = item
                    row = {key: array[np.newaxis] for key, array in batch.items()}
                    yield BlockAccessor.batch_to_block({**row, _ORIGIN: np.array([origin], np.int64)})

        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(blocks, metadata)]


def _for_streams(context: DataContext) -> None:
    """Sets what a dataset is executed with, wherever that is, for a stream without an end."""
    context.target_max_block_size = 1
    context.execution_options.preserve_order = True
    context.execution_options.verbose_progress = False
    context.execution_no_progress_timeout_s = -1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    keep_house(context)


def replay_dataset(buffers: Buffers, *, namespace: str | None = None) -> Any:
    """The stream of buffers as a `ray.data.Dataset`.

    Iterate it with `batches_of`. It has a `DataContext` of its own: other datasets of the process stay as they are.

    Args:
        buffers: a name, or names with weights: of what is there, each has its share.
        namespace: None: the caller's.
    """
    weights_of(buffers)
    namespace = namespace or ray.get_runtime_context().namespace
    with warnings.catch_warnings():
        # Deprecated in favour of named arguments, of which there is none for retries.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        dataset = ray.data.read_datasource(
            ReplaySource(buffers, namespace),
            override_num_blocks=1,
            num_cpus=0,
            ray_remote_args={"max_retries": 0},
        )
    # A copy of the process's, made for this one; `streaming_split` executes with it, too. Ray Train does but for the
    # execution options, which it has to be given.
    _for_streams(dataset.context)
    return dataset


def weights_of(buffers: Buffers) -> dict[str, float]:
    """Weight by name. Raises ValueError for a weight that is not positive."""
    weights = {buffers: 1.0} if isinstance(buffers, str) else dict(buffers)
    Mix(weights)  # says what is wrong with them here
    return weights
