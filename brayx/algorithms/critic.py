"""Finds the part of a module that only learning computes. Torch only."""

from __future__ import annotations

from torch import nn


def critic_of(module: nn.Module, shown: str) -> nn.Module:
    """The submodule ``critic``, of whatever is wrapped for ranks or hooks.

    Args:
        module: possibly wrapped, by modules with the inner one as ``module``.
        shown: the critic's arguments, for the message.

    Raises:
        ValueError: there is none.
    """
    inner: object = module
    while isinstance(inner, nn.Module):
        critic = inner._modules.get("critic")
        if critic is not None:
            return critic
        inner = inner._modules.get("module")
    raise ValueError(f"module: expected one with a submodule 'critic', {shown}; got {type(module).__name__}")
