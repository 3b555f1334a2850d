"""Finds a module's critic, which is computed only in learning. Torch only."""

from __future__ import annotations

from torch import nn


def critic_of(module: nn.Module, shown: str) -> nn.Module:
    """The submodule ``critic`` of a module that may be wrapped for ranks or hooks.

    Args:
        module: the module; wrappers have the inner module as ``module``.
        shown: the critic's arguments, for the message.

    Raises:
        ValueError: the module has no critic.
    """
    inner: object = module
    while isinstance(inner, nn.Module):
        critic = inner._modules.get("critic")
        if critic is not None:
            return critic
        inner = inner._modules.get("module")
    raise ValueError(f"module: expected one with a submodule 'critic', {shown}; got {type(module).__name__}")
