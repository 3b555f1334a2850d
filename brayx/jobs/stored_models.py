"""Models at rest: a registered version, or a checkpoint of a trial or in a folder, with the module of the job that made
it.

A checkpoint's weights are plain arrays, but its ``meta.json`` names the job's code. That code runs only if the user
names the job, sets an option, or if a training wrote the version into a database of this machine. Knows nothing of
sessions or engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.engines.base import LeafSpec, check_weights, layout_of, load_weights
from brayx.engines.scaling import learned
from brayx.engines.torch import module_weights, with_weights
from brayx.errors import BadWeights, BrayxError, ConfigError
from brayx.jobs.config import JobConfig, only, pool_name_of
from brayx.jobs.recorded import read_meta
from brayx.model.build import build_model
from brayx.tracking import PoolEntry, Trial, files_of, find, find_trial
from brayx.trainer.config import TrainerConfig
from brayx.types import NestedArray, Weights
from brayx.urls import sqlite_path

if TYPE_CHECKING:
    from torch import nn

_RUNS = "runs:/"
INITIAL_TAG = "brayx.initial_weights"
"""Tag of a trial: the version or checkpoint that it started from."""


@dataclass(frozen=True)
class StoredModel:
    """A model that was found by its name.

    Attributes:
        folder: folder with its ``weights.npz`` and ``meta.json``.
        label: ``models:/NAME/VERSION``, ``runs:/ID``, or the folder as it was given.
        about: its name, and its version and policy version where it has them.
        run_id: id of its trial; empty: unknown.
        trust: whether the code that its checkpoint names may run; or the only folder whose code may run.
    """

    folder: Path
    label: str
    about: Mapping[str, Any]
    run_id: str = ""
    trust: bool | str = False

    def job(self, file: str | None = None) -> JobConfig:
        """The job that made it.

        Args:
            file: its YAML; None: as the checkpoint has it.

        Raises:
            ConfigError: the checkpoint does not name its job, its code is not trusted, or the job is no longer valid.
        """
        if file is not None:
            return JobConfig.load(file)
        config, folder = self._trusted_job()
        with _suggesting_job():
            return JobConfig.of(config, folder)

    def build(self, job: str | None = None, model: str | None = None) -> tuple[Any, tuple[NestedArray, ...]]:
        """The module with its weights, and its example arguments.

        Args:
            job: YAML of the job that made it; None: as the checkpoint has it.
            model: name of the model component; None: the only one, or the one that is registered under the model's name
                or that the job's trainer learns.

        Raises:
            ConfigError: the job or the component cannot be used, or the job's code is not trusted.
            ModelError: the module cannot be built; `BadWeights`: the weights cannot be read, or do not fit it.
        """
        module, example = self._built(job, model)
        return with_weights(module, load_weights(self.folder / "weights.npz")), example

    def _built(self, job: str | None, model: str | None) -> tuple[Any, tuple[NestedArray, ...]]:
        """The module and its example arguments, from the job's ``build_model``."""
        if job is not None:
            loaded = JobConfig.load(job)
            config, where = loaded.as_dict(), loaded.folder
        else:
            config, where = self._trusted_job()
        parts = {name: part for name, part in config.items() if isinstance(part, dict)}
        models = {name: part for name, part in parts.items() if part.get("kind") == "model"}
        if model is None:
            model = _component(self, config.get("project", ""), parts, list(models))
        if model not in models:
            unknown = f"{self.label} does not say which of its job's models it is"
            problem = f"there is no model {model!r}" if model else unknown
            raise ConfigError(f"{problem}: the job has {', '.join(sorted(models)) or 'none'}")
        with _suggesting_job() if job is None else contextlib.nullcontext():
            return build_model(where, models[model]["module"], model, config)

    def _trusted_job(self) -> tuple[dict[str, Any], str]:
        """The job that the checkpoint names, and the folder of its code."""
        meta = read_meta(self.folder)
        if "job" not in meta:
            raise ConfigError(
                f"{self.label} does not say which job made it: its meta.json is missing, or was not written by a "
                "training; name the job's YAML with --job"
            )
        folder = str(meta.get("folder", ""))
        if self.trust is not True and not (self.trust and self.trust == folder):
            raise ConfigError(
                f"{self.label} names code to run, in {folder or 'the installed packages'}, chosen by whoever wrote its "
                "meta.json: name your own job's YAML with --job, or trust that code with --trust",
                folder=folder,
                key="trust",
            )
        return meta["job"], folder


@contextlib.contextmanager
def stored_model(reference: str, uri: str, trust: bool | str = False) -> Iterator[StoredModel]:
    """Finds a model, to read in a ``with`` block.

    Args:
        reference: ``models:/NAME@ALIAS`` and its like; ``runs:/TRIAL``, the newest checkpoint of the trial with this id
            or name; or the folder of a checkpoint.
        uri: tracking URI. A database file is trusted, because trainings on this machine wrote its versions. A server is
            not, because others may write to it.
        trust: True: run the code that the checkpoint names. A folder: run it only if it is in that folder.

    Raises:
        ConfigError: it is none of these; or there is no such trial, or it has no checkpoint.
        ModelNotFound: the registry has no such model.
        TrackingError: MLflow failed.
    """
    trust_stored = trust or sqlite_path(uri) is not None
    if reference.startswith("models:"):
        entry = find(reference, uri)
        with files_of(entry.reference, uri) as folder:  # an alias may move meanwhile
            yield registered_model(entry, folder, uri, trust)
        return
    if reference.startswith(_RUNS):
        trial = find_trial(reference.removeprefix(_RUNS), uri)
        newest = trial.latest_checkpoint()
        if newest is None:
            raise ConfigError(f"{reference}: trial {trial.name!r} has no checkpoint yet")
        about = {"model": trial.name, **_policy_version(newest)}
        yield StoredModel(newest, f"{_RUNS}{trial.run_id}", about, trial.run_id, trust_stored)
        return
    folder = Path(reference)
    if not (folder / "weights.npz").is_file():
        raise ConfigError(
            f"{reference} is neither models:/NAME@ALIAS, runs:/TRIAL nor a folder with a checkpoint's weights.npz"
        )
    yield StoredModel(folder, reference, {"model": folder.resolve().name, **_policy_version(folder)}, trust=trust)


