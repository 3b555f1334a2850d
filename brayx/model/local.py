"""A model in this process: an engine, weight sets by version, a batcher.

Knows nothing of Ray: weights come through `LocalModel.load` and ``fetch``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from brayx.engines.base import Engine, LeafSpec, ModelSpec
from brayx.errors import BadBody, BodyTooLarge, DeadlineExceeded, ModelError, QueueFull, VersionUnknown
from brayx.metrics import Recorder
from brayx.model.batcher import Batcher, RowsFailed, repeat_last
from brayx.model.handles import Model, PinnedVersion, SharedModelHandle, sooner
from brayx.model.inputs import InputCheck, to_columns, total_of
from brayx.model.versions import Versions, WeightSet, version_unknown
from brayx.types import Forward, NestedArray, PinnedHandle, Weights

if TYPE_CHECKING:
    from brayx.model.config import ModelConfig

_MAX_FETCHES = 16
"""Versions that are fetched at the same time, since each is in memory; further ones wait."""
_WHOLE_FROM = 0.5
"""Share of a full batch from which columns are a separate call, since little room is left to join others."""
_ONE: NestedArray = (0,)
_LONE = optree.tree_structure(_ONE)
"""Tree structure of arguments that are one array."""


class _Columns:
    """Observations that make a whole call; both the batcher's key and row, so that no other row joins them."""

    __slots__ = ("leaves", "weights")

    def __init__(self, leaves: Sequence[np.ndarray], weights: WeightSet | None) -> None:
        self.leaves = leaves
        self.weights = weights

    def padded(self, size: int) -> _Columns:
        """Padded with copies of the last observation."""
        rows = np.minimum(np.arange(size), len(self.leaves[0]) - 1)
        return _Columns([leaf[rows] for leaf in self.leaves], self.weights)


def batching(
    config: ModelConfig, sink: Recorder | None = None, size: str = "forward_batch_size", what: str = "forward"
) -> dict[str, Any]:
    """The batcher's keyword arguments from a model component's options.

    Args:
        config: options of the component.
        sink: records each batch; None: batches are not recorded.
        size: metric of a batch's rows.
        what: ``WHAT_seconds`` and ``WHAT_wait_seconds`` are metrics of a batch's time, and of its first row's wait.
    """
    options: dict[str, Any] = {
        "max_batch_size": config.max_batch_size,
        "max_wait_s": config.max_wait_ms / 1000,
        "max_queue": config.max_queue,
        "deadline_s": config.deadline_s,
    }
    if sink is None:
        return options
    seconds_name, wait_name = f"{what}_seconds", f"{what}_wait_seconds"

    def on_batch(rows: int, seconds: float, waited_s: float) -> None:
        sink.add(size, float(rows))
        sink.add(seconds_name, seconds)
        sink.add(wait_name, waited_s)

    return {**options, "on_batch": on_batch}


