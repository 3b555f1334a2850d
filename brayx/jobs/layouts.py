"""`GodotLayout` and `UnityLayout`: a contract's model as the ONNX file that a game engine's own inference loads.

    godot    the add-on godot_rl:  each observation, state_ins -> output, state_outs
    unity    ML-Agents:            obs_0 ..., action_masks, recurrent_in -> continuous_actions, discrete_actions ...

The graph takes the game's own values and gives its own actions: normalisation, masks, bounds and starts are inside, and
an action is the most probable one, as brayx serves it. `write_layout` compares the two before it writes a file.
Knows nothing of where a model comes from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optree
import torch
from torch import Tensor, nn

from brayx.actions import greedy
from brayx.engines.base import Tolerance
from brayx.engines.export import compare, peak
from brayx.engines.exporter import trace
from brayx.engines.onnx import open_session
from brayx.engines.torch import describe, frozen_copy
from brayx.errors import ConfigError, EngineMismatch, ModelError, first_line
from brayx.gamecore.contract import Contract, ObservationSpec
from brayx.gamecore.contract_actions import named_actions
from brayx.model.build import exporting
from brayx.nets.heads import masked
from brayx.nets.recurrent import STATE
from brayx.spaces import MASK
from brayx.types import NestedArray

_ROWS, _STEPS = 64, 5
"""Games in which a file is compared, and steps of each."""
_POLICY = ("logits", "mean", "log_std", "tanh_mean")
_CERTAIN = -20.0
"""Log standard deviation of numbers that are not drawn."""


class EngineLayout(nn.Module, ABC):
    """The module behind an engine's file.

    Args:
        module: the contract's model.
        example_args: its example arguments.
        contract: the game's.

    Attributes:
        inputs, outputs: names in the graph, in the order of `forward`.
        batched: those with a batch axis.

    Raises:
        ConfigError: the engine cannot express a part of the contract or of the model; names it.
    """

    name: ClassVar[str]
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batched: tuple[str, ...]
    low: Tensor
    high: Tensor

    def __init__(self, module: nn.Module, example_args: tuple[NestedArray, ...], contract: Contract) -> None:
        super().__init__()
        self.module = frozen_copy(module)
        self.contract = contract
        self.spec = describe(self.module, example_args)
        low, high = ([bound for part in contract.continuous for bound in getattr(part, end)] for end in ("low", "high"))
        self.register_buffer("low", torch.tensor(low))
        self.register_buffer("high", torch.tensor(high))
        state = self.spec.state
        rest = [arg for index, arg in enumerate(example_args) if state is None or index != state.argument]
        if len(rest) != 1 or not isinstance(rest[0], Mapping) or set(rest[0]) != set(contract.example()):
            raise self.refused("the model", f"takes other observations than its contract's {list(contract.example())}")
        for spec in contract.observations:
            if spec.kind == "text":
                raise self.refused(f"observations.{spec.name}", "is a text, and the engine's models take numbers")

    @abstractmethod
    def feed(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The file's inputs as the engine gives them.

        Args:
            obs: what the model gets, ``[N, ...]`` by name.
        """

    @abstractmethod
    def decide(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The actions that the engine reads from the outputs, by name: choices ``[N]``, numbers ``[N, size]``."""

    def refused(self, place: str, why: str) -> ConfigError:
        """The refusal of a part that the engine cannot express."""
        return ConfigError(f"layout {self.name}: {place} {why}", layout=self.name, field=place)

    def act(self, obs: dict[str, Tensor], state: Any = None) -> tuple[list[Tensor], Tensor | None, Any]:
        """The policy for observations ``[N, ...]``: each head's logits, the numbers within their bounds, the state."""
        args = [obs]
        if self.spec.state is not None:
            args.insert(self.spec.state.argument, state)
        outputs = self.module(*args)
        logits = outputs.get("logits", ())
        heads = list(logits) if isinstance(logits, tuple | list) else [logits]
        numbers = outputs["tanh_mean"].tanh() if "tanh_mean" in outputs else outputs.get("mean")
        if numbers is not None:
            numbers = self.low + (numbers + 1) * (0.5 * (self.high - self.low))
            numbers = torch.minimum(torch.maximum(numbers, self.low), self.high)
        return heads, numbers, outputs.get(STATE)

    def observed(self, spec: ObservationSpec, leaf: Tensor) -> Tensor:
        """An observation as the model gets it, from an engine's floats ``[N, ...]``."""
        shaped = leaf.reshape(-1, *spec.shape)
        return shaped.long() - spec.start if spec.kind == "category" else shaped


class GodotLayout(EngineLayout):
    """For the add-on godot_rl: a flat input for each key of ``get_obs``, all actions in one output.

    The add-on takes the largest of a discrete action's logits, and clamps numbers to -1 to 1. Its ``state_ins`` is the
    same at each step, so a model cannot have a memory.
    """

    name = "godot"
    opset = 17

    def __init__(self, module: nn.Module, example_args: tuple[NestedArray, ...], contract: Contract) -> None:
        super().__init__(module, example_args, contract)
        if self.spec.state is not None:
            raise self.refused("the model", "has a memory, and the add-on keeps none: train it with network.lstm 0")
        for spec in contract.observations:
            if spec.kind == "image":
                raise self.refused(f"observations.{spec.name}", "is a picture, and the add-on's models take numbers")
            if spec.name in ("state_ins", "state_outs", "output"):
                raise self.refused(f"observations.{spec.name}", "has a name that the add-on's models use otherwise")
        for part in contract.actions:
            if part.mask:
                raise self.refused(f"actions.{part.name}.mask", "is true, and the add-on gives its models no masks")
            if part.start:
                raise self.refused(f"actions.{part.name}.start", f"is {part.start}, and the add-on counts from 0")
            if part.kind == "continuous" and (min(part.low) < -1 or max(part.high) > 1):
                bounds = f"{min(part.low):g} to {max(part.high):g}"
                raise self.refused(f"actions.{part.name}", f"has bounds {bounds}, and the add-on clamps to -1 to 1")
        self.inputs = (*(spec.name for spec in contract.observations), "state_ins")
        self.outputs = ("output", "state_outs")
        self.batched = (*self.inputs, *self.outputs)

    def forward(self, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        """``output`` ``[N, ...]``: of a discrete action the logits, of a continuous one the numbers; if there are both
        kinds, log standard deviations follow the numbers, as the add-on expects then."""
        *observed, state_ins = leaves
        specs = self.contract.observations
        obs = {spec.name: self.observed(spec, leaf) for spec, leaf in zip(specs, observed, strict=True)}
        heads, numbers, _ = self.act(obs)
        rest, first, columns = iter(heads), 0, list[Tensor]()
        for part in self.contract.actions:
            if part.kind == "discrete":
                logits = next(rest)
                # Versions up to 0.7 of the add-on begin their search of the largest logit at 0.
                columns.append(logits - logits.amax(-1, keepdim=True) + 1)
                continue
            assert numbers is not None
            columns.append(numbers[:, first : first + part.size])
            first += part.size
            if heads:
                columns.append(torch.full_like(columns[-1], _CERTAIN))
        return torch.cat(columns, -1), state_ins.clone()

    def feed(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `EngineLayout.feed`."""
        rows = {}
        for spec in self.contract.observations:
            rows[spec.name] = (obs[spec.name] + spec.start).reshape(len(obs[spec.name]), -1).astype(np.float32)
        return {**rows, "state_ins": np.ones(len(rows[spec.name]), np.float32)}

    def decide(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `EngineLayout.decide`."""
        decided, first = {}, 0
        for part in self.contract.actions:
            columns = outputs["output"][:, first : first + part.size]
            decided[part.name] = columns.argmax(-1) if part.kind == "discrete" else columns.clip(-1, 1)
            first += part.size * (2 if part.kind == "continuous" and self.contract.discrete else 1)
        return decided


class UnityLayout(EngineLayout):
    """For ML-Agents' inference (Barracuda, Sentis, Inference Engine), as packages 2.0 to 4.0 load it.

    Pictures come as floats from 0 to 1 with their channels first. Stochastic and deterministic outputs are the same.
    """

    memory_size: Tensor

    name = "unity"
    opset = 9  # ML-Agents' own files have it, and every inference since Barracuda takes it
    _OPSET_OF_ENTITIES = 15  # the highest that Sentis 1 takes; 9 has no comparison of floats with zero
    _VERSION = 3.0

    def __init__(self, module: nn.Module, example_args: tuple[NestedArray, ...], contract: Contract) -> None:
        super().__init__(module, example_args, contract)
        for spec in contract.observations:
            if len(spec.shape) > 3:
                raise self.refused(f"observations.{spec.name}", f"has {len(spec.shape)} axes, and a sensor at most 3")
        if any(spec.kind == "entities" for spec in contract.observations):
            self.opset = self._OPSET_OF_ENTITIES
        state = self.spec.state
        self._memory: list[tuple[int, ...]] = []
        self._nest: Any = None
        if state is not None:
            leaves = optree.tree_leaves(state.initial)
            if any(leaf.dtype != np.float32 or leaf.any() for leaf in leaves):
                raise self.refused("the model", "has a memory that does not begin with zeros of float32")
            self._memory = [leaf.shape for leaf in leaves]
            self._nest = optree.tree_structure(state.initial)
        sizes = contract.sizes
        inputs = [f"obs_{index}" for index in range(len(contract.observations))]
        outputs = ["version_number", "memory_size"]
        memory = sum(math.prod(shape) for shape in self._memory)
        constants: dict[str, Any] = {"version_number": [self._VERSION], "memory_size": [memory]}
        for kind, shape in (("continuous", [contract.dimensions] * bool(contract.dimensions)), ("discrete", [sizes])):
            if any(shape):
                outputs += [f"{kind}_actions", f"{kind}_action_output_shape", f"deterministic_{kind}_actions"]
                constants[f"{kind}_action_output_shape"] = shape
        if sizes:
            inputs.append("action_masks")
        if self._memory:
            inputs.append("recurrent_in")
            outputs.append("recurrent_out")
        for name, value in constants.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32))
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.batched = (*inputs, *(name for name in outputs if name not in constants))

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """The outputs in the order of ``outputs``."""
        given = dict(zip(self.inputs, leaves, strict=True))
        obs = {}
        for index, spec in enumerate(self.contract.observations):
            leaf = given[f"obs_{index}"]
            is_last = spec.kind == "image" and spec.layout == "HWC"
            obs[spec.name] = leaf.permute(0, 2, 3, 1) if is_last else self.observed(spec, leaf)
        mask = given.get("action_masks")
        if mask is not None and self.contract.has_mask:
            obs[MASK] = mask
        heads, numbers, state = self.act(obs, self._state(given.get("recurrent_in")))
        outputs = {name: getattr(self, name).clone() for name in self.outputs if name not in self.batched}
        if numbers is not None:
            outputs |= {"continuous_actions": numbers, "deterministic_continuous_actions": numbers.clone()}
        if mask is not None:
            if not self.contract.has_mask:
                by_head = torch.split(mask, list(self.contract.sizes), -1)
                heads = [masked(*pair) for pair in zip(heads, by_head, strict=True)]
            chosen = torch.stack(
                [head.argmax(-1) + part.start for head, part in zip(heads, self.contract.discrete, strict=True)], -1
            )
            outputs |= {"discrete_actions": chosen, "deterministic_discrete_actions": chosen.clone()}
        if state is not None:
            sizes = (math.prod(shape) for shape in self._memory)
            rows = zip(optree.tree_leaves(state), sizes, strict=True)
            outputs["recurrent_out"] = torch.cat([leaf.reshape(-1, 1, size) for leaf, size in rows], -1)
        return tuple(outputs[name] for name in self.outputs)

    def _state(self, memory: Tensor | None) -> Any:
        """The model's state from the engine's ``[N, 1, memory_size]``."""
        if memory is None:
            return None
        leaves, first = [], 0
        for shape in self._memory:
            size = math.prod(shape)
            leaves.append(memory[:, 0, first : first + size].reshape(-1, *shape))
            first += size
        return self._nest.unflatten(leaves)

    def feed(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `EngineLayout.feed`."""
        rows: dict[str, np.ndarray] = {}
        for index, spec in enumerate(self.contract.observations):
            leaf = obs[spec.name] + spec.start if spec.kind == "category" else obs[spec.name]
            leaf = leaf.astype(np.float32) / (255 if leaf.dtype == np.uint8 else 1)
            if spec.kind == "image" and spec.layout == "HWC":
                leaf = np.ascontiguousarray(np.moveaxis(leaf, -1, 1))
            rows[f"obs_{index}"] = leaf if spec.shape else leaf[:, None]
        count = len(rows["obs_0"])
        if "action_masks" in self.inputs:
            mask = obs.get(MASK, np.ones((count, sum(self.contract.sizes))))
            rows["action_masks"] = mask.astype(np.float32)
        if self._memory:
            rows["recurrent_in"] = np.zeros((count, 1, int(self.memory_size)), np.float32)
        return rows

    def decide(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `EngineLayout.decide`."""
        discrete, first = self.contract.discrete, 0
        decided = {part.name: outputs["discrete_actions"][:, index] for index, part in enumerate(discrete)}
        for part in self.contract.continuous:
            decided[part.name] = outputs["continuous_actions"][:, first : first + part.size]
            first += part.size
        return decided


LAYOUTS: dict[str, type[EngineLayout]] = {layout.name: layout for layout in (GodotLayout, UnityLayout)}


@dataclass(frozen=True)
class WrittenLayout:
    """A file that was written, and compared with what brayx serves.

    Attributes:
        file: its name.
        bytes: its size.
        opset: its version of ONNX's operators.
        inputs, outputs: names in the graph.
        steps: number of steps in which its actions were compared.
        difference: the largest difference of a number from the served one.
    """

    file: str
    bytes: int
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: int
    difference: float

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.bytes} bytes, opset {self.opset}\n"
            f"  {', '.join(self.inputs)} -> {', '.join(self.outputs)}\n"
            f"  acts as brayx serves it: largest difference {self.difference:.2g} in {self.steps} steps"
        )


