"""Folders with recorded chunks for the tests of recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brayx.recording import index
from brayx.recording.index import SessionPart
from brayx.recording.writer import Folder
from tests.recorded import Tick, columns_of


def ticks(count: int, first: int = 0, **attributes: Any) -> Any:
    return columns_of(
        [Tick(first + index, 0.0, 0.0, b"%d" % (first + index), b"", attributes) for index in range(count)]
    )


def long_session(folder: Folder, chunks: int) -> None:
    """One session over many chunks, two ticks in each."""
    for chunk in range(chunks):
        end = "stop" if chunk == chunks - 1 else ""
        folder.write([SessionPart("e", "long", 0.0, 2 * chunk, 2, end=end)], ticks(2, 2 * chunk, x=float(chunk)))


def indices(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{index.SUFFIX}"))