def registered_model(entry: PoolEntry, folder: Path, uri: str, trust: bool | str = False) -> StoredModel:
    """A registered version, whose files are in this folder; ``uri`` and ``trust`` as for `stored_model`."""
    about = {"model": entry.name, "version": entry.version, **_policy_version(folder)}
    return StoredModel(folder, entry.reference, about, entry.run_id, trust or sqlite_path(uri) is not None)


def initial_weights(
    config: TrainerConfig, folder: str, call: Callable[..., Any], module: Callable[[], nn.Module]
) -> Weights | None:
    """The weights that ``config.initial_weights`` names; None: it names none, or the trial has a checkpoint to resume.

    Args:
        config: options of the trainer.
        folder: where a relative folder of a checkpoint starts, `JobConfig.files_folder`.
        call: runs ``function(trial, *args)`` in the process that has the trial, and returns its result.
        module: returns the module that learns, which the weights must fit; called only if they are named.

    Raises:
        BadWeights: they cannot be read, or do not fit the module.
        ConfigError: they belong to normalised observations, whose moments a new training does not have; or as
            `stored_model`. Other errors as there.
    """
    if config.initial_weights is None:
        return None
    with _telling_option():
        weights: Weights | None = call(_weights_to_start, *_reference_and_layout(config, folder, module()))
    return weights


def check_initial_weights(job: JobConfig, name: str, uri: str, resume: bool, run: Callable[..., Any]) -> None:
    """Checks the weights that the job's trainer names, before its trial is made; not if that is resumed. Of a job that
    still waits for its contract, it checks only that they can be read.

    Args:
        job: the job.
        name: name of the trial.
        uri: tracking URI.
        resume: whether an unfinished trial of that name is resumed.
        run: runs ``function(*args)`` in a process that has MLflow.

    Raises:
        BrayxError: as `initial_weights`.
    """
    config = job.trainers[only("trainer", job.trainers)]
    if config.initial_weights is None:
        return
    module = None
    if not job.needs_contract:
        module, _ = build_model(job.folder, job.models[config.model].module, config.model, job.as_dict())
    with _telling_option():
        run(_check_to_start, job.project, name, uri, resume, *_reference_and_layout(config, job.files_folder, module))


@contextlib.contextmanager
def _telling_option() -> Iterator[None]:
    """Adds the option's name to errors."""
    try:
        yield
    except BrayxError as error:
        details = error.details | {"key": "trainer.initial_weights"}
        raise type(error)(f"trainer.initial_weights: {error.message}", **details) from None


def _reference_and_layout(
    config: TrainerConfig, folder: str, module: nn.Module | None
) -> tuple[str, Mapping[str, LeafSpec] | None]:
    """What the option names, with an absolute path of a folder, and the layout that the weights must have."""
    reference = config.initial_weights
    assert reference is not None
    layout = None if module is None else layout_of(module_weights(module))
    return reference if ":/" in reference else str(Path(folder, reference)), layout


def _check_to_start(
    project: str, name: str, uri: str, resume: bool, reference: str, layout: Mapping[str, LeafSpec] | None
) -> None:
    if not resume or Trial.interrupted(project, name, uri) is None:
        _fitting_weights(reference, layout, uri)


def _weights_to_start(trial: Trial, reference: str, layout: Mapping[str, LeafSpec]) -> Weights | None:
    if trial.checkpoints():
        return None
    label, weights = _fitting_weights(reference, layout, trial.uri)
    trial.set_tag(INITIAL_TAG, label)
    return weights


def _fitting_weights(reference: str, layout: Mapping[str, LeafSpec] | None, uri: str) -> tuple[str, Weights]:
    """The label and the weights of a stored model; a ``layout`` of None is not known."""
    with stored_model(reference, uri) as stored:
        weights = load_weights(stored.folder / "weights.npz")
        if len(learned(weights)) < len(weights):
            raise ConfigError(
                f"{stored.label} was trained with normalised observations (normalise_obs), and a new training would "
                "normalise them otherwise: name a version that was trained without"
            )
        try:
            if layout is not None:
                check_weights(layout, weights)
        except BadWeights as error:
            message = f"{stored.label} does not fit this job's model, which needs the same layers: {error.message}"
            raise BadWeights(message, **error.details) from None
    return stored.label, weights


@contextlib.contextmanager
def _suggesting_job() -> Iterator[None]:
    """Suggests ``--job`` in errors of the job that a checkpoint names, for example because its folder has moved."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error.message}; name the job's YAML with --job", **error.details) from error


def _policy_version(folder: Path) -> dict[str, int]:
    version = read_meta(folder).get("counters", {}).get("policy_version")
    return {} if version is None else {"policy_version": int(version)}


def _component(stored: StoredModel, project: str, parts: Mapping[str, Any], models: Sequence[str]) -> str | None:
    """The model component that a stored model is of; None: not known.

    It is the job's only one, or the one that is registered under this name, or the one that its trainer learns.
    """
    registered = [name for name in models if stored.about["model"] == pool_name_of(project, name, models)]
    learned = [part["model"] for part in parts.values() if part.get("kind") == "trainer"]
    return next(iter((models if len(models) == 1 else registered) or learned), None)
