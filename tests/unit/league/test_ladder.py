"""Levels of difficulty: what is measured, what is chosen, and how often each plays."""

from __future__ import annotations

import itertools

import pytest

from brayx.league.ladder import COLDER, HOTTER, Rung, choose, first_pairs, ladder, level_pairs
from brayx.league.member import Member, Rated

POOL = [Rated(Member("main", version), 900.0 + 40 * version) for version in range(1, 13)]


def test_the_ladder_has_the_weakest_the_best_and_some_between_and_weakens_the_weakest() -> None:
    rungs = ladder(POOL, Member("main", 9), delay=8)
    plain = [rung.member.version for rung in rungs if rung == Rung(rung.member)]
    assert plain == sorted(plain, reverse=True)
    assert {1, 9, 12} < set(plain)
    assert len(plain) <= 7
    assert rungs[0].temperature == 0.0
    assert {rung.member.version for rung in rungs if rung.temperature < 1} == {9, 12}
    weak = rungs[-len(HOTTER) :]
    assert [(rung.member.version, rung.temperature, rung.delay) for rung in weak] == list(
        zip([1] * 4, HOTTER, (2, 4, 6, 8), strict=True)
    )


def test_one_snapshot_is_enough() -> None:
    rungs = ladder(POOL[:1])
    assert [rung.temperature for rung in rungs] == [*COLDER, 1.0, *HOTTER]
    assert all(rung.delay == 0 for rung in rungs)


def test_each_rung_plays_its_neighbours() -> None:
    pairs = first_pairs(10, 60)
    assert all(0 < j - i <= 3 for i, j in pairs)
    for i in range(10):
        games = sum(count for pair, count in pairs.items() if i in pair)
        assert 30 <= games <= 60
    assert all(count == 1 for count in first_pairs(3, 1).values())


def test_levels_are_evenly_spread_and_a_rung_is_made_between_two_of_one_snapshot() -> None:
    weak, strong = Member("main", 1), Member("main", 2)
    rungs = [Rung(strong), Rung(strong, 0.0), Rung(weak), Rung(weak, 4.0, 8)]
    chosen = choose(rungs, [1600.0, 1590.0, 1200.0, 800.0], 4)
    between = 800.0 + 800.0 / 3
    assert [points for _, points in chosen] == pytest.approx([800.0, between, 1200.0, 1600.0])
    interpolated, _ = chosen.pop(1)
    assert [rung for rung, _ in chosen] == [rungs[3], rungs[2], rungs[0]]
    assert interpolated == Rung(weak, pytest.approx(4.0 ** (1 / 3), abs=0.01), 3)


def test_no_rung_is_two_levels() -> None:
    rungs = [Rung(Member("main", version)) for version in range(1, 7)]
    for levels in (2, 3, 5, 6):
        chosen = choose(rungs, [1000.0, 1001.0, 1002.0, 1003.0, 1004.0, 2000.0], levels)
        assert len({rung for rung, _ in chosen}) == levels
        assert chosen == sorted(chosen, key=lambda level: level[1])
    assert len(choose(rungs, [1000.0] * 6, 6)) == 6


@pytest.mark.parametrize("games", [1, 7, 400])
def test_each_level_plays_its_games_against_its_neighbours_in_points(games: int) -> None:
    points = [1500.0, 900.0, 1200.0, 1100.0, 1300.0]
    pairs = level_pairs(points, [0, 1, 2], games)
    assert all(a < b for a, b in pairs)
    for level in (0, 1, 2):
        assert sum(count for pair, count in pairs.items() if level in pair) >= games
    assert (0, 1) not in pairs, "the weakest and the strongest say little about each other"
    assert set(itertools.chain(*pairs)) == {0, 1, 2, 3, 4}


def test_a_rung_says_what_it_is() -> None:
    assert Rung(Member("main", 7)).label == "main:7"
    assert Rung(Member("main", 7), 2.5, 6).label == "main:7 at temperature 2.5, 6 ticks late"
    assert Rung(Member("main", 7), 1.0, 6).label == "main:7 6 ticks late"
