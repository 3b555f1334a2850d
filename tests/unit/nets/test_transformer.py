"""`brayx.nets.transformer`: neither the order of a set nor its absent entities make a difference."""

from __future__ import annotations

import torch

from brayx.nets.transformer import Entities, Transformer
from tests.unit.nets.kinds import entities


def test_the_order_of_entities_makes_no_difference():
    x, mask = entities()
    encode, order = Entities((6, 3)), torch.randperm(6)
    torch.testing.assert_close(encode(x, mask), encode(x[:, order], mask[:, order]), rtol=1e-4, atol=1e-5)
    transform = Transformer(3)
    torch.testing.assert_close(
        transform(x, mask)[:, order], transform(x[:, order], mask[:, order]), rtol=1e-4, atol=1e-5
    )


def test_absent_entities_make_no_difference():
    x, mask = entities()
    nonsense = torch.where(mask.unsqueeze(-1), x, 100 * torch.randn(5, 6, 3))
    encode = Entities((6, 3))
    torch.testing.assert_close(encode(x, mask), encode(nonsense, mask))
    torch.testing.assert_close(encode(x, mask), encode(x * mask.unsqueeze(-1)))  # a row of zeros is absent
    assert not encode(torch.zeros(2, 6, 3)).any()
    present = encode(x, torch.ones(5, 6, dtype=torch.bool))
    assert (present - encode(x, mask)).abs().max() > 1e-3


def test_a_set_without_entities_has_finite_features_and_no_gradient():
    x = torch.zeros(2, 6, 3, requires_grad=True)
    Entities((6, 3))(x).sum().backward()
    assert not x.grad.any()
