"""A job without Python on a real Serve: the champion's contract decides which games play, at every door; and each of
several behaviours is learned."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import serve

from brayx.cluster.directory import stop_directory
from brayx.cluster.serving import serving_application
from brayx.errors import BadBody, ConfigError
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_client import ContractClient
from brayx.jobs.config import JobConfig
from brayx.jobs.recorded import read_meta
from brayx.jobs.shipped import TEMPLATES
from brayx.league.config import MAIN
from brayx.league.files import books_file
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.model.build import build_model
from brayx.tracking import Trial, aliases, find, local_files, register
from brayx.trainer import checkpoint
from brayx.trainer.checkpoint import Counters
from brayx.urls import sqlite_path
from tests.end_to_end.test_game import Side, Three
from tests.end_to_end.test_self_play import CONTRACT as SEAT
from tests.end_to_end.test_self_play import DUEL, RIVALS, Duel, Duels
from tests.end_to_end.test_self_play import OPTIONS as SELF_PLAY
from tests.integration.conftest import Ingress
from tests.integration.training import Training

PROJECT = "by-contract"
CONTRACT: dict[str, Any] = {
    "contract": 1,
    "observations": {"side": {"shape": [2]}},
    "actions": {
        "go": {"kind": "discrete", "size": 3, "start": 1},
        "steer": {"kind": "continuous", "size": 1},
        "aim": {"kind": "continuous", "size": 1},
    },
}
OBS = [[0.0, 1.0], [3.0, -2.0], [-5.0, 0.5]]
WAIT_S = 60.0
LEARNED = "learned"
OPTIONS = [
    f"project={LEARNED}",
    "actor.native_port=0",
    "actor.tcp_port=null",
    "model.engine=torch",
    "console_port=null",
    "buffer.batch_size=4",
    "trainer.target_games=20",
    "trainer.num_steps=1500",
]


@pytest.fixture(scope="module")
def urls(
    ingress: Ingress, new_tracking_db: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The doors of game.yaml, which has no contract, with a champion that has one."""
    options = [f"project={PROJECT}", "actor.native_port=0", "actor.tcp_port=0", "model.engine=torch"]
    trained = JobConfig.load(TEMPLATES / "game.yaml", [*options, f"contract={json.dumps(CONTRACT)}"])
    torch.manual_seed(1)
    module, _ = build_model(trained.folder, trained.models["model"].module, "model", trained.as_dict())
    place = tmp_path_factory.mktemp("champion")
    tracking_db, folder = new_tracking_db(place), place / "saved"
    folder.mkdir()
    about = {"job": trained.as_dict(), "folder": trained.folder}
    checkpoint.save(folder, module, torch.optim.Adam(module.parameters()), Counters(policy_version=7), about)
    trial = Trial.open(PROJECT, "made", tracking_db)
    register(trial, trial.save_checkpoint(folder, 100, {}), PROJECT, alias="champion")
    with pytest.raises(ConfigError, match=r"^actor\.forced\.aimm has no effect: no game has this action"):
        serving_application(JobConfig.load(TEMPLATES / "game.yaml", [*options, "actor.forced.aimm=0"]), tracking_db)
    limited = JobConfig.load(TEMPLATES / "game.yaml", [*options, "actor.forced.aim=0.1"])
    serve.run(
        serving_application(limited, tracking_db),
        name=PROJECT,
        route_prefix=f"/{PROJECT}",
    )
    url = f"{ingress.http}/{PROJECT}"
    with urllib.request.urlopen(f"{url}/", timeout=WAIT_S) as reply:
        doors: dict[str, str] = json.load(reply)["doors"]
    yield {"ingress": url, "http": doors["http"], "tcp": doors["tcp"]}
    serve.delete(PROJECT)
    stop_directory(f"{PROJECT}/sessions")


def test_every_door_and_encoding_gives_the_same_actions(urls: dict[str, str]) -> None:
    played = []
    for door, encoding in (("ingress", "json"), ("http", "msgpack"), ("tcp", "packed")):
        contract = Contract.parse({**CONTRACT, "encoding": encoding})
        with ContractClient(urls[door], contract, timeout_s=WAIT_S) as client:
            reply = client.start()
            assert (reply["policy_version"], reply["forced"]) == (1, {"aim": 0.1}), "the registered version, limited"
            actions = [client.tick(obs) for obs in OBS]
            client.stop(OBS[0], terminated=True)
        assert all(action["go"] in (1, 2, 3) for action in actions)
        assert {float(action["aim"][0]) for action in actions} == {float(np.float32(0.1))}
        played.append([[action["go"], float(action["steer"][0])] for action in actions])
    np.testing.assert_allclose(played, [played[0]] * 3, atol=1e-5)
    assert np.ptp(played[0], axis=0).any(), "it looks at the game"


