"""Options of the ``buffer`` component. Knows nothing of what they configure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from brayx.replay.importance import Importance
from brayx.replay.limiter import RateLimiter

if TYPE_CHECKING:
    from brayx.algorithms.config import Sampling

STREAM_ENVIRONMENT = {"RAY_DATA_METADATA_PREFETCH_ON_THREAD": "0"}
"""To be in the environment of every Ray process before it imports Ray Data, so best before ``ray.init``. By default a
thread fetches a block's metadata while the executor sleeps in ``ray.wait`` for 100 ms, so a slow stream delivers each
batch 100 ms late; inline, push to batch takes 15 ms. Nothing else depends on it."""

_TABLE_COLUMNS, _FIRST_COLUMNS = 100_000, 1_000
"""Defaults of a table: columns it keeps, and columns it must have before the first sample."""


class BufferConfig(BaseModel):
    """Where fragments wait for the learner, and the shape of the batches it gets.

    In a job, options left out of a buffer that the trainer learns from get its algorithm's defaults (`buffer_options`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["buffer"] = "buffer"
    size: Annotated[int, Field(ge=1, le=1_000_000)] = 4
    """Learner batches kept, by each shard; past it the oldest is dropped and counted."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Columns of a learner batch, ``B``."""
    unroll_length: Annotated[int, Field(ge=1, le=100_000)] = 32
    """Transitions of a column, ``T``."""
    max_in_flight: Annotated[int, Field(ge=1, le=64)] = 1
    """Batches on their way to the learner that it has not yet taken. Each one more ages the data by an update and
    hides more of the stream's latency."""
    max_pending: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Fragments an actor process keeps while its push is on the way; past it the oldest is dropped and counted."""
    num_workers: Annotated[int, Field(ge=1, le=128)] = 1
    """Shards: actors that each keep ``size`` batches, on different nodes where there are several."""
    density: Annotated[int, Field(ge=1, le=128)] = 100
    """Shards that one process pushes to: its own node's first, the next where that has no room."""
    sampler: Literal["fifo", "uniform", "prioritised"] = "fifo"
    """``fifo``: each batch once, in order (on-policy). ``uniform``: columns are drawn from all that are kept, again and
    again. ``prioritised``: so, by priorities which the learner updates; batches carry ``weight`` and ``index``."""
    remover: Literal["oldest", "lowest_priority", "reservoir"] = "oldest"
    """What goes when all ``size * batch_size`` columns are there, unless ``fifo``. ``reservoir``: what is kept is a
    weighted sample of the whole stream."""
    priority_exponent: Annotated[float, Field(ge=0, le=10)] = 0.6
    """Of ``prioritised``, alpha: 0 draws uniformly."""
    importance_exponent: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Of ``prioritised``, beta: 1 corrects in full for columns that come more often."""
    importance_batches: Annotated[int, Field(ge=1)] | None = None
    """Learner batches, of all buffers and ranks, until ``importance_exponent`` has grown to 1; null: it stays."""
    samples_per_insert: Annotated[float, Field(gt=0)] | None = None
    """How often a column is sampled on average, unless ``fifo``: what is pushed beyond it is dropped and counted, or
    waits; what is sampled beyond it waits. null: the learner samples as fast as it can."""
    error_buffer: Annotated[float, Field(gt=0)] | None = None
    """How far ``samples_per_insert`` may be missed, in sampled columns; null: twice the least that cannot deadlock."""
    min_columns: Annotated[int, Field(ge=1)] = 1
    """Columns that must be there before the first is sampled, unless ``fifo``."""
    max_policy_lag: Annotated[int, Field(ge=0)] | None = None
    """Versions of the policy that a column may be old when it is sampled; older ones are dropped and counted; null: any
    number, and none where a job's learner has one ``fifo``, of one shard, which one blocking rollout alone fills."""
    max_reuse: Annotated[int, Field(ge=0)] = 0
    """Times that the learner gets its last batch again while there is no other; counted."""

    @property
    def importance(self) -> Importance:
        """Of ``prioritised``: how far whoever learns is to correct."""
        return Importance(self.importance_exponent, self.importance_batches)

    @property
    def capacity(self) -> int:
        """Columns that a shard keeps."""
        return self.size * self.batch_size

    def limiter(self) -> RateLimiter:
        """How much may be sampled for what was inserted. Raises ValueError where that could deadlock."""
        return RateLimiter(
            self.samples_per_insert,
            self.min_columns,
            self.error_buffer,
            samples=self.batch_size,
            capacity=self.capacity,
        )

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        defaults = type(self).model_fields
        only = ("remover", "samples_per_insert", "error_buffer", "min_columns")
        given = [name for name in only if getattr(self, name) != defaults[name].default]
        if self.sampler == "fifo" and given:
            raise ValueError(f"a sampler that gives a column more than once: with fifo there is no {given[0]}")
        self.limiter()
        return self


def buffer_options(sampling: Sampling, given: Mapping[str, Any]) -> dict[str, Any]:
    """An algorithm's defaults for the options of a buffer it learns from.

    Args:
        sampling: of the algorithm.
        given: the buffer's own options, valid or not, which the defaults must fit.
    """
    length = given.get("unroll_length", sampling.unroll_length)
    if type(length) is not int or length < 1:
        return {}  # refused where options are validated
    size = given.get("batch_size", sampling.batch_size(length))
    if type(size) is not int or size < 1:
        return {}
    found: dict[str, Any] = {"sampler": sampling.sampler, "unroll_length": length, "batch_size": size}
    if given.get("sampler", sampling.sampler) in ("uniform", "prioritised"):
        found["size"] = given.get("size", -(-_TABLE_COLUMNS // size))
        found["samples_per_insert"] = sampling.samples_per_insert(length, size) or None
        if type(found["size"]) is int:
            found["min_columns"] = max(1, min(_FIRST_COLUMNS, found["size"] * size))
    return found
