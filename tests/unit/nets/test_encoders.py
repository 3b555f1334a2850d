"""`brayx.nets.encoders`, `cnn` and `transformer`: their outputs, and no side effects on torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from brayx.nets.cnn import ImpalaCNN, NatureCNN
from brayx.nets.encoders import Binary, Numbers, OneHot, Spatial
from brayx.nets.heads import Pointer, masked
from brayx.nets.transformer import Entities, Transformer


def test_one_hot():
    x = torch.tensor([[0, 2], [1, 5]])
    assert OneHot(3)(x).tolist() == [[[1, 0, 0], [0, 0, 1]], [[0, 1, 0], [0, 0, 0]]]
    assert OneHot(3, (2,))(x).tolist() == [[1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0]]
    assert OneHot(3, (2,)).features == 6
    assert OneHot(3, first=-1)(torch.tensor([-1, 0, 1, 2])).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_binary():
    assert Binary(4)(torch.tensor([0, 5, 8, 15])).tolist() == [[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]]
    assert Binary(2, (2,))(torch.tensor([[1, 2]])).tolist() == [[1, 0, 0, 1]]


def test_numbers_are_flattened_after_any_leading_axes():
    assert Numbers((2, 3))(torch.zeros(5, 7, 2, 3)).shape == (5, 7, 6)
    assert Numbers(())(torch.zeros(5)).shape == (5, 1)
    assert Numbers((3,))(torch.zeros(5, 3, dtype=torch.uint8)).dtype == torch.float32
    assert Numbers((2,), np.asarray([10**9, 250]))(torch.tensor([[10**9 + 1, 252]])).tolist() == [[1, 2]]
    assert Numbers((1,), np.asarray([250]))(torch.tensor([[252]], dtype=torch.uint8)).tolist() == [[2]]


def test_byte_images_are_scaled_and_their_channel_axis_is_found():
    torch.manual_seed(0)
    encode = Spatial((3, 24, 24), "impala", 8)
    image = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    torch.testing.assert_close(encode(image), encode(image.float() / 255))
    torch.testing.assert_close(encode(image.unsqueeze(1)).squeeze(1), encode(image))
    last = Spatial((24, 24, 3), "impala", 8)
    last.load_state_dict(encode.state_dict())
    torch.testing.assert_close(last(image.movedim(1, -1)), encode(image))
    with pytest.raises(ValueError, match="'nature' or 'impala'"):
        Spatial((3, 24, 24), "vgg")


def test_convolutions_have_the_sizes_of_the_papers():
    nature = NatureCNN((4, 84, 84))
    assert nature.last.in_features == 64 * 7 * 7
    assert sum(p.numel() for p in nature.parameters()) == 1_684_128  # Mnih et al. 2015, without the last layer
    impala = ImpalaCNN((3, 72, 96))
    assert impala.last.in_features == 32 * 9 * 12
    assert sum(isinstance(layer, nn.Conv2d) for layer in impala.modules()) == 15  # Espeholt et al. 2018, figure 3
    with pytest.raises(ValueError, match=r"\[C, H, W\]"):
        NatureCNN((84, 84))


def entities():
    torch.manual_seed(0)
    return torch.randn(5, 6, 3), torch.rand(5, 6) < 0.6


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
