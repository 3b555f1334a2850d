"""`brayx.nets.cnn`: the networks have the sizes of their papers."""

from __future__ import annotations

import pytest
from torch import nn

from brayx.nets.cnn import ImpalaCNN, NatureCNN


def test_convolutions_have_the_sizes_of_the_papers():
    nature = NatureCNN((4, 84, 84))
    assert nature.last.in_features == 64 * 7 * 7
    assert sum(p.numel() for p in nature.parameters()) == 1_684_128  # Mnih et al. 2015, without the last layer
    impala = ImpalaCNN((3, 72, 96))
    assert impala.last.in_features == 32 * 9 * 12
    assert sum(isinstance(layer, nn.Conv2d) for layer in impala.modules()) == 15  # Espeholt et al. 2018, figure 3
    with pytest.raises(ValueError, match=r"\[C, H, W\]"):
        NatureCNN((84, 84))
