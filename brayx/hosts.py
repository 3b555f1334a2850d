"""Which host runs a job: this process, unless the command names a cluster or the job needs one.

Imports Ray only where a cluster runs the job. Knows nothing of how either host works.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Literal

from brayx.errors import ConfigError

if TYPE_CHECKING:
    from brayx.jobs.config import JobConfig
    from brayx.jobs.result import TrainResult

Ingress = Literal["haproxy", "serve"]


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
    found = beyond_local(job)
    if cluster is None and found:
        print(f"{job.file}: runs on Ray: {'; '.join(found)}", file=sys.stderr, flush=True)
        return ""
    return cluster


def _on_gpu(job: JobConfig) -> list[str]:
    """The options of a job that ask for a GPU, one short clause each."""
    found = [f"{name}.use_gpu is true" for name, trainer in job.trainers.items() if trainer.use_gpu]
    found += [f"{name}.device is cuda" for name, model in job.models.items() if model.device == "cuda"]
    return found + [f"{name}.engine is tensorrt" for name, model in job.models.items() if model.engine == "tensorrt"]


def train(job: JobConfig, *, cluster: str | None = None, ingress: Ingress = "haproxy", **options: Any) -> TrainResult:
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
