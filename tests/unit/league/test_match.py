"""`brayx.league.match`: both players get every seat, the first N games that begin count, and each game once.

In a tournament every pair plays its games, and a game's sessions are of one pair.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from brayx.errors import BadResult, SessionError
from brayx.league.gates import wilson
from brayx.league.match import MatchGames, Tally, Tournament

TEAMS = {"north": ["n1", "n2"], "south": ["s1", "s2"]}


def play(games: MatchGames, name: str, results: tuple[object, object] | None, agents: str = "xy") -> tuple[int, int]:
    """Plays a game of two seats; returns the players of the first seat and of the second."""
    sessions = [f"{name}-agent-{agent}" for agent in agents]
    first, second = (games.assign(session) for session in sessions)
    for session, result in zip(sessions, results or (), strict=False):
        games.result(session, result)
    for session in sessions:
        games.ended(session, "stop")
    return first, second


def test_players_swap_seats_so_that_each_has_every_seat_and_every_first_move_as_often() -> None:
    games = MatchGames({}, 400, seed=3)
    seats = [play(games, str(number), ("draw", "draw")) for number in range(400)]
    assert Counter(seats) == {(0, 1): 200, (1, 0): 200}
    for parity in (0, 1):  # games in which one seat moves first, and those in which the other does
        assert Counter(seats[parity::2]) == {(0, 1): 100, (1, 0): 100}


def test_seats_depend_on_the_seed() -> None:
    def seats(seed: int) -> list[tuple[int, int]]:
        games = MatchGames({}, 40, seed)
        return [play(games, str(number), ("draw", "draw")) for number in range(40)]

    assert seats(1) == seats(1)
    assert len({tuple(seats(seed)) for seed in range(8)}) > 1


def test_the_score_is_that_of_a_plain_count() -> None:
    rng = random.Random(0)
    games, expected = MatchGames({}, 200), {"x": [0, 0, 0], "y": [0, 0, 0]}
    for number in range(200):
        won = rng.choice((1.0, 0.0, -1.0))
        first, _ = play(games, str(number), (won, -won))
        result = won if first == 0 else -won
        expected["x" if first == 0 else "y"][{1.0: 0, 0.0: 1, -1.0: 2}[result]] += 1
    score = games.score()
    assert score.done
    assert score.by_seat == {name: Tally(*counts) for name, counts in expected.items()}
    assert score.all == Tally(*(x + y for x, y in zip(*expected.values(), strict=True)))


def test_a_match_is_of_the_first_games_that_begin_not_of_those_that_end_first() -> None:
    games = MatchGames({}, 2)
    for seat in "xy":
        games.assign(f"long-agent-{seat}")
    play(games, "short", ("draw", "draw"))
    play(games, "beyond", ("draw", "draw"))
    assert games.score().all == Tally(draws=1)
    assert not games.score().done
    for seat, result in (("x", "win"), ("y", "loss")):
        games.result(f"long-agent-{seat}", result)
        games.ended(f"long-agent-{seat}", "stop")
    score = games.score()
    assert score.done
    assert (score.all.games, score.all.draws, score.begun) == (2, 1, 3)


def test_a_game_that_does_not_count_is_replaced_by_the_next() -> None:
    games = MatchGames({}, 2)
    play(games, "broken", ("win", "win"))
    play(games, "left", None)
    play(games, "third", ("draw", "draw"))
    assert games.score().reason == "2 of 2 sessions reported no result; 'left-agent-x' ended with reason 'stop'"
    assert not games.score().done
    play(games, "fourth", ("draw", "draw"))
    score = games.score()
    assert (score.all, score.broken_off, score.contradictory, score.done) == (Tally(draws=2), 1, 1, True)


def test_a_game_of_one_session_is_broken_off() -> None:
    games = MatchGames({}, 1)
    games.assign("alone")
    games.ended("alone", "idle")
    games.ended("alone", "idle")
    assert games.score().reason == "1 of 2 sessions started"
    assert games.score().broken_off == 1


@pytest.mark.parametrize("value", [float("nan"), True, "won", None, [1]])
def test_a_value_that_is_no_result_is_refused(value: object) -> None:
    games = MatchGames({}, 1)
    games.assign("g-agent-x")
    with pytest.raises(BadResult):
        games.result("g-agent-x", value)


def test_a_result_is_given_once_and_while_the_session_runs() -> None:
    games = MatchGames({}, 1)
    games.assign("g-agent-x")
    games.result("g-agent-x", "win")
    games.result("g-agent-x", "win")
    with pytest.raises(BadResult, match="was 'win' before"):
        games.result("g-agent-x", "loss")
    games.assign("g-agent-y")
    games.ended("g-agent-x", "stop")
    for session in ("g-agent-x", "unknown"):
        with pytest.raises(BadResult, match="unknown or over"):
            games.result(session, "win")


def test_a_seat_is_taken_once() -> None:
    games = MatchGames({}, 1)
    for agent in "xy":
        games.assign(f"g-agent-{agent}")
    with pytest.raises(SessionError, match="one session more"):
        games.assign("g-agent-z")
    assert games.assign("g-agent-x") != games.assign("g-agent-y"), "a session keeps its seat"


def test_a_team_is_played_by_one_player_whatever_the_order_of_its_sessions() -> None:
    games = MatchGames(TEAMS, 4)
    for number in range(4):
        sides = {seat: games.assign(f"{number}-agent-{seat}") for seat in ("s2", "n1", "s1", "n2")}
        assert sides["n1"] == sides["n2"] != sides["s1"] == sides["s2"]
        for seat in sides:
            games.result(f"{number}-agent-{seat}", 1.0 if seat[0] == "n" else 0.0)
        for seat in sides:
            games.ended(f"{number}-agent-{seat}", "stop")
    assert games.score().by_seat == {"north": Tally(wins=2), "south": Tally(losses=2)}
    with pytest.raises(SessionError, match="n1, n2, s1, s2"):
        games.assign("5-agent-east")
    assert games.score().begun == 4


def test_a_session_without_a_seat_begins_no_game_and_changes_no_seats() -> None:
    plain, disturbed = MatchGames(TEAMS, 40, 5), MatchGames(TEAMS, 40, 5)
    for number in range(40):
        with pytest.raises(SessionError):
            disturbed.assign(f"bad-{number}-agent-east")
        assert plain.assign(f"{number}-agent-n1") == disturbed.assign(f"{number}-agent-n1")
    assert disturbed.score().begun == 40


def test_an_id_that_is_used_again_is_another_game() -> None:
    games = MatchGames({}, 2)
    for _ in range(2):
        play(games, "same", ("draw", "draw"))
    assert games.score().all == Tally(draws=2)


def test_a_match_is_of_two_teams() -> None:
    with pytest.raises(ValueError, match="3 teams: a, b, c"):
        MatchGames({"a": ["1"], "b": ["2"], "c": ["3"]}, 1)


def test_seats_without_a_name_of_their_own_are_numbered() -> None:
    games = MatchGames({}, 2)
    assert list(games.score().by_seat) == ["seat 1", "seat 2"]
    play(games, "1", ("win", "loss"), "xy")
    assert list(games.score().by_seat) == ["x", "y"]
    play(games, "2", ("win", "loss"), "yx")
    assert list(games.score().by_seat) == ["seat 1", "seat 2"]


def test_a_win_rate_counts_a_draw_as_half_a_win() -> None:
    assert Tally(3, 2, 5).win_rate == 0.4
    assert Tally(3, 2, 5).interval == wilson(3, 2, 5)
    assert (Tally().win_rate, Tally().interval) == (None, (0.0, 1.0))


GAMES = {(0, 1): 10, (1, 2): 20, (0, 2): 10}


def play_pair(tournament: Tournament, name: str, *, broken: bool = False) -> tuple[int, int]:
    """Plays a game that the player of the lower number wins."""
    sessions = [f"{name}-agent-{agent}" for agent in "xy"]
    players = [tournament.assign(session) for session in sessions]
    for session, player in zip(sessions, players, strict=True):
        if not broken:
            tournament.result(session, "win" if player == min(players) else "loss")
    for session in sessions:
        tournament.ended(session, "stop")
    return players[0], players[1]


def test_all_pairs_play_side_by_side_and_end_together() -> None:
    tournament = Tournament({}, GAMES, seed=1)
    played: Counter[tuple[int, ...]] = Counter()
    for number in range(40):
        assert not tournament.score().done
        played[tuple(sorted(play_pair(tournament, str(number))))] += 1
        if number == 19:
            assert all(abs(played[pair] - games / 2) <= 1 for pair, games in GAMES.items())
    score = tournament.score()
    assert score.done
    assert score.all.games == score.begun == 40
    assert tournament.results() == {pair: Tally(wins=games) for pair, games in GAMES.items()}


def test_a_game_that_is_broken_off_is_replaced() -> None:
    tournament = Tournament({}, {(0, 1): 2, (2, 3): 2})
    for number in range(4):
        play_pair(tournament, str(number), broken=number == 0)
    assert not tournament.score().done
    for number in range(4, 8):
        play_pair(tournament, str(number))
    score = tournament.score()
    assert (score.done, score.broken_off, score.all.games) == (True, 1, 4)


def test_games_in_progress_keep_their_pair() -> None:
    tournament = Tournament({}, dict.fromkeys(GAMES, 1))
    first = [tournament.assign(f"{game}-agent-x") for game in "abc"]
    second = [tournament.assign(f"{game}-agent-y") for game in "abc"]
    assert {tuple(sorted(pair)) for pair in zip(first, second, strict=True)} == set(GAMES)


def test_a_match_has_two_teams() -> None:
    with pytest.raises(ValueError, match="two players"):
        Tournament({"a": ["1"], "b": ["2"], "c": ["3"]}, GAMES)
