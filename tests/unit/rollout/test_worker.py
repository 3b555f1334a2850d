"""How often the environment of a rollout worker may fail."""

from __future__ import annotations

from brayx.rollout.worker import Failures

HOUR_S = 3600.0


def test_errors_far_apart_do_not_add_up():
    failures = Failures()
    assert [failures.add(day * 24 * HOUR_S) for day in range(30)] == [1] * 30
    assert len(failures.at) == 1, "old errors are forgotten"


def test_errors_within_the_window_add_up():
    failures = Failures()
    assert [failures.add(time_s) for time_s in (0.0, 10.0, 3000.0, 3605.0, 9000.0)] == [1, 2, 3, 3, 1]
