"""The torch engine: any exception of a module, devices, compilation, and options that it lacks."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from benchmarks.gpu import nature_cnn
from brayx.engines import build_engine
from brayx.engines.export import verify
from brayx.engines.torch import TorchEngine, example_leaves
from brayx.errors import ConfigError, ModelError
from tests.unit.engines.models import assert_same, awkward, cartpole, changed, observations


class FailsOnSomeSizes(torch.nn.Module):
    """Fails on some batch sizes, with errors of different types."""

    def forward(self, obs):
        if len(obs) == 3:
            raise AssertionError("three")
        if len(obs) == 4:
            return {}["four"]
        if len(obs) == 5:
            return obs.five
        return obs


@pytest.mark.parametrize(
    ("rows", "cause"), [(3, "AssertionError: three"), (4, "KeyError: 'four'"), (5, "AttributeError: .*'five'")]
)
def test_any_exception_of_a_module_is_a_model_error(rows, cause):
    engine = TorchEngine(FailsOnSomeSizes(), (np.zeros((1, 2), np.float32),))
    with pytest.raises(ModelError, match=f"batch of {rows}: {cause}"):
        engine.run(engine.bind(engine.initial), [np.zeros((rows, 2), np.float32)])


ELSEWHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", ELSEWHERE)
@pytest.mark.parametrize("model", [cartpole, awkward, nature_cnn])
def test_the_torch_engine_agrees_between_a_device_and_the_cpu(device, model):
    engine = TorchEngine(*model(), device=device)
    verify(engine, *model(), batch_sizes=(1, 64))
    outputs = engine.run(engine.bind(engine.initial), example_leaves(model()[1], 3))
    assert all(type(leaf) is np.ndarray and leaf.flags.owndata for leaf in outputs)


@pytest.mark.cluster
@pytest.mark.slow  # compiles
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("device", ELSEWHERE)
def test_a_compiled_engine_agrees_and_compiles_once_for_all_weight_sets(device):
    engine = build_engine("torch", *cartpole(), device=device, compiled=True)  # which verifies it
    reference = TorchEngine(*cartpole())
    inputs = observations(7)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(3):
            weights = changed(engine, seed)
            assert_same(engine.run(engine.bind(weights), inputs), reference.run(reference.bind(weights), inputs))


def test_unsupported_options_are_refused():
    with pytest.raises(ConfigError, match=r"device.*'torch'") as refused:
        build_engine("onnx", *cartpole(), device="cuda")
    assert refused.value.details == {"engine": "onnx"}
    with pytest.raises(ConfigError, match="'tpu', expected cpu or cuda"):
        build_engine("torch", *cartpole(), device="tpu")
    with pytest.raises(ConfigError, match=f"finds {torch.cuda.device_count()} GPUs"):
        build_engine("torch", *cartpole(), device="cuda:99")
