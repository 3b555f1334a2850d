"""Running mean and variance, and the normalisation of observations and rewards by them. NumPy only.

Merging is exact (Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances",
equations 2.1), so moments of several processes can be put together in any order. Knows nothing of environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from brayx.engines.scaling import Scaling
from brayx.errors import ConfigError

OBS_CLIP = 10.0
"""Largest magnitude of a normalised observation."""

_EPSILON = 1e-8


class Moments:
    """Count, mean and sum of squared deviations of samples, in float64.

    Args:
        shape: shape of one sample.

    Attributes:
        skipped: samples with NaN or infinity, left out because the sums could never recover.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.count = 0
        self.skipped = 0
        self.mean = np.zeros(shape)
        self.m2 = np.zeros(shape)

    @property
    def std(self) -> np.ndarray:
        """Population deviation, ``[*shape]``; 1 before the second sample."""
        if self.count < 2:
            return np.ones_like(self.mean)
        return np.sqrt(self.m2 / self.count + _EPSILON)

    def add(self, samples: np.ndarray) -> None:
        """Adds samples ``[N, *shape]``; skips those that are not finite."""
        part = Moments(self.mean.shape)
        with np.errstate(all="ignore"):  # search for bad samples only if the sum, which is cheap, is not finite
            if not np.isfinite(samples.sum(dtype=np.float64)):
                finite = np.isfinite(samples).reshape(len(samples), -1).all(axis=1)
                self.skipped += int(np.count_nonzero(~finite))
                samples = samples[finite]
        if len(samples) == 0:
            return
        part.count = len(samples)
        part.mean = samples.mean(0, dtype=np.float64)
        part.m2 = np.square(samples - part.mean).sum(0)
        self.merge(part)

    def merge(self, other: Moments) -> None:
        """Adds the samples of ``other``.

        Raises:
            ConfigError: its shape differs.
        """
        if other.mean.shape != self.mean.shape:
            raise ConfigError(
                f"moments of shape {list(self.mean.shape)} cannot be merged with {list(other.mean.shape)}"
            )
        if other.count == 0:
            return
        total = self.count + other.count
        delta = other.mean - self.mean
        self.m2 = self.m2 + other.m2 + np.square(delta) * (self.count * other.count / total)
        self.mean = self.mean + delta * (other.count / total)
        self.count = total

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies, as arrays by name."""
        return {"count": np.asarray(self.count), "mean": self.mean.copy(), "m2": self.m2.copy()}

    @staticmethod
    def from_state(state: Mapping[str, np.ndarray]) -> Moments:
        """Restores a `state_dict`."""
        mean, m2 = (np.array(state[key], np.float64) for key in ("mean", "m2"))
        moments = Moments(mean.shape)
        moments.count, moments.mean, moments.m2 = int(state["count"]), mean, m2
        return moments


def scaling_of(moments: Moments, clip: float = OBS_CLIP) -> Scaling:
    """The normalisation of a leaf with these moments."""
    return Scaling(moments.mean.astype(np.float32), (1 / moments.std).astype(np.float32), clip)


class SharedMoments:
    """Moments shared by several processes.

    Each process sends `drain` to be merged, and gets the merged moments by `adopt`.

    Args:
        shape: shape of one sample.

    Attributes:
        total: moments of everything adopted and added.
        skipped: samples that this process left out, see `Moments`.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.total = Moments(shape)
        self.skipped = 0
        self._fresh = Moments(shape)

    def add(self, samples: np.ndarray) -> None:
        """Adds ``[N, *shape]``."""
        part = Moments(self.total.mean.shape)
        part.add(samples)
        self.skipped += part.skipped
        self.total.merge(part)
        self._fresh.merge(part)

    def drain(self) -> Moments:
        """Moments added since the last call."""
        fresh, self._fresh = self._fresh, Moments(self.total.mean.shape)
        return fresh

    def adopt(self, merged: Moments) -> None:
        """Sets the merged moments, plus local samples that they do not include yet."""
        total = Moments.from_state(merged.state_dict())
        total.merge(self._fresh)
        self.total = total

    def load(self, moments: Moments) -> None:
        """Restores ``moments``, as after a restart."""
        self.total, self._fresh = Moments.from_state(moments.state_dict()), Moments(moments.mean.shape)


