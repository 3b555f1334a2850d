"""`brayx.algorithms.forward`: a learner's outputs are those that the model acted with, a memory included."""

from __future__ import annotations

import pytest
import torch

from brayx.algorithms import columns
from brayx.algorithms.forward import LearnerForward
from tests.unit.algorithms.tables import Recurrent, random_batch


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
