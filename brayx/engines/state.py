"""The state of a recurrent model between forwards. Knows nothing of sessions or engines; NumPy and optree only."""

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
        spec: signature of a recurrent model.

    Raises:
        ModelError: the model has no state.
    """

    def __init__(self, spec: ModelSpec) -> None:
        if spec.state is None:
            raise ModelError("the model has no memory: a recurrent model declares is_recurrent = True")
        self._spec = spec.state
        self.state: NestedArray = self._spec.initial

    def reset(self) -> None:
        """Returns to the initial state, for a new episode."""
        self.state = self._spec.initial

    def args(self, *args: NestedArray) -> tuple[NestedArray, ...]:
        """The model's arguments: those given, with the state inserted at its position."""
        at = self._spec.argument
        return (*args[:at], self.state, *args[at:])

    def keep(self, outputs: Any) -> Any:
        """Stores the state from a forward's outputs, and returns the outputs without ``state``."""
        # Copy: an output is a view into its batch and would keep the whole batch alive.
        self.state = optree.tree_map(np.array, outputs["state"])
        return {name: value for name, value in outputs.items() if name != "state"}
