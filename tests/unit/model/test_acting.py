"""The learned model acts at once, on torch, and switches to the job's engine by itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from brayx.engines import build_engine
from brayx.engines.onnx import OnnxEngine
from brayx.engines.torch import TorchEngine
from brayx.errors import ConfigError
from brayx.metrics import Recorder
from brayx.model.acting import ActingModel
from brayx.model.build import exporting
from brayx.model.config import ModelConfig
from tests.waiting import WAIT_S, until_awaited

OBS = np.array([1.0, 2.0], np.float32)


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, obs):
        return {"value": obs.sum(-1) * self.factor}


class ByValue(Scale):
    """What one run records of it is not what it computes, and no exporter takes it whole."""

    def forward(self, obs):
        if float(obs.sum()) > 2.5:
            obs = -obs
        return super().forward(obs)


def factor(value):
    return {"factor": np.array([value], np.float32)}


async def value_of(acting):
    outputs, version = await acting.model.forward(OBS)
    return float(outputs["value"]), version


def engine_of(acting):
    return type(acting.model._versions._engine)


def made(module, **options):
    return ActingModel(ModelConfig(module="m", **options), module, (torch.zeros(2, 2),), Recorder())


async def test_it_acts_before_its_engine_is_built_and_with_the_newest_weights_after():
    module = Scale()
    acting, said, recorded = made(module), [], []
    assert engine_of(acting) is TorchEngine
    assert await value_of(acting) == (3.0, 0)
    acting.model.load(1, factor(2.0))
    assert await value_of(acting) == (6.0, 1)
    torch.nn.init.zeros_(module.factor)  # it learns meanwhile
    thread = acting.build(said.append, recorded.append)
    acting.model.load(2, factor(5.0))
    thread.join(WAIT_S)
    assert engine_of(acting) is OnnxEngine
    assert await value_of(acting) == (15.0, 2)
    assert re.fullmatch(r"the model acts with engine onnx from policy version [12] on, no longer with torch", *said)
    assert re.fullmatch(r"onnx from version [12]", *recorded)
    acting.model.load(3, factor(7.0))
    assert await value_of(acting) == (21.0, 3)
    await acting.close()


async def test_a_model_that_cannot_be_exported_goes_on_acting_on_torch_and_says_so(caplog):
    acting, said, recorded = made(ByValue()), [], []
    acting.build(said.append, recorded.append).join(WAIT_S)
    (line,) = said
    assert line.startswith("the model keeps acting with torch, since engine onnx could not be built: ")
    assert "engine onnx could not be built: " in caplog.text, "also where lines are only logged, as with brayx.serve"
    assert recorded == ["torch"]
    acting.model.load(1, factor(2.0))
    assert await value_of(acting) == (-6.0, 1)
    await acting.close()


@pytest.mark.parametrize("engine", ["onnx", "onnx-frozen"])
async def test_weights_that_stay_act_on_torch_first_too_and_a_pinned_session_keeps_its_version(engine):
    module, config, said = Scale(), ModelConfig(module="m", engine=engine), []
    example = (torch.zeros(2, 2),)
    acting = ActingModel(
        config, module, example, Recorder(), version=7, weights=factor(4.0),
        engine=lambda: build_engine(engine, module, example, weights=factor(4.0)),
    )  # fmt: skip
    pinned = acting.model.pinned()
    assert engine_of(acting) is TorchEngine
    assert await value_of(acting) == (12.0, 7)
    acting.build(said.append).join(WAIT_S)
    assert said == [f"the model acts with engine {engine} from policy version 7 on, no longer with torch"]
    assert engine_of(acting) is not TorchEngine
    assert await value_of(acting) == (12.0, 7)
    outputs, version = await pinned.forward(OBS)
    assert (float(outputs["value"]), version) == (12.0, 7)
    await acting.close()


async def test_where_torch_is_asked_for_nothing_else_is_built():
    acting, said, recorded = made(Scale(), engine="torch"), [], []
    acting.build(said.append, recorded.append).join(WAIT_S)
    assert (said, recorded) == ([], ["torch"])
    await acting.close()


async def test_closing_a_model_drops_a_build_that_has_not_begun():
    acting, said, recorded = made(Scale()), [], []
    with exporting:  # another model's export
        thread = acting.build(said.append, recorded.append)
        await acting.close()
        assert thread.is_alive()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert engine_of(acting) is TorchEngine
    assert (said, recorded) == ([], [])


@pytest.mark.parametrize("engine", ["onnx-frozen", "int8"])
def test_an_engine_that_takes_no_new_weights_is_refused(engine):
    with pytest.raises(ConfigError, match="is frozen and takes no new weights"):
        made(Scale(), engine=engine)


@pytest.mark.parametrize("keep", [2, 3])
async def test_where_others_can_be_fetched_it_keeps_no_more_versions_than_it_is_told_to(keep):
    async def fetch(version):
        return factor(float(version))

    config = ModelConfig(module="m", max_versions=keep)
    acting = ActingModel(config, Scale(), (torch.zeros(2, 2),), Recorder(), fetch=fetch)
    for version in range(1, 7):
        _, made_by = await acting.model.forward(OBS, version=version)
        assert made_by == version
    # The thread that computed may still hold the version before.
    await until_awaited(lambda: acting.model._versions.known() == [0, *range(8 - keep, 7)])
    await acting.close()
