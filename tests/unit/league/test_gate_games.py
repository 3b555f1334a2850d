"""Games that decide about champions, and learners that retire: who plays, and who becomes champion."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from brayx.errors import LeagueError
from brayx.league.config import GateConfig
from brayx.league.gates import PATIENCE, at_every_look, failed, judge, opponents, plays, wilson
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.payoff import Payoff
from tests.unit.league.play import Playing, league_config, play, sessions_of

MAIN, RANDOM = Member("main"), Member("random")
NEW, OLD = Member("main", 2), Member("main", 1)
PLAYERS = {"main": {"role": "main"}, "random": {"role": "script", "script": "bots.random"}}


def new(players: dict[str, Any] | None = None, *, seed: int = 0, **options: Any) -> Playing:
    return Playing(league_config(players or PLAYERS, **options), Ledger(":memory:"), seed=seed)


def with_champion(**gate: Any) -> Playing:
    """`OLD` is champion, `NEW` the candidate."""
    league = new(gate=gate)
    league.freeze("main", 1, "a", 1)
    league.crown(OLD)
    league.freeze("main", 2, "b", 2)
    return league


def play_by_strength(league: Playing, game: str, strength: Mapping[Member, float], rng: random.Random) -> list[Member]:
    """A game that the first seat wins with probability a / (a + b); returns who played."""
    a, b = (league.assign(game, session) for session in sessions_of(game))
    won = rng.random() < strength[a] / (strength[a] + strength[b])
    play(league, game, ("win", "loss") if won else ("loss", "win"))
    return [a, b]


def test_a_share_of_the_games_decides_and_nobody_learns_from_them() -> None:
    league = with_champion(share=0.2)
    counts: Counter[frozenset[Member]] = Counter()
    for game in range(2000):
        sessions = sessions_of(f"g{game}")
        members = frozenset(league.assign(f"g{game}", session) for session in sessions)
        if MAIN not in members:
            counts[members] += 1
            assert not any(league.learns(session) for session in sessions)
    assert counts.keys() == {frozenset({NEW, OLD}), frozenset({NEW, RANDOM})}
    assert 330 < counts.total() < 470
    assert 150 < counts[frozenset({NEW, OLD})] < 250, "half of them"


def test_a_game_that_decides_is_counted_like_any_and_is_for_nobody() -> None:
    league = with_champion(share=0.99)
    finished = play(league, "g")
    assert (finished.learner, finished.outcome) == ("", "counted")
    (a,), (b,) = finished.teams
    assert league.payoff.games(a, b) == league.ratings[a].games == league.counters()["counted"] == 1


def test_without_a_candidate_or_a_share_no_game_decides() -> None:
    league = with_champion(share=0.0)
    alone = new(gate={"share": 0.9})
    alone.freeze("main", 1, "a", 1)
    alone.crown(OLD)
    assert alone.candidates() == []
    for training in (league, alone):
        members = [{training.assign(f"g{game}", s) for s in sessions_of(f"g{game}")} for game in range(200)]
        assert all(MAIN in playing for playing in members)


def test_each_team_of_a_deciding_game_has_a_member_of_its_own() -> None:
    league = new(seats=3, gate={"share": 0.99})
    league.freeze("main", 1, "a", 1)
    league.crown(OLD)
    league.freeze("main", 2, "b", 2)
    games = [[league.assign(f"g{game}", session) for session in sessions_of(f"g{game}", 3)] for game in range(300)]
    deciding = [members for members in games if MAIN not in members]
    assert all(set(members) == {NEW, OLD, RANDOM} for members in deciding)
    assert {members[0] for members in deciding} == {NEW, OLD, RANDOM}, "seats are drawn"


def book(**games: tuple[int, int]) -> Payoff:
    """Wins and losses of `NEW` against the champion and the script."""
    payoff = Payoff()
    for name, (wins, losses) in games.items():
        for score, count in ((1.0, wins), (0.0, losses)):
            for _ in range(count):
                payoff.add(NEW, {"old": OLD, "script": RANDOM}[name], score)
    return payoff


@pytest.mark.parametrize("min_games", [1, 10, 30])
def test_a_candidate_fails_exactly_where_the_rule_says(min_games: int) -> None:
    config = GateConfig(min_games=min_games)
    for wins in range(0, 60, 7):
        for losses in range(0, 60, 7):
            low, _ = wilson(wins, 0, losses, at_every_look(config.confidence))
            _, high = wilson(wins, 0, losses)
            games = wins + losses
            champion = games >= min_games and (high <= 0.5 or (games >= PATIENCE * min_games and low <= 0.5))
            assert failed(NEW, OLD, book(old=(wins, losses)), [NEW, OLD], config) is champion
            past = games >= min_games and high < 0.5
            payoff = book(script=(wins, losses))
            assert not failed(NEW, OLD, payoff, [NEW, OLD, RANDOM], config), "the champion may lose to it, too"
            for _ in range(max(8, games // 4 + 1)):
                payoff.add(OLD, RANDOM, 1.0)
            assert failed(NEW, OLD, payoff, [NEW, OLD, RANDOM], config) is past
            for _ in range(100):
                payoff.add(OLD, RANDOM, 0.0)
            assert not failed(NEW, OLD, payoff, [NEW, OLD, RANDOM], config)


@pytest.mark.parametrize(
    ("payoff", "expected"),
    [
        (book(), {OLD, RANDOM}),
        (book(script=(10, 0)), {OLD}),
        (book(old=(9, 0)), {OLD, RANDOM}),
        (book(old=(5, 5)), {OLD, RANDOM}),
        (book(old=(10, 0)), set()),
        (book(old=(10, 0), script=(0, 5)), {RANDOM}),
        (book(old=(10, 0), script=(2, 2)), set()),
    ],
)
def test_a_candidate_plays_whom_its_verdict_needs(payoff: Payoff, expected: set[Member]) -> None:
    rng = random.Random(0)
    past = [NEW, OLD, RANDOM]
    draws = [opponents(NEW, OLD, payoff, past, GateConfig(min_games=10), 1, rng) for _ in range(50)]
    assert {member for members in draws for member in members} == expected


def test_of_past_players_those_come_first_that_it_has_met_least() -> None:
    past_players = [Member(name) for name in "abcd"]
    payoff, rng = Payoff(), random.Random(0)
    for _ in range(400):
        (rival,) = opponents(NEW, OLD, payoff, [*past_players, NEW, OLD], GateConfig(), 1, rng)
        payoff.add(NEW, rival, 0.5)
        games = [payoff.games(NEW, other) for other in past_players]
        assert max(games) - min(games) <= 1
    assert 160 < payoff.games(NEW, OLD) < 240


def slow_lower(wins: float, games: int, z: float = 1.959964) -> float:
    """Wilson's lower bound: the least p that the games do not reject, on a grid."""
    p = np.linspace(0.0, 1.0, 20001)
    return float(p[np.abs(wins / games - p) <= z * np.sqrt(p * (1 - p) / games) + 1e-12][0]) if games else 0.0


