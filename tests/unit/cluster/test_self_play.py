"""The self-play of a behaviour on Ray, as the job begins it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brayx.cluster import self_play as module
from brayx.errors import StartupError, TrackingError
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.league import self_plays
from brayx.league.config import SelfPlayConfig
from brayx.league.files import books_file
from brayx.league.ledger import Ledger
from brayx.league.rivals import Rivals
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


def test_behaviours_that_play_different_teams_join_one_league_whose_books_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    joined: list[tuple[str, str]] = []

    def start_play(job: Any, trainee: Any, say: Any, group: module.RayRivalGroup | None = None) -> Any:
        joined.append((trainee.trial.run_id, "" if group is None else group.trial.run_id))
        if len(joined) == 3:
            raise TrackingError("MLflow does not answer")
        return SimpleNamespace(look=list, close=list)

    def trainee(name: str, *teams: int) -> Any:
        numbers = SimpleNamespace(newest=lambda: {f"self_play_teams.{team}": 1.0 for team in teams})
        trial = SimpleNamespace(run_id=name, uri=f"sqlite:///{tmp_path}/mlflow.db")
        return SimpleNamespace(numbers=numbers, trial=trial, learner=SimpleNamespace(running=True))

    monkeypatch.setattr(module, "RaySelfPlay", start_play)
    monkeypatch.setattr(self_plays, "_RETRY_S", 0.0)
    teams: dict[str, tuple[int, ...]] = {"duel": (0, 1), "striker": (0,), "keeper": (), "other": ()}
    file = books_file(trainee("keeper").trial)
    file.parent.mkdir(parents=True)
    with contextlib.closing(Ledger(file)) as books:  # of before it was resumed
        Rivals({"keeper": SelfPlayConfig().league("model", "keeper")}, books).freeze("keeper", 1, "digest", 10)
    jobs: Any = dict.fromkeys(teams, SimpleNamespace(self_plays={"": SelfPlayConfig()}))
    plays = module.RaySelfPlays(said.append, "rivals")
    plays.look(jobs, {name: trainee(name, *named) for name, named in teams.items()})
    assert joined == [("duel", "")]
    for _ in range(3):
        plays.look(jobs, {name: trainee(name, *named) for name, named in (teams | {"keeper": (1,)}).items()})
    assert joined[1:] == [("striker", "keeper"), ("keeper", "keeper"), ("keeper", "keeper")]
    assert [line for line in said if "has team " in line] == [
        f"behaviour {name!r} has team {team}: while another team learns, past versions of its model play"
        for team, name in enumerate(("striker", "keeper"))
    ]
