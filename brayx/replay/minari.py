"""Reads the episodes of Minari's HDF5 files. Needs h5py, the extra ``minari``.

``main_data.hdf5`` has a group for each episode, whose ``observations`` have one entry more than its ``actions``,
``rewards``, ``terminations`` and ``truncations`` (minari.farama.org, "Dataset Standards").
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brayx.errors import ConfigError
from brayx.replay.steps import need
from brayx.types import Fragment, NestedArray

_FIELDS = {
    "obs": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminations",
    "truncated": "truncations",
}
"""Minari's names by ours."""


def episodes(file: Path, fields: Mapping[str, str]) -> Iterator[Fragment]:
    """As `brayx.replay.files.Reader`."""
    names = {**_FIELDS, **fields}
    with contextlib.closing(_groups(file, names)) as groups:
        for episode, _ in groups:
            steps = len(episode[names["reward"]])
            terminated = bool(episode[names["terminated"]][-1])
            yield Fragment(
                obs=_nest(episode[names["obs"]]),
                action=_nest(episode[names["action"]]),
                reward=np.asarray(episode[names["reward"]], np.float32),
                terminated=terminated,
                truncated=not terminated,
                log_prob=np.zeros(steps, np.float32),
                policy_version=np.zeros(steps, np.int64),
            )


def blank(file: Path, fields: Mapping[str, str]) -> tuple[Fragment | None, set[str]]:
    """As `brayx.replay.files.Reader`; reads the first episode's header."""
    names = {**_FIELDS, **fields}
    with contextlib.closing(_groups(file, names)) as groups:
        episode, has = next(groups, (None, set()))
        if episode is None or not len(episode[names["reward"]]):
            return None, has
        number = np.zeros(1, np.float32)
        step = Fragment(
            obs=_zeros(episode[names["obs"]], 2),
            action=_zeros(episode[names["action"]], 1),
            reward=number,
            terminated=True,
            truncated=False,
            log_prob=number,
            policy_version=np.zeros(1, np.int64),
        )
        return step, has


def _groups(file: Path, names: Mapping[str, str]) -> Generator[tuple[Any, set[str]], None, None]:
    """The group of each episode, with the fields that it has by our names; ``names`` has the file's names by ours."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(f"{file}: reading it needs h5py: pip install 'brayx[minari]'", path=str(file)) from error
    try:
        source = h5py.File(file, "r")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}", path=str(file)) from error
    with source:
        groups = [name for name in source if name.startswith("episode_")]
        for name in sorted(groups, key=lambda name: int(name.removeprefix("episode_"))):
            episode = source[name]
            has = {ours for ours, theirs in names.items() if theirs in episode}
            need(file, has, episode)
            yield episode, has


def _zeros(node: Any, steps: int) -> NestedArray:
    """Zeros for ``steps`` steps, with the layout of an HDF5 dataset or group."""
    if hasattr(node, "keys"):
        return {name: _zeros(node[name], steps) for name in node}
    return np.zeros((steps, *node.shape[1:]), node.dtype)


def _nest(node: Any) -> NestedArray:
    """An HDF5 dataset as an array, a group as a dict of arrays."""
    return {name: _nest(node[name]) for name in node} if hasattr(node, "keys") else np.asarray(node)
