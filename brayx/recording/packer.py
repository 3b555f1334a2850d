"""Collects ticks of sessions, and writes them as chunks. Runs in the writer's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from brayx.errors import first_line
from brayx.recording.columns import TickColumns, concatenated, packed, rows_at
from brayx.recording.drawing import Drawer
from brayx.recording.frames import Encoders
from brayx.recording.index import SessionPart
from brayx.recording.writer import Folder

CHUNK_BYTES = 8 * 2**20
"""Size of ticks in memory at which a chunk is full."""
_PENDING_BYTES = 4 * CHUNK_BYTES


class ChunkPacker:
    """Collects parts by layout, and writes a chunk when it is full or old.

    Args:
        folder: opens the folder of the chunks; called again after a failure.
        flush_s: age at which a chunk is written even if it is not full.
        drawer: draws the frames of ticks whose states are given.

    Attributes:
        lost: ticks lost so far because they could not be written.
        failure: why the last write failed; empty: it succeeded.
    """

    def __init__(self, folder: Callable[[], Folder], flush_s: float, drawer: Drawer | None = None) -> None:
        self._open_folder = folder
        self._folder: Folder | None = None
        self._flush_s = flush_s
        self._pending: dict[Any, list[tuple[list[SessionPart], TickColumns]]] = {}
        self._since: dict[Any, float] = {}
        self._bytes: dict[Any, int] = {}
        self.lost = 0
        self.failure = ""
        self._encoders, self._drawer = Encoders(), drawer

    @property
    def frames_failure(self) -> str:
        """Why the last ticks could not be drawn; empty: they were drawn."""
        return "" if self._drawer is None else self._drawer.failure

    @property
    def frames_lost(self) -> dict[str, int]:
        """Number of frames lost so far, by reason."""
        if self._drawer is None:
            return {"error": self._encoders.lost}
        return {"error": self._encoders.lost + self._drawer.lost, "slow": self._drawer.slow}

    def add(self, parts: Sequence[SessionPart], columns: TickColumns, states: bytes = b"") -> None:
        """Adds consecutive ticks of sessions.

        Args:
            parts: one for each run of ticks, in order.
            columns: the ticks.
            states: as for `Drawer.drawn`; empty: the ticks are not drawn.
        """
        columns = packed(columns)
        if states and self._drawer is not None:
            columns.frames = self._drawer.drawn(states, len(columns.number))
        layout = columns.layout
        if columns.frames:
            columns.frames = self._encoded(layout, parts, columns.frames)
        pending = self._pending.setdefault(layout, [])
        self._since.setdefault(layout, time.monotonic())
        self._bytes[layout] = self._bytes.get(layout, 0) + columns.nbytes
        if columns.left_out:
            parts = [replace(part, left_out={**part.left_out, **columns.left_out}) for part in parts]
        pending.append((_with_versions(parts, columns), columns))
        if self._bytes[layout] >= CHUNK_BYTES:
            self._write(layout)

    def _encoded(self, layout: Any, parts: Sequence[SessionPart], images: Sequence[Any]) -> list[Any]:
        frames: list[Any] = []
        for part in parts:
            drawn = images[len(frames) : len(frames) + part.ticks]
            frames += self._encoders.encode(layout, part.episode, part.first, drawn)
        return frames

    def write_due(self) -> None:
        """Writes the chunks that are older than ``flush_s``."""
        now = time.monotonic()
        for layout in [layout for layout, since in self._since.items() if now - since >= self._flush_s]:
            self._write(layout)

    def close(self) -> None:
        """Writes all pending ticks; those that cannot be written are lost."""
        for layout in list(self._pending):
            self._write(layout)
        self.lost += sum(len(columns.number) for parts in self._pending.values() for _, columns in parts)
        if self._folder is not None:
            self._folder.write_index()

    def _write(self, layout: Any) -> None:
        parts = self._pending[layout]
        try:
            if self._folder is None:
                self._folder = self._open_folder()
            self._folder.write(*_by_episode(parts))
            self._folder.trim()
            self.failure = ""
        except Exception as error:  # a full disk may recover, so the ticks are kept for another try
            self._folder = None
            self.failure = f"{type(error).__name__}: {first_line(error)}"
            self._since[layout] = time.monotonic()
            if sum(self._bytes.values()) <= _PENDING_BYTES:
                return
            self.lost += sum(len(columns.number) for _, columns in parts)
        del self._pending[layout], self._since[layout], self._bytes[layout]
        self._encoders.cut(layout)


def _by_episode(pending: Sequence[tuple[list[SessionPart], TickColumns]]) -> tuple[list[SessionPart], TickColumns]:
    """Sorts ticks by episode and joins consecutive parts, which keeps the chunk's index short."""
    runs: dict[str, list[list[tuple[SessionPart, int]]]] = {}
    row = 0
    for part in (part for parts, _ in pending for part in parts):
        episode_runs = runs.setdefault(part.episode, [])
        if episode_runs and (last := episode_runs[-1][-1][0]).first + last.ticks == part.first:
            episode_runs[-1].append((part, row))
        else:
            episode_runs.append([(part, row)])
        row += part.ticks
    parts, rows = [], []
    for run in (run for episode_runs in runs.values() for run in episode_runs):
        *before, last = [part for part, _ in run]
        parts.append(last.after(before) if before else last)
        rows += [np.arange(row, row + part.ticks) for part, row in run]
    return parts, rows_at(concatenated([columns for _, columns in pending]), np.concatenate(rows))


def _with_versions(parts: Sequence[SessionPart], columns: TickColumns) -> list[SessionPart]:
    """The parts with the policy versions of their first ticks."""
    names = [name for name in columns.arrays if name.rpartition("/")[2] == "policy_version"]
    if not names:
        return [*parts]
    versions, row, known = columns.arrays[names[0]].reshape(len(columns.number), -1), 0, []
    for part in parts:
        known.append(replace(part, version=max(int(versions[row, 0]), 0) if versions.size else 0))
        row += part.ticks
    return known
