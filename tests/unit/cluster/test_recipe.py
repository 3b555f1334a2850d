"""What a named model is made of: a module without its weights, that comes back whole; arguments by name."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from ray import cloudpickle

from brayx.cluster.named_model import Recipe, prepare
from brayx.errors import ModelError, ShapeMismatch
from brayx.model.config import ModelConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Tied(torch.nn.Module):
    """Has what modules may have: shared weights, buffers that are saved and buffers that are not, frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(256, 256)
        self.second = torch.nn.Linear(256, 256)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("mean", torch.full((256,), 3.0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, obs, mask):
        return self.second(self.first(obs - self.mean)) * mask.unsqueeze(-1) + self.table.sum()


CONFIG = ModelConfig(module="unused")
EXAMPLE = (np.ones((1, 256), np.float32), np.ones(1, np.float32))


def recipe_of(module, args=EXAMPLE, kwargs=None):
    return prepare(module, args, kwargs or {}, CONFIG)


def test_a_module_comes_back_as_it_was():
    module = Tied()
    recipe, weights = recipe_of(module)
    again = recipe.module(weights)
    inputs = [torch.as_tensor(array) for array in EXAMPLE]
    with torch.inference_mode():
        assert torch.equal(again(*inputs), module(*inputs))
    assert again.second.weight is again.first.weight, "what was shared is shared"
    assert not again.first.bias.requires_grad
    assert again.second.bias.requires_grad
    assert all(tensor.device.type == "cpu" for tensor in module.state_dict().values()), "the original is left alone"


def test_weights_do_not_travel_in_it():
    recipe, weights = recipe_of(Tied())
    assert len(cloudpickle.dumps(recipe)) < sum(array.nbytes for array in weights.values()) / 10


def test_a_module_is_the_callers_own():
    recipe, weights = recipe_of(Tied())
    with torch.no_grad():
        recipe.module(weights).mean.fill_(7)
    assert (weights["mean"] == 3).all()


def test_arguments_by_name_take_their_place():
    recipe, _ = recipe_of(Tied(), EXAMPLE[:1], {"mask": EXAMPLE[1]})
    assert [leaf.path for leaf in recipe.spec.inputs] == ["obs", "mask"]
    assert recipe.positional((1,), {"mask": 2}) == (1, 2)
    assert recipe.positional((), {"mask": 2, "obs": 1}) == (1, 2)
    with pytest.raises(ShapeMismatch, match="expected mask after 1 others, got msak"):
        recipe.positional((1,), {"msak": 2})
    with pytest.raises(ShapeMismatch, match="expected mask after 1 others, got obs"):
        recipe.positional((1,), {"obs": 2})


def test_a_model_that_does_not_fit_its_example_is_refused():
    with pytest.raises(ModelError, match=r"forward_args and forward_kwargs: .* got msk"):
        prepare(Tied(), EXAMPLE[:1], {"msk": EXAMPLE[1]}, CONFIG)
    with pytest.raises(ModelError, match="fails on its own forward_args"):
        prepare(Tied(), (np.ones((1, 3), np.float32), EXAMPLE[1]), {}, CONFIG)
    with pytest.raises(ModelError, match=r"must be a torch\.nn\.Module, got int"):
        prepare(3, EXAMPLE, {}, CONFIG)


def test_code_that_is_not_here_is_told(monkeypatch):
    recipe, weights = recipe_of(Tied())
    lost = Recipe(**{**vars(recipe), "skeleton": b"cnowhere\nthing\n."})
    with pytest.raises(ModelError, match="code cannot be loaded here: No module named 'nowhere'"):
        lost.module(weights)
