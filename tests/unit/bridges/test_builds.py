"""Builds of an engine: real processes that end and start again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from brayx.bridges.builds import Builds, words_of
from brayx.errors import ConfigError, StartupError
from brayx.restarts import RestartLimits
from tests.processes import alive
from tests.waiting import until


async def test_a_build_that_ends_starts_again(tmp_path: Path) -> None:
    began = tmp_path / "began"
    code = f"open({str(began)!r}, 'a').write('x'); import sys; sys.exit(3)"
    lines: list[str] = []
    async with Builds([[sys.executable, "-c", code]], lines.append, {}) as builds:

        def started_twice() -> bool:
            builds.watch()
            return began.exists() and len(began.read_text()) >= 2

        until(started_twice, "a second start")
    assert lines[0].startswith("build 0 ended with status 3 after ")


async def test_a_build_that_ends_too_often_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brayx.restarts._FIRST_S", 0.01)
    monkeypatch.setattr("brayx.restarts.LAST_S", 0.01)
    lines: list[str] = []
    commands = [[sys.executable, "-c", "import time; time.sleep(600)"], ["sh", "-c", "kill -9 $$"]]
    async with Builds(commands, lines.append, {}, RestartLimits(2)) as builds:
        with pytest.raises(StartupError) as given_up:
            until(builds.watch, "it is given up")
    assert re.fullmatch(
        r"build 1 ended 3 times within 60 s, the last time with SIGKILL after \d+ s, and restarts is 2: start sh by "
        r"hand to see why, or allow more with --restarts N \(of a job: --set game.restarts=N\)",
        given_up.value.message,
    )
    assert len(lines) == 2, "each restart is said"
    assert lines[0].startswith("build 1 ended with SIGKILL after ")
    assert lines[1].startswith("build 1 ended 2 times, the last time with SIGKILL after ")


async def test_builds_end_with_their_bridge() -> None:
    async with Builds([[sys.executable, "-c", "import time; time.sleep(600)"]] * 2, print, {}) as builds:
        processes = [build.process for build in builds._builds]
    assert [process.returncode for process in processes if process] == [-15, -15]


BRIDGE = """
import asyncio
import sys
from brayx.bridges.builds import Builds
async def main():
    async with Builds([["sh", "-c", "echo $$ > pid; exec sleep 600"]], print, {}):
        sys.stdin.read()
asyncio.run(main())
"""


def test_no_build_outlives_a_killed_bridge(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", BRIDGE], cwd=tmp_path, stdin=subprocess.PIPE) as bridge:
        until(lambda: pid.exists() and pid.read_text().endswith("\n"), "the build runs")
        bridge.kill()
    until(lambda: not alive(int(pid.read_text())), "it has ended")


async def test_commands_that_cannot_be_started() -> None:
    assert words_of("./game.x86_64 --scene 'my level'") == ["./game.x86_64", "--scene", "my level"]
    for command, expected in (("", "is empty"), ("./game 'x", "not a valid command line")):
        with pytest.raises(ConfigError, match=expected):
            words_of(command)
    with pytest.raises(ConfigError, match="'/no/such/build' cannot be started"):
        await Builds([["/no/such/build"]], print, {}).__aenter__()
