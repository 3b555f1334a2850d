"""Feature encoders: observations to features ``[..., F]``, with any leading axes. Torch only.

Each encoder has an attribute ``features``, the size ``F`` of its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brayx.errors import first_line
from brayx.nets.cnn import ImpalaCNN, NatureCNN, SmallCNN

_CONVOLUTIONS: dict[str, type[SmallCNN | NatureCNN | ImpalaCNN]] = {
    "small": SmallCNN,
    "nature": NatureCNN,
    "impala": ImpalaCNN,
}


def convolutions_for(height: int, width: int) -> str:
    """``nature`` for an image that is large enough, else ``small``; ``impala``, which takes any size, for tiny ones."""
    pixels = min(height, width)
    return next(name for name in ("nature", "small", "impala") if pixels >= _CONVOLUTIONS[name].smallest())


def features_of(encoder: nn.Module) -> int:
    """Number of features of an encoder."""
    features = encoder.features
    assert isinstance(features, int)
    return features


class Numbers(nn.Module):
    """Flattens an array of numbers: ``[..., *shape] -> [..., product of shape]``; integers become float32.

    Args:
        shape: shape of the array.
        first: offset that is subtracted from whole numbers, ``[*shape]``; None: 0.
    """

    def __init__(self, shape: Sequence[int], first: np.ndarray | None = None) -> None:
        super().__init__()
        self.dims = len(shape)
        self.features = int(torch.Size(shape).numel())
        # Not a buffer: it is not a weight, and exporters would turn a buffer into an input.
        self.first = torch.from_numpy(first.copy()) if first is not None and first.any() else None

    def forward(self, x: Tensor) -> Tensor:
        """Flattens the array: ``[..., *shape] -> [..., product of shape]``."""
        if self.first is not None:  # before the conversion: float32 would lose the digits of a large offset
            x = x.long() - self.first.to(x.device)
        x = x if x.is_floating_point() else x.float()
        return x if self.dims == 1 else x.unsqueeze(-1) if self.dims == 0 else x.flatten(-self.dims)


class OneHot(nn.Module):
    """One-hot integers: ``[..., *shape] -> [..., product of shape * size]``.

    Integers outside the range give zeros, so that padding does no harm. Invalid values are refused earlier, where they
    arrive (`brayx.spaces`).

    Args:
        size: number of categories.
        shape: shape of the array.
        first: the first category.
    """

    def __init__(self, size: int, shape: Sequence[int] = (), first: int = 0) -> None:
        super().__init__()
        self.size, self.first = size, first
        self.dims = len(shape)
        self.features = int(torch.Size(shape).numel()) * size

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *shape] -> [..., product of shape * size]``."""
        hot = (x.unsqueeze(-1) == torch.arange(self.first, self.first + self.size, device=x.device)).float()
        return hot.flatten(-self.dims - 1) if self.dims else hot


class Binary(nn.Module):
    """Bits of integers below ``2 ** bits``, lowest first: ``[..., *shape] -> [..., product of shape * bits]``."""

    def __init__(self, bits: int, shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.bits = bits
        self.dims = len(shape)
        self.features = int(torch.Size(shape).numel()) * bits

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *shape] -> [..., product of shape * bits]``."""
        # Division, since ONNX shifts unsigned integers only.
        powers = 2 ** torch.arange(self.bits, device=x.device)
        digits = (torch.div(x.long().unsqueeze(-1), powers, rounding_mode="floor") % 2).float()
        return digits.flatten(-self.dims - 1) if self.dims else digits


class Embedding(nn.Module):
    """Learned vectors for integers below ``size``: ``[..., *shape] -> [..., product of shape * features]``."""

    def __init__(self, size: int, features: int, shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.dims = len(shape)
        self.features = int(torch.Size(shape).numel()) * features
        self.table = nn.Embedding(size, features)
        nn.init.normal_(self.table.weight, std=features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Looks up the vectors: ``[..., *shape] -> [..., product of shape * features]``."""
        y: Tensor = self.table(x.long())
        return y.flatten(-self.dims - 1) if self.dims else y


class Text(nn.Module):
    """Bytes of a text that is padded with zeros: ``[..., size] -> [..., features]``.

    Two convolutions over embedded bytes, and the maximum of each feature over the text.
    """

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.features = features
        self.bytes = Embedding(256, 32)
        self.first, self.second = (nn.Conv1d(inputs, features, 5, padding=2) for inputs in (32, features))

    def forward(self, text: Tensor) -> Tensor:
        """``[..., size]`` uint8 ``-> [..., features]``; an empty text gives zeros."""
        leading, size = text.shape[:-1], text.shape[-1]
        flat = text.reshape(-1, size)
        is_text = (flat > 0).unsqueeze(1)
        x = self.bytes(flat).transpose(1, 2) * is_text
        x = F.relu(self.first(x)) * is_text
        x = F.relu(self.second(x)) * is_text
        return x.amax(-1).reshape(*leading, self.features)


