"""Feeds recorded observations to versions of a model, and compares their actions with the recorded ones.

Knows nothing of where versions come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.errors import BadRecording, BrayxError
from brayx.recording.columns import ERROR, TickColumns, concatenated
from brayx.recording.differences import TOLERANCE, Decisions, Differences, differences, is_read
from brayx.recording.reader import Recording
from brayx.recording.rows import has_rows
from brayx.recording.version import Leaves, Version

if TYPE_CHECKING:
    import pandas as pd

_MAX_TICKS = 4096
"""Maximum ticks of a session in memory at once."""
_MAX_OBS_BYTES = 64 * 2**20
"""Maximum size of all observations in memory at once."""
_SESSIONS_AT_ONCE = 32
"""Sessions in one batch of a model."""

OnPiece = Callable[[str, np.ndarray, Sequence[Mapping[str, Any]]], None]
"""Called with the next ticks of a session: the recording's id, the ticks' numbers ``[N]``, and the outputs ``[N, ...]``
of the version and, if there is one, of the reference."""


@dataclass(frozen=True)
class Comparison:
    """How a version differs from a recorded session, or from another version on its observations.

    Attributes:
        session, episode: id of the session, and of its recording.
        number: ``[N]`` int64, numbers of the ticks in the session.
        equal: ``[N]`` bool, whether the version's most likely action is the recorded one.
        kl: ``[N]`` float32, KL(recorded || version) in nats; NaN: not known.
        value: ``[N]`` float32, the version's value minus the recorded one; NaN: not known.
        exact: whether ``kl`` is exact; else it is estimated, see `brayx.recording.differences.differences`.
        left_out: number of ticks that lack a needed array, such as failed ones.
    """

    session: str
    episode: str
    number: np.ndarray
    equal: np.ndarray
    kl: np.ndarray
    value: np.ndarray
    exact: bool
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.number)

    @property
    def first(self) -> int | None:
        """Number of the first tick with another action; None: there is none."""
        other = np.flatnonzero(~self.equal)
        return int(self.number[other[0]]) if len(other) else None

    def frame(self) -> pd.DataFrame:
        """A row for each tick."""
        import pandas as pd

        return pd.DataFrame(
            {"session": self.session, "tick": self.number, "equal": self.equal, "kl": self.kl, "value": self.value}
        )


@dataclass(frozen=True)
class NotCompared:
    """A recorded session that could not be compared.

    Attributes:
        session, episode: id of the session, and of its recording.
        error: why. `BadRecording`: a file is broken or lacks a needed array, or the actions do not fit the model.
            `ShapeMismatch`: the observations do not fit a model. `ModelError`: a model failed, or its outputs have NaN.
    """

    session: str
    episode: str
    error: BrayxError


def compare(
    episodes: Iterable[Recording],
    version: Version,
    reference: Version | None = None,
    *,
    tolerance: float = TOLERANCE,
    on_piece: OnPiece | None = None,
) -> Iterator[Comparison | NotCompared]:
    """Compares a version with recorded sessions, or with another version on their observations.

    Reads the recordings piece by piece, so memory is bounded.

    Args:
        episodes: recorded sessions.
        version: the version to compare.
        reference: another version, whose most likely actions, distributions and values replace the recorded ones;
            None: compare with the recording.
        tolerance: maximum difference of continuous actions that count as equal.
        on_piece: gets the outputs as they are computed. If a session cannot be compared, the sessions that were
            computed with it start again from their first tick.

    Yields:
        For each session, in order, its comparison, or why there is none.
    """
    versions = [version] if reference is None else [version, reference]
    left = iter(episodes)
    while group := list(itertools.islice(left, _SESSIONS_AT_ONCE)):
        failed: dict[str, BrayxError] = {}
        compared: dict[str, Comparison] = {}
        while rest := [episode for episode in group if episode.id not in failed]:
            try:
                compared = _compared(rest, versions, tolerance, on_piece)
                break
            except _NotComparable as failure:  # the others are computed again without it
                failed[failure.episode] = failure.error
            except BrayxError as error:  # a model failed, which does not tell for which session
                failed.update({episode.id: error for episode in rest})
        for recording in group:
            why = failed.get(recording.id)
            yield compared[recording.id] if why is None else NotCompared(recording.session, recording.id, why)


class _NotComparable(Exception):
    """A recording that cannot be compared."""

    def __init__(self, episode: str, error: BrayxError) -> None:
        super().__init__(error.message)
        self.episode, self.error = episode, error


class _ComparableTicks:
    """The ticks of a session that have all needed arrays; raises `_NotComparable` if there are none.

    Args:
        episode: the session.
        versions: the versions that act; a single one is compared with the recording.
    """

    def __init__(self, episode: Recording, versions: Sequence[Version]) -> None:
        self.episode, self._versions = episode, versions
        needed = [name for version in versions for name in version.columns]
        needed += [] if len(versions) > 1 else ["action"]
        try:
            if has_rows(episode):
                raise BadRecording(f"session {episode.session!r} has several agents, whose ticks are not compared yet")
            self._spans = episode.spans(needed)
            if len(episode) and not self._spans:
                episode.read(0, 1, needed)  # its error names the arrays that exist
            more = [name for name in episode.some_columns if is_read(name)] if len(versions) == 1 else []
            self._names = list(
                dict.fromkeys([*needed, *(name for name in more if episode.spans([*needed, name]) == self._spans)])
            )
        except BrayxError as error:
            raise _NotComparable(episode.id, error) from None

    def __len__(self) -> int:
        return sum(end - first for first, end in self._spans)

    def read(self, first: int, count: int) -> tuple[TickColumns, list[Leaves]]:
        """At most ``count`` ticks from ``first`` on, without failed ones; and each version's inputs for them."""
        blocks, before = [], 0
        try:
            for start, end in self._spans:
                low, high = max(first - before, 0), min(first + count - before, end - start)
                if low < high:
                    blocks.append(self.episode.read(start + low, high - low, self._names))
                before += end - start
            columns = _without_failed(concatenated(blocks))
            return columns, [version.leaves(columns.arrays) for version in self._versions]
        except BrayxError as error:
            raise _NotComparable(self.episode.id, error) from None


