"""The handle of a model that runs in a Serve deployment.

It collects the forwards of this process into one call; the deployment's batcher joins the calls of several processes.
Knows nothing of engines or weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from brayx.cluster.named import unwrap
from brayx.engines.base import ModelSpec
from brayx.errors import BrayxError, DeadlineExceeded, ModelError, QueueFull
from brayx.model.batcher import Batcher
from brayx.model.handles import Model, ModelProxy, SharedModelHandle, sooner
from brayx.model.inputs import stacked, to_columns, to_rows
from brayx.types import Forward, NestedArray, PinnedHandle

_CONNECT_S = 60.0
"""Deadline of the first calls to a deployment, which may still be starting."""


class ModelClient(ModelProxy):
    """A model behind a Serve deployment handle, with the interface `Model`. Use it on one event loop.

    If a replica dies, its calls are repeated until their deadline: a forward has no side effects.

    Args:
        handle: Serve's handle of a `ModelReplica` deployment.
        spec: the model's signature; `connect` gets it from the deployment.
        version: known policy version of the deployment; `connect` gets it, too.
        max_batch_size: most observations in one call.
        max_queue: most forwards that wait here; further ones are refused.
        deadline_s: a forward without a result after this long fails.
        max_calls: most concurrent calls; one per replica keeps all of them busy.
        on_batch: as for `Batcher`, for calls to the deployment.
    """

    def __init__(
        self,
        handle: Any,
        spec: ModelSpec,
        *,
        version: int = 0,
        max_batch_size: int = 64,
        max_wait_s: float = 0.0,
        max_queue: int = 1024,
        deadline_s: float = 10.0,
        max_calls: int = 1,
        on_batch: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self._handle = handle
        self._spec = spec
        self._deadline_s = deadline_s
        self._version = version
        self._batcher: Batcher[list[np.ndarray], tuple[list[np.ndarray], int]] = Batcher(
            self._call,
            max_batch_size=abs(max_batch_size),  # the replica pads
            max_wait_s=max_wait_s,
            max_queue=max_queue,
            deadline_s=deadline_s,
            max_calls=max_calls,
            on_batch=on_batch,
        )

    @classmethod
    async def connect(cls, handle: Any, **options: Any) -> ModelClient:
        """Makes a client with spec and version from the deployment; ``options`` are those of the constructor.

        Raises:
            DeadlineExceeded: the deployment did not answer in time.
            QueueFull, ModelError: it is full, or failed.
        """
        async with _within(_CONNECT_S, "the model deployment did not answer"):
            spec = await cls._ask(handle.get_spec.remote)
            version = int(await cls._ask(handle.get_version.remote))
        return cls(handle, spec, **{"version": version, **options})

    @property
    def spec(self) -> ModelSpec:
        """Signature of the model."""
        return self._spec

    @property
    def version(self) -> int:
        """Policy version of the deployment's last answer; 0: no published weights.

        It can be lower than before, if an alias was moved back or another replica is behind.
        """
        return self._version

    async def refresh_version(self, timeout_s: float = 5.0) -> int:
        """Gets the policy version of one replica.

        Raises:
            DeadlineExceeded: there was no answer in time.
            ModelError: the deployment failed.
        """
        async with _within(timeout_s, "the model deployment did not give its version"):
            self._version = int(await self._ask(self._handle.get_version.remote))
        return self._version

    async def forward(self, *args: NestedArray, version: int | None = None, deadline_s: float | None = None) -> Forward:
        """The model's outputs for one observation; see `Model.forward`."""
        return await self._forward(args, version, None, deadline_s)

    def as_caller(self) -> Model:
        """The model for one of many that share it; see `LocalModel.as_caller`."""
        return SharedModelHandle(self)

    async def pin(self, version: int) -> PinnedHandle:
        """As `pinned`; a forward, or `ready`, fails if the deployment cannot have that version."""
        return self.pinned(version)

    async def ready(self, version: int) -> None:
        """Makes a version ready in one replica; if that works, the others can do so too.

        Raises:
            VersionUnknown, QueueFull, DeadlineExceeded, ModelError: the version is not available.
        """
        async with _within(self._deadline_s, f"version {version} was not ready"):
            await self._ask(self._handle.ready.remote, version)

    async def close(self) -> None:
        """Ends the handle; the deployment keeps running."""
        await self._batcher.close()

    async def forward_columns(
        self, columns: Sequence[np.ndarray], *, version: int | None = None, deadline_s: float | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Forwards several observations in a separate call; see `ModelReplica.forward`."""
        deadline_s = sooner(self._deadline_s, deadline_s)
        outputs: list[np.ndarray]
        versions: np.ndarray
        async with _within(deadline_s, "the model deployment did not answer"):
            outputs, versions = await self._ask(self._handle.forward.remote, columns, version, deadline_s)
        if version is None:
            self._version = int(versions[-1])
        return outputs, versions

    async def forward_rows(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        """See `LocalModel.forward_rows`."""
        leaves, versions = await self.forward_columns(to_columns(self._spec, args), deadline_s=deadline_s)
        return Forward(self._spec.unflatten_outputs(leaves), versions)  # type: ignore[arg-type]

    async def _call(
        self, rows: list[list[np.ndarray]], version: int | None = None
    ) -> list[tuple[list[np.ndarray], int]]:
        return to_rows(len(rows), *await self.forward_columns(stacked(rows), version=version))

    @staticmethod
    async def _ask(method: Callable[..., Any], *args: Any) -> Any:
        """A replica's answer; if the replica dies, another one's, until the caller's timeout."""
        while True:
            try:
                return await method(*args)
            except RayActorError:
                await asyncio.sleep(0.05)  # its replica died; the caller's timeout ends this
            except BackPressureError as error:
                raise QueueFull(f"the model deployment is full: {error}") from error
            except (RayError, RayServeException) as error:
                cause = unwrap(error)
                if isinstance(cause, BrayxError):
                    raise cause from None
                raise ModelError(f"the model deployment failed: {type(cause).__name__}") from cause


@contextlib.asynccontextmanager
async def _within(timeout_s: float, late: str) -> AsyncIterator[None]:
    """A deadline; ``late`` starts the message of its error."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{late} within {timeout_s:g} s") from None
