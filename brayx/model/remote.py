"""`RemoteModel`: a model by its name, from a notebook, an agent or a script; the handle that Bray's users know.

The first construction starts a weight store and a Serve application of that name; every later one, in any process,
finds them. A facade: it batches, swaps and restarts nothing itself.
"""

from __future__ import annotations

import asyncio
import functools
import re
import secrets
import threading
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from brayx.engines import build_engine
from brayx.engines.base import ModelSpec, check_weights
from brayx.errors import (
    ConfigError,
    DeadlineExceeded,
    StartupError,
    VersionUnknown,
)
from brayx.model.checkpoints import Checkpoints, starting_weights
from brayx.model.client import ModelClient
from brayx.model.columns import to_columns
from brayx.model.local import LocalModel, Model
from brayx.model.named import (
    ANSWER_S,
    NAMESPACE,
    asked,
    config_of,
    deploy,
    deployed,
    find,
    not_found,
    recipe_of,
    remove,
)
from brayx.model.recipe import CheckpointInterval, Origin, Recipe, prepare
from brayx.model.versions import Versions
from brayx.model.weights import (
    KEPT_VERSIONS,
    WeightPublisher,
    WeightSubscriber,
    create_weight_store,
    fetch_weights,
)
from brayx.tracking import Trial, initialise, tracking_uri
from brayx.types import NestedArray, Weights

if TYPE_CHECKING:
    import torch

PROJECT = "brayx-models"
"""MLflow experiment of the checkpoints."""

_CALLS_AT_ONCE = 8
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")

Result = TypeVar("Result")


