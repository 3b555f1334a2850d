"""Normalisation of observations: a mean, a scale and a limit for each leaf, stored among the model's weights.

So each policy version acts with the moments it was trained with. Their names start with `PREFIX`; `normalised` makes a
module that uses them. NumPy only; knows nothing of how moments are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from brayx.engines.base import LeafSpec
from brayx.errors import BadWeights
from brayx.types import Weights

Value = TypeVar("Value")

PREFIX = "obs_normaliser."
_NO_LIMIT = np.finfo(np.float32).max


class Scaling(NamedTuple):
    """Normalises a leaf to ``clip((leaf - mean) * scale, -limit, limit)``.

    Attributes:
        mean, scale: float32, of the leaf's shape.
        limit: largest magnitude of the result.
    """

    mean: np.ndarray
    scale: np.ndarray
    limit: float

    @staticmethod
    def none(shape: tuple[int, ...]) -> Scaling:
        """The identity."""
        return Scaling(np.zeros(shape, np.float32), np.ones(shape, np.float32), float(_NO_LIMIT))


def to_weights(scalings: Mapping[str, Scaling], paths: Iterable[str]) -> Weights:
    """``scalings`` as weights, for the observation leaves in ``paths``."""
    return {
        f"{PREFIX}{quoted(path)}.{part}": np.array(value, np.float32)
        for path in paths
        if path in scalings
        for part, value in scalings[path]._asdict().items()
    }


def from_weights(weights: Weights) -> dict[str, Scaling]:
    """The scalings among ``weights``, by the leaf's path."""
    names = [name for name in weights if name.startswith(PREFIX) and name.endswith(".mean")]
    heads = [name.removesuffix("mean") for name in names]
    return {
        _path(head): Scaling(weights[f"{head}mean"], weights[f"{head}scale"], float(weights[f"{head}limit"]))
        for head in heads
        if f"{head}scale" in weights and f"{head}limit" in weights
    }


def learned(weights: Mapping[str, Value]) -> dict[str, Value]:
    """``weights``, or their layout, without the scalings: the trained parameters alone."""
    return {name: array for name, array in weights.items() if not name.startswith(PREFIX)}


def completed(layout: Mapping[str, LeafSpec], weights: Weights) -> Weights:
    """``weights``, with identity scalings added where ``layout`` has a scaling and ``weights`` have none.

    Raises:
        BadWeights: ``weights`` scale a leaf that ``layout`` does not.
    """
    if beyond := [name for name in weights if name.startswith(PREFIX) and name not in layout]:
        raise BadWeights(
            f"weights normalise observations ({beyond[0]!r}); the running engine was built without that: restart it",
            leaf=beyond[0],
        )
    heads = {name.removesuffix("mean") for name in layout if name.startswith(PREFIX) and name.endswith(".mean")}
    lacking = {head for head in heads if not any(name.startswith(head) for name in weights)}
    if not lacking:
        return weights
    none = {_path(head): Scaling.none(layout[f"{head}mean"].shape) for head in lacking}
    return weights | to_weights(none, none)


def unscaled(scaling: Scaling, seen: np.ndarray) -> np.ndarray:
    """The raw leaf ``[N, ...]`` of a normalised one; clipped values cannot be recovered."""
    return np.asarray(seen / scaling.scale + scaling.mean, seen.dtype)


def quoted(path: str) -> str:
    """A leaf's path as one part of a weight's name: torch takes a dot for a submodule."""
    return path.replace("%", "%25").replace(".", "%2E")


def _path(head: str) -> str:
    return head.removeprefix(PREFIX).removesuffix(".").replace("%2E", ".").replace("%25", "%")