def test_a_game_with_another_contract_is_refused_by_field(urls: dict[str, str]) -> None:
    other = Contract.parse({**CONTRACT, "observations": {"side": {"shape": [3]}}})
    with (
        ContractClient(urls["tcp"], other, timeout_s=WAIT_S) as client,
        pytest.raises(BadBody, match=r"observations\.side\.shape is \[3\], expected \[2\]"),
    ):
        client.start()


@contextlib.contextmanager
def playing(door: str, *games: type[Side]) -> Iterator[None]:
    """Plays these games over and over, until the door closes."""
    ended = threading.Event()

    def play(kind: type[Side]) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError):
            game = kind(door, 0)
            for number in itertools.count():
                game.play(f"{kind.__name__}-{number}")
                if ended.is_set():
                    break

    threads = [threading.Thread(target=play, args=(game,), daemon=True) for game in games]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(WAIT_S)


def status(ingress: Ingress) -> dict[str, Any]:
    """The status page of the training at the ingress; empty: it is not open yet."""
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(ingress.http, timeout=5) as reply:
        return json.load(reply)
    return {}


def opened_door(training: Training, ingress: Ingress) -> str:
    """The faster door, once it is open."""
    doors: dict[str, str] = {}
    training.until(lambda: doors.update(status(ingress).get("doors", {})) or doors, "its door is open")
    return doors["http"]


@pytest.mark.cluster
def test_each_behaviour_learns_by_itself_and_has_its_champion(ingress: Ingress, tracking_db: str) -> None:
    own = ("behaviours={agent: {}, three: {network: {hidden: [32]}}}", "other_behaviours=refuse")
    job = JobConfig.load(TEMPLATES / "game.yaml", [*OPTIONS, *own])
    with Training(job, ingress, tracking_db) as training:
        door = opened_door(training, ingress)
        refused = Contract.parse({**CONTRACT, "behaviour": "four"})
        with ContractClient(door, refused, timeout_s=WAIT_S) as client, pytest.raises(BadBody, match="is 'four'"):
            client.start()
        with playing(door, Side):  # says the first contract
            training.until(lambda: status(ingress).get("policy_versions"), "it acts")
            with playing(door, Three):  # appears while the first one learns
                training.until(lambda: training.result, "both have their steps")
    result = training.result
    assert result is not None
    assert result.finished
    assert result.numbers["env_steps"] >= 3000
    for name, contract, hidden in (("agent", Side.contract, [64, 64]), ("three", Three.contract, [32])):
        assert re.search(rf"{name}: champion: {LEARNED}-{name} version 1, mean return", result.outcome)
        champion = find(f"models:/{LEARNED}-{name}@champion", tracking_db)
        trial = Trial.attach(tracking_db, champion.run_id)
        assert (trial.name, trial.status) == ("main" if name == "agent" else name, "FINISHED")
        assert champion.tags["brayx.contract"] == Contract.parse(contract).id
        assert read_meta(local_files(champion, tracking_db))["job"]["network"]["hidden"] == hidden


def sayings(capfd: pytest.CaptureFixture[str]) -> Callable[[str], bool]:
    """A function that tells whether the process has said a pattern since now."""
    said: list[str] = []

    def says(pattern: str) -> bool:
        said.append("".join(capfd.readouterr()))
        return re.search(pattern, "".join(said)) is not None

    return says


@pytest.mark.cluster
def test_teams_are_learned_by_self_play(ingress: Ingress, tracking_db: str, capfd: pytest.CaptureFixture[str]) -> None:
    contract = json.dumps(DUEL[0])
    options = [*OPTIONS, *SELF_PLAY, "trainer.num_steps=1000000", "self_play.snapshot_every=300"]
    job = JobConfig.load(TEMPLATES / "game.yaml", [*options, f"contract={contract}"])
    says = sayings(capfd)
    with Training(job, ingress, tracking_db) as training, Duels(opened_door(training, ingress)) as duels:
        duels.may_learn.set()
        training.until(lambda: says("behaviour 'duel' has teams 0, 1: one learns"), "it begins")
        training.until(lambda: says(r"'duel': main:1 is champion: there is no champion yet"), "it has a champion")
        training.until(lambda: past_opponents(tracking_db), "it learns against versions that were never champion")
    assert training.result is not None
    assert re.search(r"main:1 +\d+ ", training.result.outcome), "the table has the first version"
    assert find(f"models:/{LEARNED}-duel@champion", tracking_db).run_id == training.result.trial.run_id
    assert "league_win_rate.past" in training.result.numbers, "of these games"


