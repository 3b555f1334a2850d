"""`brayx.league.league`: seats, results, snapshots and champion together, over crashes of its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from brayx.errors import LeagueError
from brayx.league.league import League, Standing
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.ratings import Rating, Ratings
from tests.unit.league.play import (
    Playing,
    freeze_before,
    league_config,
    play,
    play_and_freeze,
    results_of,
    sessions_of,
    slow_pairs,
)

MAIN, EXPLOITER = Member("main"), Member("exploiter")


def new(players: dict[str, Any] | None = None, *, seed: int = 0, **options: Any) -> Playing:
    return Playing(league_config(players, **options), Ledger(":memory:"), seed=seed)


def books(league: Playing) -> tuple[object, ...]:
    return (
        league.payoff.state(), league.ratings.state(), league.snapshots, league.standings(), league.counters(),
        league.champion(),
    )  # fmt: skip


def dropped(league: League) -> list[Member]:
    return [snapshot.member for snapshot in league.snapshots if snapshot.dropped]


# Seats


def test_the_first_session_draws_all_seats_and_the_others_take_the_rest() -> None:
    against = {"against": {"random": 1.0}}
    league = new({"main": {"role": "main", **against}, "random": {"role": "script", "script": "bots.random"}})
    drawn = Counter()
    for game in range(400):
        members = [league.assign(f"g{game}", session) for session in sessions_of(f"g{game}")]
        assert sorted(members) == [MAIN, Member("random")]
        drawn[members[0]] += 1
        assert [league.learns(session) for session in sessions_of(f"g{game}")] == [member == MAIN for member in members]
    assert 160 < drawn[MAIN] < 240, "its seat is uniform"


def test_learners_get_their_shares_of_the_games() -> None:
    league = new({"a": {"role": "main", "share": 3.0}, "b": {"role": "main"}})
    counts = Counter(league.assign(f"g{game}", f"g{game}-agent-0").player for game in range(1000))
    assert 690 < counts["a"] < 810


def test_draws_depend_on_seed_and_game_alone() -> None:
    players = {"main": {"role": "main"}, "x": {"role": "exploiter", "of": "main"}, "all": {"role": "league_exploiter"}}

    def draws(seed: int, games: list[int]) -> dict[int, list[Member]]:
        league = new(players, seed=seed)
        return {g: [league.assign(f"g{g}", session) for session in sessions_of(f"g{g}")] for g in games}

    assert draws(1, list(range(60))) == draws(1, list(range(59, -1, -1)))
    assert draws(1, list(range(60))) != draws(2, list(range(60)))


def test_in_self_play_both_seats_learn_and_nothing_is_rated() -> None:
    league = new({"main": {"role": "main"}})
    assert [league.assign("g", session) for session in sessions_of("g")] == [MAIN, MAIN]
    assert all(league.learns(session) for session in sessions_of("g"))
    assert play(league, "g2").outcome == "counted"
    assert league.standings() == [Standing(MAIN, 1200.0, *Rating(), drawn=2)]
    assert league.payoff.state() == {}


def test_only_the_player_that_the_game_is_for_learns() -> None:
    league = new()
    for game in range(100):
        sessions = sessions_of(f"g{game}")
        members = [league.assign(f"g{game}", session) for session in sessions]
        learned = {member for member, session in zip(members, sessions, strict=True) if league.learns(session)}
        assert len(learned) == 1


TEAMS = {"red": ["r1", "r2"], "blue": ["b1", "b2"]}


def test_a_team_is_played_by_one_player_whoever_comes_first() -> None:
    league = new({"main": {"role": "main"}, "x": {"role": "exploiter", "of": "main"}}, seats=4, teams=TEAMS)
    for game in range(50):
        members = {seat: league.assign(f"g{game}", f"g{game}-agent-{seat}") for seat in ("b2", "r1", "b1", "r2")}
        assert members["r1"] == members["r2"]
        assert members["b1"] == members["b2"]


# Results


@pytest.mark.parametrize(
    ("results", "outcome", "reason"),
    [
        (("win", "loss"), "counted", ""),
        ((1, 3.5), "counted", ""),
        (("win", None), "broken_off", "1 of 2 sessions reported no result; 'g-agent-1' ended with reason 'stop'"),
        ((None, None), "broken_off", "2 of 2 sessions reported no result"),
        (("win", "win"), "contradictory", "expected one win"),
        (("win", 1.0), "contradictory", "expected either words or scores"),
    ],
)
def test_a_game_ends_with_an_outcome_that_is_counted(results: tuple[Any, Any], outcome: str, reason: str) -> None:
    league = new()
    finished = play(league, "g", results)
    assert finished.outcome == outcome
    assert reason in finished.reason
    assert bool(finished.reason) == (outcome != "counted")
    none = {"counted": 0, "broken_off": 0, "contradictory": 0, "refused": 0}
    assert league.counters() == none | {outcome: 1}
    assert league.ratings[MAIN].games == (outcome == "counted" and finished.teams[0] != finished.teams[1])
    assert sum(row.drawn for row in league.standings()) == 2


def test_a_game_of_an_id_that_has_ended_counts_nothing() -> None:
    league = new()
    play(league, "g")
    before = books(league)
    assert play(league, "g", ("loss", "win")).outcome == "repeated"
    assert books(league) == before


def test_a_team_game_counts_between_teams() -> None:
    league = new({"main": {"role": "main", "against": {"x": 1.0}}, "x": {"role": "exploiter", "of": "main"}},
                 seats=4, teams=TEAMS)  # fmt: skip
    seats = ("r1", "r2", "b1", "b2")
    members = [league.assign("g", f"g-agent-{seat}") for seat in seats]
    for seat, result in zip(seats, ("win", "win", "loss", "loss"), strict=True):
        league.result(f"g-agent-{seat}", result)
    ends = [league.ended(f"g-agent-{seat}", "stop") for seat in seats]
    assert ends[-1] is not None
    assert ends[-1].ranks == (0, 1)
    assert league.payoff.games(members[0], members[2]) == 1
    assert league.ratings[members[0]].mu > 25 > league.ratings[members[2]].mu


# Snapshots and champion


def test_a_snapshot_joins_the_pool_with_its_players_rating() -> None:
    league = new()
    for game in range(20):
        play(league, f"g{game}")
    frozen = league.freeze("main", 3, "digest", 1000)
    assert frozen == Member("main", 3)
    assert league.ratings[frozen] == league.ratings[MAIN]._replace(games=0)
    assert (league.pool, league.snapshots[0].env_steps, league.snapshots[0].parent) == ([frozen], 1000, None)
    assert frozen in {league.assign(f"h{game}", f"h{game}-agent-0") for game in range(50)}
    league.freeze("main", 4, "other", 2000)
    assert league.snapshots[1].parent == frozen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("main", 4, "digest", 2000), "main:4 .*main:3 .*same weights"),
        (("exploiter", 4, "digest", 2000), "exploiter:4 .*main:3 .*same weights"),
        (("main", 3, "other", 2000), "main:3 .*this version"),
        (("main", 0, "other", 2000), "version is 0"),
        (("nobody", 4, "other", 2000), "player is 'nobody'.*main, exploiter"),
    ],
)
def test_a_snapshot_that_cannot_be_is_refused(arguments: tuple[str, int, str, int], message: str) -> None:
    league = new()
    league.freeze("main", 3, "digest", 1000)
    before = books(league)
    with pytest.raises(LeagueError, match=message):
        league.freeze(*arguments)
    assert books(league) == before


def test_a_snapshot_is_due_by_the_steps_since_the_players_last() -> None:
    league = new({"main": {"role": "main", "snapshot_every": 100}, "x": {"role": "exploiter", "of": "main"}})
    assert league.due("main", 99) == ""
    assert league.due("main", 100).startswith("100 env steps")
    league.freeze("main", 1, "a", 130)
    league.freeze("x", 2, "b", 170)
    assert league.due("main", 229) == ""
    assert league.due("main", 230).startswith("100 env steps")
    assert league.due("main", 10) == "", "a trial that was resumed from an earlier checkpoint"


def test_a_snapshot_is_due_by_the_win_rate_over_who_can_be_drawn() -> None:
    main = {"role": "main", "snapshot_every": 40, "snapshot_at": 0.8}
    league = new({"main": main | {"against": {"x": 1.0}}, "x": {"role": "exploiter", "of": "main"}})
    assert league.due("main", 10) == ""
    for game in range(10):
        members = [league.assign(f"g{game}", session) for session in sessions_of(f"g{game}")]
        play(league, f"g{game}", ["win" if member == MAIN else "loss" for member in members])
    assert league.due("main", 10).startswith("win rate 1.000 over 1 opponents")


def test_a_full_pool_drops_the_weakest_and_their_results() -> None:
    league = new({"main": {"role": "main", "against": {"uniform": 1.0}}}, pool_size=2)
    first = league.freeze("main", 1, "a", 1)
    for game in range(4):
        members = [league.assign(f"g{game}", session) for session in sessions_of(f"g{game}")]
        play(league, f"g{game}", ["loss" if member == MAIN else "win" for member in members])
    second = league.freeze("main", 2, "b", 2)
    assert dropped(league) == []
    third = league.freeze("main", 3, "c", 3)
    assert (league.pool, dropped(league)) == ([first, third], [second]), "the first is the strongest"
    assert second not in {row.member for row in league.standings()}


def test_a_result_against_a_snapshot_that_left_the_pool_is_not_kept() -> None:
    league = new({"main": {"role": "main", "against": {"uniform": 1.0}}}, pool_size=1)
    first = league.freeze("main", 1, "a", 1)
    members = [league.assign("g", session) for session in sessions_of("g")]
    assert first in members
    league.crown(first)
    second = league.freeze("main", 2, "b", 2)
    assert league.crown(second).passed is False
    league._champion = second  # so that the first may leave
    league.ratings._ratings[second] = Rating(mu=40.0)
    league.freeze("main", 3, "c", 3)
    assert first in dropped(league)
    assert play(league, "g").outcome == "counted"
    assert league.payoff.state() == {}


def test_an_exploiter_that_starts_anew_is_a_new_player() -> None:
    exploiter = {"role": "exploiter", "of": "main", "restart": "snapshot"}
    league = new({"main": {"role": "main"}, "exploiter": exploiter})
    for game in range(30):
        play(league, f"g{game}")
    assert league.payoff.games(MAIN, EXPLOITER) > 0
    was = league.ratings[EXPLOITER]
    assert (league.restarts("exploiter"), league.restarts("main")) == (True, False)
    frozen = league.freeze("exploiter", 1, "digest", 1000)
    assert league.ratings[frozen] == was._replace(games=0)
    assert league.ratings[EXPLOITER] == Rating()
    assert league.payoff.games(MAIN, EXPLOITER) == 0
    league.freeze("exploiter", 2, "other", 2000)
    assert league.snapshots[-1].parent is None


def test_games_that_were_drawn_before_a_restart_count_for_nobody() -> None:
    exploiter = {"role": "exploiter", "of": "main", "restart": "snapshot"}
    players = {"main": {"role": "main", "against": {"exploiter": 1.0}}, "exploiter": exploiter}
    league = new(players, gate={"share": 0.0})

    def begin(game: str) -> list[Member]:
        return sorted(league.assign(game, session) for session in sessions_of(game))

    def win(game: str) -> str:
        """The main player wins a game that has begun."""
        for session in sessions_of(game):
            league.result(session, "win" if league.assign(game, session) == MAIN else "loss")
        ends = [league.ended(session, "stop") for session in sessions_of(game)]
        assert ends[-1] is not None
        return ends[-1].outcome

    assert begin("before") == begin("meanwhile") == [EXPLOITER, MAIN]
    league.freeze("exploiter", 1, "digest", 1000)
    rated = league.ratings.state()
    assert win("before") == "counted"
    league.void_games("exploiter")  # the new learner acts
    assert win("meanwhile") == "counted"
    assert league.payoff.state() == {}
    assert league.ratings.state() == rated
    assert begin("after") == [EXPLOITER, MAIN]
    assert win("after") == "counted"
    assert league.payoff.games(MAIN, EXPLOITER) == league.ratings[EXPLOITER].games == 1
    assert league.counters()["counted"] == 3


def test_a_champion_is_crowned_by_the_gate() -> None:
    league = new({"main": {"role": "main", "against": {"uniform": 1.0}}}, gate={"min_games": 30})
    first = league.freeze("main", 1, "a", 1)
    assert league.champion() is None
    assert league.crown(first).passed
    second = league.freeze("main", 2, "b", 2)
    verdict = league.crown(second)
    assert verdict == (False, "main:2 played 0 games against main:1, expected 30 or more")
    assert league.champion() == first
    for _ in range(30):
        league.payoff.add(second, first, 1.0)
    assert league.crown(second).passed
    assert league.champion() == second


def test_a_champion_from_elsewhere_must_be_beaten_like_any() -> None:
    ledger = Ledger(":memory:")
    incumbent = Member("champion", 7)
    ledger.crown(incumbent)
    league = Playing(league_config({"main": {"role": "main"}}, gate={"min_games": 10, "share": 0.99}), ledger)
    assert league.champion() == incumbent
    assert incumbent in league.members
    assert league.pool == []
    first = league.freeze("main", 8, "a", 1)
    assert league.crown(first) == (False, "main:8 played 0 games against champion:7, expected 10 or more")
    game = 0
    while not league.crown(first).passed:
        members = [league.assign(f"g{game}", session) for session in sessions_of(f"g{game}")]
        play(league, f"g{game}", ["win" if member == first else "loss" for member in members])
        game += 1
    assert league.payoff.games(first, incumbent) == 10
    assert league.champion() == first
    again = Playing(league_config({"main": {"role": "main"}}, gate={"min_games": 10, "share": 0.99}), ledger)
    for training in (league, again):
        second = training.freeze("main", 9 if training is league else 10, str(training), 2)
        assert incumbent in training.members
        assert incumbent not in training._matchmaker.opponents("main"), "no learner plays it any more"
        for _ in range(20):
            training.payoff.add(second, first, 1.0)
            training.payoff.add(second, incumbent, 0.0)
        refused = f"champion:7 beats {second.label}, whose win rate is 0.000 to 0.161 (95% confidence, 20 games)"
        assert training.crown(second) == (False, refused)
    again.freeze("main", 11, "unbeaten", 3)
    drawn = {again.assign(f"h{game}", session) for game in range(40) for session in sessions_of(f"h{game}")}
    assert incumbent in drawn, "the gate does"


@pytest.mark.parametrize("member", [MAIN, Member("random"), Member("main", 9)])
def test_only_a_snapshot_of_the_pool_can_be_champion(member: Member) -> None:
    league = new({"main": {"role": "main"}, "random": {"role": "script", "script": "bots.random"}})
    with pytest.raises(LeagueError, match="is not a snapshot of the pool"):
        league.crown(member)


# Crashes


def slow_ratings(games: list[Any]) -> Ratings:
    ratings = Ratings()
    for game in games:
        ratings.rate(game.teams, game.ranks)
    return ratings


def same_times(league: Playing, other: Playing) -> Playing:
    """The league as if its snapshots were frozen when the other's were."""
    times = [snapshot.time_s for snapshot in other.snapshots]
    league.snapshots = [snapshot._replace(time_s=time) for snapshot, time in zip(league.snapshots, times, strict=True)]
    return league


