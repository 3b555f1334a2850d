"""Reads datasets from files as fragments, one per episode: NumPy archives, Parquet, and Minari's HDF5.

Finds the files, divides them among parallel readers, and checks that they fit each other and the model. How a format is
read is in `brayx.replay.npz`, `parquet` and `minari`; which fields the rows of the first two have is in
`brayx.replay.steps`. Where data has no log-probabilities they are 0, and an algorithm that needs them must not learn
from it (`brayx.algorithms.build.check_recorded`). Knows nothing of buffers.
"""

from __future__ import annotations

import functools
import glob
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from brayx.errors import BadFragment, ConfigError
from brayx.replay import minari, npz, parquet
from brayx.replay.packing import Layout, check
from brayx.types import DEMONSTRATION, Fragment

Format: TypeAlias = Literal["npz", "parquet", "minari"]

_SUFFIXES: dict[str, Format] = {".npz": "npz", ".parquet": "parquet", ".hdf5": "minari", ".h5": "minari"}


class Reader(Protocol):
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


_READERS: dict[Format, Reader] = {"npz": npz, "parquet": parquet, "minari": minari}


class Dataset:
    """Episodes in files.

    Args:
        path: a file, or a pattern with ``*`` for several; for Minari also the dataset's folder.
        format: the files' format; None: by their extension.
        fields: names in the data by our names, where they differ: ``{"obs": "observations"}``.
        demonstration: adds the extra ``demonstration`` to every episode, which marks it for imitation.
        reader: reads ``path``, which need not be a file; None: the format's.

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
        reader: Reader | None = None,
    ) -> None:
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
        found = format or _SUFFIXES.get(self.files[0].suffix)
        if found is None:
            known = ", ".join(_SUFFIXES)
            raise ConfigError(f"{path}: unknown format: expected one of {known}, or the option `format`", path=path)
        self._format = found

    def __iter__(self) -> Iterator[Fragment]:
        return self._of([self._read(file) for file in self.files])

    def parts(self, count: int) -> list[Callable[[], Iterator[Fragment]]]:
        """At most ``count`` parts to read in parallel.

        Each part is some of the files. If there are fewer Parquet files than ``count``, their row groups are divided;
        an episode that spans groups belongs to the part in which it starts.

        Raises:
            ConfigError: a Parquet file to divide cannot be read.
        """
        pieces: list[Callable[[], Iterator[Fragment]]] = []
        for file in self.files:
            if self._format == "parquet" and len(self.files) < count:
                spans = parquet.spans(file, math.ceil(count / len(self.files)))
                pieces += [functools.partial(parquet.episodes, file, self._fields, *span) for span in spans]
            else:
                pieces.append(self._read(file))
        shares = [pieces[number::count] for number in range(min(count, len(pieces)))]
        return [functools.partial(self._of, share) for share in shares]

    @property
    def _reader(self) -> Reader:
        if self._own is not None:
            return self._own
        assert self._format is not None
        return _READERS[self._format]  # not kept, since modules do not pickle

    def _read(self, file: Path) -> Callable[[], Iterator[Fragment]]:
        return functools.partial(self._reader.episodes, file, self._fields)

    def _of(self, pieces: list[Callable[[], Iterator[Fragment]]]) -> Iterator[Fragment]:
        for read in pieces:
            for episode in read():
                yield self._marked(episode)

    def _marked(self, episode: Fragment) -> Fragment:
        if not self._demonstration:
            return episode
        return replace(episode, extras={**episode.extras, DEMONSTRATION: np.ones(len(episode), np.bool_)})

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
        whole = Layout.of(first) if layout is None else layout.completed(first)
        found: list[set[str]] = []
        for file in self.files:
            step, fields = self._reader.blank(file, self._fields)
            if step is not None:
                _fits(self._marked(step), whole, file)
                found.append(fields)
        return set.intersection(*found)


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
