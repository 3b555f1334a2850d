"""The replay buffer as a Ray Data stream: one block is one row is one whole learner batch.

A Ray Data row of this stream holds a batch under every key, so a consumer sees ``[1, B, T + 1, ...]`` and takes
``[0]``. Ray Data shapes what a read task yields to ``DataContext.target_max_block_size``: it joins smaller yields and
slices larger ones *between rows*. With a target of one byte every yield leaves at once, and a block of one row cannot
be sliced; so batches may have any size, and N ranks share the stream by whole batches.

Ray Data takes a read for repeatable and retries it for ever; this one is neither, so retries are off and a stream
that breaks is restarted by its consumer: the new reader takes over at the buffer (`BufferActor.attach`). The buffer
bounds what is in flight, because Ray Data reads several blocks ahead. `STREAM_ENVIRONMENT` makes it quick. Knows
nothing of models or learning.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import ray
import ray.data
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import GetTimeoutError, RayActorError

from brayx.errors import ReplayError
from brayx.replay.buffer import Next, get_buffer
from brayx.replay.packing import Batch

_POLL_S = 0.5
"""One wait for a batch; actor calls cannot be cancelled by force, so a task that must go waits no longer than this."""
_ANSWER_S = 30.0
"""Past this the buffer actor counts as lost."""


class ReplaySource(Datasource):
    """Reads a buffer actor until its stream ends.

    Args:
        buffer_name: of the buffer actor.
        namespace: Ray namespace it lives in. A read task runs in the job's namespace, which need not be the same.
    """

    def __init__(self, buffer_name: str, namespace: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffer_name = buffer_name
        self._namespace = namespace

    def estimate_inmemory_data_size(self) -> int | None:
        """None: nobody knows how much will come."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """One task. Called several times by Ray Data, so it has no effect of its own."""
        name, namespace = self._buffer_name, self._namespace

        def read() -> Iterator[Block]:
            for batch in read_buffer(name, namespace):
                yield BlockAccessor.batch_to_block({key: array[np.newaxis] for key, array in batch.items()})

        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(read, metadata)]


def read_buffer(buffer_name: str, namespace: str | None = None) -> Generator[Batch]:
    """Batches of a buffer actor until its stream ends, or another reader takes over.

    The next batch is asked for before one is given, so it travels while the caller works. Whoever learns from a
    batch must call the actor's ``ack``, or no more than ``max_in_flight`` come. When the actor's process dies, the
    stream goes on with the one that Ray starts in its place.

    Raises:
        ReplayError: the buffer actor is gone for good, or does not answer.
    """
    actor = get_buffer(buffer_name, namespace=namespace)
    deadline = time.monotonic() + _ANSWER_S
    reader = None
    while True:
        try:
            if reader is None:
                reader = ray.get(actor.attach.remote(), timeout=_ANSWER_S)
                coming = actor.next_batch.remote(reader, _POLL_S)
            answer: Next = ray.get(coming, timeout=_ANSWER_S)
            deadline = time.monotonic() + _ANSWER_S
            if answer.ended:
                return
            if answer.unknown:
                reader = None
                continue
            coming = actor.next_batch.remote(reader, _POLL_S)
        except (RayActorError, GetTimeoutError) as error:
            # An actor that died takes a moment to restart; one that was killed for good never answers again.
            if isinstance(error, GetTimeoutError) or time.monotonic() > deadline or _is_gone(buffer_name, namespace):
                raise ReplayError(f"the stream of buffer {buffer_name!r} broke: {error}", buffer=buffer_name) from error
            reader = None
            time.sleep(0.1)
            continue
        if answer.batch is not None:
            yield answer.batch


def _is_gone(buffer_name: str, namespace: str | None) -> bool:
    try:
        get_buffer(buffer_name, namespace=namespace)
    except ReplayError:
        return True
    return False


def stream_context() -> None:
    """Sets the current process's `DataContext` for streams without an end; Ray Train copies it to its workers."""
    context = DataContext.get_current()
    context.target_max_block_size = 1
    context.execution_options.preserve_order = True
    context.execution_options.verbose_progress = False
    context.execution_no_progress_timeout_s = -1
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def replay_dataset(buffer_name: str, *, namespace: str | None = None) -> Any:
    """The stream of a buffer actor as a `ray.data.Dataset`.

    Iterate it with `batches_of`. Sets the process's `DataContext` (see `stream_context`).

    Args:
        buffer_name: of the buffer actor.
        namespace: None: the caller's.
    """
    stream_context()
    namespace = namespace or ray.get_runtime_context().namespace
    with warnings.catch_warnings():
        # Deprecated in favour of named arguments, of which there is none for retries.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        return ray.data.read_datasource(
            ReplaySource(buffer_name, namespace),
            override_num_blocks=1,
            num_cpus=0,
            ray_remote_args={"max_retries": 0},
        )


def batches_of(shard: Any) -> Generator[Batch]:
    """Learner batches of a dataset or of a rank's shard of it.

    The arrays are views of shared memory: read only.
    """
    for block in shard.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
        for row in range(len(block["mask"])):
            yield {key: array[row] for key, array in block.items()}
