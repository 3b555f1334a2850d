"""`brayx promote --league`, over books that a league wrote and versions in a real registry."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from brayx.console.league import _players
from brayx.errors import LeagueError
from brayx.league.champion import set_champion
from brayx.league.config import LeagueConfig
from brayx.league.member import Member
from brayx.league.promote import recorded_league
from brayx.league.ratings import Rating
from brayx.league.report import Books
from brayx.league.snapshots import Snapshot
from brayx.tracking import Trial, aliases, promote
from brayx.tracking.options import Options
from brayx.tracking.registry import register_files
from tests.unit.conftest import Run
from tests.unit.league.written import CONFIG, PLAYERS, Written, finish


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


def test_a_rival_s_alias_does_not_move_by_another_rival_s_version(written: Written, tmp_path: Path) -> None:
    uri = written.trial.uri
    register_files(Trial.open("four", "alone", uri), tmp_path / "files", "four", 1, tags={})
    promote("models:/four/3", uri)
    keeper = Snapshot(Member("keeper", 3), "of another model", None, 10, 1.5e9)
    written.ledger.freeze(keeper, {keeper.member: Rating()})
    finish(written)
    assert "stays at version 3" in set_champion(written.trial, "four", 1, None, "main")
    assert aliases("four", uri) == {"champion": 3}
    set_champion(written.trial, "four", 1, None, "keeper")
    assert aliases("four", uri) == {"champion": 1}


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
    options = written.trial.options()
    options["model"]["module"] = "gate_check"
    options["league"]["gate"] |= gate
    written.trial.log_options(Options(options, {}))
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
    with pytest.raises(LeagueError):  # the console asks before they are recorded
        _players(tracking_db, trial.run_id)
    gate = config.gate.model_copy(update={"min_games": 300})  # a resumed trial with another option
    league = config.model_copy(update={"gate": gate}).model_dump(mode="json")
    for options in (first, {**first, "league": league}):
        trial.log_options(Options(options, {}))
    pool, recorded, job = recorded_league(trial)
    assert pool == "four-model"
    assert job["value"] == {"kind": "model"}
    assert recorded.gate == CONFIG.gate.model_copy(update={"min_games": 300})
    expected = {name: player.model_copy(update={"trainer": {}}) for name, player in config.players.items()}
    assert recorded.players == expected
    name, players = _players(tracking_db, trial.run_id)
    assert (name, players.keys()) == ("four-model", expected.keys())
    with pytest.raises(LeagueError, match="no league options"):
        recorded_league(Trial.open("four", "plain", tracking_db))
