"""`LeagueTraining`: learners that end or fail, with a real league, books and store; only the learners do not learn."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient

from brayx.engines.torch import module_weights
from brayx.errors import BrayxError, Diverged, TrackingError
from brayx.jobs.config import JobConfig
from brayx.jobs.stored_models import stored_model
from brayx.league.charts import PAYOFF_FILE
from brayx.league.files import books_file
from brayx.league.in_progress import GamesInProgress
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.training import LeagueTraining
from brayx.local.league_training import LocalLeague
from brayx.metrics.numbers import LocalNumbers
from brayx.model.build import build_model
from brayx.model.snapshots import SnapshotFiles
from brayx.tracking import Trial
from brayx.tracking.trial import Status
from brayx.trainer.config import TrainerConfig
from brayx.types import Weights

JOB = Path(__file__).parents[2] / "end_to_end" / "own_league" / "league.yaml"


@dataclass
class Learner:
    """Ends when told."""

    running: bool = True
    error: BrayxError | None = None

    def result(self, timeout_s: float | None = None) -> str:
        if self.error is not None:
            raise self.error
        return "summary"

    def stop(self) -> None:
        self.running = False

    def wait(self, timeout_s: float) -> bool:
        return not self.running


@dataclass
class Clerk:
    """Runs functions here."""

    trial: Trial

    def call(self, function: Callable[..., Any], *args: Any, start_s: float = 0.0) -> Any:
        return function(self.trial, *args)

    def in_background(self, function: Callable[..., Any], *args: Any) -> None:
        function(self.trial, *args)


@dataclass
class Player:
    """A player whose trial can be ended once, like a clerk's."""

    clerk: Clerk
    config: TrainerConfig
    numbers: LocalNumbers = field(default_factory=lambda: LocalNumbers({}, "env_steps"))
    learner: Learner = field(default_factory=Learner)
    status: Status | None = None

    def learn(self, env_steps: int) -> None:
        self.numbers.add("env_steps", env_steps)
        self.numbers.add("updates", self.config.weights_publish_interval)
        self.numbers.snapshot()

    def newest_weights(self) -> Weights:
        return {"w": np.zeros(3, np.float32)}

    def start(self, timeout_s: float) -> bool:
        return True

    def end(self, status: Status) -> None:
        if self.status is not None:
            raise TrackingError("the trial is closed")
        self.status = status


class Host:
    """A league in this process.

    Attributes:
        said: lines of the training.
        fails: raised instead of making a player.
    """

    def __init__(self, uri: str, players: str, folder: Path) -> None:
        job = JobConfig.load(JOB, [f"league.players={players}"])
        trial = Trial.open("higher", "league", uri)
        books_file(trial).parent.mkdir(parents=True)
        self.clerk, self.said, self.fails = Clerk(trial), list[str](), list[BrayxError]()
        self.numbers, self.config = LocalNumbers({}, "env_steps"), job.trainers["trainer"]
        self.ledger = Ledger(books_file(trial))
        config = job.leagues["league"]
        self.league = LocalLeague(League(config, self.ledger), GamesInProgress(config), self.numbers)
        files = SnapshotFiles(folder / "weights")
        self.training = LeagueTraining(job, trial, self.clerk, self, files, self.said.append)

    def trainee(self, player: str) -> Player:
        if self.fails:
            raise self.fails.pop()
        return Player(self.clerk, self.config)

    def replace(self, player: str, before: Player, now: Player) -> None: ...

    def drop(self, player: str, trainee: Player) -> None: ...


@pytest.fixture
def host(tracking_db: str, tmp_path: Path) -> Iterator[Callable[[str], Host]]:
    with contextlib.ExitStack() as stack:

        def make(players: str) -> Host:
            league = Host(tracking_db, players, tmp_path)
            stack.callback(league.ledger.close)
            stack.callback(league.clerk.trial.finish)
            return league

        yield make