def write_layout(
    file: Path, module: nn.Module, example_args: tuple[NestedArray, ...], contract: Contract, layout: str
) -> WrittenLayout:
    """Writes a contract's model for an engine, after a comparison of its actions with the served ones.

    Args:
        file: the file to write.
        module: the model with its weights.
        example_args: its example arguments.
        contract: the game's.
        layout: a name from `LAYOUTS`.

    Raises:
        ConfigError: the engine cannot express a part of the contract or the model; or the file cannot be written.
        ModelError: the model cannot be exported. `EngineMismatch`: its actions differ from the served ones.
    """
    wrapped = LAYOUTS[layout](module, example_args, contract).eval()
    rows = random_rows(contract, 2, np.random.default_rng(0))
    fed = wrapped.feed(rows)
    try:
        with exporting, torch.inference_mode():
            leaves = tuple(torch.from_numpy(fed[name]) for name in wrapped.inputs)
            proto = trace(
                wrapped, leaves, wrapped.inputs, wrapped.outputs, batched=wrapped.batched, opset=wrapped.opset
            )
    except Exception as error:
        raise ModelError(f"layout {layout}: the model cannot be exported to ONNX: {first_line(error)}") from error
    difference = _compared(wrapped, proto)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(proto)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or first_line(error)}") from error
    return WrittenLayout(
        file.name, len(proto), wrapped.opset, wrapped.inputs, wrapped.outputs, _ROWS * _STEPS, difference
    )


