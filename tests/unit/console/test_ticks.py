"""Any tick of a game can be shown as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from brayx.actor.live_ticks import LiveTick
from brayx.console.ticks import tick_of


@pytest.mark.parametrize("text", [r'{"x": "\ud800"}', "[" * 300 + "]" * 300, "9" * 5000, "NaN", "1e999", "no json"])
def test_any_body_of_a_game_can_be_shown(text: str) -> None:
    tick = tick_of(LiveTick(0, 0.0, 0.0, text.encode(), text.encode(), {"logits": np.array([np.inf, 0.0])}, ""))
    shown = json.loads(tick.model_dump_json())
    assert shown["input"] == shown["output"] == (None if text in ("NaN", "1e999") else text)
    assert shown["probabilities"] is None
