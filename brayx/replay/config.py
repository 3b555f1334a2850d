"""Options of the ``buffer`` component. Knows nothing of what they configure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

STREAM_ENVIRONMENT = {"RAY_DATA_METADATA_PREFETCH_ON_THREAD": "0"}
"""To be in the environment of every Ray process before it imports Ray Data, so best before ``ray.init``. By default a
thread fetches a block's metadata while the executor sleeps in ``ray.wait`` for 100 ms, so a slow stream delivers each
batch 100 ms late; inline, push to batch takes 15 ms. Nothing else depends on it."""


class BufferConfig(BaseModel):
    """Where fragments wait for the learner, and the shape of the batches it gets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["buffer"] = "buffer"
    size: Annotated[int, Field(ge=1, le=1_000_000)] = 4
    """Learner batches kept; past it the oldest is dropped and counted."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Columns of a learner batch, ``B``."""
    unroll_length: Annotated[int, Field(ge=1, le=100_000)] = 32
    """Transitions of a column, ``T``."""
    max_in_flight: Annotated[int, Field(ge=1, le=64)] = 1
    """Batches on their way to the learner that it has not yet taken. Each one more ages the data by an update and
    hides more of the stream's latency."""
    max_pending: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Fragments an actor process keeps while its push is on the way; past it the oldest is dropped and counted."""
