"""The books, in MLflow: projects, trials, their checkpoints, and the registry that the model pool stands on.

A project is an MLflow experiment and a trial a run in it. The default store is one sqlite file; artifacts lie beside
it in ``mlartifacts/``, so that a plain ``mlflow ui`` in that folder shows everything. URIs are absolute, because Ray
workers change directory. Knows nothing of Ray, nor of what is inside a checkpoint: to this file it is a folder.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from brayx.errors import BrayxError, ConfigError, TrackingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

DEFAULT_FILE = "mlflow.db"
ARTIFACTS_FOLDER = "mlartifacts"
Status = Literal["FINISHED", "FAILED", "KILLED"]

_SQLITE = "sqlite:///"
_CHECKPOINT_TAG = "brayx.checkpoint."
_STEP_TAG = "brayx.step"
_MAX_BATCH = 1000
_MAX_PARAM_CHARS = 6000
_NAME = re.compile(r"[\w][\w .:+@=,-]{0,199}")
_NOT_IN_METRIC = re.compile(r"[^\w\-. :/]")


def tracking_uri(where: str | os.PathLike[str] | None = None) -> str:
    """The absolute tracking URI that ``where`` means.

    Args:
        where: a URI of MLflow's; or the path of a sqlite file, or of the folder that holds ``mlflow.db``; None takes
            the environment's ``MLFLOW_TRACKING_URI``, and without one ``mlflow.db`` in the current folder.
    """
    text = os.fspath(where) if where is not None else os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_FILE
    if "://" in text and not text.startswith(_SQLITE):
        return text
    path = Path(text.removeprefix(_SQLITE)).expanduser().absolute()
    if path.is_dir() or not path.suffix:
        path = path / DEFAULT_FILE
    return f"{_SQLITE}{path}"


def initialise(uri: str) -> str:
    """Creates or opens the store, once, in the process that starts the job: concurrent first use races on migrations.

    Args:
        uri: as `tracking_uri` gives it.

    Returns:
        ``uri``.

    Raises:
        TrackingError: the folder cannot be written, the file is no database or of another MLflow's schema, or the
            server does not answer.
    """
    path = _sqlite_path(uri)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise TrackingError(
                f"MLflow folder {path.parent} is not writable ({error.strerror}): name another with `tracking`",
                folder=str(path.parent),
            ) from error
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=20)) as connection:
                # Readers (`mlflow ui`, the progress display) then never hold up the writer, nor it them.
                connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.Error as error:
            raise TrackingError(f"{path} cannot be used as an MLflow database: {error}", file=str(path)) from error
    with _telling(f"cannot open the MLflow store {uri}"):
        _client(uri).search_experiments(max_results=1)
    return uri


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was written whole.

    Attributes:
        run_id: the trial it is of.
        step: env steps at which it was taken.
        artifact_path: its folder below the run's artifacts.
        metrics: numbers by name at that time.
        saved_at_s: Unix time.
    """

    run_id: str
    step: int
    artifact_path: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_at_s: float = 0.0


