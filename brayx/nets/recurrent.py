"""How a model declares a memory: ``is_recurrent = True`` in its class. Torch only.

Such a model takes what its memory holds as the argument ``state``, and gives what it holds after the step as the output
``state``, alike in nesting, shapes and dtypes. To any other model both names are like others.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import nn

from brayx.errors import ModelError

STATE = "state"
"""Name of the argument and of the output."""


def state_argument(module: nn.Module) -> int | None:
    """Place of the argument ``state`` of a model with a memory; None: it has none.

    Raises:
        ModelError: it declares a memory and takes no such argument, or declares neither yes nor no.
    """
    declared = getattr(module, "is_recurrent", False)
    if not isinstance(declared, bool):
        raise ModelError(f"the model's is_recurrent is {declared!r}, expected True or False")
    if not declared:
        return None
    names = list(inspect.signature(module.forward).parameters)
    if STATE not in names:
        raise ModelError(f"the model declares is_recurrent = True: expected an argument 'state', it takes {names}")
    return names.index(STATE)


def check_declared(module: nn.Module, outputs: Collection[str]) -> None:
    """Refuses a model whose outputs are not what it declares.

    Args:
        module: of any kind.
        outputs: names of what it gives.

    Raises:
        ModelError: it declares a memory and gives no ``state``; or it takes and gives one without saying what that is.
    """
    if state_argument(module) is not None and STATE not in outputs:
        raise ModelError(f"the model declares is_recurrent = True: expected an output 'state', it gives {outputs}")
    both = STATE in outputs and STATE in inspect.signature(module.forward).parameters
    if both and not hasattr(module, "is_recurrent"):
        raise ModelError(
            "the model takes and gives 'state', and does not say whether that is its memory: expected "
            "is_recurrent = True in its class, or False"
        )
