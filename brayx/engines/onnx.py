"""ONNX Runtime with weights as bound inputs: one session serves any number of weight sets without a re-export.

A bound weight set has an IOBinding that already holds its weights; a run adds the observations and copies the results
out. Measured for a 64x64 MLP on one thread at batch 1: 9 us, 7 us of them in the graph; torch eager takes 50 us.
Knows nothing of versions or batching.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from brayx.engines.base import BatchBuffers, Engine, check_weights, layout_of
from brayx.engines.chain import chain_of, chained
from brayx.engines.export import OnnxGraph, check_same, noisy_leaves, peak, to_onnx, verify, with_constants
from brayx.engines.torch import module_weights
from brayx.errors import ModelError, first_line
from brayx.types import NestedArray, Weights


def open_session(model: bytes | Path, threads: int) -> ort.InferenceSession:
    """Opens a serialised model or its file on the CPU, with ``threads`` threads per run.

    Raises:
        ModelError: ONNX Runtime cannot load it.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Run errors are raised. ONNX Runtime would also print them to stderr, and clients can cause many.
    options.log_severity_level = 4
    source = model if isinstance(model, bytes) else str(model)
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no other common base
        raise ModelError(f"ONNX Runtime cannot load the model: {first_line(error)}") from error


class _Bound:
    """One weight set on the session."""

    __slots__ = ("batch_size", "binding", "lock", "values")

    def __init__(self, binding: Any, values: list[Any]) -> None:
        self.binding = binding
        self.values = values  # the binding does not keep the arrays alive
        self.batch_size = -1
        self.lock = threading.Lock()  # a binding holds one run's inputs and outputs


_SEATED = (1, 5)
"""Batch sizes at which seats are compared with runs."""


class OnnxEngine(Engine):
    """Exports the module once, verifies the result against torch, and runs it.

    Args:
        module: takes and returns nested arrays ``[B, ...]``.
        example_args: a tuple of example arguments, each leaf with a batch axis of at least 1.
        threads: threads per run; more than one helps large convolutions only.
        verify_outputs: compare with torch before serving; takes tens of milliseconds.
        traced: export by tracing where possible, in a tenth of the time, see `to_onnx`. A traced graph that ONNX
            Runtime or the comparison rejects is exported again without tracing, so keep the comparison on.

    Raises:
        ModelError: the module cannot be exported.
        EngineMismatch: the exported graph does not compute what torch computes.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        example_args: tuple[NestedArray, ...],
        *,
        threads: int = 1,
        verify_outputs: bool = True,
        traced: bool = False,
    ) -> None:
        self.initial = module_weights(module)
        self.layout = layout_of(self.initial)
        graph = to_onnx(module, example_args, traced=traced)
        try:
            self._open(graph, module, example_args, threads, verify_outputs)
        except ModelError:
            if not graph.traced:
                raise
            self._open(to_onnx(module, example_args), module, example_args, threads, verify_outputs)

    def _open(
        self,
        graph: OnnxGraph,
        module: torch.nn.Module,
        example_args: tuple[NestedArray, ...],
        threads: int,
        verify_outputs: bool,
    ) -> None:
        """Opens ``graph`` in ONNX Runtime and compares it with torch."""
        self.graph, self.spec = graph, graph.spec
        self._inputs, self._outputs, self._weights = graph.inputs, graph.outputs, graph.weights
        self._session = open_session(graph.proto, threads)
        self._chain = chain_of(graph.proto, self._inputs, self._outputs, self._weights.values())
        # Inputs that the graph does not use are optimised away and must not be bound.
        used = {value.name for value in self._session.get_inputs()}
        self._fed = [(index, name) for index, name in enumerate(self._inputs) if name in used]
        if verify_outputs:
            verify(self, module, example_args)
            if self._chain:
                self._verify_seats(example_args)

    def bind(self, weights: Weights) -> _Bound:
        check_weights(self.layout, weights, finite=False)
        binding = self._session.io_binding()
        values = []
        for name, graph_name in self._weights.items():
            array = weights[name]
            # ONNX Runtime reads the array in place: shared memory stays shared, but must not be written to.
            array = array.copy() if array.flags.writeable or not array.flags.c_contiguous else array
            value = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(graph_name, value)
            values.append((array, value))
        return _Bound(binding, values)

    def _verify_seats(self, example_args: tuple[NestedArray, ...]) -> None:
        """Raises `EngineMismatch` unless a seat computes the same as `run`: it may use NumPy instead."""
        rows, bound = noisy_leaves(example_args, _SEATED[-1]), self.bind(self.initial)
        for size in _SEATED:
            inputs, seat = [leaf[:size] for leaf in rows], self.seat(bound, size)
            for room, given in zip(seat.inputs, inputs, strict=True):
                room[...] = given
            seat.run()
            want = self.run(bound, inputs)
            peaks = [peak(output) for output in want]
            check_same("a seat differs from ONNX Runtime", self.spec.outputs, seat.outputs, want, self.tolerance, peaks)

    def run(self, bound: _Bound, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        binding = bound.binding
        batch_size = len(inputs[0])
        with bound.lock:
            try:
                for index, name in self._fed:
                    binding.bind_cpu_input(name, inputs[index])
                if batch_size != bound.batch_size:  # a bound output buffer fits one batch size only
                    binding.clear_binding_outputs()
                    for name in self._outputs:
                        binding.bind_output(name)
                    bound.batch_size = batch_size
                self._session.run_with_iobinding(binding)
                outputs: list[np.ndarray] = binding.copy_outputs_to_cpu()
                return outputs
            except Exception as error:  # ONNX Runtime's exceptions have no other common base
                bound.batch_size = -1
                raise _failed(batch_size, error) from error

    def seat(self, bound: _Bound, batch_size: int) -> BatchBuffers:
        inputs, outputs = self.spec.room(batch_size)
        if self._chain:
            weights = {name: array for name, (array, _) in zip(self._weights.values(), bound.values, strict=True)}
            computed = chained(self._chain, weights, *inputs, *outputs)
            if computed is not None:
                return BatchBuffers(inputs, outputs, computed, (bound.values,))
        binding = self._session.io_binding()
        for name, (_, value) in zip(self._weights.values(), bound.values, strict=True):
            binding.bind_ortvalue_input(name, value)
        for index, name in self._fed:
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(inputs[index]))
        for name, array in zip(self._outputs, outputs, strict=True):
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        execute = self._session.run_with_iobinding

        def run() -> None:
            try:
                execute(binding)
            except Exception as error:  # ONNX Runtime's exceptions have no other common base
                raise _failed(batch_size, error) from error

        # The binding does not keep the arrays alive.
        return BatchBuffers(inputs, outputs, run, (bound.values,))


def standalone(module: torch.nn.Module, example_args: tuple[NestedArray, ...]) -> bytes:
    """The module as a self-contained ONNX model with its weights inside, verified against torch.

    Raises:
        ModelError: the module cannot be exported.
    """
    return with_constants(OnnxEngine(module, example_args, traced=True).graph, module_weights(module))


def _failed(batch_size: int, error: Exception) -> ModelError:
    return ModelError(f"ONNX Runtime failed on a batch of {batch_size}: {error}")
