"""Adam on all parameters as if they were one, for networks so small that a call costs more than its arithmetic.

The parameters become views of one tensor, and so do their gradients and the optimiser's moments: the norm is one
operation, the step another. The optimiser stays what is saved and restored. Torch only; knows no losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam

from brayx.algorithms.adam import Adam


class FlatAdam:
    """Takes the steps of an `torch.optim.Adam`, see `of`."""

    def __init__(self, optimizer: torch.optim.Adam, parameters: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._sizes = [p.numel() for p in self._parameters]
        like = self._parameters[0]
        total = sum(self._sizes)
        self._flat, self._gradient, self._mean, self._square = (like.new_zeros(total) for _ in range(4))
        self._step = torch.zeros((), dtype=torch.float32)
        self._views = [self._split(x) for x in (self._flat, self._gradient, self._mean, self._square)]
        optimizer.register_state_dict_pre_hook(self._tell)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> FlatAdam | None:
        """For Adam as the trainer makes it: one group of parameters, all on the CPU and of one dtype; else None."""
        if type(optimizer) not in (torch.optim.Adam, Adam) or len(optimizer.param_groups) != 1:
            return None
        assert isinstance(optimizer, torch.optim.Adam)
        group = optimizer.param_groups[0]
        parameters: list[Tensor] = group["params"]
        alike = all(p.device.type == "cpu" and p.dtype == parameters[0].dtype for p in parameters)
        known = not any(group[name] for name in ("amsgrad", "maximize", "capturable", "differentiable"))
        plain = alike and known and not isinstance(group["lr"], Tensor)
        return FlatAdam(optimizer, parameters) if plain else None

    def adopt(self) -> None:
        """Takes over parameters and moments that are not views of the flat ones yet, or no longer."""
        for p, flat, gradient, mean, square in zip(self._parameters, *self._views, strict=True):
            if p.data_ptr() != flat.data_ptr():
                flat.copy_(p.detach())
                p.data = flat
            p.grad = gradient
            state = self._optimizer.state[p]
            if state.get("exp_avg") is not mean:
                if state:
                    mean.copy_(state["exp_avg"])
                    square.copy_(state["exp_avg_sq"])
                    self._step.fill_(float(state["step"]))
                # A counter of its own for each, as torch has it: one for all would be counted up by all.
                state.update(step=self._step.clone(), exp_avg=mean, exp_avg_sq=square)

    def _tell(self, _: torch.optim.Optimizer) -> None:
        """Counts the steps in the optimiser's own state, which is about to be saved."""
        for p, mean in zip(self._parameters, self._views[2], strict=True):
            state = self._optimizer.state[p]
            if state.get("exp_avg") is mean:
                state["step"].copy_(self._step)

    @torch.no_grad()
    def step(self, max_norm: float | None) -> Tensor:
        """Clips the gradients, which were written into ``.grad``, steps, and gives their norm before."""
        norm: Tensor = torch.linalg.vector_norm(self._gradient)
        if max_norm is not None:
            self._gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        group = self._optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        adam(
            [self._flat],
            [self._gradient],
            [self._mean],
            [self._square],
            [],
            [self._step],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        return norm

    def _split(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, self._sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]
