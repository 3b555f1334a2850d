"""Episodes of files that hold one *step* per row, in order, under a fragment's names.

The names are ``obs`` (or ``obs/...`` by path), ``action``, ``reward``, ``terminated``; optionally ``truncated``,
``next_obs``, ``log_prob``, ``policy_version`` and extras. A terminated or truncated row ends its episode, and so does
the end of the file. Without ``next_obs`` the observation after the last step of an episode is unknown: unless that step
is terminated, it is used for bootstrapping only. Knows nothing of how a format stores its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from brayx.errors import ConfigError
from brayx.types import Fragment, unflatten

ActionsOf: TypeAlias = Literal["environment", "policy"]
"""Whose actions the data has: the environment's own, or a policy's, with categories from 0 and scaled actions from -1
to 1."""
Arrays = dict[str, np.ndarray]
"""Consecutive rows by the names of their columns, ``[rows, ...]`` each."""

BLOCK_ROWS = 4096
"""Rows of a file read at a time."""
_NEEDED = ("action", "reward", "terminated")
_PLAIN = ("reward", "terminated", "truncated", "log_prob", "policy_version")
_OWN = (*_NEEDED, "truncated", "log_prob", "policy_version")


def episodes(
    file: Path, blocks: Iterable[Arrays], fields: Mapping[str, str], goes_on: bool = False, rows: int | None = None
) -> Iterator[Fragment]:
    """Episodes from consecutive blocks of rows; an episode may span several blocks.

    Args:
        file: the file, for errors.
        blocks: the blocks of rows, by the file's names.
        fields: the file's names by our names, where they differ.
        goes_on: the first rows continue an episode of the part before, and are skipped.
        rows: rows of this part; later rows only complete its last episode. None: all rows.

    Raises:
        ConfigError: as `by_our_names`.
    """
    begun: list[Arrays] = []
    row, over = 0, False
    for block in blocks:
        arrays = by_our_names(file, block, fields)
        size, ends = len(arrays["reward"]), np.flatnonzero(_ends(arrays)) + 1
        start, stop = 0, size
        if goes_on:
            start, goes_on = int(ends[0]) if len(ends) else size, not len(ends)
        if rows is not None and len(ends) and row + ends[-1] >= rows:
            stop, over = int(ends[row + ends >= rows][0]), True
        row += size
        if (start, stop) != (0, size):
            arrays = {name: array[start:stop] for name, array in arrays.items()}
        last = int(_ends(arrays).nonzero()[0].max(initial=-1)) + 1
        if last:
            yield from _whole([*begun, {name: array[:last] for name, array in arrays.items()}])
            begun = []
        if last < len(arrays["reward"]):
            begun.append({name: array[last:] for name, array in arrays.items()})
        if over:
            break
    if begun:
        yield from _whole(begun)


def blank(arrays: Arrays) -> Fragment | None:
    """One step of zeros with the layout of some rows by our names; None if there are none."""
    if not len(arrays["reward"]):
        return None
    zeros = {name: np.zeros((1, *array.shape[1:]), array.dtype) for name, array in arrays.items()}
    return _fragment(zeros, 0, 1, over=True)


def by_our_names(file: Path, arrays: Arrays, fields: Mapping[str, str]) -> Arrays:
    """A block of rows by our names.

    Args:
        file: the file, for errors.
        arrays: the block, by the file's names.
        fields: the file's names by our names, where they differ.

    Raises:
        ConfigError: a field is missing, or has no value for each row.
    """
    ours = {theirs: name for name, theirs in fields.items()}
    arrays = {ours.get(name, name): array for name, array in arrays.items()}
    need(file, arrays, arrays)
    for name, array in arrays.items():
        if array.ndim == 0:
            raise ConfigError(f"{file}: {name} is one value, expected one for each step", path=str(file))
        if name in _PLAIN and (array.ndim > 1 or array.dtype.kind not in "biuf"):
            raise ConfigError(
                f"{file}: {name} has {array.dtype} of shape {array.shape}, expected a number for each step",
                path=str(file),
            )
    rows = len(arrays["reward"])
    for name, array in arrays.items():
        if len(array) != rows:
            raise ConfigError(f"{file}: {name} has {len(array)} rows, but reward has {rows}", path=str(file))
        following = arrays.get(f"next_{name}", array)
        if _is(name, "obs") and following.shape[1:] != array.shape[1:]:
            raise ConfigError(
                f"{file}: next_{name} has shape {following.shape[1:]} a step, but {name} has {array.shape[1:]}",
                path=str(file),
            )
    return arrays


def declares_nothing(file: Path, fields: Mapping[str, str]) -> tuple[None, None]:
    """As `brayx.replay.files.FormatReader.declared`, for formats that cannot declare a space."""
    return None, None


def need(file: Path, has: Iterable[str], names: Iterable[str]) -> None:
    """Checks that the data has all fields of a step.

    Args:
        file: the file, for errors.
        has: the fields that it has, by our names.
        there: the same as the error lists them.

    Raises:
        ConfigError: one is missing.
    """
    has = set(has)
    missing = [name for name in _NEEDED if name not in has]
    if not any(_is(name, "obs") for name in has):
        missing = ["obs", *missing]
    if missing:
        raise ConfigError(
            f"{file}: has no {missing[0]}; it has {sorted(names)}. Needed: obs, {', '.join(_NEEDED)}; "
            "the option `fields` maps other names",
            path=str(file),
        )


def _whole(blocks: list[Arrays]) -> Iterator[Fragment]:
    """The episodes of rows that end with the end of an episode."""
    first = blocks[0]
    arrays = first if len(blocks) == 1 else {name: np.concatenate([block[name] for block in blocks]) for name in first}
    following = any(_is(name, "next_obs") for name in arrays)
    terminated, ends = arrays["terminated"].astype(bool), _ends(arrays)
    ends[-1:] = True
    start = 0
    for end in (np.flatnonzero(ends) + 1).tolist():
        over = bool(terminated[end - 1])
        # Without the observation after it, a last step that is not terminated serves as that observation.
        stop = end if over or following else end - 1
        if stop > start:
            yield _fragment(arrays, start, stop, over)
        start = end


def _fragment(arrays: Arrays, start: int, stop: int, over: bool) -> Fragment:
    """Rows ``start`` to ``stop - 1`` as an episode, terminated if it is ``over``."""
    steps, part = stop - start, slice(start, stop)
    obs, extras = {}, {}
    for name, array in arrays.items():
        if _is(name, "obs"):
            following = arrays.get(f"next_{name}")
            last = array[stop - 1 if over else stop] if following is None else following[stop - 1]
            obs[name] = np.concatenate([array[part], last[np.newaxis]])
        elif name not in _OWN and not _is(name, "next_obs"):
            extras[name] = array[part]
    log_prob = arrays.get("log_prob")
    version = arrays.get("policy_version")
    return Fragment(
        obs=obs["obs"] if "obs" in obs else unflatten(obs, "obs"),
        action=arrays["action"][part],
        reward=arrays["reward"][part].astype(np.float32),
        terminated=over,
        truncated=not over,
        log_prob=np.zeros(steps, np.float32) if log_prob is None else log_prob[part].astype(np.float32),
        policy_version=np.zeros(steps, np.int64) if version is None else version[part].astype(np.int64),
        extras=extras,
    )


def _is(name: str, field: str) -> bool:
    """Whether a column is a field or, by its path, a part of it."""
    return name == field or name.startswith(f"{field}/")


def _ends(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which rows end an episode."""
    terminated = arrays["terminated"].astype(bool)
    return terminated | arrays["truncated"].astype(bool) if "truncated" in arrays else terminated