@pytest.mark.parametrize("seed", range(20))
def test_the_past_player_that_may_win_most_clearly_comes_first(seed: int) -> None:
    rng, past_players = random.Random(seed), [Member(name) for name in "abcdef"]
    payoff, scores = Payoff(), dict.fromkeys(past_players, (0.0, 0))
    for _ in range(rng.randrange(40)):
        rival, score = rng.choice(past_players), rng.choice((0.0, 0.5, 1.0))
        payoff.add(NEW, rival, score)
        won, games = scores[rival]
        scores[rival] = won + score, games + 1
    bounds = {rival: (round(slow_lower(*results), 3), results[1]) for rival, results in scores.items()}
    expected = {rival for rival, bound in bounds.items() if bound == min(bounds.values())}
    drawn = [opponents(NEW, OLD, payoff, [*past_players, NEW, OLD], GateConfig(), 1, rng) for _ in range(100)]
    assert {member for members in drawn for member in members} == {OLD, *expected}


def passes(rates: Mapping[Member, float], candidates: int, of_champion: Mapping[Member, float] | None = None) -> float:
    """Share of simulated candidates that become champion, of those with these win rates; the champion wins 60 % of its
    games against past players, or as often as told."""
    config, rng, passed = GateConfig(), random.Random(3), 0
    past = [*rates, NEW]
    for _ in range(candidates):
        payoff = Payoff()
        while not failed(NEW, OLD, payoff, past, config):
            rivals = opponents(NEW, OLD, payoff, past, config, 1, rng)
            if not rivals:
                passed += judge(NEW, OLD, payoff, past, config).passed
                break
            player = plays(NEW, OLD, payoff, rivals, config)
            rate = rates[rivals[0]] if player == NEW else (of_champion or {}).get(rivals[0], 0.6)
            payoff.add(player, rivals[0], float(rng.random() < rate))
    return passed / candidates


