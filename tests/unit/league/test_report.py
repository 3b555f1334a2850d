"""`brayx league` and `brayx promote --league`, over books that a league wrote and versions in a real registry."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.engines.base import save_weights
from brayx.errors import ConfigError, LeagueError
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.league.champion import set_champion
from brayx.league.config import LeagueConfig
from brayx.league.files import PLAYER_TAG, books_file
from brayx.league.finding import newest_league
from brayx.league.fit import expected
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.named import Opponents
from brayx.league.payoff import Pair
from brayx.league.promote import recorded_league
from brayx.league.ratings import Rating, Ratings
from brayx.league.report import Books, age_text, place_of
from brayx.league.requested import read_pool
from brayx.tracking import Trial, aliases, promote
from brayx.tracking.registry import register_files
from tests.unit.conftest import Run
from tests.unit.league.play import Playing

PLAYERS: dict[str, Any] = {
    "main": {"role": "main", "against": {"champion": 1.0}, "trainer": {"algorithm": {"name": "ppo"}}},
    "random": {"role": "script", "script": "somewhere.random_move"},
}
CONFIG = LeagueConfig(model="model", players=PLAYERS, gate={"min_games": 20})


@dataclass
class Written:
    """A league in a store.

    Attributes:
        trial: its trial.
        player: the trial of its player ``main``.
        league: writes its books.
        ledger: the books.
    """

    trial: Trial
    player: Trial
    league: Playing
    ledger: Ledger

    def freeze(self, folder: Path, value: float, env_steps: int) -> Member:
        """Registers a snapshot and adds it to the pool."""
        folder.mkdir(exist_ok=True)
        save_weights(folder / "weights.npz", {"w": np.full(3, value, np.float32)})
        entry = register_files(self.player, folder, "four", env_steps, tags={PLAYER_TAG: "main"})
        return self.league.freeze("main", entry.version, f"digest of {value}", env_steps)

    def play(self, first: int, count: int, result: str) -> None:
        """Plays games of the live player against the champion."""
        for number in range(first, first + count):
            sessions = {seat: self.league.assign(f"g{number}", f"g{number}-agent-{seat}") for seat in "xy"}
            for seat, member in sessions.items():
                other = {"win": "loss", "loss": "win", "draw": "draw"}[result]
                self.league.result(f"g{number}-agent-{seat}", other if member.version else result)
            for seat in sessions:
                self.league.ended(f"g{number}-agent-{seat}", "stop")


def new_league(uri: str, name: str = "league") -> Written:
    """A league without a snapshot."""
    trial = Trial.open("four", name, uri)
    trial.log_params({"model": {"kind": "model"}, "league": CONFIG.model_dump(mode="json"), "seed": 0})
    books_file(trial).parent.mkdir(parents=True)
    ledger = Ledger(books_file(trial))
    return Written(trial, Trial.open("four", "main", uri, parent=trial), Playing(CONFIG, ledger), ledger)


@pytest.fixture
def written(tracking_db: str, tmp_path: Path) -> Written:
    """A league whose champion is main:1, which main:2 has not played."""
    league = new_league(tracking_db)
    first = league.freeze(tmp_path / "files", 1.0, 1000)
    assert league.league.crown(first).passed
    league.play(0, 30, "win")
    league.freeze(tmp_path / "files", 2.0, 2000)
    return league


def finish(written: Written) -> None:
    written.ledger.close()
    written.trial.finish()


def test_a_league_is_shown_while_it_is_written(written: Written, command: Run) -> None:
    shown = command("league", "show", "--tracking", written.trial.uri)
    assert shown.returncode == 0
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert lines[0] == "league 'league' of project 'four': champion main:1"
    rows = {line.split()[0]: line for line in lines[3:6]}
    assert list(rows) == ["main", "main:2", "main:1"]
    assert rows["main:1"].endswith("champion")
    assert " 1,000 " in rows["main:1"]
    assert "games: 30 counted, 0 broken off, 0 contradictory; results refused: 0" in lines
    assert [line.split()[:3] for line in lines[-2:]] == [["main:2", "main:1", "2,000"], ["main:1", "-", "1,000"]]


def test_the_table_is_that_of_the_league(written: Written) -> None:
    rows = Books.read(written.trial).standings()
    expected = [row for row in written.league.standings() if row.member.player != "random"]  # it has never played
    assert [(row.member, row.points, row.mu, row.sigma, row.elo, row.games, row.drawn) for row in rows] == expected
    for row in rows:
        assert (row.low, row.high) == written.league.ratings.interval(row.member)


def test_versions_have_points_by_their_games_against_each_other_alone() -> None:
    first, second, alone, live = Member("main", 1), Member("main", 2), Member("main", 3), Member("main")
    rated = Ratings({member: Rating() for member in (first, second, alone, live)})
    between = {(first, second): Pair(wins=50, draws=20, losses=130)}
    books = Books(rated, {}, between, (), None, {})
    fitted = books.fitted()
    assert set(fitted) == {first, second}
    assert expected(fitted[second].points, fitted[first].points) == pytest.approx(0.7, abs=0.01)
    assert (fitted[first].points + fitted[second].points) / 2 == pytest.approx(rated[first].points)
    many = replace(books, pairs={**between, (live, second): Pair(wins=900), (live, alone): Pair(losses=100)})
    assert many.fitted() == fitted
    assert [row.as_dict()["fitted"] for row in many.standings() if row.member in (alone, live)] == [None, None]


def test_ratings_are_csv_or_json(written: Written, command: Run) -> None:
    text = command("league", "ratings", "four", "--tracking", written.trial.uri).stdout
    objects = json.loads(command("league", "ratings", "four", "--json", "--tracking", written.trial.uri).stdout)
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["member"] for row in rows] == [row["member"] for row in objects] == ["main", "main:2", "main:1"]
    assert [float(row["points"]) for row in rows] == [row["points"] for row in objects]
    assert [row["env_steps"] for row in rows] == ["", "2000", "1000"]
    assert [row["env_steps"] for row in objects] == [None, 2000, 1000]


def test_an_export_holds_all_that_the_books_do(written: Written, command: Run, tmp_path: Path) -> None:
    file = tmp_path / "league.json"
    assert command("league", "export", str(file), "--tracking", written.trial.uri).returncode == 0
    exported = json.loads(file.read_text())
    assert (exported["format"], exported["project"], exported["trial"]) == (1, "four", "league")
    assert (exported["champion"], exported["run_id"]) == ("main:1", written.trial.run_id)
    assert exported["counters"] == written.league.counters()
    assert exported["payoff"] == [
        {"a": "main", "b": "main:1", "wins": 30, "draws": 0, "losses": 0, "win_rate": 1.0, "recent_win_rate": 1.0}
    ]
    times = [snapshot.pop("time_s") for snapshot in exported["snapshots"]]
    assert times == [snapshot.time_s for snapshot in written.league.snapshots]
    assert exported["snapshots"] == [
        {"member": "main:1", "digest": "digest of 1.0", "parent": None, "env_steps": 1000, "dropped": False},
        {"member": "main:2", "digest": "digest of 2.0", "parent": "main:1", "env_steps": 2000, "dropped": False},
    ]
    assert len(exported["ratings"]) == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".league")] == []


def test_an_export_to_nowhere_is_one_line(written: Written, command: Run, tmp_path: Path) -> None:
    failed = command("league", "export", str(tmp_path / "no" / "f.json"), "--tracking", written.trial.uri)
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
    assert "cannot be written: No such file or directory" in failed.stderr


def test_a_league_that_is_not_there_is_named_with_those_that_are(written: Written, tmp_path: Path) -> None:
    uri = written.trial.uri
    Trial.open("other", "plain", uri)
    assert newest_league(uri).run_id == newest_league(uri, "four", "league").run_id == written.trial.run_id
    for arguments, said in {
        ("five", ""): r"'five'.*four",
        (
            "other",
            "",
        ): rf"'other' in {uri}.*\(plain\).*{tmp_path}/leagues",
        ("", "main"): "'main'.*: league in",
    }.items():
        with pytest.raises(ConfigError, match=said):
            newest_league(uri, *arguments)


def test_every_command_takes_the_league_with_the_newest_snapshot_or_that_of_a_trial(
    written: Written, command: Run, tmp_path: Path
) -> None:
    uri = written.trial.uri
    job = JobConfig.load(TEMPLATES / "league" / "four.yaml")

    def newest(trial: str = "") -> set[str]:
        """What the commands take; the pool that is served, by its oldest snapshot."""
        served = read_pool("four", uri, project="four", trial=trial).snapshots
        oldest = {"league": Member("main", 1), "second": Member("main", 3)}
        names = {
            newest_league(uri, "four", trial).name,
            Opponents(job, uri, trial).league.name,
            *(name for name, first in oldest.items() if served[:1] == [first]),
        }
        shown = command("league", "show", "four", *(["--trial", trial] if trial else []), "--tracking", uri)
        return names | {shown.stdout.split("'")[1]}

    second = new_league(uri, "second")
    assert newest() == {"league"}, "the second one has no snapshot yet"
    assert newest_league(uri, "four", "second") == second.trial
    assert read_pool("four", uri, project="four", trial="second").snapshots == []
    second.freeze(tmp_path / "files", 3.0, 1000)
    assert newest() == {"second"}
    assert newest("league") == newest(written.trial.run_id) == {"league"}
    written.freeze(tmp_path / "files", 4.0, 3000)
    assert newest() == {"league"}, "wherever a training goes on"
    with pytest.raises(ConfigError, match=r"'four'.*'main'.*: league, second in"):
        Opponents(job, uri, "main")
    finish(second)
    promoted = command("promote", "--league", "main:3", "--trial", "second", "--tracking", uri)
    assert (promoted.returncode, "four version 3 is champion now" in promoted.stdout) == (0, True), promoted.stderr
    refused = command("promote", "--league", "models:/four/3", "--trial", "second", "--tracking", uri)
    assert "trial is 'second', and models:/four/3 is of its own" in refused.stderr


@pytest.mark.parametrize(
    "verb", [["show"], ["ratings"], ["export", "books.json"], ["calibrate"], ["match"], ["promote"]]
)
def test_in_a_folder_without_a_league_each_command_says_what_it_looked_for_where_and_what_to_do(
    verb: list[str], command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    job = str(TEMPLATES / "league" / "four.yaml")
    words = {
        "calibrate": ["league", "calibrate", job],
        "match": ["match", job, "main:1", "random"],
        "promote": ["promote", "--league", "main:1"],
    }
    failed = command(*words.get(verb[0], ["league", *verb]))
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1 + (verb[0] in ("calibrate", "match")))
    assert (
        f"no league: there is no MLflow database {tmp_path}/mlflow.db. Run the command in the folder where `brayx "
        "train` ran, or name its database with --tracking"
    ) in failed.stderr
    assert list(tmp_path.iterdir()) == [], "a command that only looks makes no file"


def test_books_that_are_elsewhere_are_named_with_their_place(written: Written, command: Run, tmp_path: Path) -> None:
    finish(written)
    (tmp_path / "leagues").rename(tmp_path / "elsewhere")
    file = tmp_path / "leagues" / written.trial.run_id / "books.sqlite"
    for words in (
        ["league", "show"],
        ["league", "export", str(tmp_path / "f.json")],
        ["promote", "--league", "main:2"],
    ):
        failed = command(*words, "--tracking", written.trial.uri)
        assert failed.returncode == 2
        assert f"the books of league 'league' of project 'four' are not here: there is no {file}" in failed.stderr
        assert "copy the folder `leagues` from there" in failed.stderr


def test_a_job_names_its_project(tmp_path: Path) -> None:
    for file in (TEMPLATES / "league").iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    assert place_of(str(tmp_path / "four.yaml"), str(tmp_path)) == ("four", f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert place_of("four", str(tmp_path))[0] == "four"


def test_a_gate_refuses_with_its_number_and_changes_nothing(written: Written, command: Run) -> None:
    finish(written)
    refused = command("promote", "--league", "main:2", "--tracking", written.trial.uri)
    assert refused.returncode == 2
    assert "main:2 does not become champion: main:2 played 0 games against main:1, expected 20" in refused.stderr
    assert aliases("four", written.trial.uri) == {}
    assert Books.read(written.trial).champion == Member("main", 1)


@pytest.mark.parametrize("reference", ["main:2", "models:/four/2"])
def test_what_passes_the_gate_is_champion_in_the_registry_and_the_books(
    written: Written, command: Run, reference: str
) -> None:
    for _ in range(20):  # as if they had played
        written.league.payoff.add(Member("main", 2), Member("main", 1), 1.0)
    pair = written.league.payoff.pair(Member("main", 1), Member("main", 2))
    written.ledger.count_game("test", {(Member("main", 1), Member("main", 2)): pair}, {}, {}, {"counted": 1})
    finish(written)
    for verdict, now in (
        ("none of 1 past players beats it", "now; before it was none"),
        ("was the league's champion already", "already"),
    ):
        promoted = command("promote", "--league", reference, "--tracking", written.trial.uri)
        assert promoted.returncode == 0, promoted.stderr
        assert verdict in promoted.stdout
        assert promoted.stdout.endswith(f"four version 2 is champion {now}\n")
        assert aliases("four", written.trial.uri) == {"champion": 2}
        assert Books.read(written.trial).champion == Member("main", 2)


def test_the_alias_of_a_version_that_the_league_has_not_played_stays(
    written: Written, command: Run, tmp_path: Path
) -> None:
    uri = written.trial.uri
    foreign = register_files(Trial.open("four", "alone", uri), tmp_path / "files", "four", 1, tags={})
    promote("models:/four/3", uri)
    assert foreign.version == 3
    stays = (
        "the alias champion of four stays at version 3, which this league has not played; "
        "`brayx promote models:/four/VERSION` moves it without a game"
    )
    assert set_champion(written.trial, "four", 1) == stays
    finish(written)
    refused = command("promote", "--league", "main:1", "--tracking", uri)
    assert (refused.returncode, f"main:1 does not become champion: {stays}" in refused.stderr) == (2, True)
    assert aliases("four", uri) == {"champion": 3}
    promote("models:/four/2", uri)  # of this league, so the books decide
    moved = "the alias champion of four was at version 2, and is at version 1 now, the league's champion"
    assert set_champion(written.trial, "four", 1) == moved, "somebody may have rolled back to it"
    assert aliases("four", uri) == {"champion": 1}
    assert set_champion(written.trial, "four", 1) == ""
    assert set_champion(written.trial, "four", 2, 1) == "", "it was at the champion before"
    assert aliases("four", uri) == {"champion": 2}


CHECK = """
import torch

