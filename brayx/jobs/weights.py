"""Sources of the weights of models that act but are not trained here: a registered version, by an alias or a number.

Imports no Ray, and torch only to build such a model. Knows nothing of doors, sessions or learning.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from brayx.engines import FROZEN
from brayx.errors import BadWeights, ModelNotFound
from brayx.jobs.config import JobConfig, pool_name
from brayx.model.arms import Followed, WeightSource
from brayx.model.config import ModelConfig
from brayx.tracking import find, local_files

if TYPE_CHECKING:
    from brayx.metrics import Recorder
    from brayx.model.acting import ActingModel
    from brayx.types import Weights

logger = logging.getLogger("ray.serve")


def pooled(job: JobConfig, model: str, uri: str, reference: str = "") -> WeightSource:
    """The registered version of a model: the one ``reference`` names, else the champion, else none: as built.

    Raises:
        TrackingError: there is no version ``reference``, or the registry cannot be read.
    """
    named = reference or f"models:/{pool_name(job, model)}@champion"
    followed = _followed(job.models[model], named)
    try:
        entry = find(named, uri)
        # Files that are not local are a replica's to download: it may be on another node, or start long after this.
        checkpoint = str(local_files(entry, uri) or f"models:/{entry.name}/{entry.version}")
        return WeightSource(
            checkpoint=checkpoint, tracking=uri, version=entry.version, followed=followed, name=entry.name
        )
    except ModelNotFound as error:
        if reference:
            raise
        if not job.needs_contract:  # else `with_contract` refuses it
            logger.warning("serving model %r untrained: %s", model, error)
        return WeightSource(followed=followed, name=pool_name(job, model))


def sources_of(job: JobConfig, uri: str, references: Mapping[str, str]) -> dict[str, WeightSource]:
    """The source of each model of a served job.

    Args:
        job: the job.
        uri: tracking URI.
        references: registered version of some models, as for `pooled`.

    Raises:
        TrackingError: a version does not exist, or the registry cannot be read.
    """
    return {name: pooled(job, name, uri, references.get(name, "")) for name in job.models}


def followed_by(sources: Mapping[str, WeightSource]) -> dict[str, Followed]:
    """The models that follow an alias."""
    return {name: source.followed for name, source in sources.items() if source.followed is not None}


def pool_args(
    job: JobConfig, uri: str, sources: Mapping[str, WeightSource], others: Mapping[str, Followed] | None = None
) -> tuple[str, str, dict[str, Followed]]:
    """The `Pool` that models are served from: its arguments. Results by arm are logged if there is a canary.

    Args:
        job: the job.
        uri: tracking URI.
        sources: source of each model.
        others: models that follow no alias, and whose versions are requested.
    """
    followed = {**(others or {}), **followed_by(sources)}
    return uri, job.project if any(alias.canary for alias in followed.values()) else "", followed


def registered(sources: Mapping[str, WeightSource], followed: Mapping[str, Collection[int]]) -> dict[str, list[str]]:
    """The registered versions that a new session may get, by model: ``models:/NAME/VERSION``; none: it is as built.

    Args:
        sources: source of every model.
        followed: the versions of those that are served by an alias.
    """
    versions = {name: followed.get(name, [source.version or 0]) for name, source in sources.items()}
    return {
        name: [f"models:/{sources[name].name}/{version}" for version in sorted(served) if version]
        for name, served in versions.items()
    }


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
    from brayx.model.acting import ActingModel
    from brayx.model.build import acting_model
    from brayx.model.checkpoints import checkpoint_folder, engine_from, read_checkpoint

    config, checkpoint = job.models[name], source.checkpoint or None
    module, example = acting_model(job.folder, config.module, name, as_dict)
    version, weights = source.version or 0, None
    if checkpoint is not None:
        with checkpoint_folder(checkpoint, source.tracking) as folder:
            read_version, weights = read_checkpoint(folder)
        version = read_version if source.version is None else source.version
    try:
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
    except BadWeights as error:
        raise BadWeights(
            f"{name}: models:/{source.name}/{version} was trained with other options of the model: {error.message}; "
            f"`brayx serve models:/{source.name}/{version}` serves it with its own",
            **error.details,
        ) from None


def _followed(config: ModelConfig, reference: str) -> Followed | None:
    """Options to follow the alias of a model served by ``reference``; None: a fixed version, or a frozen engine."""
    name, _, alias = reference.removeprefix("models:/").partition("@")
    if not alias or config.follow_s is None or config.engine in FROZEN:
        return None
    canary = config.canary
    if canary is None:
        return Followed(name, alias, every_s=config.follow_s)
    return Followed(name, alias, canary.alias, canary.share, config.follow_s)
