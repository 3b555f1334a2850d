"""The next process removes temporary folders of killed processes, and never those of running ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brayx import temporary
from brayx.temporary import output_folder, temporary_folder
from tests.waiting import WAIT_S, until

OWNER = """
import os, sys
from pathlib import Path
from brayx.temporary import output_folder, temporary_files, temporary_folder

with temporary_files(), temporary_files(), temporary_folder("checkpoint") as inner, output_folder() as output:
    (inner / "half").write_text("a")
    (output / "game.txt").write_text("an error")
    {then}
    print("ready", flush=True)
    sys.stdin.read()
"""


def owner(folder: Path, then: str = "") -> subprocess.Popen[str]:
    """A process with temporary folders in ``folder``."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(then=then)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def names(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[2] for path in folder.iterdir())


@pytest.fixture(autouse=True)
def _not_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary, "_swept", set())


def sweep(folder: Path) -> None:
    """Makes a temporary folder, as the next start does."""
    temporary._swept.clear()
    with temporary_folder("next", folder):
        pass


def test_the_next_start_removes_the_folder_of_a_killed_process_only(tmp_path: Path) -> None:
    with owner(tmp_path) as killed, owner(tmp_path) as living:
        assert names(tmp_path) == ["files", "files", "output", "output"]
        sweep(tmp_path)
        assert names(tmp_path) == ["files", "files", "output", "output"]
        killed.kill()
        killed.wait(WAIT_S)
        sweep(tmp_path)
        assert names(tmp_path) == ["files", "output", "output"]
        living.communicate("", WAIT_S)
    assert names(tmp_path) == ["output", "output"], "what failed games wrote stays"


def test_a_forked_child_of_a_killed_process_keeps_the_folder(tmp_path: Path) -> None:
    fork = "child = os.fork()\n    if child == 0: sys.stdin.read(); os._exit(0)"
    with owner(tmp_path, fork) as killed:
        killed.kill()
        killed.wait(WAIT_S)
        sweep(tmp_path)
        assert "files" in names(tmp_path)
        assert killed.stdin is not None
        killed.stdin.close()  # the child ends

        def swept() -> bool:
            sweep(tmp_path)
            return "files" not in names(tmp_path)

        until(swept)


def test_output_is_removed_after_a_week_and_an_empty_folder_at_once(tmp_path: Path) -> None:
    with owner(tmp_path) as process:
        process.communicate("", WAIT_S)
    (folder,) = tmp_path.iterdir()
    long_ago = time.time() - 8 * 24 * 3600
    os.utime(folder / "game.txt", (long_ago, long_ago))
    sweep(tmp_path)
    assert names(tmp_path) == []
    with output_folder() as empty:
        assert empty.is_dir()
    assert not empty.exists()


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("precious")
    (tmp_path / "brayx-temporary-link-1").symlink_to(other)
    (tmp_path / "brayx-temporary-file-1").write_text("precious")
    (tmp_path / "brayx-ports-1000").mkdir()
    sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert (other / "file").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "brayx-temporary-files-1"
    foreign.mkdir()
    os.chown(foreign, 12345, 12345)
    sweep(tmp_path)
    assert foreign.exists()


def test_a_folder_of_a_process_that_was_killed_before_it_locked_it_is_removed_after_a_minute(tmp_path: Path) -> None:
    old, new = tmp_path / ".brayx-new-old", tmp_path / ".brayx-new-new"
    for folder in (old, new):
        folder.mkdir()
    long_ago = time.time() - 61
    os.utime(old, (long_ago, long_ago))
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [new.name]
