"""What a session of a recurrent model keeps between forwards. Knows no sessions and no engines; NumPy and optree."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree

from brayx.engines.base import ModelSpec
from brayx.errors import ModelError
from brayx.types import NestedArray


class Recurrence:
    """Carries one session's state from each forward into the next.

        args = recurrence.args(obs)
        outputs = recurrence.keep((await model.forward(*args)).outputs)

    Args:
        spec: of a model with a state.

    Raises:
        ModelError: the model has none.
    """

    def __init__(self, spec: ModelSpec) -> None:
        if spec.state is None:
            raise ModelError("the model has no memory: a recurrent model declares is_recurrent = True")
        self._spec = spec.state
        self.state: NestedArray = self._spec.initial

    def reset(self) -> None:
        """Begins anew, as for another episode."""
        self.state = self._spec.initial

    def args(self, *args: NestedArray) -> tuple[NestedArray, ...]:
        """The model's arguments: those given, with the state at its place among them."""
        at = self._spec.argument
        return (*args[:at], self.state, *args[at:])

    def keep(self, outputs: Any) -> Any:
        """Takes the state out of what a forward gave, and gives the rest: a mapping without ``state``."""
        # A copy, since an output is a row of its batch, which it would keep alive.
        self.state = optree.tree_map(np.array, outputs["state"])
        return {name: value for name, value in outputs.items() if name != "state"}
