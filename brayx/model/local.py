"""A model in this process: an engine, its newest weights and a batcher. Also what every model handle promises.

Knows nothing of Ray: weights come through `LocalModel.load`, whoever calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from brayx.engines.base import Engine, ModelSpec
from brayx.model.batcher import Batcher
from brayx.types import Forward, NestedArray, Weights


class Model(Protocol):
    """A model as an agent sees it, wherever it runs."""

    @property
    def spec(self) -> ModelSpec:
        """Signature of the model."""

    @property
    def version(self) -> int:
        """Newest policy version this handle knows to be acting; 0 before the first published weights."""

    async def forward(self, *args: NestedArray) -> Forward:
        """The model's outputs for one observation.

        Args:
            *args: the model's arguments without batch axis; not to be changed until the result is there.

        Raises:
            ShapeMismatch: the arguments do not fit; nobody else's batch is touched.
            QueueFull: too many forwards wait.
            DeadlineExceeded: no result in time.
            ModelError: the engine failed, or the model is closed.
        """

    async def close(self) -> None:
        """Ends the model's tasks and threads; forwards that wait fail."""


class LocalModel:
    """A model whose engine runs in this process. Use it on one event loop; only `load` may come from elsewhere.

    Args:
        engine: built and verified.
        weights: to start with; the module's own if absent.
        version: policy version of those.
        max_batch_size, max_wait_s, max_queue, deadline_s, buckets, on_batch: as in `Batcher`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        weights: Weights | None = None,
        version: int = 0,
        max_batch_size: int = 64,
        max_wait_s: float = 0.0,
        max_queue: int = 1024,
        deadline_s: float = 10.0,
        inline_below_s: float = 200e-6,
        buckets: Iterable[int] = (),
        on_batch: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self._engine = engine
        self._spec = engine.spec
        self._current: tuple[int, Any] = (version, engine.bind(engine.initial if weights is None else weights))
        self._batcher: Batcher[list[np.ndarray], tuple[list[np.ndarray], int]] = Batcher(
            self._run,
            max_batch_size=max_batch_size,
            max_wait_s=max_wait_s,
            max_queue=max_queue,
            deadline_s=deadline_s,
            inline_below_s=inline_below_s,
            buckets=buckets,
            on_batch=on_batch,
        )

    @property
    def spec(self) -> ModelSpec:
        """Signature of the model."""
        return self._spec

    @property
    def version(self) -> int:
        """Policy version of the weights that the next batch will use."""
        return self._current[0]

    def load(self, version: int, weights: Weights) -> None:
        """Makes ``weights`` what the next batch uses; a batch that runs ends with those it began with.

        May be called from any thread, by one at a time: forwards go on with the old ones until the new are ready.

        Raises:
            BadWeights: they do not fit the model; the weights in use stay.
        """
        self._current = (version, self._engine.bind(weights))  # replaced as a whole: nobody sees a half

    async def forward(self, *args: NestedArray) -> Forward:
        """The model's outputs for one observation; see `Model.forward`."""
        leaves, version = await self._batcher.submit(self._spec.flatten_inputs(args))
        return Forward(self._spec.unflatten_outputs(leaves), version)

    async def forward_rows(self, rows: list[list[np.ndarray]]) -> list[tuple[list[np.ndarray], int]]:
        """Forwards of several observations given as checked leaves; each result is output leaves and a version."""
        return await self._batcher.submit_many(rows)

    async def close(self) -> None:
        """Ends the batcher and its thread; forwards that wait fail."""
        await self._batcher.close()

    def _run(self, rows: list[list[np.ndarray]]) -> list[tuple[list[np.ndarray], int]]:
        version, bound = self._current  # read once: a batch never mixes versions
        if len(rows) == 1:
            outputs = self._engine.run(bound, [leaf[None] for leaf in rows[0]])
            return [([leaf[0, ...] for leaf in outputs], version)]
        outputs = self._engine.run(bound, [np.array(column) for column in zip(*rows, strict=True)])
        return [([leaf[i, ...] for leaf in outputs], version) for i in range(len(rows))]
