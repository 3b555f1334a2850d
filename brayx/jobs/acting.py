"""Models that act but are not trained here: each a registered version, or the model as built.

Knows nothing of doors, sessions or learning.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from brayx.jobs.config import JobConfig
from brayx.jobs.weights import WeightSource
from brayx.local.acting import ActingModel
from brayx.metrics import Recorder
from brayx.model.build import acting_model
from brayx.model.checkpoints import checkpoint_folder, engine_from, read_checkpoint
from brayx.types import Weights


def acting_from(
    source: WeightSource,
    job: JobConfig,
    name: str,
    as_dict: Mapping[str, Any],
    sink: Recorder,
    fetch: Callable[[int], Awaitable[Weights]] | None = None,
) -> ActingModel:
    """Builds the model component ``name`` of a job, with the weights that ``source`` names.

    Args:
        as_dict: the job, as passed to ``build_model``.
        sink, fetch: as for `ActingModel`.

    Raises:
        BrayxError: the model cannot be built, or the weights cannot be read or do not fit.
    """
    config, checkpoint = job.models[name], source.checkpoint or None
    module, example = acting_model(job.folder, config.module, name, as_dict)
    version, weights = source.version or 0, None
    if checkpoint is not None:
        with checkpoint_folder(checkpoint, source.tracking) as folder:
            found, weights = read_checkpoint(folder)
        version = found if source.version is None else source.version
    return ActingModel(
        config,
        module,
        example,
        sink,
        version=version,
        weights=weights,
        engine=lambda: engine_from(config, module, example, checkpoint, source.tracking, source.version)[0],
        fetch=fetch,
    )
