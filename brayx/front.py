"""`brayx.train` and `brayx.serve`, what an agent finds by name, and the choice of the host that runs a job.

A job is the path of its YAML file, or the name of a shipped one (``cartpole.yaml``). It runs in this process, unless
the user names a cluster or the job needs one. `RemoteModel` and `RemoteBuffer` look in this process first, then on the
cluster. Imports Ray only for what is on a cluster. Knows nothing of how either host works.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brayx.errors import ConfigError
from brayx.jobs.shipped import job_file

if TYPE_CHECKING:
    from brayx.jobs.config import JobConfig
    from brayx.jobs.result import TrainResult
    from brayx.local.serving import Serving

Ingress = Literal["haproxy", "serve"]


def train(
    job: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    trial: str | None = None,
    resume: bool = True,
    tracking: str | Path | None = None,
    cluster: str | None = None,
) -> TrainResult:
    """Trains a job to its end, registers the best checkpoint and prints a summary, like `brayx train`.

    Args:
        job: path of the job's YAML.
        overrides: options of this run: ``{"trainer.num_steps": 50_000}``.
        trial: name of the MLflow run; None: the job's.
        resume: continue an interrupted trial of that name.
        tracking: MLflow's URI, or the path of its sqlite file or its folder; None: the job's, then ``mlflow.db`` here.
        cluster: address of a Ray cluster to join, empty to start one; None: this process, if it can run the job.

    Raises:
        BrayxError: the job could not be started, or its learner failed for good.
    """
    where = None if tracking is None else str(tracking)
    result = train_job(_job(job, overrides), cluster=cluster, trial_name=trial, resume=resume, tracking=where)
    print(result.summary())
    return result


def serve(
    job: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    actor: str = "",
    models: Mapping[str, str] | None = None,
    tracking: str | Path | None = None,
) -> Serving:
    """Serves the champion of a job's project in this process, until ``close()`` or the end of a ``with`` block.

    Args:
        job, overrides, tracking: as for `train`.
        actor: name of the job's actor; may be empty if there is only one.
        models: version that each model serves: ``{"model": "models:/cartpole/3"}``.

    Raises:
        ConfigError, StartupError, TrackingError: as for `brayx.local.serving.Serving`.
    """
    from brayx.local.serving import Serving
    from brayx.tracking import tracking_uri

    loaded = _job(job, overrides)
    where = loaded.tracking.uri if tracking is None else str(tracking)
    return Serving(loaded, tracking_uri(where), actor=actor, models=models)


class RemoteModel:
    """A model by its name: a `JobModel` of this process, else a `brayx.cluster.remote_model.RemoteModel`.

    Arguments and errors are those of the latter; for a job's model, the name is the only argument.
    """

    def __new__(cls, name: str, *args: Any, **options: Any) -> Any:
        from brayx.jobs.handles import model_by_name

        if (model := model_by_name(name, args, options)) is not None:
            return model
        from brayx.cluster.remote_model import RemoteModel as OnCluster

        return OnCluster(name, *args, **options)

    @classmethod
    async def connect(cls, name: str, *args: Any, **options: Any) -> Any:
        """The constructor for code on an event loop."""
        from brayx.jobs.handles import model_by_name

        if (model := model_by_name(name, args, options)) is not None:
            return model
        from brayx.cluster.remote_model import RemoteModel as OnCluster

        return await OnCluster.connect(name, *args, **options)


class RemoteBuffer:
    """A replay buffer by its name: a `JobBuffer` of this process, else a `brayx.cluster.remote_buffer.RemoteBuffer`.

    Arguments and errors are those of the latter; for a job's buffer, the name is the only argument.
    """

    def __new__(cls, name: str, *args: Any, **options: Any) -> Any:
        from brayx.jobs.handles import buffer_by_name

        if (buffer := buffer_by_name(name, args, options)) is not None:
            return buffer
        from brayx.cluster.remote_buffer import RemoteBuffer as OnCluster

        return OnCluster(name, *args, **options)

    @classmethod
    def attach(cls, name: str, **arguments: Any) -> Any:
        """Finds a running buffer."""
        from brayx.jobs.handles import buffer_by_name

        if (buffer := buffer_by_name(name, (), arguments)) is not None:
            return buffer
        from brayx.cluster.remote_buffer import RemoteBuffer as OnCluster

        return OnCluster.attach(name, **arguments)


def cluster_of(job: JobConfig, cluster: str | None) -> str | None:
    """Chooses where a job runs: None: in this process; else the address of a Ray cluster, empty to start one here.

    Prints one line if the job needs a cluster and none was named.

    Args:
        job: the job to run.
        cluster: value of the user's ``--cluster``; None: not given.

    Raises:
        ConfigError: the job asks for a GPU, this machine has none, and no cluster is named.
    """
    from brayx.local.job import beyond_local

    if not cluster and (options := _on_gpu(job)):
        import torch

        if not torch.cuda.is_available():
            lacks = f"{'; '.join(options)}: torch finds no GPU on this machine"
            raise ConfigError(f"{job.file}: {lacks}; choose the CPU, or a cluster that has one: --cluster ADDRESS")
    too_much = beyond_local(job)
    if cluster is None and too_much:
        print(f"{job.file}: runs on Ray: {'; '.join(too_much)}", file=sys.stderr, flush=True)
        return ""
    return cluster


def train_job(
    job: JobConfig, *, cluster: str | None = None, ingress: Ingress = "haproxy", **options: Any
) -> TrainResult:
    """Runs a training job to its end.

    Args:
        job: the job to run.
        cluster: address of a Ray cluster to join, empty to start one; None: in this process, if that can run the job.
        ingress: Serve's ingress, if Ray is started here.
        options: ``trial_name``, ``resume``, ``tracking``, ``log_interval``: as for `brayx.cluster.job.train`.

    Raises:
        BrayxError: the job could not be started, or its learner failed for good.
    """
    cluster = cluster_of(job, cluster)
    if cluster is None:
        from brayx.local.job import train_in_process

        return train_in_process(job, **options)
    # Read when Ray is imported: a thread that outlives the job must not start a new Ray by calling the one that ended.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    from brayx.cluster import job as on_ray

    return on_ray.train(job, cluster=cluster, ingress=ingress, **options)


def _job(path: str | Path, overrides: Mapping[str, Any] | None) -> JobConfig:
    from brayx.jobs.config import JobConfig

    return JobConfig.load(job_file(path), [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()])


def _on_gpu(job: JobConfig) -> list[str]:
    """The options of a job that ask for a GPU, one short clause each."""
    options = [f"{name}.use_gpu is true" for name, trainer in job.trainers.items() if trainer.use_gpu]
    options += [f"{name}.device is cuda" for name, model in job.models.items() if model.device == "cuda"]
    return options + [f"{name}.engine is tensorrt" for name, model in job.models.items() if model.engine == "tensorrt"]
