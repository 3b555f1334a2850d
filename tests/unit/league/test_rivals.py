"""Rivals: behaviours that play different teams draw each other's members, and each has a champion of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from brayx.league.config import SelfPlayConfig
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.rivals import Rivals
from brayx.league.sides import Stretch

KEEPER, STRIKER = Member("keeper"), Member("striker")


def rivals(ledger: Ledger | None = None, **options: Any) -> Rivals:
    """A striker, joined by a keeper, with one version each."""
    config = SelfPlayConfig.model_validate({"gate": {"min_games": 10}, "pool_size": 2, **options})
    made = Rivals({"striker": config.league("model", "striker")}, ledger or Ledger(":memory:"))
    made.join("keeper", config.league("model", "keeper"))
    for player in ("striker", "keeper"):
        if Member(player, 1) not in made.pool:
            made.freeze(player, 1, f"{player} 1", 10)
    return made


def drawn(made: Rivals, draws: int = 200) -> set[Member]:
    return {made.meet(f"{number}", ["striker"], ["keeper"]).members[1] for number in range(draws)}


def play(made: Rivals, player: Member, opponent: Member, result: float, games: int) -> None:
    stretch = Stretch(0, {player.player: player}, {opponent.player: opponent}, learns=True)
    for _ in range(games):
        made.finish(stretch.game(result))


@pytest.mark.parametrize(
    ("against", "expected"),
    [
        ({"latest": 1}, {KEEPER}),
        ({"uniform": 1}, {Member("keeper", 1), Member("keeper", 2)}),
        ({"champion": 1}, {Member("keeper", 1)}),
        ({"latest": 1, "uniform": 1}, {KEEPER, Member("keeper", 1), Member("keeper", 2)}),
    ],
)
def test_opponents_are_the_other_behaviour_s_by_the_shares(against: Mapping[str, float], expected: set[Member]) -> None:
    made = rivals(against=against)
    made.freeze("keeper", 2, "keeper 2", 20)
    made.crown(Member("keeper", 1))
    assert drawn(made) == expected
    game = made.meet("a", ["striker"], ["keeper"])
    assert (game.learner, game.members[0]) == ("striker", STRIKER)


def test_hard_opponents_come_more_often_by_pfsp_and_without_any_the_other_is_as_it_is() -> None:
    made = rivals(against={"pfsp": 1})
    made.freeze("keeper", 2, "keeper 2", 20)
    play(made, STRIKER, Member("keeper", 1), 1, 30)
    play(made, STRIKER, Member("keeper", 2), -1, 30)
    members = [made.meet(f"{number}", ["striker"], ["keeper"]).members[1] for number in range(200)]
    assert members.count(Member("keeper", 2)) > 150
    assert made.meet("a", ["striker"], ["goalie"]).members[1] == Member("goalie")


def test_results_of_two_behaviours_rate_both() -> None:
    made = rivals()
    play(made, STRIKER, Member("keeper", 1), 1, 5)
    assert made.payoff.pair(STRIKER, Member("keeper", 1)).wins == 5
    assert made.ratings.points(STRIKER) > 1200 > made.ratings.points(Member("keeper", 1))


def test_each_has_a_champion_which_a_stronger_version_replaces(tmp_path: Any) -> None:
    ledger = Ledger(tmp_path / "books.sqlite")
    made = rivals(ledger)
    first, second = Member("striker", 1), Member("striker", 2)
    for candidate in (first, Member("keeper", 1)):
        assert made.candidates_of(candidate.player) == [candidate], "there is no champion yet"
        assert made.crown(candidate).passed
    made.freeze("striker", 2, "striker 2", 20)
    play(made, KEEPER, second, -1, 9)
    assert made.judge(second).reason == "striker:2 played 9 games, expected 10 or more"
    play(made, KEEPER, first, 1, 40)
    play(made, KEEPER, second, -1, 40)
    assert made.candidates_of("striker") == [second]
    assert made.crown(second).passed
    assert (made.champion_of("striker"), made.champion_of("keeper")) == (second, Member("keeper", 1))
    assert made.candidates_of("striker") == []
    assert not made.judge(first).passed, "it is weaker"
    again = rivals(ledger)
    assert again.champion_of("striker") == second, "the books have it"


def test_a_pool_is_of_one_behaviour() -> None:
    made = rivals()
    for version in (2, 3, 4):
        made.freeze("striker", version, f"striker {version}", 10 * version)
    assert [member.player for member in made.pool].count("striker") == 2
    assert Member("keeper", 1) in made.pool
