"""Options of the ``buffer`` component. Knows nothing of the buffer itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from brayx.replay.limiter import RateLimiter
from brayx.replay.samplers import Importance

if TYPE_CHECKING:
    from brayx.algorithms.config import Sampling

STREAM_ENVIRONMENT = {"RAY_DATA_METADATA_PREFETCH_ON_THREAD": "0"}
"""Environment of every Ray process, set before it imports Ray Data, so best before ``ray.init``. By default a thread
fetches a block's metadata while the executor sleeps in ``ray.wait`` for 100 ms, so a slow stream delivers each batch
100 ms late; inline, push to batch takes 15 ms."""

MAX_PENDING = 1024
"""Fragments that a process queues during a push, or those of one push if these are more; beyond that the oldest is
dropped and counted."""
_TABLE_COLUMNS, _FIRST_COLUMNS = 100_000, 1_000
"""Defaults of a table: its capacity in columns, and the columns it must hold before the first sample."""


class BufferConfig(BaseModel):
    """Options of a replay buffer, and the shape of its batches.

    In a job, a buffer that the trainer learns from takes missing options from its algorithm (`buffer_options`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["buffer"] = "buffer"
    size: Annotated[int, Field(ge=1, le=1_000_000)] = 4
    """Learner batches kept in each shard; beyond that the oldest is dropped and counted."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Columns of a learner batch, ``B``."""
    unroll_length: Annotated[int, Field(ge=1, le=100_000)] = 32
    """Transitions of a column, ``T``."""
    max_in_flight: Annotated[int, Field(ge=1, le=64)] = 1
    """Batches prefetched for the learner. Each one hides more of the stream's latency and makes the data one update
    older."""
    num_workers: Annotated[int, Field(ge=1, le=128)] = 1
    """Shards: Ray actors that each keep ``size`` batches, spread over the nodes."""
    density: Annotated[int, Field(ge=1, le=128)] = 100
    """Shards that one process pushes to: the one on its node first, the next if that has no room."""
    sampler: Literal["fifo", "uniform", "prioritised"] = "fifo"
    """``fifo``: each batch once, in order (on-policy). ``uniform``: columns are drawn from all that are kept, with
    replacement. ``prioritised``: drawn by priorities, which the learner updates; batches have ``weight`` and
    ``index``."""
    remover: Literal["oldest", "lowest_priority", "reservoir"] = "oldest"
    """Unless ``fifo``: which column is replaced when all ``size * batch_size`` are in use. ``reservoir`` keeps a
    weighted sample of the whole stream."""
    priority_exponent: Annotated[float, Field(ge=0, le=10)] = 0.6
    """Alpha of ``prioritised``: 0 draws uniformly."""
    importance_exponent: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Beta of ``prioritised``: 1 fully corrects for columns that are drawn more often."""
    importance_batches: Annotated[int, Field(ge=1)] | None = None
    """Learner batches, over all buffers and ranks, until ``importance_exponent`` reaches 1; null: it is constant."""
    samples_per_insert: Annotated[float, Field(gt=0)] | None = None
    """Unless ``fifo``: how often a column is sampled on average. If pushes are too fast, they wait or are dropped and
    counted; if samples are too fast, they wait. null: the learner samples as fast as it can."""
    min_columns: Annotated[int, Field(ge=1)] = 1
    """Unless ``fifo``: columns that must be stored before the first is sampled."""
    max_policy_lag: Annotated[int, Field(ge=0)] | None = None
    """Age limit of a sampled column, in policy versions; older columns are dropped and counted. null: no limit, except
    in a job with one ``fifo`` of one shard that one blocking rollout fills: there the limit is 0."""
    max_reuse: Annotated[int, Field(ge=0)] = 0
    """How often the learner may get its last batch again while there is no newer one; counted."""

    @property
    def importance(self) -> Importance:
        """The importance weighting that the learner applies, for ``prioritised``."""
        return Importance(self.importance_exponent, self.importance_batches)

    @property
    def capacity(self) -> int:
        """Columns kept in each shard."""
        return self.size * self.batch_size

    def limiter(self) -> RateLimiter:
        """The rate limiter of a shard. Raises ValueError if its settings could deadlock."""
        return RateLimiter(
            self.samples_per_insert,
            self.min_columns,
            samples=self.batch_size,
            capacity=self.capacity,
        )

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        defaults = type(self).model_fields
        only = ("remover", "samples_per_insert", "min_columns")
        changed = [name for name in only if getattr(self, name) != defaults[name].default]
        if self.sampler == "fifo" and changed:
            raise ValueError(f"{changed[0]} needs sampler uniform or prioritised, got fifo")
        self.limiter()
        return self


def buffer_options(sampling: Sampling, given: Mapping[str, Any]) -> dict[str, Any]:
    """An algorithm's defaults for the options of its buffer.

    Args:
        sampling: the algorithm's sampling.
        given: the buffer's own options, not validated yet; the defaults must fit them.
    """
    length = given.get("unroll_length", sampling.unroll_length)
    if type(length) is not int or length < 1:
        return {}  # validation refuses it
    size = given.get("batch_size", sampling.batch_size(length))
    if type(size) is not int or size < 1:
        return {}
    options: dict[str, Any] = {"sampler": sampling.sampler, "unroll_length": length, "batch_size": size}
    if given.get("sampler", sampling.sampler) in ("uniform", "prioritised"):
        options["size"] = given.get("size", -(-_TABLE_COLUMNS // size))
        options["samples_per_insert"] = sampling.samples_per_insert(length, size) or None
        if type(options["size"]) is int:
            options["min_columns"] = max(1, min(_FIRST_COLUMNS, options["size"] * size))
    return options
