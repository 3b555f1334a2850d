"""`brayx.replay.limiter`: the rate holds, and settings that pass never deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.replay.limiter import RateLimiter


def test_without_a_rate_only_the_size_limits():
    limiter = RateLimiter(min_size=3)
    assert limiter.room(10) is None
    assert not limiter.may_sample(2, 1)
    assert limiter.may_sample(3, 10**6)


def test_the_window_is_exact():
    limiter = RateLimiter(2.0, min_size=10, samples=2)
    assert limiter.room(0) == 12, "the initial 10, and 4 / 2 more"
    limiter.inserted(12)
    assert limiter.room(12) == 0
    assert limiter.may_sample(12, 8)
    assert not limiter.may_sample(12, 9)
    limiter.sampled(8)
    assert limiter.balance == 16
    assert limiter.room(12) == 4
    assert not limiter.may_sample(12, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_size": 11, "capacity": 10}, "nothing would ever be sampled"),
        ({"samples_per_insert": 0.0}, "more than 0"),
        ({"samples_per_insert": float("inf")}, "more than 0"),
        ({"min_size": 0}, "min_size"),
    ],
)
def test_settings_that_would_deadlock_are_refused_with_a_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        RateLimiter(**arguments)


@settings(max_examples=300)
@given(
    ratio=st.floats(0.05, 50),
    min_size=st.integers(1, 30),
    samples=st.integers(1, 40),
    prefers_samples=st.booleans(),
)
def test_valid_settings_never_deadlock_and_keep_the_rate(ratio, min_size, samples, prefers_samples):
    limiter = RateLimiter(ratio, min_size, samples=samples)
    size = 0
    for _ in range(300):
        insert, sample = limiter.room(size) > 0, limiter.may_sample(size, samples)
        assert insert or sample, "neither inserts nor samples are allowed"
        if sample and (prefers_samples or not insert):
            limiter.sampled(samples)
        else:
            limiter.inserted(1)
            size += 1
        if limiter.samples:
            assert abs(limiter.balance - ratio * min_size) <= ratio + samples + 1e-6
