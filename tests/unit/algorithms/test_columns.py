"""`brayx.algorithms.columns`: outputs of every step, with the state that acting had."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.algorithms import columns
from brayx.algorithms.forward import LearnerForward
from tests.unit.algorithms.tables import Recurrent, Table, random_batch


def test_a_column_gives_the_outputs_of_each_step():
    batch, module = random_batch(), Table(7, 3)
    outputs = columns.forward(LearnerForward(module), batch)
    for b, t in np.ndindex(5, 10):
        assert torch.equal(outputs["logits"][t, b], module.policy[batch["obs"][b, t]])
        assert torch.equal(outputs["value"][t, b], module.worth[batch["obs"][b, t]])
    assert columns.before_last(outputs)["logits"].shape == (9, 5, 3)
    assert columns.transitions(batch, "action").shape == (9, 5)


def test_several_heads_and_several_arguments():
    class Heads(torch.nn.Module):
        def forward(self, left, right):
            return {"logits": (left, right), "value": left.sum(-1)}

    batch = random_batch()
    batch["obs"] = (torch.randn(5, 10, 2), torch.randn(5, 10, 3))
    outputs = columns.forward(LearnerForward(Heads()), batch)
    assert [x.shape for x in outputs["logits"]] == [(10, 5, 2), (10, 5, 3)]
    assert torch.equal(columns.before_last(outputs)["logits"][1][3, 2], batch["obs"][1][2, 3])


@pytest.mark.parametrize("seed", range(4))
def test_a_recurrent_module_recomputes_the_outputs_it_acted_with(seed):
    """Columns are cut out of ongoing play; each step has the state that the acting engine had before it."""
    torch.manual_seed(seed)
    module = Recurrent()
    batch = random_batch(columns=4, steps=12, seed=seed)
    obs = torch.randn(4, 13, 2)
    stored, expected = torch.zeros(4, 13, 4), torch.zeros(4, 13, 3)
    for b in range(4):
        state = {"sum": torch.randn(1, 4)}  # a column begins in the middle of an episode
        for t in range(13):
            begins = t > 0 and (batch["terminated"][b, t - 1] or batch["mask"][b, t - 1] == 0)
            if begins:
                state = {"sum": torch.zeros(1, 4)}
            stored[b, t] = state["sum"][0].detach()
            outputs = module(obs[b, t : t + 1], state)
            expected[b, t], state = outputs["logits"][0], outputs["state"]
    bootstraps = batch["mask"] == 0
    stored[bootstraps] = 7.0  # packing has no state for a step that only bootstraps
    recomputed = columns.forward(LearnerForward(module), {**batch, "obs": obs, "state": {"sum": stored}})
    assert "state" not in recomputed
    learned = batch["mask"] > 0
    learned[:, 1:] |= learned[:, :-1] & ~batch["terminated"][:, :-1]  # and the step to bootstrap from
    assert learned.sum() > batch["mask"].sum()
    torch.testing.assert_close(recomputed["logits"].transpose(0, 1)[learned], expected[learned], rtol=0, atol=1e-6)


def test_a_recurrent_model_without_a_stored_state_is_refused():
    with pytest.raises(ValueError, match="no stored state"):
        columns.forward(LearnerForward(Recurrent()), random_batch())


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
