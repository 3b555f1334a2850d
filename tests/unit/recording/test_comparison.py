"""`brayx.recording.comparison`: versions with masks, heads and memories, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brayx import actions
from brayx.actor.agent import State
from brayx.actor.logs import SessionLog
from brayx.errors import BadRecording, ShapeMismatch
from brayx.metrics import Recorder
from brayx.nets.policy import NetworkConfig, policy_for
from brayx.recording import Comparison, NotCompared, Version, compare, comparison
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.group import PACK_TICKS
from brayx.recording.recorder import SessionRecorder
from brayx.types import Step
from tests.unit.recording.oracles import normals, oracle_kl, rng

# Real recordings, by the real recorder.


class Sessions:
    """Records sessions of given lengths.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._recorder = SessionRecorder(RecordingConfig(folder=str(folder), memory_mb=500), Recorder())

    def start(self, session: str) -> SessionLog:
        log = self._recorder.open(session, b"{}", "", "")
        assert log is not None
        return log

    def play(self, session: str, steps: Sequence[Step], **more: Any) -> None:
        log = self.start(session)
        for number, step in enumerate(steps):
            state = State(session, tick=number)
            state.step = step
            for name, values in more.items():
                setattr(state, name, values[number])
            log.tick(state, b"{}", b"{}", 0.0, 0.0)
        log.end("stop", None)

    def close(self):
        self._recorder.close(60.0)
        return open_recordings(str(self.folder))


