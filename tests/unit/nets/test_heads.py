"""`brayx.nets.heads`: a pointer follows its entities, and a mask is exact in every precision."""

from __future__ import annotations

import pytest
import torch

from brayx.nets.heads import Pointer, masked
from tests.unit.nets.kinds import entities


def test_a_pointer_follows_its_entities():
    torch.manual_seed(0)
    x, mask = entities()
    pointer, query, order = Pointer(4, 3, 8), torch.randn(5, 4), torch.randperm(6)
    logits = pointer(query, x, mask)["logits"]
    torch.testing.assert_close(logits[:, order], pointer(query, x[:, order], mask[:, order])["logits"])
    assert (logits.softmax(-1)[~mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_is_exact_in_every_precision(dtype):
    logits = torch.tensor([[5.0, -5.0, 60.0], [1.0, 2.0, 3.0]], dtype=dtype, requires_grad=True)
    probability = masked(logits, torch.tensor([[1, 1, 0], [0, 0, 0]])).float().softmax(-1)
    assert probability[0, 2] == 0
    torch.testing.assert_close(probability[1], torch.full((3,), 1 / 3))
    probability.square().sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[1].any()
