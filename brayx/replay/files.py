"""Reads datasets from files as fragments, one per episode: NumPy archives, Parquet, HDF5, engines' demonstrations.

Finds the files, divides them among parallel readers, converts the environment's actions to a policy's, and checks that
the files fit each other and the model. `brayx.replay.npz`, `parquet`, `hdf5` and `engine_demos` read the formats;
`brayx.replay.steps` defines the fields of a step. Missing log-probabilities become 0; algorithms that need them refuse
such data (`brayx.algorithms.build.check_recorded`). Knows nothing of buffers.
"""

from __future__ import annotations

import copy
import functools
import glob
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from brayx.actions import ActionSpec
from brayx.errors import BadFragment, ConfigError
from brayx.gamecore.contract import Contract
from brayx.replay import hdf5, npz, parquet
from brayx.replay.packing import Layout, check
from brayx.replay.steps import ActionsOf
from brayx.types import DEMONSTRATION, Fragment

Format: TypeAlias = Literal["npz", "parquet", "hdf5", "minari", "unity", "godot"]

_SUFFIXES: dict[str, Format] = {
    ".npz": "npz", ".parquet": "parquet", ".hdf5": "hdf5", ".h5": "hdf5", ".demo": "unity", ".json": "godot",
}  # fmt: skip


class FormatReader(Protocol):
    """A module that reads one format.

    ``fields`` has the file's names by our names, where they differ from the format's. Both functions raise ConfigError
    if a file cannot be read, or a field is missing.
    """

    def episodes(self, file: Path, fields: Mapping[str, str]) -> Iterator[Fragment]:
        """The episodes of a file, in order."""

    def blank(self, file: Path, fields: Mapping[str, str]) -> tuple[Fragment | None, set[str]]:
        """One step of zeros with the layout of a file, and the fields that the file has by our names.

        Reads as little as it can, such as a header. The step is None if the file has none.
        """

    def declared(self, file: Path, fields: Mapping[str, str]) -> tuple[ActionsOf | None, ActionSpec | None]:
        """Whose actions a file has, and their space; None: the file does not say."""


_READERS: dict[Format, FormatReader] = {"npz": npz, "parquet": parquet, "hdf5": hdf5, "minari": hdf5}


_Piece: TypeAlias = "functools.partial[Iterator[Fragment]]"
"""Reads a file, or a part of it; the file is its first argument."""


