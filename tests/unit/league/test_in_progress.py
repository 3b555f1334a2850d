"""`brayx.league.in_progress`: which session gets which seat, and which results are taken."""

from __future__ import annotations

from typing import Any

import pytest

from brayx.errors import BadResult, ServiceFull, SessionError
from brayx.league import in_progress as module
from brayx.league.ledger import Ledger
from tests.unit.league.play import Playing, league_config, sessions_of


def new(players: dict[str, Any] | None = None, **options: Any) -> Playing:
    return Playing(league_config(players, **options), Ledger(":memory:"))


def test_a_seat_is_given_again_to_its_own_session() -> None:
    league = new()
    members = [league.assign("g", session) for session in (*sessions_of("g"), *sessions_of("g"))]
    assert members[:2] == members[2:]


def test_a_session_that_names_no_game_is_one() -> None:
    league = new()
    league.assign("", "alone")
    finished = league.ended("alone", "stop")
    assert finished is not None
    assert (finished.game, finished.outcome) == ("alone", "broken_off")


def test_one_session_too_many_is_refused() -> None:
    league = new()
    for session in sessions_of("g"):
        league.assign("g", session)
    with pytest.raises(SessionError, match=r"'g' has 2 seats.*'g-agent-2'"):
        league.assign("g", "g-agent-2")
    assert not league.learns("g-agent-2")


def test_an_ended_session_does_not_come_back_while_its_game_goes_on() -> None:
    league = new()
    for session in sessions_of("g"):
        league.assign("g", session)
    league.ended("g-agent-0", "stop")
    with pytest.raises(SessionError, match="'g-agent-0' has ended"):
        league.assign("g", "g-agent-0")


def test_a_session_plays_in_one_game() -> None:
    league = new()
    league.assign("g", "s")
    with pytest.raises(SessionError, match="another game than 'h'"):
        league.assign("h", "s")


def test_games_in_progress_are_bounded_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GAMES", 3)
    league = new()
    for game in "abc":
        league.assign(game, f"{game}-agent-0")
    with pytest.raises(ServiceFull) as refused:
        league.assign("d", "d-agent-0")
    assert refused.value.details == {"games": 3}
    league.assign("a", "a-agent-1")
    for session in sessions_of("a"):
        league.ended(session, "idle")
    league.assign("d", "d-agent-0")
    for session in ("b-agent-0", "c-agent-0", "d-agent-0"):
        league.ended(session, "idle")
    assert (league.games._games, league.games._sessions) == ({}, {})


TEAMS = {"red": ["r1", "r2"], "blue": ["b1", "b2"]}


@pytest.mark.parametrize("session", ["g-agent-r3", "g", "g-agent-"])
def test_a_seat_that_no_team_has_is_refused_and_opens_no_game(session: str) -> None:
    league = new(seats=4, teams=TEAMS)
    with pytest.raises(SessionError, match="r1, r2, b1, b2"):
        league.assign("g", session)
    assert len(league.games) == 0


def test_a_seat_is_taken_once() -> None:
    league = new(seats=4, teams=TEAMS)
    league.assign("g", "g-agent-r1")
    with pytest.raises(SessionError, match=r"'r1'.*'g' is taken"):
        league.assign("g", "again-agent-r1")


@pytest.mark.parametrize("value", ["won", float("nan"), True, None])
def test_bad_results_are_refused_and_counted(value: Any) -> None:
    league = new()
    league.assign("g", "g-agent-0")
    with pytest.raises(BadResult):
        league.result("g-agent-0", value)
    assert league.counters()["refused"] == 1
    league.result("g-agent-0", "win")  # the session goes on


def test_a_second_result_must_be_the_first() -> None:
    league = new()
    league.assign("g", "g-agent-0")
    league.result("g-agent-0", 2)
    league.result("g-agent-0", 2.0)
    with pytest.raises(BadResult, match=r"'g-agent-0' is 3.* 2\.0 "):
        league.result("g-agent-0", 3)


def test_a_result_needs_a_session_that_runs() -> None:
    league = new()
    with pytest.raises(BadResult, match=r"'g-agent-0'.*unknown or over"):
        league.result("g-agent-0", "win")
    for session in sessions_of("g"):
        league.assign("g", session)
    league.ended("g-agent-0", "stop")
    with pytest.raises(BadResult, match="unknown or over"):
        league.result("g-agent-0", "win")


def test_a_game_whose_sessions_did_not_all_come_is_broken_off() -> None:
    league = new()
    league.assign("g", "g-agent-0")
    league.result("g-agent-0", "win")
    finished = league.ended("g-agent-0", "disconnect")
    assert finished is not None
    assert (finished.outcome, finished.reason) == ("broken_off", "1 of 2 sessions started")


def test_a_session_ends_once() -> None:
    league = new()
    assert league.ended("never", "stop") is None
    for session in sessions_of("g"):
        league.assign("g", session)
    assert league.ended("g-agent-0", "stop") is None
    assert league.ended("g-agent-0", "stop") is None
    assert league.ended("g-agent-1", "stop") is not None
    assert league.ended("g-agent-1", "stop") is None
