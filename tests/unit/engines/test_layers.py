"""The table of a model's layers, against torch's own count and modules that call their layers in odd ways."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from brayx.engines.layers import layer_table


class Odd(nn.Module):
    """Has a parameter of its own, a layer that is not called, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
        self.memory = nn.LSTMCell(144, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"value": self.memory(self.body(obs))[0] * self.scale}


def test_each_layer_has_a_row_and_the_sum_is_torchs() -> None:
    module = Odd().train()
    lines = layer_table(module, (np.zeros((1, 3, 8, 8), np.float32),)).splitlines()
    rows = {line[: lines[0].index("kind")].strip(): line[lines[0].index("kind") :].split("  ") for line in lines[1:-1]}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in rows.items()}
    assert cells == {
        "(the module itself)": ["Odd", "[N, 5]", "5"],
        "body.0": ["Conv2d", "[N, 4, 6, 6]", "112"],
        "body.1": ["ReLU", "[N, 4, 6, 6]", "0"],
        "body.2": ["Flatten", "[N, 144]", "0"],
        "memory": ["LSTMCell", "[N, 5] [N, 5]", "3,020"],
        "unused": ["Linear", "-", "6"],
    }
    assert lines[-1] == f"{sum(parameter.numel() for parameter in module.parameters()):,} parameters in all"
    assert module.training
    assert not module.body[0]._forward_hooks