def random_rows(contract: Contract, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Observations as a model gets them, ``[count, ...]``: any that the contract allows, with masks that leave a
    choice."""
    rows = {}
    for spec in contract.observations:
        shape = (count, *spec.shape)
        if spec.model_dtype.kind == "f":
            rows[spec.name] = rng.normal(0, 2, shape).astype(np.float32)
        else:
            most = spec.size if spec.kind == "category" else 256
            rows[spec.name] = rng.integers(0, most, shape).astype(spec.model_dtype)
        if spec.kind == "entities":
            rows[spec.name][:, 1:][rng.random((count, spec.shape[0] - 1)) < 0.3] = 0
    if contract.has_mask:
        masks = [rng.random((count, size)) < 0.5 for size in contract.sizes]
        for mask, size in zip(masks, contract.sizes, strict=True):
            mask[np.arange(count), rng.integers(0, size, count)] = True
        rows[MASK] = np.concatenate(masks, -1).astype(np.uint8)
    return rows


def _compared(layout: EngineLayout, proto: bytes) -> float:
    """The largest difference of the file's numbers from the served ones, over games that each side plays with its own
    memory.

    Raises:
        EngineMismatch: an action, or the logit of a choice, differs by more than `Tolerance` allows an engine.
    """
    session, rng = open_session(proto, 1), np.random.default_rng(1)
    contract, state_spec = layout.contract, layout.spec.state
    state = None
    if state_spec is not None:
        state = optree.tree_map(lambda leaf: torch.zeros(_ROWS, *leaf.shape), state_spec.initial)
    memory: dict[str, np.ndarray] = {}
    worst = 0.0
    for step in range(_STEPS):
        rows = random_rows(contract, _ROWS, rng)
        args: list[Any] = [{name: torch.from_numpy(leaf) for name, leaf in rows.items()}]
        if state_spec is not None:
            args.insert(state_spec.argument, state)
        with torch.inference_mode():
            outputs = layout.module(*args)
        state = outputs.get(STATE)
        fed = layout.feed(rows) | memory
        used = {value.name for value in session.get_inputs()}
        found = session.run(list(layout.outputs), {name: leaf for name, leaf in fed.items() if name in used})
        got = dict(zip(layout.outputs, found, strict=True))
        memory = {"recurrent_in": got["recurrent_out"]} if "recurrent_out" in got else {}
        policy = {
            name: optree.tree_map(lambda leaf: leaf.numpy(), outputs[name]) for name in _POLICY if name in outputs
        }
        worst = max(worst, _difference(layout, layout.decide(got), policy, step))
    return worst


def _difference(layout: EngineLayout, decided: Mapping[str, np.ndarray], policy: Mapping[str, Any], step: int) -> float:
    contract, worst = layout.contract, 0.0
    served = [named_actions(contract, action) for action in greedy(policy)]
    for part in contract.actions:
        got = decided[part.name]
        if part.kind == "discrete":
            heads = policy["logits"] if isinstance(policy["logits"], tuple | list) else (policy["logits"],)
            logits = heads[contract.discrete.index(part)]
            want, got = logits.max(-1), logits[np.arange(len(logits)), got - part.start]
        else:
            # The noise of float32 grows with the sums and the bounds: compare on the model's scale, as engines are.
            want, half = np.array([action[part.name] for action in served]), part.bounds[2]
            worst = max(worst, float(np.abs(got - want).max()))
            want, got = want / half, got / half
        (error,) = compare([got], [want], Tolerance(), [peak(want)])
        if not error.excess <= 0:
            raise EngineMismatch(
                f"layout {layout.name}: the file differs from what brayx serves: {part.name}, {error}, at step {step}",
                leaf=part.name,
                **error.measured(),
                step=step,
            )
    return worst
