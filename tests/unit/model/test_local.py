"""A model in process on real engines: results, hot swaps without mixing, refusals."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from brayx.engines.onnx import OnnxEngine
from brayx.engines.torch import TorchEngine
from brayx.errors import BadWeights, ModelError, ShapeMismatch
from brayx.model.local import LocalModel


class Scale(torch.nn.Module):
    """Answers with its one weight, so that a result tells which weights made it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, obs):
        return {"scaled": obs["x"] * self.factor, "factor": obs["x"][:, 0] * 0 + self.factor}


EXAMPLE = ({"x": np.zeros((1, 3), np.float32)},)
OBS = {"x": np.array([1, 2, 3], np.float32)}


@pytest.fixture(scope="module")
def onnx_scale():
    return OnnxEngine(Scale(), EXAMPLE)


@pytest.fixture(params=["onnx", "torch"])
def engine(request, onnx_scale):
    return onnx_scale if request.param == "onnx" else TorchEngine(Scale(), EXAMPLE)


@pytest.fixture
async def make():
    made = []

    def build(*args, **options):
        made.append(LocalModel(*args, **options))
        return made[-1]

    yield build
    for model in made:
        await model.close()


def factor(value):
    return {"factor": np.array([value], np.float32)}


async def test_forward_of_one_and_of_many(make, engine):
    model = make(engine)
    alone = await model.forward(OBS)
    np.testing.assert_array_equal(alone.outputs["scaled"], [1, 2, 3])
    assert alone.policy_version == 0
    assert alone.outputs["factor"].shape == ()
    together = await asyncio.gather(*[model.forward({"x": np.full(3, i, np.float32)}) for i in range(10)])
    for i, forward in enumerate(together):
        np.testing.assert_array_equal(forward.outputs["scaled"], [i, i, i])


async def test_load_swaps_weights_and_version_together(make, engine):
    model = make(engine, weights=factor(5), version=3)
    assert (await model.forward(OBS)).policy_version == 3
    model.load(4, factor(7))
    forward = await model.forward(OBS)
    assert forward.policy_version == model.version == 4
    assert forward.outputs["factor"] == 7


async def test_a_refused_load_leaves_the_weights_in_use(make, engine):
    model = make(engine)
    with pytest.raises(BadWeights, match="factor"):
        model.load(1, {"factor": np.ones(2, np.float32)})
    assert (await model.forward(OBS)).policy_version == 0


async def test_results_never_mix_versions_under_swaps(make, engine):
    batches = []
    model = make(engine, max_batch_size=8, weights=factor(0), on_batch=lambda rows, *_: batches.append(rows))
    done = False

    async def swap():
        version = 0
        while not done:
            version += 1
            model.load(version, factor(version))
            await asyncio.sleep(0)

    async def act():
        last = 0
        for _ in range(50):
            forward = await model.forward(OBS)
            assert forward.outputs["factor"] == forward.policy_version
            assert forward.policy_version >= last
            last = forward.policy_version

    swapper = asyncio.create_task(swap())
    await asyncio.gather(*[act() for _ in range(16)])
    done = True
    await swapper
    assert max(batches) == 8
    assert model.version > 5


async def test_a_misfit_is_refused_before_it_meets_others(make, engine):
    batches = []
    model = make(engine, on_batch=lambda rows, *_: batches.append(rows))
    results = await asyncio.gather(
        model.forward(OBS), model.forward({"x": np.zeros(4)}), model.forward(OBS), return_exceptions=True
    )
    assert isinstance(results[1], ShapeMismatch)
    assert "x: [4] float64" in results[1].message
    assert results[0].outputs["factor"] == results[2].outputs["factor"] == 1
    assert batches == [2]


async def test_closed_model_refuses(make, engine):
    model = make(engine)
    await model.forward(OBS)
    await model.close()
    with pytest.raises(ModelError, match="closed"):
        await model.forward(OBS)
