"""Clients of a served league ask for their opponent: what they get, what is refused, and who is not affected."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from websockets.sync.client import connect

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.errors import (
    BadBody,
    BadWeights,
    BrayxError,
    ConfigError,
    HeaderTooLarge,
    LeagueError,
    ProtocolError,
    VersionUnknown,
)
from brayx.gamecore.client import Client
from brayx.jobs.config import JobConfig
from brayx.jobs.weights import acting_from, pool_args, sources_of
from brayx.league.files import POINTS_TAG
from brayx.league.member import Rated
from brayx.league.requested import ServedPool, draw, mix_of, parse_request, read_pool
from brayx.league.served import ServedLeague, ServedOpponents, served_league
from brayx.local.serving import Serving
from brayx.metrics import Recorder
from brayx.model.local import LocalModel
from brayx.model.pool import Pool as Registry
from brayx.tracking.registry import tag
from tests.served_league import BOOKS, LEVELS, PROJECT, Pool, load
from tests.waiting import until_awaited

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start waits for MLflow to be imported, which takes long on a busy machine."""
    monkeypatch.setattr("brayx.league.served._READ_S", WAIT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the jobs, whose modules load once in a process."""
    return tmp_path_factory.mktemp("opponents")


@pytest.fixture
def job(folder: Path) -> JobConfig:
    return load(folder, league=True)


@pytest.fixture
def pool(tmp_path: Path, tracking_db: str) -> Pool:
    pool = Pool(tmp_path, tracking_db)
    pool.fill()
    return pool


@pytest.fixture(scope="module")
def unchanged(folder: Path, new_tracking_db: Callable[[Path], str]) -> Pool:
    """A pool with books, for tests that do not change it."""
    pool = Pool(folder, new_tracking_db(folder))
    pool.fill()
    pool.books()
    return pool


@pytest.fixture(scope="module")
def serving(unchanged: Pool, folder: Path) -> Iterator[Serving]:
    with Serving(load(folder, league=True), unchanged.uri) as serving:
        yield serving


@pytest.fixture(scope="module")
def with_levels(unchanged: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The same with calibrated levels."""
    folder = tmp_path_factory.mktemp("levels")
    (folder / "levels.yaml").write_text(LEVELS)
    with Serving(load(folder, league=True), unchanged.uri) as serving:
        yield serving


def start(serving: Serving, opponent: Any, door: str = "http", session: str | None = None) -> tuple[Any, list[float]]:
    """The reply to a start, and value and version of a tick, of a session that asks for an opponent."""
    with Client(serving.urls[door]) as client:
        reply = json.loads(client.start(json.dumps({"opponent": opponent}), session=session))
        tick = json.loads(client.tick(b"{}"))
        assert client.stop(b'{"result": "win"}') == b"Game Stopped"
    assert tick[2] == "train", "it plays as where ratings come from"
    return reply, tick[:2]


def ticked(client: Client, body: bytes = b"{}") -> Any:
    """Value and version of a tick."""
    return json.loads(client.tick(body))[:2]


def test_a_version_that_a_kill_left_out_of_the_pool_is_nobodys_newest(pool: Pool, job: JobConfig) -> None:
    pool.books()
    pool.add(7, "exploiter")
    with Serving(job, pool.uri) as serving:
        reply, _ = start(serving, {"player": "exploiter"})
    assert reply["opponent"]["version"] == 3


@pytest.mark.parametrize("door", ["http", "ws", "tcp"])
def test_a_start_gets_the_opponent_that_it_asks_for(serving: Serving, door: str) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"version": 4}, {"player": "main", "version": 4, "points": 1500.0}),
        ({"version": 5}, {"player": "main", "version": 5, "points": 2000.0}),
        ({"version": 6}, {"player": None, "version": 6, "points": None}),
        ({"player": "exploiter"}, {"player": "exploiter", "version": 3, "points": 1300.0}),
        ({"player": "main"}, {"player": "main", "version": 2, "points": 1100.0}),  # the champion
        ({"rating": 1300}, {"player": "exploiter", "version": 3, "points": 1300.0}),
        ({"rating": 1}, {"player": "main", "version": 1, "points": 900.0, "limit": "weakest"}),
        ({"rating": 1500.5}, {"player": "main", "version": 4, "points": 1500.0, "limit": "strongest"}),
    ]
    for request, expected in cases:
        reply, (value, version) = start(serving, request, door)
        assert reply == {"opponent": expected}
        assert value == version == expected["version"], "the weights are those of the version that the reply names"