def module_of(
    seed: int, *, lstm: int = 0, mask: bool = False, size: int = 3
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    obs = np.zeros(size, np.float32)
    torch.manual_seed(seed)
    module, example = policy_for(
        {"x": obs, "action_mask": np.ones(4, np.int8)} if mask else obs,
        num_actions=4,
        network=NetworkConfig(hidden=[8], lstm=lstm),
    )
    with torch.no_grad():
        for parameter in module.parameters():  # new policies are almost uniform, and so almost equal
            parameter.add_(0.5 * torch.randn(parameter.shape))
    return module, example


def tick_by_tick(
    module: torch.nn.Module, example: tuple[Any, ...], observations: Sequence[Any]
) -> dict[str, np.ndarray]:
    """What the module does, one observation after the other."""

    def row(leaf: Any) -> Any:
        return torch.as_tensor(np.asarray(leaf))[None]

    state = {name: row(leaf[0]) for name, leaf in example[1].items()} if len(example) == 2 else None
    logits, values = [], []
    for obs_of_tick in observations:
        obs = (
            {name: row(leaf) for name, leaf in obs_of_tick.items()}
            if isinstance(obs_of_tick, dict)
            else row(obs_of_tick)
        )
        with torch.no_grad():
            outputs = module(obs) if state is None else module(obs, state)
        state = outputs.get("state")
        logits.append(outputs["logits"][0].numpy())
        values.append(outputs["value"][0].item())
    return {"logits": np.asarray(logits).reshape(-1, 4), "value": np.asarray(values, np.float32)}


def steps_of(observations: Sequence[Any], outputs: Mapping[str, np.ndarray], seed: int) -> list[Step]:
    action, log_prob = actions.sample(outputs, rng(seed))
    return [Step(*step, 1) for step in zip(observations, action, log_prob.tolist(), strict=True)]


@pytest.mark.parametrize(("lstm", "mask"), [(0, False), (0, True), (6, False), (6, True)])
def test_sessions_of_any_length_are_compared_as_if_played_one_after_the_other(
    lstm: int, mask: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_MAX_TICKS", 16)
    monkeypatch.setattr(comparison, "_SESSIONS_AT_ONCE", 3)
    (played, example), (other, _) = module_of(1, lstm=lstm, mask=mask), module_of(2, lstm=lstm, mask=mask)
    lengths, sessions, draw = [5, 70, 1, 16, 33, 2, 17], Sessions(tmp_path), rng()
    expected = {}
    for number, length in enumerate(lengths):
        x = draw.standard_normal((length, 3)).astype(np.float32)
        allowed = (draw.random((length, 4)) < 0.6).astype(np.int8)
        allowed[:, 0] = 1
        seen = [{"x": a, "action_mask": b} for a, b in zip(x, allowed, strict=True)] if mask else list(x)
        before, after = (tick_by_tick(module, example, seen) for module in (played, other))
        steps = steps_of(seen, before, number)
        sessions.play(f"{number}", steps, value=before["value"], logits=before["logits"])
        expected[f"{number}"] = ([int(step.action) for step in steps], before, after)
    episodes = sessions.close()
    results = list(compare(episodes, Version("other", other, example)))
    assert [result.session for result in results] == [result.session for result in episodes]
    for result in results:
        assert isinstance(result, Comparison)
        action, before, after = expected[result.session]
        assert result.number.tolist() == list(range(len(action)))
        assert result.equal.tolist() == (after["logits"].argmax(-1) == action).tolist()
        assert result.exact
        kl = [oracle_kl(before, after, tick) for tick in range(len(action))]
        np.testing.assert_allclose(result.kl, kl, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(result.value, after["value"] - before["value"], rtol=1e-3, atol=1e-5)
        other_ticks = [tick for tick, equal in enumerate(result.equal) if not equal]
        assert result.first == (other_ticks[0] if other_ticks else None)
        assert result.frame()["kl"].tolist() == result.kl.tolist()
    assert any(result.first is not None for result in results if isinstance(result, Comparison))

    itself = list(compare(episodes, Version("played", played, example)))
    versions = list(compare(episodes, Version("other", other, example), Version("played", played, example)))
    for result, same, two in zip(results, itself, versions, strict=True):
        assert isinstance(result, Comparison)
        assert isinstance(same, Comparison)
        assert isinstance(two, Comparison)
        assert same.kl.max() < 1e-6
        np.testing.assert_allclose(two.kl, result.kl, rtol=1e-3, atol=1e-5)
        _, before, after = expected[result.session]
        assert two.equal.tolist() == (before["logits"].argmax(-1) == after["logits"].argmax(-1)).tolist()


@pytest.mark.parametrize("lstm", [0, 6])
def test_a_recording_that_does_not_fit_does_not_stop_the_others(lstm: int, tmp_path: Path) -> None:
    module, example = module_of(1, lstm=lstm)
    sessions = Sessions(tmp_path)
    for number, size in enumerate((3, 5, 3, 3)):
        obs = list(rng(number).standard_normal((4 + number, size)).astype(np.float32))
        outputs = tick_by_tick(*module_of(1, lstm=lstm, size=size), obs)
        steps = steps_of(obs, outputs, number)
        if number == 2:
            steps = [Step(step.obs, np.asarray(7), step.log_prob, 1) for step in steps]
        if number == 3:
            sessions.play("3", [Step({"board": obs[0]}, np.asarray(0), 0.0, 1)])
        else:
            sessions.play(f"{number}", steps)
    results = {result.session: result for result in compare(sessions.close(), Version("v", module, example))}
    fits = results["0"]
    assert isinstance(fits, Comparison)
    assert (len(fits), fits.exact) == (4, False)
    assert fits.kl.max() < 1e-6
    errors = {session: result.error for session, result in results.items() if isinstance(result, NotCompared)}
    assert {session: type(error) for session, error in errors.items()} == {
        "1": ShapeMismatch,
        "2": BadRecording,
        "3": BadRecording,
    }
    assert errors["1"].details == {"expected": ["obs: [3] float32"], "got": ["obs: [5] float32"]}
    assert "the model has 4" in errors["2"].message
    assert errors["3"].details == {"column": "obs"}
    assert "obs/board" in errors["3"].message


@pytest.mark.parametrize("lstm", [0, 6])
def test_ticks_that_failed_are_left_out(lstm: int, tmp_path: Path) -> None:
    module, example = module_of(1, lstm=lstm)
    ticks, bad = PACK_TICKS + 6, PACK_TICKS + 2
    sessions, obs = Sessions(tmp_path), list(rng().standard_normal((ticks - 1, 3)).astype(np.float32))
    outputs = tick_by_tick(module, example, obs)
    steps = steps_of(obs, outputs, 0)
    log = sessions.start("s")
    for number in range(ticks):
        state = State("s", tick=number)
        if number == bad:  # an agent raised before it chose
            log.failed(state, b"{}", 0.0, 0.0, "agent 'a': ValueError: a bug")
            continue
        acted = number - (number > bad)
        state.step, state.value = steps[acted], outputs["value"][acted]
        log.tick(state, b"{}", b"{}", 0.0, 0.0)
    log.end("stop", None)
    (comparison,) = compare(sessions.close(), Version("v", module, example))
    assert isinstance(comparison, Comparison)
    assert comparison.number.tolist() == [number for number in range(ticks) if number != bad]
    assert comparison.left_out == 1
    assert comparison.kl.max() < 1e-6
    assert np.abs(comparison.value).max() < 1e-6


def test_a_model_that_fails_fails_for_every_session(tmp_path: Path) -> None:
    module, example = module_of(1)
    sessions = Sessions(tmp_path)
    for number in range(2):
        obs = list(normals(3)[:5])
        sessions.play(f"{number}", steps_of(obs, tick_by_tick(module, example, obs), number))
    with torch.no_grad():
        next(module.parameters()).fill_(np.nan)
    results = list(compare(sessions.close(), Version("v", module, example)))
    assert all(isinstance(result, NotCompared) and "NaN at 5 of 5" in result.error.message for result in results)
