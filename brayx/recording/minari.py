"""Writes recordings as a Minari dataset, which Minari and `brayx.replay.hdf5` read. Needs h5py, the extra ``minari``.

The spaces follow from the data. The dataset names no environment, which Minari does not need to read it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from brayx.errors import ConfigError
from brayx.types import Fragment, NestedArray

_VERSION = "0.5.4"
"""Version of Minari that defines this layout."""


def write_minari(fragments: Iterator[Fragment], out: Path) -> tuple[int, int]:
    """Writes an episode for each fragment.

    Args:
        fragments: whole episodes, with the same shapes and dtypes.
        out: folder to write, which must be empty or missing; the dataset has its name.

    Returns:
        The numbers of episodes and steps.

    Raises:
        ConfigError: h5py is missing, the folder is not empty, there is no episode, or episodes differ in their shapes.
    """
    try:
        import h5py
    except ImportError as error:
        raise ConfigError("Minari's files need h5py: pip install 'brayx[minari]'") from error
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty", path=str(out))
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    episodes = steps = 0
    obs, action = _Range(), _Range()
    try:
        with h5py.File(data / "main_data.hdf5", "w") as file:
            for fragment in fragments:
                obs.add(fragment.obs)
                action.add(fragment.action)
                _write(file.create_group(f"episode_{episodes}"), fragment, episodes)
                episodes, steps = episodes + 1, steps + len(fragment)
        if not episodes:
            raise ConfigError("no recorded session is selected, or none has two ticks", path=str(out))
    except BaseException:
        shutil.rmtree(data)
        raise
    facts = {
        "dataset_id": f"brayx/{out.absolute().name}-v0",
        "minari_version": _VERSION,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "total_episodes": episodes,
        "total_steps": steps,
        "observation_space": json.dumps(obs.space()),
        "action_space": json.dumps(action.space(discrete=True)),
        "description": "recorded by brayx",
    }
    (data / "metadata.json").write_text(json.dumps(facts))
    return episodes, steps


def _write(group: Any, fragment: Fragment, number: int) -> None:
    steps = len(fragment)
    _write_tree(group, "observations", fragment.obs)
    group["actions"] = fragment.action
    group["rewards"] = fragment.reward
    for name, ended in (("terminations", fragment.terminated), ("truncations", fragment.truncated)):
        group[name] = np.arange(steps) == (steps - 1 if ended else steps)
    group.attrs.update({"id": number, "total_steps": steps})


def _write_tree(group: Any, name: str, tree: NestedArray) -> None:
    if isinstance(tree, dict):
        inner = group.create_group(name)
        for key, leaf in tree.items():
            _write_tree(inner, key, leaf)
    else:
        group[name] = tree


class _Range:
    """Shape, dtype, minimum and maximum of nested arrays ``[T, ...]``, which give their space."""

    def __init__(self) -> None:
        self._inner: dict[str, _Range] = {}
        self._dtype = np.dtype(np.float32)
        self._shape: tuple[int, ...] | None = None
        self._low = self._high = 0.0

    def add(self, tree: NestedArray) -> None:
        """Adds arrays. Raises ConfigError if their shape or dtype differs from that of earlier ones."""
        if isinstance(tree, dict):
            for name, leaf in tree.items():
                self._inner.setdefault(name, _Range()).add(leaf)
            return
        shape, (low, high) = tree.shape[1:], (float(tree.min()), float(tree.max())) if tree.size else (0.0, 0.0)
        if self._shape is None:
            self._dtype, self._shape, self._low, self._high = tree.dtype, shape, low, high
        elif (self._dtype, self._shape) != (tree.dtype, shape):
            raise ConfigError(
                f"these are sessions of several games: one has {tree.dtype} of shape {shape}, others {self._dtype} of "
                f"{self._shape}; select by agent or player"
            )
        self._low, self._high = min(self._low, low), max(self._high, high)

    def space(self, *, discrete: bool = False) -> dict[str, Any]:
        """The space as Minari writes it: ``Box``, or with ``discrete`` a ``Discrete`` for single whole numbers."""
        if self._inner:
            return {"type": "Dict", "subspaces": {name: layout.space() for name, layout in self._inner.items()}}
        assert self._shape is not None
        if discrete and not self._shape and self._dtype.kind in "iu":
            return {"type": "Discrete", "dtype": "int64", "start": 0, "n": int(self._high) + 1}
        return {
            "type": "Box",
            "dtype": str(self._dtype),
            "shape": list(self._shape),
            "low": np.full(self._shape, self._low).tolist(),
            "high": np.full(self._shape, self._high).tolist(),
        }