def test_a_past_player_that_regained_is_found_among_many() -> None:
    """With games spread evenly, 37 % of the first candidates passed."""
    past_players = {Member(f"p{number}"): 0.6 for number in range(9)}
    assert passes({OLD: 0.6, RANDOM: 0.2, **past_players}, 60) <= 0.2
    assert passes({OLD: 0.6, RANDOM: 0.6, **past_players}, 60) >= 0.85


def test_a_past_player_that_beats_the_champion_too_holds_nobody_back() -> None:
    """A perfect script, for example. Before, no candidate ever passed."""
    past_players = {Member(f"p{number}"): 0.6 for number in range(9)}
    assert passes({OLD: 0.6, RANDOM: 0.0, **past_players}, 60, {RANDOM: 0.0}) >= 0.85
    assert passes({OLD: 0.4, RANDOM: 0.0, **past_players}, 60, {RANDOM: 0.0}) <= 0.05


def test_the_champion_plays_a_past_player_that_beats_its_candidate() -> None:
    """The first champion came without a game; its games decide whether the script has regained, or beats all."""
    league = with_champion(share=0.99, min_games=20)
    lost: Counter[Member] = Counter()
    for game in range(400):
        sessions = sessions_of(f"g{game}")
        members = [league.assign(f"g{game}", session) for session in sessions]
        strongest = RANDOM if RANDOM in members else NEW if NEW in members else members[0]
        play(league, f"g{game}", ["win" if member == strongest else "loss" for member in members])
        lost.update(member for member in members if RANDOM in members and MAIN not in members)
        if league.crown(NEW).passed:
            break
    assert league.champion() == NEW
    assert lost[OLD] == 6, "as few as show it, with a look after each"
    assert 4 <= lost[NEW] <= 7


def test_a_past_player_that_beats_the_champion_too_is_named_in_the_verdict() -> None:
    payoff = book(old=(80, 20), script=(0, 10))
    past = [NEW, OLD, RANDOM]
    refused = judge(NEW, OLD, payoff, past, GateConfig())
    assert refused == (False, "random beats main:2, whose win rate is 0.000 to 0.278 (95% confidence, 10 games)")
    for _ in range(10):
        payoff.add(OLD, RANDOM, 0.0)
    passed = judge(NEW, OLD, payoff, past, GateConfig())
    assert passed.passed
    assert passed.reason.endswith("none of 0 past players beats it; 1 more beat main:1, so they do not count")


def test_a_candidate_that_has_failed_is_followed_by_a_newer_one() -> None:
    league = with_champion(min_games=5, share=0.99)
    game = 0
    while league.candidates():
        play_by_strength(league, f"g{game}", {NEW: 1e-9, OLD: 1.0, RANDOM: 1e-9, MAIN: 1.0}, random.Random(game))
        game += 1
    assert not league.crown(NEW).passed
    newer = league.freeze("main", 3, "c", 3)
    assert league.candidates() == [newer]


