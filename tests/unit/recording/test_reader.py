"""`brayx.recording.reader`: recordings of many files, shared by threads, each tick once."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from brayx.recording import open as open_recordings
from brayx.recording.chunks import ROWS
from brayx.recording.index import SessionPart
from brayx.recording.writer import Folder
from tests.unit.recording.written import ticks


def test_the_ticks_of_a_copied_file_count_once(tmp_path: Path) -> None:
    for number in range(2):
        parts = [SessionPart("long", "long", 0.0, 50 * number, 50), SessionPart(f"short-{number}", "short", 0.0, 0, 5)]
        Folder(str(tmp_path), 10**9).write(parts, ticks(55, x=1.5))
    first, second = sorted(tmp_path.glob("*.parquet"))
    for path, name in ((first, "copy of it.parquet"), (second, "0-copy.parquet")):
        shutil.copy(path, tmp_path / name)
    recordings = open_recordings(str(tmp_path))
    assert sorted((episode.id, len(episode)) for episode in recordings) == [
        ("long", 100),
        ("short-0", 5),
        ("short-1", 5),
    ]
    assert sorted(Path(path).name for path in recordings.unreadable) == [second.name, "copy of it.parquet"]
    assert all("another file has" in why for why in recordings.unreadable.values())


def test_threads_share_recordings(tmp_path: Path) -> None:
    """A long session of three row groups, and more files than stay open."""
    Folder(str(tmp_path / "long"), 10**9).write([SessionPart("long", "long", 0.0, 0, 3 * ROWS)], ticks(3 * ROWS, x=1.5))
    for number in range(40):
        Folder(str(tmp_path / "many"), 10**9).write(
            [SessionPart(f"{number}", "s", 0.0, 0, 5)], ticks(5, x=float(number))
        )
    (long,), many = (open_recordings(str(tmp_path / name)) for name in ("long", "many"))

    def read(thread: int) -> None:
        rng = random.Random(thread)
        for _ in range(200):
            first = rng.choice((10, ROWS + 10, 2 * ROWS + 10))
            assert long.read(first, 20).number.tolist() == list(range(first, first + 20))
            short = rng.choice(many)
            assert set(short["x"]) == {float(short.id)}

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read, range(4)))


def test_the_newest_sessions_of_a_name_are_found_over_many_files(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), 10**9)
    for number in range(6):
        sessions = [f"bot-{number % 2}", f"game-{number}-agent-red"]
        folder.write(
            [SessionPart(f"{number}-{session}", session, 0.0, 0, 1) for session in sessions],
            ticks(len(sessions), x=1.0),
        )
    recordings = open_recordings(str(tmp_path))
    for limit, name, newest, selected in (
        (3, "", ["5-game-5-agent-red", "5-bot-1", "4-game-4-agent-red"], 12),
        (2, "bot-0", ["4-bot-0", "2-bot-0"], 3),
        (9, "game-3", ["3-game-3-agent-red"], 1),
        (4, "bot-*", ["5-bot-1", "4-bot-0", "3-bot-1", "2-bot-0"], 6),
        (9, "other", [], 0),
    ):
        episodes, count = recordings.newest(limit, name)
        assert ([episode.id for episode in episodes], count) == (newest, selected)
