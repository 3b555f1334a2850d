"""`brayx recordings list`, in this process and in a pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import brayx.recording
from brayx.commands.cli import main
from brayx.recording.index import SessionPart
from brayx.recording.writer import Folder
from brayx.regression.replay import recorded
from tests.recorded import Tick, columns_of


def write(folder: Path, sessions: int) -> None:
    parts = [
        SessionPart(f"e{i}", f"game-{i}", 1e9, 0, 1, why="every", player="main:7", end="stop", result=i / 2)
        for i in range(sessions)
    ]
    Folder(str(folder), 10**9).write(parts, columns_of([Tick(0, 0.0, 0.0, b"", b"", {})] * sessions))


def test_sessions_are_listed_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 3)
    assert main(["recordings", "list", str(tmp_path)]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["session", "began", "ticks", "end", "result", "player", "why", "unusual", "lost"]
    began = ["2001-09-09", "01:46:40"]
    assert [line.split() for line in lines] == [
        [f"game-{number}", *began, "1", "stop", result, "main:7", "every", "0", "0"]
        for number, result in enumerate(("0", "0.5", "1"))
    ]
    assert main(["recordings", "list", str(tmp_path), "--only", "min_result=1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["session", "game-2"]
    assert main(["recordings", "list", str(tmp_path), "--session", "gam"]) == 0
    assert capsys.readouterr().err == "no session is selected (ids that begin so: 'gam*')\n"
    assert main(["recordings", "list", str(tmp_path), "--session", "gam*"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("format", "only", "says"),
    [
        ("minari", "min_result=3", "no recorded session is selected: {folder} has 3\n"),
        ("rerun", "session=other", "no recorded session is selected: {folder} has 3 (ids that begin so: 'other*')\n"),
        ("parquet", "session=other", "no recorded session is selected: {folder} has 3 (ids that begin so: 'other*')\n"),
        ("mp4", "session=game-*", "no selected session has frames (`recording.frames`): no video is written\n"),
    ],
)
def test_an_export_of_nothing_says_so_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, only: str, says: str
) -> None:
    write(tmp_path / "in", 3)
    words = ["recordings", "export", str(tmp_path / "in"), "--format", format, "--out", str(tmp_path / "out")]
    assert main([*words, "--only", only]) == 2
    assert capsys.readouterr().err == f"brayx: {says.format(folder=tmp_path / 'in')}"
    assert not (tmp_path / "out").exists()


def test_chosen_sessions_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", 3)
    words = ["recordings", "export", str(tmp_path / "in"), "--format", "parquet", "--out", str(tmp_path / "out")]
    assert main([*words, "--session", "game-1"]) == 0
    assert capsys.readouterr().out == f"1 sessions of 1 ticks: {tmp_path / 'out'}\n"
    assert [episode.session for episode in brayx.recording.open(str(tmp_path / "out"))] == ["game-1"]


def test_sessions_without_a_return_are_said_to_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = columns_of([Tick(0, 0.0, 0.0, b"", b"", {})])
    Folder(str(tmp_path), 10**9).write([SessionPart("e", "s", 1e9, 0, 1)], columns)
    words = ["recordings", "export", str(tmp_path), "--format", "minari", "--out", str(tmp_path / "out")]
    assert main([*words, "--only", "min_result=400"]) == 2
    assert "has 1, whose agents recorded no return" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["game-1", "game-*", "other-agent-a", "other", "*-agent-b"])
def test_a_session_is_named_by_its_id_a_pattern_or_its_game(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    ids = ["game-1", "game-2", "other-agent-a", "other-agent-b"]
    columns = columns_of([Tick(0, 0.0, 0.0, b"", b"", {})] * len(ids))
    Folder(str(tmp_path), 10**9).write([SessionPart(session, session, 1e9, 0, 1) for session in ids], columns)
    assert main(["recordings", "list", str(tmp_path), "--session", name]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert listed == [episode.session for episode in recorded(str(tmp_path), name)[0]]
    assert listed == {"game-1": ids[:1], "game-*": ids[:2], "other": ids[2:4], "*-agent-b": ids[3:4]}.get(name, [name])


def test_an_id_with_characters_of_a_pattern_is_an_id(tmp_path: Path) -> None:
    columns = columns_of([Tick(0, 0.0, 0.0, b"", b"", {})])
    Folder(str(tmp_path), 10**9).write([SessionPart("e", "[x]", 1e9, 0, 1)], columns)
    assert len(recorded(str(tmp_path), "[x]")[0]) == 1


def test_a_reader_that_has_enough_gets_no_traceback(tmp_path: Path) -> None:
    write(tmp_path, 4000)
    words = [sys.executable, "-m", "brayx", "recordings", "list", str(tmp_path)]
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
