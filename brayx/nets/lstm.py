"""An LSTM core: one step when acting, the same computation over a whole sequence when learning. Torch only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

State = dict[str, Tensor]
"""``h`` and ``c``, each ``[N, size]``; zeros at the start of an episode."""


class LSTM(nn.Module):
    """Hochreiter and Schmidhuber 1997, "Long short-term memory", with the forget gate's bias starting at 1.

    Args:
        features: size of the input.
        size: size of the output and of each half of the state.
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
            x: ``[N, features]``; for a sequence ``[T, N, features]``.
            state: the state before the step; for a sequence ``[T, N, size]`` each, as stored while acting.
            carry: absent for one step; for a sequence ``[T, N]``: true where a step continues from the previous step's
                state, false where it uses the stored one. The first step always uses the stored one.

        Returns:
            The output, ``[N, size]`` or ``[T, N, size]``, and the state after the (last) step.
        """
        gates = self.inputs(x)  # all steps in one product
        if carry is None:
            return self._step(gates, state["h"], state["c"])
        y, h, c = _Replay.apply(gates, self.recurrent.weight, state["h"], state["c"], carry.unsqueeze(-1))  # type: ignore[no-untyped-call]
        return y, {"h": h, "c": c}

    def _step(self, gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, State]:
        i, f, g, o = (gates + self.recurrent(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, {"h": h, "c": c}


class _Replay(torch.autograd.Function):
    """A sequence with a hand-written derivative, in full precision. Autograd would run five times as many operations
    per step, each too small to be efficient."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        """Maps ``gates`` ``[T, N, 4 * size]`` of the inputs, stored ``h`` and ``c`` ``[T, N, size]``, and ``keep``
        ``[T, N, 1]`` to the outputs and the final state."""
        with torch.autocast(gates.device.type, enabled=False):
            ctx.dtype = gates.dtype
            across, h, c, pre = weight.t(), h.clone(), c.clone(), gates.to(h.dtype, copy=True)
            out, cells = torch.empty_like(h), torch.empty_like(c)
            for t in range(len(pre)):
                if t:
                    torch.where(keep[t], out[t - 1], h[t], out=h[t])
                    torch.where(keep[t], cells[t - 1], c[t], out=c[t])
                pre[t].addmm_(h[t], across)
                i, f, g, o = pre[t].chunk(4, -1)
                pre[t, :, : 2 * i.shape[-1]].sigmoid_()
                g.tanh_()
                o.sigmoid_()
                torch.addcmul(f * c[t], i, g, out=cells[t])
                torch.mul(o, cells[t].tanh(), out=out[t])
        ctx.save_for_backward(weight, h, c, keep, pre, cells)
        last = out[-1].clone(), cells[-1].clone()
        ctx.mark_non_differentiable(*last)
        return out, *last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Backpropagation through time, as far as states were carried."""
        weight, h, c, keep, pre, cells = ctx.saved_tensors
        squashed, d_pre = cells.tanh(), torch.empty_like(pre)
        d_stored_h, d_stored_c = torch.zeros_like(h), torch.zeros_like(c)
        i, f, g, o = pre.chunk(4, -1)
        # The factors of each gate's derivative, for all steps at once.
        by_i, by_f, by_g = g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)
        by_o, by_c = squashed * o * (1 - o), o * (1 - squashed * squashed)
        none = torch.zeros_like(h[0])
        d_h = d_c = none
        for t in range(len(pre) - 1, -1, -1):
            d_h = d_h + d_out[t]
            d_c = torch.addcmul(d_c, d_h, by_c[t])
            torch.cat([d_c * by_i[t], d_c * by_f[t], d_c * by_g[t], d_h * by_o[t]], -1, out=d_pre[t])
            d_h, d_c = d_pre[t] @ weight, d_c * f[t]
            if t == 0:  # the first step always uses the stored state
                d_stored_h[0], d_stored_c[0] = d_h, d_c
                break
            torch.where(keep[t], none, d_h, out=d_stored_h[t])
            torch.where(keep[t], none, d_c, out=d_stored_c[t])
            d_h, d_c = torch.where(keep[t], d_h, none), torch.where(keep[t], d_c, none)
        d_weight = d_pre.flatten(0, 1).t() @ h.flatten(0, 1)
        return d_pre.to(ctx.dtype), d_weight, d_stored_h, d_stored_c, None
