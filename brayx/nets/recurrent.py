"""The declaration of a model's memory: ``is_recurrent = True`` in its class. Torch only.

Such a model takes its memory as the argument ``state`` and gives the memory after the step as the output ``state``, of
the same nesting, shapes and dtypes. In any other model both names mean nothing special.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import nn

from brayx.errors import ModelError

STATE = "state"
"""Name of the argument and of the output that hold the memory."""


def state_argument(module: nn.Module) -> int | None:
    """Index of the argument ``state`` of a model with a memory; None: the model has no memory.

    Raises:
        ModelError: it declares a memory and takes no such argument, or its declaration is no bool.
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
        module: with or without a memory.
        outputs: names of its outputs.

    Raises:
        ModelError: it declares a memory and gives no ``state``, or has ``state`` on both sides and no declaration.
    """
    if state_argument(module) is not None and STATE not in outputs:
        raise ModelError(f"the model declares is_recurrent = True: expected an output 'state', got {outputs}")
    both = STATE in outputs and STATE in inspect.signature(module.forward).parameters
    if both and not hasattr(module, "is_recurrent"):
        raise ModelError(
            "the model has an argument and an output 'state', and does not declare whether that is a memory: expected "
            "is_recurrent = True or False in its class"
        )
