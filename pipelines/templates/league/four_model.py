"""The model, a torch module; actors run it as ONNX."""

import torch
from four_rules import HEIGHT, LINES, WIDTH
from torch import nn
from torch.nn.functional import pad

from brayx.nets.heads import Categorical, Value, linear


class FourNet(nn.Module):
    """A convolution over 4 x 4 windows, then two dense layers.

    Input planes are the stones, the cells that would complete a four, and the lowest empty cells. A column that
    completes a four, now or one cell higher, also changes its logit directly.
    """

    def __init__(self, channels, hidden):
        super().__init__()
        lines = torch.zeros(len(LINES), HEIGHT * WIDTH)
        for line, cells in zip(lines, LINES, strict=True):
            line[cells] = 1.0
        self.register_buffer("lines", lines)
        self.windows = nn.Conv2d(5, channels, 4)
        self.together = linear(5 * HEIGHT * WIDTH + channels * (HEIGHT - 3) * (WIDTH - 3), hidden)
        self.again = linear(hidden, hidden)
        self.column = linear(4, 1, 0.01)
        self.policy = Categorical(hidden, WIDTH)
        self.value = Value(hidden)

    def fours(self, stones, others):
        """Empty cells where one more of ``stones``, ``[B, 6, 7]``, completes a four; ``others`` block lines."""
        three = (stones.flatten(1) @ self.lines.T - 4 * others.flatten(1) @ self.lines.T - 2).relu()
        return (three @ self.lines).view(-1, HEIGHT, WIDTH).clamp(max=1.0) * (1 - stones)

    def forward(self, obs):
        mine, theirs = obs["board"].unbind(1)
        fours = torch.stack([self.fours(mine, theirs), self.fours(theirs, mine)], 1)
        stones = mine + theirs
        free = pad(stones[:, 1:], (0, 0, 0, 1), value=1.0) - stones  # the lowest empty cell of each column
        above = pad(free[:, 1:], (0, 0, 0, 1))
        seen = torch.cat([obs["board"], fours, free[:, None]], 1)
        x = torch.cat([seen.flatten(1), self.windows(seen).relu().flatten(1)], 1)
        x = self.again(self.together(x).relu()).relu()
        outputs = self.policy(x, obs["action_mask"])
        column = torch.cat([(fours * free[:, None]).sum(2), (fours * above[:, None]).sum(2)], 1)
        outputs["logits"] = outputs["logits"] + self.column(column.transpose(1, 2)).squeeze(2)
        return {**outputs, "value": self.value(x)}


def build_model(name, config):
    """Returns the module, and example arguments with a batch axis."""
    network = config["network"]
    example = {"board": torch.zeros(2, 2, HEIGHT, WIDTH), "action_mask": torch.ones(2, WIDTH, dtype=torch.int8)}
    return FourNet(network["channels"], network["hidden"]), (example,)
