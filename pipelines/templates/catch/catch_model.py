"""The model, a torch module; actors run it as ONNX."""

import torch
from catch_features import SIZE

from brayx.nets.mlp import ActorCritic


def build_model(name, config):
    """The module, and an example of its arguments with a batch axis."""
    hidden = tuple(config["network"]["hidden"])
    return ActorCritic(SIZE, 3, hidden=hidden), (torch.zeros(2, SIZE),)
