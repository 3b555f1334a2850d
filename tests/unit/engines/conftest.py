"""The engines that several tests compare: the same CartPole network on ONNX Runtime and on torch."""

from __future__ import annotations

import pytest

from brayx.engines.onnx import OnnxEngine
from brayx.engines.torch import TorchEngine
from tests.unit.engines.models import cartpole


@pytest.fixture(scope="module")
def onnx() -> OnnxEngine:
    return OnnxEngine(*cartpole())


@pytest.fixture(scope="module")
def reference() -> TorchEngine:
    return TorchEngine(*cartpole())
