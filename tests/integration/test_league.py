"""A league trains on Ray: games on two replicas, books in one actor. Meanwhile the actor and a replica are killed."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from ray import serve

from brayx.cluster import NAMESPACE
from brayx.cluster.cluster import Cluster
from brayx.errors import LeagueError
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.tracking import find
from deployments.job import JobConfig
from pipelines.checks import check_job
from pipelines.result import TrainResult
from pipelines.train import train_on
from tests.integration.conftest import Ingress
from tests.league_games import Players
from tests.waiting import until

PARTS = Path(__file__).parents[1] / "end_to_end" / "own_league"
OPTIONS = [
    "model.engine=torch", "actor.num_workers=2", "actor.native_port=null", "actor.tcp_port=null",
    "trainer.num_steps=400", "league.players.main.snapshot_every=80", "league.players.exploiter.snapshot_every=40",
]  # fmt: skip
WAIT_S = 600.0
"""Every step is of a few seconds; only a hanging one takes as long."""


class Training(threading.Thread):
    """Trains in the background; leaving its context interrupts a training that goes on.

    Attributes:
        result: of the training, once it has ended.
    """

    def __init__(self, job: JobConfig, ingress: Ingress, uri: str) -> None:
        super().__init__(name="training", daemon=True)
        self._job, self._uri = job, uri
        self._cluster = Cluster(port=int(ingress.http.rpartition(":")[2]), address="auto")
        self.result: TrainResult | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Training:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive():
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), interrupt)
        self.join(WAIT_S)

    def run(self) -> None:
        try:
            _, layout = check_job(self._job)
            self.result = train_on(self._cluster, self._job, layout, self._uri)
        except BaseException as error:
            self._error = error

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Waits for a condition, while the training goes on."""
        until(lambda: self._error or condition(), what, timeout_s=WAIT_S)
        if self._error is not None:
            raise self._error


class Books(NamedTuple):
    """What a league's books have.

    Attributes:
        counters: games by outcome.
        snapshots: digests of the snapshots.
        labels: all members.
    """

    counters: dict[str, int]
    snapshots: dict[Member, str]
    labels: list[str]


NO_BOOKS = Books({"counted": 0}, {}, [])


def books_of(job: JobConfig, folder: Path) -> Books:
    """The league's books as they are now; empty before there are any."""
    files = [*folder.glob("leagues/*/books.sqlite")]
    if not files:
        return NO_BOOKS
    try:
        with closing(Ledger(files[0], read_only=True)) as ledger:
            league = League(job.leagues["league"], ledger)
            snapshots = {snapshot.member: snapshot.digest for snapshot in league.snapshots}
            return Books(league.counters(), snapshots, [row.member.label for row in league.standings()])
    except LeagueError:  # they are being made
        return NO_BOOKS


def children(uri: str, parent: str) -> dict[str, list[str]]:
    """Status of the players' trials, by name."""
    found: dict[str, list[str]] = {}
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
        query = (
            "SELECT name, status FROM runs JOIN tags USING (run_uuid) WHERE key = 'mlflow.parentRunId' AND value = ?"
        )
        for name, status in database.execute(query, (parent,)):
            found.setdefault(name, []).append(status)
    return found


def test_a_league_trains_to_its_end_and_goes_on_after_it_and_a_replica_are_killed(
    ingress: Ingress, tracking_db: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in PARTS.glob("league*"):
        shutil.copy(file, tmp_path)
    job = JobConfig.load(tmp_path / "league.yaml", OPTIONS)

    def books() -> Books:
        return books_of(job, tmp_path)

    with Training(job, ingress, tracking_db) as training:
        with Players(ingress.http.replace("http", "ws")) as players:
            training.until(lambda: books().snapshots, "a first snapshot")
            frozen = books().snapshots
            (league,) = [name for name in named_actors() if name.endswith("/league")]
            actor: Any = ray.get_actor(league, namespace=NAMESPACE)
            pid = ray.get(actor.pid.remote(), timeout=WAIT_S)
            before = players.ended
            os.kill(pid, signal.SIGKILL)
            training.until(lambda: players.ended >= before + 60, "games after the league was killed")
            trials = functools.partial(children, tracking_db, league.partition("/")[0])
            training.until(lambda: "FINISHED" in trials()["exploiter"], "an exploiter that starts anew")
        training.until(lambda: books().counters["counted"] >= players.ended, "every game that ended is counted")
        assert books().counters["counted"] <= players.begun
        assert ray.get(actor.pid.remote(), timeout=WAIT_S) != pid
        assert frozen.items() <= books().snapshots.items()

        killed, _ = replicas()
        ray.kill(ray.get_actor(killed, namespace="serve"))
        training.until(lambda: is_whole(without=killed), "another replica")
        with Players(ingress.http.replace("http", "ws")) as more:
            training.until(lambda: training.result is not None, "the end of the training")
    result, (counters, digests, labels) = training.result, books()
    assert result is not None
    assert result.finished
    assert counters["counted"] <= players.begun + more.begun
    assert counters["contradictory"] == 0
    assert result.numbers["env_steps"] >= 400
    assert result.numbers["league_games.counted"] <= counters["counted"]
    assert "league_games.repeated" not in result.numbers
    assert all(label in result.outcome for label in labels)
    assert len(set(digests.values())) == len(digests) >= 2
    for member, digest in digests.items():
        tags = find(f"models:/higher/{member.version}", tracking_db).tags
        assert (tags["brayx.player"], tags["brayx.digest"]) == (member.player, digest)
    status = children(tracking_db, result.trial.run_id)
    assert status["main"] == ["FINISHED"]
    assert set(status["exploiter"]) == {"FINISHED"}
    starts = sum(member.player == "exploiter" for member in digests)
    assert len(status["exploiter"]) in (starts, starts + 1), "an exploiter starts anew after each of its snapshots"
    assert re.search(r"main:\d+ joins the pool", "".join(capfd.readouterr()))
    assert not [name for name in named_actors() if result.trial.run_id in name]


def replicas() -> list[str]:
    """Names of the actors that are the job's replicas."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in found if each["name"].startswith("SERVE_REPLICA::actor#")]


def is_whole(*, without: str) -> bool:
    """Whether two replicas run, and this one is not among them."""
    states = serve.status().applications["actor"].deployments["actor"].replica_states
    names = replicas()  # the states may be from before, the names are not
    return without not in names and len(names) == 2 and states == {"RUNNING": 2}


def named_actors() -> list[str]:
    """Names of the actors of jobs."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in found if each["namespace"] == NAMESPACE]
