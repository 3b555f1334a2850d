"""Trials: a project is an MLflow experiment, a trial a run in it, which keeps its checkpoints.

Artifacts are in ``mlartifacts/`` next to the sqlite file, so that a plain ``mlflow ui`` in that folder shows
everything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from brayx.errors import ConfigError, TrackingError, TrialNotFound, first_line
from brayx.names import escape_of, shortened, unescaped
from brayx.temporary import temporary_folder
from brayx.tracking import checkpoints
from brayx.tracking.checkpoints import Checkpoint
from brayx.tracking.mlflow_page import EXPERIMENT_TAGS
from brayx.tracking.options import Options
from brayx.tracking.owner import OWNER_TAG, owner_of, pid_here, refuse_if_owned
from brayx.tracking.store import client_of, get_or_none, telling
from brayx.urls import missing_database, sqlite_path

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

ARTIFACTS_FOLDER = "mlartifacts"
Status = Literal["FINISHED", "FAILED", "KILLED"]

_OPTIONS = "options.json"
PARENT_TAG = "mlflow.parentRunId"
"""MLflow's tag of a child run, with its parent's id; MLflow's pages show the child below its parent."""
_COPYING_S = 60.0
"""Time without a change after which nothing is copying a checkpoint any more."""
_SAME_NAME = 1000
"""Newest runs of a name that are searched for one without a parent."""
_MAX_BATCH = 1000
_MAX_PARAM_CHARS = 6000
_NAME = re.compile(r"[\w][\w .:+@=,-]{0,199}")
_MAX_KEY_CHARS = 250
_escape = escape_of(r"(?:[^\w\-. :/]|(?:^|(?<=/))(?:/|\.(?=\.?(?:/|\Z)))|/\Z)")
"""Escapes what MLflow refuses: other characters, and names that are no relative path, such as ``a//b`` or ``../a``."""


