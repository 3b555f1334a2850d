"""A bundle: a model exported for other runtimes, with sample inputs and outputs and a report.

    bundle.json          inputs, outputs and state with their names in the graph; files; index of the samples
    report.json          each file against torch: errors, latencies, bytes
    model.onnx           float32; model.int8.onnx: quantised; model.plan: TensorRT, for one kind of GPU
    samples/*.bin        little-endian, in C order

Any language can read these files. JSON has no infinity and no NaN: they are written as the strings ``Infinity``,
``-Infinity`` and ``NaN``, which Python's `float` and JavaScript's `Number` parse. Knows nothing of MLflow or of where
a model comes from.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optree
import torch

from brayx.engines.base import LeafSpec, ModelSpec, StateSpec, Tolerance
from brayx.engines.export import (
    STEPS,
    LeafError,
    OnnxGraph,
    Run,
    carried,
    compare,
    noisy_leaves,
    peak,
    to_onnx,
    worst_of,
)
from brayx.engines.torch import TorchEngine
from brayx.errors import ConfigError, ModelError, first_line
from brayx.temporary import temporary_folder
from brayx.types import NestedArray

RUNTIMES = ("onnx", "int8", "tensorrt")
_FILES = {"onnx": "model.onnx", "int8": "model.int8.onnx", "tensorrt": "model.plan"}
_DOCUMENTS = ("bundle.json", "report.json")
_SAMPLE_FILE = re.compile(r"samples/(in|out)-[0-9]+-[A-Za-z0-9-]*[.]bin")
_SAMPLES = 16
"""Rows of samples in a bundle."""
_ROWS = 256
"""Rows of noise, where no samples were recorded."""
_PLANNED = 64
"""Least `max_batch_size` of a TensorRT plan; larger where larger batches are compared."""
_LATENCY_RUNS = 1000
_LATENCY_S = 1.0


@dataclass(frozen=True)
class Samples:
    """Inputs for calibration, for comparison, and for the bundle's samples.

    Attributes:
        leaves: input leaves ``[N, ...]``, N at least 1.
        source: their origin, for the report.
    """

    leaves: Sequence[np.ndarray]
    source: str

    @staticmethod
    def of_example(example_args: tuple[NestedArray, ...]) -> Samples:
        """The example's rows, with noise added to floats, for a model without recorded inputs."""
        return Samples(noisy_leaves(example_args, _ROWS), "the model's example arguments with noise")

    def half(self, which: int) -> list[np.ndarray]:
        """Every second row, from row ``which`` (0 or 1); the only row where there is just one."""
        start = which if len(self.leaves[0]) > 1 else 0
        return [np.ascontiguousarray(leaf[start::2]) for leaf in self.leaves]


