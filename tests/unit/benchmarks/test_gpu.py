"""What the GPU's benchmark measures with is right on the CPU, so that no time on a GPU is spent on its mistakes."""

from __future__ import annotations

import numpy as np

from benchmarks.gpu import OnnxOnDevice, mlp
from brayx.engines.torch import TorchEngine


def test_onnx_runtime_on_a_device_computes_what_torch_does_from_batches_of_any_size():
    module, example = mlp()
    device, reference = OnnxOnDevice(module, example, "CPUExecutionProvider"), TorchEngine(module, example)
    rng = np.random.default_rng(0)
    for size in (1, 64, 1, 64):  # a size that comes again is copied into the same memory
        batch = [rng.normal(size=(size, 4)).astype(np.float32)]
        want = reference.run(reference.bind(reference.initial), batch)
        for got, expected in zip(device.run(None, batch), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
