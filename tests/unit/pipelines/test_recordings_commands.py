"""`brayx recordings list`, in this process and in a pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from brayx.recording.columns import Tick, columns_of
from brayx.recording.part import Part
from brayx.recording.writer import Folder
from pipelines.cli import main


def write(folder: Path, sessions: int) -> None:
    columns = columns_of([Tick(0, 0.0, 0.0, b"", b"", {})])
    parts = [
        (Part(f"e{at}", f"game-{at}", 1e9, 0, 1, why="every", player="main:7", end="stop", result=at / 2), columns)
        for at in range(sessions)
    ]
    Folder(str(folder), 10**9).write(parts)


def test_sessions_are_listed_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 3)
    assert main(["recordings", "list", str(tmp_path)]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["session", "began", "ticks", "end", "result", "player", "why", "unusual", "lost"]
    began = ["2001-09-09", "01:46:40"]
    assert [line.split() for line in lines] == [
        [f"game-{at}", *began, "1", "stop", result, "main:7", "every", "0", "0"]
        for at, result in enumerate(("0", "0.5", "1"))
    ]
    assert main(["recordings", "list", str(tmp_path), "--only", "min_result=1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["session", "game-2"]


def test_a_reader_that_has_enough_gets_no_traceback(tmp_path: Path) -> None:
    write(tmp_path, 4000)
    words = [sys.executable, "-m", "pipelines.cli", "recordings", "list", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert command.stdout.readline().startswith("session")
        command.stdout.close()
        assert command.stderr.read() == ""


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("", "is empty"),
        ("foo://bucket/folder", "Protocol not known"),
        ("http://127.0.0.1:1/folder", "cannot be listed"),
        ("there/is/none", "no recording at"),
    ],
)
def test_a_wrong_address_is_refused_in_a_line(address: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recordings", "list", address]) == 2
    assert says in capsys.readouterr().err