@dataclass(frozen=True)
class Trial:
    """One training run. Picklable: a handle of two addresses and two names.

    Attributes:
        uri: tracking URI.
        run_id: MLflow's id of the run.
        project: name of the experiment.
        name: name of the run.
        resumed: `open` found the run unfinished and continues it.
        tensorboard: folder of its event files, see `brayx.tracking.tensorboard`; empty: it has none.
    """

    uri: str
    run_id: str
    project: str
    name: str
    resumed: bool = False
    tensorboard: str = ""

    @staticmethod
    def open(
        project: str,
        name: str,
        uri: str,
        *,
        resume: bool = True,
        parent: Trial | None = None,
        tensorboard: str = "",
        began_s: float | None = None,
    ) -> Trial:
        """Starts a trial, or resumes the newest one of that name, and of that parent, if it was interrupted.

        Args:
            project: name of the experiment, created if absent.
            name: name of the run.
            uri: tracking URI, initialised.
            resume: False: always start a new run.
            parent: the trial of the same project whose child this one is; None: it is no child.
            tensorboard: folder of all trials' event files; a child's are in its parent's folder. Empty: there are none.
            began_s: Unix time of a new trial's beginning; None: now.

        Raises:
            ConfigError: a name has characters that cannot be searched for.
            TrackingError: the store failed; or a running process of this machine has the trial.
        """
        _check_names(project, name)
        with telling(f"cannot open trial {name!r} of project {project!r} in {uri}"):
            client = client_of(uri)
            experiment_id = _experiment(client, project, uri)
            run = _newest_run(client, experiment_id, name, parent) if resume else None
            if run is not None and run.info.status != "FINISHED":
                run_id = run.info.run_id
                owner = run.data.tags.get(OWNER_TAG, "")
                if run.info.status == "RUNNING":
                    refuse_if_owned(name, run_id, owner)
                events = _events_folder(tensorboard, parent, project, name, run_id)
                trial = Trial(uri, run_id, project, name, resumed=True, tensorboard=events)
                trial.take_over()
                # An owner on this machine has ended. One on another machine may still be saving.
                if pid_here(owner) not in (None, os.getpid()):
                    trial._delete_incomplete_checkpoints()
                return trial
            tags = {OWNER_TAG: owner_of(os.getpid())} | ({} if parent is None else {PARENT_TAG: parent.run_id})
            began_ms = None if began_s is None else int(began_s * 1e3)
            run_id = client.create_run(experiment_id, began_ms, run_name=name, tags=tags).info.run_id
            events = _events_folder(tensorboard, parent, project, name, run_id)
            return Trial(uri, run_id, project, name, tensorboard=events)

    @staticmethod
    def interrupted(project: str, name: str, uri: str) -> Trial | None:
        """The trial that `open` would resume, left as it is; None: there is none. Arguments and errors as there."""
        _check_names(project, name)
        with telling(f"cannot look for trial {name!r} of project {project!r} in {uri}"):
            client = client_of(uri)
            experiment = client.get_experiment_by_name(project)
            run = None if experiment is None else _newest_run(client, experiment.experiment_id, name, None)
            if run is None or run.info.status == "FINISHED":
                return None
            return Trial(uri, run.info.run_id, project, name)

    @staticmethod
    def attach(uri: str, run_id: str) -> Trial:
        """The trial with that id, from any process.

        Raises:
            TrialNotFound: there is none.
            TrackingError: the store could not be read.
        """
        if (path := missing_database(uri)) is not None:
            raise TrialNotFound(f"no trial {run_id[:80]!r}: there is no MLflow database {path}", trial=run_id[:80])
        with telling(f"cannot read trial {run_id[:80]!r} of {uri}"):
            run = get_or_none(client_of(uri).get_run, run_id)
            if run is None:
                raise TrialNotFound(f"no trial {run_id[:80]!r} in {uri}: see `brayx trials`", trial=run_id[:80])
            project = client_of(uri).get_experiment(run.info.experiment_id).name
            return Trial(uri, run_id, project, run.info.run_name or "")

    @property
    def status(self) -> str:
        """``RUNNING``, ``FINISHED``, ``FAILED`` or ``KILLED``."""
        return str(self._run().info.status)

    def take_over(self) -> None:
        """Makes this process the trial's owner, as `open` does. The previous owner must have ended."""
        with telling(f"cannot continue trial {self.name!r}"):
            client_of(self.uri).set_tag(self.run_id, OWNER_TAG, owner_of(os.getpid()))
            client_of(self.uri).update_run(self.run_id, status="RUNNING")

    def finish(self, status: Status = "FINISHED") -> None:
        """Marks the end; only a trial that is not ``FINISHED`` is resumed by its name."""
        with telling(f"cannot finish trial {self.name!r}"):
            client_of(self.uri).set_terminated(self.run_id, status)

    def delete(self) -> None:
        """Moves it to MLflow's bin; no trial is resumed from there."""
        with telling(f"cannot delete trial {self.name!r}"):
            client_of(self.uri).delete_run(self.run_id)

    def log_metrics(self, values: Mapping[str, float], step: int, at_s: float | None = None) -> None:
        """Writes numbers at ``step`` (env steps), measured at Unix time ``at_s``, or now. A repetition counts once."""
        from mlflow.entities import Metric

        at_ms = int(1000 * (at_s or time.time()))
        metrics = [Metric(_metric_name(k), float(v), at_ms, int(step)) for k, v in values.items()]
        with telling(f"cannot write metrics of trial {self.name!r}"):
            for start in range(0, len(metrics), _MAX_BATCH):
                client_of(self.uri).log_batch(self.run_id, metrics=metrics[start : start + _MAX_BATCH])

    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return {unescaped(name): value for name, value in self._run().data.metrics.items()}

    def history(self, metric: str) -> list[tuple[int, float]]:
        """Every ``(step, value)`` written of ``metric``, in the order of steps."""
        with telling(f"cannot read metric {metric!r} of trial {self.name!r}"):
            points = client_of(self.uri).get_metric_history(self.run_id, _metric_name(metric))
        return sorted((point.step, point.value) for point in points)

    def params(self) -> dict[str, str]:
        """The options that `log_params` wrote, as text."""
        return dict(self._run().data.params)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Writes options, nested ones with dotted names.

        MLflow's params never change. An option that changes in a resumed trial is written in addition, as
        ``name:2`` (``:3``, ...), so MLflow shows both.
        """
        from mlflow.entities import Param

        params_by_key = ChainMap[str, str]({}, self.params())
        for name, value in flat(params):
            key, count = _metric_name(name), 1
            while params_by_key.setdefault(key, value) != value:
                count += 1
                number = f":{count}"
                key = shortened(_metric_name(name), _MAX_KEY_CHARS - len(number)) + number
        fresh = [Param(*param) for param in params_by_key.maps[0].items()]
        with telling(f"cannot write params of trial {self.name!r}"):
            for start in range(0, len(fresh), 100):
                client_of(self.uri).log_batch(self.run_id, params=fresh[start : start + 100])

    def log_options(self, options: Options) -> None:
        """Saves the whole options, instead of those before, and writes the chosen ones as `log_params`."""
        self.log_dict(options.whole, _OPTIONS)
        self.log_params(options.chosen)

    def options(self) -> dict[str, Any]:
        """The whole options that `log_options` saved last; empty: none."""
        with telling(f"cannot read the options of trial {self.name!r}"):
            if not any(file.path == _OPTIONS for file in client_of(self.uri).list_artifacts(self.run_id)):
                return {}
            with temporary_folder("options") as folder:
                # Not by the repository, which leaves a download of a remote file behind.
                file = client_of(self.uri).download_artifacts(self.run_id, _OPTIONS, str(folder))
                return dict(json.loads(Path(file).read_text()))

    def set_tag(self, name: str, value: str) -> None:
        """Sets a tag of the run; names that begin with ``brayx.`` are brayx's own."""
        with telling(f"cannot set tag {name!r} of trial {self.name!r}"):
            client_of(self.uri).set_tag(self.run_id, _metric_name(name), value)

    def tags(self) -> dict[str, str]:
        """Every tag of the run."""
        return {unescaped(name): value for name, value in self._run().data.tags.items()}

    def log_dict(self, values: Mapping[str, Any], artifact_file: str) -> None:
        """Saves values as JSON in ``artifact_file`` (``histograms.json``); others than JSON's become text."""
        self.log_text(json.dumps(values, indent=2, default=str), artifact_file)

    def log_text(self, text: str, artifact_file: str) -> None:
        """Saves a text as ``artifact_file`` (``model/layers.txt``)."""
        with telling(f"cannot save {artifact_file} of trial {self.name!r}"):
            client_of(self.uri).log_text(self.run_id, text, artifact_file)

    def log_bytes(self, content: bytes, artifact_file: str) -> None:
        """Saves a file's content as ``artifact_file`` (``model/model.onnx``)."""
        path = PurePosixPath(artifact_file)
        with temporary_folder("artifact") as folder:
            file = folder / path.name
            file.write_bytes(content)
            self.log_file(file, path.parent.as_posix())

    def log_image(self, image: np.ndarray, key: str, step: int) -> None:
        """Saves an image ``[height, width, 3]`` uint8 of a series; MLflow's page has a slider over its steps."""
        with telling(f"cannot save image {key} of trial {self.name!r}"):
            client_of(self.uri).log_image(self.run_id, image, key=key, step=step, synchronous=True)

    def log_figure(self, figure: Figure, artifact_file: str) -> None:
        """Saves a matplotlib figure as ``artifact_file`` (``curve.png``)."""
        with telling(f"cannot save {artifact_file} of trial {self.name!r}"):
            client_of(self.uri).log_figure(self.run_id, figure, artifact_file)

    def log_file(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Copies a file into the run's artifacts, below ``artifact_path``."""
        with telling(f"cannot save {os.fspath(path)} of trial {self.name!r}"):
            client_of(self.uri).log_artifact(self.run_id, os.fspath(path), artifact_path)

    def replace_files(self, folder: str | os.PathLike[str], names: Sequence[str], artifact_path: str) -> None:
        """Replaces everything below ``artifact_path`` by some files of a folder.

        Deletes old files first, and writes ``names`` in order, so that a reader that finds the last one finds all. In a
        store without deletion old files of other names stay, which is logged.

        Args:
            folder: folder with the files.
            names: their paths in it, with ``/``.
            artifact_path: a folder of the run's artifacts, made if absent.
        """
        with telling(f"cannot save {artifact_path} of trial {self.name!r}"):
            if client_of(self.uri).list_artifacts(self.run_id, artifact_path):
                why = "it deletes nothing"  # in many stores MLflow's method silently does nothing
                try:
                    self._delete_artifacts(artifact_path)
                except Exception as error:
                    why = first_line(error)
                if client_of(self.uri).list_artifacts(self.run_id, artifact_path):
                    log.warning("%s of trial %r overwrites what the store has there: %s", artifact_path, self.name, why)
            for name in names:
                below = PurePosixPath(artifact_path, name).parent.as_posix()
                client_of(self.uri).log_artifact(self.run_id, os.fspath(Path(folder, name)), below)

    def save_checkpoint(
        self, folder: str | os.PathLike[str], step: int, metrics: Mapping[str, float] | None = None
    ) -> Checkpoint:
        """Copies ``folder`` into the trial; it counts only once it is there whole: a kill half-way leaves none.

        Args:
            folder: everything in it is copied.
            step: env steps; saving the same step again replaces it, and a kill meanwhile leaves the one before.
            metrics: numbers to choose the best by; those that are not finite are left out.
        """
        if not Path(folder).is_dir():
            raise TrackingError(f"cannot save a checkpoint of trial {self.name!r}: {folder} is not a folder")
        numbers = {name: float(value) for name, value in (metrics or {}).items() if abs(float(value)) < float("inf")}
        replaced = next((checkpoint for checkpoint in self.checkpoints() if checkpoint.step == int(step)), None)
        path = f"{checkpoints.FOLDER}/{int(step):012d}" + (f"-{secrets.token_hex(4)}" if replaced else "")
        with telling(f"cannot save a checkpoint of trial {self.name!r}"):
            checkpoint = Checkpoint(
                self.run_id, int(step), path, numbers, time.time(), checkpoints.count_files(Path(folder))
            )
            try:
                client_of(self.uri).log_artifacts(self.run_id, os.fspath(folder), path)
            except Exception:
                with contextlib.suppress(Exception):  # half of it would fill the disk for the next one
                    self._delete_artifacts(path)
                raise
            # The tag is the checkpoint: setting it is the moment at which this one counts and no other does.
            try:
                client_of(self.uri).set_tag(self.run_id, checkpoint.tag, checkpoint.tag_value)
            except Exception:
                with contextlib.suppress(Exception):  # nothing else deletes it, and the disk may fill up
                    if path not in [checkpoint.artifact_path for checkpoint in self.checkpoints()]:
                        self._delete_artifacts(path)
                raise
            if replaced is not None:
                self._delete_artifacts(replaced.artifact_path)
        return checkpoint

    def checkpoints(self) -> list[Checkpoint]:
        """Every whole checkpoint, the oldest first."""
        return checkpoints.of_tags(self.run_id, self._run().data.tags)

    def latest_checkpoint(self) -> Path | None:
        """Local folder of the newest complete checkpoint; None before the first.

        Raises:
            TrackingError: there are checkpoints, and none can be read; the newest one's reason.
        """
        newest_error: TrackingError | None = None
        for checkpoint in reversed(self.checkpoints()):
            try:
                return self.local(checkpoint)
            except TrackingError as error:
                log.warning("a checkpoint is skipped: %s", error)
                newest_error = newest_error or error
        if newest_error is not None:
            raise newest_error
        return None

    def best_checkpoint(self, metric: str) -> Checkpoint | None:
        """The checkpoint saved with the highest ``metric``, the newest of equals; None if none has it."""
        return checkpoints.best(self.checkpoints(), metric)

    def prune_checkpoints(self, keep_last: int, best_by: str | None = None) -> None:
        """Deletes all but the ``keep_last`` newest checkpoints and the best by the metric ``best_by``."""
        saved = self.checkpoints()
        keep = saved[-keep_last:] if keep_last > 0 else []
        best = checkpoints.best(saved, best_by) if best_by else None
        for checkpoint in saved:
            if checkpoint in (*keep, best):
                continue
            with telling(f"cannot delete a checkpoint of trial {self.name!r}"):
                # The tag first: a kill between the two leaves unused files, not a checkpoint without files.
                client_of(self.uri).delete_tag(self.run_id, checkpoint.tag)
                self._delete_artifacts(checkpoint.artifact_path)

    def local(self, checkpoint: Checkpoint) -> Path:
        """A local folder with the checkpoint's files: its own where artifacts are local, else a download of it.

        Raises:
            TrackingError: files are missing.
        """
        failure = f"cannot read checkpoint {checkpoint.step} of trial {self.name!r}"
        with telling(failure):
            # Not by the client, which also copies local files, to a temporary folder that it never removes.
            folder = Path(self._artifacts().download_artifacts(checkpoint.artifact_path))
            files = checkpoints.count_files(folder)
        if files < checkpoint.files:
            raise TrackingError(f"{failure}: {folder} has {files} of its {checkpoint.files} files")
        return folder

    def _delete_incomplete_checkpoints(self) -> None:
        """Deletes local folders of no checkpoint, which a killed process was copying or deleting.

        On Ray the learner's process copies, and outlives the owner a little: folders that changed just now stay.
        """
        with contextlib.suppress(Exception):  # they only waste disk space
            root = self._artifacts().artifact_dir  # other stores have no times of change
            folders = {file.path for file in client_of(self.uri).list_artifacts(self.run_id, checkpoints.FOLDER)}
            for path in folders - {checkpoint.artifact_path for checkpoint in self.checkpoints()}:
                if time.time() - checkpoints.changed_at_s(Path(root, path)) >= _COPYING_S:
                    self._delete_artifacts(path)

    def _delete_artifacts(self, path: str) -> None:
        self._artifacts().delete_artifacts(path)

    def _artifacts(self) -> Any:
        """MLflow's repository of the run's files."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        return get_artifact_repository(self._run().info.artifact_uri, tracking_uri=self.uri)

    def _run(self) -> Run:
        with telling(f"cannot read trial {self.name!r} ({self.run_id}) from {self.uri}"):
            return client_of(self.uri).get_run(self.run_id)


def _events_folder(root: str, parent: Trial | None, project: str, name: str, run_id: str) -> str:
    """The folder of a trial's event files: names may repeat, so it ends in the run's id."""
    above = os.path.join(root, project) if root else "" if parent is None else parent.tensorboard
    return os.path.join(above, f"{name} {run_id[:8]}") if above else ""


def _metric_name(name: str) -> str:
    """Escapes and shortens the name of a metric, param or tag: one invalid name makes MLflow refuse a whole batch."""
    return shortened(_escape(name), _MAX_KEY_CHARS) or "_"


def _check_names(project: str, name: str) -> None:
    for key, text in (("project", project), ("trial", name)):
        if not _NAME.fullmatch(text):
            raise ConfigError(
                f"{key} is {text!r}, expected up to 200 letters, digits, spaces or _.:+@=,- not starting with one",
                key=key,
            )


def _newest_run(client: MlflowClient, experiment_id: str, name: str, parent: Trial | None) -> Run | None:
    """The newest run of that name which is a child of ``parent``, or of none."""
    of_parent = "" if parent is None else f" and tags.`{PARENT_TAG}` = '{parent.run_id}'"
    runs = client.search_runs(
        [experiment_id],
        filter_string=f"attributes.run_name = '{name}'{of_parent}",
        order_by=["attributes.start_time DESC"],
        max_results=1 if parent else _SAME_NAME,
    )
    return next((run for run in runs if parent or PARENT_TAG not in run.data.tags), None)


def _experiment(client: MlflowClient, project: str, uri: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(project)
    if experiment is None:
        path = sqlite_path(uri)
        location = (path.parent / ARTIFACTS_FOLDER / project).as_uri() if path is not None else None
        try:
            return str(client.create_experiment(project, artifact_location=location, tags=EXPERIMENT_TAGS))
        except MlflowException:
            # Another process made it between the two calls; anything else fails again here.
            experiment = client.get_experiment_by_name(project)
            if experiment is None:
                raise
    if experiment.lifecycle_stage != "active":
        raise TrackingError(f"project {project!r} was deleted in MLflow; restore it, or name another", project=project)
    for name, value in EXPERIMENT_TAGS.items():
        if name not in experiment.tags:  # otherwise a user chose it
            client.set_experiment_tag(experiment.experiment_id, name, value)
    return str(experiment.experiment_id)


def flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names of nested options, and their values as text."""
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)[:_MAX_PARAM_CHARS]
