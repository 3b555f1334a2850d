"""`brayx.league.config`: what is refused, and what each role gets without being asked."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from brayx.jobs.options import option_docs
from brayx.league.config import GateConfig, LeagueConfig, PlayerConfig
from tests.unit.league.play import league_config


@pytest.mark.parametrize(
    ("player", "message"),
    [
        ({"role": "exploiter"}, "of is missing, and role exploiter needs it"),
        ({"role": "main", "of": "main"}, "of is 'main', and only role exploiter has one, not main"),
        ({"role": "script"}, "script is missing"),
        ({"role": "script", "script": "random"}, "expected module.function"),
        ({"role": "script", "script": "bots.1st"}, "expected module.function"),
        ({"role": "main", "script": "bots.first"}, "script .*not main"),
        ({"role": "past"}, "version is missing"),
        ({"role": "main", "version": 3}, "version is 3.*not main"),
        ({"role": "past", "version": 0}, "greater than or equal to 1"),
        ({"role": "main", "against": {"pfsp": 0.0, "latest": 0.0}}, "against are 0"),
        ({"role": "main", "against": {"pfsp": -1.0}}, "greater than or equal to 0"),
        ({"role": "main", "against": {"pfsp": float("nan")}}, "finite number"),
        ({"role": "past", "version": 1, "against": {"pfsp": 1.0}}, "against is"),
        ({"role": "script", "script": "bots.first", "share": 2.0}, "share is"),
        ({"role": "main", "restart": "snapshot"}, "only an exploiter restarts"),
        ({"role": "main", "share": 0.0}, "greater than 0"),
        ({"role": "boss"}, "'main', 'exploiter', 'league_exploiter', 'past' or 'script'"),
        ({"role": "main", "opponents": 3}, "Extra inputs are not permitted"),
    ],
)
def test_a_player_that_cannot_be_is_refused(player: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PlayerConfig.model_validate(player)


MAIN = {"role": "main"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"players": {}}, "no player learns"),
        ({"players": {"old": {"role": "past", "version": 1}}}, "no player learns"),
        ({"players": {"main": MAIN, "x": {"role": "exploiter", "of": "mian"}}}, "of is 'mian'.*: main"),
        ({"players": {"x": {"role": "exploiter", "of": "x"}}}, "of is 'x'.*: none"),
        ({"players": {"main": {"role": "main", "against": {"psfp": 1.0}}}}, "against names 'psfp'.*latest, uniform"),
        ({"players": {"latest": MAIN}}, "a player is named 'latest'"),
        ({"players": {"a:1": MAIN}}, "a player is named 'a:1'"),
        ({"gate": {"check": "poker"}}, "check is 'poker'"),
        ({"gate": {"check": "poker.nash_conv"}}, "at_most None"),
        ({"gate": {"at_most": 0.1}}, "check is None.*at_most 0.1"),
        ({"seats": 1}, "greater than or equal to 2"),
        ({"teams": {"red": ["a", "b"]}}, "one team"),
        ({"teams": {"red": ["a"], "blue": ["a"]}}, "seat 'a'"),
        ({"teams": {"red": ["a"], "blue": ["b", "c"]}}, "seats is 2.* 3"),
        ({"teams": {"red": [], "blue": ["b", "c"]}}, "at least 1 item"),
        ({"gate": {"confidence": 1.0}}, "less than 1"),
    ],
)
def test_a_league_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LeagueConfig.model_validate({"model": "policy", "players": {"main": MAIN}} | options)


def test_each_role_has_its_opponents() -> None:
    players = league_config(
        {
            "main": MAIN,
            "x": {"role": "exploiter", "of": "main"},
            "all": {"role": "league_exploiter"},
            "own": {"role": "main", "against": {"x": 2.0}, "weighting": "linear"},
            "old": {"role": "past", "version": 4},
        }
    ).players
    assert {name: dict(player.shares) for name, player in players.items()} == {
        "main": {"pfsp": 0.5, "latest": 0.35, "past": 0.15},
        "x": {"main": 1.0},
        "all": {"pfsp": 1.0},
        "own": {"x": 2.0},
        "old": {},
    }
    weights = {name: player.weights for name, player in players.items()}
    assert weights == {"main": "squared", "x": "variance", "all": "squared", "own": "linear", "old": "squared"}


def test_learners_are_those_that_learn_in_order() -> None:
    config = league_config({"z": MAIN, "old": {"role": "past", "version": 4}, "a": {"role": "league_exploiter"}})
    assert config.learners == ["z", "a"]


def test_a_config_survives_its_own_dump() -> None:
    config = league_config()
    assert LeagueConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("model", [LeagueConfig, PlayerConfig, GateConfig])
def test_every_option_is_documented(model: type[LeagueConfig | PlayerConfig | GateConfig]) -> None:
    undocumented = [name for name, doc in option_docs(model).items() if not doc and name != "kind"]
    assert not undocumented
