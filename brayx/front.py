"""The Python front: `brayx.train` and `brayx.serve`, as the commands of these names.

A job is the path of its YAML file, or the name of a shipped one (``cartpole.yaml``). Knows nothing of how jobs run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.jobs.shipped import job_file

if TYPE_CHECKING:
    from brayx.jobs.config import JobConfig
    from brayx.jobs.result import TrainResult
    from brayx.local.serving import Serving


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
    from brayx import hosts

    where = None if tracking is None else str(tracking)
    result = hosts.train(_job(job, overrides), cluster=cluster, trial_name=trial, resume=resume, tracking=where)
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


def _job(path: str | Path, overrides: Mapping[str, Any] | None) -> JobConfig:
    from brayx.jobs.config import JobConfig

    return JobConfig.load(job_file(path), [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()])