def test_books_reopened_in_the_middle_of_a_hundred_games_go_on(tmp_path: Path) -> None:
    config = league_config(pool_size=6)
    once = Playing(config, Ledger(":memory:"), seed=7)
    expected = [play_and_freeze(once, game) for game in range(50)]
    once.crown(once.pool[-1])
    expected += [play_and_freeze(once, game) for game in range(50, 100)]
    outcomes = []
    for part in (range(37), range(37, 50), range(50, 100)):
        ledger = Ledger(tmp_path / "league.db")
        league = Playing(config, ledger, seed=7)
        outcomes += [play_and_freeze(league, game) for game in part]
        league.assign("cut off", "cut off-agent-0")  # in progress when the process ends
        if part.stop == 50:
            league.crown(league.pool[-1])
        ledger.close()
    assert outcomes == expected
    again = Playing(config, Ledger(tmp_path / "league.db"), seed=7)
    assert again.champion() is not None
    assert len(dropped(again)) == 4
    assert books(again) == books(same_times(once, again))


def test_a_game_that_is_given_again_is_counted_once_with_the_same_answer() -> None:
    league = new()
    for session in sessions_of("g"):
        league.assign("g", session)
        league.result(session, "draw")
    league.games.ended("g-agent-0", "stop")
    game = league.games.ended("g-agent-1", "stop")
    assert game is not None
    first = league.finish(game)
    before = books(league)
    assert league.finish(game, again=True) == first
    assert first.outcome == "counted"
    assert league.finish(game).outcome == "repeated"
    assert books(league) == before
    lost = new()
    assert lost.finish(game, again=True).outcome == "counted", "the first call never came"
    assert lost.counters()["counted"] == 1


