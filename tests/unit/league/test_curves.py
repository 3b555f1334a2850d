"""Curves of ratings: a curve gets a point when its rating moves, and stays short; the books keep it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from brayx.league.charts import changed, point_of
from brayx.league.ledger import MAX_POINTS, Ledger, RatingPoint, thinned
from brayx.league.member import Member
from brayx.league.ratings import Ratings

MAIN = Member("main")
LAST = RatingPoint(1000, 1200.0, 1100.0, 1300.0)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        (LAST._replace(env_steps=2000), False),
        (LAST._replace(env_steps=2000, points=1201.9), False),
        (LAST._replace(env_steps=2000, points=1198.0), True),
        (LAST._replace(env_steps=2000, low=1110.0), True),
        (LAST._replace(env_steps=1000, points=1300.0), False),
    ],
)
def test_a_point_counts_if_steps_came_and_the_rating_or_its_interval_moved(point: RatingPoint, expected: bool) -> None:
    assert changed([LAST], point) is expected
    assert changed([], point)


def test_a_point_is_the_rating_with_its_interval() -> None:
    ratings = Ratings()
    ratings.rate([[MAIN], [Member("other")]], [0, 1])
    point = point_of(ratings, MAIN, 7)
    assert (point.env_steps, point.points) == (7, ratings.points(MAIN))
    assert (point.low, point.high) == ratings.interval(MAIN)
    assert point.low < 1200.0 < point.points < point.high


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
