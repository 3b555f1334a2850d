"""Reads the episodes of HDF5 files: Minari's, robomimic's and D4RL's. Needs h5py, the extra ``minari``.

    Minari     a group ``episode_0`` for each episode, whose ``observations`` have one entry more than its ``actions``,
               ``rewards``, ``terminations`` and ``truncations`` (minari.farama.org, "Dataset Standards")
    robomimic  a group ``data/demo_0`` for each episode: ``obs``, ``next_obs``, ``actions``, ``rewards`` and ``dones``
               of its steps (robomimic.github.io, "Dataset Contents and Visualization")
    D4RL       the steps of all episodes in a row: ``observations``, ``actions``, ``rewards``, ``terminals``,
               ``timeouts`` (github.com/Farama-Foundation/D4RL, "Using D4RL")

In all three, actions are the environment's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from brayx.actions import ActionSpec
from brayx.errors import ConfigError
from brayx.replay import steps
from brayx.replay.steps import ActionsOf, Arrays
from brayx.types import Fragment, NestedArray

_MINARI = {
    "obs": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminations",
    "truncated": "truncations",
}
"""Names in the file by field of brayx."""
_ROBOMIMIC = {"obs": "obs", "next_obs": "next_obs", "action": "actions", "reward": "rewards", "terminated": "dones"}
_D4RL = {**_MINARI, "next_obs": "next_observations", "terminated": "terminals", "truncated": "timeouts"}
_METADATA = ("dataset_id", "action_space")
_BY_BRAYX = "brayx/"
"""Namespace of the datasets that `brayx.recording.minari` writes."""


def episodes(file: Path, fields: Mapping[str, str]) -> Iterator[Fragment]:
    """As `brayx.replay.files.FormatReader`."""
    with _opened(file) as source:
        for episode in _groups(source, "episode_"):
            yield _of_minari(file, episode, fields)
        for rows in _parts_in_rows(file, source, fields):
            _header(file, rows)  # reports errors before any row is read
            count = len(rows["reward"])
            blocks = (
                {name: rows[name][start : start + steps.BLOCK_ROWS] for name in rows}
                for start in range(0, count, steps.BLOCK_ROWS)
            )
            yield from steps.episodes(file, blocks, {})


def blank(file: Path, fields: Mapping[str, str]) -> tuple[Fragment | None, set[str]]:
    """As `brayx.replay.files.FormatReader`; reads the first episode's header."""
    with _opened(file) as source:
        for episode in _groups(source, "episode_"):
            names, has = {**_MINARI, **fields}, _needed(file, episode, {**_MINARI, **fields})
            if not len(episode[names["reward"]]):
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
        header = _header(file, next(_parts_in_rows(file, source, fields)))
        return steps.blank(header), set(header)


def declared(file: Path, fields: Mapping[str, str]) -> tuple[ActionsOf | None, ActionSpec | None]:
    """As `brayx.replay.files.FormatReader`; Minari's files declare their space."""
    with _opened(file) as source:
        metadata: dict[str, Any] = {name: source.attrs[name] for name in _METADATA if name in source.attrs}
    if file.name == "main_data.hdf5":
        with contextlib.suppress(OSError, ValueError, TypeError):
            metadata |= json.loads((file.parent / "metadata.json").read_text())
    if str(metadata.get("dataset_id", "")).startswith(_BY_BRAYX):
        return None, None  # brayx exports the range of the data as the space
    with contextlib.suppress(ConfigError, ValueError, TypeError, KeyError):
        return "environment", _space(json.loads(metadata["action_space"]))
    return "environment", None


def _space(described: dict[str, Any]) -> ActionSpec:
    """Parses a space as Minari writes it; raises ConfigError, ValueError, TypeError or KeyError for any other."""
    shape: Any = described.get("shape", ())
    if described["type"] == "MultiBinary":
        shape = np.atleast_1d(described["n"])
    elif described["type"] == "MultiDiscrete":
        shape = np.shape(described["nvec"])
    bounds = {name: np.broadcast_to(described[name], shape) for name in ("low", "high") if name in described}
    return ActionSpec.of(SimpleNamespace(**(described | bounds | {"shape": tuple(shape)})))


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens the file; raises ConfigError if it cannot be read."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(f"{file}: reading it needs h5py: pip install 'brayx[minari]'", path=str(file)) from error
    try:
        source = h5py.File(file, "r")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}", path=str(file)) from error
    with source:
        yield source


def _parts_in_rows(file: Path, source: Any, fields: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The HDF5 datasets by field, for each part of the file with one row per step; yields nothing for Minari's files.

    Raises ConfigError if the file has none of the layouts.
    """
    if any(name.startswith("episode_") for name in source):
        return
    demonstrations = list(_groups(source["data"], "demo_")) if hasattr(source.get("data"), "keys") else []
    names = {**(_ROBOMIMIC if demonstrations else _D4RL), **fields}
    if not demonstrations and names["action"] not in source:
        raise ConfigError(
            f"{file}: holds no episode: expected Minari's groups episode_0 ..., robomimic's data/demo_0 ..., or D4RL's "
            f"{names['obs']}, {names['action']}, ... of all steps; it has {sorted(source)}",
            path=str(file),
        )
    for group in demonstrations or [source]:
        has = _needed(file, group, names)
        yield {ours: leaf for name in has for ours, leaf in _leaves(group[names[name]], name)}


def _groups(source: Any, prefix: str) -> Iterator[Any]:
    """The groups of a file whose names begin with ``prefix``, in the order of their numbers."""
    for name in sorted((n for n in source if n.startswith(prefix)), key=lambda n: int(n.removeprefix(prefix))):
        yield source[name]


def _needed(file: Path, group: Any, names: Mapping[str, str]) -> set[str]:
    """The fields that a group has; raises ConfigError if a required one is missing."""
    has = {ours for ours, theirs in names.items() if theirs in group}
    steps.need(file, has, group)
    return has


def _header(file: Path, rows: Mapping[str, Any]) -> Arrays:
    """Arrays of full length that use no memory, for checks; raises ConfigError if they are not fields of steps."""
    arrays = {name: np.broadcast_to(np.zeros((), column.dtype), column.shape) for name, column in rows.items()}
    return steps.by_our_names(file, arrays, {})


def _of_minari(file: Path, episode: Any, fields: Mapping[str, str]) -> Fragment:
    names = {**_MINARI, **fields}
    _needed(file, episode, names)
    count = len(episode[names["reward"]])
    terminated = bool(episode[names["terminated"]][-1])
    return Fragment(
        obs=_nest(episode[names["obs"]]),
        action=_nest(episode[names["action"]]),
        reward=np.asarray(episode[names["reward"]], np.float32),
        terminated=terminated,
        truncated=not terminated,
        log_prob=np.zeros(count, np.float32),
        policy_version=np.zeros(count, np.int64),
    )


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The HDF5 datasets in a node, with their paths."""
    if not hasattr(node, "keys"):
        yield path, node
        return
    for name in node:
        yield from _leaves(node[name], f"{path}/{name}")


def _zeros(node: Any, count: int) -> NestedArray:
    """Zeros for ``count`` steps, with the layout of an HDF5 dataset or group."""
    if hasattr(node, "keys"):
        return {name: _zeros(node[name], count) for name in node}
    return np.zeros((count, *node.shape[1:]), node.dtype)


def _nest(node: Any) -> NestedArray:
    """An HDF5 dataset as an array, a group as a dict of arrays."""
    return {name: _nest(node[name]) for name in node} if hasattr(node, "keys") else np.asarray(node)
