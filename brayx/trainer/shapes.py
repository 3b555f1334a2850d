"""Distributions of actions, advantages and weights, taken at intervals in the learner's loop.

Taking them costs about a millisecond. They leave as `brayx.metrics.Bars` among the metrics; the trial's hub draws them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from brayx.algorithms.base import Algorithm
from brayx.metrics import Bars
from brayx.replay.packing import Batch

if TYPE_CHECKING:
    from brayx.trainer.loop import LearnerNumbers

_SAMPLES = 8192
"""Maximum values in a distribution, evenly spread over all values."""
_BARS = 48
_COMPONENTS, _PARAMETERS = 8, 24
"""Maximum number of action components and of model parameters that are shown."""
_SHARE = 0.02
"""Least time between two, as a share of the time since the start: a training of weeks makes hundreds, not millions."""


class Shapes:
    """Records distributions at intervals.

    Args:
        numbers: records them.
        interval_s: seconds between two; None: there are none.
        clock: seconds, monotonic.
    """

    def __init__(
        self, numbers: LearnerNumbers, interval_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._numbers = numbers
        self._interval_s = math.inf if interval_s is None else interval_s
        self._clock = clock
        self._began = clock()
        self._due = math.inf if interval_s is None else -math.inf

    def record_in_turn(self, batch: Batch, algorithm: Algorithm, module: nn.Module) -> None:
        """Records the distributions after an update, if it is time."""
        if (now := self._clock()) < self._due:
            return
        self._due = now + max(self._interval_s, _SHARE * (now - self._began))
        acted = batch["action"][batch["mask"] > 0]
        self._record("actions", _components(acted))
        if algorithm.advantages is not None:
            values, counted = (x.detach().float().cpu().numpy() for x in algorithm.advantages)
            self._record("advantages", [("", values[counted > 0])])
        parameters = [named for named in module.named_parameters() if named[1].ndim > 1][:_PARAMETERS]
        self._record("weights", [(name, _sampled(parameter)) for name, parameter in parameters])

    def _record(self, name: str, values: list[tuple[str, np.ndarray]]) -> None:
        shapes = {label: bars_of(array) for label, array in values}
        self._numbers.add_shapes(name, {label: bars for label, bars in shapes.items() if bars is not None})


def bars_of(values: np.ndarray) -> Bars | None:
    """The distribution of some numbers; None if none of them is finite.

    A few different integers get a bar each; anything else is divided into bars of equal width.

    Args:
        values: ``[...]``.
    """
    flat = values.reshape(-1)
    flat = flat[:: max(1, len(flat) // _SAMPLES)]
    flat = flat[np.isfinite(flat)]
    if not len(flat):
        return None
    edges: int | np.ndarray = _BARS
    if flat.dtype.kind in "iub" and int(flat.max()) - int(flat.min()) < _BARS:
        edges = np.arange(int(flat.min()), int(flat.max()) + 2) - 0.5
    try:
        counts, ends = np.histogram(flat.astype(np.float64), edges)
    except ValueError:  # numbers too close to each other to lie between
        return None
    return Bars(tuple(ends.tolist()), tuple(counts.astype(float).tolist()))


def _components(acted: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The components of actions ``[N, ...]`` with their labels; a plain action has one, without a label."""
    flat = acted.reshape(len(acted), -1)
    width = min(flat.shape[1], _COMPONENTS)
    return [("" if flat.shape[1] == 1 else str(index), flat[:, index]) for index in range(width)]


def _sampled(parameter: Tensor) -> np.ndarray:
    flat = parameter.detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLES)].float().cpu().numpy()
