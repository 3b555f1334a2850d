"""Calls torch's exporters to ONNX, which print and warn by themselves. Knows nothing of models' signatures."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence

import torch


def trace(
    module: torch.nn.Module,
    leaves: tuple[torch.Tensor, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    batched: Sequence[str],
    weights_as_inputs: bool = False,
    opset: int | None = None,
) -> bytes:
    """The ONNX model of one run, by torch's older exporter; raises whatever that raises.

    Args:
        module: takes and returns flat leaves; in eval mode.
        leaves: its arguments.
        inputs, outputs: their names in the graph.
        batched: those with a batch axis.
        weights_as_inputs: False makes the weights constants.
        opset: version of ONNX's operators; None: the exporter's own.
    """
    file = io.BytesIO()
    with quiet():
        # Tracing records only one branch of a condition on values, and `verify` may not try values of the other.
        warnings.simplefilter("error", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        torch.onnx.export(
            module,
            leaves,
            file,  # type: ignore[arg-type]
            dynamo=False,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes={name: {0: "batch"} for name in batched},
            export_params=not weights_as_inputs,
            keep_initializers_as_inputs=weights_as_inputs,
            do_constant_folding=not weights_as_inputs,
            opset_version=opset,
        )
    return file.getvalue()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the exporter on stderr and stdout: missing torchvision, internal deprecations, failed graphs.

    Standard output is the whole process's: other threads print to it meanwhile.
    """
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # The tracer turns this log on regardless of `verbose`, and the log prints to stdout.
    log, torch._C._jit_onnx_log = torch._C._jit_onnx_log, lambda *message: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._jit_onnx_log = log
        logger.setLevel(level)
