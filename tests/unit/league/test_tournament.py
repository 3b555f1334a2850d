"""Tournaments: every pair plays its games, and a game's sessions are of one pair."""

from __future__ import annotations

from collections import Counter

import pytest

from brayx.league.match import Tally, Tournament

GAMES = {(0, 1): 10, (1, 2): 20, (0, 2): 10}


def play(tournament: Tournament, name: str, *, broken: bool = False) -> tuple[int, int]:
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
        played[tuple(sorted(play(tournament, str(number))))] += 1
        if number == 19:
            assert all(abs(played[pair] - games / 2) <= 1 for pair, games in GAMES.items())
    score = tournament.score()
    assert score.done
    assert score.all.games == score.begun == 40
    assert tournament.results() == {pair: Tally(wins=games) for pair, games in GAMES.items()}


def test_a_game_that_is_broken_off_is_replaced() -> None:
    tournament = Tournament({}, {(0, 1): 2, (2, 3): 2})
    for number in range(4):
        play(tournament, str(number), broken=number == 0)
    assert not tournament.score().done
    for number in range(4, 8):
        play(tournament, str(number))
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
