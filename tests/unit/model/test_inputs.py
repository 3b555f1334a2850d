"""Many observations as columns: lossless conversions, and refusals that show expected and got."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.engines.torch import describe
from brayx.errors import ShapeMismatch
from brayx.model.inputs import check_columns, to_columns
from tests.unit.nets.kinds import make


class Two(torch.nn.Module):
    def forward(self, obs, scale):
        return obs["x"] * scale.unsqueeze(-1)


SPEC = describe(Two(), ({"x": np.zeros((1, 3), np.float32)}, np.zeros(1, np.float32)))


def test_leaves_are_converted_and_in_order():
    x, scale = to_columns(SPEC, ({"x": np.arange(12).reshape(4, 3)}, [1, 2, 3, 4]))
    assert (x.dtype, scale.dtype, x.shape, scale.shape) == (np.float32, np.float32, (4, 3), (4,))
    assert check_columns(SPEC.inputs, [x, scale]) == 4


def test_whole_numbers_outside_what_a_network_declares_are_refused_by_name():
    module, example = make("nested")
    spec = describe(module, example)
    row = {"me": {"kind": 7, "seen": [[9, 255]]}, "map": np.zeros(4)}
    rows = {"me": {"kind": [5, 7], "seen": [[[7, 250]], [[9, 255]]]}, "map": np.zeros((2, 4))}
    spec.flatten_inputs((row,))
    to_columns(spec, (rows,))
    with pytest.raises(ShapeMismatch, match=r"obs/me/kind: 8, .*5 to 7") as refused:
        spec.flatten_inputs(({**row, "me": {**row["me"], "kind": 8}},))
    assert refused.value.details == {"leaf": "obs/me/kind"}
    with pytest.raises(ShapeMismatch, match=r"seen: 249 at \[1, 0, 1\]"):
        to_columns(spec, ({**rows, "me": {**rows["me"], "seen": [[[7, 250]], [[9, 249]]]}},))


@pytest.mark.parametrize(
    ("args", "got"),
    [
        (({"x": np.zeros((4, 2), np.float32)}, np.zeros(4, np.float32)), r"\[4, 2\] float32"),
        (({"x": np.zeros((4, 3), np.float32)}, np.zeros(3, np.float32)), r"\[3\] float32"),
        (({"x": np.zeros((0, 3), np.float32)}, np.zeros(0, np.float32)), r"\[0, 3\] float32"),
        (({"x": np.zeros((4, 3), np.complex64)}, np.zeros(4, np.float32)), r"\[4, 3\] complex64"),
        (({"y": np.zeros((4, 3), np.float32)}, np.zeros(4, np.float32)), "another nesting"),
        (({"x": np.zeros((4, 3), np.float32)},), "another nesting"),
        (({"x": [[1, 2, 3], [1]]}, [1, 2]), "another nesting"),
    ],
)
def test_mismatches_show_expected_and_got(args, got):
    with pytest.raises(ShapeMismatch, match=got) as refused:
        to_columns(SPEC, args)
    assert refused.value.details["expected"] == ["obs/x: [N, 3] float32", "scale: [N] float32"]
