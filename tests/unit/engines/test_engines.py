"""Both engines on the same models: equal outputs, any number of weight sets, threads, and a strict verification."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime as ort
import pytest
import torch

from benchmarks.gpu import nature_cnn
from brayx.engines import ENGINES, build_engine, chain
from brayx.engines.export import noisy_leaves, to_onnx, verify
from brayx.engines.frozen import OnnxSession
from brayx.engines.onnx import OnnxEngine, standalone
from brayx.engines.torch import TorchEngine, example_leaves, module_weights
from brayx.errors import BadWeights, ConfigError, EngineMismatch, ModelError
from tests.unit.engines.models import awkward, cartpole, observations, recurrent


@pytest.fixture(scope="module")
def onnx():
    return OnnxEngine(*cartpole())


@pytest.fixture(scope="module")
def reference():
    return TorchEngine(*cartpole())


def changed(engine, seed):
    rng = np.random.default_rng(seed)
    return {
        name: (array + rng.standard_normal(array.shape)).astype(array.dtype) for name, array in engine.initial.items()
    }


def assert_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


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


def test_verify_passes_an_engine_that_computes_the_same(onnx):
    verify(onnx, *cartpole(), batch_sizes=(1, 3))


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
