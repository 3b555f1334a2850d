"""ONNX Runtime in int8: weights and activations are quantised, with ranges from sample inputs. Frozen.

The file is a quarter of the size, and runs are faster where matrices are large; a small network is mostly overhead and
gains nothing. Outputs differ from torch's by a few percent of their peak, so the tolerance is a share of the peak. A
chosen action may differ where two are almost equal, so for actions the tolerance is a share of the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from brayx.engines.base import Tolerance
from brayx.engines.export import noisy_leaves
from brayx.engines.frozen import FrozenOnnxEngine
from brayx.errors import ModelError, first_line
from brayx.temporary import temporary_folder
from brayx.types import NestedArray

_ROWS = 256
"""Rows of noise for calibration without samples."""
_BATCH = 32
_MARGIN = 2.0
"""Calibration also sees every float input this many times further from its mean: samples are few, and values beyond
their range would be clipped. Relative to the mean, the result is the same whether or not the model normalises."""
_OPERATORS = ["Conv", "ConvTranspose", "Gemm", "MatMul"]


class _Samples(CalibrationDataReader):  # type: ignore[misc]  # it has no type annotations
    """Sample inputs in batches."""

    def __init__(self, feed: Mapping[str, np.ndarray]) -> None:
        rows = len(next(iter(feed.values())))
        both = (feed, {name: _wider(leaf) for name, leaf in feed.items()})
        self._parts: Iterator[dict[str, np.ndarray]] = (
            {name: leaf[at : at + _BATCH] for name, leaf in part.items()}
            for part in both
            for at in range(0, rows, _BATCH)
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

    Raises:
        ModelError: the graph cannot be quantised.
    """

    tolerance: ClassVar[Tolerance] = Tolerance(rtol=0.0, atol=1e-5, of_peak=0.1, differing=0.1)

    def _finish(
        self, proto: bytes, example_args: tuple[NestedArray, ...], samples: Sequence[np.ndarray] | None
    ) -> bytes:
        import onnx

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
