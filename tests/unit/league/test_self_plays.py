"""When the self-play of a behaviour begins, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from brayx.errors import TrackingError
from brayx.league import self_plays as module
from brayx.league.self_plays import SelfPlays


def test_each_outage_of_mlflow_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    plays: SelfPlays[Any] = SelfPlays(said.append)

    def fails(say: Callable[[str], None]) -> Any:
        raise TrackingError("MLflow does not answer")

    assert not plays._begin("duel", fails)
    assert not plays._begin("duel", SimpleNamespace), "it waits until the next try"
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    plays._try_at = 1.0
    assert not plays._begin("duel", fails)
    assert plays._begin("duel", lambda say: None)
    assert not plays._begin("chase", fails)
    assert said == [
        f"behaviour {name!r} waits with its self-play until MLflow answers: MLflow does not answer"
        for name in ("duel", "chase")
    ]
