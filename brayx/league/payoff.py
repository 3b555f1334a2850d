"""Payoff: results of every pair of members. Pure; knows nothing of games or of where the results are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from brayx.league.member import Member


class Pair(NamedTuple):
    """Results of a pair of members, as the first of the two sees them.

    Attributes:
        wins, draws, losses: games.
        recent_score: sum of results (win 1, draw 0.5, loss 0), each weighted by recency.
        recent_games: sum of these weights.
    """

    wins: int = 0
    draws: int = 0
    losses: int = 0
    recent_score: float = 0.0
    recent_games: float = 0.0

    @property
    def games(self) -> int:
        """All games."""
        return self.wins + self.draws + self.losses

    def played(self, score: float, recency: float) -> Pair:
        """The pair after one more game.

        Args:
            score: 1 for a win, 0.5 for a draw, 0 for a loss.
            recency: factor on the weight of the earlier games.
        """
        return Pair(
            self.wins + (score == 1.0),
            self.draws + (score == 0.5),
            self.losses + (score == 0.0),
            self.recent_score * recency + score,
            self.recent_games * recency + 1.0,
        )

    def reversed(self) -> Pair:
        """The same results as the second of the two sees them."""
        return Pair(self.losses, self.draws, self.wins, self.recent_games - self.recent_score, self.recent_games)


class Payoff:
    """Results between members. A pair is stored once, under the smaller of the two.

    Args:
        recency: factor by which the earlier games of a pair lose weight with each further one.
        pairs: results so far, each under a key whose first member is the smaller one.
    """

    def __init__(self, recency: float = 0.99, pairs: Mapping[tuple[Member, Member], Pair] | None = None) -> None:
        self._recency = recency
        self._pairs = dict(pairs or {})

    def add(self, a: Member, b: Member, score: float) -> None:
        """Counts a game.

        Args:
            a, b: two different members.
            score: result of ``a``: 1 for a win, 0.5 for a draw, 0 for a loss.

        Raises:
            ValueError: the two are the same, or the score is none of these.
        """
        if a == b or score not in (0.0, 0.5, 1.0):
            raise ValueError(f"{a.label} against {b.label} with score {score}: expected two members and 0, 0.5 or 1")
        if b < a:
            a, b, score = b, a, 1.0 - score
        self._pairs[a, b] = self._pairs.get((a, b), Pair()).played(score, self._recency)

    def pair(self, a: Member, b: Member) -> Pair:
        """All results of ``a`` against ``b``."""
        if b < a:
            return self._pairs.get((b, a), Pair()).reversed()
        return self._pairs.get((a, b), Pair())

    def games(self, a: Member, b: Member) -> int:
        """Number of games of ``a`` against ``b``."""
        pair = self._pairs.get((a, b) if a < b else (b, a))
        return 0 if pair is None else pair.games

    def win_rate(self, a: Member, b: Member) -> float:
        """Share of games that ``a`` won against ``b``, a draw as half a win; 0.5 with no games."""
        pair = self.pair(a, b)
        return (pair.wins + 0.5 * pair.draws) / pair.games if pair.games else 0.5

    def recent(self, a: Member, b: Member) -> float:
        """The win rate with recent games weighted more; 0.5 with no games."""
        pair = self.pair(a, b)
        return pair.recent_score / pair.recent_games if pair.games else 0.5

    def table(self, members: Sequence[Member]) -> NDArray[np.float64]:
        """Win rates ``[n, n]``: row against column."""
        return np.array([[self.win_rate(a, b) for b in members] for a in members]).reshape(len(members), len(members))

    def remove(self, member: Member) -> None:
        """Forgets all results of a member."""
        self._pairs = {key: pair for key, pair in self._pairs.items() if member not in key}

    def state(self) -> dict[tuple[Member, Member], Pair]:
        """All pairs, as the constructor takes them."""
        return dict(self._pairs)


def pair_results(teams: Sequence[Iterable[Member]], ranks: Sequence[float]) -> Iterator[tuple[Member, Member, float]]:
    """Results of a game by pairs: every two members of different teams get the result of their teams.

    A team counts a member once, however many seats it has: seats that one player plays are no independent results. A
    member does not play itself.

    Args:
        teams: members of each team.
        ranks: place of each team, the lowest is best; equal ranks are a draw.

    Yields:
        Two members, and the result of the first: 1, 0.5 or 0.
    """
    distinct = [sorted(set(team)) for team in teams]
    for i, (team, rank) in enumerate(zip(distinct, ranks, strict=True)):
        for other_team, other_rank in zip(distinct[i + 1 :], ranks[i + 1 :], strict=True):
            score = 0.5 if rank == other_rank else float(rank < other_rank)
            for a in team:
                for b in other_team:
                    if a != b:
                        yield a, b, score
