"""A version of a model that acts on recorded observations.

A recurrent model has its memory, as in a session: the first forward starts from the initial state, and each further one
from the state before it. Knows nothing of files, nor of where versions come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from brayx.arrays import as_dtype
from brayx.engines.base import Engine
from brayx.errors import ModelError, ShapeMismatch
from brayx.types import NestedArray

if TYPE_CHECKING:
    import torch

_MAX_BATCH = 4096
"""Maximum batch of a model without memory."""
Leaves = Sequence[np.ndarray]
"""A model's inputs ``[N, ...]``, without its state, for consecutive ticks of one session."""


class Version:
    """A version of a model that takes recorded observations.

    Args:
        label: its name in results and errors.
        module: the module with the version's weights; it is copied.
        example_args: a tuple of example arguments, each leaf with a batch axis.
        behaviour: of the games that it plays; empty: it has no contract.

    Attributes:
        columns: names of the recorded arrays that it needs: ``obs``, or paths such as ``obs/board``.
        tick_bytes: size of one observation in bytes.
        is_recurrent: whether it has a memory.

    Raises:
        ModelError: the module fails on its example.
    """

    def __init__(
        self, label: str, module: torch.nn.Module, example_args: tuple[NestedArray, ...], *, behaviour: str = ""
    ) -> None:
        from brayx.engines.normalised import observed

        self.label, self.behaviour = label, behaviour
        self._engine = _engine(module, example_args)
        self._bound = self._engine.bind(self._engine.initial)
        self.spec = self._engine.spec
        self.is_recurrent = self.spec.state is not None
        state_inputs = () if self.spec.state is None else self.spec.state.inputs
        self._places = [place for place in range(len(self.spec.inputs)) if place not in state_inputs]
        self.columns = tuple(observed(module, example_args))
        leaves = [self.spec.inputs[place] for place in self._places]
        self.tick_bytes = sum(int(np.prod(leaf.shape, dtype=int)) * leaf.dtype.itemsize for leaf in leaves)

    def leaves(self, arrays: Mapping[str, np.ndarray]) -> Leaves:
        """Selects its inputs from the arrays ``[N, ...]`` of a recording.

        Raises:
            ShapeMismatch: an array does not fit, or a whole number is outside its limits.
        """
        fitting = []
        for name, place in zip(self.columns, self._places, strict=True):
            spec, array = self.spec.inputs[place], arrays[name]
            fits = as_dtype(array, spec.dtype) if array.shape[1:] == spec.shape else None
            if fits is None:
                expected, got = f"{name}: {list(spec.shape)} {spec.dtype}", f"{list(array.shape[1:])} {array.dtype}"
                raise ShapeMismatch(
                    f"the observations do not fit model {self.label}: expected {expected}, got {got}",
                    expected=[expected],
                    got=[f"{name}: {got}"],
                )
            spec.check(fits)
            fitting.append(np.ascontiguousarray(fits))
        return fitting

    def players(self, sessions: int) -> VersionPlayers:
        """Acts in this many sessions at once, from their first ticks on."""
        return VersionPlayers(self, sessions)

    def run(self, inputs: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        """One forward. ``inputs`` has each input leaf by its index; returns the output leaves."""
        return self._engine.run(self._bound, [inputs[place] for place in range(len(self.spec.inputs))])

    def places(self, leaves: Leaves) -> dict[int, np.ndarray]:
        """Leaves without the state, by their indices among all inputs."""
        return dict(zip(self._places, leaves, strict=True))

    def named(self, leaves: Leaves) -> Mapping[str, Any]:
        """The outputs by name.

        Raises:
            ModelError: they have no names.
        """
        outputs = self.spec.unflatten_outputs(leaves)
        if not isinstance(outputs, Mapping):
            raise ModelError(f"model {self.label} returns {type(outputs).__name__}, expected outputs by name")
        return outputs


class VersionPlayers:
    """A version that plays several sessions at once, piece by piece.

    Args:
        version: the version.
        sessions: number of sessions.
    """

    def __init__(self, version: Version, sessions: int) -> None:
        self._version = version
        self._memory: list[np.ndarray] = []
        if version.spec.state is not None:
            initial: NestedArray = version.spec.state.initial
            self._memory = [np.repeat(np.asarray(leaf)[None], sessions, 0) for leaf in optree.tree_leaves(initial)]

    def act(self, pieces: Mapping[int, Leaves]) -> dict[int, Mapping[str, Any]]:
        """The outputs ``[N, ...]`` by name, without the state, for the next ticks of some sessions.

        Args:
            pieces: the inputs of each session, by its index; at least one tick each.

        Raises:
            ModelError: the model failed, or its outputs have no names.
        """
        version = self._version
        state = version.spec.state
        if state is None:
            return dict(zip(pieces, _act_at_once(version, list(pieces.values())), strict=True))
        sessions = np.array(list(pieces))
        counts = np.array([len(piece[0]) for piece in pieces.values()])
        rows = [_time_major(leaves, counts.max()) for leaves in zip(*pieces.values(), strict=True)]
        outputs_by_place: dict[int, np.ndarray] = {}
        for step in range(counts.max()):
            playing = np.flatnonzero(counts > step)
            inputs = version.places([row[step, playing] for row in rows])
            memory = [leaf[sessions[playing]] for leaf in self._memory]
            inputs.update(zip(state.inputs, memory, strict=True))
            outputs = version.run(inputs)
            for leaf, place in zip(self._memory, state.outputs, strict=True):
                leaf[sessions[playing]] = outputs[place]
            for place, output in enumerate(outputs):
                if place not in state.outputs:
                    if place not in outputs_by_place:
                        outputs_by_place[place] = np.zeros((counts.max(), len(counts), *output.shape[1:]), output.dtype)
                    outputs_by_place[place][step, playing] = output
        nothing = np.empty(0)
        leaves_of = [outputs_by_place.get(place) for place in range(len(version.spec.outputs))]
        return {
            session: version.named([nothing if leaf is None else leaf[: counts[index], index] for leaf in leaves_of])
            for index, session in enumerate(pieces)
        }


def _engine(module: torch.nn.Module, example_args: tuple[NestedArray, ...]) -> Engine:
    """An ONNX Runtime engine, which is faster than torch for small batches; torch if the model cannot be exported."""
    from brayx.engines.torch import TorchEngine
    from brayx.model.build import engine_of
    from brayx.model.config import ModelConfig

    try:
        return engine_of(ModelConfig(module="", engine="onnx"), module, example_args)
    except ModelError:
        return TorchEngine(module, example_args)


def _act_at_once(version: Version, pieces: Sequence[Leaves]) -> list[Mapping[str, Any]]:
    """The outputs of a model without memory."""
    rows = [np.concatenate(leaves) for leaves in zip(*pieces, strict=True)]
    done = [
        version.run(version.places([leaf[first : first + _MAX_BATCH] for leaf in rows]))
        for first in range(0, len(rows[0]), _MAX_BATCH)
    ]
    leaves = [np.concatenate(parts) for parts in zip(*done, strict=True)]
    ends = np.cumsum([len(piece[0]) for piece in pieces])[:-1]
    return [version.named(piece) for piece in zip(*(np.split(leaf, ends) for leaf in leaves), strict=True)]


def _time_major(leaves: Sequence[np.ndarray], steps: int) -> np.ndarray:
    """One array ``[T, B, ...]``, in which each step is contiguous; zeros after a session's end."""
    padded = np.zeros((steps, len(leaves), *leaves[0].shape[1:]), leaves[0].dtype)
    for place, leaf in enumerate(leaves):
        padded[: len(leaf), place] = leaf
    return padded
