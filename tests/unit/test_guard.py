"""The shell that ends games with their job: real processes, killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from brayx.errors import StartupError
from brayx.guard import GamecoreGuard
from tests.processes import alive
from tests.waiting import WAIT_S, until

JOB = """
import sys
from brayx.actor.config import GamecoreConfig
from brayx.jobs.gamecores import Gamecores
with Gamecores([GamecoreConfig(command="sh game.sh")], {}, "."):
    sys.stdin.read()
"""
GAME = """
(trap '' TERM; while :; do sleep 1; done) &
echo $$ $! > pids
wait
"""


def test_neither_games_nor_their_children_outlive_a_killed_job(tmp_path: Path) -> None:
    (tmp_path / "game.sh").write_text(GAME)
    pids = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-c", JOB], cwd=tmp_path, stdin=subprocess.PIPE) as job:
        until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        game, child = map(int, pids.read_text().split())
        assert alive(game)
        assert alive(child)
        (watch,) = [process for process in psutil.Process(job.pid).children() if process.pid != game]
        job.kill()
    until(lambda: not alive(game) and not alive(child) and not alive(watch.pid))


def test_a_program_in_this_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    game = tmp_path / "game.sh"
    game.write_text("#!/bin/sh\nexit 7")
    game.chmod(0o755)
    with GamecoreGuard() as guard:
        assert guard.start(["./game.sh"]).wait(WAIT_S) == 7
        with pytest.raises(StartupError, match="did not start"):
            guard.start(["game.sh"])


def test_a_killed_shell_is_replaced_by_one_that_knows_the_running_games(tmp_path: Path) -> None:
    (tmp_path / "game.sh").write_text("sleep 600")
    with GamecoreGuard() as guard:

        def start() -> subprocess.Popen[bytes]:
            nowhere = subprocess.DEVNULL
            return guard.start(["sh", "game.sh"], folder=tmp_path, stdout=nowhere, stderr=nowhere)

        first = start()
        until(lambda: psutil.Process(first.pid).cmdline() == ["sh", "game.sh"])  # it has told the shell its id
        (watch,) = [process for process in psutil.Process().children() if process.pid == guard._watch.pid]
        watch.kill()
        until(lambda: not alive(watch.pid))
        second = start()
    assert first.wait(WAIT_S) == second.wait(WAIT_S) == -signal.SIGTERM
