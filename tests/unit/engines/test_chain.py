"""Seats of small networks compute with NumPy: which networks, and the same results as torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.engines import chain
from brayx.engines.onnx import OnnxEngine
from brayx.engines.torch import TorchEngine
from brayx.errors import EngineMismatch
from tests.unit.engines.models import assert_same, changed


def mlp(*layers):
    torch.manual_seed(0)
    return torch.nn.Sequential(*layers), (np.zeros((1, 3), np.float32),)


def is_chained(engine, batch_size):
    """Whether a seat computes with NumPy: it then owns no ONNX Runtime binding for its inputs."""
    return engine.seat(engine.bind(engine.initial), batch_size).run.__module__ == "brayx.engines.chain"


def test_a_seat_computes_a_small_mlp_with_numpy():
    linear = torch.nn.Linear
    engine = OnnxEngine(*mlp(linear(3, 64), torch.nn.Tanh(), linear(64, 64), torch.nn.ReLU(), linear(64, 2)))
    reference = TorchEngine(*mlp(linear(3, 64), torch.nn.Tanh(), linear(64, 64), torch.nn.ReLU(), linear(64, 2)))
    for batch_size, small in [(1, True), (64, True), (65, False)]:
        assert is_chained(engine, batch_size) is small
        weights = changed(engine, batch_size)
        seat = engine.seat(engine.bind(weights), batch_size)
        for seed in range(2):
            inputs = np.random.default_rng(seed).standard_normal((batch_size, 3), np.float32)
            seat.inputs[0][...] = inputs
            seat.run()
            assert_same(seat.outputs, reference.run(reference.bind(weights), [inputs]))


def test_building_the_engine_refuses_a_seat_with_other_results(monkeypatch):
    monkeypatch.setitem(chain._ACTIVATIONS, "Tanh", lambda array: np.maximum(array, 0.0, out=array))
    layers = mlp(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    with pytest.raises(EngineMismatch, match="seat") as differing:
        OnnxEngine(*layers)
    assert differing.value.details["batch_size"] == 1


class Residual(torch.nn.Module):
    """A residual layer: its output also bypasses the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, obs):
        hidden = self.first(obs)
        return self.second(hidden) + hidden


class Doubled(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, obs):
        return super().forward(obs) * 2


@pytest.mark.parametrize(
    "layers",
    [
        [torch.nn.Linear(3, 2), torch.nn.Sigmoid()],
        [torch.nn.Tanh(), torch.nn.Linear(3, 2)],
        [torch.nn.Linear(3, 2, bias=False)],
        [Residual()],
        [Doubled()],
    ],
    ids=["activation", "order", "bias", "branch", "constant"],
)
def test_other_models_use_onnx_runtime(layers):
    engine = OnnxEngine(*mlp(*layers))
    assert not is_chained(engine, 2)
