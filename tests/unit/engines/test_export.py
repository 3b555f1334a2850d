"""Exports: what they refuse, and the comparison of an engine with torch."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from brayx.engines.export import to_onnx, verify
from brayx.engines.onnx import OnnxEngine
from brayx.engines.torch import TorchEngine
from brayx.errors import EngineMismatch, ModelError
from tests.unit.engines.models import awkward, cartpole


def test_the_awkward_model_is_exported_correctly_and_silently(capfd):
    module, example = awkward()
    module.train()
    engine = OnnxEngine(module, example)  # compares with torch itself, with other weights too
    assert module.training, "the caller's module is left alone"
    assert [leaf.path for leaf in engine.spec.outputs] == ["best", "h", "obs", "positive", "twice/0", "twice/1"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("traced", [True, False])
def test_an_export_does_not_capture_other_threads_output(traced):
    seen = set()

    class RecordsStdout(torch.nn.Module):
        def forward(self, obs):
            seen.add(id(sys.stdout))
            return obs * 2

    to_onnx(RecordsStdout(), (np.zeros((1, 2), np.float32),), traced=traced)
    assert seen == {id(sys.stdout)}


def test_verify_passes_an_engine_that_computes_the_same():
    verify(OnnxEngine(*cartpole()), *cartpole(), batch_sizes=(1, 3))


class _Stale(TorchEngine):
    """Ignores the bound weights, like an export with folded weights."""

    def run(self, bound, inputs):
        return super().run(super().bind(self.initial), inputs)


class _FrozenBatch(TorchEngine):
    """Correct at batch size 2 only, like an export with a frozen batch axis."""

    def run(self, bound, inputs):
        outputs = super().run(bound, inputs)
        return [outputs[0], outputs[1] * (1 if len(inputs[0]) == 2 else np.float32(1.01))]


class _Nan(TorchEngine):
    def run(self, bound, inputs):
        logits, value = super().run(bound, inputs)
        return [logits, np.full_like(value, np.nan)]


class _WrongShape(TorchEngine):
    def run(self, bound, inputs):
        logits, value = super().run(bound, inputs)
        return [logits, value[:, None]]


@pytest.mark.parametrize(
    ("engine", "leaf"), [(_Stale, None), (_FrozenBatch, "value"), (_Nan, "value"), (_WrongShape, "value")]
)
def test_verify_catches_wrong_engines(engine, leaf):
    with pytest.raises(EngineMismatch, match="worst leaf") as caught:
        verify(engine(*cartpole()), *cartpole())
    assert leaf is None or caught.value.details["leaf"] == leaf
    assert engine is not _Stale or caught.value.details["weights"] == "other"


class FixedBatch(torch.nn.Module):
    def forward(self, obs):
        return obs.reshape(2, 4) * 2


def test_a_model_with_a_frozen_batch_axis_is_refused():
    with pytest.raises(ModelError, match="cannot be exported"):
        OnnxEngine(FixedBatch(), (np.zeros((1, 4), np.float32),))


class Random(torch.nn.Module):
    """Draws noise in training and in eval mode; ``op`` decides whether it can be exported."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, obs):
        return obs + self.op(torch.ones_like(obs))


@pytest.mark.parametrize(("op", "error"), [(torch.rand_like, EngineMismatch), (torch.poisson, ModelError)])
def test_the_error_says_that_a_model_is_random_in_forward(op, error):
    with pytest.raises(error, match=r"random .*'output'.*self\.training"):
        OnnxEngine(Random(op), (np.ones((1, 2), np.float32),))


class ChannelsLast(torch.nn.Module):
    """Tracing exports its transpose with negative axes, which ONNX Runtime refuses."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 2, 3)

    def forward(self, image):
        return self.convolution(image.movedim(-1, -3)).flatten(1)


def test_a_graph_that_tracing_breaks_is_exported_without_tracing():
    module, example = ChannelsLast(), (np.ones((1, 4, 4, 2), np.float32),)
    assert to_onnx(module, example, traced=True).traced
    verify(OnnxEngine(module, example, traced=True), module, example)


class Constants(torch.nn.Module):
    """Tensors that are no weights: one that ``forward`` makes, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("fixed", torch.tensor([3.0, 0.0]), persistent=False)

    def forward(self, obs):
        return self.factor * obs * torch.tensor([2.0, 1.0]) + self.fixed


@pytest.mark.parametrize("traced", [False, True])
def test_tensors_that_are_no_weights_stay_in_the_graph(traced):
    engine = OnnxEngine(Constants(), (np.ones((1, 2), np.float32),), traced=traced)
    (output,) = engine.run(engine.bind({"factor": np.array([5.0], np.float32)}), [np.ones((3, 2), np.float32)])
    assert output.tolist() == [[13.0, 5.0]] * 3
