"""Plays games in a league, and counts them slowly: shared by this folder's tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from brayx.league.config import LeagueConfig
from brayx.league.games import Finished
from brayx.league.in_progress import GamesInProgress
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.payoff import Pair


class Playing(League):
    """A league whose games are all in this process.

    Attributes:
        games: the games in progress.
    """

    def __init__(self, config: LeagueConfig, ledger: Ledger, *, seed: int = 0) -> None:
        super().__init__(config, ledger, seed=seed)
        self.games = GamesInProgress(config)

    def assign(self, game: str, session: str) -> Member:
        return self.games.assign(game, session, self.draw)

    def learns(self, session: str) -> bool:
        return self.games.learns(session, self.learners)

    def result(self, session: str, value: Any) -> None:
        self.games.result(session, value)

    def ended(self, session: str, reason: str) -> Finished | None:
        game = self.games.ended(session, reason)
        return None if game is None else self.finish(game)

    def counters(self) -> dict[str, int]:
        counters = super().counters()
        return counters | {"refused": counters["refused"] + self.games.refused}


def league_config(players: dict[str, Any] | None = None, **options: Any) -> LeagueConfig:
    """A league of a main player and its exploiter, or of other players."""
    players = players or {"main": {"role": "main"}, "exploiter": {"role": "exploiter", "of": "main"}}
    return LeagueConfig(model="policy", players=players, **options)


def sessions_of(game: str, seats: int = 2) -> list[str]:
    return [f"{game}-agent-{seat}" for seat in range(seats)]


def play(league: Playing, game: str, results: Sequence[Any] = ("win", "loss")) -> Finished:
    """Plays a whole game; the results are by seat, None for a seat that reports none."""
    sessions = sessions_of(game, len(results))
    for session in sessions:
        league.assign(game, session)
    for session, result in zip(sessions, results, strict=True):
        if result is not None:
            league.result(session, result)
    ends = [league.ended(session, "stop") for session in sessions]
    assert ends[:-1] == [None] * (len(sessions) - 1)
    assert ends[-1] is not None
    return ends[-1]


def results_of(game: int) -> tuple[str, str]:
    """Results of a numbered game: every way in which one of two seats can end."""
    return (("win", "loss"), ("loss", "win"), ("draw", "draw"))[game * 7 % 5 % 3]


def play_and_freeze(league: Playing, game: int) -> Finished:
    """Plays a numbered game; before each tenth one a snapshot is frozen, of one learner after the other."""
    if game % 10 == 0:
        freeze_before(league, game)
    return play(league, f"g{game}", results_of(game))


def freeze_before(league: Playing, game: int) -> Member:
    return league.freeze(league.learners[game // 10 % 2], game + 1, f"digest {game}", 100 * game)


def slow_pairs(games: Iterable[Finished], recency: float) -> dict[tuple[Member, Member], Pair]:
    """Pairs of two-sided games from the list of all their scores, as the definition says."""
    scores: dict[tuple[Member, Member], list[float]] = {}
    for game in games:
        if game.outcome != "counted" or game.teams[0] == game.teams[1]:
            continue
        (a,), (b,) = game.teams
        score = (1 + np.sign(game.ranks[1] - game.ranks[0])) / 2
        scores.setdefault(min((a, b), (b, a)), []).append(score if a < b else 1 - score)
    pairs = {}
    for key, of_pair in scores.items():
        results = np.array(of_pair)
        ages = np.arange(len(results))[::-1]
        pairs[key] = Pair(
            int((results == 1).sum()), int((results == 0.5).sum()), int((results == 0).sum()),
            float((results * recency**ages).sum()), float((recency**ages).sum()),
        )  # fmt: skip
    return pairs
