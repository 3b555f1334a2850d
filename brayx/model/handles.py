"""Handles of a model: what they offer, one per caller of a shared model, and one per pinned version.

Knows nothing of where the model runs: the model has ``_forward(args, version, caller, deadline_s)``. `ModelProxy`
implements it for models in other processes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from brayx.engines.base import ModelSpec
from brayx.model.batcher import Batcher
from brayx.model.inputs import InputCheck
from brayx.types import Forward, NestedArray, PinnedHandle


def sooner(own_s: float, call_s: float | None) -> float:
    """Seconds until a forward fails: the model's own deadline or the call's, the shorter one."""
    return own_s if call_s is None or own_s < call_s else call_s


class Forwarder(Protocol):
    """Runs forwards for a caller."""

    async def _forward(
        self, args: tuple[NestedArray, ...], version: int | None, caller: Hashable, deadline_s: float | None = None
    ) -> Forward: ...


class Model(Protocol):
    """A model as an agent sees it, wherever it runs."""

    @property
    def spec(self) -> ModelSpec:
        """Signature of the model."""

    @property
    def version(self) -> int:
        """Policy version that acts, as far as this handle knows; 0 before the first published weights."""

    async def forward(self, *args: NestedArray, version: int | None = None, deadline_s: float | None = None) -> Forward:
        """The model's outputs for one observation.

        Args:
            *args: the model's arguments without batch axis; do not change them before the result.
            version: policy version to act with; None: the newest when the batch begins.
            deadline_s: seconds until the forward fails; at most the model's own deadline.

        Raises:
            ShapeMismatch: the arguments do not fit; other callers' rows are not affected.
            BadBody: an argument holds NaN or infinity, or a mask allows no action; names leaf and index. Other callers'
                rows are not affected.
            VersionUnknown: that version is not kept; names the nearest.
            QueueFull: too many forwards wait.
            DeadlineExceeded: no result in time.
            ModelError: the engine failed, or the model is closed.
        """

    def pinned(self, version: int | None = None) -> PinnedHandle:
        """A handle whose forwards all use one version: ``version``, or the current one.

        Raises:
            VersionUnknown: a model in this process does not have it ready; names the nearest.
            Overloaded: handles keep the maximum number of versions already.
        """

    async def close(self) -> None:
        """Ends the model's tasks and threads; forwards that wait fail."""


class SharedModel(Model, Forwarder, Protocol):
    """A model that many callers share."""

    async def forward_columns(
        self, columns: Sequence[np.ndarray], *, deadline_s: float | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]: ...

    async def forward_rows(self, *args: NestedArray, deadline_s: float | None = None) -> Forward: ...


class SharedModelHandle:
    """A model whose forwards are one caller's; see `Model`."""

    __slots__ = ("_model",)

    def __init__(self, model: SharedModel) -> None:
        self._model = model

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def version(self) -> int:
        return self._model.version

    async def forward(self, *args: NestedArray, version: int | None = None, deadline_s: float | None = None) -> Forward:
        return await self._model._forward(args, version, self, deadline_s)

    async def forward_columns(
        self, columns: Sequence[np.ndarray], *, deadline_s: float | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        return await self._model.forward_columns(columns, deadline_s=deadline_s)

    async def forward_rows(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        return await self._model.forward_rows(*args, deadline_s=deadline_s)

    def pinned(self, version: int | None = None) -> PinnedHandle:
        return self._model.pinned(version)

    async def close(self) -> None:
        """Does nothing: the model has other callers."""


class PinnedVersion:
    """A pinned version of a model in another process; see `Model.pinned`."""

    __slots__ = ("_model", "_version")

    def __init__(self, model: Forwarder, version: int) -> None:
        self._model = model
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    async def forward(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        return await self._model._forward(args, self._version, self, deadline_s)


class ModelProxy:
    """Base of handles of a model in another process. Its batcher returns rows with their versions."""

    _spec: ModelSpec
    _version: int
    _deadline_s: float
    _batcher: Batcher[list[np.ndarray], tuple[list[np.ndarray], int]]

    @cached_property
    def _check(self) -> InputCheck:
        return InputCheck(self._spec)

    def pinned(self, version: int | None = None) -> PinnedHandle:
        """A handle at one version; see `Model.pinned`.

        It lasts as long as a replica has the version ready or the weight store keeps it: its forwards raise
        `VersionUnknown` from then on. Where versions follow each other quickly, pin a model in this process.
        """
        return PinnedVersion(self, self._version if version is None else version)

    async def _forward(
        self, args: tuple[NestedArray, ...], version: int | None, caller: Hashable, deadline_s: float | None = None
    ) -> Forward:
        row = self._spec.flatten_inputs(args)
        self._check.check(row)  # before it joins a batch, where it would fail other callers' rows
        leaves, made_by = await self._batcher.submit(
            row, sooner(self._deadline_s, deadline_s), key=version, caller=caller
        )
        return Forward(self._spec.unflatten_outputs(leaves), made_by)
