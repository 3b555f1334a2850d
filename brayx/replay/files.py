"""Reads datasets from files as fragments, one per episode: NumPy archives, Parquet, and Minari's HDF5.

npz and Parquet files hold one *step* per row, in order, under a fragment's names: ``obs`` (or ``obs/...`` by path),
``action``, ``reward``, ``terminated``; optionally ``truncated``, ``next_obs``, ``log_prob``, ``policy_version`` and
extras. A terminated or truncated row ends its episode, and so does the end of the file. Without ``next_obs`` the
observation after the last step of an episode is unknown: unless that step is terminated, it is used for bootstrapping
only. Files are read in blocks of rows. An array in Fortran order is read as a whole, since its rows are not contiguous.

Minari's ``main_data.hdf5`` has a group for each episode, whose ``observations`` have one entry more than its
``actions``, ``rewards``, ``terminations`` and ``truncations`` (minari.farama.org, "Dataset Standards"). Reading it
needs h5py, the extra ``minari``. Where data has no log-probabilities they are 0, and an algorithm that needs them must
not learn from it (`brayx.algorithms.build.check_recorded`).

Knows nothing of buffers.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import math
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import numpy as np

from brayx.errors import BadFragment, ConfigError, first_line
from brayx.replay.packing import Layout, check
from brayx.types import DEMONSTRATION, Fragment, NestedArray

Format: TypeAlias = Literal["npz", "parquet", "minari"]

_SUFFIXES: dict[str, Format] = {".npz": "npz", ".parquet": "parquet", ".hdf5": "minari", ".h5": "minari"}
_NEEDED = ("action", "reward", "terminated")
_PLAIN = ("reward", "terminated", "truncated", "log_prob", "policy_version")
_OWN = (*_NEEDED, "truncated", "log_prob", "policy_version")
_ROWS = 4096
"""Rows of a file read at a time."""


class Dataset:
    """Episodes in files.

    Args:
        path: a file, or a pattern with ``*`` for several; for Minari also the dataset's folder.
        format: the files' format; None: by their extension.
        fields: names in the data by our names, where they differ: ``{"obs": "observations"}``.
        demonstration: adds the extra ``demonstration`` to every episode, which marks it for imitation.

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
    ) -> None:
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
        self._read: Callable[[Path], Iterator[Fragment]] = {
            "npz": self._npz,
            "parquet": self._parquet,
            "minari": self._minari,
        }[found]
        self._kind = found
        self._fields = dict(fields or {})
        self._demonstration = demonstration
        self._has: set[str] = set()

    def __iter__(self) -> Iterator[Fragment]:
        return self._of([functools.partial(self._read, file) for file in self.files])

    def parts(self, count: int) -> list[Callable[[], Iterator[Fragment]]]:
        """At most ``count`` parts to read in parallel.

        Each part is some of the files. If there are fewer Parquet files than ``count``, their row groups are divided;
        an episode that spans groups belongs to the part in which it starts.

        Raises:
            ConfigError: a Parquet file to divide cannot be read.
        """
        pieces: list[Callable[[], Iterator[Fragment]]] = []
        for file in self.files:
            if self._kind == "parquet" and len(self.files) < count:
                spans = _spans(file, math.ceil(count / len(self.files)))
                pieces += [functools.partial(self._parquet, file, *span) for span in spans]
            else:
                pieces.append(functools.partial(self._read, file))
        shares = [pieces[number::count] for number in range(min(count, len(pieces)))]
        return [functools.partial(self._of, share) for share in shares]

    def _of(self, pieces: list[Callable[[], Iterator[Fragment]]]) -> Iterator[Fragment]:
        for read in pieces:
            for episode in read():
                yield self._marked(episode) if self._demonstration else episode

    @staticmethod
    def _marked(episode: Fragment) -> Fragment:
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
        looked_at = self._fitting(self.first() if first is None else first, layout, self.files[0])
        return self._alike(looked_at, layout) | set(looked_at.extras)

    def checked(self, layout: Layout | None = None) -> Iterator[Fragment]:
        """All episodes, each read once; runs `check` before it yields the first."""
        number = -1
        for number, episode in enumerate(self):
            if not number:
                self._alike(self._fitting(episode, layout, self.files[0]), layout)
            yield episode
        if number < 0:
            self.first()  # raises

    def _alike(self, first: Fragment, layout: Layout | None) -> set[str]:
        """Refuses files whose episodes differ in layout from the first; returns the fields that all files have."""
        whole = Layout.of(first) if layout is None else layout.completed(first)
        common = set(self._has)
        for file in self.files:
            blank = self._blank(file)
            if blank is not None:
                self._fitting(self._marked(blank) if self._demonstration else blank, whole, file)
                common &= self._has
        return common

    @staticmethod
    def _fitting(first: Fragment, layout: Layout | None, file: Path) -> Fragment:
        try:
            check(first, layout)
        except BadFragment as error:
            has = {**Layout.of(first).obs, "action": Layout.of(first).action}
            wants = layout.obs if layout is not None else {}
            raise ConfigError(
                f"{file}: {error.message}; it has {_listed(has)}" + (f"; fits: {_listed(wants)}" if wants else ""),
                path=str(file),
            ) from error
        return first

    def _npz(self, file: Path) -> Iterator[Fragment]:
        def pieces() -> Iterator[dict[str, np.ndarray]]:
            with _members(file) as members:
                # Views of full length that use no memory, so that errors come before any row is read.
                whole = {name: np.broadcast_to(np.zeros((), each.dtype), each.shape) for name, each in members.items()}
                rows = len(self._rows(file, whole)["reward"])
                for start in range(0, max(1, rows), _ROWS):
                    with _reading(file):
                        piece = {name: each.read(min(_ROWS, rows - start)) for name, each in members.items()}
                    yield piece

        yield from self._episodes(file, pieces())

    def _parquet(self, file: Path, first: int = 0, last: int | None = None) -> Iterator[Fragment]:
        """Episodes that start in row groups ``first`` to ``last - 1``; ``last`` None: to the end of the file."""
        with _opened(file) as source:
            rows = [source.metadata.row_group(group).num_rows for group in range(source.num_row_groups)]
            row, shapes = sum(rows[:first]), dict[str, tuple[int, ...]]()
            own = None if last is None else sum(rows[first:last])
            if own == 0:
                return

            def pieces() -> Iterator[dict[str, np.ndarray]]:
                at, past = row, len(rows) if last is None else last
                # This part's groups in one read, then one group at a time until the last episode ends.
                for groups in (range(first, past), *([group] for group in range(past, len(rows)))):
                    for batch in filter(len, source.iter_batches(_ROWS, row_groups=groups)):
                        yield {name: _column(file, name, batch[name], at, shapes) for name in batch.schema.names}
                        at += len(batch)
                if at == 0:  # a column without rows
                    yield {name: np.zeros(0) for name in source.schema_arrow.names}

            if row:  # every part expects lists of the same length as in the file's first row
                head = next(source.iter_batches(1))
                for name in head.schema.names:
                    _column(file, name, head[name], 0, shapes)
            goes_on = bool(row) and not self._is_end(source, max(g for g in range(first) if rows[g]))
            yield from self._episodes(file, pieces(), goes_on, own)

    def _is_end(self, source: Any, group: int) -> bool:
        """Whether the last row of a Parquet row group ends an episode."""
        names = [self._fields.get(name, name) for name in ("terminated", "truncated")]
        read = source.read_row_group(group, columns=[name for name in names if name in source.schema_arrow.names])
        return any(column[-1].as_py() for column in read.columns)

    def _groups(self, file: Path) -> Generator[tuple[dict[str, str], Any], None, None]:
        """Each episode group of a Minari file, with a map from our names to its names."""
        try:
            import h5py
        except ImportError as error:
            raise ConfigError(f"{file}: reading it needs h5py: pip install 'brayx[minari]'", path=str(file)) from error
        names = {"obs": "observations", "action": "actions", "reward": "rewards"}
        names |= {"terminated": "terminations", "truncated": "truncations", **self._fields}
        try:
            source = h5py.File(file, "r")
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error}", path=str(file)) from error
        with source:
            groups = [name for name in source if name.startswith("episode_")]
            for name in sorted(groups, key=lambda name: int(name.removeprefix("episode_"))):
                episode = source[name]
                self._need(file, {ours: theirs for ours, theirs in names.items() if theirs in episode}, list(episode))
                yield names, episode

    def _minari(self, file: Path) -> Iterator[Fragment]:
        with contextlib.closing(self._groups(file)) as groups:
            for names, episode in groups:
                steps = len(episode[names["reward"]])
                yield Fragment(
                    obs=_nest(episode[names["obs"]]),
                    action=_nest(episode[names["action"]]),
                    reward=np.asarray(episode[names["reward"]], np.float32),
                    terminated=bool(episode[names["terminated"]][-1]),
                    truncated=not bool(episode[names["terminated"]][-1]),
                    log_prob=np.zeros(steps, np.float32),
                    policy_version=np.zeros(steps, np.int64),
                )

    def _blank(self, file: Path) -> Fragment | None:
        """One step of zeros with the layout of a file, from its header and, for the length of lists, its first row.

        None if the file has no rows. Raises ConfigError if a field is missing.
        """
        if self._kind == "minari":
            with contextlib.closing(self._groups(file)) as groups:
                names, episode = next(groups, ({}, None))
                if episode is None or not len(episode[names["reward"]]):
                    return None
                obs, action = _zeros(episode[names["obs"]], 2), _zeros(episode[names["action"]], 1)
                number = np.zeros(1, np.float32)
                return Fragment(
                    obs=obs,
                    action=action,
                    reward=number,
                    terminated=True,
                    truncated=False,
                    log_prob=number,
                    policy_version=np.zeros(1, np.int64),
                )
        if self._kind == "npz":
            with _members(file) as members:
                arrays = {name: np.broadcast_to(np.zeros((), each.dtype), each.shape) for name, each in members.items()}
        else:
            with _opened(file) as source:
                arrays = {name: np.zeros(0) for name in source.schema_arrow.names}
                for row in itertools.islice(filter(len, source.iter_batches(1)), 1):
                    arrays = {name: _column(file, name, row[name], 0, {}) for name in arrays}
        arrays = self._rows(file, arrays)
        if not len(arrays["reward"]):
            return None
        observed = {name for name in arrays if name == "obs" or name.startswith("obs/")}
        following = {name for name in arrays if name == "next_obs" or name.startswith("next_obs/")}
        blank = {name: np.zeros((1, *array.shape[1:]), array.dtype) for name, array in arrays.items()}
        return self._fragment(blank, observed, following, 0, 1, over=True)

    def _episodes(
        self, file: Path, pieces: Iterable[dict[str, np.ndarray]], goes_on: bool = False, rows: int | None = None
    ) -> Iterator[Fragment]:
        """Episodes from consecutive blocks of rows; an episode may span several blocks.

        Args:
            file: for errors.
            pieces: the blocks of rows.
            goes_on: the first rows continue an episode of the part before, and are skipped.
            rows: rows of this part; later rows only complete its last episode. None: all rows.
        """
        begun: list[dict[str, np.ndarray]] = []
        at, over = 0, False
        for arrays in map(functools.partial(self._rows, file), pieces):
            size, ends = len(arrays["reward"]), np.flatnonzero(_ends(arrays)) + 1
            start, stop = 0, size
            if goes_on:
                start, goes_on = int(ends[0]) if len(ends) else size, not len(ends)
            if rows is not None and len(ends) and at + ends[-1] >= rows:
                stop, over = int(ends[at + ends >= rows][0]), True
            at += size
            if (start, stop) != (0, size):
                arrays = {name: array[start:stop] for name, array in arrays.items()}
            last = int(_ends(arrays).nonzero()[0].max(initial=-1)) + 1
            if last:
                yield from self._whole([*begun, {name: array[:last] for name, array in arrays.items()}])
                begun = []
            if last < len(arrays["reward"]):
                begun.append({name: array[last:] for name, array in arrays.items()})
            if over:
                break
        if begun:
            yield from self._whole(begun)

    def _rows(self, file: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A block of rows by our names; raises ConfigError if a field is missing or has no value for each row."""
        theirs = {name: ours for ours, name in self._fields.items()}
        arrays = {theirs.get(name, name): array for name, array in arrays.items()}
        self._need(file, arrays, list(arrays))
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
            if (name == "obs" or name.startswith("obs/")) and following.shape[1:] != array.shape[1:]:
                raise ConfigError(
                    f"{file}: next_{name} has shape {following.shape[1:]} a step, but {name} has {array.shape[1:]}",
                    path=str(file),
                )
        return arrays

    def _whole(self, pieces: list[dict[str, np.ndarray]]) -> Iterator[Fragment]:
        """The episodes of rows that end with the end of an episode."""
        first = pieces[0]
        arrays = first if len(pieces) == 1 else {name: np.concatenate([p[name] for p in pieces]) for name in first}
        observed = {name for name in arrays if name == "obs" or name.startswith("obs/")}
        following = {name for name in arrays if name == "next_obs" or name.startswith("next_obs/")}
        terminated, ends = arrays["terminated"].astype(bool), _ends(arrays)
        ends[-1:] = True
        start = 0
        for end in (np.flatnonzero(ends) + 1).tolist():
            over = bool(terminated[end - 1])
            # Without the observation after it, a last step that is not terminated serves as that observation.
            stop = end if over or following else end - 1
            if stop > start:
                yield self._fragment(arrays, observed, following, start, stop, over)
            start = end

    def _fragment(
        self, arrays: dict[str, np.ndarray], observed: set[str], following: set[str], start: int, stop: int, over: bool
    ) -> Fragment:
        steps, part = stop - start, slice(start, stop)
        obs = {}
        for name in observed:
            has_next = f"next_{name}" in following
            last = arrays[f"next_{name}"][stop - 1] if has_next else arrays[name][stop - 1 if over else stop]
            obs[name] = np.concatenate([arrays[name][part], last[np.newaxis]])
        log_prob = arrays.get("log_prob")
        version = arrays.get("policy_version")
        return Fragment(
            obs=obs["obs"] if "obs" in obs else _tree(obs),
            action=arrays["action"][part],
            reward=arrays["reward"][part].astype(np.float32),
            terminated=over,
            truncated=not over,
            log_prob=np.zeros(steps, np.float32) if log_prob is None else log_prob[part].astype(np.float32),
            policy_version=np.zeros(steps, np.int64) if version is None else version[part].astype(np.int64),
            extras={k: v[part] for k, v in arrays.items() if k not in {*_OWN, *observed, *following}},
        )

    def _need(self, file: Path, has: Mapping[str, Any], there: list[str]) -> None:
        self._has = set(has)
        missing = [name for name in _NEEDED if name not in has]
        if not any(name == "obs" or name.startswith("obs/") for name in has):
            missing = ["obs", *missing]
        if missing:
            raise ConfigError(
                f"{file}: has no {missing[0]}; it has {sorted(there)}. Needed: obs, {', '.join(_NEEDED)}; "
                "the option `fields` maps other names",
                path=str(file),
            )


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a Parquet file; raises ConfigError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as source:
            yield source
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{file}: cannot be read: {error}", path=str(file)) from error


def _spans(file: Path, count: int) -> list[tuple[int, int]]:
    """At most ``count`` ranges of a Parquet file's row groups, as (first, end); one range if it has no groups."""
    with _opened(file) as source:
        groups = source.num_row_groups
    count = max(1, min(count, groups))
    bounds = [groups * number // count for number in range(count + 1)]
    return list(itertools.pairwise(bounds))


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raises ConfigError for an archive that cannot be read."""
    try:
        yield
    except Exception as error:  # zipfile, zlib and NumPy raise different ones
        raise ConfigError(f"{file}: cannot be read: {first_line(error)}", path=str(file)) from error


@contextlib.contextmanager
def _members(file: Path) -> Iterator[dict[str, _Rows]]:
    """The arrays of an archive by name, with only their headers read; raises ConfigError if that fails."""
    with contextlib.ExitStack() as stack:
        members = {}
        with _reading(file):
            archive = stack.enter_context(zipfile.ZipFile(file))
            for name in archive.namelist():
                if name.endswith(".npy"):
                    members[name.removesuffix(".npy")] = _Rows(stack.enter_context(archive.open(name)))
        yield members


class _Rows:
    """An array of an archive, read in blocks of rows.

    Args:
        member: the archive's member, in NumPy's format.

    Attributes:
        shape, dtype: of the array.

    Raises:
        ValueError: it is not an array, or an array of Python objects.
    """

    def __init__(self, member: IO[bytes]) -> None:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self.shape, fortran, self.dtype = read(member)
        if self.dtype.hasobject:
            raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
        self._member = member
        self._each = math.prod(self.shape[1:])
        self._fortran = fortran and len(self.shape) > 1
        self._whole: np.ndarray | None = None

    def read(self, rows: int) -> np.ndarray:
        """The next ``rows`` rows. Raises ValueError if the file ends before them."""
        if self._fortran:
            if self._whole is None:
                self._whole = self._read(math.prod(self.shape)).reshape(self.shape, order="F")
            read, self._whole = self._whole[:rows], self._whole[rows:]
            return read
        return self._read(rows * self._each).reshape(rows, *self.shape[1:])

    def _read(self, count: int) -> np.ndarray:
        read = self._member.read(count * self.dtype.itemsize)
        if len(read) != count * self.dtype.itemsize:
            raise ValueError("the file ends in the middle of an array")
        return np.frombuffer(read, self.dtype, count)


def _ends(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which rows end an episode."""
    terminated = arrays["terminated"].astype(bool)
    return terminated | arrays["truncated"].astype(bool) if "truncated" in arrays else terminated


def _column(file: Path, name: str, array: Any, first: int, shapes: dict[str, tuple[int, ...]]) -> np.ndarray:
    """A block of rows of a Parquet column, ``[rows, ...]``; lists of equal length become axes.

    Args:
        file, name: for errors.
        array: the values.
        first: number of the block's first row in the file.
        shapes: shape of a row by column name; the file's first block sets it, later blocks must match.

    Raises:
        ConfigError: lists of different lengths, or nulls.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    known = shapes.get(name)
    shape: list[int] = [len(array)]
    each = 1  # entries of a row at this depth of nesting

    def refuse(found: np.ndarray, what: str) -> None:
        if found.any():
            row = first + int(found.argmax()) // max(1, each)
            raise ConfigError(f"{file}: {name}: row {row} (the first is 0) {what}", path=str(file), row=row)

    while True:
        refuse(array.is_null().to_numpy(zero_copy_only=False), "holds null")
        if not (
            pa.types.is_list(array.type)
            or pa.types.is_large_list(array.type)
            or pa.types.is_fixed_size_list(array.type)
        ):
            break
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        first_length = int(lengths[0]) if len(lengths) else 0  # lists of empty lists
        length = first_length if known is None else known[len(shape) - 1]
        refuse(lengths != length, f"has a list of another length than the first one, {length}")
        shape.append(length)
        each *= length
        array = array.flatten()
    shapes[name] = tuple(shape[1:])
    flat: np.ndarray = array.to_numpy(zero_copy_only=False)
    return flat.reshape(shape)


def _zeros(node: Any, steps: int) -> NestedArray:
    """Zeros for ``steps`` steps, with the layout of an HDF5 dataset or group."""
    if hasattr(node, "keys"):
        return {name: _zeros(node[name], steps) for name in node}
    return np.zeros((steps, *node.shape[1:]), node.dtype)


def _nest(node: Any) -> NestedArray:
    """An HDF5 dataset as an array, a group as a dict of arrays."""
    return {name: _nest(node[name]) for name in node} if hasattr(node, "keys") else np.asarray(node)


def _tree(leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """``obs/a/b`` becomes ``{"a": {"b": ...}}``."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *inner, last = path.split("/")[1:]
        at = tree
        for name in inner:
            at = at.setdefault(name, {})
        at[last] = leaf
    return tree


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {shape} of {dtype}" for name, (shape, dtype) in fields.items())