class ObsNormaliser:
    """Normalises observations to mean 0 and deviation 1, leaf by leaf; leaves that are not floats are unchanged.

    Args:
        shapes: shapes of the leaves of one observation, by path.
        dtypes: dtypes of these leaves.
        clip: largest magnitude of the result.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype[Any]], clip: float = OBS_CLIP
    ) -> None:
        self.leaves = {path: SharedMoments(shape) for path, shape in shapes.items() if dtypes[path].kind == "f"}
        self.clip = clip
        self._used: dict[str, Scaling] = {}
        self.refresh()

    @property
    def count(self) -> int:
        """Number of observations added."""
        return max((leaf.total.count for leaf in self.leaves.values()), default=0)

    def add(self, path: str, samples: np.ndarray) -> None:
        """Adds a leaf ``[N, ...]`` to the moments, which `refresh` applies."""
        if path in self.leaves:
            self.leaves[path].add(samples)

    def refresh(self) -> None:
        """Applies the current moments."""
        self._used = {path: scaling_of(leaf.total, self.clip) for path, leaf in self.leaves.items()}

    def scalings(self) -> dict[str, Scaling]:
        """The current normalisation of leaves, by path."""
        return self._used

    def __call__(self, path: str, leaf: np.ndarray) -> np.ndarray:
        """A leaf ``[..., *shape]``, normalised; a fresh array when it is a float one."""
        if path not in self._used:
            return leaf
        mean, scale, limit = self._used[path]
        out: np.ndarray = (leaf - mean) * scale
        return np.clip(out, -limit, limit, out=out)


class RewardNormaliser:
    """Divides rewards by the deviation of their discounted sums; not centred, so that signs stay.

    Args:
        num_envs: number of environments, each with a sum.
        gamma: discount of the sums.
        clip: largest magnitude of the result.
    """

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0) -> None:
        self.moments = SharedMoments()
        self._gamma = gamma
        self._clip = clip
        self._sums = np.zeros(num_envs)

    def begin_again(self) -> None:
        """Resets the sums after a reset of the environments; the moments stay."""
        self._sums[:] = 0.0

    def __call__(self, reward: np.ndarray, done: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Adds and normalises the rewards of a run; rewards that are not finite are not added, and stay unchanged.

        Args:
            reward: ``[N, T]``.
            done: ``[N, T]`` bool, an episode ended with that step.
            mask: ``[N, T]``, 0 for steps without an action.

        Returns:
            ``[N, T]`` float32.
        """
        finite = np.isfinite(reward)
        seen = np.where(finite, reward, 0.0)
        sums = np.empty(reward.shape)
        for t in range(reward.shape[1]):
            self._sums = self._sums * self._gamma + seen[:, t]
            sums[:, t] = self._sums
            self._sums[done[:, t]] = 0.0
        sums[~finite] = np.nan
        self.moments.add(sums[mask > 0])
        scaled: np.ndarray = reward / self.moments.total.std
        # Infinite rewards are not clipped: the buffer must refuse them.
        return np.where(finite, np.clip(scaled, -self._clip, self._clip), reward).astype(np.float32)


AllMoments: TypeAlias = dict[str, Moments]
"""Moments by name: ``reward``, and the paths of an observation's leaves."""


class MomentsStore:
    """The moments of all workers of a job. Merging is exact, so the order of calls does not matter."""

    def __init__(self) -> None:
        self._all: AllMoments = {}

    def exchange(self, fresh: AllMoments, known: int) -> AllMoments | None:
        """Merges a worker's new moments, and returns the moments of all workers.

        Args:
            fresh: moments of the worker's samples since its last call.
            known: number of samples in the moments that the worker got last.

        Returns:
            None if the store has fewer samples than ``known``, because it was restarted; it then merges nothing.
            Call `restore`.
        """
        if count_of(self._all) < known:
            return None
        for name, moments in fresh.items():
            if name in self._all:
                self._all[name].merge(moments)
            else:
                self._all[name] = Moments.from_state(moments.state_dict())
        return self._all

    def restore(self, all_: AllMoments) -> None:
        """Restores moments after a restart or from a checkpoint, unless the store has at least as many samples."""
        if count_of(self._all) < count_of(all_):
            self._all = {name: Moments.from_state(moments.state_dict()) for name, moments in all_.items()}

    def get(self) -> AllMoments:
        """The moments of all workers."""
        return self._all


def count_of(all_: AllMoments) -> int:
    """The total number of samples."""
    return sum(moments.count for moments in all_.values())


def obs_scalings(all_: AllMoments) -> dict[str, Scaling]:
    """The normalisations of observations by these moments, by path."""
    return {name: scaling_of(moments) for name, moments in all_.items() if name != "reward"}


def to_arrays(all_: AllMoments) -> dict[str, np.ndarray]:
    """Arrays by name, as a checkpoint holds them: ``obs/image:mean``, ``reward:count``."""
    return {f"{name}:{part}": array for name, moments in all_.items() for part, array in moments.state_dict().items()}


def from_arrays(state: Mapping[str, np.ndarray]) -> AllMoments:
    """The inverse of `to_arrays`."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    for key, array in state.items():
        name, _, part = key.rpartition(":")
        parts.setdefault(name, {})[part] = array
    return {name: Moments.from_state(arrays) for name, arrays in parts.items()}
