"""Convolutional encoders of images: ``[..., C, H, W] -> [..., features]``. Torch only.

uint8 images are divided by 255; floats are used as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brayx.nets.heads import linear


class _Convolution(nn.Conv2d):
    """Takes bytes, too, as shares of 255."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding)
        nn.init.orthogonal_(self.weight, math.sqrt(2))
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.uint8:
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.float16:
            return super().forward(x.float() * (1 / 255))  # float16 has no room for gradients of unscaled pixels
        # Scales the weights, because pixels are many, and bytes are exact in bfloat16.
        return F.conv2d(x.float(), self.weight * (1 / 255), self.bias, self.stride, self.padding)


class _Images(nn.Module):
    """Base of the encoders: leading axes, scaling of bytes, and the last layer."""

    def __init__(self, shape: Sequence[int], features: int, body: nn.Module) -> None:
        super().__init__()
        if len(shape) != 3:
            raise ValueError(f"image: expected shape [C, H, W], got {list(shape)}")
        least = self.smallest()
        if min(shape[1:]) < least:
            raise ValueError(f"{type(self).__name__} needs at least {least} x {least} pixels, got {list(shape)}")
        self.body = body
        with torch.no_grad():
            flat = body(torch.zeros(1, *shape)).flatten(1).shape[1]
        self.last = linear(flat, features)
        self.features = features

    @classmethod
    def smallest(cls) -> int:
        """Least height and width of an image, in pixels."""
        return 1

    def forward(self, image: Tensor) -> Tensor:
        """``[..., C, H, W] -> [..., features]``."""
        leading = image.shape[:-3]
        x = image if len(leading) == 1 else image.reshape(-1, *image.shape[-3:])
        exporting = torch.jit.is_tracing() or torch.compiler.is_compiling()  # type: ignore[attr-defined,no-untyped-call]
        if not exporting:  # an exported graph has its own memory layout
            # Learning on a CPU takes a third less time with channels last.
            x = x.contiguous(memory_format=torch.channels_last)
        y = F.relu(self.last(self.body(x).flatten(1)))
        return y if len(leading) == 1 else y.reshape(*leading, -1)


class _Strided(_Images):
    """Convolutions without padding, each followed by a ReLU."""

    layers: ClassVar[tuple[tuple[int, int, int], ...]]
    """Channels, kernel and stride of each convolution."""

    def __init__(self, shape: Sequence[int], features: int) -> None:
        body: list[nn.Module] = []
        inputs = shape[0]
        for outputs, kernel, stride in self.layers:
            body += [_Convolution(inputs, outputs, kernel, stride), nn.ReLU()]
            inputs = outputs
        super().__init__(shape, features, nn.Sequential(*body))

    @classmethod
    def smallest(cls) -> int:
        least = 1
        for _, kernel, stride in reversed(cls.layers):
            least = (least - 1) * stride + kernel
        return least


class NatureCNN(_Strided):
    """Mnih et al. 2015, "Human-level control through deep reinforcement learning"; for images of about 84 x 84.

    Args:
        shape: shape of an image, ``[C, H, W]``.
        features: number of output features, after a ReLU.
    """

    layers = ((32, 8, 4), (64, 4, 2), (64, 3, 1))

    def __init__(self, shape: Sequence[int], features: int = 512) -> None:
        super().__init__(shape, features)


class SmallCNN(_Strided):
    """Mnih et al. 2013, "Playing Atari with deep reinforcement learning", https://arxiv.org/abs/1312.5602.

    A third of the work of `NatureCNN`, and enough for simpler games.

    Args:
        shape: shape of an image, ``[C, H, W]``.
        features: number of output features, after a ReLU.
    """

    layers = ((16, 8, 4), (32, 4, 2))

    def __init__(self, shape: Sequence[int], features: int = 256) -> None:
        super().__init__(shape, features)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _Convolution(channels, channels, 3, padding=1)
        self.second = _Convolution(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + y


class ImpalaCNN(_Images):
    """The deep residual network of Espeholt et al. 2018, "IMPALA", https://arxiv.org/abs/1802.01561; any image size.

    Args:
        shape: shape of an image, ``[C, H, W]``.
        features: number of output features, after a ReLU.
        channels: channels of each block; a block halves height and width.
    """

    def __init__(self, shape: Sequence[int], features: int = 256, channels: Sequence[int] = (16, 32, 32)) -> None:
        layers: list[nn.Module] = []
        inputs = shape[0]
        for outputs in channels:
            layers += [_Convolution(inputs, outputs, 3, padding=1), nn.MaxPool2d(3, 2, 1)]
            layers += [_Residual(outputs), _Residual(outputs)]
            inputs = outputs
        super().__init__(shape, features, nn.Sequential(*layers, nn.ReLU()))
