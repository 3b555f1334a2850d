"""Frozen engines: correct, bound to their weights, and in int8 within the promised tolerance."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch

from benchmarks.gpu import nature_cnn
from brayx.engines import ENGINES, FROZEN, build_engine, refuse_frozen
from brayx.engines.export import verify
from brayx.engines.frozen import FrozenOnnxEngine, Int8Engine
from brayx.engines.torch import TorchEngine, example_leaves, module_weights
from brayx.errors import BadWeights, ConfigError, EngineMismatch, WeightsFrozen
from tests.unit.engines.models import WithAction, awkward, cartpole, observations

CLASSES = {"onnx-frozen": FrozenOnnxEngine, "int8": Int8Engine}


@pytest.fixture(scope="module", params=FROZEN)
def engine(request):
    return build_engine(request.param, *cartpole())


def test_build_engine_makes_the_requested_kind_and_it_is_frozen(engine):
    assert type(engine) in CLASSES.values()
    assert engine.frozen
    assert {CLASSES[kind].frozen for kind in FROZEN} == {True}
    assert not TorchEngine.frozen


def test_it_agrees_with_torch_at_every_batch_size(engine):
    verify(engine, *cartpole(), batch_sizes=(1, 7, 64), samples=observations(256, seed=3))


def test_it_accepts_its_own_weights_and_names_the_leaf_that_differs(engine):
    module, _ = cartpole()
    assert engine.bind(module_weights(module)) is None
    weights = module_weights(module)
    weights["value.layers.2.bias"] = weights["value.layers.2.bias"] + 1
    with pytest.raises(WeightsFrozen, match=r"'value.layers.2.bias' differs"):
        engine.bind(weights)
    with pytest.raises(BadWeights):
        engine.bind({})


@pytest.mark.parametrize("kind", ENGINES)
def test_a_frozen_engine_is_refused_for_a_model_that_follows_weights(kind):
    if kind in FROZEN:
        with pytest.raises(ConfigError, match="takes no new weights"):
            refuse_frozen(kind)
    else:
        refuse_frozen(kind)


@pytest.mark.parametrize("kind", ["onnx", *FROZEN])
def test_it_computes_with_the_weights_of_its_build(kind):
    module, example = cartpole()
    weights = {name: array + np.float32(0.1) for name, array in module_weights(module).items()}
    built = build_engine(kind, module, example, weights=weights)
    reference = TorchEngine(module, example)
    inputs = observations(3)
    got = built.run(built.bind(weights), inputs)
    for ours, theirs in zip(got, reference.run(reference.bind(weights), inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 if kind != "int8" else 0.1 * np.abs(theirs).max() + 0.05)
    with pytest.raises(BadWeights, match="lack"):
        build_engine(kind, module, example, weights={})


def test_int8_shrinks_a_convolution_to_a_quarter():
    module, example = nature_cnn()
    small, large = Int8Engine(module, example), FrozenOnnxEngine(module, example)
    assert len(small.proto) < 0.3 * len(large.proto)


class Unsteady(torch.nn.Module):
    """A model that eight bits cannot represent: a large value beside a small one that must be exact."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1e4, 0.0], [0.0, 1.0]]))

    def forward(self, x):
        return {"small": self.first(x)[:, 1]}


def test_building_int8_does_not_change_the_process_logging(capfd):
    """Other threads' lines are logged, the quantiser's advice is not, and no handler remains."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())
    other, root, over = logging.getLogger("tests.other"), logging.getLogger(), threading.Event()
    before = root.handlers[:]
    root.handlers[:] = []  # pytest's own; a Serve replica has none
    lines: list[str] = []

    def log() -> None:
        while not over.wait(0.001):
            lines.append(f"line {len(lines)}")
            other.warning(lines[-1])

    other.addHandler(handler)
    thread = threading.Thread(target=log)
    thread.start()
    try:
        build_engine("int8", *cartpole())
        after = root.handlers[:]
    finally:
        over.set()
        thread.join()
        other.removeHandler(handler)
        root.handlers[:] = before
    assert written == lines
    assert after == []
    assert "pre-process" not in capfd.readouterr().err.lower()


def test_int8_beyond_the_tolerance_is_refused_naming_the_leaf():
    with pytest.raises(EngineMismatch, match="worst leaf 'small'"):
        Int8Engine(Unsteady(), (np.zeros((1, 2), np.float32),))


@pytest.mark.parametrize("seed", range(5))
def test_int8_may_choose_another_action_where_two_are_almost_equal(seed):
    """The result must not depend on which rows the small batches draw."""
    assert Int8Engine(WithAction(1.0), (np.zeros((1, 4), np.float32),), samples=observations(300, seed)).frozen


def test_int8_that_differs_in_too_many_rows_is_refused_naming_the_leaf():
    with pytest.raises(EngineMismatch, match="'action'") as caught:
        Int8Engine(WithAction(1e-4), (np.zeros((1, 4), np.float32),))
    assert caught.value.details["leaf"] == "action"
    assert caught.value.details["differing"] > 0.1


def test_the_awkward_model_is_frozen_correctly():
    engine = FrozenOnnxEngine(*awkward())
    module, example = awkward()
    assert engine.spec == TorchEngine(module, example).spec
    assert len(engine.run(None, example_leaves(example, 4))) == len(engine.spec.outputs)
