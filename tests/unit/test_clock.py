"""The clock of deadlines stands still while it is held."""

from __future__ import annotations

import pytest

from brayx import clock
from tests.clocks import Clock


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(100.0)
    monkeypatch.setattr(clock, "monotonic", made)
    monkeypatch.setattr(clock, "_state", (None, 0.0))
    return made


def test_time_in_a_hold_does_not_count(seconds: Clock) -> None:
    began = clock.now()
    seconds.now += 1.0
    with clock.hold():
        assert clock.is_held()
        seconds.now += 10.0
        assert clock.now() - began == 1.0
    seconds.now += 2.0
    assert not clock.is_held()
    assert (clock.now() - began, clock.held_s()) == (3.0, 10.0)


def test_a_hold_within_a_hold_counts_once(seconds: Clock) -> None:
    with clock.hold():
        with clock.hold():
            seconds.now += 4.0
        assert clock.is_held(), "the inner one did not end it"
        seconds.now += 1.0
    assert clock.held_s() == 5.0


def test_a_hold_that_raises_ends(seconds: Clock) -> None:
    with pytest.raises(RuntimeError), clock.hold():
        raise RuntimeError
    assert not clock.is_held()
