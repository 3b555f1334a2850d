"""A small MLP in NumPy, for callers that step environments between runs.

ONNX Runtime is as fast alone. Where it alternates with NumPy environments, the two evict each other's code from the
CPU caches: with a 64x64 policy, collecting from 16 or 64 CartPoles takes 10% less time when both are NumPy. Used by
`onnx.py`; knows nothing of sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx

_LARGEST = 64**3
"""Most multiplications of a layer. Above this OpenBLAS starts threads, and the arithmetic dominates the run anyway."""

Activation = Callable[[np.ndarray], object]

_ACTIVATIONS: Mapping[str, Activation] = {
    "Tanh": lambda array: np.tanh(array, out=array),
    "Relu": lambda array: np.maximum(array, 0.0, out=array),
}


class Layer(NamedTuple):
    """A linear layer: names of its weight ``[out, in]`` and bias ``[out]``, and the in-place activation after it."""

    weight: str
    bias: str
    activation: Activation | None = None


def chain_of(
    proto: bytes, inputs: Sequence[str], outputs: Sequence[str], weights: Collection[str]
) -> tuple[Layer, ...]:
    """The layers of a serialised model that is a plain chain of linear layers; empty for any other model.

    Args:
        inputs, outputs, weights: names in the graph.
    """
    if len(inputs) != 1 or len(outputs) != 1:
        return ()
    layers: list[Layer] = []
    tensor = inputs[0]
    for node in onnx.load_model_from_string(proto).graph.node:
        if node.domain not in ("", "ai.onnx") or list(node.input[:1]) != [tensor]:  # a constant has no input
            return ()
        if node.op_type == "Gemm" and len(node.input) == 3 and set(node.input[1:]) <= set(weights) and _is_linear(node):
            layers.append(Layer(node.input[1], node.input[2]))
        elif node.op_type in _ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=_ACTIVATIONS[node.op_type])
        else:
            return ()
        tensor = node.output[0]
    return tuple(layers) if tensor == outputs[0] else ()


def chained(
    layers: Sequence[Layer], weights: Mapping[str, np.ndarray], given: np.ndarray, result: np.ndarray
) -> Callable[[], None] | None:
    """A function that computes ``result`` ``[B, out]`` from ``given`` ``[B, in]``; None if a layer is too large or not
    float32."""
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Activation | None]] = []
    source = given
    for index, layer in enumerate(layers):
        weight, bias = weights[layer.weight], weights[layer.bias]
        if len(given) * weight.size > _LARGEST or any(array.dtype != np.float32 for array in (weight, bias, source)):
            return None
        room = result if index == len(layers) - 1 else np.empty((len(given), len(weight)), np.float32)
        # Transpose once: BLAS also takes the weight as stored, but is slower on each run.
        steps.append((source, np.ascontiguousarray(weight.T), bias, room, layer.activation))
        source = room

    def run() -> None:
        for given, weight, bias, room, activate in steps:
            np.dot(given, weight, out=room)
            np.add(room, bias, out=room)
            if activate is not None:
                activate(room)

    return run


def _is_linear(node: Any) -> bool:
    has = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0, **has} == {
        "alpha": 1.0,
        "beta": 1.0,
        "transA": 0,
        "transB": 1,
    }
