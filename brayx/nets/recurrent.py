"""Declaration of a recurrent model: ``is_recurrent = True`` in its class. Torch only.

Such a model takes its state as the argument ``state`` and returns the state after the step as the output ``state``,
with the same nesting, shapes and dtypes. In any other model these names have no special meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import nn

from brayx.errors import ModelError

STATE = "state"
"""Name of the argument and of the output that hold the state."""


def state_argument(module: nn.Module) -> int | None:
    """Index of the argument ``state`` of a recurrent model; None for any other model.

    Raises:
        ModelError: the model is declared recurrent but has no such argument, or the declaration is not a bool.
    """
    declared = getattr(module, "is_recurrent", False)
    if not isinstance(declared, bool):
        raise ModelError(f"the model's is_recurrent is {declared!r}, expected True or False")
    if not declared:
        return None
    names = list(inspect.signature(module.forward).parameters)
    if STATE not in names:
        raise ModelError(f"the model declares is_recurrent = True: expected an argument 'state', got {names}")
    return names.index(STATE)


def check_declared(module: nn.Module, outputs: Collection[str]) -> None:
    """Refuses a model whose outputs do not match its declaration.

    Args:
        module: the model, recurrent or not.
        outputs: names of its outputs.

    Raises:
        ModelError: it is declared recurrent but has no output ``state``, or it has an argument and an output ``state``
            but no declaration.
    """
    if state_argument(module) is not None and STATE not in outputs:
        raise ModelError(f"the model declares is_recurrent = True: expected an output 'state', got {outputs}")
    both = STATE in outputs and STATE in inspect.signature(module.forward).parameters
    if both and not hasattr(module, "is_recurrent"):
        raise ModelError(
            "the model has an argument and an output 'state', but does not declare whether it is recurrent: expected "
            "is_recurrent = True or False in its class"
        )
