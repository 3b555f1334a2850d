"""Evaluation during training: losses on evaluation buffers, and the user's own measurements.

Losses come from one update of a discarded copy at learning rate 0, so that no algorithm needs separate code for
evaluation. Knows nothing of where batches come from.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from brayx.algorithms.base import Algorithm
from brayx.algorithms.build import measuring
from brayx.replay.packing import Batch
from brayx.trainer.config import TrainerConfig
from brayx.trainer.hooks import Hooks
from brayx.trainer.prefetch import Prefetch, Ready

_NOT_MEASURED = ("learning_rate", "grad_norm", "imitation_learning_rate", "imitation_grad_norm")


class Evaluator:
    """Measures a module every `TrainerConfig.eval_interval` updates. Use it in a ``with``, which ends its threads.

    Args:
        config: options.
        module: the module that learns.
        prepare: prepares a batch, without a hook.
        streams: evaluation batches, by buffer. A thread reads each, no further than needed.
        hooks: the user's hooks.
    """

    def __init__(
        self,
        config: TrainerConfig,
        module: nn.Module,
        prepare: Callable[[Batch], Ready],
        streams: Mapping[str, Iterator[Batch]],
        hooks: Hooks,
    ) -> None:
        self._config = config
        self._module = module
        self._hooks = hooks
        self._stack = ExitStack()
        self._streams = {
            name: self._stack.enter_context(Prefetch(stream, prepare, config.eval_batches))
            for name, stream in streams.items()
        }
        self._kept: dict[str, deque[Ready]] = {name: deque(maxlen=config.eval_batches) for name in streams}

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def due(self, updates: int) -> bool:
        """Whether an evaluation is due after this many updates."""
        evaluates = bool(self._streams) or self._hooks.evaluate is not None
        return evaluates and updates % self._config.eval_interval == 0

    def run(self, algorithm: Algorithm, progress: float, step: int) -> dict[tuple[str, str], float]:
        """Numbers by metric and label: ``eval/NAME``, labelled by buffer when there are several.

        Args:
            algorithm: its state is copied.
            progress: as for `Algorithm.update`.
            step: transitions learned from.

        Raises:
            ModelError: the hook ``evaluate`` failed.
        """
        began = time.monotonic()
        numbers = {(f"eval/{name}", ""): value for name, value in self._hooks.evaluated(self._module, step).items()}
        state = algorithm.state_dict() if self._streams else {}
        for buffer, stream in self._streams.items():
            batches = self._kept[buffer]
            while (ready := stream.poll()) is not None:
                batches.append(ready)
                if len(batches) == batches.maxlen:
                    break
            label = buffer if len(self._streams) > 1 else ""
            numbers |= {
                (f"eval/{name}", label): value for name, value in self._losses(state, progress, batches).items()
            }
        return {**numbers, ("evaluate_seconds", ""): time.monotonic() - began}

    def _losses(self, state: Mapping[str, Any], progress: float, batches: deque[Ready]) -> dict[str, float]:
        """Means over the batches."""
        if not batches:
            return {}
        device = next((p.device for p in self._module.parameters() if p.device.type == "cuda"), None)
        measured: list[dict[str, float]] = []
        with torch.random.fork_rng(devices=[] if device is None else [device]):
            # Ranks that share the model do not take part, so the copy is alone.
            module = copy.deepcopy(self._module).eval()
            algorithm = measuring(self._config.algorithm, module)
            for ready in batches:
                algorithm.load_state_dict(copy.deepcopy(dict(state)))
                measured.append(algorithm.update(ready.tensors, progress))
        names = [name for name in measured[0] if name not in _NOT_MEASURED]
        return {name: sum(losses[name] for losses in measured) / len(measured) for name in names}
