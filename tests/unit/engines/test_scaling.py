"""Scalings among a model's weights."""

from __future__ import annotations

import numpy as np

from brayx.engines.base import layout_of
from brayx.engines.scaling import Scaling, completed, from_weights, learned, to_weights, unscaled


def test_scalings_travel_among_the_weights():
    path = "obs/a.b%/c"
    scaling = Scaling(np.ones(2, np.float32), np.full(2, 4, np.float32), 5.0)
    weights = {"x": np.zeros(1, np.float32)} | to_weights({path: scaling, "obs/other": scaling}, [path, "obs/none"])
    (item,) = from_weights(weights).items()
    assert item[0] == path
    assert item[1].scale.tolist() == [4, 4]
    assert item[1].limit == 5.0
    assert list(learned(weights)) == ["x"]
    np.testing.assert_allclose(unscaled(scaling, (np.full((3, 2), 7.0) - 1) * 4), np.full((3, 2), 7.0))
    assert completed(layout_of(weights), weights) is weights
    filled = completed(layout_of(weights), {"x": weights["x"]})
    assert filled.keys() == weights.keys()
    assert from_weights(filled)[path].mean.tolist() == [0, 0]