class LocalModel:
    """A model whose engine runs in this process. Use it on one event loop; `load` and `swap` may come from any thread.

    Args:
        engine: a verified engine.
        weights: initial weights; the module's own if absent.
        version: their policy version.
        max_versions: versions kept ready, the newest included.
        max_pinned: maximum versions kept by pins alone.
        versions: weight sets shared with another model of this engine, instead of the four above.
        fetch: fetches the weights of a version that is not ready; raises `VersionUnknown` if there is none.
        max_batch_size, max_wait_s, max_queue, deadline_s, on_batch: as for `Batcher`.
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
        on_batch: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self._spec = spec = engine.spec
        only = spec.inputs[0]
        self._lone_input = only if spec.input_tree == _LONE and only.limits is None else None
        self._lone_output = spec.output_tree.is_leaf()
        self._check = InputCheck(spec)
        self._total = total_of(spec.inputs[0]) if self._lone_input is not None else None
        self._versions = versions or Versions(
            engine, weights=weights, version=version, keep=max_versions, max_pinned=max_pinned
        )
        self._fetch = fetch
        self._fetches: dict[int, asyncio.Task[WeightSet]] = {}
        self._fetching = asyncio.Semaphore(_MAX_FETCHES)
        self._max_queue = max_queue
        self._deadline_s = deadline_s
        self._batcher: Batcher[list[np.ndarray], tuple[list[np.ndarray], int]] = Batcher(
            self._run,
            max_batch_size=max_batch_size,
            max_wait_s=max_wait_s,
            max_queue=max_queue,
            deadline_s=deadline_s,
            inline_below_s=inline_below_s,
            count=_count,
            pad=_pad,
            on_batch=on_batch,
        )
        self._max_batch_size = abs(max_batch_size)
        self._max_rows = self._max_batch_size * max_queue
        # A padded call has the full cost for any number of rows, so it is worth waiting for more.
        part = 1.0 if max_batch_size < 0 else _WHOLE_FROM
        self._whole_from = min(max(2.0, part * self._max_batch_size), max_queue + 1)

    @property
    def spec(self) -> ModelSpec:
        """Signature of the model."""
        return self._spec

    @property
    def version(self) -> int:
        """Policy version of the weights that the next batch will use."""
        return self._versions.newest.version

    def load(self, version: int, weights: Weights) -> None:
        """Uses ``weights`` from the next batch on; a running batch keeps its own.

        Forwards use the old weights until the new ones are ready.

        Raises:
            BadWeights: they do not fit the model; the current weights stay.
        """
        self._versions.load(version, weights)

    def swap(self, engine: Engine, weights_of: Callable[[Any], Weights]) -> None:
        """Runs all versions on another engine of the same module from the next batch on; see `Versions.swap`.

        Raises:
            ModelError: the engine's inputs or outputs differ.
            BadWeights: the weights of a version do not fit; the current engine stays.
        """
        if (engine.spec.inputs, engine.spec.outputs) != (self._spec.inputs, self._spec.outputs):
            raise ModelError("cannot replace the engine by one of another model")
        self._versions.swap(engine, weights_of)

    async def forward(self, *args: NestedArray, version: int | None = None, deadline_s: float | None = None) -> Forward:
        """The model's outputs for one observation; see `Model.forward`."""
        return await self._forward(args, version, None, deadline_s)

    async def forward_columns(
        self, columns: Sequence[np.ndarray], *, version: int | None = None, deadline_s: float | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Forwards of several observations, as one caller.

        Args:
            columns: checked input leaves ``[N, ...]`` in the order of the spec.
            version, deadline_s: as for `forward`.

        Returns:
            Output leaves ``[N, ...]``, and the policy version of each row, ``[N]`` int64: without ``version`` they may
            differ, since rows end up in several batches.

        Raises:
            BodyTooLarge: more observations than ``max_queue`` full batches.
            BadBody: as `Model.forward`; the first index is the observation's.
            VersionUnknown, QueueFull, DeadlineExceeded, ModelError: as `Model.forward`; all observations fail.
        """
        self._check.check(columns)
        count = len(columns[0])
        if count > self._max_rows:
            most = self._max_rows
            raise BodyTooLarge(f"a batch of {count} observations, at most {most} are allowed", max_rows=most)
        until = self._until(deadline_s)
        key = None if version is None else await self._ready(version, until)
        if count < self._whole_from:
            left_s = until - asyncio.get_running_loop().time()
            rows = [
                [np.ascontiguousarray(leaf[i, ...]).reshape(leaf.shape[1:]) for leaf in columns] for i in range(count)
            ]
            results = await self._batcher.submit_many(rows, left_s, key=key)
            outputs = [np.stack(column) for column in zip(*(leaves for leaves, _ in results), strict=True)]
            return outputs, np.array([made_by for _, made_by in results], np.int64)
        # One block after the other, so that other callers have a turn between two, and room in the queue.
        size = self._max_batch_size
        parts = [
            await self._block([leaf[start : start + size] for leaf in columns], key, until)
            for start in range(0, count, size)
        ]
        if len(parts) == 1:
            return parts[0]
        outputs = [np.concatenate(column) for column in zip(*(leaves for leaves, _ in parts), strict=True)]
        return outputs, np.concatenate([versions for _, versions in parts])

    async def forward_rows(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        """The newest version's outputs for several observations, as one call if they fit into a batch.

        Args:
            *args: the model's arguments ``[N, ...]``.
            deadline_s: as for `forward`.

        Returns:
            Outputs ``[N, ...]``, and the policy version of each row, ``[N]`` int64.

        Raises:
            BrayxError: as `forward_columns`; ShapeMismatch: the arguments do not fit.
        """
        columns = to_columns(self._spec, args)
        count = len(columns[0])
        if count > self._max_batch_size:
            leaves, versions = await self.forward_columns(columns, deadline_s=deadline_s)
        else:
            self._check.check(columns)
            block = _Columns([np.ascontiguousarray(leaf) for leaf in columns], None)
            at_once = self._batcher.at_once(block, block)  # type: ignore[arg-type]
            if at_once is None:
                leaves, versions = await self._block(columns, None, self._until(deadline_s))
            else:
                leaves, version = at_once
                leaves, versions = [leaf[:count] for leaf in leaves], np.full(count, version, np.int64)
        return Forward(self._spec.unflatten_outputs(leaves), versions)  # type: ignore[arg-type]

    def pinned(self, version: int | None = None) -> PinnedHandle:
        """A handle at one version; see `Model.pinned`."""
        return _PinnedHere(self, self._versions.pin(version))

    def as_caller(self) -> Model:
        """A handle for one of several callers: a caller with many rows does not delay the others."""
        return SharedModelHandle(self)

    async def pin(self, version: int) -> PinnedHandle:
        """As `pinned`, of a version that is fetched if it is not ready.

        Raises:
            VersionUnknown, QueueFull, DeadlineExceeded, ModelError: it cannot be fetched.
            Overloaded: as `pinned`.
        """
        weights = await self._ready(version, self._until(None))  # held, so that it stays ready
        return _PinnedHere(self, self._versions.pin(weights.version))

    async def close(self) -> None:
        """Ends the batcher and its thread; forwards that wait fail."""
        for fetch in self._fetches.values():
            fetch.cancel()
        await self._batcher.close()

    async def _forward(
        self,
        args: tuple[NestedArray, ...],
        version: int | None,
        caller: Hashable,
        deadline_s: float | None = None,
        weights: WeightSet | None = None,
    ) -> Forward:
        """One caller's forward with ``weights``, which the caller holds, or those of ``version``, or the newest."""
        if version is not None:
            until = self._until(deadline_s)
            weights = await self._ready(version, until)
            deadline_s = until - asyncio.get_running_loop().time()
        lone = self._lone_input
        if lone is not None and len(args) == 1 and _fits(args[0], lone):
            row = [args[0]]  # the common case; `flatten_inputs` costs twice as much
        else:
            row = self._spec.flatten_inputs(args)
        if deadline_s is not None:  # else the batcher's own
            deadline_s = sooner(self._deadline_s, deadline_s)
        future = self._batcher.enqueue(row, deadline_s, weights, caller)
        try:
            leaves, version = await future
        except asyncio.CancelledError:
            self._batcher.abandon()
            raise
        return Forward(leaves[0] if self._lone_output else self._spec.output_tree.unflatten(leaves), version)

    async def _block(
        self, columns: Sequence[np.ndarray], weights: WeightSet | None, until: float
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """As `forward_columns`, for at most one batch, in one call."""
        count, left_s = len(columns[0]), until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlineExceeded("a batch of forwards missed its deadline")
        block = _Columns([np.ascontiguousarray(leaf) for leaf in columns], weights)
        result: tuple[list[np.ndarray], int] = await self._batcher.submit(block, left_s, key=block, whole=True)  # type: ignore[arg-type]
        leaves, made_by = result
        return [leaf[:count] for leaf in leaves], np.full(count, made_by, np.int64)

    def _until(self, deadline_s: float | None) -> float:
        """The deadline of a forward that begins now, by the loop's clock."""
        return asyncio.get_running_loop().time() + sooner(self._deadline_s, deadline_s)

    async def _ready(self, version: int, until: float) -> WeightSet:
        """The weight set of a version, fetched if necessary; concurrent requests share one fetch."""
        try:
            return self._versions.get(version)
        except VersionUnknown:
            if self._fetch is None:
                raise
        fetching = self._fetches.get(version)
        if fetching is None:
            if len(self._fetches) >= self._max_queue:
                raise QueueFull(f"{len(self._fetches)} policy versions are being fetched already")
            fetching = self._fetches[version] = asyncio.create_task(self._fetched(version))
            fetching.add_done_callback(lambda _: self._fetches.pop(version, None))
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            if fetching.cancelled():
                raise ModelError("the model was closed") from None
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"policy version {version} was not fetched in time") from None

    async def _fetched(self, version: int) -> WeightSet:
        assert self._fetch is not None
        async with self._fetching:
            try:
                weights = await self._fetch(version)
            except VersionUnknown as error:
                known = {*self._versions.known(), *error.details.get("known", ())}
                raise version_unknown(version, known) from None
            return await asyncio.to_thread(self._versions.add, version, weights)

    def _run(
        self, rows: list[list[np.ndarray]], weights: WeightSet | _Columns | None = None
    ) -> list[tuple[list[np.ndarray], int]]:
        if isinstance(weights, _Columns):
            block: Any = rows[0]  # the key, or what it was padded to
            used = block.weights or self._versions.newest
            return [(used.run(block.leaves), used.version)]
        weights = weights or self._versions.newest  # read once: a batch never mixes versions
        version, run = weights.version, weights.run
        if len(rows) == 1:
            row = rows[0]
            if self._total is None or not math.isfinite(self._total(row[0])):
                self._check.check(row)
            outputs = run([row[0][None]] if len(row) == 1 else [leaf[None] for leaf in row])
            return [([leaf[0, ...] for leaf in outputs], version)]
        inputs = [_joined(column) for column in zip(*rows, strict=True)]
        if self._check.refusal(inputs) is not None:  # checking all rows at once takes a fraction of the time
            raise RowsFailed(self._run_others(rows, weights))
        outputs = run(inputs)
        parts = zip(*[_rows(leaf) for leaf in outputs], strict=True)
        return [(list(leaves), version) for leaves in parts]

    def _run_others(
        self, rows: list[list[np.ndarray]], weights: WeightSet
    ) -> list[tuple[list[np.ndarray], int] | BadBody]:
        """Runs a batch with some invalid rows. A valid row replaces each, because an engine may take one size only."""
        refused = [self._check.refusal(row) for row in rows]
        good = next((row for row, error in zip(rows, refused, strict=True) if error is None), None)
        if good is None:
            return [error for error in refused if error is not None]
        results = self._run([good if error else row for row, error in zip(rows, refused, strict=True)], weights)
        return [error or result for error, result in zip(refused, results, strict=True)]


def _count(rows: list[Any]) -> int:
    """Number of observations in a call."""
    return len(rows[0].leaves[0]) if type(rows[0]) is _Columns else len(rows)


def _pad(rows: list[Any], size: int) -> None:
    """Pads the rows of a call to ``size`` observations."""
    if type(rows[0]) is _Columns:
        rows[0] = rows[0].padded(size)
    else:
        repeat_last(rows, size)


def _fits(leaf: NestedArray, spec: LeafSpec) -> bool:
    """Whether the engine takes the leaf without conversion."""
    fits: bool = (
        type(leaf) is np.ndarray and leaf.dtype == spec.dtype and leaf.shape == spec.shape and leaf.flags.c_contiguous
    )
    return fits


def _joined(column: Sequence[np.ndarray]) -> np.ndarray:
    """Joins rows ``[...]`` into ``[N, ...]``; `numpy.array` and `stack` take longer."""
    first = column[0]
    return np.concatenate(column).reshape(len(column), *first.shape) if first.ndim else np.array(column)


def _rows(leaf: np.ndarray) -> list[np.ndarray]:
    """Rows of ``[N, ...]`` as views; a plain list of a vector would hold numbers instead."""
    return list(leaf) if leaf.ndim > 1 else [leaf[i, ...] for i in range(len(leaf))]


class _PinnedHere(PinnedVersion):
    """A weight set held by a pin."""

    __slots__ = ("_local", "_weights")

    def __init__(self, model: LocalModel, weights: WeightSet) -> None:
        super().__init__(model, weights.version)
        self._local, self._weights = model, weights

    async def forward(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        return await self._local._forward(args, None, self, deadline_s, self._weights)
