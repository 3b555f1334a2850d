"""What the owner of rollout workers makes of how they end, without Ray running."""

from __future__ import annotations

from brayx.cluster.rollout import _Slot

HOUR_S = 3600.0


def test_errors_of_an_environment_that_are_far_apart_do_not_add_up():
    slot = _Slot(0)
    assert [slot.raised(day * 24 * HOUR_S, HOUR_S) for day in range(30)] == [1] * 30
    assert len(slot.raised_at) == 1, "nothing grows"


def test_errors_of_an_environment_add_up_within_the_window():
    slot = _Slot(0)
    assert [slot.raised(at, HOUR_S) for at in (0.0, 10.0, 3000.0, 3605.0, 9000.0)] == [1, 2, 3, 3, 1]
