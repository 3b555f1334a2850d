"""When the self-play of a behaviour begins, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from brayx.cluster.self_play import RaySelfPlays
from brayx.errors import TrackingError
from brayx.league import self_plays as module
from brayx.league.config import SelfPlayConfig
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


def test_behaviours_that_play_different_teams_on_a_cluster_are_named_once() -> None:
    said: list[str] = []
    plays = RaySelfPlays(said.append)

    def trainee(*teams: int) -> Any:
        numbers = {f"self_play_teams.{team}": 1.0 for team in teams}
        return SimpleNamespace(
            numbers=SimpleNamespace(newest=lambda: numbers), learner=SimpleNamespace(running=not teams)
        )

    jobs: Any = dict.fromkeys(
        ("duel", "striker", "keeper", "other"), SimpleNamespace(self_plays={"": SelfPlayConfig()})
    )
    plays.look(jobs, {"duel": trainee(0, 1), "striker": trainee(0), "other": trainee()})
    assert said == []
    for _ in range(2):
        plays.look(jobs, {"striker": trainee(0), "keeper": trainee(1), "other": trainee()})
    assert said == [
        "behaviours striker, keeper play different teams: on a cluster they learn against each other as they are"
    ]
