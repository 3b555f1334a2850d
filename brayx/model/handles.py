"""Handles of a model: one per caller of a shared model, and one per pinned version.

Knows nothing of where the model runs: the model has ``_forward(args, version, caller, deadline_s)``. `ModelProxy`
implements it for models in other processes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from brayx.engines.base import ModelSpec
from brayx.model.batcher import Batcher
from brayx.model.inputs import InputCheck
from brayx.types import Forward, NestedArray

if TYPE_CHECKING:
    from brayx.model.local import PinnedModel


def sooner(own_s: float, call_s: float | None) -> float:
    """Seconds until a forward fails: the model's own deadline or the call's, the shorter one."""
    return own_s if call_s is None or own_s < call_s else call_s


class Forwarder(Protocol):
    """Runs forwards for a caller."""

    async def _forward(
        self, args: tuple[NestedArray, ...], version: int | None, caller: Hashable, deadline_s: float | None = None
    ) -> Forward: ...


class Shared(Forwarder, Protocol):
    """A model that many callers share."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def version(self) -> int: ...

    def pinned(self, version: int | None = None) -> PinnedModel: ...

    async def forward_columns(
        self, columns: Sequence[np.ndarray], *, deadline_s: float | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]: ...


class Caller:
    """A model whose forwards are one caller's; see `brayx.model.local.Model`."""

    __slots__ = ("_model",)

    def __init__(self, model: Shared) -> None:
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

    def pinned(self, version: int | None = None) -> PinnedModel:
        return self._model.pinned(version)

    async def close(self) -> None:
        """Does nothing: the model has other callers."""


class PinnedVersion:
    """A pinned version of a model in another process; see `brayx.model.local.PinnedModel`."""

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

    def pinned(self, version: int | None = None) -> PinnedModel:
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
