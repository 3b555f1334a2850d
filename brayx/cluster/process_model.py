"""A named model in one process: the parts that its handles share, and an event loop for callers without one.

The handles share an engine, or the deployment's handle, and one batcher per event loop. So forwards of many agents,
each with its own handle, join one call, and a model in local mode is built once. Knows nothing of how a model starts.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from typing import Any

import ray

from brayx.cluster.model_client import ModelClient
from brayx.cluster.named import ANSWER_S
from brayx.cluster.named_model import Recipe, deployed, first_weights
from brayx.cluster.weights import WeightSubscriber, fetch_weights
from brayx.engines.base import Engine
from brayx.errors import ModelError
from brayx.model.build import engine_of
from brayx.model.local import LocalModel, batching
from brayx.model.versions import Versions
from brayx.threads import LoopThread


class ProcessModel:
    """A named model in this process; `process_model` makes or finds it.

    Attributes:
        subscriber: follows the weight store, in local mode.
    """

    def __init__(self, name: str, store: Any, recipe: Recipe, timeout_s: float) -> None:
        self.subscriber: WeightSubscriber | None = None
        self._store = store
        self._recipe = recipe
        self._lock = threading.Lock()
        self._models: dict[asyncio.AbstractEventLoop, ModelClient | LocalModel] = {}
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ended = False
        self._engine: Engine | None = None
        self._versions: Versions | None = None
        self._deployed: Any = None
        if recipe.local:
            self._build(name)
        else:
            self._deployed = deployed(name, timeout_s)

    def join(self, handle: Any) -> bool:
        """Adds a handle, until it leaves or is dropped; False if the last one has just left."""
        with self._lock:
            if not self._ended:
                self._handles.add(handle)
            return not self._ended

    def leave(self, handle: Any) -> None:
        """Removes a handle; the last one ends the shared parts."""
        with self._lock:
            self._handles.discard(handle)
            if self._handles:
                return
            self._ended = True
            models, self._models = self._models, {}

        async def end() -> None:
            if self.subscriber is not None:
                await self.subscriber.stop()
            for loop, model in models.items():
                if loop is asyncio.get_running_loop():
                    await model.close()
                elif loop.is_running():
                    asyncio.run_coroutine_threadsafe(model.close(), loop)

        background_loop().run(end(), ANSWER_S)

    def on_this_loop(self) -> ModelClient | LocalModel:
        """The model for this event loop. Batchers belong to one loop; engine and weights are shared by all loops.

        Raises:
            ModelError: the last handle has left.
        """
        loop = asyncio.get_running_loop()
        model = self._models.get(loop)
        if model is not None:
            return model
        config = self._recipe.config
        options = batching(config)
        with self._lock:
            if self._ended:  # a model made now would never end, nor get new weights
                raise ModelError("the model is closed")
            for ended in [other for other in self._models if other.is_closed()]:
                del self._models[ended]
            if self._engine is not None:
                fetch = functools.partial(fetch_weights, self._store)
                model = LocalModel(self._engine, versions=self._versions, fetch=fetch, **options)
            else:
                model = ModelClient(self._deployed, self._recipe.spec, max_calls=config.num_workers, **options)
            self._models[loop] = model
        return model

    def _build(self, name: str) -> None:
        """In local mode, builds an engine in this process that follows the store's weights."""
        recipe = self._recipe
        version, weights = first_weights(name, self._store, recipe.trial)
        engine = engine_of(recipe.config, recipe.module(weights), recipe.example_args)
        self._versions = Versions(engine, weights=weights, version=version, keep=recipe.config.max_versions)
        self._engine = engine
        self.subscriber = WeightSubscriber(self._store, self._versions.load)
        # Stops when all handles are dropped without `close`, but not at the interpreter's exit.
        weakref.finalize(self, _let_go, self.subscriber).atexit = False
        background_loop().run(self.subscriber.start(), ANSWER_S)


_known: weakref.WeakValueDictionary[tuple[str, str], ProcessModel] = weakref.WeakValueDictionary()


def process_model(name: str, store: Any, recipe: Recipe, timeout_s: float, handle: Any) -> ProcessModel:
    """The model in this process, for one more handle.

    Args:
        name: name of the model.
        store: weight store of the model.
        recipe: the store's recipe; its token distinguishes one start of the model from the next.
        timeout_s: longest wait for its deployment.
        handle: the new handle.

    Raises:
        StartupError: the deployment did not start in time.
    """
    key = recipe.token, _connection()
    known = _known.get(key)
    if known is not None and known.join(handle):
        return known
    # Without a lock, since it takes seconds: two threads that arrive at once each make one.
    made = _known[key] = ProcessModel(name, store, recipe, timeout_s)
    made.join(handle)
    return made


def _connection() -> str:
    """Id of this process's connection to Ray; a model of an earlier connection is of no use."""
    return ray.get_runtime_context().get_job_id()


@functools.cache
def background_loop() -> LoopThread:
    """The event loop for callers without one; started once in a process."""
    return LoopThread("brayx-models")


def _let_go(subscriber: WeightSubscriber) -> None:
    background_loop().start(subscriber.stop())
