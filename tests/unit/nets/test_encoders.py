"""`brayx.nets.encoders`: their outputs for any leading axes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.nets.encoders import Binary, Numbers, OneHot, Spatial


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
