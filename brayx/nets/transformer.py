"""Attention over a set of entities ``[..., E, D]``, some of which may be absent. Torch only.

The result depends neither on the order of entities nor on the values of absent ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brayx.nets.heads import linear, masked


class _Block(nn.Module):
    """Attention and a two-layer MLP, each with layer normalisation before it and a residual connection."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query_key_value = linear(size, 3 * size, 1.0)
        self.joined = linear(size, size, 1.0)
        self.wide, self.narrow = linear(size, 4 * size), linear(4 * size, size, 1.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        leading, size = x.shape[:-1], x.shape[-1]
        split = self.query_key_value(self.first(x)).reshape(*leading, 3, self.heads, size // self.heads)
        query, key, value = (part.transpose(-2, -3) for part in split.unbind(-3))
        scores = query @ key.transpose(-1, -2) * (size // self.heads) ** -0.5
        attention = masked(scores, mask.unsqueeze(-2).unsqueeze(-3).expand_as(scores)).softmax(-1)
        x = x + self.joined((attention @ value).transpose(-2, -3).reshape(*leading, size))
        y: Tensor = x + self.narrow(F.relu(self.wide(self.second(x))))
        return y


class Transformer(nn.Module):
    """A transformer encoder without positions (Vaswani et al. 2017, "Attention is all you need").

    Layer normalisation comes first in each block (Xiong et al. 2020).

    Args:
        features: size of an input entity.
        size: size of an output entity; a multiple of ``heads``.
        heads: attention heads.
        layers: attention blocks.
    """

    def __init__(self, features: int, size: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        if size % heads:
            raise ValueError(f"size must be a multiple of heads, got {size} and {heads}")
        self.features = size
        self.embed = linear(features, size, 1.0)
        self.blocks = nn.ModuleList(_Block(size, heads) for _ in range(layers))
        self.last = nn.LayerNorm(size)

    def forward(self, entities: Tensor, mask: Tensor) -> Tensor:
        """``[..., E, features]`` and a bool mask ``[..., E]``, true for present entities -> ``[..., E, size]``; absent
        entities are zeros."""
        x = self.embed(entities)
        for block in self.blocks:
            x = block(x, mask)
        return torch.where(mask.unsqueeze(-1), self.last(x), torch.zeros_like(x))


class Entities(nn.Module):
    """A feature encoder of a set: ``[..., E, D] -> [..., size]``, the mean over the transformer's output entities.

    Args:
        shape: ``[E, D]``.
        size, heads, layers: as for `Transformer`.
    """

    def __init__(self, shape: Sequence[int], size: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        if len(shape) != 2:
            raise ValueError(f"entities: expected shape [E, D], got {list(shape)}")
        self.transformer = Transformer(shape[1], size, heads, layers)
        self.features = size

    def forward(self, entities: Tensor, mask: Tensor | None = None) -> Tensor:
        """``mask`` ``[..., E]`` is true for present entities; None: those with features that are not all zero."""
        x = entities if entities.is_floating_point() else entities.float()
        mask = (x != 0).any(-1) if mask is None else mask > 0
        tokens = self.transformer(x, mask)
        pooled: Tensor = tokens.sum(-2) / mask.sum(-1, keepdim=True).clamp(min=1).to(tokens.dtype)
        return pooled