def test_the_protocols_examples_are_true(serving: Serving) -> None:
    page = (Path(__file__).parents[3] / "docs/protocol.md").read_text()
    block = page.partition("## Opponents and results")[2].partition("```json\n")[2].partition("```")[0]
    examples = json.loads(block)
    assert len(examples) == 4
    for example in examples:
        assert start(serving, example["start"]["opponent"])[0] == example["reply"]


def test_who_asks_for_nothing_gets_the_alias_while_others_have_their_opponents(serving: Serving) -> None:
    """More versions play at once than the two that stay in memory."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(serving.urls["tcp"])) for _ in range(7)]
        assert clients[0].start() == b"Game Started"
        for version, client in enumerate(clients[1:], 1):
            client.start(json.dumps({"opponent": {"version": version}}))
        for _ in range(3):
            assert [ticked(client)[1] for client in clients] == [2, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("resident", [1, 2])
def test_beside_the_champion_as_many_opponents_stay_in_memory_as_may(pool: Pool, folder: Path, resident: int) -> None:
    job = load(folder, league=True, engine="torch")
    leagues = {name: league.model_copy(update={"resident": resident}) for name, league in job.leagues.items()}
    with Serving(job.model_copy(update={"leagues": leagues}), pool.uri) as serving:
        for version in (1, 3, 4, 5, 6):
            assert start(serving, {"version": version}, "tcp")[1] == [version, version]
        assert serving._models["model"]._versions.known() == [2, *(4, 5, 6)[-resident:]]


def test_a_rating_is_mixed_of_two_neighbours_by_the_games_id(serving: Serving) -> None:
    rated = [Rated(member, points) for member, points in BOOKS.items() if member.version != 5]
    mix = mix_of(rated, 1040.0)
    games = [f"game-{i}" for i in range(30)]
    expected = {game: draw(mix, game).member.version for game in games}
    assert set(expected.values()) == {1, 2}
    for game, version in expected.items():
        for seat in ("", "-agent-b"):  # another session of the same game
            assert start(serving, {"rating": 1040.0}, "tcp", game + seat)[1] == [version, version]


def test_what_cannot_be_is_refused_and_others_play_on(serving: Serving) -> None:
    refused: list[tuple[Any, type[BrayxError], str]] = [
        ({"version": 70}, VersionUnknown, "nearest is 6"),
        ({"player": "mian"}, LeagueError, "'main'.*: exploiter, main, tactics"),
        ({"level": "easy"}, LeagueError, "brayx league calibrate"),
        ({"level": 1}, BadBody, r"opponent\.level is 1"),
        ({"rating": float("nan")}, BadBody, r"opponent\.rating is nan"),
        ({"rating": "1200"}, BadBody, r"opponent\.rating is '1200'"),
        ({"raiting": 1200}, BadBody, "nearest is 'rating'"),
        ({"version": 1, "player": "main"}, BadBody, "expected one of"),
        ("strong", BadBody, "opponent is 'strong'"),
    ]
    with Client(serving.urls["tcp"]) as running:
        running.start(b'{"opponent": {"version": 3}}')
        for request, error, message in refused:
            for door in ("http", "tcp"):
                with Client(serving.urls[door]) as client:
                    with pytest.raises(error, match=message):
                        client.start(json.dumps({"opponent": request}), session="refused")
                    assert client.start(b"{}", session="refused") == b"Game Started", "the id is free again"
                    client.stop()
            assert ticked(running) == [3.0, 3]


@pytest.mark.parametrize("bad", [True, None, [], {}, 10**400, float("inf"), -float("inf")])
def test_only_finite_numbers_are_ratings(bad: Any) -> None:
    with pytest.raises(BadBody, match=r"opponent\.rating"):
        parse_request({"rating": bad})


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "1"])
def test_only_positive_integers_are_versions(bad: Any) -> None:
    with pytest.raises(BadBody, match=r"opponent\.version"):
        parse_request({"version": bad})


def test_weights_of_another_model_refuse_the_start(pool: Pool, job: JobConfig) -> None:
    pool.books()
    pool.add(7, "main", {"other": np.zeros(3, np.float32)})
    with Serving(job, pool.uri) as serving, Client(serving.url) as client, pytest.raises(BadWeights):
        client.start(b'{"opponent": {"version": 7}}')


def test_without_the_books_the_tags_say_the_ratings(pool: Pool, job: JobConfig) -> None:
    with Serving(job, pool.uri) as serving, Client(serving.url) as client:
        reply = json.loads(client.start(b'{"opponent": {"player": "main"}}'))
        assert reply == {"opponent": {"player": "main", "version": 2, "points": None}}
        client.stop()
        with pytest.raises(LeagueError, match="no snapshot has a rating"):
            client.start(b'{"opponent": {"rating": 1000}}')
    tag(PROJECT, 1, {POINTS_TAG: "812.5"}, pool.uri)
    tag(PROJECT, 4, {POINTS_TAG: "nan"}, pool.uri)
    with Serving(job, pool.uri) as serving:
        opponent = {"player": "main", "version": 1, "points": 812.5}
        assert start(serving, {"rating": 812.5})[0] == {"opponent": opponent}
        assert start(serving, {"version": 4})[0] == {"opponent": {"player": "main", "version": 4, "points": None}}


def test_a_fixed_version_is_served_beside_opponents(pool: Pool, job: JobConfig) -> None:
    with Serving(
        job, pool.uri, models={"model": f"models:/{PROJECT}/6"}
    ) as serving, Client(serving.url) as client:  # fmt: skip
        client.start()
        assert json.loads(client.tick(b"{}"))[:3] == [6.0, 6, "serve"]
        assert start(serving, {"version": 4})[1] == [4.0, 4]


def test_a_job_without_a_league_refuses_who_asks_and_leaves_other_fields_to_the_game(pool: Pool, folder: Path) -> None:
    with Serving(load(folder, league=False), pool.uri) as serving:
        with Client(serving.url) as client:
            for words in ({"body": b'{"opponent": {"rating": 1000}}'}, {"opponent": {"rating": 1000}}):
                with pytest.raises(LeagueError, match="has no league"):
                    client.start(**words)
        with Client(serving.url) as client:
            with pytest.raises(LeagueError, match="no league is served"):
                client.start(opponent={"name": "Bob"})
            assert client.start(b'{"opponent": "Bob"}') == b"Game Started"


def test_a_league_without_snapshots_says_so(job: JobConfig, tmp_path: Path, tracking_db: str) -> None:
    Pool(tmp_path, tracking_db)
    with Serving(job, tracking_db) as serving, Client(serving.url) as client:
        with pytest.raises(LeagueError, match="no snapshots yet"):
            client.start(b'{"opponent": {"rating": 1000}}')
        with pytest.raises(VersionUnknown):
            client.start(b'{"opponent": {"version": 1}}')


HEADERS: list[tuple[dict[str, Any], int]] = [
    ({"level": "hard"}, 4), ({"rating": 1250}, 3), ({"player": "exploiter"}, 3), ({"version": 6}, 6)
]  # fmt: skip


@pytest.mark.parametrize("door", ["http", "ws", "grpc"])
def test_a_start_may_ask_in_a_header_and_then_its_body_is_the_games_own(with_levels: Serving, door: str) -> None:
    for header, version in HEADERS:
        with Client(with_levels.urls[door]) as client:
            reply = json.loads(client.start(b'"not an object"', opponent=header))
            assert reply["opponent"]["version"] == version
            assert ticked(client) == [version, version]
    refused: list[tuple[dict[str, Any], type[BrayxError], str]] = [
        ({"levle": "hard"}, BadBody, "nearest is 'level'"),
        ({"rating": "strong"}, BadBody, r"opponent\.rating is 'strong', expected a finite number"),
        ({"rating": "nan"}, BadBody, r"opponent\.rating is nan"),
        ({"version": 0}, BadBody, r"opponent\.version is 0"),
        ({"version": 70}, VersionUnknown, "nearest is 6"),
        ({"level": "x" * 300}, HeaderTooLarge, "at most 256"),
    ]
    for header, error, message in refused:
        with Client(with_levels.urls[door]) as client, pytest.raises(error, match=message):
            client.start(opponent=header)


def test_a_bare_websocket_asks_in_its_url(serving: Serving) -> None:
    url = serving.urls["ws"].rstrip("/") + "/session?opponent=version%3D4"
    with connect(url, proxy=None) as connection:
        connection.send("{}")
        assert json.loads(connection.recv())[:2] == [4.0, 4]


def test_over_tcp_the_body_asks(serving: Serving) -> None:
    with Client(serving.urls["tcp"]) as client, pytest.raises(ProtocolError, match="into the start's JSON body"):
        client.start(opponent={"version": 4})
    with Client(serving.url) as client, pytest.raises(ConfigError, match="expected one key"):
        client.start(opponent={"version": 4, "player": "main"})


@pytest.fixture
def levels(folder: Path) -> Iterator[Path]:
    file = folder / "levels.yaml"
    file.write_text(LEVELS)
    yield file
    file.unlink()


@pytest.mark.parametrize("door", ["http", "tcp"])
def test_a_level_plays_as_it_was_calibrated(with_levels: Serving, door: str) -> None:
    with Client(with_levels.urls[door]) as client:
        reply = json.loads(client.start(b'{"opponent": {"level": "easy"}}'))
        assert reply == {"opponent": {"player": "main", "version": 1, "points": 700.0, "level": "easy"}}
        ticks = [json.loads(client.tick(json.dumps({"seen": i}))) for i in range(5)]
    assert all(tick[:4] == [1.0, 1, "train", 0.5] for tick in ticks), "version 1, exploring, at temperature 4"
    assert [tick[4] for tick in ticks] == [0, 0, 0, 1, 2], "two ticks late"
    with Client(with_levels.urls[door]) as client:
        client.start(b'{"opponent": {"level": "hard"}}')
        assert json.loads(client.tick(b'{"seen": 7}')) == [4.0, 4, "train", 2.0, 7]
    with Client(with_levels.urls[door]) as client, pytest.raises(LeagueError, match="nearest is 'hard'"):
        client.start(b'{"opponent": {"level": "hart"}}')


def served(pool: Pool, job: JobConfig) -> tuple[ServedLeague, LocalModel]:
    """The league of a service, and its model."""
    sources = sources_of(job, pool.uri, {})
    league = served_league(job, pool.uri, sources)
    registry = Registry(*pool_args(job, pool.uri, sources, league.versions))
    fetch = functools.partial(registry.weights, "model")
    return league, acting_from(sources["model"], job, "model", job.as_dict(), Recorder(), fetch=fetch).model


async def test_a_registry_that_hangs_holds_up_no_start_but_the_first(
    pool: Pool, job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brayx.league.served._LOOK_S", 0.0)  # each start has the registry read again
    monkeypatch.setattr("brayx.league.served._READ_S", 3600.0)
    league, model = served(pool, job)
    answers = asyncio.Event()
    answers.set()

    async def run(read: Callable[[], ServedPool]) -> ServedPool:
        await answers.wait()
        return await asyncio.to_thread(read)

    opponents = league.opponents(Services({"model": model}), run)

    async def start(request: dict[str, Any]) -> Any:
        seated = await asyncio.wait_for(opponents.seat("session", request), WAIT_S)
        assert seated is not None
        assert seated.reply is not None
        return seated.reply["opponent"]["version"]

    assert await start({"version": 6}) == 6
    answers.clear()
    for version in (1, 2, 3):
        assert await start({"version": version}) == version
    await asyncio.to_thread(pool.add, 7)
    answers.set()
    await until_awaited(lambda: opponents._reading is None, "the registry is read", WAIT_S)
    assert await start({"version": 7}) == 7
    await model.close()


async def test_a_read_that_hangs_takes_one_thread_however_many_start(
    pool: Pool, job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brayx.league.served._LOOK_S", 0.0)
    monkeypatch.setattr("brayx.league.served._READ_S", 0.01)
    league, model = served(pool, job)
    opponents = league.opponents(Services({"model": model}), asyncio.to_thread)
    assert isinstance(opponents, ServedOpponents)
    read, answers, threads = opponents._read, threading.Event(), []

    def hangs() -> ServedPool:
        threads.append(threading.current_thread())
        answers.wait(WAIT_S)
        return read()

    opponents._pool, opponents._read = await asyncio.to_thread(read), hangs  # type: ignore[assignment]
    try:
        for _ in range(20):
            assert await opponents.seat("session", {"version": 6}) is not None
            await until_awaited(lambda: opponents._reading is None, "the read has timed out", WAIT_S)
        assert len(threads) == 1
    finally:
        answers.set()
    await asyncio.to_thread(pool.add, 7)
    monkeypatch.setattr("brayx.league.served._READ_S", WAIT_S)
    monkeypatch.setattr("brayx.league.served._WAIT_S", WAIT_S)
    await opponents._newest()  # takes what the hanging read found
    assert (await opponents._newest()).versions.keys() == set(range(1, 8))
    await model.close()


def test_a_player_whose_trial_was_removed_for_good_is_left_out_and_trials_are_read_once(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    MlflowClient(pool.uri)._tracking_client.store._hard_delete_run(pool.players["exploiter"].run_id)
    run_ids: list[str] = []
    get_run = MlflowClient.get_run

    def counted(self: MlflowClient, run_id: str) -> Any:
        run_ids.append(run_id)
        return get_run(self, run_id)

    monkeypatch.setattr(MlflowClient, "get_run", counted)
    for _ in range(3):
        served = read_pool(PROJECT, pool.uri)
        assert [member.label for member in served.snapshots] == ["main:1", "main:2", "main:4", "main:5"]
        assert served.versions.keys() == set(range(1, 7))
    players = [trial.run_id for trial in pool.players.values()]
    assert sorted(run for run in run_ids if run in players) == sorted(players)


async def test_a_session_that_moves_keeps_its_opponent_and_how_late_it_sees(
    levels: Path, pool: Pool, job: JobConfig
) -> None:
    """Meanwhile the level of its request has become another opponent's."""
    as_dict = job.in_mode("serve").as_dict()
    league, model = served(pool, job)
    services = Services({"model": model})

    def replica() -> AgentActorFactory:
        opponents = league.opponents(services, asyncio.to_thread)
        return AgentActorFactory.of(job.actors["actor"], job.agents, job.folder, as_dict, services, opponents=opponents)

    async def ticks(actor: AgentActor, *seen: int) -> list[Any]:
        return [json.loads(await actor.tick(json.dumps({"seen": observation}).encode())) for observation in seen]

    before, after = replica()(), replica()
    await before.start("moves", b'{"opponent": {"level": "easy"}}')
    assert await ticks(before, 0, 1) == [[1.0, 1, "train", 0.5, 0]] * 2
    snapshot = await before.snapshot()
    assert snapshot is not None
    changed = LEVELS.replace("version: 1, temperature: 4.0, delay: 2", "version: 4, temperature: 1.0, delay: 0")
    await asyncio.to_thread(levels.write_text, changed)
    moved, fresh = after(), after()
    await moved.restore("moves", snapshot)
    assert await ticks(moved, 2, 3) == [[1.0, 1, "train", 0.5, 0], [1.0, 1, "train", 0.5, 1]]
    await fresh.start("starts", b'{"opponent": {"level": "easy"}}')
    assert await ticks(fresh, 7) == [[4.0, 4, "train", 2.0, 7]]
    await model.close()


