"""`brayx.league.snapshots`: when one is due, and who leaves, against slow oracles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.league.config import PlayerConfig
from brayx.league.member import Member
from brayx.league.snapshots import due, to_drop


def player(**options: object) -> PlayerConfig:
    return PlayerConfig.model_validate({"role": "main", **options})


EVERY = player(snapshot_every=100)
AT = player(snapshot_every=None, snapshot_at=0.7)
EITHER = player(snapshot_every=160, snapshot_at=0.7)
NEVER = player(snapshot_every=None)


@pytest.mark.parametrize(
    ("config", "steps", "win_rates", "reason"),
    [
        (EVERY, 0, [], ""),
        (EVERY, 99, [1.0], ""),
        (EVERY, 100, [0.0], "100 env steps since the last snapshot, snapshot_every is 100"),
        (EVERY, -50, [], ""),
        (AT, 49_999, [1.0], ""),
        (AT, 50_000, [1.0], "win rate 1.000 over 1 opponents, snapshot_at is 0.7"),
        (EITHER, 39, [1.0], ""),
        (EITHER, 40, [0.5, 0.9], "win rate 0.700 over 2 opponents, snapshot_at is 0.7"),
        (EITHER, 40, [0.5, 0.5], ""),
        (AT, 10**9, [0.0, 1.0], ""),
        (EITHER, 40, [], "40 env steps, and no opponent to play against"),
        (NEVER, 10**9, [1.0], ""),
    ],
)
def test_a_snapshot_is_due_for_a_reason(config: PlayerConfig, steps: int, win_rates: list[float], reason: str) -> None:
    assert due(config, steps, win_rates) == reason


@given(
    st.integers(0, 300) | st.integers(49_900, 50_100),
    st.lists(st.floats(0, 1), max_size=5),
    st.none() | st.integers(1, 200),
    st.none() | st.floats(0.05, 0.95),
)
def test_it_is_due_where_the_rule_says(
    steps: int, win_rates: list[float], every: int | None, win_rate: float | None
) -> None:
    config = player(snapshot_every=every, snapshot_at=win_rate)
    least = 50_000 if every is None else max(1, every // 4)
    wins = win_rate is not None and (not win_rates or sum(win_rates) / len(win_rates) >= win_rate)
    expected = (every is not None and steps >= every) or (wins and steps >= least)
    assert bool(due(config, steps, win_rates)) is expected


def slow_drop(pool: list[Member], points: dict[Member, float], champion: Member | None, size: int) -> list[Member]:
    """Drops one at a time, as the rule is told."""
    members = list(pool)
    dropped = []
    best = max(np.array([points[member] for member in pool]), default=0.0)
    strongest = next((member for member in pool if points[member] == best), None)
    while len(members) > size:
        free = [
            member
            for place, member in enumerate(pool)
            if member in members
            and member not in (champion, strongest)
            and any(later.player == member.player for later in pool[place + 1 :])
        ]
        if not free:
            break
        weakest = min(free, key=lambda member: (points[member], pool.index(member)))
        members.remove(weakest)
        dropped.append(weakest)
    return dropped


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=12),
    st.integers(1, 12),
    st.none() | st.integers(0, 11),
)
def test_who_leaves_equals_the_oracle(kinds: list[tuple[str, int]], size: int, champion: int | None) -> None:
    pool = [Member(name, version) for version, (name, _) in enumerate(kinds, 1)]
    points = {member: float(point) for member, (_, point) in zip(pool, kinds, strict=True)}
    crowned = pool[champion] if champion is not None and champion < len(pool) else None
    assert to_drop(pool, points.__getitem__, crowned, size) == slow_drop(pool, points, crowned, size)


def test_the_champion_the_strongest_and_the_newest_stay() -> None:
    pool = [Member("main", version) for version in range(1, 7)] + [Member("exploiter", 7)]
    points = {member: 1000.0 - member.version for member in pool}
    assert to_drop(pool, points.__getitem__, pool[4], 5) == [pool[3], pool[2]], "the weakest that may go"
    assert to_drop(pool, points.__getitem__, pool[4], 1) == [pool[3], pool[2], pool[1]], "the others stay"


@pytest.mark.parametrize("size", [1, 2])
def test_one_snapshot_stays(size: int) -> None:
    assert to_drop([Member("main", 1)], lambda member: 0.0, None, size) == []


def test_only_a_player_that_says_so_restarts() -> None:
    exploiter = {"role": "exploiter", "of": "main"}
    assert PlayerConfig.model_validate(exploiter | {"restart": "snapshot"}).restarts
    assert not PlayerConfig.model_validate(exploiter).restarts