@dataclass(frozen=True)
class Trial:
    """One training run. Picklable: a handle of two strings and two names.

    Attributes:
        uri: tracking URI.
        run_id: MLflow's id of the run.
        project: name of the experiment.
        name: name of the run.
        resumed: `open` found the run unfinished and goes on with it.
    """

    uri: str
    run_id: str
    project: str
    name: str
    resumed: bool = False

    @staticmethod
    def open(project: str, name: str, uri: str, *, resume: bool = True, reopen_finished: bool = False) -> Trial:
        """Starts a trial, or goes on with the newest one of that name if that was interrupted.

        Args:
            project: name of the experiment, created if absent.
            name: name of the run.
            uri: tracking URI, initialised.
            resume: False starts a new run whatever there is.
            reopen_finished: goes on even with a trial that came to its end.

        Raises:
            ConfigError: a name has characters that cannot be searched for.
            TrackingError: the store failed.
        """
        for what, text in (("project", project), ("trial", name)):
            if not _NAME.fullmatch(text):
                raise ConfigError(
                    f"{what} is {text!r}, expected up to 200 letters, digits, spaces or _.:+@=,- not starting with one",
                    key=what,
                )
        with _telling(f"cannot open trial {name!r} of project {project!r} in {uri}"):
            client = _client(uri)
            experiment_id = _experiment(client, project, uri)
            found = client.search_runs(
                [experiment_id],
                filter_string=f"attributes.run_name = '{name}'",
                order_by=["attributes.start_time DESC"],
                max_results=1,
            )
            if resume and found and (reopen_finished or found[0].info.status != "FINISHED"):
                run_id = found[0].info.run_id
                client.update_run(run_id, status="RUNNING")
                return Trial(uri, run_id, project, name, resumed=True)
            return Trial(uri, client.create_run(experiment_id, run_name=name).info.run_id, project, name)

    @staticmethod
    def attach(uri: str, run_id: str) -> Trial:
        """The trial with that id, from any process.

        Raises:
            TrackingError: there is none.
        """
        with _telling(f"no trial {run_id!r} in {uri}"):
            run = _client(uri).get_run(run_id)
            project = _client(uri).get_experiment(run.info.experiment_id).name
            return Trial(uri, run_id, project, run.info.run_name or "")

    @property
    def status(self) -> str:
        """``RUNNING``, ``FINISHED``, ``FAILED`` or ``KILLED``."""
        return str(self._run().info.status)

    def finish(self, status: Status = "FINISHED") -> None:
        """Marks the end; only a trial that is not ``FINISHED`` is resumed by its name."""
        with _telling(f"cannot finish trial {self.name!r}"):
            _client(self.uri).set_terminated(self.run_id, status)

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Writes numbers at ``step`` (env steps), a thousand to a transaction. Call it about once a second."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_NOT_IN_METRIC.sub("_", k), float(v), now_ms, int(step)) for k, v in values.items()]
        with _telling(f"cannot write metrics of trial {self.name!r}"):
            for start in range(0, len(metrics), _MAX_BATCH):
                _client(self.uri).log_batch(self.run_id, metrics=metrics[start : start + _MAX_BATCH])

    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return dict(self._run().data.metrics)

    def history(self, metric: str) -> list[tuple[int, float]]:
        """Every ``(step, value)`` written of ``metric``, in the order of steps."""
        with _telling(f"cannot read metric {metric!r} of trial {self.name!r}"):
            points = _client(self.uri).get_metric_history(self.run_id, metric)
        return sorted((point.step, point.value) for point in points)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Writes options, nested ones with dotted names.

        MLflow's params never change. An option that a resumed trial has otherwise is written beside the first as
        ``name@2`` (``@3``, ...), so the books show both.
        """
        from mlflow.entities import Param

        with _telling(f"cannot write params of trial {self.name!r}"):
            known = dict(self._run().data.params)
            fresh = []
            for name, value in _flat(params):
                key, count = _NOT_IN_METRIC.sub("_", name), 1
                while key in known and known[key] != value:
                    count += 1
                    key = f"{_NOT_IN_METRIC.sub('_', name)}:{count}"
                if key not in known:
                    known[key] = value
                    fresh.append(Param(key, value))
            for start in range(0, len(fresh), 100):
                _client(self.uri).log_batch(self.run_id, params=fresh[start : start + 100])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Writes facts that may change later."""
        from mlflow.entities import RunTag

        with _telling(f"cannot write tags of trial {self.name!r}"):
            _client(self.uri).log_batch(self.run_id, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    def log_figure(self, figure: Figure, artifact_file: str) -> None:
        """Saves a matplotlib figure as ``artifact_file`` (``curve.png``)."""
        with _telling(f"cannot save {artifact_file} of trial {self.name!r}"):
            _client(self.uri).log_figure(self.run_id, figure, artifact_file)

    def log_file(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Copies a file into the run's artifacts, below ``artifact_path``."""
        with _telling(f"cannot save {os.fspath(path)} of trial {self.name!r}"):
            _client(self.uri).log_artifact(self.run_id, os.fspath(path), artifact_path)

    def save_checkpoint(
        self, folder: str | os.PathLike[str], step: int, metrics: Mapping[str, float] | None = None
    ) -> Checkpoint:
        """Copies ``folder`` into the trial; it counts only once it is there whole: a kill half-way leaves none.

        Args:
            folder: everything in it is copied.
            step: env steps; saving the same step again replaces it.
            metrics: numbers to choose the best by; those that are not finite are left out.
        """
        if not Path(folder).is_dir():
            raise TrackingError(f"cannot save a checkpoint of trial {self.name!r}: {folder} is not a folder")
        numbers = {name: float(value) for name, value in (metrics or {}).items() if abs(float(value)) < float("inf")}
        checkpoint = Checkpoint(self.run_id, int(step), f"checkpoints/{int(step):012d}", numbers, time.time())
        record = {"path": checkpoint.artifact_path, "metrics": numbers, "saved_at_s": checkpoint.saved_at_s}
        with _telling(f"cannot save a checkpoint of trial {self.name!r}"):
            _client(self.uri).log_artifacts(self.run_id, os.fspath(folder), checkpoint.artifact_path)
            _client(self.uri).set_tag(self.run_id, f"{_CHECKPOINT_TAG}{int(step):012d}", json.dumps(record))
        return checkpoint

    def checkpoints(self) -> list[Checkpoint]:
        """Every whole checkpoint, the oldest first."""
        found = []
        for key, value in self._run().data.tags.items():
            if key.startswith(_CHECKPOINT_TAG):
                record = json.loads(value)
                step = int(key.removeprefix(_CHECKPOINT_TAG))
                found.append(Checkpoint(self.run_id, step, record["path"], record["metrics"], record["saved_at_s"]))
        return sorted(found, key=lambda checkpoint: (checkpoint.saved_at_s, checkpoint.step))

    def latest_checkpoint(self) -> Path | None:
        """Local folder of the newest checkpoint; None before the first."""
        found = self.checkpoints()
        return self.local(found[-1]) if found else None

    def best_checkpoint(self, metric: str) -> Checkpoint | None:
        """The checkpoint saved with the highest ``metric``, the newest of equals; None if none has it."""
        having = [checkpoint for checkpoint in self.checkpoints() if metric in checkpoint.metrics]
        return max(having, key=lambda c: (c.metrics[metric], c.saved_at_s)) if having else None

    def prune_checkpoints(self, keep_last: int, best_by: str | None = None) -> None:
        """Deletes all but the ``keep_last`` newest checkpoints and the best by the metric ``best_by``."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        keep = {checkpoint.step for checkpoint in self.checkpoints()[-keep_last:]} if keep_last > 0 else set()
        repository = get_artifact_repository(self._run().info.artifact_uri, tracking_uri=self.uri)
        best = self.best_checkpoint(best_by) if best_by else None
        for checkpoint in self.checkpoints():
            if checkpoint.step in keep or (best and checkpoint.step == best.step):
                continue
            with _telling(f"cannot delete a checkpoint of trial {self.name!r}"):
                # The tag first: a kill between the two leaves files nobody reads, not a checkpoint without files.
                _client(self.uri).delete_tag(self.run_id, f"{_CHECKPOINT_TAG}{checkpoint.step:012d}")
                repository.delete_artifacts(checkpoint.artifact_path)  # type: ignore[no-untyped-call]

    def local(self, checkpoint: Checkpoint) -> Path:
        """A local folder with the checkpoint's files: its own where artifacts are local, else a download of it."""
        with _telling(f"cannot read checkpoint {checkpoint.step} of trial {self.name!r}"):
            return Path(_client(self.uri).download_artifacts(checkpoint.run_id, checkpoint.artifact_path))

    def _run(self) -> Run:
        with _telling(f"cannot read trial {self.name!r} ({self.run_id}) from {self.uri}"):
            return _client(self.uri).get_run(self.run_id)


@dataclass(frozen=True)
class PoolEntry:
    """One registered version of a model.

    Attributes:
        name: of the registered model.
        version: counts from 1.
        source: where its files are, as MLflow has it.
        run_id: the trial it came from.
        tags: facts about it.
    """

    name: str
    version: int
    source: str
    run_id: str
    tags: Mapping[str, str] = field(default_factory=dict)


def register(
    trial: Trial,
    checkpoint: Checkpoint,
    model_name: str,
    *,
    alias: str | None = "champion",
    tags: Mapping[str, str] | None = None,
    onnx: bytes | None = None,
) -> PoolEntry:
    """Puts a checkpoint into the pool as a version of ``model_name`` and points ``alias`` at it.

    Registering the same checkpoint again gives the same version and only moves the alias.

    Args:
        trial: where the checkpoint is.
        checkpoint: what to register; its files are copied, so pruning checkpoints never touches the pool.
        model_name: name of the registered model, created if absent.
        alias: moved to this version; None moves none.
        tags: facts to write on the version.
        onnx: the model as an ONNX file; with it ``mlflow.onnx.load_model("models:/name@alias")`` works too.

    Raises:
        TrackingError: the registry or the artifact store failed.
    """
    client = _client(trial.uri)
    with _telling(f"cannot register a checkpoint of trial {trial.name!r} as {model_name!r}"):
        if not client.search_registered_models(f"name = '{model_name}'", max_results=1):
            client.create_registered_model(model_name)
        version = next(
            (
                version
                for version in client.search_model_versions(f"name = '{model_name}'")
                if version.run_id == trial.run_id and version.tags.get(_STEP_TAG) == str(checkpoint.step)
            ),
            None,
        )
        if version is None:
            artifact_path = f"models/{quote(model_name, safe='')}/{checkpoint.step:012d}"
            with tempfile.TemporaryDirectory(prefix="brayx-register-") as temporary:
                folder = Path(temporary) / "model"
                if onnx is not None:
                    _save_onnx(onnx, folder)
                shutil.copytree(trial.local(checkpoint), folder, dirs_exist_ok=True)
                client.log_artifacts(trial.run_id, str(folder), artifact_path)
            version = client.create_model_version(
                model_name,
                source=f"runs:/{trial.run_id}/{artifact_path}",
                run_id=trial.run_id,
                tags={_STEP_TAG: str(checkpoint.step), **{k: str(v) for k, v in (tags or {}).items()}},
            )
        if alias is not None:
            client.set_registered_model_alias(model_name, alias, str(version.version))
    return _entry(version)


def find(reference: str, uri: str) -> PoolEntry:
    """The version that ``reference`` names.

    Args:
        reference: ``models:/name@alias``, ``models:/name/3``, or ``models:/name`` for the newest version.
        uri: tracking URI.

    Raises:
        ConfigError: ``reference`` has another form.
        TrackingError: no such model, alias or version; the message names the nearest, or what to run.
    """
    match = re.fullmatch(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))?", reference)
    if match is None:
        raise ConfigError(f"model is {reference!r}, expected models:/name@alias, models:/name/version or models:/name")
    name, alias, number = match["name"], match["alias"], match["version"]
    path = _sqlite_path(uri)
    if path is not None and not path.exists():
        raise TrackingError(f"no model {name!r}: there is no MLflow database {path}; {_ADVICE}", reference=reference)
    with _telling(f"cannot read the model registry of {uri}"):
        client = _client(uri)
        models = {model.name: model for model in client.search_registered_models()}
        if name not in models:
            raise TrackingError(
                f"no model {name!r} in the registry of {uri}{_nearest(name, models)}; {_ADVICE}", reference=reference
            )
        versions = sorted(client.search_model_versions(f"name = '{name}'"), key=lambda v: int(v.version))
        if alias is not None:
            aliases = {key: str(value) for key, value in models[name].aliases.items()}
            if alias not in aliases:
                raise TrackingError(
                    f"model {name!r} has no alias {alias!r}{_nearest(alias, aliases)}; {_ADVICE}", reference=reference
                )
            number = aliases[alias]
        chosen = [version for version in versions if number is None or str(version.version) == number]
        if not chosen:
            raise TrackingError(
                f"model {name!r} has no version {number or ''}: it has {[int(v.version) for v in versions]}",
                reference=reference,
            )
        return _entry(chosen[-1])


def resolve(reference: str, uri: str) -> Path:
    """Local folder with the files of the version that ``reference`` names; arguments and errors as `find`."""
    entry = find(reference, uri)
    with _telling(f"cannot read the files of {reference} (version {entry.version}) at {entry.source}"):
        from mlflow.artifacts import download_artifacts

        return Path(download_artifacts(artifact_uri=entry.source, tracking_uri=uri))


_ADVICE = "train one with `brayx train CONFIG.yaml`, or `make demo`"


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f", nearest is {near[0]!r}"
    return f", there are {', '.join(sorted(known))}" if known else ", which is empty of them"


def _entry(version: ModelVersion) -> PoolEntry:
    return PoolEntry(version.name, int(version.version), version.source or "", version.run_id or "", dict(version.tags))


def _save_onnx(model: bytes, folder: Path) -> None:
    import mlflow.onnx
    import onnx
    import onnxruntime

    # Named here, because MLflow would otherwise infer them in a process of its own.
    requirements = [f"onnx=={onnx.__version__}", f"onnxruntime=={onnxruntime.__version__}"]
    parsed = onnx.load_model_from_string(model)
    mlflow.onnx.save_model(parsed, str(folder), pip_requirements=requirements, save_as_external_data=False)


def _experiment(client: MlflowClient, project: str, uri: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(project)
    if experiment is None:
        path = _sqlite_path(uri)
        location = str(path.parent / ARTIFACTS_FOLDER / quote(project, safe=" ")) if path is not None else None
        try:
            return str(client.create_experiment(project, artifact_location=location))
        except MlflowException:
            # Another process made it between the two calls; anything else fails again here.
            experiment = client.get_experiment_by_name(project)
            if experiment is None:
                raise
    if experiment.lifecycle_stage != "active":
        raise TrackingError(f"project {project!r} was deleted in MLflow; restore it, or name another", project=project)
    return str(experiment.experiment_id)


def _flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)[:_MAX_PARAM_CHARS]


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


@functools.lru_cache(maxsize=8)
def _client(uri: str) -> MlflowClient:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Turns whatever MLflow, its database or its files raise into a `TrackingError` that begins with ``what``."""
    try:
        yield
    except BrayxError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TrackingError(f"{what}: {reason[0]}") from error
