"""A recurrent core whose replay is the acting: one step when acting, a whole sequence when learning. Torch only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
"""``h`` and ``c``, each ``[N, size]``; zeros at the start of an episode."""


class LSTM(nn.Module):
    """Hochreiter and Schmidhuber 1997, "Long short-term memory", with the forget gate's bias starting at 1.

    Args:
        features: that come in.
        size: of what comes out and of either half of the state.
    """

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.inputs = nn.Linear(features, 4 * size)
        self.recurrent = nn.Linear(size, 4 * size, bias=False)
        for layer in (self.inputs, self.recurrent):
            nn.init.orthogonal_(layer.weight, 1.0)
        with torch.no_grad():
            self.inputs.bias.zero_()
            self.inputs.bias[size : 2 * size] = 1.0

    def initial(self, batch: int) -> State:
        """The state at the start of an episode."""
        return {"h": torch.zeros(batch, self.size), "c": torch.zeros(batch, self.size)}

    def forward(self, x: Tensor, state: State, carry: Tensor | None = None) -> tuple[Tensor, State]:
        """One step, or a sequence.

        Args:
            x: ``[N, features]``; of a sequence ``[T, N, features]``.
            state: before the step; of a sequence ``[T, N, size]`` each, as stored while acting.
            carry: absent for one step; of a sequence ``[T, N]``: true where a step goes on from the state that the
                step before it left, false where it takes the stored one. The first of a sequence takes the stored.

        Returns:
            What comes out, ``[N, size]`` or ``[T, N, size]``, and the state after the (last) step.
        """
        gates = self.inputs(x)  # of every step in one product
        if carry is None:
            return self._step(gates, state["h"], state["c"])
        h, c = state["h"][0], state["c"][0]
        keep = carry.unsqueeze(-1)
        outputs: list[Tensor] = []
        for t in range(len(gates)):
            if t:
                h = torch.where(keep[t], h, state["h"][t])
                c = torch.where(keep[t], c, state["c"][t])
            h, after = self._step(gates[t], h, c)
            c = after["c"]
            outputs.append(h)
        return torch.stack(outputs), {"h": h, "c": c}

    def _step(self, gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, State]:
        i, f, g, o = (gates + self.recurrent(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, {"h": h, "c": c}