def test_a_candidate_that_has_begun_stays_while_newer_ones_come() -> None:
    league = with_champion(share=0.99)
    while not league.payoff.games(NEW, OLD):
        play(league, f"g{league.counters()['counted']}")
    league.freeze("main", 3, "c", 3)
    assert league.candidates() == [NEW]


def test_a_candidate_that_is_refused_never_becomes_champion_and_a_newer_one_may() -> None:
    league = new(gate={"share": 0.9})
    first, second = (league.freeze("main", version, f"digest {version}", version) for version in (1, 2))
    league.refuse(second, "its check says 3")
    assert league.crown(second) == (False, "its check says 3")
    assert league.candidates() == [], "older ones have their chance before newer ones come"
    newer = league.freeze("main", 3, "c", 3)
    assert league.candidates() == [newer]
    assert league.crown(newer).passed
    assert league.champion() == newer
    assert first in league.pool


def test_only_main_players_have_candidates() -> None:
    league = new({"main": {"role": "main"}, "exploiter": {"role": "exploiter", "of": "main"}})
    league.freeze("exploiter", 1, "a", 1)
    assert league.candidates() == []
    frozen = league.freeze("main", 2, "b", 2)
    assert league.candidates() == [frozen]


@pytest.mark.parametrize("seed", range(4))
def test_the_champion_moves_to_the_stronger_and_never_to_a_weaker(seed: int) -> None:
    """Strengths rise, fall and rise again: a champion is stronger than the one before."""
    rng = random.Random(seed)
    strengths = [1.0, 3.0, 0.5, 9.0, 2.0]
    league = new(seed=seed, gate={"min_games": 40, "share": 0.5})
    strength = {RANDOM: 0.1}
    champions: list[Member] = []
    game = 0
    for version, value in enumerate(strengths, 1):
        frozen = league.freeze("main", version, f"digest {version}", version)
        strength |= {frozen: value, MAIN: value}
        for _ in range(400):
            champions += [candidate for candidate in league.candidates() if league.crown(candidate).passed]
            play_by_strength(league, f"g{game}", strength, rng)
            game += 1
    assert [member.version for member in champions] == [1, 2, 4]


# Learners that retire


def test_a_learner_that_retires_is_drawn_no_more_and_its_snapshots_stay() -> None:
    players = {"main": {"role": "main", "against": {"x": 1.0}}, "x": {"role": "exploiter", "of": "main"}}
    league = new(players, gate={"share": 0.0})
    frozen = league.freeze("x", 1, "a", 1)
    running = {league.assign(f"r{game}", f"r{game}-agent-0") for game in range(20)}
    assert Member("x") in running
    league.retire("x", "NaN")
    league.retire("x", "again")
    assert league.learners == ["main"]
    members = Counter(league.assign(f"g{game}", session) for game in range(100) for session in sessions_of(f"g{game}"))
    assert members == {MAIN: 100, frozen: 100}
    assert Member("x") not in league.members
    assert not any(
        league.learns(f"r{game}-agent-0") for game in range(20) if league.games._games[f"r{game}"].learner == "x"
    )
    assert league.due("x", 10**9) == ""


def test_an_exploiter_goes_on_against_the_last_snapshot_of_a_player_that_retires() -> None:
    league = new({"main": {"role": "main"}, "x": {"role": "exploiter", "of": "main"}}, gate={"share": 0.0})
    league.freeze("main", 1, "a", 1)
    newest = league.freeze("main", 2, "b", 2)
    league.retire("main", "NaN")
    members = {league.assign(f"g{game}", session) for game in range(100) for session in sessions_of(f"g{game}")}
    assert members == {Member("x"), newest}


def test_the_last_learner_cannot_retire() -> None:
    league = new()
    with pytest.raises(LeagueError, match=r"'main'.*NaN"):
        league.retire("main", "NaN")
    with pytest.raises(LeagueError, match=r"player is 'random'.*main"):
        league.retire("random", "NaN")
    assert league.learners == ["main"]
