"""Errors as real runtimes print them when a game fails, and the file that a game writes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brayx.jobs.output import MAX_BYTES, Output, error_in
from tests.waiting import WAIT_S

DOTNET = """\
Connecting to ws://127.0.0.1:8100
Unhandled exception. System.InvalidOperationException: the board is gone
   at Game.Play() in /src/Game.cs:line 12
   at Game.Main(String[] args) in /src/Game.cs:line 5
"""
MONO = """\

Unhandled Exception:
System.InvalidOperationException: the board is gone
  at Game.Play () [0x00001] in <8b3f>:0
[ERROR] FATAL UNHANDLED EXCEPTION: System.InvalidOperationException: the board is gone
"""
JAVA = """\
Picked up JAVA_TOOL_OPTIONS: -Xmx1g
Exception in thread "main" java.lang.IllegalStateException: the board is gone
\tat Game.main(Game.java:1)
Caused by: java.lang.RuntimeException: no piece
\t... 1 more
"""
GO = """\
2026/11/27 03:00:00 error budget: 3
panic: the board is gone

goroutine 1 [running]:
main.play(...)
\t/src/game.go:8
main.main()
\t/src/game.go:4 +0x25
exit status 2
"""
RUST = """\
thread 'main' panicked at src/main.rs:2:5:
the board is gone
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
"""
CPP = """\
terminate called after throwing an instance of 'std::runtime_error'
  what():  the board is gone
"""
NODE = """\
/game/game.js:2
function play() { throw new Error("the board is gone"); }
                  ^

Error: the board is gone
    at Timeout.play [as _onTimeout] (/game/game.js:2:24)
    at process.processTimers (node:internal/timers:519:7)

Node.js v20.20.2
"""
PYTHON = """\
/game/game.py:1: DeprecationWarning: an error of style
Traceback (most recent call last):
  File "/game/game.py", line 5, in <module>
    play()
Gone: the board is gone
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (DOTNET, "Unhandled exception. System.InvalidOperationException: the board is gone"),
        (MONO, "Unhandled Exception: System.InvalidOperationException: the board is gone"),
        (JAVA, 'Exception in thread "main" java.lang.IllegalStateException: the board is gone'),
        (GO, "panic: the board is gone"),
        (RUST, "thread 'main' panicked at src/main.rs:2:5: the board is gone"),
        (CPP, "terminate called after throwing an instance of 'std::runtime_error' what():  the board is gone"),
        (NODE, "Error: the board is gone"),
        (PYTHON, "Gone: the board is gone"),
        ("sh: 1: gmae: not found\n", "sh: 1: gmae: not found"),
        ("a\nFATAL: no \x1b[31mboard\nbye\n", "FATAL: no \\x1b[31mboard"),
        ("one\ntwo\nexit status 3\n", "two"),
        ("exit status 3\n", "exit status 3"),
        ("", ""),
    ],
)
def test_the_line_that_says_why_a_game_failed(text: str, error: str) -> None:
    assert error_in(text.splitlines()) == error


@pytest.mark.parametrize(
    ("runtime", "file", "program", "error"),
    [
        (
            "node",
            "game.js",
            'console.log("hello");\nsetTimeout(() => { throw new TypeError("the board is gone"); }, 1);\n',
            "TypeError: the board is gone",
        ),
        (
            "java",
            "Game.java",
            'class Game { public static void main(String[] a) { throw new IllegalStateException("no board"); } }',
            'Exception in thread "main" java.lang.IllegalStateException: no board',
        ),
        (
            sys.executable,
            "game.py",
            'class Gone(Exception): pass\nraise Gone("the board is gone")\n',
            "Gone: the board is gone",
        ),
    ],
)
def test_the_file_has_the_error_of_a_game_that_fails(
    tmp_path: Path, runtime: str, file: str, program: str, error: str
) -> None:
    if shutil.which(runtime) is None:
        pytest.skip(f"{runtime} is not installed")
    (tmp_path / file).write_text(program)
    output = Output("game.txt")
    output.open(tmp_path)
    words = [runtime, str(tmp_path / file)]
    assert subprocess.run(words, stdout=output.begin(), stderr=output.begin(), timeout=2 * WAIT_S).returncode != 0
    summary, last = output.said()
    assert summary.endswith(error)
    assert len(last) <= 10
    output.close(keep=False)
    assert not output.path.exists()


def test_the_file_is_bounded_and_keeps_the_newest_output(tmp_path: Path) -> None:
    output = Output("game.txt")
    output.open(tmp_path)
    file = output.begin()
    file.write(b"first\nhal")
    assert output.newest() == ["first"]
    file.write(b"f\n")
    assert output.newest() == ["half"], "a line is read once it is whole"
    for number in range(8):
        file.write(f"{number}\n".encode() * (MAX_BYTES // 8))
        output.newest()
        assert output.path.stat().st_size <= MAX_BYTES + MAX_BYTES // 4
    file.write(b"Error: last\n")
    assert output.newest() == ["Error: last"]
    error, last = output.said()
    assert error == "Error: last"
    assert last == [*["7"] * 9, "Error: last"]
    output.begin()
    assert output.said() == ("", []), "only of the game that began last"
    output.close(keep=True)
    assert output.path.exists()
