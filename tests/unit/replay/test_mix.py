"""`brayx.replay.mix`: shares of the streams with data, no waiting, and an empty stream does not displace the others."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.replay.mix import StreamMix

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 10), min_size=1)


@settings(max_examples=200)
@given(weights=WEIGHTS, turns=st.integers(1, 200))
def test_shares_follow_the_weights_within_one_turn(weights, turns):
    mix, counts, total = StreamMix(weights), dict.fromkeys(weights, 0), sum(weights.values())
    for _ in range(turns):
        counts[mix.choose(weights)] += 1
    for name, weight in weights.items():
        assert abs(counts[name] - turns * weight / total) <= len(weights)


def test_the_order_of_a_two_to_one_mix():
    mix = StreamMix({"a": 2, "b": 1})
    assert [mix.choose("ab") for _ in range(6)].count("a") == 4


@settings(max_examples=50)
@given(weights=WEIGHTS, data=st.data())
def test_a_stream_with_data_never_waits_for_an_empty_one(weights, data):
    mix = StreamMix(weights)
    for _ in range(30):
        with_data = data.draw(st.sets(st.sampled_from(sorted(weights)), min_size=1))
        assert mix.choose(with_data) in with_data


def test_a_stream_that_was_empty_for_long_does_not_catch_up_afterwards():
    mix = StreamMix({"a": 1, "b": 1})
    for _ in range(1000):
        mix.choose({"a"})
    after = [mix.choose("ab") for _ in range(20)]
    assert max(len(list(run)) for _, run in itertools.groupby(after)) <= 2
    assert 9 <= after.count("b") <= 11


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0}, {"a": float("inf")}])
def test_invalid_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        StreamMix(weights)
