"""torch's Adam without torch's compiler: the same numbers, the same state, ready a second earlier. Torch only.

The methods of `torch.optim.Optimizer` are wrapped to be left out by ``torch.compile``, and the wrapper imports all of
that the first time. Nothing is compiled here, so the methods are taken as they are underneath.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import Optimizer

EPS = 1e-5
"""Adam's epsilon for every model and algorithm. It is usual for PPO; torch's default is 1e-8, which only SAC's
temperature has. A parameter whose gradients are much smaller than epsilon takes smaller steps."""


def _plain(name: str) -> Any:
    """The method without its wrapper; the method itself if torch has no wrapper."""
    method = getattr(Optimizer, name)
    return getattr(method, "__wrapped__", method)


class Adam(torch.optim.Adam):
    """Kingma and Ba 2015, "Adam: a method for stochastic optimization", https://arxiv.org/abs/1412.6980.

    Arguments as `torch.optim.Adam`; there is no closure to step with.
    """

    add_param_group = _plain("add_param_group")
    zero_grad = _plain("zero_grad")
    state_dict = _plain("state_dict")
    load_state_dict = _plain("load_state_dict")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step with the current gradients."""
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            means: list[Tensor] = []
            squares: list[Tensor] = []
            largest: list[Tensor] = []
            steps: list[Tensor] = []
            has_complex = self._init_group(  # type: ignore[no-untyped-call]
                group, parameters, gradients, means, squares, largest, steps
            )
            beta1, beta2 = group["betas"]
            names = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "decoupled_weight_decay")
            how = ("foreach", "capturable", "differentiable", "fused")
            adam(
                parameters,
                gradients,
                means,
                squares,
                largest,
                steps,
                **{name: group[name] for name in (*names, *how)},
                has_complex=has_complex,
                beta1=beta1,
                beta2=beta2,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