def build_model(name, config):
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(3))
    return module, (torch.zeros(1, 1),)

def largest(module, config):
    assert config["seed"] == 0
    return module.w.max()
"""


@pytest.mark.parametrize(("at_most", "said"), [(2.0, "gate_check.largest is 2, at most 2"), (1.5, "expected at most")])
def test_a_gates_check_has_a_say_too(
    written: Written, command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_most: float, said: str
) -> None:
    (tmp_path / "gate_check.py").write_text(CHECK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "gate_check", raising=False)
    gate = {"min_games": 1, "confidence": 0.5, "check": "gate_check.largest", "at_most": at_most}
    written.trial.log_params({"model": {"module": "gate_check"}, "league": {"gate": gate}})
    for _ in range(20):
        written.league.payoff.add(Member("main", 2), Member("main", 1), 1.0)
    pair = written.league.payoff.pair(Member("main", 1), Member("main", 2))
    written.ledger.count_game("test", {(Member("main", 1), Member("main", 2)): pair}, {}, {}, {"counted": 1})
    finish(written)
    promoted = command("promote", "--league", "main:2", "--tracking", written.trial.uri)
    assert promoted.returncode == (0 if at_most == 2.0 else 2), promoted.stderr
    assert said in promoted.stdout + promoted.stderr
    assert Books.read(written.trial).champion == Member("main", 2 if at_most == 2.0 else 1)


def test_a_league_in_training_promotes_nobody(written: Written, command: Run) -> None:
    refused = command("promote", "--league", "models:/four/1", "--tracking", written.trial.uri)
    assert refused.returncode == 2
    assert f"league 'league' (run {written.trial.run_id}) is in training" in refused.stderr
    written.trial.set_tag("brayx.owner", f"{os.uname().nodename}:{2**22 + 1}:1")  # killed: a pid above Linux's highest
    assert command("promote", "--league", "models:/four/1", "--tracking", written.trial.uri).returncode == 0


def test_what_is_no_snapshot_of_a_league_cannot_pass_its_gate(written: Written, command: Run, tmp_path: Path) -> None:
    register_files(Trial.open("four", "alone", written.trial.uri), tmp_path / "files", "four", 1, tags={})
    finish(written)
    for reference, reason in {
        "models:/four/3": "version 3 of model 'four' is not a snapshot of a league",
        "main": "expected NAME:VERSION",
        "main:3": "main:3 is not a snapshot of the pool",
        "models:/four/9": "no version 9",
    }.items():
        refused = command("promote", "--league", reference, "--tracking", written.trial.uri)
        assert (refused.returncode, reason in refused.stderr) == (2, True), refused.stderr
    assert command("promote", "--league", "main:1", "--to", "x", "--tracking", written.trial.uri).returncode == 2


def test_a_trial_records_the_leagues_options(tracking_db: str) -> None:
    players = {**PLAYERS, "second": {"role": "exploiter", "of": "main", "share": 0.25, "weighting": "linear"}}
    config = CONFIG.model_copy(update={"players": LeagueConfig(model="model", players=players).players})
    trial = Trial.open("four", "league", tracking_db)
    first = {"model": {"kind": "model"}, "value": {"kind": "model"}, "league": CONFIG.model_dump(mode="json")}
    trial.log_params(first)
    trial.log_params({**first, "league": config.model_dump(mode="json")})
    trial.log_params({"league": {"gate": {"min_games": 300}}})  # a resumed trial with another option
    pool, recorded, job = recorded_league(trial)
    assert pool == "four-model"
    assert job["value"] == {"kind": "model"}
    assert recorded.gate == CONFIG.gate.model_copy(update={"min_games": 300})
    expected = {name: player.model_copy(update={"trainer": {}}) for name, player in config.players.items()}
    assert recorded.players == expected
    with pytest.raises(LeagueError, match="no league options"):
        recorded_league(Trial.open("four", "plain", tracking_db))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0 s"), (119.0, "119 s"), (120.0, "2 min"), (7199.0, "120 min"), (7200.0, "2 h"), (172800.0, "2 days")],
)
def test_an_age_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
