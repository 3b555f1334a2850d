"""`brayx league`, over books that a league wrote and versions in a real registry."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from brayx.jobs.shipped import TEMPLATES
from brayx.league.fit import expected
from brayx.league.member import Member
from brayx.league.payoff import Pair
from brayx.league.ratings import Rating, Ratings
from brayx.league.report import Books, age_text, place_of
from tests.unit.conftest import Run
from tests.unit.league.written import Written


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


def test_a_job_names_its_project(tmp_path: Path) -> None:
    for file in (TEMPLATES / "league").iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    assert place_of(str(tmp_path / "four.yaml"), str(tmp_path)) == ("four", f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert place_of("four", str(tmp_path))[0] == "four"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0 s"), (119.0, "119 s"), (120.0, "2 min"), (7199.0, "120 min"), (7200.0, "2 h"), (172800.0, "2 days")],
)
def test_an_age_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
