"""ONNX Runtime with one set of weights as constants of the graph, in float32 or quantised to int8.

In float32 it is somewhat faster than with bound weights, because it can fold them. Both are formats that `brayx export`
writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from brayx.engines.base import Engine, Tolerance, check_weights, layout_of
from brayx.engines.export import OnnxGraph, noisy_leaves, to_onnx, verify
from brayx.engines.onnx import open_session
from brayx.engines.torch import module_weights
from brayx.errors import ModelError, WeightsFrozen, first_line
from brayx.temporary import temporary_folder
from brayx.types import NestedArray, Weights

_ROWS = 256
"""Rows of noise for calibration without samples."""
_BATCH = 32
_MARGIN = 2.0
"""Calibration also sees every float input this many times further from its mean: samples are few, and values beyond
their range would be clipped. Relative to the mean, the result is the same whether or not the model normalises."""
_OPERATORS = ["Conv", "ConvTranspose", "Gemm", "MatMul"]


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
        graph: the module's graph with weights inside, if it was exported before, which takes seconds.

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
        graph: OnnxGraph | None = None,
    ) -> None:
        graph = graph or to_onnx(module, example_args, weights_as_inputs=False)
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
        other = next(
            (name for name, initial in self.initial.items() if initial.tobytes() != weights[name].tobytes()), None
        )
        if other is not None:
            raise WeightsFrozen(
                f"{type(self).__name__} is frozen and was built with different weights ({other!r} differs); "
                "engine 'onnx' takes new ones",
                leaf=other,
            )

    def run(self, bound: None, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._session.run(inputs)


class _Samples(CalibrationDataReader):  # type: ignore[misc]  # it has no type annotations
    """Sample inputs in batches."""

    def __init__(self, feed: Mapping[str, np.ndarray]) -> None:
        rows = len(next(iter(feed.values())))
        both = (feed, {name: _wider(leaf) for name, leaf in feed.items()})
        self._parts: Iterator[dict[str, np.ndarray]] = (
            {name: leaf[start : start + _BATCH] for name, leaf in part.items()}
            for part in both
            for start in range(0, rows, _BATCH)
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch; None after the last."""
        return next(self._parts, None)


def _wider(leaf: np.ndarray) -> np.ndarray:
    if leaf.dtype.kind != "f":
        return leaf
    mean = leaf.mean(0)
    wider: np.ndarray = (mean + _MARGIN * (leaf - mean)).astype(leaf.dtype)
    return wider


class Int8Engine(FrozenOnnxEngine):
    """A quantised `FrozenOnnxEngine`, calibrated on ``samples``.

    Weights and activations are quantised. The file is a quarter of the size, and runs are faster where matrices are
    large; a small network is mostly overhead and gains nothing. Outputs differ from torch's by a few percent of their
    peak, so the tolerance is a share of the peak. A chosen action may differ where two are almost equal, so for actions
    the tolerance is a share of the rows.

    Raises:
        ModelError: the graph cannot be quantised.
    """

    tolerance: ClassVar[Tolerance] = Tolerance(rtol=0.0, atol=1e-5, of_peak=0.1, differing=0.1)

    def _finish(
        self, proto: bytes, example_args: tuple[NestedArray, ...], samples: Sequence[np.ndarray] | None
    ) -> bytes:
        model = onnx.load_model_from_string(proto)
        used = {value.name for value in model.graph.input}
        leaves = samples if samples is not None else noisy_leaves(example_args, _ROWS)
        feed: dict[str, Any] = {name: leaf for name, leaf in zip(self.inputs, leaves, strict=True) if name in used}
        with temporary_folder("int8") as folder, _quiet():
            path = folder / "model.onnx"
            try:
                # Both unsigned: an x86 CPU without VNNI sums products of unsigned and signed bytes in 16 bits, which
                # saturate. Other operators stay float: they take little time, and quantising them costs precision.
                quantize_static(
                    model,
                    path,
                    _Samples(feed),
                    activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QUInt8,
                    op_types_to_quantize=_OPERATORS,
                    per_channel=True,
                )
            except Exception as error:
                raise ModelError(f"the model cannot be quantised: {first_line(error)}") from error
            return path.read_bytes()


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops the quantiser's advice to preprocess the model, which the exporter has already done.

    The quantiser calls ``logging.warning``, which adds a handler to a root logger without one; it is removed again.
    Other threads log as usual meanwhile.
    """
    root = logging.getLogger()
    before = root.handlers[:]
    root.addFilter(_no_advice)
    try:
        yield
    finally:
        root.removeFilter(_no_advice)
        for handler in root.handlers[:]:
            if handler not in before:
                root.removeHandler(handler)


def _no_advice(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING or "onnxruntime" not in record.pathname
