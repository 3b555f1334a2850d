"""Ratings: openskill's Plackett-Luce model, and Elo. Knows nothing of games in progress or of files.

Plackett-Luce is algorithm 4 of Weng and Lin 2011, "A Bayesian approximation method for online ranking". It expects the
member of skill ``mu_a`` to beat that of ``mu_b`` with probability

    1 / (1 + exp(-(mu_a - mu_b) / c)),    c^2 = 2 beta^2 + sigma_a^2 + sigma_b^2

and moves both by the difference between that and the result. `predict` is this formula, since it is where ratings come
to rest. (openskill's own ``predict_win`` puts a normal distribution in place of the logistic one, and gives the
stronger one up to 12 points more.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from openskill.models import PlackettLuce

from brayx.league.member import Member

_MODEL = PlackettLuce()

ELO_K = 16.0
"""Maximum Elo points that a game moves."""

FIRST_POINTS = 1200.0
"""Elo and points of a new member."""

POINTS_PER_MU = 400.0 / math.log(10.0) / (math.sqrt(2.0) * _MODEL.beta)
"""Points of one unit of mu. With it Elo's win rate, ``1 / (1 + 10^(-difference / 400))``, equals `predict` for two
members of sigma 0, and is a little further from a half than `predict` for others."""

_Z95 = 1.959964


class Rating(NamedTuple):
    """Rating of a member.

    Attributes:
        mu, sigma: mean and deviation of its skill in openskill's model.
        elo: Elo.
        games: rated games.
    """

    mu: float = _MODEL.mu
    sigma: float = _MODEL.sigma
    elo: float = FIRST_POINTS
    games: int = 0

    @property
    def points(self) -> float:
        """The skill as one number on Elo's scale: ``1200 + POINTS_PER_MU * (mu - 25)``."""
        return FIRST_POINTS + POINTS_PER_MU * (self.mu - _MODEL.mu)


class Ratings:
    """Ratings of members; one that was never rated has openskill's first one.

    Args:
        ratings: ratings so far.
    """

    def __init__(self, ratings: Mapping[Member, Rating] | None = None) -> None:
        self._ratings = dict(ratings or {})

    def __getitem__(self, member: Member) -> Rating:
        return self._ratings.get(member, Rating())

    def rate(self, teams: Sequence[Sequence[Member]], ranks: Sequence[float]) -> None:
        """Counts a game.

        A member that plays on several teams adds to the strength of each, but its own rating stays: it can neither
        win nor lose against itself.

        Args:
            teams: members of each team, one for each seat.
            ranks: place of each team, the lowest is best; equal ranks are a draw.

        Raises:
            ValueError: not one rank for each team, fewer than two teams, or an empty one.
        """
        if len(teams) != len(ranks) or len(teams) < 2 or not all(teams):
            raise ValueError(f"{len(teams)} teams and {len(ranks)} ranks, expected two or more teams with a rank each")
        on = [set(team) for team in teams]
        rated = [{member for member in team if sum(member in other for other in on) == 1} for team in on]
        if not any(rated):
            return
        before = [[self[member] for member in team] for team in teams]
        after = _MODEL.rate(
            [[_MODEL.rating(mu=rating.mu, sigma=rating.sigma) for rating in team] for team in before],
            ranks=[float(rank) for rank in ranks],
        )
        moved = _elo_moves([sum(rating.elo for rating in team) / len(team) for team in before], ranks)
        for place, team in enumerate(teams):
            for member, old, new in zip(team, before[place], after[place], strict=True):
                if member in rated[place]:
                    self._ratings[member] = Rating(new.mu, new.sigma, old.elo + moved[place], old.games + 1)

    def points(self, member: Member) -> float:
        """See `Rating.points`."""
        return self[member].points

    def interval(self, member: Member) -> tuple[float, float]:
        """Points between which the member is with a probability of 95 %."""
        rating = self[member]
        width = _Z95 * rating.sigma * POINTS_PER_MU
        return rating.points - width, rating.points + width

    def predict(self, a: Member, b: Member) -> float:
        """Predicted win rate of ``a`` against ``b``, a draw as half a win."""
        rating_a, rating_b = self[a], self[b]
        c = math.sqrt(2.0 * _MODEL.beta**2 + rating_a.sigma**2 + rating_b.sigma**2)
        return 0.5 * (1.0 + math.tanh(0.5 * (rating_a.mu - rating_b.mu) / c))  # the logistic function; never overflows

    def inherit(self, child: Member, parent: Member) -> None:
        """Gives a new snapshot its player's rating, with no games yet."""
        self._ratings[child] = self[parent]._replace(games=0)

    def forget(self, member: Member) -> None:
        """Resets a member to a new one's rating."""
        self._ratings.pop(member, None)

    def state(self) -> dict[Member, Rating]:
        """All ratings, as the constructor takes them."""
        return dict(self._ratings)


def _elo_moves(elos: Sequence[float], ranks: Sequence[float]) -> list[float]:
    """Change of each side's Elo: the mean over the others of ``K * (result - expected)``."""

    def move(i: int) -> float:
        total = 0.0
        for j, (elo, rank) in enumerate(zip(elos, ranks, strict=True)):
            if i != j:
                result = 0.5 if rank == ranks[i] else float(ranks[i] < rank)
                total += result - 1.0 / (1.0 + 10.0 ** ((elo - elos[i]) / 400.0))
        return ELO_K * total / (len(elos) - 1)

    return [move(i) for i in range(len(elos))]
