"""A model in this process: an engine, weight sets by version, a batcher. Also what every model handle promises.

Knows nothing of Ray: weights come through `LocalModel.load` and ``fetch``, whoever is behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Protocol

import numpy as np

from brayx.engines.base import Engine, ModelSpec
from brayx.errors import DeadlineExceeded, ModelError, QueueFull, VersionUnknown
from brayx.model.batcher import Batcher
from brayx.model.versions import Versions, WeightSet, version_unknown
from brayx.types import Forward, NestedArray, Weights

_MAX_FETCHES = 16


class Model(Protocol):
    """A model as an agent sees it, wherever it runs."""

    @property
    def spec(self) -> ModelSpec:
        """Signature of the model."""

    @property
    def version(self) -> int:
        """Newest policy version this handle knows to be acting; 0 before the first published weights."""

    async def forward(self, *args: NestedArray, version: int | None = None) -> Forward:
        """The model's outputs for one observation.

        Args:
            *args: the model's arguments without batch axis; not to be changed until the result is there.
            version: policy version to act with; None: the newest when the batch begins.

        Raises:
            ShapeMismatch: the arguments do not fit; nobody else's batch is touched.
            VersionUnknown: that version is not kept; names the nearest.
            QueueFull: too many forwards wait.
            DeadlineExceeded: no result in time.
            ModelError: the engine failed, or the model is closed.
        """

    def pinned(self, version: int | None = None) -> PinnedModel:
        """A handle whose forwards all use one version: ``version``, or the newest known now.

        Raises:
            VersionUnknown: a model in this process does not have it ready; names the nearest.
            Overloaded: as many versions as may be are kept by handles already.
        """

    async def close(self) -> None:
        """Ends the model's tasks and threads; forwards that wait fail."""


class PinnedModel(Protocol):
    """A model at one policy version, for as long as this is held; drop it to let go."""

    @property
    def version(self) -> int:
        """The version."""

    async def forward(self, *args: NestedArray) -> Forward:
        """As `Model.forward`, with this version; the forwards of one handle are one caller's."""


class LocalModel:
    """A model whose engine runs in this process. Use it on one event loop; only `load` may come from elsewhere.

    Args:
        engine: built and verified.
        weights: to start with; the module's own if absent.
        version: policy version of those.
        max_versions: versions kept ready, the newest included.
        max_pinned: versions that pins alone keep alive at most.
        versions: weight sets shared with another model of this engine, instead of the four above.
        fetch: asked for the weights of a version that is not ready; raises `VersionUnknown` if it has none.
        max_batch_size, max_wait_s, max_queue, deadline_s, buckets, on_batch: as in `Batcher`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        weights: Weights | None = None,
        version: int = 0,
        max_versions: int = 2,
        max_pinned: int = 64,
        versions: Versions | None = None,
        fetch: Callable[[int], Awaitable[Weights]] | None = None,
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
        self._versions = versions or Versions(
            engine, weights=weights, version=version, keep=max_versions, max_pinned=max_pinned
        )
        self._fetch = fetch
        self._fetches: dict[int, asyncio.Task[WeightSet]] = {}
        self._deadline_s = deadline_s
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
        return self._versions.newest.version

    def load(self, version: int, weights: Weights) -> None:
        """Makes ``weights`` what the next batch uses; a batch that runs ends with those it began with.

        May be called from any thread, by one at a time: forwards go on with the old ones until the new are ready.

        Raises:
            BadWeights: they do not fit the model; the weights in use stay.
        """
        self._versions.load(version, weights)

    async def forward(self, *args: NestedArray, version: int | None = None) -> Forward:
        """The model's outputs for one observation; see `Model.forward`."""
        spec = self._spec
        row = spec.flatten_inputs(args)
        key = None if version is None else await self._ready(version)
        leaves, made_by = await self._batcher.enqueue(row, None, key)
        return Forward(spec.output_tree.unflatten(leaves), made_by)

    async def forward_columns(
        self, columns: Sequence[np.ndarray], *, version: int | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Forwards of several observations, which are one caller's.

        Args:
            columns: checked input leaves ``[N, ...]`` in the order of the spec.
            version: as of `forward`.

        Returns:
            Output leaves ``[N, ...]``, and the policy version of each row, ``[N]`` int64: without ``version`` they may
            differ, since rows end up in several batches.
        """
        key = None if version is None else await self._ready(version)
        count = len(columns[0])
        rows = [[np.ascontiguousarray(leaf[i, ...]).reshape(leaf.shape[1:]) for leaf in columns] for i in range(count)]
        results = await self._batcher.submit_many(rows, key=key)
        outputs = [np.stack(column) for column in zip(*(leaves for leaves, _ in results), strict=True)]
        return outputs, np.array([made_by for _, made_by in results], np.int64)

    def pinned(self, version: int | None = None) -> PinnedModel:
        """A handle at one version; see `Model.pinned`."""
        return _Pinned(self, self._versions.pin(version))

    async def close(self) -> None:
        """Ends the batcher and its thread; forwards that wait fail."""
        for fetch in self._fetches.values():
            fetch.cancel()
        await self._batcher.close()

    async def _forward_with(self, weights: WeightSet, args: tuple[NestedArray, ...], caller: Hashable) -> Forward:
        leaves, version = await self._batcher.enqueue(self._spec.flatten_inputs(args), None, weights, caller)
        return Forward(self._spec.unflatten_outputs(leaves), version)

    async def _ready(self, version: int) -> WeightSet:
        """The weight set of a version, fetched if need be; however many ask for one, it is fetched once."""
        try:
            return self._versions.get(version)
        except VersionUnknown:
            if self._fetch is None:
                raise
        fetching = self._fetches.get(version)
        if fetching is None:
            if len(self._fetches) >= _MAX_FETCHES:
                raise QueueFull(f"{len(self._fetches)} policy versions are being fetched already")
            fetching = self._fetches[version] = asyncio.create_task(self._fetched(version))
            fetching.add_done_callback(lambda _: self._fetches.pop(version, None))
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            if fetching.cancelled():
                raise ModelError("the model was closed") from None
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"policy version {version} was not fetched in {self._deadline_s:g} s") from None

    async def _fetched(self, version: int) -> WeightSet:
        assert self._fetch is not None
        try:
            weights = await self._fetch(version)
        except VersionUnknown as error:
            known = {*self._versions.known(), *error.details.get("known", ())}
            raise version_unknown(version, known) from None
        return await asyncio.to_thread(self._versions.add, version, weights)

    def _run(
        self, rows: list[list[np.ndarray]], weights: WeightSet | None = None
    ) -> list[tuple[list[np.ndarray], int]]:
        weights = weights or self._versions.newest  # read once: a batch never mixes versions
        version, bound = weights.version, weights.bound
        if len(rows) == 1:
            outputs = self._engine.run(bound, [leaf[None] for leaf in rows[0]])
            return [([leaf[0, ...] for leaf in outputs], version)]
        outputs = self._engine.run(bound, [np.array(column) for column in zip(*rows, strict=True)])
        return [([leaf[i, ...] for leaf in outputs], version) for i in range(len(rows))]


class _Pinned:
    """A weight set held by who pinned it."""

    __slots__ = ("_model", "_weights")

    def __init__(self, model: LocalModel, weights: WeightSet) -> None:
        self._model = model
        self._weights = weights

    @property
    def version(self) -> int:
        return self._weights.version

    async def forward(self, *args: NestedArray) -> Forward:
        return await self._model._forward_with(self._weights, args, self)
