"""``brayx export``: writes a model of the pool, or a checkpoint, as verified files for other runtimes and game engines.

This file adds the files to the model's trial. `brayx.jobs.stored_models` finds and builds the model,
`brayx.engines.bundle` makes the files and the report, `brayx.jobs.layouts` the file of a game engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from brayx.engines.base import Tolerance
from brayx.engines.bundle import Samples, bundle_files, check_writeable, write_bundle
from brayx.errors import BrayxError, ConfigError
from brayx.jobs.champion import best_of
from brayx.jobs.contracts import BEHAVIOUR_TAG, SELF_PLAY_TAG, parse_contract, plain_name
from brayx.jobs.layouts import WrittenLayout, write_layout
from brayx.jobs.stored_models import StoredModel, stored_model
from brayx.model.build import recorded_samples
from brayx.tracking import Trial, children_of, tracking_uri
from brayx.types import NestedArray

_MEASURES = {"absolute": "worst absolute", "relative": "worst relative", "differing": "rows that differ"}
"""Error measures of a report, and their column titles; an output has either the first two or the last."""


def export(
    reference: str,
    runtimes: Sequence[str],
    out: Path,
    *,
    tracking: str | None = None,
    job: str | None = None,
    model: str | None = None,
    trust: bool = False,
    batch_sizes: Sequence[int] = (1, 8, 64),
    tolerances: Mapping[str, Tolerance] | None = None,
) -> dict[str, Any]:
    """Writes a bundle into ``out`` and to the model's trial; returns its report, see `write_bundle`.

    Args:
        reference: ``models:/name@alias`` and its like, ``runs:/TRIAL``, or the folder of a checkpoint.
        runtimes: runtimes to export to.
        out: output folder.
        tracking: MLflow's URI, or the path of its sqlite file.
        job: YAML of the job that made it; None: the job in the checkpoint.
        model: name of the model component, see `brayx.jobs.stored_models.StoredModel.build`.
        trust: run the code that the checkpoint names, see `stored_model`.
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
    with stored_model(reference, uri, trust) as origin:
        module, example = origin.build(job, model)
        samples = _samples(origin.folder, module, example)
    report = write_bundle(
        out, module, example, runtimes, samples, about=origin.about, batch_sizes=batch_sizes, tolerances=tolerances
    )
    _upload(origin, uri, out, bundle_files(out))
    return report


def export_layout(
    reference: str,
    layout: str,
    out: Path,
    *,
    tracking: str | None = None,
    job: str | None = None,
    model: str | None = None,
    trust: bool = False,
) -> WrittenLayout:
    """Writes ``model.LAYOUT.onnx``, which a game engine loads, into ``out`` and to the model's trial.

    Args:
        reference, out, tracking, job, model, trust: as for `export`.
        layout: a name from `brayx.jobs.layouts.LAYOUTS`.

    Raises:
        ConfigError: as for `export`; or the model's job has no contract, or the engine cannot express a part of it.
        ModelNotFound, ModelError, TrackingError: as for `export`.
        EngineMismatch: the file's actions differ from the served ones.
    """
    check_writeable(out)
    uri = tracking_uri(tracking)
    with stored_model(reference, uri, trust) as origin:
        written = _write_layout(origin, layout, out / f"model.{layout}.onnx", job, model)
    _upload(origin, uri, out, [written.file], f"-{layout}")
    return written


