"""TensorRT on an NVIDIA GPU: a plan is built once per graph, cached on disk, and refitted for each set of weights.

Optional: ``pip install 'brayx[tensorrt]'``. A plan depends on the graph, the TensorRT version and the GPU, so its name
in the cache holds all three. It does not depend on the weights: each refit is compared with torch before it serves,
because some TensorRT releases refit wrongly (the release notes of 11.3 warn of a dropped bias). GPU tensors are
torch's. Written against the documented Python API of TensorRT 10 and 11; it has not been run yet. Knows nothing of
versions or batching.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brayx.engines.base import Engine, LeafSpec, check_weights, layout_of
from brayx.engines.export import check_same, noisy_leaves, peak, to_onnx, verify, with_constants
from brayx.engines.torch import TorchEngine, module_weights
from brayx.errors import BadWeights, ConfigError, ModelError
from brayx.types import NestedArray, Weights

_CHECKED_BATCHES = (1, 2)
_VERIFIED_BATCHES = (1, 2, 5)
_TYPICAL = 64
"""Batch size that a plan is tuned for, where batches may be larger."""
_ROWS = 64


class _RefittedPlan:
    """One weight set: a separate plan in GPU memory, refitted with these weights."""

    __slots__ = ("context", "engine", "lock", "stream")

    def __init__(self, engine: Any, device: torch.device) -> None:
        self.engine = engine
        self.context = engine.create_execution_context()
        if self.context is None:
            raise ModelError("TensorRT made no execution context; its log says why, most often the GPU's memory")
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.lock = threading.Lock()  # a context holds one run's shapes and addresses


class TensorRTEngine(Engine):
    """Builds or finds the plan of the module's graph, verifies it against torch, and runs it.

    Args:
        module: takes and returns nested arrays ``[B, ...]``.
        example_args: a tuple of example arguments, each leaf with a batch axis of at least 1.
        max_batch_size: a model's option of this name: the largest batch; negative for a fixed batch size.
        verify_outputs: compare with torch before serving, and at each `bind`.
        cache: folder of plans; if absent ``BRAYX_CACHE``, else ``brayx`` in the user's cache folder. Plans are
            executed, so keep the folder private.

    Raises:
        ConfigError: TensorRT or a GPU is missing.
        ModelError: the module cannot be exported, or TensorRT cannot build it.
        EngineMismatch: the plan does not compute what torch computes.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        example_args: tuple[NestedArray, ...],
        *,
        max_batch_size: int = 64,
        verify_outputs: bool = True,
        cache: Path | None = None,
    ) -> None:
        self._trt = _tensorrt()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._graph = to_onnx(module, example_args)
        self._verified = verify_outputs
        self._sizes = plan_sizes(max_batch_size)
        self.spec = self._graph.spec
        self.inputs, self.outputs = self._graph.inputs, self._graph.outputs
        self.initial = module_weights(module)
        self.layout = layout_of(self.initial)
        self._reference = TorchEngine(module, example_args)
        self._rows = noisy_leaves(example_args, _ROWS)
        self._logger = self._trt.Logger(self._trt.Logger.ERROR)
        self._runtime = self._trt.Runtime(self._logger)
        self.plan = self._find_plan(cache or _cache_folder())
        if verify_outputs:
            verify(self, module, example_args, batch_sizes=_VERIFIED_BATCHES)

    def bind(self, weights: Weights) -> _RefittedPlan:
        """Like `Engine.bind`, but slow; raises `EngineMismatch` unless the refitted plan computes what torch does."""
        check_weights(self.layout, weights, finite=False)
        with torch.cuda.device(self._device):
            engine = self._deserialised(self.plan)
            refitter = self._trt.Refitter(engine, self._logger)
            parser = self._trt.OnnxParserRefitter(refitter, self._logger)
            if not parser.refit_from_bytes(with_constants(self._graph, weights)) or not refitter.refit_cuda_engine():
                raise BadWeights(f"TensorRT took no new weights; it lacks {list(refitter.get_missing_weights())[:3]}")
            bound = _RefittedPlan(engine, self._device)
        if self._verified:
            self._compare(bound, weights)
        return bound

    def packed(self, bound: _RefittedPlan) -> bytes:
        """A serialised plan with the bound weights, to run without a refit; `plan` holds the weights it was built
        with."""
        with torch.cuda.device(self._device):
            plan = bound.engine.serialize()
        if plan is None:
            raise ModelError("TensorRT could not serialise a refitted plan; its log says why")
        return bytes(plan)

    def unpacked(self, plan: bytes) -> _RefittedPlan:
        """Loads a plan from `packed`, to run with the weights inside it."""
        with torch.cuda.device(self._device):
            return _RefittedPlan(self._deserialised(plan), self._device)

    def _deserialised(self, plan: bytes) -> Any:
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise ModelError("TensorRT could not load its plan; its log says why")
        return engine

    def run(self, bound: _RefittedPlan, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        size = len(inputs[0])
        if not 1 <= size <= self._sizes[-1]:
            raise ModelError(f"batch size: TensorRT's plan takes 1 to {self._sizes[-1]}, got {size}")
        try:
            with bound.lock, torch.cuda.device(self._device), torch.cuda.stream(bound.stream):
                # Keep references until the end: the context holds addresses only.
                given = [torch.from_numpy(np.array(leaf)).to(self._device, non_blocking=True) for leaf in inputs]
                outputs = [_empty(leaf, size, self._device) for leaf in self.spec.outputs]
                for name, tensor in zip(self._graph.inputs, given, strict=True):
                    # The plan may lack an input that the graph does not use.
                    if bound.engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT:
                        _done(bound.context.set_input_shape(name, tuple(tensor.shape)), "set_input_shape", name)
                        _done(bound.context.set_tensor_address(name, tensor.data_ptr()), "set_tensor_address", name)
                for name, tensor in zip(self._graph.outputs, outputs, strict=True):
                    _done(bound.context.set_tensor_address(name, tensor.data_ptr()), "set_tensor_address", name)
                _done(bound.context.execute_async_v3(bound.stream.cuda_stream), "execute_async_v3", f"batch of {size}")
                host = [tensor.to("cpu", non_blocking=True) for tensor in outputs]
                bound.stream.synchronize()
                return [tensor.numpy().copy() for tensor in host]
        except RuntimeError as error:
            raise ModelError(f"TensorRT failed on a batch of {size}: {error}") from error

    def _compare(self, bound: _RefittedPlan, weights: Weights) -> None:
        """Raises `EngineMismatch` unless the refitted plan computes what torch computes with the same weights."""
        reference = self._reference.bind(weights)
        peaks = [peak(leaf) for leaf in self._reference.run(reference, self._rows)]
        for size in _CHECKED_BATCHES:
            inputs = [leaf[:size] for leaf in self._rows]
            got, want = self.run(bound, inputs), self._reference.run(reference, inputs)
            what = "TensorRT differs from torch after a refit"
            check_same(what, self.spec.outputs, got, want, self.tolerance, peaks)

    def _find_plan(self, cache: Path) -> bytes:
        device = torch.cuda.get_device_properties(self._device)
        about = f"{device.name} {device.major}.{device.minor}"
        path = cache / "tensorrt" / f"{cache_key(self._graph.proto, self._trt.__version__, about, self._sizes)}.plan"
        if path.exists():
            plan = path.read_bytes()
            if self._runtime.deserialize_cuda_engine(plan) is not None:  # None if the file is incomplete
                return plan
        plan = self._build()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(plan)
        os.replace(file.name, path)  # atomic: other replicas may write the same plan
        return plan

    def _build(self) -> bytes:
        trt = self._trt
        builder = trt.Builder(self._logger)
        network = builder.create_network()
        parser = trt.OnnxParser(network, self._logger)
        if not parser.parse(with_constants(self._graph, self.initial)):
            said = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
            raise ModelError(f"TensorRT cannot take the model: {said or 'it does not say why'}")
        config = builder.create_builder_config()
        config.set_flag(trt.BuilderFlag.REFIT)
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default, and 0.1 % off
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            row = tuple(tensor.shape)[1:]
            profile.set_shape(tensor.name, *((size, *row) for size in self._sizes))
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise ModelError("TensorRT could not build the model; its log says why")
        return bytes(plan)


def plan_sizes(max_batch_size: int) -> tuple[int, int, int]:
    """Least, typical and largest batch of a plan for ``max_batch_size``; at least as large as `verify` needs."""
    largest = max(abs(max_batch_size), *_VERIFIED_BATCHES)
    return 1, abs(max_batch_size) if max_batch_size < 0 else min(_TYPICAL, max_batch_size), largest


def cache_key(graph: bytes, version: str, device: str, sizes: Sequence[int]) -> str:
    """Name of a plan: a hash of the graph, TensorRT version, GPU and batch sizes.

    Args:
        graph: ONNX model with weights as inputs, so that it does not depend on their values.
        version: TensorRT's version.
        device: name and compute capability of the GPU.
        sizes: least, typical and largest batch.
    """
    facts = "\n".join([hashlib.sha256(graph).hexdigest(), version, device, *map(str, sizes)])
    return hashlib.sha256(facts.encode()).hexdigest()


def _tensorrt() -> Any:
    """The imported module; raises `ConfigError` that says what to install."""
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError as error:
        raise ConfigError(
            f"engine 'tensorrt' is not installed ({error}): pip install 'brayx[tensorrt]', with an NVIDIA GPU",
            engine="tensorrt",
        ) from None
    if not torch.cuda.is_available():
        raise ConfigError("engine 'tensorrt' needs an NVIDIA GPU, but torch finds none", engine="tensorrt")
    return trt


def _cache_folder() -> Path:
    given = os.environ.get("BRAYX_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "brayx"


def _empty(leaf: LeafSpec, size: int, device: torch.device) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
    return torch.empty((size, *leaf.shape), dtype=dtype, device=device)


def _done(succeeded: bool, what: str, graph: str) -> None:
    if not succeeded:
        raise ModelError(f"TensorRT's {what} failed for {graph}; its log says why")
