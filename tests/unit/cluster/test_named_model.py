"""Parts of a named model: its module without weights, and its in-process store after losses and failed starts."""

from __future__ import annotations

import asyncio
import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray import cloudpickle
from ray.serve.exceptions import RayServeException

from brayx.cluster import named_model as named
from brayx.cluster.named_model import Recipe, prepare
from brayx.cluster.weight_store import WeightStore
from brayx.errors import ModelError, ShapeMismatch, StartupError
from brayx.model.checkpoints import Checkpoints
from brayx.model.config import ModelConfig
from brayx.tracking import Trial


class RestartedStore:
    """The handle of a weight store whose actor was restarted after version 5."""

    def __init__(self, last=(5, 50)):
        self.store = WeightStore(last=last)

    def restore(self, version, step, weights):
        return self.store.restore(version, step, [weights])

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    loop = asyncio.new_event_loop()

    def call(method, *args, timeout_s=0):
        answer = method(*args)
        return loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer

    monkeypatch.setattr(named, "call_with_retry", call)
    monkeypatch.setattr(named, "taken", lambda reference, timeout_s: reference)
    monkeypatch.setattr(named, "_GIVEN_BACK_S", 0.05)
    yield
    loop.close()


def weights(value):
    return {"factor": np.array([value], np.float32)}


@pytest.fixture
def trial(tracking_db):
    made = Trial.open("brayx-models", "m", tracking_db)
    checkpoints = Checkpoints(made, 1)
    assert checkpoints.offer(weights(4), version=4, step=40)
    checkpoints.close()
    return made


def test_a_store_that_lost_its_weights_takes_those_of_the_newest_checkpoint(trial):
    store = RestartedStore()
    version, first = named.first_weights("m", store, trial)
    assert (version, first["factor"]) == (4, 4)
    assert store.newest()[:2] == (4, 40)
    assert store.publish(41, [weights(6)]) == 6, "versions continue from the last one"


def test_weights_in_the_store_come_before_a_checkpoint(trial):
    store = RestartedStore()
    store.store.publish(60, [weights(6)])
    version, first = named.first_weights("m", store, trial)
    assert (version, first["factor"]) == (6, 6)


@pytest.mark.parametrize("last", [(0, 0), (5, 50)], ids=["never published", "no checkpoint"])
def test_a_missing_start_is_reported_with_a_remedy(trial, tracking_db, monkeypatch, last):
    monkeypatch.setattr(named, "ANSWER_S", 0.1)
    other_trial = trial if last == (0, 0) else Trial.open("brayx-models", "empty", tracking_db)
    with pytest.raises(StartupError, match=r"model 'm' .*; .*`override_model=True`"):
        named.first_weights("m", RestartedStore(last), other_trial)


def test_missing_replicas_are_reported_with_a_remedy(monkeypatch):
    def nowhere(name):
        raise RayServeException("no application")

    monkeypatch.setattr(named.serve, "get_app_handle", nowhere)
    with pytest.raises(StartupError, match=r"no application; .*`override_model=True`"):
        named.deployed("m", 0)


@pytest.mark.parametrize(("token", "removed"), [("mine", ["m"]), ("another's", [])])
def test_a_failed_start_withdraws_only_what_it_made(monkeypatch, token, removed):
    ended = []
    monkeypatch.setattr(named, "find", lambda name: RestartedStore())
    monkeypatch.setattr(named, "recipe_of", lambda store, timeout_s: SimpleNamespace(token=token))
    monkeypatch.setattr(named, "remove", lambda name, expected: ended.append(name))
    named.withdraw("m", "mine", None)
    assert ended == removed


def test_a_model_ends_even_if_its_replicas_do_not(monkeypatch, caplog, trial):
    """Otherwise its name would stay taken and its trial running for ever."""
    there = [RestartedStore()]
    monkeypatch.setattr(named, "find", lambda name: there[0] if there else None)
    monkeypatch.setattr(named, "recipe_of", lambda store, timeout_s: SimpleNamespace(token="mine", trial=trial))
    monkeypatch.setattr(named, "delete_application", lambda name, timeout_s: False)
    monkeypatch.setattr(named, "end_weight_store", there.remove)
    named.withdraw("m", "mine", None)
    assert not there
    assert trial.status == "KILLED"
    assert "model 'm' has ended, but" in caplog.text


cloudpickle.register_pickle_by_value(sys.modules[__name__])


class SharedWeights(torch.nn.Module):
    """A module with shared weights, persistent and non-persistent buffers, and frozen parameters."""

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


def test_a_module_round_trips():
    module = SharedWeights()
    recipe, weights = recipe_of(module)
    again = recipe.module(weights)
    inputs = [torch.as_tensor(array) for array in EXAMPLE]
    with torch.inference_mode():
        assert torch.equal(again(*inputs), module(*inputs))
    assert again.second.weight is again.first.weight, "shared weights stay shared"
    assert not again.first.bias.requires_grad
    assert again.second.bias.requires_grad
    assert all(tensor.device.type == "cpu" for tensor in module.state_dict().values()), "the original is unchanged"


def test_a_pickled_module_holds_no_weights():
    recipe, weights = recipe_of(SharedWeights())
    assert len(cloudpickle.dumps(recipe)) < sum(array.nbytes for array in weights.values()) / 10


def test_each_caller_owns_its_module():
    recipe, weights = recipe_of(SharedWeights())
    with torch.no_grad():
        recipe.module(weights).mean.fill_(7)
    assert (weights["mean"] == 3).all()


def test_named_arguments_take_their_position():
    recipe, _ = recipe_of(SharedWeights(), EXAMPLE[:1], {"mask": EXAMPLE[1]})
    assert [leaf.path for leaf in recipe.spec.inputs] == ["obs", "mask"]
    assert recipe.positional((1,), {"mask": 2}) == (1, 2)
    assert recipe.positional((), {"mask": 2, "obs": 1}) == (1, 2)
    with pytest.raises(ShapeMismatch, match="expected mask after 1 others, got msak"):
        recipe.positional((1,), {"msak": 2})
    with pytest.raises(ShapeMismatch, match="expected mask after 1 others, got obs"):
        recipe.positional((1,), {"obs": 2})


def test_a_model_that_fails_on_its_example_is_refused():
    with pytest.raises(ModelError, match=r"forward_args and .*: .* got msk"):
        prepare(SharedWeights(), EXAMPLE[:1], {"msk": EXAMPLE[1]}, CONFIG)
    with pytest.raises(ModelError, match="fails on its own forward_args"):
        prepare(SharedWeights(), (np.ones((1, 3), np.float32), EXAMPLE[1]), {}, CONFIG)
    with pytest.raises(ModelError, match=r"must be a torch\.nn\.Module, got int"):
        prepare(3, EXAMPLE, {}, CONFIG)


def test_missing_code_is_named(monkeypatch):
    recipe, weights = recipe_of(SharedWeights())
    lost = Recipe(**{**vars(recipe), "skeleton": b"cnowhere\nthing\n."})
    with pytest.raises(ModelError, match="No module named 'nowhere'"):
        lost.module(weights)