class Dataset:
    """Episodes in files.

    Args:
        path: a file, or a pattern with ``*`` for several; for Minari also the dataset's folder.
        format: the files' format; None: by their extension.
        fields: names in the data by our names, where they differ: ``{"obs": "observations"}``.
        demonstration: adds the extra ``demonstration`` to every episode, which marks it for imitation.
        reader: reads ``path``, which need not be a file; None: the format's.
        actions: whose actions the data has, the environment's or a policy's; None: as the files say. See `for_env`.
        contract: the job's, for the demonstrations of game engines; None: it has none.

    Attributes:
        files: the files found, sorted by name.

    Raises:
        ConfigError: no file matches, or the format is unknown.
    """

    def __init__(
        self,
        path: str | Path,
        format: Format | None = None,
        fields: Mapping[str, str] | None = None,
        demonstration: bool = False,
        reader: FormatReader | None = None,
        actions: ActionsOf | None = None,
        contract: Contract | None = None,
    ) -> None:
        self._actions = actions
        self._contract = contract
        self._env: ActionSpec | None = None
        self._fields = dict(fields or {})
        self._demonstration = demonstration
        self._format: Format | None = None
        self._own = reader
        if reader is not None:
            self.files = [Path(path)]
            return
        path = str(Path(path).expanduser())
        if Path(path, "data", "main_data.hdf5").is_file():
            path = str(Path(path, "data", "main_data.hdf5"))
        self.files = [Path(name) for name in sorted(glob.glob(path))]
        if not self.files:
            raise ConfigError(f"{path}: there is no such file", path=path)
        known_format = format or _SUFFIXES.get(self.files[0].suffix)
        if known_format is None:
            known = ", ".join(_SUFFIXES)
            raise ConfigError(f"{path}: unknown format: expected one of {known}, or the option `format`", path=path)
        self._format = known_format

    @property
    def needs_contract(self) -> bool:
        """Whether the files are read by the job's contract."""
        return self._format == "godot"

    def for_env(self, env: ActionSpec | None) -> Dataset:
        """A copy of this dataset that converts the environment's actions to a policy's.

        HDF5 files and bodies of recordings hold the environment's actions, arrays of recordings the policy's. Other
        files do not say. For those the option ``actions`` is required, unless both kinds are the same.

        Args:
            env: actions of the environment in which the policy acts. None: there is no environment, and the policy's
                actions are the game's; then only categories are converted, if the files declare their first one.

        Raises:
            ConfigError: nothing says whose actions the files have, or the files declare another space than ``env``.
        """
        converted = copy.copy(self)
        declared = [self._reader.declared(file, self._fields) for file in self.files]
        owners = {owner for owner, _ in declared}
        owner = self._actions or (owners.pop() if len(owners) == 1 else None)
        if env is None and self._actions == "environment":
            raise ConfigError(
                f"{self.files[0]}: actions is 'environment', but the job has no rollout whose environment could "
                "convert them; expected 'policy' or null",
                key="actions",
            )
        if owner == "policy":
            return converted
        for file, (_, space) in zip(self.files, declared, strict=True):
            if env is None:
                converted._env = space if space is not None and space.sizes else None
            elif space is not None and not space.is_same(env):
                raise ConfigError(
                    f"{file}: its action space is {space}, expected the environment's, {env}",
                    path=str(file),
                )
        if env is not None and owner is None and env.converts:
            policy = "-1 to 1" if env.kind == "box" else "categories from 0"
            raise ConfigError(
                f"{self.files[0]}: nothing says whether its actions are the environment's, {env}, or a policy's, "
                f"{policy}; set `actions` of the source or the Dataset to environment or policy",
                key="actions",
            )
        if owner is not None and env is not None:
            converted._env = env
        return converted

    def __iter__(self) -> Iterator[Fragment]:
        return self._of([self._read(file) for file in self.files])

    def parts(self, count: int) -> list[Callable[[], Iterator[Fragment]]]:
        """At most ``count`` parts to read in parallel.

        Each part is some of the files. If there are fewer Parquet files than ``count``, their row groups are divided;
        an episode that spans groups belongs to the part in which it starts.

        Raises:
            ConfigError: a Parquet file to divide cannot be read.
        """
        pieces: list[_Piece] = []
        for file in self.files:
            if self._format == "parquet" and len(self.files) < count:
                spans = parquet.spans(file, math.ceil(count / len(self.files)))
                pieces += [functools.partial(parquet.episodes, file, self._fields, *span) for span in spans]
            else:
                pieces.append(self._read(file))
        shares = [pieces[number::count] for number in range(min(count, len(pieces)))]
        return [functools.partial(self._of, share) for share in shares]

    @property
    def _reader(self) -> FormatReader:
        if self._own is not None:
            return self._own
        assert self._format is not None
        if self._format == "unity" or self._format == "godot":
            from brayx.replay.engine_demos import EngineDemos  # imports protobuf and Pillow, which are slow

            return EngineDemos(self._format, self._contract)
        return _READERS[self._format]  # not kept, since modules do not pickle

    def _read(self, file: Path) -> _Piece:
        return functools.partial(self._reader.episodes, file, self._fields)

    def _of(self, pieces: list[_Piece]) -> Iterator[Fragment]:
        for read in pieces:
            for number, episode in enumerate(read()):
                yield self.finished(episode, f"{read.args[0]}: episode {number} (the first is 0): ")

    def finished(self, episode: Fragment, name: str = "") -> Fragment:
        """Converts an episode's actions, see `for_env`, and marks the episode if it is a demonstration.

        Args:
            episode: as read from a file.
            name: file and number of the episode, as a prefix of error messages.

        Raises:
            ConfigError: an action is outside the environment's space.
        """
        if self._env is not None:
            try:
                episode = replace(episode, action=self._env.to_policy(np.asarray(episode.action)))
            except ConfigError as error:
                raise ConfigError(f"{name}{error.message}", key="action") from error
        if not self._demonstration:
            return episode
        return replace(episode, extras={**episode.extras, DEMONSTRATION: np.ones(len(episode), np.bool_)})

    def _blank(self, file: Path) -> tuple[Fragment | None, set[str]]:
        """As the reader's, with a policy's actions."""
        step, fields = self._reader.blank(file, self._fields)
        if step is not None and self._env is not None and step.action.shape[1:] == self._env.env_shape:
            inside = self._env.to_env(np.zeros((1, *self._env.shape), step.action.dtype))
            step = replace(step, action=inside.astype(step.action.dtype))
        return None if step is None else self.finished(step, f"{file}: "), fields

    def first(self) -> Fragment:
        """Reads the first episode. Raises ConfigError if there is none."""
        episode = next(iter(self), None)
        if episode is None:
            raise ConfigError(f"{self.files[0]}: holds no episode", path=str(self.files[0]))
        return episode

    def check(self, layout: Layout | None = None, first: Fragment | None = None) -> set[str]:
        """Checks the first episode against ``layout``, and the fields of every file against the first episode.

        Only the headers of the other files are read.

        Args:
            layout: required layout of the fragments, as far as it is known.
            first: the first episode, if it was read before; None: read it.

        Returns:
            The fields of a step that all files have, by our names; other fields of a fragment get default values.

        Raises:
            ConfigError: the data does not fit, or is empty; names the file, its fields and what would fit.
        """
        episode = self.first() if first is None else first
        return self._check(episode, layout) | set(episode.extras)

    def checked(self, layout: Layout | None = None) -> Iterator[Fragment]:
        """All episodes, each read once; runs `check` before it yields the first."""
        number = -1
        for number, episode in enumerate(self):
            if not number:
                self._check(episode, layout)
            yield episode
        if number < 0:
            self.first()  # raises

    def _check(self, first: Fragment, layout: Layout | None) -> set[str]:
        """As `check`, of the fields that are in the files."""
        _fits(first, layout, self.files[0])
        whole = Layout.of(first, layout)
        fields_of: list[set[str]] = []
        for file in self.files:
            step, fields = self._blank(file)
            if step is not None:
                _fits(step, whole, file)
                fields_of.append(fields)
        return set.intersection(*fields_of)


def _fits(episode: Fragment, layout: Layout | None, file: Path) -> None:
    """Raises ConfigError if an episode of a file does not fit a layout."""
    try:
        check(episode, layout)
    except BadFragment as error:
        has = {**Layout.of(episode).obs, "action": Layout.of(episode).action}
        wants = layout.obs if layout is not None else {}
        raise ConfigError(
            f"{file}: {error.message}; it has {_listed(has)}" + (f"; fits: {_listed(wants)}" if wants else ""),
            path=str(file),
        ) from error


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {shape} of {dtype}" for name, (shape, dtype) in fields.items())
