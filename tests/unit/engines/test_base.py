"""Signatures and weight files: what fits, what is converted, and the messages of refusals."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from brayx.engines.base import check_finite, check_weights, layout_of, load_weights, save_weights
from brayx.engines.torch import describe, module_weights
from brayx.errors import BadWeights, ModelError, ShapeMismatch


class Nested(torch.nn.Module):
    """Takes a dict and an array, returns a dict and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, obs, mask):
        hidden = self.linear(obs["vector"]) + obs["id"].unsqueeze(-1)
        return {"logits": hidden + mask, "pair": (hidden.sum(-1), mask)}


EXAMPLE = (
    {"vector": np.zeros((1, 4), np.float32), "id": np.zeros(1, np.int64)},
    np.zeros((1, 3), np.float32),
)
SPEC = describe(Nested(), EXAMPLE)


def observation(**changes):
    return {"vector": np.ones(4, np.float32), "id": np.int64(2), **changes}


def test_spec_names_leaves_after_arguments_and_outputs():
    assert [str(leaf) for leaf in SPEC.inputs] == ["obs/id: [] int64", "obs/vector: [4] float32", "mask: [3] float32"]
    assert [leaf.path for leaf in SPEC.outputs] == ["logits", "pair/0", "pair/1"]
    assert pickle.loads(pickle.dumps(SPEC)) == SPEC


def test_spec_round_trip():
    leaves = SPEC.flatten_inputs((observation(), np.zeros(3, np.float32)))
    assert [leaf.dtype for leaf in leaves] == [np.int64, np.float32, np.float32]
    outputs = SPEC.unflatten_outputs([1, 2, 3])
    assert outputs == {"logits": 1, "pair": (2, 3)}


@pytest.mark.parametrize(
    "vector",
    [[1, 2, 3, 4], [1.5, 2, 3, 4], np.ones(4), np.ones(4, np.int32), np.ones(8, np.float32)[::2], np.ones(4, bool)],
)
def test_inputs_are_converted_if_no_value_is_lost(vector):
    leaf = SPEC.flatten_inputs((observation(vector=vector), [0, 0, 0]))[1]
    assert leaf.dtype == np.float32
    assert leaf.shape == (4,)
    assert leaf.flags.c_contiguous
    np.testing.assert_array_equal(leaf, np.asarray(vector, np.float32))


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ((observation(vector=np.ones(5, np.float32)), np.zeros(3)), "obs/vector: [5] float32"),
        ((observation(vector=np.ones((1, 4), np.float32)), np.zeros(3)), "obs/vector: [1, 4] float32"),
        ((observation(vector=np.ones(4, np.complex64)), np.zeros(3)), "obs/vector: [4] complex64"),
        ((observation(vector=["a", "b", "c", "d"]), np.zeros(3)), "obs/vector: [4] <U1"),
        ((observation(vector={"x": 1}), np.zeros(3)), "obs/vector: dict"),
        ((observation(vector=[[1], [2, 3]]), np.zeros(3)), "obs/vector: ragged list"),
        ((observation(vector=None), np.zeros(3)), "obs/vector: NoneType"),
        ((observation(id=1.5), np.zeros(3)), "obs/id: [] float64"),
        ((observation(id=2**63), np.zeros(3)), "obs/id: [] uint64"),
        ((observation(other=1), np.zeros(3)), "arguments 0/other: [] int64"),
        ((np.ones(4, np.float32),), "arguments 0: [4] float32"),
        ((), "got []"),
    ],
)
def test_mismatches_show_expected_and_got(args, shown):
    with pytest.raises(ShapeMismatch) as caught:
        SPEC.check(args)
    assert "expected [obs/id: [] int64; obs/vector: [4] float32; mask: [3] float32]" in caught.value.message
    assert shown in caught.value.message
    assert "\n" not in caught.value.message


class NoBatch(torch.nn.Module):
    def forward(self, obs):
        return {"mean": obs.mean()}


class Halved(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2, dtype=torch.bfloat16)

    def forward(self, obs):
        return super().forward(obs.bfloat16())


def test_weights_with_a_dtype_unknown_to_numpy_are_named():
    with pytest.raises(ModelError, match="weight 'weight' is torch"):
        module_weights(Halved())


@pytest.mark.parametrize(
    ("module", "example", "message"),
    [
        (torch.nn.Linear(4, 2), (np.zeros((1, 5), np.float32),), "fails on its own forward_args"),
        (torch.nn.Linear(4, 2), (np.float32(1),), "batch axis"),
        (torch.nn.Linear(4, 2), np.zeros((1, 4), np.float32), "must be a tuple"),
        (NoBatch(), (np.zeros((1, 4), np.float32),), "output 'mean' must be a tensor"),
        (Nested(), (EXAMPLE[0], np.zeros((2, 3), np.float32)), "same batch axis"),
        (Halved(), (np.zeros((1, 4), np.float32),), "'output' is torch"),
    ],
)
def test_a_model_that_fails_on_its_example_is_refused(module, example, message):
    with pytest.raises(ModelError, match=message):
        describe(module, example)


WEIGHTS = {"w": np.ones((2, 3), np.float32), "count": np.array(3, np.int64)}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"w": WEIGHTS["w"]}, "lack 'count'"),
        ({**WEIGHTS, "x": WEIGHTS["w"]}, "hold 'x'"),
        ({**WEIGHTS, "w": np.ones((3, 2), np.float32)}, r"expected w: \[2, 3\] float32, got \[3, 2\] float32"),
        ({**WEIGHTS, "w": np.ones((2, 3))}, r"got \[2, 3\] float64"),
        ({**WEIGHTS, "w": np.array([[1, np.nan, 3], [1, np.inf, 3]], np.float32)}, "'w' holds 2 values"),
    ],
)
def test_mismatched_weights_name_the_leaf(weights, message):
    with pytest.raises(BadWeights, match=message):
        check_weights(layout_of(WEIGHTS), weights)


def test_finite_weights_pass():
    check_weights(layout_of(WEIGHTS), WEIGHTS)
    check_finite(WEIGHTS)


def test_weights_file_round_trip(tmp_path: Path):
    weights = {"layers.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, np.int64)}
    save_weights(tmp_path / "weights.npz", weights)
    loaded = load_weights(tmp_path / "weights.npz")
    assert list(loaded) == list(weights)
    for name, array in weights.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_files_without_weights_are_refused(tmp_path: Path):
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "pickled.npz", x=np.array([{"a": 1}], dtype=object))
    np.save(tmp_path / "single.npy", np.ones(3))
    for name in ("absent.npz", "text.npz", "empty.npz", "pickled.npz", "single.npy"):
        with pytest.raises(BadWeights, match=name):
            load_weights(tmp_path / name)
