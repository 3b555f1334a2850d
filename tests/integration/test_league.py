"""A league trains on Ray, in one process, and on Ray again: games on two replicas, books in one actor.

Meanwhile its console is used; its hubs, a learner, the actor of the books, and a replica are killed; a player diverges.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import sqlite3
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import ray
import torch
from ray import serve

from brayx.cluster import NAMESPACE
from brayx.cluster.named import call_with_retry
from brayx.engines.torch import module_weights
from brayx.errors import LeagueError
from brayx.gamecore.client import Client
from brayx.jobs.config import JobConfig
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.model.build import build_model
from brayx.model.snapshots import SnapshotFiles, digest_of
from brayx.ports import free_port
from brayx.tracking import Trial, aliases, find
from tests.end_to_end.console_jobs import Console, new_keys
from tests.end_to_end.jobs import brayx, setting, without_ray
from tests.integration.conftest import Ingress
from tests.integration.training import WAIT_S, Training
from tests.league_games import Players, play
from tests.processes import ours

pytestmark = pytest.mark.cluster

PARTS = Path(__file__).parents[1] / "end_to_end" / "own_league"
ANYWHERE = [
    "model.engine=torch",
    "league.players.main.snapshot_every=80",
    "league.pool_size=1000",
    "league.gate={check: league_check.score, at_most: 0.5, min_games: 5}",
]
"""Options of the job on every host."""
ON_RAY = [*ANYWHERE, "actor.num_workers=2", "actor.native_port=null", "actor.tcp_port=null"]
ENDLESS = ["trainer.num_steps=1000000", "league.players.exploiter={role: exploiter, of: main, share: 0.3}"]
"""Options of a training that is interrupted; its exploiter never restarts, since its results are then forgotten."""
CHECK = """
from pathlib import Path

def score(module, config):
    return 0.25 if Path(__file__).with_name("good").exists() else 0.75
"""
"""A gate's check that lets snapshots pass once a file exists."""
BREAK_IT = 'def loss(outputs, obs):\n    return outputs["value"].sum() * float("nan")\n'


class Books(NamedTuple):
    """What a league's books have.

    Attributes:
        counters: games by outcome.
        snapshots: digests of the snapshots.
        labels: all members.
        champion: the champion.
    """

    counters: dict[str, int]
    snapshots: dict[Member, str]
    labels: list[str]
    champion: Member | None


NO_BOOKS = Books({"counted": 0}, {}, [], None)


def books_of(job: JobConfig, folder: Path) -> Books:
    """The league's books as they are now; empty before there are any."""
    files = [*folder.glob("leagues/*/books.sqlite")]
    if not files:
        return NO_BOOKS
    try:
        with closing(Ledger(files[0], read_only=True)) as ledger:
            league = League(job.leagues["league"], ledger)
            snapshots = {snapshot.member: snapshot.digest for snapshot in league.snapshots}
            labels = [row.member.label for row in league.standings()]
            return Books(league.counters(), snapshots, labels, league.champion())
    except LeagueError:  # they are being made
        return NO_BOOKS


def check_books(folder: Path, ended: Sequence[str]) -> None:
    """Checks that the books of a league whose games have all ended, and that has forgotten nothing, agree."""
    (file,) = folder.glob("leagues/*/books.sqlite")
    with closing(Ledger(file, read_only=True)) as ledger:
        counters, drawn, ratings, pairs = ledger.counters(), ledger.drawn(), ledger.ratings(), ledger.pairs()
        assert not [game for game in ended if not ledger.has(game)]
        assert counters["counted"] >= len(ended)
        outcomes = ("counted", "broken_off", "contradictory")
        assert sum(drawn.values()) == 2 * sum(counters.get(outcome, 0) for outcome in outcomes)
        for member, rating in ratings.items():
            assert rating.games == sum(pair.games for members, pair in pairs.items() if member in members), member
        assert sum(pair.games for pair in pairs.values()) > 0
        files = SnapshotFiles(file.parent / "weights")
        for snapshot in ledger.snapshots():
            assert digest_of(files.read(snapshot.member.version)) == snapshot.digest
            assert snapshot.digest != untrained(folder)


