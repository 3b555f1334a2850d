"""A policy for flat observations and discrete actions: two tanh towers, one for the logits, one for the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from brayx.nets.mlp import ActorCritic


def build_model(name: str, config: Mapping[str, Any]) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """The module and an example of its arguments (batch axis first), sized by the job's ``network`` section."""
    network = config["network"]
    module = ActorCritic(network["obs_size"], network["num_actions"], hidden=tuple(network.get("hidden", (64, 64))))
    return module, (torch.zeros(2, network["obs_size"]),)
