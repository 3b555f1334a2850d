"""The ladder of strengths that `brayx league calibrate` measures, and the choice of levels among its rungs. Pure.

The rungs in the middle are snapshots. The rungs above are the best snapshots at low temperatures, down to their best
moves. The rungs below are the weakest snapshot at high temperatures, up to almost random moves, and with growing delay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from brayx.league.member import Member, Rated

COLDER = (0.0, 0.5)
"""Temperatures of the champion and of the snapshot with the most points, besides 1."""
HOTTER = (1.5, 2.5, 5.0, 100.0)
"""Temperatures of the weakest snapshot, besides 1; at the last one, moves are almost random."""

_SNAPSHOTS = 6
_REACH = 3
_LEVEL_REACH = 2
_COLDEST = 0.25
_NEAR = 1 / 6
"""Maximum distance of a rung from a level's target, as a share of the step between levels."""


class Rung(NamedTuple):
    """A snapshot, made weaker or stronger by temperature and delay.

    Attributes:
        member: the snapshot.
        temperature: temperature of its policy; 1: as it learned.
        delay: number of ticks by which it sees its input late.
    """

    member: Member
    temperature: float = 1.0
    delay: int = 0

    @property
    def label(self) -> str:
        """``main:7``, ``main:7 at temperature 2, 6 ticks late``."""
        hot = f" at temperature {self.temperature:g}" if self.temperature != 1.0 else ""
        late = f"{',' if hot else ''} {self.delay} ticks late" if self.delay else ""
        return f"{self.member.label}{hot}{late}"


def ladder(pool: Sequence[Rated], champion: Member | None = None, delay: int = 0) -> list[Rung]:
    """The rungs to measure, in expected order of strength, the strongest first.

    Args:
        pool: rated snapshots, at least one.
        champion: the league's champion; None: it has none.
        delay: the weakest rung's delay, in ticks.
    """
    ranked = sorted(pool, key=lambda snapshot: (-snapshot.points, -snapshot.member.version))
    best = [snapshot for i, snapshot in enumerate(ranked) if i == 0 or snapshot.member == champion]
    targets = np.linspace(ranked[0].points, ranked[-1].points, _SNAPSHOTS)
    near = [min((abs(snapshot.points - target), i) for i, snapshot in enumerate(ranked))[1] for target in targets]
    middle = [snapshot.member for i, snapshot in enumerate(ranked) if i in near or snapshot in (*best, ranked[-1])]
    late = [round(delay * step / len(HOTTER)) for step in range(1, len(HOTTER) + 1)]
    return [
        *(Rung(snapshot.member, cold) for cold in COLDER for snapshot in best),
        *(Rung(member) for member in middle),
        *(Rung(middle[-1], hot, ticks) for hot, ticks in zip(HOTTER, late, strict=True)),
    ]


def first_pairs(count: int, games: int) -> dict[tuple[int, int], int]:
    """Number of games of each pair in the first round: each rung plays its neighbours, about ``games`` games in all."""
    games_of_pair = max(1, games // (2 * _REACH))
    return {(i, j): games_of_pair for i in range(count) for j in range(i + 1, min(i + 1 + _REACH, count))}


def choose(rungs: Sequence[Rung], points: Sequence[float], levels: int) -> list[tuple[Rung, float]]:
    """Chooses a rung for each level, with its expected points, the easiest first.

    The levels' targets are evenly spread from the weakest to the strongest rung. Where no rung is near a target, a new
    one is interpolated, if both neighbours are of one snapshot.

    Args:
        rungs: the measured rungs.
        points: points of each rung.
        levels: number of levels, at most the number of rungs.
    """
    ranked = sorted(zip(rungs, points, strict=True), key=lambda pair: pair[1])
    low, high = ranked[0][1], ranked[-1][1]
    near = (high - low) / (levels - 1) * _NEAR
    chosen: list[tuple[Rung, float]] = []
    for target in map(float, np.linspace(low, high, levels)):
        nearest = _nearest([pair for pair in ranked if pair not in chosen], target)
        between = None if abs(nearest[1] - target) <= near else _between(ranked, target)
        chosen.append(nearest if between is None else (between, target))
    return sorted(chosen, key=lambda pair: pair[1])


def _nearest(ranked: Sequence[tuple[Rung, float]], target: float) -> tuple[Rung, float]:
    return min(ranked, key=lambda pair: abs(pair[1] - target))


def _between(ranked: Sequence[tuple[Rung, float]], target: float) -> Rung | None:
    """Interpolates a rung of about ``target`` points; None: its two neighbours are different snapshots."""
    (below, low), (above, high) = next(
        pair for pair in itertools.pairwise(ranked) if pair[0][1] <= target <= pair[1][1]
    )
    if below.member != above.member or high == low:
        return None
    up = (target - low) / (high - low)
    cold, hot = (max(rung.temperature, _COLDEST) for rung in (above, below))
    temperature = round(float(hot ** (1 - up) * cold**up), 2)
    return Rung(below.member, temperature, round((1 - up) * below.delay + up * above.delay))


def level_pairs(points: Sequence[float], levels: Sequence[int], games: int) -> dict[tuple[int, int], int]:
    """Number of games of each pair in the second round: each level plays its neighbours in points.

    Args:
        points: measured or expected points of all rungs.
        levels: indices of the rungs that are levels.
        games: minimum games of a level.
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    pairs: dict[tuple[int, int], int] = {}
    for level in levels:
        place = order.index(level)
        neighbours = [*order[max(0, place - _LEVEL_REACH) : place], *order[place + 1 : place + 1 + _LEVEL_REACH]]
        for other in neighbours:
            pair = (min(level, other), max(level, other))
            pairs[pair] = max(pairs.get(pair, 0), -(-games // len(neighbours)))
    return pairs