def past_opponents(uri: str) -> list[Member]:
    """The opponents of the learner that are newer than the champion."""
    (books,) = books_of(uri)
    with contextlib.closing(Ledger(books, read_only=True)) as ledger:
        champion, pairs = ledger.champion(), ledger.pairs()
    met = [member for pair in pairs if Member(MAIN) in pair for member in pair]
    return [member for member in met if champion is not None and member.version > champion.version]


@pytest.mark.cluster
def test_behaviours_of_different_teams_learn_against_each_other_s_past(
    ingress: Ingress, tracking_db: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*OPTIONS, *SELF_PLAY, "trainer.num_steps=1000000", "self_play.snapshot_every=300"]
    job = JobConfig.load(TEMPLATES / "game.yaml", [*options, f"contract={json.dumps(RIVALS)}"])
    says = sayings(capfd)
    with Training(job, ingress, tracking_db) as training, Duels(opened_door(training, ingress), Rivalry) as duels:
        duels.may_learn.set()
        for team, name in enumerate(("striker", "keeper")):
            training.until(lambda team=team, name=name: says(f"'{name}' has team {team}: while another"), "it begins")
        for name in ("striker", "keeper"):
            training.until(lambda name=name: says(f"'{name}': {name}:3 joins the pool"), "it learns")
        (books,) = books_of(tracking_db)
        training.until(lambda: past_players(books) == {"striker", "keeper"}, "past versions of both play")
    with contextlib.closing(Ledger(books, read_only=True)) as ledger:
        champions, pairs = {name: ledger.champion(name) for name in ("striker", "keeper")}, ledger.pairs()
    assert all({member.player for member in pair} == {"striker", "keeper"} for pair in pairs), (
        "each meets the other one"
    )
    for name, champion in champions.items():
        assert champion is not None
        assert find(f"models:/{LEARNED}-{name}@champion", tracking_db).version == champion.version


def books_of(uri: str) -> list[Path]:
    """The books of all leagues."""
    database = sqlite_path(uri)
    assert database is not None
    return [*database.parent.glob("leagues/*/books.sqlite")]


def past_players(books: Path) -> set[str]:
    """The players of which past versions have played."""
    with contextlib.closing(Ledger(books, read_only=True)) as ledger:
        return {member.player for pair in ledger.pairs() for member in pair if member.version}


class Rivalry(Duel):
    """A duel of two behaviours."""

    def duel(self, contracts: Sequence[Mapping[str, Any]] = RIVALS) -> None:
        super().duel(contracts)


class Seats(Duel):
    """A duel of which both sessions say whose game it is, and each its result."""

    def duel(self, contracts: Sequence[Mapping[str, Any]] = (SEAT, SEAT)) -> None:
        super().duel(contracts)

    def session(self, game: str, team: int) -> str:
        return f"{game}-agent-{team}"

    def post(self, kind: str, session: str, **body: Any) -> Any:
        if kind == "stop":
            body["result"] = ["draw", "win", "loss"][int(body["reward"])]
        return super().post(kind, session, **body)


@pytest.mark.cluster
def test_a_league_learns_from_the_first_game_what_it_plays(
    ingress: Ingress, tracking_db: str, capfd: pytest.CaptureFixture[str]
) -> None:
    players = "{main: {role: main, snapshot_every: 300}, exploiter: {role: exploiter, of: main, share: 0.3}}"
    league = f"league={{kind: league, model: model, players: {players}}}"
    options = [*OPTIONS, "buffer.batch_size=2", "trainer.num_steps=1000000", "self_play=null", league]
    says = sayings(capfd)
    with Training(JobConfig.load(TEMPLATES / "game.yaml", options), ingress, tracking_db) as training:
        door = opened_door(training, ingress)
        with Duels(door, Seats) as duels:
            duels.may_learn.set()
            training.until(lambda: says(r"main:1 is champion: "), "a snapshot plays")
            training.until(lambda: aliases(LEARNED, tracking_db), "its alias is set, which follows the books")
            other = Contract.parse({**SEAT, "behaviour": "other"})
            with ContractClient(door, other, timeout_s=WAIT_S) as client, pytest.raises(BadBody, match='"other"'):
                client.start()
    result = training.result
    assert result is not None
    assert find(f"models:/{LEARNED}@champion", tracking_db).tags["brayx.contract"] == Contract.parse(SEAT).id
    assert re.search(r"main:1 +\d+ ", result.outcome), "the table has the first version"
    with contextlib.closing(Ledger(books_file(result.trial), read_only=True)) as ledger:
        assert {member.player for pair in ledger.pairs() for member in pair} == {"main", "exploiter"}
