"""When a process that keeps ending starts again."""

from __future__ import annotations

from brayx.restarts import RestartLimits, RestartTimes


def test_one_that_keeps_ending_waits_longer_each_time_and_one_that_ran_for_a_while_does_not() -> None:
    times = RestartTimes(started_at=100.0)
    pauses = []
    for _ in range(7):
        assert times.ended(101.0) == 1.0
        assert times.restart_at == 101.0 + times.pause_s
        pauses.append(times.pause_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert times.ended(131.0) == 31.0
    assert times.pause_s == 0.5


def test_one_that_could_not_be_started_waits_for_the_longest_pause() -> None:
    times = RestartTimes()
    times.not_started(7.0)
    assert times.restart_at == 22.0


def test_a_restart_counts_for_a_time_and_in_all() -> None:
    times = RestartTimes(RestartLimits(2, 60.0, 4))
    assert [times.too_often(now) for now in (0.0, 30.0, 60.0, 119.0)] == [None] * 4, "each is the second within 60 s"
    assert times.too_often(119.5) == ("3 times within 60 s", "restarts")
    times = RestartTimes(RestartLimits(2, 60.0, 4))
    assert [times.too_often(now) for now in (0.0, 100.0, 200.0, 300.0)] == [None] * 4
    assert times.too_often(400.0) == ("5 times", "lifetime_restarts")
    assert RestartTimes(RestartLimits(0)).too_often(0.0) == ("once within 60 s", "restarts")
    unlimited = RestartTimes()
    assert not any(unlimited.too_often(now) for now in range(100))
