"""A folder of recordings: its index, many chunks, full disks, killed writers, and copied files."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.actor.agent import State
from brayx.errors import BadRecording
from brayx.metrics import Recorder
from brayx.recording import index, writer
from brayx.recording import open as open_recordings
from brayx.recording.chunks import ROWS
from brayx.recording.columns import concatenated
from brayx.recording.config import RecordingConfig
from brayx.recording.index import SessionPart
from brayx.recording.packer import ChunkPacker
from brayx.recording.recorder import SessionRecorder
from brayx.recording.writer import Folder
from tests.recorded import Tick, columns_of
from tests.waiting import until

WAIT_S = 60.0


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


def test_a_long_session_is_listed_by_the_index_and_opens_only_the_chunks_that_are_read(tmp_path: Path) -> None:
    long_session(Folder(str(tmp_path), 10**9), index.CHUNKS + 3)
    chunks = sorted(tmp_path.glob("*.parquet"))
    assert len(indices(tmp_path)) == 1
    broken = chunks[5]
    broken.write_bytes(bytes(broken.stat().st_size))  # as large as before, so that the index still counts
    (episode,) = open_recordings(str(tmp_path))
    assert (len(episode), episode.end, episode.columns) == (2 * len(chunks), "stop", ["x"])
    listed = open_recordings(str(tmp_path))
    listed_episode = listed.find("e")
    assert listed_episode is listed[0]
    assert listed.find("long") is None, "that is the session's id"
    assert episode.read(12, 3).number.tolist() == [12, 13, 14]
    assert episode.read(len(episode) - 1, 1).number.tolist() == [len(episode) - 1]
    with pytest.raises(BadRecording, match="is not a file of a recording"):
        episode.read(10, 1)


def test_an_index_that_is_broken_or_out_of_date_is_not_believed(tmp_path: Path) -> None:
    long_session(Folder(str(tmp_path), 10**9), index.CHUNKS)
    (listed,) = indices(tmp_path)
    whole = listed.read_bytes()
    about = json.loads(gzip.decompress(whole))
    name = next(iter(about["chunks"]))
    _, columns, parts = about["chunks"][name]
    size = (tmp_path / name).stat().st_size

    def entry(**changed: Any) -> dict[str, Any]:
        return {name: [size, columns, {**parts, **{field: [value] for field, value in changed.items()}}]}

    for hostile in (
        b"", b"no gzip", whole[:-20], gzip.compress(b"[]"),
        *(
            gzip.compress(json.dumps({**about, **changed}).encode())
            for changed in (
                {"format": 9}, {"chunks": []}, {"chunks": {name: 1}}, {"chunks": {name: [size, columns, [[1]]]}},
                {"chunks": {name: [size, columns, {field: parts[field] for field in parts if field != "ticks"}]}},
                *({"chunks": {name: [size, columns, {**parts, "ticks": ticks}]}} for ticks in ([], 1, "1", [1, 1])),
                {"chunks": entry(episode=1)}, {"chunks": entry(ticks=-1)}, {"chunks": entry(ticks=True)},
                {"chunks": entry(ticks=0)}, {"chunks": entry(ticks=2**63)}, {"chunks": entry(first=2**63)},
                {"chunks": entry(began=float("inf"))}, {"chunks": entry(began=float("nan"))},
                {"chunks": entry(began=-1e300)}, {"chunks": entry(), "more": "x" * 2**28},
                {"chunks": {f"../{tmp_path.name}/{name}": [size, columns, parts]}},
                {"chunks": {name: [size + 1, columns, parts]}},
            )
        ),
    ):  # fmt: skip
        listed.write_bytes(hostile)
        (episode,) = open_recordings(str(tmp_path))
        assert (len(episode), episode.session) == (2 * index.CHUNKS, "long")
    for changed in ({"ticks": 9}, {"row": 99}):  # it may only lie about what a chunk has: reading finds out
        listed.write_bytes(gzip.compress(json.dumps({**about, "chunks": entry(**changed)}).encode()))
        with pytest.raises(BadRecording, match="cannot be read"):
            next(iter(open_recordings(str(tmp_path)))).read()
    listed.write_bytes(gzip.compress(json.dumps({**about, "chunks": {name: [size, ["y"], parts]}}).encode()))
    with pytest.raises(BadRecording, match="has no array 'y'"):
        next(iter(open_recordings(str(tmp_path)))).read(0, 1, ["y"])


def test_a_folder_of_an_older_version_lacks_the_replies_to_starts(tmp_path: Path) -> None:
    long_session(Folder(str(tmp_path), 10**9), index.CHUNKS)
    (listed,) = indices(tmp_path)
    field, unknown = b'"start_reply"', b'"unknown_one"'
    whole = gzip.decompress(listed.read_bytes())
    assert field in whole
    listed.write_bytes(gzip.compress(whole.replace(field, unknown)))
    chunks = sorted(tmp_path.glob("*.parquet"))
    for path in chunks:
        path.write_bytes(path.read_bytes().replace(field, unknown))
    whole = chunks[5].read_bytes()
    chunks[5].write_bytes(bytes(len(whole)))
    (episode,) = open_recordings(str(tmp_path))
    assert (len(episode), episode.start_reply) == (2 * len(chunks), ""), "its index is believed"
    chunks[5].write_bytes(whole)
    listed.unlink()
    (episode,) = open_recordings(str(tmp_path))
    assert (episode.read().number.tolist(), episode.start_reply) == (list(range(2 * len(chunks))), "")


def test_the_oldest_chunks_go_without_a_list_of_the_folder_and_their_index_with_them(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), 10**9)
    folder.trim()
    long_session(folder, index.CHUNKS)
    (first,) = indices(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.parquet"))
    small = Folder(str(tmp_path), size + 100)
    assert small.trim() == 0
    for number in range(index.CHUNKS):
        small.write([SessionPart("f", "s", 0.0, number, 1)], ticks(1))
        small.trim()
    left = sorted(tmp_path.glob("*.parquet"))
    assert sum(path.stat().st_size for path in left) <= size + 100
    assert index.CHUNKS <= len(left) < 2 * index.CHUNKS
    assert first in indices(tmp_path) or not any(path.name < first.name for path in left)
    assert {episode.session for episode in open_recordings(str(tmp_path))} >= {"s"}


def test_what_another_writer_adds_counts_once_the_folder_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LIST_S", 0.0)
    ours, other = Folder(str(tmp_path), 1), Folder(str(tmp_path), 10**9)
    ours.trim()
    other.write([SessionPart("e", "s", 0.0, 0, 1)], ticks(1))
    assert ours.trim() == 1
    assert not list(tmp_path.glob("*.parquet"))


def test_two_writers_at_once_keep_all_sessions(tmp_path: Path) -> None:
    folders = [Folder(str(tmp_path), 10**9) for _ in range(2)]
    for number in range(4):
        for name, folder in zip("ab", folders, strict=True):
            folder.write([SessionPart(name, name, 0.0, number, 1)], ticks(1, number))
    for folder in folders:
        folder.write_index()
    episodes = open_recordings(str(tmp_path))
    assert {episode.session: episode.read().number.tolist() for episode in episodes} == {
        "a": [0, 1, 2, 3],
        "b": [0, 1, 2, 3],
    }
    assert len(indices(tmp_path)) == 2


@pytest.mark.parametrize("indexed", [(), (0,), (0, 1)])
def test_parts_are_joined_over_chunks_and_writers_whatever_is_indexed(tmp_path: Path, indexed: tuple[int, ...]) -> None:
    """Parts of 30 sessions, of one to four ticks each, come in any order, some twice to a chunk."""
    rng = random.Random(7)
    left: list[tuple[str, int, int]] = []
    lengths = {}
    for session in range(30):
        first = 0
        for _ in range(rng.randint(1, 6)):
            count = rng.randint(1, 4)
            left.append((f"{session}", first, count))
            first += count
        lengths[f"{session}"] = first
    rng.shuffle(left)
    folders = [Folder(str(tmp_path), 10**9) for _ in range(2)]
    written: dict[str, list[str]] = {}
    while left:
        some = [left.pop() for _ in range(min(rng.randint(1, 5), len(left)))]
        name = rng.choice(folders).write(
            [SessionPart(session, session, float(first), first, count) for session, first, count in some],
            concatenated([ticks(count, first) for _, first, count in some]),
        )
        written[name] = [session for session, *_ in some]
    for folder_index in indexed:
        folders[folder_index].write_index()
    folders[0].write([SessionPart("new", "new", 0.0, 0, 1)], ticks(1))  # the index is older
    recordings = open_recordings(str(tmp_path))
    assert {episode.id: episode.read().number.tolist() for episode in recordings} == {
        **{session: list(range(length)) for session, length in lengths.items()}, "new": [0],
    }  # fmt: skip
    in_order = list(dict.fromkeys(session for name in sorted(written) for session in written[name]))
    assert [episode.id for episode in recordings if episode.id != "new"] == in_order
    assert all(recordings.find(episode.id) is episode for episode in recordings)


def test_sessions_of_games_with_other_shapes_share_a_folder(tmp_path: Path) -> None:
    packer = ChunkPacker(lambda: Folder(str(tmp_path), 10**9), flush_s=60.0)
    for name, shape in (("a", (3,)), ("b", (2, 2))):
        packer.add([SessionPart(name, name, 0.0, 0, 2, end="stop")], ticks(2, obs=np.ones(shape, np.float32)))
    packer.close()
    assert {episode.session: episode["obs"].shape for episode in open_recordings(str(tmp_path))} == {
        "a": (2, 3),
        "b": (2, 2, 2),
    }


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_loses_nothing_that_fits_later(small_disk: Path) -> None:
    packer = ChunkPacker(lambda: Folder(str(small_disk), 10**9), flush_s=0.0)
    rng = random.Random(0)

    def add(name: str) -> None:
        columns = columns_of([Tick(0, 0.0, 0.0, rng.randbytes(50_000), b"", {})])
        packer.add([SessionPart(name, name, 0.0, 0, 1, end="stop")], columns)
        packer.write_due()

    for name in "abcd":
        add(name)
    assert "No space left" in packer.failure
    assert packer.lost == 0
    assert [episode.session for episode in open_recordings(str(small_disk))] == ["a", "b"]
    assert not list(small_disk.glob(".unfinished*"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    packer.write_due()
    assert (packer.failure, packer.lost) == ("", 0)
    assert {episode.session for episode in open_recordings(str(small_disk))} == set("abcd")


def test_what_a_full_disk_has_no_room_for_is_counted_at_the_end(small_disk: Path, caplog: Any) -> None:
    metrics = Recorder()
    recorder = SessionRecorder(RecordingConfig(folder=str(small_disk)), metrics)
    log = recorder.open("a", b"")
    assert log is not None
    for number in range(5):
        log.tick(State("a", tick=number), random.Random(number).randbytes(50_000), b"", 0.0, 0.0)
    log.end("stop", None)
    recorder.close(WAIT_S)
    assert metrics.summary()["recording_lost.disk"] == 5
    assert "cannot write recordings: OSError: [Errno 28] No space left on device" in caplog.messages


def _write_forever(address: str) -> None:
    folder, rng = Folder(address, 10**9), np.random.default_rng(0)
    body = rng.bytes(4_000_000)
    for number in range(10_000):
        folder.write([SessionPart(f"{number}", f"{number}", 0.0, 0, 1)], columns_of([Tick(0, 0.0, 0.0, body, b"", {})]))


def test_a_writer_that_is_killed_in_the_middle_of_a_chunk_leaves_readable_files(tmp_path: Path) -> None:
    code = f"from tests.unit.recording.test_folder import _write_forever; _write_forever({str(tmp_path)!r})"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: len(list(tmp_path.glob("2*.parquet"))) > 2, "it writes", WAIT_S)

        def stopped_within_a_chunk() -> bool:
            os.kill(child.pid, signal.SIGSTOP)
            if list(tmp_path.glob(".unfinished*")):
                return True
            os.kill(child.pid, signal.SIGCONT)
            return False

        until(stopped_within_a_chunk, "it is in the middle of a chunk", WAIT_S)
    finally:
        child.kill()
        child.wait()
    assert list(tmp_path.glob(".unfinished*"))
    episodes = open_recordings(str(tmp_path))
    assert not episodes.unreadable
    assert len(episodes) == len(list(tmp_path.glob("2*.parquet"))) > 2
    assert all(len(episode.inputs()[0]) == 4_000_000 for episode in episodes)


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