def export_behaviours(trial: Trial, layout: str, out: Path) -> Iterator[str]:
    """Writes ``BEHAVIOUR.onnx`` for each behaviour of a trial that has ended.

    It is the best checkpoint, or the newest if too few games were played or after self-play. Trusts the trial's code,
    so the trial must be of this machine.

    Args:
        trial: the trial; further behaviours are its children.
        layout: a name from `brayx.jobs.layouts.LAYOUTS`.
        out: folder of the files; made if it is missing.

    Yields:
        A line for each file, or why there is none.
    """
    for trained in (trial, *children_of(trial)):
        behaviour = trained.tags().get(BEHAVIOUR_TAG)
        if behaviour is None:  # no game came
            continue
        file = out / f"{plain_name(behaviour)}.onnx"
        try:
            # The return of self-play is that against ever better opponents.
            best = None if SELF_PLAY_TAG in trained.tags() else best_of(trained)
            folder = trained.latest_checkpoint() if best is None else best[1]
            if folder is None:
                yield f"{file}: not written: behaviour {behaviour!r} has no checkpoint yet"
                continue
            origin = StoredModel(folder, f"trial {trained.name!r}", {"model": trained.name}, trained.run_id, True)
            written = _write_layout(origin, layout, file)
            yield f"{file}: the {'newest' if best is None else 'best'} checkpoint, opset {written.opset}"
        except BrayxError as error:
            yield f"{file}: not written: {error.message}"


def _write_layout(
    origin: StoredModel, layout: str, file: Path, job: str | None = None, model: str | None = None
) -> WrittenLayout:
    module, example = origin.build(job, model)
    contract = origin.job(job).contract
    if contract is None:
        raise ConfigError(
            f"layout {layout}: {origin.label} is of a job without a contract, and an engine's file is made of what the "
            "game observes and does: train it with a job like game.yaml",
            layout=layout,
        )
    return write_layout(file, module, example, parse_contract(contract), layout)


def _upload(origin: StoredModel, uri: str, out: Path, names: Sequence[str], ending: str = "") -> None:
    """Adds files to the model's trial; by name, since the folder may hold others, such as the user's home."""
    if origin.run_id:
        version = origin.about.get("version") or origin.about.get("policy_version", "newest")
        place = f"export/{origin.about['model']}-{version}{ending}"
        Trial.attach(uri, origin.run_id).replace_files(out, names, place)


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints a report as tables."""
    console = console or Console()
    errors = Table("runtime", "output", "batch", *_MEASURES.values(), "within", title="against torch")
    for runtime, part in report["runtimes"].items():
        for output, sizes in part.get("errors", {}).items():
            for size, error in sizes.items():
                numbers = [f"{float(error[name]):.2e}" if name in error else "" for name in _MEASURES]
                errors.add_row(runtime, output, size, *numbers, "yes" if part["within"] else "NO")
    times = Table("runtime", "file", "bytes", "batch", "p50, µs", "p99, µs", title="latency of a forward")
    for runtime, by_size in report["latency_us"].items():
        part = report["runtimes"].get(runtime, {"file": "", "bytes": ""})
        for size, latency in by_size.items():
            times.add_row(runtime, part["file"], str(part["bytes"]), size, f"{latency['p50']:g}", f"{latency['p99']:g}")
    console.print(errors, times)
    for runtime, part in report["runtimes"].items():
        if "error" in part:
            console.print(f"{runtime} failed: {part['error']}", markup=False)
    samples = report["samples"]
    console.print(f"compared over {samples['compared']} rows: {samples['source']}")


def allowed(part: Mapping[str, Any]) -> str:
    """The tolerance in a runtime's part of a report, for the kinds of outputs that it has."""
    tolerance = Tolerance(**part["tolerance"])
    measured = {name for by_size in part["errors"].values() for error in by_size.values() for name in error}
    parts = [f"{tolerance.atol:g}"]
    parts += [f"{tolerance.rtol:g} * max(1, |want|)"] if tolerance.rtol else []
    parts += [f"{tolerance.of_peak:g} * the output's peak"] if tolerance.of_peak else []
    bounds = {
        "absolute": f"|got - want| <= {' + '.join(parts)}",
        "differing": f"rows that differ <= {tolerance.differing:g}",
    }
    return ", ".join(bound for name, bound in bounds.items() if name in measured)


def _samples(folder: Path, module: Any, example: tuple[NestedArray, ...]) -> Samples:
    """Samples that the checkpoint recorded, if they fit the model; otherwise generated ones."""
    leaves = recorded_samples(folder, module, example)
    if leaves is None:
        return Samples.of_example(example)
    return Samples(leaves, "observations that the checkpoint was learned from")
