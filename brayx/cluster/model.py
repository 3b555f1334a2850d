"""The model as a Serve deployment: an engine, a batcher and a weight subscriber in every replica.

`ModelReplica` is an ordinary class; `model_application` makes a Serve application of it. Knows nothing of agents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from brayx.cluster.hub import HubClient
from brayx.cluster.named import WEIGHT_STORE, get_actor
from brayx.cluster.pool import PoolClient
from brayx.cluster.prometheus import Exporter
from brayx.cluster.ray_private import serve_is_on_loopback, warn_if_open
from brayx.cluster.weights import StoreHandle, WeightSubscriber, fetch_weights
from brayx.engines import refuse_frozen
from brayx.engines.base import ModelSpec
from brayx.errors import ModelError
from brayx.gamecore.browser import Cors, Hosts
from brayx.logs import limit_others
from brayx.model import http
from brayx.model.arms import WeightSource
from brayx.model.checkpoints import engine_from
from brayx.model.config import ModelConfig
from brayx.model.following import AliasFollower, initial_version
from brayx.model.grpc import ModelDoor
from brayx.model.inputs import check_columns
from brayx.model.local import LocalModel, batching
from brayx.model.pool import Aliases
from brayx.types import NestedArray, Weights

if TYPE_CHECKING:
    import torch

_FOLLOWED_VERSIONS = 4
"""Versions kept ready of a model that follows an alias: champion, candidate, and those of older sessions."""

_AS_BUILT = WeightSource()

BuildModel = Callable[[], "tuple[torch.nn.Module, tuple[NestedArray, ...]]"]
"""Returns the module and its ``forward_args``. It must pickle, as a `functools.partial` of a module-level function."""


class ModelReplica:
    """One replica of the model. Call `start` before use and `close` after it.

    Attributes:
        model: the model that acts.
        recorder: counts calls of the engine.
        cors: origins with scripts that may call it over HTTP.
        hosts: names that it answers to over HTTP.

    Args:
        build: returns the module and its example arguments.
        config: engine and batcher options.
        source: where its weights come from; the registry's files are read on the replica's machine.
        name: name of the model component.
        pool: the registry, for a model that follows an alias.
        hub: name of the hub for its metrics; empty: metrics are not sent.
        preferred: the alias's current version and its weights; the replica starts from these if they fit.
        is_local: no other machine can reach Serve's ingress. Then it answers to names of this machine only.

    Raises:
        BrayxError: as for `engine_from`.
    """

    def __init__(
        self,
        build: BuildModel,
        config: ModelConfig,
        source: WeightSource = _AS_BUILT,
        name: str = "model",
        pool: PoolClient | None = None,
        hub: str = "",
        *,
        preferred: tuple[int, Weights] | None = None,
        is_local: bool = False,
    ) -> None:
        if source.store:
            refuse_frozen(config.engine)
        self.recorder = HubClient.of(hub)
        module, example_args = build()
        checkpoint = source.checkpoint or None
        engine, version = engine_from(
            config, module, example_args, checkpoint, source.tracking, source.version, preferred
        )
        follows = pool is not None and source.followed is not None
        self.model = LocalModel(
            engine,
            version=version,
            max_versions=max(config.max_versions, _FOLLOWED_VERSIONS) if follows else config.max_versions,
            fetch=self._fetch if source.store or follows else None,
            **batching(config, self.recorder),
        )
        self.cors = Cors(config.cors_origins)
        self.hosts = Hosts(config.allowed_hosts if is_local else None)
        self._source, self._name, self._pool = source, name, pool
        self._store: StoreHandle | None = None
        self._subscriber: WeightSubscriber | AliasFollower | None = None

    async def start(self, aliases: Aliases | None = None) -> None:
        """Loads the newest weights of the store, if it holds any, and follows it from then on.

        Args:
            aliases: current versions of the aliases, for a model that follows one.

        Raises:
            StartupError: the store does not exist, or its published weights cannot be read.
        """
        name, followed = self._name, self._source.followed
        if self._source.store:
            self._store = get_actor(self._source.store, WEIGHT_STORE)
            subscriber = self._subscriber = WeightSubscriber(self._store, self.model.load)
            await subscriber.start_abreast()
        elif self._pool is not None and followed is not None:
            self._subscriber = follows = AliasFollower(self._pool, {name: followed}, {name: self.model})
            await follows.start(aliases)

    async def forward(
        self, columns: Sequence[np.ndarray], version: int | None = None, deadline_s: float | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Forwards of several observations.

        Args:
            columns: input leaves ``[N, ...]`` in the order of the spec, N at least 1.
            version: policy version to act with; None: the newest at the start of each batch.
            deadline_s: as for `Model.forward`.

        Returns:
            Output leaves ``[N, ...]``, and the policy version of each row, ``[N]`` int64. Versions may differ, because
            rows are batched with those of other callers.

        Raises:
            ShapeMismatch, VersionUnknown, QueueFull, DeadlineExceeded, ModelError: as `Model.forward`.
        """
        check_columns(self.model.spec.inputs, columns)
        return await self.model.forward_columns(columns, version=version, deadline_s=deadline_s)

    async def _fetch(self, version: int) -> Weights:
        if self._pool is not None:
            return await self._pool.weights(self._name, version)
        return await fetch_weights(self._store, version)

    async def __call__(self, request: Request) -> Response:
        """Answers HTTP, if the application has a route; see `brayx.model.http`."""
        body = bytearray()  # bytes would be copied with every chunk
        async for chunk in request.stream():
            body += chunk
            if len(body) > http.DEFAULT_MAX_BODY_BYTES:
                break  # `answer` refuses it
        kind, accept = (request.headers.get(name, "") for name in ("content-type", "accept"))
        status, media_type, content = await http.answer(
            self.model,
            request.method,
            kind,
            bytes(body),
            accept=accept,
            cors=self.cors,
            host=request.headers.get("host"),
            hosts=self.hosts,
        )
        response = Response(content, status, media_type=media_type)
        response.raw_headers += self.cors.headers(request.headers.get("origin"), request.method)
        return response

    async def get_spec(self) -> ModelSpec:
        """Signature of the model."""
        return self.model.spec

    async def get_version(self) -> int:
        """Policy version that the next batch will use."""
        return self.model.version

    async def ready(self, version: int) -> None:
        """Makes a policy version ready here. Errors are those of `LocalModel.pin`."""
        await self.model.pin(version)

    async def check_health(self) -> None:
        """Serve's health check: raises `ModelError` if this replica should be replaced."""
        if self._subscriber is not None and not self._subscriber.running:
            raise ModelError("the weight subscriber of this replica has ended")

    async def close(self) -> None:
        """Ends the subscriber and the batcher."""
        if self._subscriber is not None:
            await self._subscriber.stop()
        await self.model.close()
        await asyncio.to_thread(self.recorder.close)