def test_books_equal_a_slow_count_of_the_games() -> None:
    league = new()
    games = [play(league, f"g{game}", results_of(game)) for game in range(100)]
    expected = slow_pairs(games, 0.99)
    assert league.payoff.state().keys() == expected.keys()
    for key, pair in league.payoff.state().items():
        assert pair == pytest.approx(expected[key])
    assert league.ratings.state() == slow_ratings(games).state()


def test_a_game_that_cannot_be_written_counts_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "league.db")
    league = Playing(league_config(), ledger)
    for game in range(9):
        play(league, f"g{game}")
    before = books(league)
    ledger._db.execute("PRAGMA query_only=1")
    with pytest.raises(LeagueError, match="readonly database"):
        play(league, "unlucky")
    assert books(league) == before
    with pytest.raises(LeagueError, match="readonly database"):
        league.freeze("main", 1, "digest", 10)
    assert books(league) == before
    ledger._db.execute("PRAGMA query_only=0")
    assert play(league, "lucky").outcome == "counted"


CHILD = """
import sys
from brayx.league.ledger import Ledger
from tests.unit.league.play import Playing, league_config, play_and_freeze

league = Playing(league_config(pool_size=6), Ledger(sys.argv[1]), seed=3)
for game in range(100_000):
    play_and_freeze(league, game)
    print(game, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kill_after", [1, 60, 100])
def test_a_killed_process_has_counted_the_games_that_it_reported(tmp_path: Path, kill_after: int) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", CHILD, str(tmp_path / "league.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        assert child.stdout is not None
        reported = [json.loads(child.stdout.readline()) for _ in range(kill_after)]
        os.kill(child.pid, signal.SIGKILL)
        reported += [json.loads(line) for line in child.stdout if line.endswith("\n")]
    assert child.returncode == -signal.SIGKILL
    assert reported == list(range(len(reported)))
    config = league_config(pool_size=6)
    killed = Playing(config, Ledger(tmp_path / "league.db"), seed=3)
    counted = killed.counters()["counted"]
    assert counted - len(reported) in (0, 1), "the last one may have been killed before its report"
    expected = Playing(config, Ledger(":memory:"), seed=3)
    for game in range(counted):
        play_and_freeze(expected, game)
    if len(killed.snapshots) > len(expected.snapshots):  # killed between a snapshot and the game after it
        freeze_before(expected, counted)
    assert books(killed) == books(same_times(expected, killed))
    assert play(killed, "g0", results_of(0)).outcome == "repeated", "a retry after the crash"
