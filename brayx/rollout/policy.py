"""The policy of a rollout: an engine with the newest weights bound, and the state of a recurrent model.

The exported graph has only the outputs that acting needs, so not the value. Knows nothing of environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import nn

from brayx.engines.base import Engine
from brayx.engines.scaling import learned
from brayx.errors import ModelError
from brayx.types import NestedArray, Weights, flatten

ActingEngine: TypeAlias = Literal["onnx", "torch"]

_NOT_FOR_ACTING = ("value",)
_PREFIX = "acting."


class _Acting(nn.Module):
    """The module with only the outputs that acting needs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.acting = module

    def forward(self, *args: Any) -> dict[str, Any]:
        outputs: Mapping[str, Any] = self.acting(*args)
        return {name: output for name, output in outputs.items() if name not in _NOT_FOR_ACTING}


class RolloutPolicy:
    """Runs a model on batches of observations, with one set of weights at a time.

    Args:
        module: takes ``forward_args`` and returns outputs that `brayx.actions` draws from; it is copied.
        forward_args: example arguments with a batch axis of at least 1; recurrent state is carried from step to step.
        engine: ``onnx``, or ``torch`` for a module that cannot be exported.
        threads: threads of one run, with ``onnx``.

    Attributes:
        version: version of the weights; 0: the module's own.
        obs_keys: names of the observation's leaves in a learner batch, in the order of `step`'s arguments.
        obs_leaves: their shapes and dtypes.
        output_names: names of all outputs of the module.
        state_keys: names of the recurrent state's leaves in a learner batch; empty without one.

    Raises:
        ModelError: the module does not return a mapping of outputs, or cannot be exported.
    """

    def __init__(
        self,
        module: nn.Module,
        forward_args: tuple[NestedArray, ...],
        *,
        engine: ActingEngine = "onnx",
        threads: int = 1,
    ) -> None:
        self.version = 0
        built, self._prefix = _engine(module, forward_args, engine, threads)
        self._engine = built
        self.output_names = {leaf.path.split("/")[0] for leaf in built.spec.outputs}
        state = built.spec.state
        self._state_inputs = () if state is None else state.inputs
        self._state_outputs = () if state is None else state.outputs
        self._bound = built.bind(built.initial)
        self._seated = -1
        argument = None if state is None else state.argument
        args = tuple(arg for index, arg in enumerate(forward_args) if index != argument)
        # Named as in a learner batch.
        self.obs_keys = tuple(flatten(args[0] if len(args) == 1 else args, "obs"))
        self.obs_leaves = tuple(leaf for i, leaf in enumerate(built.spec.inputs) if i not in self._state_inputs)
        initial = {} if state is None else flatten(state.initial, "state")
        self.state_keys = tuple(initial)
        self._initial = tuple(initial.values())

    def load(self, weights: Weights, version: int) -> None:
        """Acts with these weights from the next step on.

        Raises:
            BadWeights: they do not fit the module.
        """
        # The collector normalises with newer moments than a version's.
        parameters = learned(weights)
        self._bound = self._engine.bind({self._prefix + name: array for name, array in parameters.items()})
        self._seated = -1
        self.version = version

    def initial_state(self, num: int) -> list[np.ndarray]:
        """The recurrent state's leaves ``[num, ...]`` at an episode's start; empty without one."""
        return [np.repeat(leaf[None], num, 0) for leaf in self._initial]

    def step(self, obs: Sequence[np.ndarray], state: Sequence[np.ndarray]) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Outputs by name, ``[N, ...]``, and the state after the step.

        The output arrays are reused: the next step overwrites them, until ``N`` or the weights change.

        Args:
            obs: leaves ``[N, ...]`` in the order of `obs_keys`, as `obs_leaves` says.
            state: leaves from `initial_state` or the last step.

        Raises:
            ModelError: the engine failed.
        """
        if len(obs[0]) != self._seated:
            self._sit_down(len(obs[0]))
        for room, leaf in zip(self._rooms, (*obs, *state), strict=True):
            np.copyto(room, leaf, casting="same_kind")
        seat = self._seat
        seat.run()
        return self._outputs, [seat.outputs[index].copy() for index in self._state_outputs]

    def _sit_down(self, num: int) -> None:
        """Allocates arrays for ``num`` observations at once."""
        self._seat = self._engine.seat(self._bound, num)
        spec = self._engine.spec
        nested: Any = spec.output_tree.unflatten(self._seat.outputs)
        self._outputs: dict[str, Any] = {name: output for name, output in nested.items() if name != "state"}
        order = [index for index in range(len(spec.inputs)) if index not in self._state_inputs]
        self._rooms = [self._seat.inputs[index] for index in (*order, *self._state_inputs)]
        self._seated = num


def _engine(
    module: nn.Module, forward_args: tuple[NestedArray, ...], kind: ActingEngine, threads: int
) -> tuple[Engine, str]:
    """An engine, and its prefix of the module's weight names."""
    from brayx.engines.torch import TorchEngine, describe, frozen_copy

    spec = describe(frozen_copy(module), forward_args)
    names = {leaf.path.split("/")[0] for leaf in spec.outputs}
    if not names & {"logits", "mean", "tanh_mean"}:
        raise ModelError(f"the model gives {sorted(names)}, expected logits, mean or tanh_mean")
    wrapped, prefix = module, ""
    # Not for a recurrent model: its outputs share most of their computation, and `_Acting` declares no memory.
    if spec.state is None and names & set(_NOT_FOR_ACTING):
        wrapped, prefix = _Acting(module), _PREFIX
    if kind == "torch":
        return TorchEngine(wrapped, forward_args), prefix
    from brayx.engines.onnx import OnnxEngine

    return OnnxEngine(wrapped, forward_args, threads=threads, traced=True), prefix
