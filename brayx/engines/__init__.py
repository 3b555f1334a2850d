"""Executors of models. `build_engine` picks one by name; each has its own file, imported on first use.

Knows nothing of Ray, batching or the source of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from brayx.engines.base import Engine
from brayx.errors import ConfigError
from brayx.types import NestedArray, Weights

if TYPE_CHECKING:
    import torch

ENGINES = ("onnx", "onnx-frozen", "int8", "tensorrt", "torch")
FROZEN = ("onnx-frozen", "int8")
"""Engines that run only the weights they were built with."""


def build_engine(
    kind: str,
    module: torch.nn.Module,
    example_args: tuple[NestedArray, ...],
    *,
    threads: int = 1,
    max_batch_size: int = 64,
    device: str = "cpu",
    compiled: bool = False,
    weights: Weights | None = None,
    samples: Sequence[np.ndarray] | None = None,
) -> Engine:
    """An engine of the given kind for ``module``, verified against torch.

    Args:
        kind: one of `ENGINES`.
        module: takes and returns nested arrays ``[B, ...]``.
        example_args: a tuple of example arguments, each leaf with a batch axis of at least 1.
        threads: threads per run of an ONNX engine; torch uses the process's setting.
        max_batch_size: largest batch of a TensorRT plan; negative for a fixed batch size. Other engines take any size.
        device: ``cuda`` runs the torch engine on a GPU. TensorRT always runs on one.
        compiled: the torch engine runs through ``torch.compile``.
        weights: replace the module's own; a frozen engine takes its weights here.
        samples: representative input leaves ``[N, ...]``, for engines that need calibration.

    Raises:
        ConfigError: unknown kind or device, an option the kind does not support, or an engine that is not installed.
        BadWeights: the weights do not fit this module.
        ModelError: the module does not fit its example or cannot be exported.
        EngineMismatch: the engine does not compute what torch computes.
    """
    if kind not in ENGINES:
        raise ConfigError(f"engine {kind!r} is not one of {', '.join(ENGINES)}", engine=kind)
    if kind != "torch" and (device != "cpu" or compiled):
        raise ConfigError(f"device and compile are options of engine 'torch', not of {kind!r}", engine=kind)
    if weights is not None:
        from brayx.engines.torch import with_weights

        module = with_weights(module, weights)
    if kind == "onnx":
        from brayx.engines.onnx import OnnxEngine

        return OnnxEngine(module, example_args, threads=threads, traced=True)
    if kind == "onnx-frozen":
        from brayx.engines.frozen import FrozenOnnxEngine

        return FrozenOnnxEngine(module, example_args, threads=threads, samples=samples)
    if kind == "int8":
        from brayx.engines.frozen import Int8Engine

        return Int8Engine(module, example_args, threads=threads, samples=samples)
    if kind == "tensorrt":
        from brayx.engines.tensorrt import TensorRTEngine

        return TensorRTEngine(module, example_args, max_batch_size=max_batch_size)
    from brayx.engines.export import verify
    from brayx.engines.torch import TorchEngine

    engine = TorchEngine(module, example_args, device=device, compiled=compiled)
    if compiled or device != "cpu":  # the uncompiled CPU engine is the reference itself
        verify(engine, module, example_args)
    return engine


def refuse_frozen(kind: str) -> None:
    """Raises `ConfigError` for a frozen kind; call it where the engine must follow a trainer's weights."""
    if kind in FROZEN:
        raise ConfigError(f"engine {kind!r} is frozen and takes no new weights: train with engine 'onnx'", engine=kind)


__all__ = ["ENGINES", "FROZEN", "Engine", "build_engine", "refuse_frozen"]
