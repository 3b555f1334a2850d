"""A model that acts in this process: with torch at first, with the configured engine once that is ready.

An export takes seconds; ticks do not wait for it. Knows nothing of learning, sessions or agents.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from torch import nn

from brayx.engines import refuse_frozen
from brayx.engines.base import Engine
from brayx.engines.torch import TorchEngine, module_weights
from brayx.errors import BrayxError, first_line
from brayx.metrics import Recorder
from brayx.model.build import engine_of, exporting
from brayx.model.config import ModelConfig
from brayx.model.local import LocalModel, batching
from brayx.threads import NativeThread
from brayx.types import Weights

logger = logging.getLogger(__name__)

_KEPT_VERSIONS = 4
"""Minimum number of versions kept ready where others cannot be fetched, for forwards with a slightly older one."""


class ActingModel:
    """A `LocalModel` that acts with torch while its engine is built.

    Args:
        config: options of the model component.
        module, example_args: results of its ``build_model``; copied.
        sink: records batches.
        version, weights: initial policy version and weights; None: the module's own.
        engine: makes the configured engine; None: export the module itself, which is in training.
        fetch: fetches the weights of other versions, as for `LocalModel`.

    Attributes:
        model: the acting model.

    Raises:
        ConfigError: the engine takes no new weights, and the module is learned.
        ModelError: the module fails on its example.
        BadWeights: the weights do not fit the module.
    """

    def __init__(
        self,
        config: ModelConfig,
        module: nn.Module,
        example_args: tuple[Any, ...],
        sink: Recorder,
        *,
        version: int = 0,
        weights: Weights | None = None,
        engine: Callable[[], Engine] | None = None,
        fetch: Callable[[int], Awaitable[Weights]] | None = None,
    ) -> None:
        if engine is None:
            refuse_frozen(config.engine)
        self._config, self._engine = config, engine or self._learned_engine
        self._module, self._example = copy.deepcopy(module), example_args
        self._closed = threading.Event()
        self.model = LocalModel(
            TorchEngine(module, example_args),
            version=version,
            weights=weights,
            max_versions=max(config.max_versions, 0 if fetch else _KEPT_VERSIONS),
            fetch=fetch,
            **batching(config, sink),
        )

    def build(self, say: Callable[[str], None], record: Callable[[str], None] = lambda _: None) -> threading.Thread:
        """Builds the configured engine in a thread, and swaps it in; torch stays if that fails.

        Args:
            say: called with a line that names the new engine, or says why torch stays.
            record: called with the engine that the model acts with from then on: ``onnx from version 3``, or ``torch``.

        Returns:
            The thread. It calls ``say`` and ``record``, unless the model is closed first.
        """
        thread = NativeThread(functools.partial(self._build, say, record), "brayx-engine", self._closed.set)
        thread.start()
        return thread

    async def close(self) -> None:
        """Closes the model. A build that has not begun is dropped; a running one cannot be interrupted, but its result
        is discarded."""
        self._closed.set()
        await self.model.close()

    def _build(self, say: Callable[[str], None], record: Callable[[str], None]) -> None:
        name, acts_with, line = self._config.engine, "torch", ""
        try:
            if name != "torch" or self._config.device != "cpu" or self._config.compile:
                with exporting:
                    if self._closed.is_set():
                        return
                    engine = self._engine()
                self.model.swap(engine, module_weights)
                version = self.model.version
                line = f"the model acts with engine {name} from policy version {version} on, no longer with torch"
                acts_with = f"{name} from version {version}"
        except BrayxError as error:
            logger.warning("engine %s could not be built: %s", name, error.message)
            line = f"the model keeps acting with torch, since engine {name} could not be built: {error.message}"
        except Exception as error:
            logger.exception("engine %s could not be built", name)
            line = f"the model keeps acting with torch: engine {name}: {type(error).__name__}: {first_line(error)}"
        if self._closed.is_set():
            return
        if line:
            say(line)
        record(acts_with)

    def _learned_engine(self) -> Engine:
        return engine_of(self._config, self._module, self._example)
