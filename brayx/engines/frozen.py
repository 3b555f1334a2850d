"""ONNX Runtime with one set of weights as constants of the graph, so that it can fold them.

Somewhat faster than bound weights, and the format that `brayx export` writes. Knows nothing of quantisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from brayx.engines.base import Engine, check_weights, layout_of
from brayx.engines.export import to_onnx, verify
from brayx.engines.onnx import open_session
from brayx.engines.torch import module_weights
from brayx.errors import ModelError, WeightsFrozen
from brayx.types import NestedArray, Weights


class OnnxSession:
    """An ONNX file, or its bytes, on ONNX Runtime.

    Args:
        model: serialised model, or path of its file.
        inputs: graph names of the input leaves.
        outputs: graph names of the output leaves.
        threads: threads per run.

    Raises:
        ModelError: ONNX Runtime cannot load it.
    """

    def __init__(self, model: bytes | Path, inputs: Sequence[str], outputs: Sequence[str], threads: int = 1) -> None:
        self._session = open_session(model, threads)
        used = {value.name for value in self._session.get_inputs()}
        self._fed = [(index, name) for index, name in enumerate(inputs) if name in used]
        self._outputs = list(outputs)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs one batch; arguments, result and errors as for `Engine.run`."""
        try:
            outputs: list[np.ndarray] = self._session.run(self._outputs, {name: inputs[i] for i, name in self._fed})
            return outputs
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            raise ModelError(f"ONNX Runtime failed on a batch of {len(inputs[0])}: {error}") from error


class FrozenOnnxEngine(Engine):
    """Exports the module with its weights inside, verifies the result against torch, and runs it.

    Args:
        module: takes and returns nested arrays ``[B, ...]``; its weights are the ones to act with.
        example_args: a tuple of example arguments, each leaf with a batch axis of at least 1.
        threads: threads per run.
        samples: representative input leaves ``[N, ...]``; if absent, the example's rows with noise.
        verify_outputs: compare with torch before serving.

    Raises:
        ModelError: the module cannot be exported.
        EngineMismatch: the exported graph does not compute what torch computes.
    """

    frozen: ClassVar[bool] = True

    def __init__(
        self,
        module: torch.nn.Module,
        example_args: tuple[NestedArray, ...],
        *,
        threads: int = 1,
        samples: Sequence[np.ndarray] | None = None,
        verify_outputs: bool = True,
    ) -> None:
        graph = to_onnx(module, example_args, weights_as_inputs=False)
        self.spec = graph.spec
        self.inputs, self.outputs = graph.inputs, graph.outputs
        self.initial = module_weights(module)
        self.layout = layout_of(self.initial)
        self.proto = self._finish(graph.proto, example_args, samples)
        self._session = OnnxSession(self.proto, self.inputs, self.outputs, threads)
        if verify_outputs:
            verify(self, module, example_args, samples=samples)

    def _finish(
        self, proto: bytes, example_args: tuple[NestedArray, ...], samples: Sequence[np.ndarray] | None
    ) -> bytes:
        """The serialised model to run, derived from the exported one."""
        return proto

    def bind(self, weights: Weights) -> None:
        check_weights(self.layout, weights, finite=False)
        other = next((name for name, own in self.initial.items() if own.tobytes() != weights[name].tobytes()), None)
        if other is not None:
            raise WeightsFrozen(
                f"{type(self).__name__} is frozen and was built with different weights ({other!r} differs); "
                "engine 'onnx' takes new ones",
                leaf=other,
            )

    def run(self, bound: None, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._session.run(inputs)
