"""Initial weights of a named model, and their lineage.

The trial stores the lineage, so it outlives the model. Starts nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from brayx.errors import TrackingError
from brayx.model.checkpoints import starting_weights
from brayx.tracking import PoolEntry, Trial, find
from brayx.tracking.lineage import LINEAGE_TAG, Origin, lineage_text, origins_in
from brayx.tracking.registry import STEP_TAG
from brayx.types import Weights

_log = logging.getLogger(__name__)

_ORIGINS_KEPT = 32
"""Number of origins kept, the nearest: MLflow's tags have at most 8000 characters."""


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights of a named model.

    Attributes:
        weights: arrays by `state_dict` name.
        version: policy version of the model's own checkpoint; 0: they are not from one.
        step: step of that checkpoint.
        lineage: the models that they come from, the nearest first.
    """

    weights: Weights
    version: int
    step: int
    lineage: tuple[Origin, ...]

    @classmethod
    def of(
        cls, own: Weights, trial: Trial | None, checkpoint: str | None, uri: str, lineage: tuple[Origin, ...]
    ) -> InitialWeights:
        """Takes weights from the newest checkpoint of a resumed trial, else from ``checkpoint``, else from ``own``.

        Args:
            own: the module's weights.
            trial: the model's trial; a new lineage is written to it. A clone does not resume an earlier model's
                checkpoints in a trial of that name.
            checkpoint: a folder, or ``models:/name@alias`` in the registry of ``uri``.
            uri: tracking URI.
            lineage: lineage of a clone.

        Raises:
            BadWeights, ModelError: a checkpoint cannot be read.
            TrackingError: MLflow failed, or the reference names no version.
        """
        resumed = trial is not None and trial.resumed and bool(trial.checkpoints())
        if checkpoint is not None and checkpoint.startswith("models:/") and not resumed:
            entry = find(checkpoint, uri)
            checkpoint = f"models:/{entry.name}/{entry.version}"  # the alias may move meanwhile
            lineage = lineage or _origins(entry)
        version, step, weights = starting_weights(own, trial if resumed else None, checkpoint, uri)
        if trial is not None and resumed:
            lineage = origins_in(trial.tags().get(LINEAGE_TAG, ""))
        elif trial is not None and (lineage or trial.resumed):
            trial.set_tag(LINEAGE_TAG, lineage_text(lineage[:_ORIGINS_KEPT]))
        return cls(weights, version, step, lineage)


def abandon_trial(trial: Trial | None) -> None:
    """Ends the trial of a model that did not start: a new trial is deleted, a resumed one can be resumed again."""
    if trial is None:
        return
    try:
        if trial.resumed:
            trial.finish("KILLED")
        else:
            trial.delete()
    except TrackingError as error:
        _log.warning("trial %r stays running in MLflow without a model: %s", trial.name, error)


def _origins(entry: PoolEntry) -> tuple[Origin, ...]:
    """A registered version, and its ancestors."""
    first = Origin(f"models:/{entry.name}", entry.version, int(entry.tags.get(STEP_TAG, 0)))
    return (first, *origins_in(entry.tags.get("lineage", "")))