def test_with_levels_a_rating_is_mixed_of_what_was_calibrated(with_levels: Serving) -> None:
    cases: list[tuple[float, dict[str, Any]]] = [
        (1250.0, {"player": "exploiter", "version": 3, "points": 1250.0}),
        (100.0, {"player": "main", "version": 1, "points": 700.0, "level": "easy", "limit": "weakest"}),
        (1480.0, {"player": "main", "version": 4, "points": 1480.0, "level": "hard"}),
    ]
    for rating, expected in cases:
        assert start(with_levels, {"rating": rating})[0] == {"opponent": expected}
    points = {start(with_levels, {"rating": 975.0}, "tcp", f"g{i}")[0]["opponent"]["points"] for i in range(20)}
    assert points == {700.0, 1250.0}


def test_a_scripted_player_can_be_asked_for(serving: Serving) -> None:
    with Client(serving.url) as client:
        reply = json.loads(client.start(b'{"opponent": {"player": "tactics"}}'))
        assert reply == {"opponent": {"player": "tactics", "version": None, "points": 1450.0}}
        assert json.loads(client.tick(b"{}")) == ["a script"]


def test_levels_that_are_wrong_are_told_before_anything_is_served(levels: Path, pool: Pool, job: JobConfig) -> None:
    levels.write_text(LEVELS.replace("served-league", "other"))
    with pytest.raises(ConfigError, match="model 'other'"):
        Serving(job, pool.uri)
    levels.write_text("model: 3")
    with pytest.raises(ConfigError, match=r"levels\.yaml: model"):
        Serving(job, pool.uri)
