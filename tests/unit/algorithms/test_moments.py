"""`brayx.algorithms.moments`: the moments of parts merge to those of the whole."""

from __future__ import annotations

import torch

from brayx.algorithms.base import ALONE
from brayx.algorithms.moments import TensorMoments


def test_moments_of_parts_merge_to_those_of_the_whole():
    x, mask = 5 + 2 * torch.randn(6, 7, 2, dtype=torch.float64), (torch.rand(6, 7) < 0.5).double()
    whole, parts = TensorMoments(2), TensorMoments(2)
    whole.add(x, mask, ALONE)
    for a, b in ((0, 1), (1, 4), (4, 6)):
        parts.add(x[a:b], mask[a:b], ALONE)
    masked = x[mask > 0]
    torch.testing.assert_close(whole.back(torch.zeros(2, dtype=torch.float64)), masked.mean(0))
    torch.testing.assert_close(whole.scaled(masked), (masked - masked.mean(0)) / masked.std(0, correction=0))
    torch.testing.assert_close(parts.state_dict()["sums"], whole.state_dict()["sums"])