@functools.cache
def untrained(folder: Path) -> str:
    """The digest of the weights that every player of the league begins with."""
    job = JobConfig.load(folder / "league.yaml")
    torch.manual_seed(job.seed)
    module, _ = build_model(job.folder, job.models["model"].module, "model", job.as_dict())
    return digest_of(module_weights(module))


def children(uri: str, parent: str) -> dict[str, list[str]]:
    """Status of the players' trials, by name."""
    statuses: dict[str, list[str]] = {}
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
        query = (
            "SELECT name, status FROM runs JOIN tags USING (run_uuid) WHERE key = 'mlflow.parentRunId' AND value = ?"
        )
        for name, status in database.execute(query, (parent,)):
            statuses.setdefault(name, []).append(status)
    return statuses


def test_a_league_on_ray_goes_on_after_kills_moves_to_one_process_and_back_and_ends(
    ingress: Ingress,
    tracking_db: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # 2 s by default, and each change waits for it
    for file in PARTS.glob("league*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "league_check.py").write_text(CHECK)
    (tmp_path / "break_it.py").write_text(BREAK_IT)
    ended = hubs_are_killed(ingress, tracking_db, tmp_path, Spoken(capfd))
    steps = in_one_process(tracking_db, tmp_path, ended)
    its_actor_a_learner_and_a_replica_are_killed(ingress, tracking_db, tmp_path, steps)
    said = Spoken(capfd)()
    assert re.search(r"main:\d+ joins the pool", said)
    assert "player 'breaker' is out, the league continues" in said


def hubs_are_killed(ingress: Ingress, uri: str, folder: Path, spoken: Spoken) -> list[str]:
    """Begins a league on Ray and interrupts it; returns the ids of its games."""
    port, headers = free_port(), new_keys(folder / "console-keys.txt")
    console_options = [f"console_port={port}", "console_keys_file=console-keys.txt"]
    job = JobConfig.load(folder / "league.yaml", [*ON_RAY, *ENDLESS, *console_options])
    console = Console(f"http://127.0.0.1:{port}", headers=headers["read"])
    door, ended = ingress.http.replace("http", "ws"), list[str]()

    def play_until_a_snapshot() -> None:
        """Plays no longer, because the check would not be asked about a snapshot that has a successor."""
        before = len(books_of(job, folder).snapshots)
        with Players(door) as players:
            training.until(lambda: len(books_of(job, folder).snapshots) > before, "a snapshot")
        ended.extend(players.games)

    with Training(job, ingress, uri) as training:
        play_until_a_snapshot()
        refused = re.compile(r"main:\d+ does not become champion: league_check.score is 0.75, expected at most 0.5")
        training.until(lambda: refused.search(spoken()), "a snapshot is refused")
        (folder / "good").touch()
        play_until_a_snapshot()
        crowned = re.compile(r"main:\d+ is champion: .*; league_check.score is 0.25, at most 0.5")
        training.until(lambda: crowned.search(spoken()), "a champion")
        ended.append(a_game_is_watched(console, door))
        what_the_console_shows(console, uri, folder)
        with Players(door) as players:
            killed = [process_of(name) for name in named_actors() if name.endswith("/hub")]
            assert len(killed) == 3  # the league's, and those of two players
            before = players.ended
            for process in killed:
                process.kill()
            training.until(lambda: players.ended >= before + 30, "games after the hubs were killed")
        ended.extend(players.games)
        training.until(lambda: books_of(job, folder).counters["counted"] >= len(ended), "every game is counted")
        check_books(folder, ended)
        hubs = [process_of(name) for name in named_actors() if name.endswith("/hub")]
        assert len(hubs) == 3
        assert not {process.pid for process in killed} & {process.pid for process in hubs}
    assert training.result is not None
    assert not training.result.finished
    check_books(folder, ended)
    with pytest.raises(httpx.ConnectError):
        console.get("/api/job")
    return ended


def a_game_is_watched(console: Console, door: str) -> str:
    """Follows a game's session in the console of the training; returns the game."""
    game = uuid.uuid4().hex
    sessions = [f"{game}-agent-{seat}" for seat in ("red", "blue")]
    with Client(door) as red, Client(door) as blue:
        red.start(session=sessions[0])
        blue.start(session=sessions[1])
        running = console.get("/api/sessions")
        assert {row["session"] for row in running} == set(sessions)
        assert console.get("/api/job")["sessions"] == 2
        # The script asks no model, and the league draws its seat; every game has at least one other player.
        session = next(row["session"] for row in running if row["player"] != "zero")
        console.get("/api/sessions/ticks", session=session)  # so that it is followed before the game is played
        ticks, end = list[Any](), ""
        with console.http.stream("GET", "/api/sessions/follow", params={"session": session}) as stream:
            play(red, blue)
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    message = json.loads(line.removeprefix("data: "))
                    ticks += message["ticks"]
                    end = message["end"]
    assert end == "stop"
    assert ticks[0]["output"]["number"] in range(3)
    assert ticks[0]["arrays"]["obs"] == [1.0]
    assert console.get("/api/sessions") == []
    return game


def what_the_console_shows(console: Console, uri: str, folder: Path) -> None:
    """Numbers, versions, the league, and no control for a key that may only read."""
    job = console.get("/api/job")
    assert (job["mode"], job["project"], job["trial"]) == ("train", "higher", "league")
    assert job["numbers"]["env_steps"] > 0
    assert league_trial(uri, folder).run_id in {trial["run_id"] for trial in console.get("/api/trials")}
    (model,) = console.get("/api/models")
    assert model["name"] == "higher"
    assert model["aliases"] == aliases("higher", uri)
    assert model["aliases"]["champion"] in {version["version"] for version in model["versions"]}
    assert console.get("/api/league")["champion"]
    promotion = {"json": {"version": model["versions"][0]["version"]}}
    assert console.refusal("POST", "/api/models/higher/promote", **promotion) == (403, "forbidden")


def in_one_process(uri: str, folder: Path, ended: Sequence[str]) -> int:
    """Continues the league without Ray; returns the env steps of its main player."""
    job = JobConfig.load(folder / "league.yaml", [*ANYWHERE, *ENDLESS])
    before, steps = books_of(job, folder), newest_step(league_trial(uri, folder))
    words = ["train", "league.yaml", *setting(*ANYWHERE, *ENDLESS)]
    with brayx(folder, *words, environment=without_ray(folder)) as command:
        command.until(command.says("the door is http://"), "the door is open")
        assert "(resumed)" in command.err
        assert books_of(job, folder) == before
        door = re.search(r"the door is (http://127\.0\.0\.1:\d+)", command.err)
        assert door is not None
        with Players(door[1].replace("http", "ws")) as players:
            command.until(lambda: len(books_of(job, folder).snapshots) > len(before.snapshots), "a further snapshot")
            command.until(lambda: players.ended >= 30, "games")
        command.process.send_signal(signal.SIGINT)
        assert command.ended() == 130, command.err
    check_books(folder, [*ended, *players.games])
    now = books_of(job, folder)
    assert before.snapshots.items() <= now.snapshots.items()
    assert now.counters["counted"] >= before.counters["counted"] + players.ended
    assert newest_step(league_trial(uri, folder)) > steps
    return newest_step(league_trial(uri, folder))


def its_actor_a_learner_and_a_replica_are_killed(
    ingress: Ingress, tracking_db: str, tmp_path: Path, steps: int
) -> None:
    """Continues the league on Ray with a further player, which diverges, to its end."""
    breaker = "league.players.breaker={role: exploiter, of: main, share: 0.2, trainer: {hooks: break_it}}"
    others = ["league.players.exploiter.snapshot_every=40", "league.players.main.trainer={where: train}"]
    job = JobConfig.load(tmp_path / "league.yaml", [*ON_RAY, breaker, *others, f"trainer.num_steps={steps + 300}"])
    at_first = books_of(job, tmp_path)

    def books() -> Books:
        return books_of(job, tmp_path)

    with Training(job, ingress, tracking_db) as training:
        with Players(ingress.http.replace("http", "ws")) as players:
            training.until(lambda: len(books().snapshots) > len(at_first.snapshots), "a further snapshot")
            frozen = books().snapshots
            (league,) = [name for name in named_actors() if name.endswith("/league")]
            actor: Any = ray.get_actor(league, namespace=NAMESPACE)
            pid = ray.get(actor.pid.remote(), timeout=WAIT_S)
            training.until(lambda: newest_step(league_trial(tracking_db, tmp_path)) > steps, "main learns")
            (rank,) = ours("RayTrainWorker")
            before = players.ended
            rank.kill()
            os.kill(pid, signal.SIGKILL)
            training.until(lambda: players.ended >= before + 60, "games after the league and a learner were killed")
            trials = functools.partial(children, tracking_db, league.partition("/")[0])
            training.until(lambda: "FINISHED" in trials()["exploiter"], "an exploiter that restarts")
        told = at_first.counters["counted"]
        training.until(lambda: books().counters["counted"] >= told + players.ended, "every game that ended is counted")
        assert books().counters["counted"] <= told + players.begun
        assert ray.get(actor.pid.remote(), timeout=WAIT_S) != pid
        assert frozen.items() <= books().snapshots.items()

        killed, _ = replicas()
        ray.kill(ray.get_actor(killed, namespace="serve"))
        training.until(lambda: is_whole(without=killed), "another replica")
        with Players(ingress.http.replace("http", "ws")) as more:
            training.until(lambda: training.result is not None, "the end of the training")
    result, (counters, digests, labels, champion) = training.result, books()
    assert result is not None
    assert result.finished
    assert counters["counted"] <= at_first.counters["counted"] + players.begun + more.begun
    assert at_first.snapshots.items() <= digests.items()
    assert champion is not None
    assert aliases("higher", tracking_db) == {"champion": champion.version}
    assert counters["contradictory"] == 0
    assert result.numbers["env_steps"] >= steps + 300
    assert result.numbers["league_games.counted"] <= counters["counted"]
    assert "league_games.repeated" not in result.numbers
    assert [label for label in labels if label not in result.outcome] == ["breaker"]
    assert len(set(digests.values())) == len(digests) >= 2
    assert untrained(tmp_path) not in digests.values()
    for member, digest in digests.items():
        tags = find(f"models:/higher/{member.version}", tracking_db).tags
        assert (tags["brayx.player"], tags["brayx.digest"]) == (member.player, digest)
    status = children(tracking_db, result.trial.run_id)
    assert status["main"] == ["FINISHED"]
    assert set(status["exploiter"]) == {"FINISHED"}
    assert status["breaker"] == ["FAILED"]
    starts = sum(member.player == "exploiter" for member in digests)
    assert len(status["exploiter"]) in (starts, starts + 1), "an exploiter restarts after each of its snapshots"
    assert not [name for name in named_actors() if result.trial.run_id in name]


def replicas() -> list[str]:
    """Names of the actors that are the job's replicas."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["name"].startswith("SERVE_REPLICA::actor#")]


def is_whole(*, without: str) -> bool:
    """Whether two replicas run, and this one is not among them."""
    states = serve.status().applications["actor"].deployments["actor"].replica_states
    names = replicas()  # the states may be from before, the names are not
    return without not in names and len(names) == 2 and states == {"RUNNING": 2}


def named_actors() -> list[str]:
    """Names of the actors of jobs."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def process_of(actor: str) -> psutil.Process:
    """The process of a named actor; waits for one that restarts."""
    handle: Any = ray.get_actor(actor, namespace=NAMESPACE)
    return psutil.Process(call_with_retry(handle.__ray_call__, lambda _: os.getpid(), timeout_s=WAIT_S))


def league_trial(uri: str, folder: Path) -> Trial:
    """The league's trial."""
    (league,) = folder.glob("leagues/*")
    return Trial.attach(uri, league.name)


def newest_step(league: Trial) -> int:
    """Env steps of the newest checkpoint of the main player."""
    with closing(sqlite3.connect(league.uri.removeprefix("sqlite:///"))) as database:
        query = (
            "SELECT run_uuid FROM runs JOIN tags USING (run_uuid) WHERE key = 'mlflow.parentRunId' AND name = 'main'"
        )
        ((run_id,),) = database.execute(query)
    return max((checkpoint.step for checkpoint in Trial.attach(league.uri, run_id).checkpoints()), default=0)


class Spoken:
    """What was printed since it was made."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd, self._text = capfd, ""

    def __call__(self) -> str:
        self._text += "".join(self._capfd.readouterr())
        return self._text
