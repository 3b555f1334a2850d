"""`brayx.algorithms.columns`: outputs of every step, and parts that cover a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.algorithms import columns
from brayx.algorithms.forward import LearnerForward
from tests.unit.algorithms.tables import Table, random_batch


def test_a_column_gives_the_outputs_of_each_step():
    batch, module = random_batch(), Table(7, 3)
    outputs = columns.forward(LearnerForward(module), batch)
    for b, t in np.ndindex(5, 10):
        assert torch.equal(outputs["logits"][t, b], module.policy[batch["obs"][b, t]])
        assert torch.equal(outputs["value"][t, b], module.worth[batch["obs"][b, t]])
    assert columns.before_last(outputs)["logits"].shape == (9, 5, 3)
    assert columns.transitions(batch, "action").shape == (9, 5)


def test_parts_are_whole_columns_and_cover_the_batch():
    batch = random_batch(columns=5)
    batch["obs"] = {"a": batch["obs"], "b": batch["obs"]}
    pieces = columns.parts(batch, 3)
    assert [len(piece["mask"]) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece["obs"]["b"] for piece in pieces]), batch["obs"]["b"])
    assert len(columns.parts(batch, 50)) == 5


def test_explained_variance_sums_over_parts():
    rng = np.random.default_rng(0)
    target, noise, weight = rng.normal(size=40), rng.normal(size=40), rng.integers(0, 2, 40).astype(float)
    value = 0.8 * target + 0.1 * noise
    seen = weight > 0
    expected = 1 - np.var((target - value)[seen]) / np.var(target[seen])
    tensors = [torch.from_numpy(x) for x in (value, target, weight)]
    sums = sum(columns.moments(*(x[part] for x in tensors)) for part in (slice(0, 13), slice(13, 40)))
    assert columns.explained_variance(sums).item() == pytest.approx(expected, abs=1e-9)


def test_an_invalid_batch_is_refused():
    batch = random_batch(steps=2)
    columns.check(batch, steps=2)
    with pytest.raises(ValueError, match="T >= 3"):
        columns.check(batch, steps=3)
    with pytest.raises(ValueError, match="mask"):
        columns.check({"mask": torch.ones(3)})
