"""Recurrent models: their declaration, engines that carry their state, and the state of a session."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from brayx.engines import build_engine
from brayx.engines.base import Recurrence, save_weights
from brayx.engines.export import verify
from brayx.engines.onnx import OnnxEngine
from brayx.engines.torch import TorchEngine, module_weights
from brayx.errors import EngineMismatch, ModelError
from brayx.model.build import recorded_samples
from brayx.model.local import LocalModel
from tests.unit.engines.models import awkward, cartpole, recurrent


def test_a_recurrent_state_is_detected():
    spec = TorchEngine(*recurrent()).spec
    assert spec.state is not None
    assert spec.state.argument == 1
    assert [spec.inputs[i].path for i in spec.state.inputs] == ["state/h", "state/ticks"]
    assert [spec.outputs[i].path for i in spec.state.outputs] == ["state/h", "state/ticks"]
    np.testing.assert_array_equal(spec.state.initial["h"], np.full(4, 0.5))
    assert spec.state.initial["ticks"].shape == ()
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert TorchEngine(*cartpole()).spec.state is None
    assert TorchEngine(*awkward()).spec.state is None


class Shrinking(torch.nn.Module):
    is_recurrent = True

    def forward(self, state):
        return {"state": state[:, :1]}


def test_an_output_state_of_another_layout_is_refused():
    with pytest.raises(ModelError, match=r"state: \[2\].*state: \[1\]"):
        TorchEngine(Shrinking(), (np.zeros((1, 2), np.float32),))


class PredictsState(torch.nn.Module):
    """Takes and predicts a game's state, which is no recurrent state."""

    is_recurrent = False

    def forward(self, state):
        return {"state": 2 * state}


@pytest.mark.parametrize("kind", ["onnx", "torch"])
def test_an_undeclared_state_is_a_normal_input_and_output(kind):
    engine = build_engine(kind, PredictsState(), (np.ones((1, 2), np.float32),))
    assert engine.spec.state is None
    (after,) = engine.run(engine.bind(engine.initial), [np.ones((3, 2), np.float32)])
    assert after.tolist() == [[2, 2]] * 3


@pytest.mark.parametrize("kind", ["onnx", "onnx-frozen", "int8", "torch"])
def test_every_engine_carries_the_state(kind):
    """Step by step as torch alone; the build already verified the engine the same way."""
    module, example = recurrent()
    engine = build_engine(kind, module, example)
    bound = engine.bind(engine.initial)
    rng = np.random.default_rng(0)
    wanted = [torch.tensor(np.repeat(example[1][name], 3, 0)) for name in ("h", "ticks")]
    carried = [leaf.numpy() for leaf in wanted]
    for _ in range(6):
        obs, scale = rng.standard_normal((3, 3)).astype(np.float32), np.ones(3, np.float32)
        logits, *carried = engine.run(bound, [obs, *carried, scale])
        with torch.no_grad():
            outputs = module(torch.tensor(obs), dict(zip(("h", "ticks"), wanted, strict=True)), torch.tensor(scale))
        wanted = [outputs["state"]["h"], outputs["state"]["ticks"]]
        np.testing.assert_allclose(logits, outputs["logits"], atol=1e-5 if kind != "int8" else 0.1)
    assert carried[1].tolist() == [6, 6, 6]


def test_recorded_observations_come_with_the_states_the_model_reaches(tmp_path):
    """Observations are recorded without states, and a recurrent model must not be calibrated on random states."""
    module, example = recurrent()
    rng = np.random.default_rng(0)
    obs, scale = rng.standard_normal((64, 3)).astype(np.float32), np.ones(64, np.float32)
    save_weights(tmp_path / "weights.npz", module_weights(module))
    save_weights(tmp_path / "samples.npz", {"obs/0": obs, "obs/1": scale})
    untrained, _ = recurrent()
    torch.nn.init.zeros_(untrained.cell.weight_hh)  # after which the states would differ
    leaves = recorded_samples(tmp_path, untrained, example)
    assert leaves is not None
    seen, h, ticks, scales = leaves
    np.testing.assert_array_equal(seen, obs)
    np.testing.assert_array_equal(scales, scale)
    np.testing.assert_array_equal(ticks, np.arange(64) % 16)
    np.testing.assert_array_equal(h[::16], np.full((4, 4), 0.5))
    engine = TorchEngine(module, example)
    ones = np.full((64, 4), 0.5, np.float32), np.zeros(64, np.int64)
    _, first, _ = engine.run(engine.bind(engine.initial), [obs, *ones, scale])
    assert all(np.isclose(first, row).all(axis=1).any() for row in h[1::16]), "after one of these observations"
    save_weights(tmp_path / "samples.npz", {"obs/0": obs[:, :2], "obs/1": scale})
    assert recorded_samples(tmp_path, module, example) is None


class _Forgetful(OnnxEngine):
    """Reads the state on its first run only."""

    runs = 0

    def run(self, bound, inputs):
        self.runs += 1
        state = inputs[1] if self.runs == 1 else np.full_like(inputs[1], 0.5)
        return super().run(bound, [inputs[0], state, *inputs[2:]])


def test_verify_carries_the_state_and_catches_an_engine_that_forgets_it():
    engine = _Forgetful(*recurrent(), verify_outputs=False)
    with pytest.raises(EngineMismatch, match="step"):
        verify(engine, *recurrent(), batch_sizes=(1,))


async def test_a_session_keeps_its_own_state_between_forwards():
    module, example = recurrent()
    model = LocalModel(build_engine("onnx", module, example))
    sessions = [Recurrence(model.spec) for _ in range(2)]
    obs, step = np.ones(3, np.float32), np.float32(1)
    for count, session in enumerate(sessions, start=1):
        for _ in range(count):
            outputs = session.keep((await model.forward(*session.args(obs, step))).outputs)
            assert set(outputs) == {"logits"}
    assert [int(session.state["ticks"]) for session in sessions] == [1, 2]
    assert sessions[0].state["h"].base is None, "a copy, so that the batch is not kept"
    sessions[0].reset()
    assert int(sessions[0].state["ticks"]) == 0
    await model.close()
    with pytest.raises(ModelError, match="has no memory"):
        Recurrence(TorchEngine(*cartpole()).spec)
