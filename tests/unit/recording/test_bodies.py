"""Bodies as columns: whatever comes in comes out byte for byte, and JSON of numbers gets small."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.recording.bodies import MAX_NUMBERS, joined, split

_NUMBERS = st.one_of(st.integers(), st.floats(width=32), st.floats(), st.just(-0.0))
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.one_of(_JSON.map(lambda value: json.dumps(value).encode()), st.binary(max_size=20)), max_size=5))
def test_bodies_that_are_cut_are_made_again_byte_for_byte(bodies: list[bytes]) -> None:
    cut = split(bodies)
    assert cut is None or joined(cut) == bodies


def test_numbers_of_float32_are_cut_out() -> None:
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    bodies = [json.dumps({"obs": row.tolist(), "n": number}).encode() for number, row in enumerate(obs)]
    cut = split(bodies)
    assert cut is not None
    assert cut.skeletons == [b'{"obs": [\0, \0, \0, \0], "n": \1}']
    assert np.array_equal(cut.numbers[:, :4], obs)
    assert cut.numbers[:, 4].tolist() == list(range(50))


def test_shorter_bodies_end_with_zeros() -> None:
    bodies = [b"[1]", b"[2, 3.5]", b"[]"]
    cut = split(bodies)
    assert cut is not None
    assert cut.numbers.tolist() == [[1, 0], [2, 3.5], [0, 0]]
    assert joined(cut) == bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"0.1",  # no float32
        b"16777217",
        b"1.50",
        b"01",
        b"-0",
        b"1e5",
        b"1" * 400,
        b"1e999",
        b"a\0b 1",
        b"a\2b 1",
        b"[" + b"1," * MAX_NUMBERS + b"1]",
        b"1" + b"x" * 3000,
    ],
)
def test_what_would_not_come_back_or_not_pay_stays_text(body: bytes) -> None:
    assert split([body]) is None


def test_texts_that_all_differ_stay_text() -> None:
    assert split([f"say {chr(97 + number)} 1".encode() for number in range(20)]) is None
    assert split([]) is None