class _ServedModel(ModelReplica, ModelDoor):
    """Serve's way of calling `start` and `close`: an async constructor, and ``__del__`` when it drains a replica."""

    async def __init__(  # type: ignore[misc]
        self, build: BuildModel, config: ModelConfig, source: WeightSource, name: str, pool: PoolClient | None, hub: str
    ) -> None:
        aliases, preferred = None, None
        if pool is not None and source.followed is not None:
            # The version it was deployed with may be old by now, or deleted.
            aliases = await pool.look()
            preferred = await initial_version(pool, name, source.followed.alias, aliases, source.version)
        is_local = await serve_is_on_loopback()
        super().__init__(build, config, source, name, pool, hub, preferred=preferred, is_local=is_local)
        await self.start(aliases)
        warn_if_open(logging.getLogger("ray.serve"))
        limit_others()
        here = serve.get_replica_context()
        tags = {"application": here.app_name, "deployment": here.deployment, "replica": here.replica_id.unique_id}
        self.recorder.listen(Exporter(self._levels, **tags).show)

    async def __del__(self) -> None:
        await self.close()

    def _levels(self) -> list[tuple[str, str, float]]:
        """The current levels for the metrics export."""
        return [("acting_version", serve.get_replica_context().deployment, float(self.model.version))]


def model_application(
    build: BuildModel,
    config: ModelConfig,
    source: WeightSource = _AS_BUILT,
    *,
    name: str = "model",
    pool: PoolClient | None = None,
    hub: str = "",
) -> serve.Application:
    """A Serve application with one deployment, ``name``, of ``config.num_workers`` replicas.

    Run it with ``serve.run(app, name=..., route_prefix=None)``, or bind it into another application; in both cases pass
    the handle to `ModelClient`. With a route prefix it also answers over HTTP and gRPC. Arguments are those of
    `ModelReplica`.
    """
    actor_options: dict[str, Any] = {"num_cpus": config.cpus_per_worker, "num_gpus": config.gpus_per_worker}
    if config.memory_per_worker:
        actor_options["memory"] = config.memory_per_worker * 2**20
    deployment: Any = serve.deployment(
        _ServedModel,
        name=name,
        num_replicas=config.num_workers,
        max_ongoing_requests=4 * abs(config.max_batch_size),  # callers must be able to fill a batch while another runs
        max_queued_requests=config.max_queue,
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=5.0,
        ray_actor_options=actor_options,
    )
    application: serve.Application = deployment.bind(build, config, source, name, pool, hub)
    return application
