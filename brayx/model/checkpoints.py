"""Checkpoints of a named model, which a thread writes to MLflow; and its initial weights, with their lineage.

A checkpoint folder has ``weights.npz``, and ``meta.json`` with policy version and step. Knows nothing of Ray; a failed
write is logged, and the next one tries again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.engines.base import Engine, load_weights, save_weights
from brayx.errors import BadWeights, BrayxError, ConfigError, ModelError, TrackingError
from brayx.model.build import engine_of
from brayx.model.config import ModelConfig
from brayx.temporary import temporary_folder
from brayx.tracking import PoolEntry, Trial, files_of, find
from brayx.tracking.lineage import LINEAGE_TAG, Origin, lineage_text, origins_in
from brayx.tracking.registry import STEP_TAG
from brayx.types import Weights

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger(__name__)

_KEEP = 2
_ORIGINS_KEPT = 32
"""Number of origins kept, the nearest: MLflow's tags have at most 8000 characters."""

CheckpointInterval = int | timedelta | None
"""Steps, or time; None: no checkpoints."""


def checked_interval(interval: Any) -> CheckpointInterval:
    """Checks an interval; converts NumPy's integers to Python's.

    Raises:
        ConfigError: it is neither a number of steps (1 or more), nor a positive timedelta, nor None.
    """
    if interval is None or (isinstance(interval, timedelta) and interval > timedelta(0)):
        return interval
    if not isinstance(interval, bool | timedelta):
        with contextlib.suppress(TypeError):
            steps = operator.index(interval)
            if steps >= 1:
                return steps
    raise ConfigError(
        f"checkpoint_interval is {interval!r}, expected a number of steps (1 or more), a positive "
        "timedelta such as timedelta(minutes=5), or None for no checkpoints",
        key="checkpoint_interval",
    )


class Checkpoints:
    """Writes weights at an interval, one set at a time; weights offered meanwhile are not due.

    Args:
        trial: gets the checkpoints; None: none are written.
        interval: steps or time since the last one; the first set of weights is always due.
    """

    def __init__(self, trial: Trial | None, interval: CheckpointInterval) -> None:
        self._trial = trial
        self._interval = interval
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="brayx-checkpoints")
        self._writing: Future[None] | None = None
        self._last: tuple[int, float] | None = None

    def offer(self, weights: Weights, version: int, step: int) -> bool:
        """Starts to write ``weights`` if that is due; returns whether it did. Do not change them meanwhile."""
        if self._trial is None or (self._writing is not None and not self._writing.done()):
            return False
        now = time.monotonic()
        if self._last is not None:
            last_step, last_s = self._last
            if isinstance(self._interval, timedelta):
                due = now - last_s >= self._interval.total_seconds()
            else:
                due = step - last_step >= (self._interval or 0)
            if not due:
                return False
        self._last = (step, now)
        copied = {name: array.copy() for name, array in weights.items()}
        self._writing = self._executor.submit(self._write, self._trial, copied, version, step)
        return True

    def close(self) -> None:
        """Waits for a running write."""
        self._executor.shutdown(wait=True)

    @staticmethod
    def _write(trial: Trial, weights: Weights, version: int, step: int) -> None:
        try:
            with temporary_folder("checkpoint") as folder:
                save_weights(folder / "weights.npz", weights)
                meta = {"counters": {"policy_version": version, "env_steps": step}}
                (folder / "meta.json").write_text(json.dumps(meta))
                trial.save_checkpoint(folder, step)
            trial.prune_checkpoints(_KEEP)
        except BrayxError as error:
            _log.error("a checkpoint of model %r at step %d was not written: %s", trial.name, step, error)
        except Exception:
            _log.exception("a checkpoint of model %r at step %d was not written", trial.name, step)


@contextlib.contextmanager
def checkpoint_folder(checkpoint: str, uri: str) -> Iterator[Path]:
    """A checkpoint's folder: ``checkpoint`` itself, or the files of a registered version, for a ``with`` block.

    Raises:
        TrackingError: the reference names no version, or its files cannot be read.
    """
    if checkpoint.startswith("models:/"):
        with files_of(checkpoint, uri) as folder:
            yield folder
    else:
        yield Path(checkpoint)


