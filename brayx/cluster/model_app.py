"""A trained model alone, without agents: forwards of its champion over HTTP and gRPC.

serve run deployments.model:app config=pipelines/templates/cartpole.yaml
"""

# No `from __future__ import annotations`: Serve reads the class of `app`'s argument from its annotation, not from text.

import functools

from pydantic import BaseModel, ConfigDict
from ray import serve

from brayx.cluster.actor_app import pool_of
from brayx.cluster.model import model_application
from brayx.cluster.serve_run import serve_run
from brayx.jobs.config import JobConfig, only
from brayx.jobs.weights import pooled
from brayx.model.build import acting_model
from brayx.tracking import tracking_uri


class ModelArgs(BaseModel):
    """Arguments of `app`, as ``serve run`` or a Serve config's ``args`` give them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    config: str
    """YAML of the job that trained it."""
    model: str = ""
    """Which of its models; it may stay empty when there is one."""
    version: str = ""
    """Of the registry: ``models:/cartpole/3``, or an alias, which is followed; default: the project's champion."""
    tracking: str | None = None
    """MLflow's URI, or its sqlite file; default: the job's, ``MLFLOW_TRACKING_URI``, then ``mlflow.db``."""
    num_workers: int | None = None
    """Replicas; default: as in the job."""


@serve_run()
def app(args: ModelArgs) -> serve.Application:
    """The model as a Serve application; see `brayx.model.http` and ``brayx/model/v1/model.proto`` for what it answers.

    Raises:
        ConfigError: the job has no such model.
        TrackingError: the registry cannot be read, or has no such version.
    """
    job = JobConfig.load(args.config)
    name = only("model", job.models, args.model)
    uri = tracking_uri(args.tracking or job.tracking.uri)
    source = pooled(job, name, uri, args.version)
    pool = pool_of(job, uri, f"{job.project}/{name}/alone", {name: source})
    config = job.models[name]
    if args.num_workers is not None:
        config = config.model_copy(update={"num_workers": args.num_workers})
    build = functools.partial(acting_model, job.folder, config.module, name, job.in_mode("serve").as_dict())
    return model_application(
        build,
        config,
        name=name,
        checkpoint=source.checkpoint or None,
        tracking=source.tracking,
        version=source.version,
        following=(name, source.followed, pool) if source.followed is not None and pool is not None else None,
    )
