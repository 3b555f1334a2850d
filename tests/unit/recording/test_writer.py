"""`brayx.recording.writer`: many chunks in a folder, other writers, full disks and killed writers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from brayx.actor.agent import State
from brayx.metrics import Recorder
from brayx.recording import index, writer
from brayx.recording import open as open_recordings
from brayx.recording.columns import concatenated
from brayx.recording.config import RecordingConfig
from brayx.recording.index import SessionPart
from brayx.recording.packer import ChunkPacker
from brayx.recording.recorder import SessionRecorder
from brayx.recording.writer import Folder
from tests.recorded import Tick, columns_of
from tests.unit.recording.written import indices, long_session, ticks
from tests.waiting import until

WAIT_S = 60.0


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


def test_a_recording_knows_the_policy_version_that_it_began_with(tmp_path: Path) -> None:
    packer = ChunkPacker(lambda: Folder(str(tmp_path), 10**9), flush_s=60.0)
    parts = [SessionPart("a", "a", 0.0, 0, 2), SessionPart("b", "b", 0.0, 0, 2)]
    made = [Tick(n % 2, 0.0, 0.0, b"", b"", {"policy_version": version}) for n, version in enumerate((3, 4, 5, 6))]
    packer.add(parts, columns_of(made))
    packer.add([SessionPart("a", "a", 0.0, 2, 1, end="stop"), SessionPart("c", "c", 0.0, 0, 1)], ticks(2))
    packer.close()
    assert {episode.session: episode.version for episode in open_recordings(str(tmp_path))} == {"a": 3, "b": 5, "c": 0}


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
    code = f"from tests.unit.recording.test_writer import _write_forever; _write_forever({str(tmp_path)!r})"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: len(list(tmp_path.glob("2*.parquet"))) > 2, "it writes", WAIT_S)

        def stopped_within_a_chunk() -> bool:
            os.kill(child.pid, signal.SIGSTOP)
            until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, "it has stopped", WAIT_S)
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
