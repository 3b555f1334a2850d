"""Points of frozen players, fitted to all their games at once. Pure.

The model is that of `brayx.league.ratings`: Plackett-Luce with openskill's prior and scale. Ratings there follow a
player that changes, so they depend on the order of games and stay uncertain. The points here are the maximum of the
posterior over all games: they do not depend on order, and their interval shrinks with the number of games. With two
sides this is the Bradley-Terry model: ``a`` beats ``b`` with probability
``1 / (1 + 10^((points_b - points_a) / 400))``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from brayx.league.ratings import FIRST_POINTS, POINTS_PER_MU, Rating

_SCALE = math.log(10.0) / 400.0
_PRIOR = (Rating().sigma * POINTS_PER_MU) ** -2.0
_MAX_STEPS = 200
_LONGEST_STEP = 200.0
_CLOSE = 1e-6
_Z95 = 1.959964


class Fitted(NamedTuple):
    """A player's fitted points.

    Attributes:
        points: the most likely points.
        low, high: 95 % interval, relative to the players that fix the scale.
        games: number of games that it played.
    """

    points: float
    low: float
    high: float
    games: int


def expected(points: float, other: float) -> float:
    """Expected win rate of a player with ``points`` against one with ``other`` points; a draw is half a win."""
    return 0.5 * (1.0 + math.tanh(0.5 * _SCALE * (points - other)))


def fit(
    count: int, results: Mapping[tuple[int, int], tuple[int, int, int]], anchors: Mapping[int, float] | None = None
) -> list[Fitted]:
    """Fits the points of ``count`` players.

    Args:
        count: number of players; they are numbered from 0.
        results: wins, draws and losses of each pair's first player.
        anchors: known points of some players. They fix the scale: the fitted points of these players get the same mean.
            None or empty: the mean of all players is a new player's points.
    """
    games, won = np.zeros((count, count)), np.zeros(count)
    for (a, b), (wins, draws, losses) in results.items():
        games[a, b] += wins + draws + losses
        games[b, a] += wins + draws + losses
        won[a] += wins + 0.5 * draws
        won[b] += losses + 0.5 * draws
    points = np.full(count, FIRST_POINTS)
    for _ in range(_MAX_STEPS):  # Newton's method; the posterior is concave
        rate = 0.5 * (1.0 + np.tanh(0.5 * _SCALE * (points[:, None] - points[None, :])))
        slope = _SCALE * (won - (games * rate).sum(1)) - _PRIOR * (points - FIRST_POINTS)
        step = np.linalg.solve(_curvature(games, rate), slope)
        points = points + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
        if np.abs(step).max() < _CLOSE:
            break
    fixed: Sequence[int] = sorted(anchors) if anchors else range(count)
    fixed_points = anchors or dict.fromkeys(fixed, FIRST_POINTS)
    # Games determine only differences, so points and intervals are relative to the mean of the anchors.
    relative = np.eye(count)
    relative[:, fixed] -= 1.0 / len(fixed)
    rate = 0.5 * (1.0 + np.tanh(0.5 * _SCALE * (points[:, None] - points[None, :])))
    spread = relative @ np.linalg.inv(_curvature(games, rate)) @ relative.T
    width = _Z95 * np.sqrt(np.maximum(np.diag(spread), 0.0))
    points = relative @ points + sum(fixed_points.values()) / len(fixed)
    played = games.sum(1)
    return [
        Fitted(float(points[i]), float(points[i] - width[i]), float(points[i] + width[i]), int(played[i]))
        for i in range(count)
    ]


def _curvature(games: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Hessian of the negative log posterior, ``[count, count]``."""
    information = _SCALE**2 * games * rate * (1.0 - rate)
    hessian: np.ndarray = np.diag(information.sum(1) + _PRIOR) - information
    return hessian
