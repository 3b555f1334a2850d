"""`brayx.league.ledger`: what was written is read, all of a game or nothing, and in few bytes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from brayx.errors import LeagueError
from brayx.league.ledger import MAX_POINTS, Ledger, RatingPoint, thinned
from brayx.league.member import Member
from brayx.league.payoff import Pair
from brayx.league.ratings import Rating
from brayx.league.snapshots import Snapshot

MAIN, FIRST = Member("main"), Member("main", 1)
SNAPSHOT = Snapshot(FIRST, "digest", None, 1000, 1.5e9)


def count(ledger: Ledger, game: str, wins: int = 1) -> None:
    ledger.count_game(
        game,
        {(MAIN, FIRST): Pair(wins, 0, 0, float(wins), float(wins))},
        {MAIN: Rating(25.0 + wins, 8.0, 1200.0 + wins, wins), FIRST: Rating(25.0 - wins, 8.0, 1200.0 - wins, wins)},
        {MAIN: 1, FIRST: 1},
        {"counted": 1},
    )


NO_GAMES = {"counted": 0, "broken_off": 0, "contradictory": 0, "refused": 0}


def contents(ledger: Ledger) -> tuple[object, ...]:
    return (
        ledger.pairs(), ledger.ratings(), ledger.drawn(), ledger.snapshots(), ledger.counters(), ledger.champion(),
    )  # fmt: skip


def test_new_books_are_empty(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "league.db")
    assert contents(ledger) == ({}, {}, {}, [], NO_GAMES, None)
    assert not ledger.has("game")


def test_what_was_written_is_read_from_the_reopened_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "league.db")
    second = Snapshot(Member("main", 2), "other", FIRST, 2000, 1.6e9)
    ledger.freeze(SNAPSHOT, {FIRST: Rating(26.0, 7.0, 1210.0, 0)})
    count(ledger, "one")
    count(ledger, "two", 2)
    ledger.freeze(second, {second.member: Rating()})
    ledger.crown(FIRST)
    written = contents(ledger)
    ledger.close()
    again = Ledger(tmp_path / "league.db")
    assert contents(again) == written
    assert written == (
        {(MAIN, FIRST): Pair(2, 0, 0, 2.0, 2.0)},
        {MAIN: Rating(27.0, 8.0, 1202.0, 2), FIRST: Rating(23.0, 8.0, 1198.0, 2), second.member: Rating()},
        {MAIN: 2, FIRST: 2, second.member: 0},
        [SNAPSHOT, second],
        NO_GAMES | {"counted": 2},
        FIRST,
    )
    assert [again.has(game) for game in ("one", "two", "three")] == [True, True, False]


def test_a_game_is_written_once_and_a_refused_one_leaves_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "league.db")
    count(ledger, "one")
    before = contents(ledger)
    with pytest.raises(LeagueError, match=r"UNIQUE constraint failed: games\.id"):
        count(ledger, "one", 5)
    assert contents(ledger) == before
    count(ledger, "two", 2)  # the transaction was closed


@pytest.mark.parametrize("other", [SNAPSHOT._replace(digest="new"), SNAPSHOT._replace(member=Member("main", 2))])
def test_a_version_and_its_weights_are_frozen_once(tmp_path: Path, other: Snapshot) -> None:
    ledger = Ledger(tmp_path / "league.db")
    ledger.freeze(SNAPSHOT, {FIRST: Rating()})
    with pytest.raises(LeagueError, match="UNIQUE constraint failed"):
        ledger.freeze(other, {other.member: Rating()}, dropped=[FIRST])
    assert ledger.snapshots() == [SNAPSHOT]


def test_dropped_and_forgotten_members_have_no_pairs(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "league.db")
    ledger.freeze(SNAPSHOT, {FIRST: Rating()})
    count(ledger, "one")
    second = SNAPSHOT._replace(member=Member("main", 2), digest="other")
    ledger.freeze(second, {MAIN: Rating()}, dropped=[FIRST])
    assert ledger.pairs() == {}
    assert [snapshot.dropped for snapshot in ledger.snapshots()] == [True, False]
    count(ledger, "two")
    third = SNAPSHOT._replace(member=Member("main", 3), digest="third")
    ledger.freeze(third, {MAIN: Rating()}, forgotten=[MAIN])
    assert ledger.pairs() == {}
    assert ledger.ratings()[MAIN] == Rating()
    assert ledger.drawn()[MAIN] == 2, "how often it was drawn is not forgotten"


def test_a_file_that_holds_no_books_is_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "notes.db"
    other.write_bytes(b"These are no books. " * 100)
    with pytest.raises(LeagueError, match=r"notes\.db: file is not a database"):
        Ledger(other)
    with pytest.raises(LeagueError, match="unable to open"):
        Ledger(tmp_path / "no" / "folder.db")


def test_books_of_another_format_are_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "league.db") as other:
        other.execute("PRAGMA user_version=7")
    with pytest.raises(LeagueError, match="format is 7, expected 1"):
        Ledger(tmp_path / "league.db")


def test_a_million_games_fit_in_100_mb(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "league.db")
    games = 20_000
    for game in range(games):
        count(ledger, f"{game:032x}-agent", game)
    ledger.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) / games * 1_000_000 < 100e6


def test_books_are_read_as_they_were_while_another_writes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "league ?.db")
    count(ledger, "one")
    reader = Ledger(tmp_path / "league ?.db", read_only=True)
    assert contents(reader) == contents(ledger)
    before = contents(reader)
    count(ledger, "two", 2)
    assert contents(reader) == before
    assert contents(Ledger(tmp_path / "league ?.db", read_only=True)) == contents(ledger) != before
    with pytest.raises(LeagueError):
        count(reader, "three")


def test_books_that_are_not_there_are_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(LeagueError, match="unable to open"):
        Ledger(tmp_path / "league.db", read_only=True)
    assert not list(tmp_path.iterdir())
    (tmp_path / "league.db").touch()
    with pytest.raises(LeagueError, match="format is 0, expected 1"):
        Ledger(tmp_path / "league.db", read_only=True)


LAST = RatingPoint(1000, 1200.0, 1100.0, 1300.0)


@pytest.mark.parametrize(
    ("count", "most", "steps"),
    [(0, 2, []), (2, 2, [0, 1]), (3, 2, [0, 2]), (6, 4, [0, 1, 3, 5]), (7, 4, [0, 2, 4, 6]), (9, 4, [0, 4, 8])],
)
def test_a_thinned_curve_keeps_its_ends_and_every_second_point(count: int, most: int, steps: list[int]) -> None:
    curve = [LAST._replace(env_steps=step) for step in range(count)]
    assert [point.env_steps for point in thinned(curve, most)] == steps


def test_the_books_keep_curves_of_bounded_length(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "league.db")
    assert ledger.curves() == {}
    curve = [LAST._replace(env_steps=step) for step in range(MAX_POINTS + 1)]
    ledger.write_curve(MAIN, curve)
    ledger.write_curve(Member("other"), curve[:2])
    ledger.write_curve(Member("other"), curve[:1])
    ledger.close()
    again = Ledger(tmp_path / "league.db", read_only=True).curves()
    assert again == {MAIN: thinned(curve, MAX_POINTS), Member("other"): [curve[0]]}
    assert len(again[MAIN]) <= MAX_POINTS


def test_books_from_before_there_were_curves_are_read_and_get_some(tmp_path: Path) -> None:
    Ledger(tmp_path / "league.db").close()
    with sqlite3.connect(tmp_path / "league.db") as books:
        books.execute("DROP TABLE curves")
    assert Ledger(tmp_path / "league.db", read_only=True).curves() == {}
    ledger = Ledger(tmp_path / "league.db")
    ledger.write_curve(MAIN, [LAST])
    assert ledger.curves() == {MAIN: [LAST]}
