"""`brayx.arrays`: what is finite, what fits another dtype, and how a place is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from brayx.arrays import FEW, as_dtype, is_finite, place_of


@pytest.mark.parametrize("shape", [(), (3,), (FEW + 1,), (2, 3)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_float_that_is_not_finite_is_found_anywhere(shape: tuple[int, ...], bad: float) -> None:
    for index in np.ndindex(shape):
        array = np.zeros(shape, np.float32)
        array[index] = bad
        assert not is_finite(array)


def test_large_floats_whole_numbers_and_empty_arrays_are_finite() -> None:
    assert is_finite(np.full(FEW + 1, 3e38, np.float32))
    assert is_finite(np.full(2, 3e38, np.float32))
    assert is_finite(np.array([2**62, 2**62]))
    assert is_finite(np.zeros((0, 4), np.float32))


@pytest.mark.parametrize(
    ("values", "dtype", "converted"),
    [
        (np.array([1, 2]), np.uint8, [1, 2]),
        (np.array([1, 256]), np.uint8, None),
        (np.array([-1]), np.uint8, None),
        (np.array([1, 2]), np.float32, [1.0, 2.0]),
        (np.array([1.0]), np.int64, None),
        (np.array([1e300]), np.float32, [np.inf]),
        (np.array([True]), np.int64, [1]),
        (np.array(["a"]), np.float32, None),
    ],
)
def test_values_are_converted_only_if_they_stay_the_same(values: Any, dtype: Any, converted: Any) -> None:
    result = as_dtype(values, np.dtype(dtype))
    if converted is None:
        assert result is None
    else:
        assert result is not None
        assert result.dtype == dtype
        assert result.tolist() == converted


def test_an_array_of_the_same_dtype_is_not_copied() -> None:
    array = np.zeros(3, np.float32)
    assert as_dtype(array, array.dtype) is array


def test_a_place_is_named_with_its_index() -> None:
    assert (place_of("obs", [2, 0]), place_of("obs", [])) == ("obs[2, 0]", "obs")
