"""The network of both roles: maps a player's observation to the symbol that it picks."""

import torch
from torch import nn


class Player(nn.Module):
    def __init__(self, colours: int, hidden: int) -> None:
        super().__init__()
        self.colours = colours
        self.embedding = nn.Embedding(2 * colours, hidden)  # a row for each role and symbol seen
        self.logits = nn.Linear(hidden, colours)
        self.value = nn.Linear(hidden, 1)
        nn.init.zeros_(self.logits.weight)  # at first every symbol is about as likely: no habits before there is a game

    def forward(self, obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features = torch.tanh(self.embedding(obs["role"] * self.colours + obs["sees"]))
        return {"logits": self.logits(features), "value": self.value(features).squeeze(-1)}


def build_model(name, config):
    """The module, and an example of its arguments with a batch of two."""
    options = config["signals"]
    module = Player(options["colours"], options["hidden"])
    nothing = torch.zeros(2, dtype=torch.int64)
    return module, ({"role": nothing, "sees": nothing},)
