"""Both engines on the same models: equal outputs, any number of weight sets, threads, and a strict verification."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime as ort
import pytest
import torch

from brayx.engines import ENGINES, build_engine
from brayx.engines.export import noisy_leaves, to_onnx
from brayx.engines.frozen import OnnxSession
from brayx.engines.onnx import standalone
from brayx.engines.torch import TorchEngine, module_weights
from brayx.errors import BadWeights, ConfigError, ModelError
from tests.unit.engines.models import assert_same, awkward, cartpole, changed, observations, recurrent


def test_engines_agree_at_every_batch_size_and_weight_set(onnx, reference):
    assert onnx.spec == reference.spec
    assert onnx.layout == reference.layout
    versions = [changed(onnx, seed) for seed in range(8)]
    bound = [(onnx.bind(weights), reference.bind(weights)) for weights in versions]
    for batch_size in (1, 7, 2, 64, 1, 5):  # sizes go up and down: buffers must not be those of the size before
        inputs = observations(batch_size)
        for ours, theirs in bound:
            assert_same(onnx.run(ours, inputs), reference.run(theirs, inputs))


def test_each_caller_owns_its_outputs(onnx):
    bound = onnx.bind(onnx.initial)
    first = onnx.run(bound, observations(3))
    copies = [leaf.copy() for leaf in first]
    onnx.run(bound, observations(3, seed=1))
    assert_same(first, copies)
    first[0][:] = 7
    assert_same(onnx.run(bound, observations(3)), copies)


@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_bound_weights_do_not_follow_the_callers_arrays(kind, onnx, reference):
    engine = onnx if kind == "onnx" else reference
    weights = changed(engine, 0)
    bound = engine.bind(weights)
    before = engine.run(bound, observations(2))
    for array in weights.values():
        array += 1
    assert_same(engine.run(bound, observations(2)), before)


def test_read_only_weights_are_used_in_place(onnx):
    weights = changed(onnx, 0)
    want = onnx.run(onnx.bind(weights), observations(2))
    for array in weights.values():
        array.flags.writeable = False
    bound = onnx.bind(weights)
    assert any(np.shares_memory(array, weights["policy.layers.0.weight"]) for array, _ in bound.values)
    del weights
    assert_same(onnx.run(bound, observations(2)), want)


@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_bind_refuses_weights_of_another_model(kind, onnx, reference):
    engine = onnx if kind == "onnx" else reference
    other = module_weights(cartpole(hidden=(8, 8))[0])
    with pytest.raises(BadWeights, match=r"policy\.layers\.0\.weight.*64, 4.*8, 4"):
        engine.bind(other)


@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_run_works_from_many_threads(kind, onnx, reference):
    engine = onnx if kind == "onnx" else reference
    shared, other = engine.bind(engine.initial), engine.bind(changed(engine, 1))

    def work(seed):
        inputs = observations(1 + seed % 5, seed)
        bound = shared if seed % 2 else other
        return all(
            np.allclose(got, want, atol=1e-6)
            for _ in range(20)
            for got, want in zip(
                engine.run(bound, inputs), engine.run(engine.bind(weights[bound is other]), inputs), strict=True
            )
        )

    weights = [engine.initial, changed(engine, 1)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))


@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_a_seat_always_computes_what_run_computes(kind, onnx, reference):
    engine = onnx if kind == "onnx" else reference
    versions = [changed(engine, seed) for seed in range(2)]
    seats = [engine.seat(engine.bind(weights), 6) for weights in versions]  # only the seats keep the bound weights
    for seed in range(3):
        inputs = observations(6, seed)
        for weights, seat in zip(versions, seats, strict=True):
            before = list(seat.outputs)
            for room, leaf in zip(seat.inputs, inputs, strict=True):
                room[...] = leaf
            seat.run()
            assert_same(seat.outputs, engine.run(engine.bind(weights), inputs))
            assert all(ours is theirs for ours, theirs in zip(seat.outputs, before, strict=True))


class RowByIndex(torch.nn.Module):
    """Selects one of five rows by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, obs, choice):
        return self.head(self.embed(choice)) + obs


HERE = [kind for kind in ENGINES if kind != "tensorrt"]


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize(("width", "choice"), [(3, 0), (2, 5)], ids=["shape", "index"])
def test_a_batch_that_the_graph_refuses_is_a_model_error_and_the_next_runs(kind, width, choice, capfd):
    engine = build_engine(kind, RowByIndex(), (np.zeros((1, 2), np.float32), np.zeros(1, np.int64)))
    bound = engine.bind(engine.initial)
    capfd.readouterr()
    with pytest.raises(ModelError, match="batch of 2"):
        engine.run(bound, [np.zeros((2, width), np.float32), np.array([0, choice])])
    assert capfd.readouterr() == ("", ""), "a client that causes it could fill the log"
    assert len(engine.run(bound, [np.zeros((2, 2), np.float32), np.array([0, 4])])[0]) == 2


@pytest.mark.parametrize("kind", HERE)
def test_a_seats_batch_that_the_graph_refuses_is_a_model_error_and_the_next_runs(kind):
    engine = build_engine(kind, RowByIndex(), (np.zeros((1, 2), np.float32), np.zeros(1, np.int64)))
    seat = engine.seat(engine.bind(engine.initial), 2)
    seat.inputs[1][:] = [0, 5]
    with pytest.raises(ModelError, match="batch of 2"):
        seat.run()
    seat.inputs[1][:] = [0, 4]
    seat.run()
    assert np.isfinite(seat.outputs[0]).all()


def test_a_file_that_is_no_model_is_a_model_error(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no graph")
    for model in (b"no graph", path, tmp_path / "nowhere"):
        with pytest.raises(ModelError, match="cannot load the model"):
            OnnxSession(model, ["obs"], ["logits"])


@pytest.mark.parametrize("make", [cartpole, awkward, recurrent])
def test_a_standalone_file_computes_what_torch_does(make, capfd):
    module, example = make()
    engine = TorchEngine(module, example)
    leaves = noisy_leaves(example, 7)
    (want,) = [engine.run(engine.bind(engine.initial), leaves)]
    session = ort.InferenceSession(standalone(module, example), providers=["CPUExecutionProvider"])
    assert capfd.readouterr() == ("", "")
    fed = {value.name for value in session.get_inputs()}
    inputs = {leaf.path: array for leaf, array in zip(engine.spec.inputs, leaves, strict=True) if leaf.path in fed}
    assert fed == set(inputs), "no weights among the inputs"
    for got, wanted in zip(session.run(None, inputs), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_standalone_export_runs_without_bound_weights():
    import onnxruntime

    module, example = cartpole()
    graph = to_onnx(module, example, weights_as_inputs=False)
    assert (graph.inputs, graph.outputs, graph.weights) == (("obs",), ("logits", "value"), {})
    session = onnxruntime.InferenceSession(graph.proto, providers=["CPUExecutionProvider"])
    inputs = observations(3)
    engine = TorchEngine(module, example)
    assert_same(session.run(None, {"obs": inputs[0]}), engine.run(engine.bind(engine.initial), inputs))


def test_unknown_engine_is_a_config_error():
    with pytest.raises(ConfigError, match=", ".join(ENGINES)) as refused:
        build_engine("tensorflow", *cartpole())
    assert refused.value.details == {"engine": "tensorflow"}