def starting_weights(
    initial: Weights | None, trial: Trial | None, checkpoint: str | None, uri: str
) -> tuple[int, int, Weights]:
    """Policy version, step and weights to start with: the trial's newest checkpoint, else ``checkpoint``, else
    ``initial``.

    Args:
        initial: the module's weights.
        trial: the trial with this model's checkpoints.
        checkpoint: folder, or ``models:/name@alias``; its version and step belong to another lineage and are ignored.
        uri: tracking URI of such a reference.

    Raises:
        BadWeights: a checkpoint cannot be read; or there are no weights at all.
        TrackingError: the reference names nothing.
    """
    folder = trial.latest_checkpoint() if trial is not None else None
    if folder is not None:
        try:
            counters = json.loads((folder / "meta.json").read_text())["counters"]
            return int(counters["policy_version"]), int(counters["env_steps"]), load_weights(folder / "weights.npz")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{folder / 'meta.json'} cannot be read: {error}") from error
    if checkpoint is not None:
        with checkpoint_folder(checkpoint, uri) as checkpoint_dir:
            return 0, 0, load_weights(checkpoint_dir / "weights.npz")
    if initial is None:
        raise BadWeights("there are no weights to start with")
    return 0, 0, initial


def engine_from(
    config: ModelConfig,
    module: nn.Module,
    example_args: tuple[Any, ...],
    checkpoint: str | None,
    tracking: str,
    version: int | None,
    preferred: tuple[int, Weights] | None = None,
) -> tuple[Engine, int]:
    """The engine of a model that starts from a checkpoint, and the policy version that it acts with.

    Args:
        config, module, example_args: as for `engine_of`.
        checkpoint: folder with ``weights.npz``, and ``meta.json`` that gives their policy version; or
            ``models:/name/3``. None: the module's own weights.
        tracking: MLflow's URI, for such a reference.
        version: their policy version, instead of the one in ``meta.json``.
        preferred: version and weights to start from instead, if they fit.

    Raises:
        BadWeights: the weights cannot be read or do not fit.
        ModelError: ``meta.json`` cannot be read.
        TrackingError: the registry has no such version, or its files cannot be read.
        ConfigError, EngineMismatch: as `engine_of`.
    """
    if preferred is not None:
        now, weights = preferred
        try:
            return engine_of(config, module, example_args, weights), now
        except BrayxError as error:  # with other weights the same model may be built
            _log.warning("the model does not start from version %d: %s", now, error)
    if checkpoint is None:
        return engine_of(config, module, example_args), version or 0
    with checkpoint_folder(checkpoint, tracking) as folder:
        stored, weights = read_checkpoint(folder)
        engine = engine_of(config, module, example_args, weights, folder)
    return engine, stored if version is None else version


def read_checkpoint(folder: Path) -> tuple[int, Weights]:
    """Policy version and weights of a checkpoint; the version is 0 when its ``meta.json`` says nothing of that.

    Raises:
        BadWeights: its ``weights.npz`` cannot be read.
        ModelError: its ``meta.json`` cannot be read.
    """
    return _policy_version(folder / "meta.json"), load_weights(folder / "weights.npz")


def _policy_version(path: Path) -> int:
    if not path.exists():
        return 0
    try:
        return int(json.loads(path.read_text()).get("counters", {}).get("policy_version", 0))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}", file=str(path)) from error


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
        cls, initial: Weights, trial: Trial | None, checkpoint: str | None, uri: str, lineage: tuple[Origin, ...]
    ) -> InitialWeights:
        """Takes weights from the newest checkpoint of a resumed trial, else from ``checkpoint``, else from ``initial``.

        Args:
            initial: the module's weights.
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
        version, step, weights = starting_weights(initial, trial if resumed else None, checkpoint, uri)
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