def _without_failed(columns: TickColumns) -> TickColumns:
    """The ticks that did not fail: a failed one may have zeros in place of its observation."""
    acted = np.array([ERROR not in event for event in columns.event], bool)
    if acted.all():
        return columns
    arrays = {name: array[acted] for name, array in columns.arrays.items()}
    return replace(columns, number=columns.number[acted], arrays=arrays)


def _compared(
    group: Sequence[Recording], versions: Sequence[Version], tolerance: float, on_piece: OnPiece | None
) -> dict[str, Comparison]:
    """The comparison of each session, by the id of its recording; raises `_NotComparable` if one cannot be compared."""
    sessions = [_ComparableTicks(episode, versions) for episode in group]
    players = [version.players(len(group)) for version in versions]
    pieces: dict[str, list[tuple[np.ndarray, Differences]]] = {episode.id: [] for episode in group}
    tick_bytes = sum(version.tick_bytes for version in versions)
    count = max(1, min(_MAX_TICKS, _MAX_OBS_BYTES // max(1, tick_bytes * len(group))))
    for first in range(0, max(map(len, sessions)), count):
        read = {place: session.read(first, count) for place, session in enumerate(sessions) if len(session) > first}
        read = {place: (columns, inputs) for place, (columns, inputs) in read.items() if len(columns.number)}
        outputs = [
            player.act({place: inputs[index] for place, (_, inputs) in read.items()}) if read else {}
            for index, player in enumerate(players)
        ]
        for place, (columns, _) in read.items():
            acted = [output[place] for output in outputs]
            pieces[group[place].id].append((columns.number, _differences(group[place], columns, acted, tolerance)))
            if on_piece is not None:
                on_piece(group[place].id, columns.number, acted)
    return {episode.id: _joined(episode, pieces[episode.id]) for episode in group}


def _differences(
    episode: Recording, columns: TickColumns, outputs: Sequence[Mapping[str, Any]], tolerance: float
) -> Differences:
    ours, *reference = outputs
    try:
        acted = Decisions.most_likely(reference[0]) if reference else Decisions.recorded(columns.arrays)
        return differences(acted, ours, tolerance=tolerance)
    except BrayxError as error:
        raise _NotComparable(episode.id, error) from None


def _joined(episode: Recording, pieces: Sequence[tuple[np.ndarray, Differences]]) -> Comparison:
    def all_of(name: str, dtype: Any) -> np.ndarray:
        arrays = [getattr(comparison, name) for _, comparison in pieces]
        return np.concatenate(arrays) if arrays else np.zeros(0, dtype)

    numbers = [number for number, _ in pieces]
    return Comparison(
        episode.session,
        episode.id,
        np.concatenate(numbers) if numbers else np.zeros(0, np.int64),
        all_of("equal", np.bool_),
        all_of("kl", np.float32),
        all_of("value", np.float32),
        all(comparison.exact for _, comparison in pieces),
        len(episode) - sum(map(len, numbers)),
    )
