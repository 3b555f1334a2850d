"""``brayx export``: writes a model of the pool, or a checkpoint, as verified files for other runtimes.

This file finds the model, builds its module, and adds the files to the model's trial. `brayx.engines.bundle` makes the
files and the report.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from brayx.engines.base import Tolerance, load_weights
from brayx.engines.bundle import Samples, bundle_files, check_writeable, write_bundle
from brayx.engines.torch import with_weights
from brayx.errors import ConfigError, ModelError
from brayx.model.build import build_model, recorded_samples
from brayx.tracking import Trial, files_of, find, tracking_uri
from brayx.types import NestedArray
from deployments.job import JobConfig

_MEASURES = {"absolute": "worst absolute", "relative": "worst relative", "differing": "rows that differ"}
"""Error measures of a report, and their column titles; an output has either the first two or the last."""


@dataclass(frozen=True)
class _Origin:
    """The model to export.

    Attributes:
        folder: folder with its ``weights.npz`` and ``meta.json``.
        about: its description in the bundle.
        run_id: id of its trial; empty: unknown.
        name: name of the export among the trial's artifacts.
    """

    folder: Path
    about: Mapping[str, Any]
    run_id: str = ""
    name: str = ""


def export(
    reference: str,
    runtimes: Sequence[str],
    out: Path,
    *,
    tracking: str | None = None,
    job: str | None = None,
    model: str | None = None,
    batch_sizes: Sequence[int] = (1, 8, 64),
    tolerances: Mapping[str, Tolerance] | None = None,
) -> dict[str, Any]:
    """Writes a bundle into ``out`` and to the model's trial; returns its report, see `write_bundle`.

    Args:
        reference: ``models:/name@alias`` and its like, or the folder of a checkpoint.
        runtimes: runtimes to export to.
        out: output folder.
        tracking: MLflow's URI, or the path of its sqlite file.
        job: YAML of the job that made it; None: the job in the checkpoint.
        model: name of the model component, for a job that has several.
        batch_sizes: batch sizes for comparison and timing.
        tolerances: tolerances by runtime, instead of the engines' defaults.

    Raises:
        ConfigError: the reference, the job, a runtime or the folder is not usable.
        ModelNotFound: the registry has no such model.
        ModelError: the model cannot be built, or exported to any runtime; `BadWeights`: its weights do not fit the
            module.
        TrackingError: MLflow failed.
    """
    check_writeable(out)
    uri = tracking_uri(tracking)
    with _find(reference, uri) as origin:
        module, example = _build(origin.folder, job, model)
        module = with_weights(module, load_weights(origin.folder / "weights.npz"))
        samples = _samples(origin.folder, module, example)
    report = write_bundle(
        out, module, example, runtimes, samples, about=origin.about, batch_sizes=batch_sizes, tolerances=tolerances
    )
    if origin.run_id:
        # Upload by file name: the folder may hold other files, such as the user's home.
        Trial.attach(uri, origin.run_id).replace_files(out, bundle_files(out), f"export/{origin.name}")
    return report


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints a report as tables."""
    console = console or Console()
    errors = Table("runtime", "output", "batch", *_MEASURES.values(), "within", title="against torch")
    for runtime, of in report["runtimes"].items():
        for output, sizes in of.get("errors", {}).items():
            for size, error in sizes.items():
                numbers = [f"{float(error[name]):.2e}" if name in error else "" for name in _MEASURES]
                errors.add_row(runtime, output, size, *numbers, "yes" if of["within"] else "NO")
    times = Table("runtime", "file", "bytes", "batch", "p50, µs", "p99, µs", title="latency of a forward")
    for runtime, by_size in report["latency_us"].items():
        of = report["runtimes"].get(runtime, {"file": "", "bytes": ""})
        for size, latency in by_size.items():
            times.add_row(runtime, of["file"], str(of["bytes"]), size, f"{latency['p50']:g}", f"{latency['p99']:g}")
    console.print(errors, times)
    for runtime, of in report["runtimes"].items():
        if "error" in of:
            console.print(f"{runtime} failed: {of['error']}", markup=False)
    samples = report["samples"]
    console.print(f"compared over {samples['compared']} rows: {samples['source']}")


def allowed(of: Mapping[str, Any]) -> str:
    """The tolerance in a runtime's part of a report, for the kinds of outputs that it has."""
    tolerance = Tolerance(**of["tolerance"])
    measured = {name for by_size in of["errors"].values() for error in by_size.values() for name in error}
    parts = [f"{tolerance.atol:g}"]
    parts += [f"{tolerance.rtol:g} * max(1, |want|)"] if tolerance.rtol else []
    parts += [f"{tolerance.of_peak:g} * the output's peak"] if tolerance.of_peak else []
    bounds = {
        "absolute": f"|got - want| <= {' + '.join(parts)}",
        "differing": f"rows that differ <= {tolerance.differing:g}",
    }
    return ", ".join(bound for name, bound in bounds.items() if name in measured)


@contextlib.contextmanager
def _find(reference: str, uri: str) -> Iterator[_Origin]:
    if reference.startswith("models:"):
        entry = find(reference, uri)
        with files_of(f"models:/{entry.name}/{entry.version}", uri) as folder:
            about = {"model": entry.name, "version": entry.version, **_policy_version(folder)}
            yield _Origin(folder, about, entry.run_id, f"{entry.name}-{entry.version}")
        return
    folder = Path(reference)
    if not (folder / "weights.npz").is_file():
        raise ConfigError(f"{reference} is neither models:/NAME@ALIAS nor a folder with a checkpoint's weights.npz")
    yield _Origin(folder, {"model": folder.resolve().name, **_policy_version(folder)})


def _meta(folder: Path) -> Mapping[str, Any]:
    try:
        meta: Mapping[str, Any] = json.loads((folder / "meta.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'meta.json'} cannot be read: {error}") from error
    return meta


def _policy_version(folder: Path) -> dict[str, int]:
    version = _meta(folder).get("counters", {}).get("policy_version")
    return {} if version is None else {"policy_version": int(version)}


def _build(folder: Path, job: str | None, model: str | None) -> tuple[Any, tuple[NestedArray, ...]]:
    """The module and its example arguments, from the job's ``build_model``."""
    meta = _meta(folder)
    if job is not None:
        loaded = JobConfig.load(job)
        config, where = loaded.as_dict(), loaded.folder
    elif "job" in meta:
        config, where = meta["job"], str(meta.get("folder", ""))
    else:
        raise ConfigError(f"{folder} does not say which job made it: name its YAML with --job")
    models = {name: part for name, part in config.items() if isinstance(part, dict) and part.get("kind") == "model"}
    if model is None and len(models) == 1:
        model = next(iter(models))
    if model not in models:
        raise ConfigError(f"name the model with --model: the job has {', '.join(sorted(models)) or 'none'}")
    try:
        return build_model(where, models[model]["module"], model, config)
    except ConfigError as error:
        if job is not None:
            raise
        raise ConfigError(f"{error.message}; name the job's YAML with --job", **error.details) from error


def _samples(folder: Path, module: Any, example: tuple[NestedArray, ...]) -> Samples:
    """Samples that the checkpoint recorded, if they fit the model; otherwise generated ones."""
    leaves = recorded_samples(folder, module, example)
    if leaves is None:
        return Samples.of_example(example)
    return Samples(leaves, "observations that the checkpoint was learned from")
