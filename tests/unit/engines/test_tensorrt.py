"""TensorRT where it is not installed: the error message, the names of plans, the ONNX models.

The other tests need a GPU and the extra, and are skipped with a reason.
"""

from __future__ import annotations

import importlib.util
import pickle

import numpy as np
import onnxruntime as ort
import pytest

from brayx.engines import build_engine
from brayx.engines import tensorrt as module_under_test
from brayx.engines.base import Tolerance
from brayx.engines.bundle import Samples, write_bundle
from brayx.engines.export import to_onnx, verify, with_constants
from brayx.engines.tensorrt import TensorRTEngine, cache_key, plan_sizes
from brayx.engines.torch import TorchEngine, module_weights
from brayx.errors import ConfigError, EngineMismatch, ModelError
from brayx.model.build import engine_of
from brayx.model.config import ModelConfig
from tests.unit.engines.models import awkward, cartpole, observations

INSTALLED = importlib.util.find_spec("tensorrt") is not None
NEEDS = pytest.mark.skipif(not INSTALLED, reason="the extra tensorrt is not installed")


@pytest.mark.skipif(INSTALLED, reason="the extra tensorrt is installed")
def test_a_missing_tensorrt_is_an_error_that_says_what_to_install():
    with pytest.raises(ConfigError, match=r"pip install 'brayx\[tensorrt\]'"):
        build_engine("tensorrt", *cartpole())


def test_a_plan_is_named_after_graph_version_device_and_sizes():
    facts = (b"graph", "11.4.0", "H200 9.0", (1, 64, 1024))
    others = [(b"graph.", *facts[1:]), (*facts[:1], "11.4.1", *facts[2:]), (*facts[:2], "H100 9.0", facts[3])]
    keys = {cache_key(*parts) for parts in [facts, *others, (*facts[:3], (1, 64, 512))]}
    assert len(keys) == 5
    assert cache_key(*facts) in keys


def test_the_name_of_a_plan_does_not_depend_on_the_weights():
    module, example = cartpole()
    before = to_onnx(module, example).proto
    with_other = cartpole()[0]
    for parameter in with_other.parameters():
        parameter.data += 1
    assert cache_key(to_onnx(with_other, example).proto, "", "", ()) == cache_key(before, "", "", ())


@pytest.mark.parametrize("model", [cartpole, awkward])
def test_a_graph_computes_with_the_weights_inserted_into_it(model):
    """Plans are built and refitted from such graphs."""
    module, example = model()
    graph, reference = to_onnx(module, example), TorchEngine(module, example)
    for shift in (0.0, 0.1):
        weights = {
            name: (array + shift).astype(array.dtype) if array.dtype.kind == "f" else array
            for name, array in module_weights(module).items()
        }
        session = ort.InferenceSession(with_constants(graph, weights), providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        assert set(names) <= set(graph.inputs)
        leaves = [np.zeros((2, *leaf.shape), leaf.dtype) for leaf in graph.spec.inputs]
        feed = {name: leaf for name, leaf in zip(graph.inputs, leaves, strict=True) if name in names}
        want = reference.run(reference.bind(weights), leaves)
        for got, wanted in zip(session.run(list(graph.outputs), feed), want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "sizes"),
    [(1, (1, 1, 5)), (64, (1, 64, 64)), (4096, (1, 64, 4096)), (-256, (1, 256, 256)), (-2, (1, 2, 5))],
)
def test_a_plan_accepts_the_batch_sizes_of_the_model_s_options(monkeypatch, option, sizes):
    assert plan_sizes(option) == sizes
    made = []
    monkeypatch.setattr(
        module_under_test, "TensorRTEngine", lambda *args, **options: made.append(plan_sizes(**options)) or made
    )
    engine_of(ModelConfig(module="unused", engine="tensorrt", max_batch_size=option), *cartpole())
    assert made == [sizes]


@NEEDS
@pytest.mark.gpu
def test_a_plan_is_built_verified_cached_and_refitted(tmp_path):
    module, example = cartpole()
    engine = TensorRTEngine(module, example, max_batch_size=64, cache=tmp_path)
    (plan,) = (tmp_path / "tensorrt").iterdir()
    written = plan.stat().st_mtime_ns
    again = TensorRTEngine(module, example, max_batch_size=64, cache=tmp_path)
    assert plan.stat().st_mtime_ns == written, "cached, not built"
    verify(again, module, example, batch_sizes=(1, 64))
    plan.write_bytes(b"half")
    TensorRTEngine(module, example, max_batch_size=64, cache=tmp_path)
    assert plan.read_bytes() != b"half"
    with pytest.raises(ModelError, match="1 to 64"):
        engine.run(engine.bind(engine.initial), observations(65))


@NEEDS
@pytest.mark.gpu
def test_a_plan_beyond_the_tolerance_is_exported_and_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("BRAYX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(TensorRTEngine, "tolerance", Tolerance(rtol=0.0, atol=-1.0))
    out = tmp_path / "out"
    report = write_bundle(out, *cartpole(), ["tensorrt"], Samples(observations(8), ""), batch_sizes=(1,))
    assert not report["runtimes"]["tensorrt"]["within"]
    assert report["runtimes"]["tensorrt"]["errors"]["logits"]["1"]["absolute"] < 1e-4
    assert (out / "model.plan").exists()
    with pytest.raises(EngineMismatch):
        TensorRTEngine(*cartpole())


def other_weights():
    module, example = cartpole()
    for parameter in module.parameters():
        parameter.data += 0.5
    return module, example


class Plans(TorchEngine):
    """TensorRT's plans, imitated with torch: the cached plan of a graph has its first user's weights."""

    plan = pickle.dumps(module_weights(cartpole()[0]))
    inputs, outputs = ["obs"], ["logits", "value"]

    def __init__(self, module, example_args, *, max_batch_size, verify_outputs):
        super().__init__(module, example_args)

    def packed(self, bound):
        return pickle.dumps(module_weights(bound))

    def unpacked(self, plan):
        return self.bind(pickle.loads(plan))


def test_a_bundle_s_plan_has_the_weights_of_the_model_that_is_exported(tmp_path, monkeypatch):
    monkeypatch.setattr(module_under_test, "TensorRTEngine", Plans)
    report = write_bundle(tmp_path, *other_weights(), ["tensorrt"], Samples(observations(8), ""), batch_sizes=(1,))
    written = pickle.loads((tmp_path / "model.plan").read_bytes())
    for name, leaf in module_weights(other_weights()[0]).items():
        np.testing.assert_array_equal(written[name], leaf)
    assert report["within"]


@NEEDS
@pytest.mark.gpu
def test_a_bundle_s_plan_has_the_exported_weights_even_if_the_cache_has_others(tmp_path, monkeypatch):
    monkeypatch.setenv("BRAYX_CACHE", str(tmp_path / "cache"))
    TensorRTEngine(*cartpole())
    module, example = other_weights()
    report = write_bundle(tmp_path / "out", module, example, ["tensorrt"], Samples(observations(8), ""))
    assert report["within"]
    engine, inputs = TensorRTEngine(module, example), observations(8)
    got = engine.run(engine.unpacked((tmp_path / "out" / "model.plan").read_bytes()), inputs)
    reference = TorchEngine(module, example)
    for leaf, want in zip(got, reference.run(reference.bind(reference.initial), inputs), strict=True):
        np.testing.assert_allclose(leaf, want, rtol=1e-3, atol=1e-3)
