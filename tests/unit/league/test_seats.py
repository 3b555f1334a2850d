"""`brayx.league.seats`: a team is played by one member, and each team is the learner's as often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from brayx.errors import SessionError
from brayx.league.games import Game
from brayx.league.matchmaking import Matchmaker
from brayx.league.member import Member
from brayx.league.payoff import Payoff
from brayx.league.seats import Seats, seat_of
from tests.unit.league.play import league_config

MAIN = Member("main")
TEAMS = {"red": ["r1", "r2"], "blue": ["b1"]}
PLAYERS: dict[str, Any] = {
    "main": {"role": "main", "share": 3.0},
    "other": {"role": "main"},
    "script": {"role": "script", "script": "bots.first"},
}
CONFIG = league_config(PLAYERS, seats=3, teams=TEAMS)


def test_teams_are_the_seats_in_order() -> None:
    assert Seats(CONFIG, 0).teams == [[0, 1], [2]]
    assert Seats(league_config(PLAYERS, seats=3), 0).teams == [[0], [1], [2]], "without teams each seat is one"


def test_a_draw_depends_on_the_seed_and_the_games_id_alone() -> None:
    first = [Seats(CONFIG, 1).rng(game).random() for game in ("a", "b")]
    assert first == [Seats(CONFIG, 1).rng(game).random() for game in ("a", "b")]
    assert len({*first, Seats(CONFIG, 2).rng("a").random()}) == 3


def test_learners_are_drawn_by_their_shares_and_play_each_team_as_often() -> None:
    seats, matchmaker = Seats(CONFIG, 0), Matchmaker(CONFIG.players, Payoff())
    games = [seats.draw(f"g{number}", matchmaker, seats.rng(f"g{number}")) for number in range(800)]
    assert all(game.members[0] == game.members[1] for game in games), "one member plays a team"
    learners = Counter(game.learner for game in games)
    assert learners.keys() == {"main", "other"}
    assert 550 < learners["main"] < 650
    red = sum(game.members[0] == Member(game.learner) != game.members[2] for game in games)
    blue = sum(game.members[2] == Member(game.learner) != game.members[0] for game in games)
    assert abs(red - blue) < 120
    seats.retire("main")
    assert {seats.draw("g", matchmaker, seats.rng(str(number))).learner for number in range(50)} == {"other"}


def test_nobody_learns_from_a_game_that_decides_and_all_its_players_are_seated() -> None:
    seats, rival = Seats(CONFIG, 0), Member("other", 1)
    games = [seats.decide("g", MAIN, [rival], seats.rng(str(number))) for number in range(50)]
    assert {game.learner for game in games} == {""}
    assert {tuple(game.members) for game in games} == {(MAIN, MAIN, rival), (rival, rival, MAIN)}


def test_a_new_session_gets_the_seat_that_it_names_or_the_next_one() -> None:
    game = Game("g", "main", [MAIN, MAIN, MAIN], {"g-agent-r1": 0})
    assert seat_of([], game, "any") == 1
    names = ["r1", "r2", "b1"]
    assert seat_of(names, game, "g-agent-b1") == 2
    for session in ("again-agent-r1", "g-agent-r3", "g"):
        with pytest.raises(SessionError) as refused:
            seat_of(names, game, session)
        assert refused.value.details == {"session": session}
    game.sessions.update({"second": 1, "third": 2})
    with pytest.raises(SessionError):
        seat_of([], game, "fourth")
