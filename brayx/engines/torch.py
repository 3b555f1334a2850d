"""The torch engine. Uncompiled and on the CPU it is the reference that every other engine is verified against.

Also extracts a module's weights and signature. Knows nothing of ONNX.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optree
import torch

from brayx.engines.base import Engine, LeafSpec, ModelSpec, StateSpec, check_weights, layout_of
from brayx.engines.normalised import normalised, normalises
from brayx.engines.scaling import completed, from_weights
from brayx.errors import ConfigError, ModelError, first_line
from brayx.nets.recurrent import STATE, state_argument
from brayx.spaces import LIMITS_ATTRIBUTE, Limits
from brayx.types import NestedArray, Weights

_PINNED_FROM_BYTES = 64 * 1024
"""CUDA stages smaller copies in an internal buffer and does not wait for them; pinning those would cost more."""


class TorchEngine(Engine):
    """Runs a copy of the module, in eval mode, for each bound weight set, so that weight sets share no state.

    The first engine on a GPU turns TF32 convolutions off for the whole process: with them, torch's default, outputs
    differ from the CPU's by 0.1 %.

    Args:
        module: takes and returns nested arrays ``[B, ...]``.
        example_args: a tuple of example arguments, each leaf with a batch axis of at least 1.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        compiled: run through ``torch.compile``. The constructor compiles, which takes seconds to minutes; all weight
            sets share the compiled code.

    Raises:
        ConfigError: torch has no such device.
        ModelError: the module does not fit its example, or does not compile.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        example_args: tuple[NestedArray, ...],
        *,
        device: str = "cpu",
        compiled: bool = False,
    ) -> None:
        self._device = find_device(device)
        self._module = frozen_copy(module)
        self.spec = describe(self._module, example_args)
        self.initial = module_weights(self._module)
        self.layout = layout_of(self.initial)
        self._compiled: Callable[..., Any] | None = None
        if self._device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = False
            self._module.to(self._device)
        if compiled:
            from torch._inductor import config as inductor

            inductor.compile_threads = 1  # otherwise compiling leaves a pool of processes behind
            self._compiled = torch.compile(self._call, dynamic=True)
            bound = self.bind(self.initial)
            for batch_size in (2, 3, 1):  # torch compiles batch size 1 separately
                self.run(bound, example_leaves(example_args, batch_size))

    def bind(self, weights: Weights) -> torch.nn.Module:
        check_weights(self.layout, weights, finite=False)
        module = copy.deepcopy(self._module)
        module.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
        return module

    def run(self, bound: torch.nn.Module, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        try:
            with torch.inference_mode():
                if self._device.type == "cuda":
                    return self._run_on_gpu(bound, inputs)
                # Copy inputs, since torch warns about read-only arrays, and outputs, since one may be an input.
                leaves = [torch.tensor(array) for array in inputs]
                return [leaf.numpy().copy() for leaf in self._forward(bound, leaves)]
        except Exception as error:  # user code: it may raise anything
            cause = f"{type(error).__name__}: {error}"
            raise ModelError(f"the model failed on a batch of {len(inputs[0])}: {cause}") from error

    def _run_on_gpu(self, bound: torch.nn.Module, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        leaves = [self._to_gpu(array) for array in inputs]
        # Start all copies to pinned memory, then wait once.
        outputs = [leaf.to("cpu", non_blocking=True) for leaf in self._forward(bound, leaves)]
        torch.cuda.current_stream(self._device).synchronize()
        return [leaf.numpy().copy() for leaf in outputs]

    def _to_gpu(self, array: np.ndarray) -> torch.Tensor:
        if array.nbytes < _PINNED_FROM_BYTES:
            return torch.tensor(array).to(self._device, non_blocking=True)
        # torch caches freed pinned memory, and does not reuse it while a copy still reads it.
        pinned = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
        np.copyto(pinned.numpy(), array)
        return pinned.to(self._device, non_blocking=True)

    def _forward(self, bound: torch.nn.Module, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._compiled is not None:
            # Weights are arguments: otherwise each weight set would be compiled separately.
            weights = dict(bound.named_parameters(remove_duplicate=False))
            outputs = self._compiled({**weights, **dict(bound.named_buffers(remove_duplicate=False))}, leaves)
        else:
            outputs = bound(*self.spec.input_tree.unflatten(leaves))
        return optree.tree_leaves(outputs)

    def _call(self, weights: dict[str, torch.Tensor], leaves: list[torch.Tensor]) -> Any:
        return torch.func.functional_call(self._module, weights, tuple(self.spec.input_tree.unflatten(leaves)))


def find_device(name: str) -> torch.device:
    """The torch device called ``name``.

    Raises:
        ConfigError: it is neither cpu nor cuda, or torch does not find it.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}, expected cpu or cuda", device=name) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}, expected cpu or cuda", device=name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but torch finds {torch.cuda.device_count()} GPUs", device=name)
    return device


def frozen_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy for acting: on the CPU, in eval mode, without gradients. The original stays unchanged."""
    return copy.deepcopy(module).cpu().eval().requires_grad_(False)


def initialise_lazy(module: torch.nn.Module, example_args: tuple[NestedArray, ...]) -> None:
    """Initialises lazy layers, such as ``LazyLinear``, by running the module on its example.

    Raises:
        ModelError: the module fails on its example, or does not use all lazy layers.
    """
    if not _lazy_names(module):
        return
    arguments: NestedArray = example_args
    modes = [(part, part.training) for part in module.modules()]
    module.eval()  # so that a batch norm does not update its statistics
    try:
        with torch.no_grad():
            module(*optree.tree_map(torch.as_tensor, arguments))
    except Exception as error:
        raise ModelError(f"the model fails on its own forward_args: {first_line(error)}") from error
    finally:
        for part, training in modes:
            part.training = training
    if names := _lazy_names(module):
        raise ModelError(
            f"the model's {names[0]} has no size, because forward does not use its lazy layer; expected a layer with "
            "fixed sizes, such as Linear",
            leaf=names[0],
        )


def _lazy_names(module: torch.nn.Module) -> list[str]:
    named = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in named if torch.nn.parameter.is_lazy(tensor)]


def with_weights(module: torch.nn.Module, weights: Weights) -> torch.nn.Module:
    """A copy of the module with these weights; it normalises its observation if scalings are among them.

    Raises:
        BadWeights: the weights do not fit this module.
    """
    scalings = from_weights(weights)
    module = normalised(module, scalings) if scalings and not normalises(module) else copy.deepcopy(module)
    layout = layout_of(module_weights(module))
    weights = completed(layout, weights)
    check_weights(layout, weights)
    module.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    return module


def module_weights(module: torch.nn.Module) -> Weights:
    """Copies of the module's parameters and buffers by `state_dict` name.

    Raises:
        ModelError: one has a dtype that NumPy lacks, such as bfloat16.
    """
    return {name: _array(f"weight {name!r}", tensor).copy() for name, tensor in module.state_dict().items()}


def example_leaves(example_args: tuple[NestedArray, ...], batch_size: int | None = None) -> list[np.ndarray]:
    """Leaves of the example, with rows repeated up to ``batch_size`` if given.

    Raises:
        ModelError: a leaf has no batch axis, or the leaves have different batch sizes.
    """
    nested: NestedArray = example_args
    leaves = [np.asarray(leaf) for leaf in optree.tree_leaves(nested)]
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        shapes = [list(leaf.shape) for leaf in leaves]
        raise ModelError(f"every leaf of the example needs the same batch axis of at least 1, got shapes {shapes}")
    if batch_size is None:
        return leaves
    rows = np.arange(batch_size) % len(leaves[0])
    return [np.ascontiguousarray(leaf[rows]) for leaf in leaves]


def describe(module: torch.nn.Module, example_args: tuple[NestedArray, ...]) -> ModelSpec:
    """The signature of ``module``, determined by running it on the example.

    Raises:
        ModelError: the example has no batch axis, the module fails on it, or an output lacks the batch axis.
    """
    if not isinstance(example_args, tuple):
        raise ModelError(f"forward_args must be a tuple of arguments, got {type(example_args).__name__}")
    arrays = example_leaves(example_args, batch_size=2)
    nested: NestedArray = example_args
    input_tree = optree.tree_structure(nested)
    try:
        with torch.inference_mode():
            outputs = module(*input_tree.unflatten([torch.as_tensor(array) for array in arrays]))
    except Exception as error:
        shapes = [f"{list(array.shape)} {array.dtype}" for array in arrays]
        raise ModelError(f"the model fails on its own forward_args {shapes}: {error}") from error
    names = _argument_names(module, len(example_args))
    input_paths = ["/".join([names[path[0]], *map(str, path[1:])]) for path in optree.tree_paths(nested)]
    output_paths = ["/".join(map(str, path)) or "output" for path in optree.tree_paths(outputs)]
    results = optree.tree_leaves(outputs)
    for path, leaf in zip(output_paths, results, strict=True):
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] != 2:
            got = f"shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise ModelError(f"output {path!r} must be a tensor [B, ...]; for B = 2 it is {got}", leaf=path)
    limits = limits_declared(module)
    spec = ModelSpec(
        inputs=tuple(
            LeafSpec(path, a.shape[1:], a.dtype, limits.get(path)) for path, a in zip(input_paths, arrays, strict=True)
        ),
        outputs=tuple(
            LeafSpec(path, tuple(leaf.shape[1:]), _array(f"output {path!r}", leaf).dtype)
            for path, leaf in zip(output_paths, results, strict=True)
        ),
        input_tree=input_tree,
        output_tree=optree.tree_structure(outputs),
    )
    return replace(spec, state=_state(module, spec, outputs, example_args))


def limits_declared(module: torch.nn.Module) -> dict[str, Limits]:
    """The limits that a module declares for whole numbers in its arguments, by path."""
    return getattr(module, LIMITS_ATTRIBUTE, {})


def _check_declared(module: torch.nn.Module, outputs: Sequence[str]) -> None:
    """Refuses a model whose argument and output ``state`` do not match its declaration ``is_recurrent``.

    Args:
        module: the model, recurrent or not.
        outputs: names of its outputs.

    Raises:
        ModelError: the declaration is not a bool, or missing; or the model is declared recurrent, but has no such
            argument or output.
    """
    declared = getattr(module, "is_recurrent", None)
    arguments = list(inspect.signature(module.forward).parameters)
    if declared is None:
        if STATE in outputs and STATE in arguments:
            raise ModelError(
                "the model has an argument and an output 'state', but does not declare whether it is recurrent: "
                "expected is_recurrent = True or False in its class"
            )
    elif not isinstance(declared, bool):
        raise ModelError(f"the model's is_recurrent is {declared!r}, expected True or False")
    elif declared:
        for what, names in (("argument", arguments), ("output", outputs)):
            if STATE not in names:
                raise ModelError(f"the model declares is_recurrent = True: expected an {what} 'state', got {names}")


def _state(
    module: torch.nn.Module, spec: ModelSpec, outputs: Any, example_args: tuple[NestedArray, ...]
) -> StateSpec | None:
    """Positions of a recurrent model's state; None for other models.

    Raises:
        ModelError: the model contradicts its declaration, or its output state has another layout than its input state.
    """
    _check_declared(module, sorted(map(str, outputs)) if isinstance(outputs, Mapping) else ())
    argument = state_argument(module)
    if argument is None:
        return None
    example: NestedArray = example_args
    result: NestedArray = outputs
    inputs = tuple(i for i, path in enumerate(optree.tree_paths(example)) if path[0] == argument)
    results = tuple(i for i, path in enumerate(optree.tree_paths(result)) if path[0] == STATE)
    ours, theirs = [spec.inputs[i] for i in inputs], [spec.outputs[i] for i in results]
    if ours != theirs:
        raise ModelError(
            f"the output state must have the layout of the input state, [{'; '.join(map(str, ours))}], "
            f"got [{'; '.join(map(str, theirs))}]"
        )
    initial = optree.tree_map(lambda leaf: np.array(np.asarray(leaf)[0]), example_args[argument])
    return StateSpec(argument, inputs, results, initial)


def _array(what: str, tensor: torch.Tensor) -> np.ndarray:
    try:
        array: np.ndarray = tensor.detach().cpu().numpy()
    except TypeError:
        raise ModelError(f"{what} is {tensor.dtype}, which NumPy lacks: use float32") from None
    return array


def _argument_names(module: torch.nn.Module, count: int) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds]
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]
