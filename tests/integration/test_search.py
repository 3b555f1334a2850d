"""Searches with real trials on Ray: a copy plays as the one ahead, and ASHA stops who is behind.

The same on the local host: `tests/end_to_end/test_tune.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from brayx.search.space import Domain
from brayx.search.tune import tune
from tests.end_to_end.test_tune import copy_plays_as_the_one_ahead

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """After a search Ctrl-C is what it was before."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_a_copy_plays_as_the_one_ahead_without_learning(ray_cluster: str, tmp_path: Path) -> None:
    copy_plays_as_the_one_ahead(tmp_path, cluster="")


def test_asha_on_ray_stops_who_is_behind(ray_cluster: str, tmp_path: Path) -> None:
    """One after the other: the first learns, and the second, which learns nothing, is stopped at its first look."""
    others = placement_group([{"CPU": 3}])  # leaves one CPU
    assert others.wait(30)
    try:
        result = tune(
            "CartPole-v1",
            {"learning_rate": Domain("choice", (1e-9, 1e-3)), "num_envs": 8, "unroll_length": 64},
            num_trials=2,
            num_steps=12_000,
            interval_steps=4_000,
            seed=7,
            tracking=str(tmp_path),
            cluster="",
            say=lambda line: None,
        )
    finally:
        remove_placement_group(others)
    assert {outcome.error for outcome in result.trials} == {""}
    ahead, behind = result.trials
    assert [outcome.options["learning_rate"] for outcome in (ahead, behind)] == [1e-3, 1e-9], "the draws of this seed"
    assert ahead.curve[-1][0] >= 12_000
    assert [4_000 <= steps < 12_000 for steps, _ in behind.curve] == [True]
