"""`brayx.jobs.options`: a job's league as documented YAML."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from brayx.jobs.config import JobConfig
from brayx.jobs.options import documented
from brayx.jobs.shipped import TEMPLATES
from brayx.league.config import GateConfig, LeagueConfig, PlayerConfig

LEAGUE = """
league:
  kind: league
  model: model
  players:
    main: {role: main, trainer: {learning_rate: 0.01, algorithm: {gamma: 0.9}}}
    x: {role: exploiter, of: main, weighting: squared, share: 0.5, trainer: {algorithm: {gamma: 0.8}}}
    first: {role: script, script: four_agent.random_move}
    old: {role: past, version: 3}
  gate: {min_games: 7}
"""


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    shutil.copytree(TEMPLATES / "league", tmp_path, dirs_exist_ok=True)
    plain = yaml.safe_load((TEMPLATES / "league" / "four.yaml").read_text())
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(plain | yaml.safe_load(LEAGUE), sort_keys=False))
    return JobConfig.load(file)


def test_a_printed_league_loads_back_equal(job: JobConfig, tmp_path: Path) -> None:
    again = tmp_path / "again.yaml"
    again.write_text(documented(job))
    assert JobConfig.load(again).leagues == job.leagues
    assert documented(JobConfig.load(again)) == documented(job)


def test_the_first_player_and_the_gate_show_every_option(job: JobConfig) -> None:
    shown = yaml.safe_load(documented(job))["league"]
    assert shown.keys() == LeagueConfig.model_fields.keys()
    assert shown["players"]["main"].keys() == PlayerConfig.model_fields.keys()
    assert shown["gate"].keys() == GateConfig.model_fields.keys()


def test_further_players_show_what_differs_from_the_defaults(job: JobConfig) -> None:
    players = yaml.safe_load(documented(job))["league"]["players"]
    given = yaml.safe_load(LEAGUE)["league"]["players"]
    assert {name: players[name] for name in ("x", "first", "old")} == {
        name: given[name] for name in ("x", "first", "old")
    }


def test_each_option_of_a_player_is_explained_once(job: JobConfig) -> None:
    text = documented(job)
    assert text.count("Player whose weaknesses an exploiter looks for.") == 1
    assert "    x:\n      role: exploiter\n      of: main\n      weighting: squared\n      share: 0.5\n" in text