def test_the_league_finishes_if_the_last_main_player_that_learns_fails(host: Callable[[str], Host]) -> None:
    league = host("{a: {role: main}, b: {role: main}}")
    first, second = league.training.trainees["a"], league.training.trainees["b"]
    first.learner.running = False
    league.training.look()
    assert league.training.running
    second.learner.running, second.learner.error = False, Diverged("loss is NaN")
    league.training.look()
    assert league.said == ["player 'b' is out, and the others have all their steps: loss is NaN"]
    assert (league.training.wait(0.0), league.training.result(0.0)) == (True, "summary")
    league.training.look()
    league.training.close(finished=True)
    assert (first.status, second.status) == ("FINISHED", "FAILED")


def test_the_league_fails_with_its_last_main_player(host: Callable[[str], Host]) -> None:
    league = host("{a: {role: main}, b: {role: main}}")
    for name, reason in (("a", "loss is NaN"), ("b", "loss is infinite")):
        learner = league.training.trainees[name].learner
        learner.running, learner.error = False, Diverged(reason)
        if name == "a":
            league.training.look()
    assert league.said == ["player 'a' is out, the league continues: loss is NaN"]
    with pytest.raises(Diverged, match="loss is infinite"):
        league.training.look()


def test_an_exploiter_that_cannot_restart_is_out_and_the_league_goes_on(host: Callable[[str], Host]) -> None:
    league = host("{main: {role: main}, x: {role: exploiter, of: main, snapshot_every: 150, restart: snapshot}}")
    before = league.training.trainees["x"]
    before.learn(150)
    league.fails.append(TrackingError("MLflow is away"))
    league.training.look()
    assert league.said == [
        "x:1 joins the pool: 150 env steps since the last snapshot, snapshot_every is 150",
        "player 'x' is out, the league continues: MLflow is away",
    ]
    assert before.status == "FINISHED"
    league.training.look()
    assert list(league.training.trainees) == ["main"]
    assert league.training.running


def test_a_registry_that_fails_delays_a_snapshot_and_ends_nothing(
    host: Callable[[str], Host], tracking_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    league = host("{main: {role: main, snapshot_every: 150}}")
    player = league.training.trainees["main"]
    player.learn(150)
    with contextlib.closing(sqlite3.connect(tracking_db.removeprefix("sqlite:///"))) as database:
        full = "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        database.execute(f"CREATE TRIGGER full BEFORE INSERT ON model_versions {full}")
        for _ in range(3):
            league.training.look()
        assert len(league.said) == 1
        assert "retries every 10 s: cannot register weights of trial 'league' as 'higher'" in league.said[0]
        with pytest.raises(TrackingError, match="cannot register weights"):
            league.training.register(league.said.append)
        database.execute("DROP TRIGGER full")
    league.training.look()
    assert len(league.said) == 1, "it was tried just now"
    monkeypatch.setattr(league.training, "_registry_at", 0.0)
    league.training.look()
    assert league.said[1] == "main:1 joins the pool: 150 env steps since the last snapshot, snapshot_every is 150"


def test_of_rivals_one_draws_the_pictures(
    host: Callable[[str], Host], tracking_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brayx.league.training._PICTURES_S", 0.0)
    league = host("{main: {role: main}}")
    for draws in (False, True):
        league.league.draws = draws
        league.training.look()
        files = MlflowClient(tracking_db).list_artifacts(league.clerk.trial.run_id)
        assert (PAYOFF_FILE in {file.path for file in files}) == draws


def test_a_registered_snapshot_is_built_from_what_is_registered(host: Callable[[str], Host], tracking_db: str) -> None:
    league = host("{main: {role: main, snapshot_every: 150}}")
    player, job = league.training.trainees["main"], JobConfig.load(JOB)
    module, _ = build_model(job.folder, "league_parts", "model", {})
    weights = module_weights(module)
    player.learn(150)
    player.newest_weights = lambda: weights
    league.training.look()
    with stored_model("models:/higher/1", tracking_db) as stored:
        assert stored.job().leagues["league"].players["main"].snapshot_every == 150
        built, (example,) = stored.build()
    assert example.shape == (2, 1)
    assert all(np.array_equal(array, weights[name]) for name, array in module_weights(built).items())
