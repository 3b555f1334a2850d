"""ONNX Runtime in int8: weights and activations quantised, by ranges seen on sample inputs. Frozen.

A quarter of the file, and faster where matrices are large; a small network is mostly overhead and gains nothing. Its
outputs are some hundredths of their peak off torch's, so it is measured by that, and a decision that is a near thing
may fall the other way: of outputs that are decisions it is measured in how many rows they do.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from brayx.engines.base import Tolerance
from brayx.engines.export import noisy_leaves
from brayx.engines.frozen import FrozenOnnxEngine
from brayx.errors import ModelError, first_line
from brayx.types import NestedArray

_ROWS = 256
"""Rows of noise to calibrate on when there are no samples."""
_BATCH = 32
_MARGIN = 2.0
"""Floats are calibrated on once more, so much further from their mean: samples are few, and what is beyond their range
is cut off. From their mean, so that it comes to the same whether a model normalises them itself."""
_OPERATORS = ["Conv", "ConvTranspose", "Gemm", "MatMul"]


class _Samples(CalibrationDataReader):  # type: ignore[misc]  # it is without types
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
    """As `FrozenOnnxEngine`, quantised; ``samples`` are what it is calibrated on.

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
        with tempfile.TemporaryDirectory(prefix="brayx-int8-") as folder, _quiet():
            path = Path(folder) / "model.onnx"
            try:
                # Both unsigned: an x86 without VNNI adds products of unsigned and signed bytes in 16 bits, which
                # saturate. The rest stays float, as it is not where the time goes, and each quantised step costs
                # exactness.
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
    """Keeps the quantiser's advice to preprocess the model off the root logger: the exporter has done that.

    The quantiser calls ``logging.warning``, which adds a handler to a root logger that has none; this removes it again.
    Lines that other threads log meanwhile are written as usual.
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
