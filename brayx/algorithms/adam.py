"""torch's Adam without torch's compiler: the same results and state, but it starts a second earlier. Torch only.

torch wraps the methods of `torch.optim.Optimizer` so that ``torch.compile`` skips them, and the wrapper imports the
compiler on first use. brayx compiles nothing, so it calls the unwrapped methods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import Optimizer

EPS = 1e-5
"""Adam's epsilon for every model and algorithm, the usual value for PPO. Only SAC's temperature uses torch's default of
1e-8. A parameter with gradients much smaller than epsilon takes smaller steps."""


def _plain(name: str) -> Any:
    """The unwrapped method, or the method itself if torch does not wrap it."""
    method = getattr(Optimizer, name)
    return getattr(method, "__wrapped__", method)


class Adam(torch.optim.Adam):
    """Kingma and Ba 2015, "Adam: a method for stochastic optimization", https://arxiv.org/abs/1412.6980.

    Arguments as for `torch.optim.Adam`; `step` takes no closure.
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