def write_bundle(
    folder: Path,
    module: torch.nn.Module,
    example_args: tuple[NestedArray, ...],
    runtimes: Sequence[str],
    samples: Samples,
    *,
    about: Mapping[str, Any] | None = None,
    batch_sizes: Sequence[int] = (1, 8, 64),
    tolerances: Mapping[str, Tolerance] | None = None,
) -> dict[str, Any]:
    """Writes a bundle and returns the contents of its ``report.json``.

    Files are read back before they are measured. Half of the samples calibrate int8, the other half are compared with
    torch. A runtime that fails has no file, and an ``error`` in the report instead of numbers; the export goes on
    unless every runtime fails.

    Args:
        folder: created if absent. A bundle in it is replaced as a whole once the new one is complete; other files stay.
        module: the model with its weights.
        example_args: a tuple of example arguments, each leaf with a batch axis of at least 1.
        runtimes: names from `RUNTIMES`.
        samples: inputs.
        about: JSON values for both documents.
        batch_sizes: sizes to compare and to time.
        tolerances: tolerances by runtime, instead of the engines' own.

    Raises:
        ConfigError: unknown runtime, one that is not installed, or a folder that cannot be written.
        ModelError: every runtime failed; this is the first runtime's error.
    """
    if unknown := [runtime for runtime in runtimes if runtime not in RUNTIMES]:
        raise ConfigError(f"runtime: expected one of {', '.join(RUNTIMES)}, got {unknown[0]!r}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Build inside the folder, so on the same disk: a failed export leaves the old bundle untouched.
        with temporary_folder("bundle", folder) as made:
            report = _make(made, module, example_args, runtimes, samples, about or {}, batch_sizes, tolerances or {})
            _replace(folder, made)
    except OSError as error:
        raise _unwriteable(folder, error) from error
    return report


def check_writeable(folder: Path) -> None:
    """Raises `ConfigError` where `write_bundle` could not write; creates nothing."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwriteable(folder, error) from error


def _unwriteable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write a bundle into {folder}: {error.strerror or first_line(error)}")


def bundle_files(folder: Path) -> list[str]:
    """Relative paths of the bundle's files in ``folder``, ``bundle.json`` last; empty where there is no bundle."""
    try:
        about = json.loads((folder / _DOCUMENTS[0]).read_text())
        named = {*about["files"].values(), *(leaf["samples"] for leaf in (*about["inputs"], *about["outputs"]))}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
    # The document may be another program's: only files with names that a bundle uses count.
    ours = (name for name in named if name in _FILES.values() or _SAMPLE_FILE.fullmatch(str(name)))
    there = {name for name in (*_DOCUMENTS, *ours) if (folder / name).is_file()}
    return sorted(there, key=lambda name: (name == _DOCUMENTS[0], name))


def _make(
    folder: Path,
    module: torch.nn.Module,
    example_args: tuple[NestedArray, ...],
    runtimes: Sequence[str],
    samples: Samples,
    about: Mapping[str, Any],
    batch_sizes: Sequence[int],
    tolerances: Mapping[str, Tolerance],
) -> dict[str, Any]:
    """Writes a bundle into an empty folder."""
    reference = TorchEngine(module, example_args)
    bound = reference.bind(reference.initial)
    inputs = samples.half(1)
    spec = reference.spec
    # In step n, each row continues with the observation n rows further on.
    steps = [[np.roll(leaf, -step, axis=0) for leaf in inputs] for step in range(1 if spec.state is None else STEPS)]
    wanted = list(carried(lambda leaves: reference.run(bound, leaves), spec.state, steps))
    timed = {"torch": _latencies(lambda leaves: reference.run(bound, leaves), inputs, batch_sizes)}
    reports: dict[str, Any] = {}
    failed: dict[str, ModelError] = {}
    names: tuple[Sequence[str], Sequence[str]] = ([], [])
    export = functools.cache(lambda: to_onnx(module, example_args, weights_as_inputs=False))
    for runtime in runtimes:
        path = folder / _FILES[runtime]
        largest = max(_PLANNED, *batch_sizes)
        try:
            tolerance, names, run = _write(runtime, path, module, example_args, samples.half(0), largest, export)
            tolerance = tolerances.get(runtime, tolerance)
            errors = {size: _errors(run, spec.state, steps, wanted, size, tolerance) for size in batch_sizes}
            timed[runtime] = _latencies(run, inputs, batch_sizes)
        except ModelError as error:
            path.unlink(missing_ok=True)
            failed[runtime] = error
            reports[runtime] = {"error": error.message, "within": False}
            continue
        reports[runtime] = {
            "file": path.name,
            "bytes": path.stat().st_size,
            "tolerance": asdict(tolerance),
            "within": all(error.excess <= 0 for at_size in errors.values() for error in at_size),
            "errors": {
                leaf.path: {str(size): at_size[index].measured() for size, at_size in errors.items()}
                for index, leaf in enumerate(spec.outputs)
            },
        }
    if len(failed) == len(reports):
        raise next(iter(failed.values()))
    described = {**about, "files": {name: _FILES[name] for name in reports if name not in failed}}
    described |= _write_samples(folder, spec, names, inputs, wanted[0], samples.source)
    report = {
        **about,
        "samples": {"source": samples.source, "compared": len(inputs[0])},
        "within": all(comparison["within"] for comparison in reports.values()),
        "runtimes": reports,
        "latency_us": timed,
    }
    as_json: dict[str, Any] = _as_json(report)
    for name, document in zip(_DOCUMENTS, (_as_json(described), as_json), strict=True):
        (folder / name).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return as_json


def _replace(folder: Path, made: Path) -> None:
    """Replaces the bundle in ``folder`` by ``made``. While ``bundle.json`` exists, its files are complete."""
    (folder / "samples").mkdir(exist_ok=True)
    for name in reversed(bundle_files(folder)):
        (folder / name).unlink(missing_ok=True)
    for name in bundle_files(made):
        (made / name).replace(folder / name)


def _as_json(value: Any) -> Any:
    """``value`` with strings for infinities and NaN."""
    if isinstance(value, Mapping):
        return {key: _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _write(
    runtime: str,
    path: Path,
    module: torch.nn.Module,
    example_args: tuple[NestedArray, ...],
    calibrate: Sequence[np.ndarray],
    largest: int,
    export: Callable[[], OnnxGraph],
) -> tuple[Tolerance, tuple[Sequence[str], Sequence[str]], Run]:
    """Writes a runtime's file; returns its tolerance, the graph's input and output names, and how to run it."""
    # No verification here: a file that misses the tolerance still belongs in the report.
    if runtime == "tensorrt":
        from brayx.engines.tensorrt import TensorRTEngine

        plan = TensorRTEngine(module, example_args, max_batch_size=largest, verify_outputs=False)
        path.write_bytes(plan.packed(plan.bind(plan.initial)))
        bound = plan.unpacked(path.read_bytes())
        return plan.tolerance, (plan.inputs, plan.outputs), lambda leaves: plan.run(bound, leaves)
    from brayx.engines.frozen import FrozenOnnxEngine, Int8Engine, OnnxSession

    kind = Int8Engine if runtime == "int8" else FrozenOnnxEngine
    engine: FrozenOnnxEngine = kind(module, example_args, samples=calibrate, verify_outputs=False, graph=export())
    path.write_bytes(engine.proto)
    session = OnnxSession(path, engine.inputs, engine.outputs)
    return engine.tolerance, (engine.inputs, engine.outputs), session.run


def _errors(
    run: Run,
    state: StateSpec | None,
    steps: Sequence[Sequence[np.ndarray]],
    wanted: Sequence[Sequence[np.ndarray]],
    size: int,
    tolerance: Tolerance,
) -> list[LeafError]:
    """The worst error of each output over all rows and steps, in batches of ``size``; rows from the start fill up the
    last batch."""
    count = len(wanted[0][0])
    rows = np.arange(-(-count // size) * size) % count
    batches = [
        list(carried(run, state, [[np.ascontiguousarray(leaf[batch]) for leaf in leaves] for leaves in steps]))
        for batch in np.split(rows, len(rows) // size)
    ]
    errors = []
    peaks = [max(map(peak, of_leaf)) for of_leaf in zip(*wanted, strict=True)]
    for step, want in enumerate(wanted):
        whole = [np.concatenate(leaves) for leaves in zip(*(batch[step] for batch in batches), strict=True)]
        errors.append(compare(whole, [leaf[rows] for leaf in want], tolerance, peaks))
    return [worst_of(of_leaf) for of_leaf in zip(*errors, strict=True)]


def _latencies(run: Run, inputs: Sequence[np.ndarray], batch_sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Latency of a run in microseconds, by batch size: median and 99th percentile."""
    latencies = {}
    for size in batch_sizes:
        batch = [np.ascontiguousarray(leaf[np.arange(size) % len(leaf)]) for leaf in inputs]
        for _ in range(3):
            run(batch)
        taken: list[float] = []
        ends = time.perf_counter() + _LATENCY_S
        while len(taken) < 5 or (len(taken) < _LATENCY_RUNS and time.perf_counter() < ends):
            began = time.perf_counter()
            run(batch)
            taken.append(time.perf_counter() - began)
        p50, p99 = np.percentile(taken, [50, 99]) * 1e6
        latencies[str(size)] = {"p50": round(float(p50), 1), "p99": round(float(p99), 1)}
    return latencies


def _write_samples(
    folder: Path,
    spec: ModelSpec,
    names: tuple[Sequence[str], Sequence[str]],
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    source: str,
) -> dict[str, Any]:
    """Writes the samples; returns the part of ``bundle.json`` about the signature and the samples."""
    (folder / "samples").mkdir(exist_ok=True)

    def write(
        way: str, specs: Sequence[LeafSpec], graph_names: Sequence[str], leaves: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        entries = []
        for index, (leaf, name, array) in enumerate(zip(specs, graph_names, leaves, strict=True)):
            file = f"samples/{way}-{index}-{re.sub(r'[^A-Za-z0-9]+', '-', name)}.bin"
            shown = array[:_SAMPLES]
            (folder / file).write_bytes(shown.astype(shown.dtype.newbyteorder("<")).tobytes())
            entry = {"name": name, "shape": list(leaf.shape), "dtype": leaf.dtype.name, "samples": file}
            if leaf.limits is not None:
                entry |= {"low": leaf.limits.low.tolist(), "high": leaf.limits.high.tolist()}
            entries.append(entry)
        return entries

    described: dict[str, Any] = {
        "inputs": write("in", spec.inputs, names[0], inputs),
        "outputs": write("out", spec.outputs, names[1], outputs),
        "samples": {"rows": min(_SAMPLES, len(inputs[0])), "source": source},
    }
    if spec.state is not None:
        initial = [np.asarray(leaf) for leaf in optree.tree_leaves(spec.state.initial)]
        pairs = zip(spec.state.inputs, spec.state.outputs, initial, strict=True)
        described["state"] = [
            {"input": names[0][into], "output": names[1][out_of], "initial": first.reshape(-1).tolist()}
            for into, out_of, first in pairs
        ]
    return described
