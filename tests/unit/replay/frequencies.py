"""Whether drawn frequencies agree with the expected ones, for the tests of samplers and removers."""

from __future__ import annotations

import numpy as np


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def bound(degrees: int) -> float:
    """The chi-square value exceeded once in a million draws (Wilson and Hilferty's approximation, z = 4.75)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * (2 / (9 * degrees)) ** 0.5) ** 3