class RemoteModel:
    """A model that is found by its name.

    Args:
        name: letters, digits, ``_``, ``.``, ``-``. If a model of that name runs, this is a handle of it, and all
            further arguments but ``override_model`` mean nothing.
        model: takes and returns nested tensors ``[B, ...]``. Its class must be importable where replicas run, unless it
            is defined in the notebook or script itself.
        forward_args: arguments it runs on, nested arrays with a batch axis of at least 1.
        forward_kwargs: more of them, by the names of its positional parameters.
        checkpoint_interval: steps (int) or time (`datetime.timedelta`) after which a publish is also written to MLflow;
            a model that is started again under its name goes on from the newest.
        checkpoint: what it starts from if it has none of its own: a folder with ``weights.npz``, or
            ``models:/name@alias``.
        max_batch_size: observations of one engine call at most; negative: exactly so many, padded.
        num_workers: replicas.
        cpus_per_worker, gpus_per_worker, memory_per_worker: what Ray reserves for each; memory in MiB.
        use_onnx: ONNX Runtime acts; otherwise torch.
        local_mode: forwards run in the process that asks for them, without replicas; weights still travel.
        override_model: a model of that name that runs is ended and made anew, from ``model``'s own weights.
        max_versions: policy versions kept for who asks for one.
        deadline_s: a forward without a result after this long fails.
        start_timeout_s: until all replicas must be up.
        route_prefix: path at which Serve's ingress takes forwards over HTTP, too (`brayx.model.http`); None: nowhere.
        tracking: MLflow's URI or database file, for checkpoints; default: as of a job.

    Raises:
        ModelNotFound: there is no such model and none was given; names the nearest.
        ModelError: the model does not fit its arguments, or cannot be exported.
        StartupError: it did not start in time.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module | None = None,
        forward_args: tuple[NestedArray, ...] = (),
        forward_kwargs: Mapping[str, NestedArray] | None = None,
        *,
        checkpoint_interval: CheckpointInterval = None,
        checkpoint: str | None = None,
        max_batch_size: int = 64,
        num_workers: int = 1,
        cpus_per_worker: float = 0.0,
        gpus_per_worker: float = 0.0,
        memory_per_worker: int = 0,
        use_onnx: bool = True,
        local_mode: bool = False,
        override_model: bool = False,
        max_versions: int = KEPT_VERSIONS,
        deadline_s: float = 10.0,
        start_timeout_s: float = 120.0,
        route_prefix: str | None = None,
        tracking: str | None = None,
        _lineage: tuple[Origin, ...] = (),
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"name is {name!r}, expected up to 100 letters, digits, _ . or -", key="name")
        self._name = name
        override = override_model and model is not None
        if override:
            remove(name)
        store, started = find(name), False
        if store is None:
            if model is None:
                raise not_found(name)
            on_gpu = {"gpus_per_worker": gpus_per_worker, **({} if use_onnx else {"device": "cuda"})}
            config = config_of(
                engine="onnx" if use_onnx else "torch",
                placement="local" if local_mode else "remote",
                max_batch_size=max_batch_size,
                max_versions=max_versions,
                deadline_s=deadline_s,
                num_workers=num_workers,
                cpus_per_worker=cpus_per_worker,
                memory_per_worker=memory_per_worker,
                **(on_gpu if gpus_per_worker else {}),
            )
            skeleton, example, names, spec, layout, weights = prepare(model, forward_args, forward_kwargs or {})
            uri = tracking_uri(tracking)
            trial = None if checkpoint_interval is None else Trial.open(PROJECT, name, initialise(uri))
            version, step, weights = starting_weights(weights, None if override else trial, checkpoint, uri)
            check_weights(layout, weights)
            token = secrets.token_hex(8)
            recipe = Recipe(
                skeleton, example, names, spec, layout, config, local_mode, _lineage, trial, checkpoint_interval, token
            )
            store = create_weight_store(
                f"model/{name}", NAMESPACE, keep=max_versions, about=recipe.pickled(), detached=True
            )
            started = recipe_of(store, start_timeout_s).token == token  # else another process was first
        self._store = store
        self._recipe = recipe_of(store, start_timeout_s)
        self._deadline_s = self._recipe.config.deadline_s
        self._lock = threading.Lock()
        self._models: dict[asyncio.AbstractEventLoop, ModelClient | LocalModel] = {}
        self._publisher: WeightPublisher | None = None
        self._checkpoints = Checkpoints(self._recipe.trial, self._recipe.checkpoint_interval)
        self._versions: Versions | None = None
        self._subscriber: WeightSubscriber | None = None
        self._handle: Any = None
        try:
            if started:
                WeightPublisher(store, last_version=version).publish(weights, step)
                if not local_mode:
                    deploy(name, self._recipe, route_prefix)
            if self._recipe.local:
                self._build_here()
            else:
                self._handle = deployed(name, start_timeout_s)
        except BaseException:
            if started:
                remove(name)
            raise

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def spec(self) -> ModelSpec:
        """Its signature."""
        return self._recipe.spec

    @property
    def lineage(self) -> tuple[Origin, ...]:
        """What it was cloned from, and that from; the nearest first. Empty if it is no clone."""
        return self._recipe.lineage

    @property
    def step(self) -> int:
        """Step that the newest weights were published with."""
        return self._newest()[1]

    @property
    def version(self) -> int:
        """Policy version of the newest weights, from 1."""
        return self._newest()[0]

    async def forward(self, *args: NestedArray, batch: bool = False, **kwargs: NestedArray) -> NestedArray:
        """The model's outputs, on any event loop.

        Args:
            *args: the model's arguments, nested arrays; without batch axis unless ``batch``.
            batch: every leaf has a leading batch axis ``[N, ...]``, and so have the outputs. With newer weights on
                their way the rows may be of two versions.
            **kwargs: arguments by name.

        Raises:
            ShapeMismatch: they do not fit; shows expected and got for each leaf, and nobody else's batch is touched.
            QueueFull, DeadlineExceeded, ModelError: as of `Model.forward`.
        """
        arguments = self._recipe.positional(args, kwargs)
        model = self._on_this_loop()
        if not batch:
            return (await model.forward(*arguments)).outputs
        columns = to_columns(self.spec, arguments)
        size = abs(self._recipe.config.max_batch_size)
        slots = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def part(start: int) -> list[np.ndarray]:
            async with slots:
                outputs, _ = await model.forward_columns([leaf[start : start + size] for leaf in columns])
                return outputs

        parts = await asyncio.gather(*[part(start) for start in range(0, len(columns[0]), size)])
        return self.spec.unflatten_outputs([np.concatenate(leaves) for leaves in zip(*parts, strict=True)])

    def __call__(self, *args: NestedArray, batch: bool = False, **kwargs: NestedArray) -> NestedArray:
        """`forward` for code that does not await, in a notebook say; blocks the thread it is called in."""
        return _background(self.forward(*args, batch=batch, **kwargs), self._deadline_s + ANSWER_S)

    def client(self) -> Model:
        """The model for this event loop as an agent's services take it: results with versions, asked for or pinned."""
        return self._on_this_loop()

    def publish_weights(self, weights: Weights | Mapping[str, torch.Tensor] | torch.nn.Module, step: int = -1) -> int:
        """Makes ``weights`` what every next batch uses, wherever it runs; blocks until the store has them.

        Args:
            weights: arrays or tensors by their `state_dict` name, or a module of the same layout. Copied.
            step: the learner's count; -1: one more than the newest.

        Returns:
            The policy version they got.

        Raises:
            BadWeights: they do not fit, or hold NaN or infinity; names the leaf, and nothing was published.
            DeadlineExceeded: the store did not answer in time.
        """
        arrays = _arrays(weights)
        check_weights(self._recipe.layout, arrays)
        with self._lock:
            newest, newest_step = self._newest()
            if self._publisher is None:
                self._publisher = WeightPublisher(self._store, last_version=newest)
            step = newest_step + 1 if step < 0 else step
            version = self._publisher.publish(arrays, step)
            self._checkpoints.offer(arrays, version, step)
        return version

    def get_model(self, step: int = -1) -> torch.nn.Module:
        """The torch module with the newest weights, or with those of ``step``: a copy of the caller's own.

        Raises:
            VersionUnknown: nothing that is kept was published with that step; names the nearest.
            ModelError: the module's code is not here.
        """
        return self._recipe.module(self._weights(step)[1])

    def clone(self, step: int = -1, name: str | None = None) -> RemoteModel:
        """A model of its own that starts from this one's weights: the newest, or those of ``step``.

        Args:
            step: as of `get_model`.
            name: of the clone; default: this one's with a number.

        Raises:
            VersionUnknown: as `get_model`.
            ConfigError: a model of that name runs already.
        """
        version, weights, step = self._weights(step)
        if name is None:
            name = next(free for i in range(1, 10_000) if find(free := f"{self._name}-{i}") is None)
        elif find(name) is not None:
            raise ConfigError(f"a model {name!r} runs already", key="name")
        recipe = self._recipe
        config = recipe.config
        return RemoteModel(
            name,
            recipe.module(weights),
            recipe.example_args,
            checkpoint_interval=recipe.checkpoint_interval,
            max_batch_size=config.max_batch_size,
            num_workers=config.num_workers,
            cpus_per_worker=config.cpus_per_worker,
            gpus_per_worker=getattr(config, "gpus_per_worker", 0.0),
            memory_per_worker=config.memory_per_worker,
            use_onnx=config.engine == "onnx",
            local_mode=recipe.local,
            max_versions=config.max_versions,
            deadline_s=config.deadline_s,
            tracking=recipe.trial.uri if recipe.trial is not None else None,
            _lineage=(Origin(self._name, version, step), *recipe.lineage),
        )

    def close(self) -> None:
        """Ends this handle: its tasks, and a checkpoint that is being written; the model goes on."""
        self._checkpoints.close()
        models, self._models = self._models, {}

        async def end() -> None:
            if self._subscriber is not None:
                await self._subscriber.stop()
            for loop, model in models.items():
                if loop is asyncio.get_running_loop():
                    await model.close()
                elif loop.is_running():
                    asyncio.run_coroutine_threadsafe(model.close(), loop)

        _background(end(), ANSWER_S)

    def delete(self) -> None:
        """Ends the model itself: its replicas and its weights. Checkpoints stay in MLflow."""
        self.close()
        remove(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteModel, (self._name,)

    def __repr__(self) -> str:
        return f"<RemoteModel {self._name!r}>"

    def _newest(self) -> tuple[int, int]:
        steps: dict[int, int] = asked(self._store.steps.remote())
        return max(steps.items(), default=(0, 0))

    def _weights(self, step: int) -> tuple[int, Weights, int]:
        """Version, weights and step of what was published with ``step``, of several the newest; -1: of the newest."""
        steps: dict[int, int] = asked(self._store.steps.remote())
        having = [version for version, published in steps.items() if step in (-1, published)]
        if not having:
            nearest = min(steps.values(), key=lambda other: (abs(other - step), -other), default=None)
            told = f"nearest is {nearest}; there are {', '.join(map(str, steps.values()))}"
            raise VersionUnknown(
                f"model {self._name!r} keeps nothing of step {step}" + (f", {told}" if steps else ""),
                step=step,
                nearest=nearest,
            )
        version = max(having)
        return version, _background(fetch_weights(self._store, version), ANSWER_S), steps[version]

    def _build_here(self) -> None:
        """Local mode: an engine of this process, whose weights follow the store."""
        recipe = self._recipe
        found = asked(self._store.wait_newer.remote(0, ANSWER_S), 2 * ANSWER_S)
        if not isinstance(found, tuple):
            raise StartupError(f"the weight store of model {self._name!r} holds nothing", name=self._name)
        version, _, [reference] = found
        weights: Weights = asked(reference)
        engine = build_engine(recipe.config.engine, recipe.module(weights), recipe.example_args)
        self._versions = Versions(engine, weights=weights, version=version, keep=recipe.config.max_versions)
        self._engine = engine
        self._subscriber = WeightSubscriber(self._store, self._versions.load)
        # A handle that is dropped without `close` follows the store no longer; at the interpreter's end nobody does.
        weakref.finalize(self, _let_go, self._subscriber).atexit = False
        _background(self._subscriber.start(), ANSWER_S)

    def _on_this_loop(self) -> ModelClient | LocalModel:
        """A batcher belongs to one event loop, so each loop has a model of its own; engine and weights are shared."""
        loop = asyncio.get_running_loop()
        model = self._models.get(loop)
        if model is not None:
            return model
        options: dict[str, Any] = {
            "max_batch_size": self._recipe.config.max_batch_size,
            "deadline_s": self._deadline_s,
        }
        with self._lock:
            for ended in [other for other in self._models if other.is_closed()]:
                del self._models[ended]
            if self._versions is not None:
                fetch = functools.partial(fetch_weights, self._store)
                model = LocalModel(self._engine, versions=self._versions, fetch=fetch, **options)
            else:
                model = ModelClient(self._handle, self.spec, max_calls=self._recipe.config.num_workers, **options)
            self._models[loop] = model
        return model


def _let_go(subscriber: WeightSubscriber) -> None:
    asyncio.run_coroutine_threadsafe(subscriber.stop(), _the_background().loop)


def _arrays(weights: Any) -> Weights:
    import torch

    if isinstance(weights, torch.nn.Module):
        weights = weights.state_dict()
    return {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for name, value in weights.items()
    }


class _Background:
    """An event loop in a thread of its own, for what is called without one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="brayx-models", daemon=True).start()


@functools.lru_cache(maxsize=1)
def _the_background() -> _Background:
    return _Background()


def _background(work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
    """Runs a coroutine on the background loop and waits for it, whatever loop runs in this thread."""
    future: Future[Result] = asyncio.run_coroutine_threadsafe(work, _the_background().loop)
    try:
        return future.result(timeout_s)
    except TimeoutError:
        future.cancel()
        raise DeadlineExceeded(f"no answer in {timeout_s:g} s") from None
