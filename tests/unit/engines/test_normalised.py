"""Modules that normalise their observation: every engine agrees with NumPy normalisation, for each version."""

from __future__ import annotations

import numpy as np
import pytest

from brayx.engines import build_engine
from brayx.engines.normalised import normalised, observed
from brayx.engines.onnx import OnnxEngine
from brayx.engines.scaling import to_weights
from brayx.engines.torch import TorchEngine, describe, module_weights, with_weights
from brayx.errors import BadWeights, ModelError
from brayx.model.local import LocalModel
from brayx.rollout.moments import OBS_CLIP, ObsNormaliser
from tests.unit.engines.models import awkward, cartpole, recurrent

RNG = np.random.default_rng(3)


def normaliser_of(model, seed=0):
    """Moments of made-up observations of a model, far from 0 and 1."""
    module, example = model()
    leaves = observed(module, example)
    made = ObsNormaliser({k: v.shape[1:] for k, v in leaves.items()}, {k: v.dtype for k, v in leaves.items()})
    rng = np.random.default_rng(seed)
    for path, leaf in leaves.items():
        wide = rng.standard_normal((500, *leaf.shape[1:])) * rng.uniform(2, 50, leaf.shape[1:])
        made.add(path, (wide + rng.uniform(-90, 90, leaf.shape[1:])).astype(leaf.dtype))
    made.refresh()
    return made


def seen(normaliser, model, inputs):
    """Input leaves for the bare module, normalised by the rollouts' own code."""
    module, example = model()
    spec = describe(module, example)
    named = dict(zip((leaf.path for leaf in spec.inputs), inputs, strict=True))
    paths = iter(observed(module, example))
    state_inputs = () if spec.state is None else spec.state.inputs
    return [
        leaf if index in state_inputs else normaliser(next(paths), leaf) for index, leaf in enumerate(named.values())
    ]


def raw_inputs(model, rows):
    spec = describe(*model())
    return [
        (RNG.standard_normal((rows, *leaf.shape)) * 60).astype(leaf.dtype)
        if leaf.dtype.kind == "f"
        else RNG.integers(0, 5, (rows, *leaf.shape)).astype(leaf.dtype)
        for leaf in spec.inputs
    ]


@pytest.mark.parametrize("model", [cartpole, awkward, recurrent])
@pytest.mark.parametrize("kind", ["torch", "onnx", "onnx-frozen"])
def test_an_engine_normalises_like_the_normaliser(kind, model):
    module, example = model()
    module = module.eval()
    normaliser = normaliser_of(model)
    weights = module_weights(module) | to_weights(normaliser.scalings(), observed(module, example))
    engine = build_engine(kind, module, example, weights=weights)
    bare = TorchEngine(module, example)
    for rows in (1, 7):
        inputs = raw_inputs(model, rows)
        want = bare.run(bare.bind(bare.initial), seen(normaliser, model, inputs))
        got = engine.run(engine.bind(engine.initial), inputs)
        for leaf, mine, torchs in zip(engine.spec.outputs, got, want, strict=True):
            if leaf.path != "obs":  # `awkward` returns its input
                np.testing.assert_allclose(mine, torchs, rtol=1e-4, atol=1e-5)
    assert bare.spec == engine.spec


def test_torch_normalises_bit_for_bit():
    module, example = cartpole()
    normaliser = normaliser_of(cartpole)
    wrapped = normalised(module, normaliser.scalings())
    engine, bare = TorchEngine(wrapped, example), TorchEngine(module, example)
    inputs = raw_inputs(cartpole, 64)
    want = bare.run(bare.bind(bare.initial), seen(normaliser, cartpole, inputs))
    assert all(map(np.array_equal, engine.run(engine.bind(engine.initial), inputs), want))


def test_int8_calibrates_the_same_ranges_as_for_normalised_observations():
    module, example = cartpole()
    normaliser = normaliser_of(cartpole)
    raw = [(RNG.standard_normal((256, 4)) * 30 + 40).astype(np.float32)]
    shown = [normaliser("obs", raw[0])]
    whole = build_engine("int8", normalised(module, normaliser.scalings()), example, samples=raw)
    bare = build_engine("int8", module, example, samples=shown)
    want = bare.run(bare.bind(bare.initial), shown)
    for mine, theirs in zip(whole.run(whole.bind(whole.initial), raw), want, strict=True):
        np.testing.assert_allclose(
            mine, theirs, atol=0.15 * np.abs(theirs).max()
        )  # their ranges differ only by clipping


def test_the_traced_export_binds_the_moments_too():
    module, example = cartpole()
    normaliser = normaliser_of(cartpole)
    engine = OnnxEngine(normalised(module, normaliser.scalings()), example, traced=True)
    other = normaliser_of(cartpole, seed=1)
    bound = engine.bind(module_weights(module) | to_weights(other.scalings(), ["obs"]))
    bare = TorchEngine(module, example)
    inputs = raw_inputs(cartpole, 5)
    want = bare.run(bare.bind(bare.initial), seen(other, cartpole, inputs))
    for mine, torchs in zip(engine.run(bound, inputs), want, strict=True):
        np.testing.assert_allclose(mine, torchs, rtol=1e-4, atol=1e-5)


async def test_versions_with_different_moments_coexist():
    """Also a version without moments, of a model that was trained without them before."""
    module, example = cartpole()
    initial = module_weights(module)
    moments = {1: normaliser_of(cartpole, 1), 2: normaliser_of(cartpole, 2)}
    sets = {version: initial | to_weights(normaliser.scalings(), ["obs"]) for version, normaliser in moments.items()}
    model = LocalModel(build_engine("onnx", module, example, weights=sets[1]), version=1, max_versions=8)
    model.load(2, sets[2])
    model.load(3, initial)
    bare = TorchEngine(module, example)
    bound = bare.bind(initial)
    for row in raw_inputs(cartpole, 20)[0]:
        for version in (1, 2, 3):
            shown = row[None] if version == 3 else moments[version]("obs", row[None])
            logits, _ = bare.run(bound, [shown])
            outputs, made_by = await model.forward(row, version=version)
            assert made_by == version
            np.testing.assert_allclose(outputs["logits"], logits[0], rtol=1e-4, atol=1e-4)
    await model.close()


async def test_a_model_without_normalisation_refuses_a_normalised_version():
    module, example = cartpole()
    model = LocalModel(build_engine("onnx", module, example))
    with pytest.raises(BadWeights, match="normalise") as raised:
        model.load(4, module_weights(module) | to_weights(normaliser_of(cartpole).scalings(), ["obs"]))
    assert "restart it" in str(raised.value)
    assert model.version == 0
    await model.close()


def test_a_module_attribute_named_like_the_normaliser_is_refused():
    module, _ = cartpole()
    module.obs_normaliser = None
    with pytest.raises(ModelError, match="obs_normaliser"):
        normalised(module, {})


def test_the_original_module_is_unchanged():
    module, example = cartpole()
    before = module_weights(module)
    wrapped = with_weights(module, before | to_weights(normaliser_of(cartpole).scalings(), ["obs"]))
    assert module_weights(module).keys() == before.keys()
    assert type(wrapped) is type(module)
    assert float(wrapped.obs_normaliser.obs.limit) == OBS_CLIP
    again = with_weights(wrapped, before)
    assert float(again.obs_normaliser.obs.scale[0]) == 1.0
    assert describe(again, example) == describe(module, example)
