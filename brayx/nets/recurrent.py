"""Declaration of a recurrent model: ``is_recurrent = True`` in its class. Torch only.

Such a model takes its state as the argument ``state`` and returns the state after the step as the output ``state``,
with the same nesting, shapes and dtypes. In any other model these names have no special meaning.
"""

from __future__ import annotations

import inspect

from torch import nn

STATE = "state"
"""Name of the argument and of the output that hold the state."""


def state_argument(module: nn.Module) -> int | None:
    """Index of the argument ``state`` of a recurrent model; None for any other model.

    `brayx.engines.torch.describe` refuses a model whose declaration is wrong.
    """
    if getattr(module, "is_recurrent", False) is not True:
        return None
    return list(inspect.signature(module.forward).parameters).index(STATE)