class Custom(nn.Module):
    """An encoder of the user's own: ``[..., *shape] -> [..., features]``.

    Args:
        encoder: ``[B, *shape] -> [B, features]``; its lazy layers get their sizes here.
        example: one observation, for its shape and dtype.
        label: the encoder's name in errors.

    Raises:
        ValueError: it raises, or its output is not float32 ``[B, features]`` for every ``B``; says which.
    """

    def __init__(self, encoder: nn.Module, example: Tensor, label: str = "") -> None:
        super().__init__()
        self.encoder, self.dims, self.label = encoder, example.ndim, label
        modes = [(part, part.training) for part in encoder.modules()]
        encoder.eval()  # so that a batch norm does not update its statistics
        try:
            self.features = self._try(example.expand(2, *example.shape))
            self._try(example.expand(1, *example.shape))  # whose batch axis a `squeeze` would lose
        finally:
            for part, training in modes:
                part.training = training

    @torch.no_grad()
    def _try(self, x: Tensor) -> int:
        given = f"for an input {list(x.shape)} of {str(x.dtype).removeprefix('torch.')}"
        try:
            y = self.encoder(x)
        except Exception as error:
            raise ValueError(f"forward raised {type(error).__name__} {given}: {first_line(error)}") from error
        if not isinstance(y, Tensor):
            raise ValueError(f"forward gave {type(y).__name__} {given}, expected a tensor [{len(x)}, F]")
        if y.ndim != 2 or len(y) != len(x) or not y.shape[1] or y.dtype != torch.float32:
            dtype = str(y.dtype).removeprefix("torch.")
            raise ValueError(f"forward gave {list(y.shape)} of {dtype} {given}, expected [{len(x)}, F] of float32")
        return y.shape[1]

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """``[..., *shape] -> [..., features]``; entities that are not ``present`` stay rows of zeros."""
        x = x if present is None else x * present.unsqueeze(-1)
        leading = x.shape[: x.ndim - self.dims]
        y: Tensor = self.encoder(x if len(leading) == 1 else x.reshape(-1, *x.shape[len(leading) :]))
        return y if len(leading) == 1 else y.reshape(*leading, self.features)


class Spatial(nn.Module):
    """A convolutional network for an image or a stack of maps, with channels first or last.

    Args:
        shape: ``[C, H, W]`` or ``[H, W, C]``.
        network: ``small``, ``nature`` or ``impala``.
        features: number of output features; None: the network's default.
        last: channels are the last axis, not the first; None: the smaller of the two axes.

    Raises:
        ValueError: unknown network, or the image is too small for it; names the networks that fit.
    """

    def __init__(
        self,
        shape: Sequence[int],
        network: str = "nature",
        features: int | None = None,
        last: bool | None = None,
    ) -> None:
        super().__init__()
        self.last = shape[-1] < shape[0] if last is None else last
        channels, height, width = [shape[2], shape[0], shape[1]] if self.last else shape
        kind = _CONVOLUTIONS.get(network)
        if kind is None:
            raise ValueError(f"network must be 'small', 'nature' or 'impala', got {network!r}")
        if min(height, width) < kind.smallest():
            fits = [name for name, other in _CONVOLUTIONS.items() if min(height, width) >= other.smallest()]
            raise ValueError(
                f"an image of {height} x {width} pixels is too small for convolutions {network!r}, which need "
                f"at least {kind.smallest()} x {kind.smallest()}; these fit: {', '.join(fits)}"
            )
        image = [channels, height, width]
        self.network = kind(image) if features is None else kind(image, features)
        self.features = self.network.features

    def forward(self, image: Tensor) -> Tensor:
        """``[..., C, H, W]`` or ``[..., H, W, C] -> [..., features]``."""
        if self.last:
            # Not `movedim`: the tracing exporter gives it negative axes, which ONNX does not allow.
            first = image.ndim - 3
            image = image.permute(*range(first), image.ndim - 1, first, first + 1)
        y: Tensor = self.network(image)
        return y


class Observation(nn.Module):
    """Encodes a whole observation: concatenates the features of all leaves except ``action_mask``.

    Args:
        encoders: encoder of each leaf, by name; the name ``""`` stands for an observation that is a bare array.
        masked: the observation has an ``action_mask``.
    """

    def __init__(self, encoders: Mapping[str, nn.Module], masked: bool = False) -> None:
        super().__init__()
        if not encoders:
            raise ValueError("an observation needs at least one leaf besides its action_mask")
        self.names, self.masked = list(encoders), masked
        self.encoders = nn.ModuleList(encoders.values())
        self.features = sum(features_of(encoder) for encoder in encoders.values())
        first, *others = encoders.values()
        self.lone = isinstance(first, Numbers) and first.dims == 1 and not others and not masked
        """The observation has one leaf, a flat array, which is passed through."""
        self.flat = self.lone and "" in encoders
        """It is that array itself."""

    def forward(self, obs: Any) -> Tensor:
        """``[..., features]``."""
        if self.names == [""]:
            y: Tensor = self.encoders[0](obs)
            return y
        return torch.cat([encode(obs[name]) for name, encode in zip(self.names, self.encoders, strict=True)], -1)
