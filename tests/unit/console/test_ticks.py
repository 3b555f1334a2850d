"""Any tick of a game can be shown as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from brayx.actor.live_ticks import LiveTick
from brayx.console.ticks import SessionBodies, tick_of


@pytest.mark.parametrize("text", [r'{"x": "\ud800"}', "[" * 300 + "]" * 300, "9" * 5000, "NaN", "1e999", "no json"])
def test_any_body_of_a_game_can_be_shown(text: str) -> None:
    live = LiveTick(0, 0.0, 0.0, text.encode(), text.encode(), {"logits": np.array([np.inf, 0.0])}, "")
    tick = tick_of(live, SessionBodies(text))
    shown = json.loads(tick.model_dump_json())
    assert shown["input"] == shown["output"] == (None if text in ("NaN", "1e999") else text)
    assert shown["probabilities"] is None


def test_a_tick_of_a_session_with_rows_is_shown_with_one_agent_or_several() -> None:
    one = {"value": np.array([0.5], np.float32), "policy_version": np.array([3]), "logits": np.zeros((1, 2))}
    bodies = SessionBodies(None)
    shown = tick_of(LiveTick(0, 0.0, 0.0, b"", b"", one, ""), bodies)
    assert (shown.value, shown.policy_version, shown.probabilities) == (0.5, 3, None)
    two = {name: np.tile(array, 2) for name, array in one.items()}
    several = tick_of(LiveTick(0, 0.0, 0.0, b"", b"", two, ""), bodies)
    assert (several.value, several.policy_version) == (None, None)


def test_a_failed_tick_shows_no_zeros_as_an_action() -> None:
    filled = {"action": np.array(0), "value": np.array(0.0), "logits": np.zeros(2), "policy_version": np.array(0)}
    failed = tick_of(LiveTick(0, 0.0, 0.0, b"{}", b"", filled, "error: obs has shape [2]"), SessionBodies(None))
    assert (failed.action, failed.value, failed.probabilities, failed.policy_version) == (None, None, None, None)
    assert (failed.event, failed.arrays) == ("error: obs has shape [2]", {})
