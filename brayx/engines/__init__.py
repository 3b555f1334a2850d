"""Executors of models. `build_engine` picks one by name; each lives in its own file and is imported when asked for.

Knows nothing of Ray, batching or where weights come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brayx.engines.base import Engine
from brayx.errors import ConfigError
from brayx.types import NestedArray

if TYPE_CHECKING:
    import torch

ENGINES = ("onnx", "torch")


def build_engine(
    kind: str,
    module: torch.nn.Module,
    example_args: tuple[NestedArray, ...],
    *,
    threads: int = 1,
    device: str = "cpu",
    compiled: bool = False,
) -> Engine:
    """An engine of the given kind for ``module``, verified against torch.

    Args:
        kind: "onnx" or "torch".
        module: takes and returns nested arrays ``[B, ...]``.
        example_args: tuple of arguments it runs on, batch axis of at least 1.
        threads: threads of one run of the ONNX engine; torch uses the process's setting.
        device: ``cuda`` puts the torch engine on a GPU.
        compiled: the torch engine runs through ``torch.compile``.

    Raises:
        ConfigError: no such kind or device, or a kind that cannot do what is asked for.
        ModelError: the module does not fit its example or cannot be exported.
        EngineMismatch: the engine does not compute what torch computes.
    """
    if kind not in ENGINES:
        raise ConfigError(f"engine {kind!r} is not one of {', '.join(ENGINES)}", engine=kind)
    if kind != "torch" and (device != "cpu" or compiled):
        raise ConfigError(f"engine {kind!r} runs on the CPU as it is: device and compile are for torch", engine=kind)
    if kind == "onnx":
        from brayx.engines.onnx import OnnxEngine

        return OnnxEngine(module, example_args, threads=threads)
    from brayx.engines.export import verify
    from brayx.engines.torch import TorchEngine

    engine = TorchEngine(module, example_args, device=device, compiled=compiled)
    if compiled or device != "cpu":  # else it is the reference itself
        verify(engine, module, example_args)
    return engine


__all__ = ["ENGINES", "Engine", "build_engine"]
