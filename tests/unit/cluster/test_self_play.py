"""The self-play of a behaviour on Ray, as the job begins it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from brayx.cluster import self_play as module
from brayx.errors import StartupError
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.league.training import LeagueTraining
from brayx.tracking import Trial
from brayx.tracking.in_process import InProcessClerk
from tests.unit.local.test_self_play import CONTRACT


def test_a_league_that_does_not_start_leaves_no_process(tracking_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []

    def create_league(*parts: Any) -> Any:
        raise StartupError("Ray is full")

    monkeypatch.setattr(module, "create_league", create_league)
    monkeypatch.setattr(LeagueTraining, "close_check", lambda training: ended.append(training))
    job = JobConfig.load(TEMPLATES / "game.yaml", [f"contract={json.dumps(CONTRACT)}"])
    trial = Trial.open("duel", "main", tracking_db)
    parts: Any = {"trial": trial, "clerk": InProcessClerk(trial), "config": job.trainers["trainer"], "numbers": None}
    trainee: Any = SimpleNamespace(**parts, actors={}, names={"hub": "hub", "league": "league"})
    with pytest.raises(StartupError, match="Ray is full"):
        module.RaySelfPlay(job, trainee, lambda line: None)
    assert len(ended) == 1
    trial.finish("FAILED")
