"""Normalises a network's observations by their running moments, which the network itself keeps. Torch only.

For games whose observations come through a door: only the learner sees all. The moments are buffers, so they are
published, saved and exported with the weights, and every policy version acts with those that it learned with. The
learner calls `follow` with each batch. Environments of a rollout have another way, `brayx.rollout.moments`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from brayx.nets.encoders import features_of

CLIP = 10.0
"""Largest magnitude of a normalised number."""
_EPSILON = 1e-8

Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over all learners of a model."""


class Normalised(nn.Module):
    """An encoder behind the normalisation of its input, number by number; of entities, column by column.

    Args:
        encoder: takes ``[..., *shape]``; of entities also which rows are present, ``[..., E]``.
        shape: shape of the input.
        leaf: name of the input in the observation.
        entities: the input is ``[..., E, D]``, of which a row of zeros is absent.
    """

    mean: Tensor
    scale: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, encoder: nn.Module, shape: tuple[int, ...], leaf: str, entities: bool = False) -> None:
        super().__init__()
        self.encoder, self.leaf, self.entities = encoder, leaf, entities
        self.features = features_of(encoder)
        size = shape[-1:] if entities else shape
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))  # of the variance; acting should not compute it for each tick
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *shape] -> [..., features]``."""
        x = x if x.is_floating_point() else x.float()
        scaled = ((x - self.mean) * self.scale).clamp(-CLIP, CLIP)
        y: Tensor = self.encoder(scaled, (x != 0).any(-1)) if self.entities else self.encoder(scaled)
        return y

    @torch.no_grad()
    def follow(self, x: Tensor, mask: Tensor, total: Sum) -> None:
        """Adds ``[..., *shape]`` where the mask ``[...]`` is positive (Chan et al. 1979, equations 2.1)."""
        weight = mask > 0
        if self.entities:
            weight = weight.unsqueeze(-1) & (x != 0).any(-1)
        # Two sums, since a mean of squares has no digits left for a small variance far from 0.
        rows = x.double().reshape(-1, *self.mean.shape)
        weight = weight.reshape(-1, *[1] * self.mean.ndim)
        both = total(torch.cat([torch.where(weight, rows, 0.0).sum(0).flatten(), weight.sum().double().reshape(1)]))
        count = both[-1]
        if not count:
            return
        mean = both[:-1].reshape(self.mean.shape) / count
        squares = total(torch.where(weight, (rows - mean).square(), 0.0).sum(0))
        known = self.count.double()
        share = count / (known + count)
        delta = mean - self.mean.double()
        variance = self.variance.double() * (1 - share) + share * (squares / count + delta.square() * (1 - share))
        self.variance.copy_(variance)
        self.scale.copy_((variance + _EPSILON).rsqrt())
        self.mean.copy_(self.mean.double() + delta * share)
        self.count.add_(count.long())


def is_fresh(module: nn.Module) -> bool:
    """Whether a module has a normalisation that has seen no observation yet."""
    return any(isinstance(part, Normalised) and not part.count for part in module.modules())


def follow(module: nn.Module, obs: Any, mask: Tensor, total: Sum) -> None:
    """Adds a learner batch to the moments of all normalisations in a module.

    Args:
        module: any module.
        obs: the batch's observations, ``[B, T + 1, ...]``; of a tuple of several arguments, the first counts.
        mask: ``[B, T + 1]``, positive for steps to learn from.
        total: sums over all learners, which make the same calls.
    """
    obs = obs[0] if isinstance(obs, tuple) else obs
    for part in module.modules():
        if isinstance(part, Normalised):
            part.follow(obs[part.leaf] if isinstance(obs, Mapping) else obs, mask, total)
