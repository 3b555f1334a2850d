"""The acting copy of a training's model: with torch at first, with the configured engine once that is ready.

An export takes seconds; ticks do not wait for it. Knows nothing of learning, sessions or agents.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from brayx.engines import refuse_frozen
from brayx.engines.base import Engine
from brayx.engines.torch import TorchEngine
from brayx.errors import BrayxError, first_line
from brayx.metrics import Recorder
from brayx.model.build import engine_of
from brayx.model.config import ModelConfig
from brayx.model.local import LocalModel, batching
from brayx.types import Weights

logger = logging.getLogger(__name__)

_KEPT_VERSIONS = 4
"""Minimum number of versions kept ready, for forwards with a slightly older one."""


class ActingModel:
    """A `LocalModel` of a module in training, or of fixed weights. `load` is for the learner's thread.

    Args:
        config: options of the model component.
        module, example_args: results of its ``build_model``; copied.
        sink: records batches.
        version, weights: initial policy version and weights; None: the module's own.
        engine: makes the configured engine with fixed weights; None: the module is in training.

    Attributes:
        model: the acting model, for one event loop.

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
    ) -> None:
        if engine is None:
            refuse_frozen(config.engine)
        self._config, self._engine = config, engine or self._learned_engine
        self._module, self._example = copy.deepcopy(module), example_args
        first = TorchEngine(module, example_args)
        self.model = LocalModel(
            first,
            version=version,
            weights=weights,
            buckets=config.buckets,
            max_versions=max(config.max_versions, _KEPT_VERSIONS),
            **batching(config, sink),
        )
        self._newest: tuple[int, Weights | None] = (version, first.initial if engine is None else None)
        self._lock = threading.Lock()

    def load(self, version: int, weights: Weights) -> None:
        """Uses ``weights`` from the next batch on, see `LocalModel.load`."""
        with self._lock:
            self.model.load(version, weights)
            self._newest = (version, weights)

    def build(self, say: Callable[[str], None]) -> threading.Thread | None:
        """Builds the configured engine in a thread, and swaps it in with the newest weights; torch stays if that fails.

        Args:
            say: gets a line that names the new engine, or says why torch stays.

        Returns:
            The thread; None if the job's engine is torch on the CPU.
        """
        if self._config.engine == "torch" and self._config.device == "cpu" and not self._config.compile:
            return None
        thread = threading.Thread(target=self._build, args=(say,), name="brayx-engine", daemon=True)
        thread.start()
        return thread

    def _build(self, say: Callable[[str], None]) -> None:
        name = self._config.engine
        try:
            engine = self._engine()
            with self._lock:
                version, weights = self._newest
                self.model.swap(engine, version, engine.initial if weights is None else weights)
        except BrayxError as error:
            say(f"the model keeps acting with torch, since engine {name} could not be built: {error.message}")
        except Exception as error:
            logger.exception("engine %s could not be built", name)
            say(f"the model keeps acting with torch: engine {name}: {type(error).__name__}: {first_line(error)}")
        else:
            say(f"the model acts with engine {name} from policy version {version} on, no longer with torch")

    def _learned_engine(self) -> Engine:
        return engine_of(self._config, self._module, self._example)
