"""Bridges to engines in a job's own process, as its gamecores: they play, say what a person must know, fail and end."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from brayx.actor.config import GamecoreConfig
from brayx.errors import StartupError
from brayx.gamecore.auth import Keys
from brayx.jobs.gamecores import Gamecores
from brayx.jobs.inner_bridge import InnerBridge
from tests.end_to_end.jobs import ROOT
from tests.godot_game import GodotStandIn
from tests.unit.bridges.contract_service import ContractService, serving_contracts
from tests.unity_game import Caller, UnityGame
from tests.waiting import WAIT_S, until


@pytest.fixture
def service() -> Iterator[ContractService]:
    with serving_contracts() as made:
        yield made


def bridge(
    service: ContractService, folder: Path, words: str, said: list[str] | None = None, *, is_inner: bool = True
) -> Gamecores:
    config = GamecoreConfig(command=f"brayx gamecore {words} --url {{tcp_url}} --quiet")
    lines = [] if said is None else said
    return Gamecores([config], service.urls, folder, lines.append, lines.append, service.host if is_inner else None)


def port_in(said: list[str]) -> int:
    until(lambda: any("listens at" in line for line in said), "it listens")
    found = re.search(r"listens at 127\.0\.0\.1:(\d+)", "".join(said))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("engine", ["godot", "unity"])
def test_a_bridge_plays_in_this_process_and_ends_with_the_job(
    service: ContractService, tmp_path: Path, engine: str
) -> None:
    said: list[str] = []
    with bridge(service, tmp_path, f"{engine} --listen 0 --num 2", said) as games:
        assert games.running == 1
        assert all(isinstance(game.process, InnerBridge) for game in games._games)
        port = port_in(said)
        assert "num has no effect on a game that is started by hand: give --command BUILD, too (of" in said[0]
        if engine == "godot":  # it quits at its first step
            assert (
                GodotStandIn(port, agents=2, spoil=lambda said: said if said["type"] != "step" else None).run()
                == "quit"
            )
        else:
            with Caller(port) as caller:
                UnityGame(2).play(caller, calls=3)
        until(lambda: len(service.sessions) == 2, "both agents have played")
        until(lambda: all(played.ended for played in service.sessions), "their episodes have ended")
    assert games.running == 0
    assert (games.restarts, games.failures) == (0, 0)


def test_a_bridge_in_this_process_needs_no_key(tmp_path: Path) -> None:
    with serving_contracts(Keys.parse("studio: a-secret-of-thirty-two-characters", "the test")) as service:
        said: list[str] = []
        with bridge(service, tmp_path, "unity --listen 0", said):
            with Caller(port_in(said)) as caller:
                UnityGame(2).play(caller, calls=3)
            until(lambda: len(service.sessions) == 2, "both agents have played")


def test_a_bridge_that_has_not_begun_yet_ends_too(service: ContractService, tmp_path: Path) -> None:
    assert service.host is not None
    words, is_told = ["brayx", "gamecore", "godot", "--listen", "0", "--url", service.urls["tcp"]], threading.Event()
    with (tmp_path / "output").open("ab+", buffering=0) as output:
        service.host.loop.call_soon_threadsafe(is_told.wait, WAIT_S)
        started = InnerBridge(words, service.host, tmp_path, output)
        started.end()
        is_told.set()
        started.wait(WAIT_S)
        assert started.returncode == 0


def test_builds_run_in_the_jobs_folder_and_their_end_is_said(service: ContractService, tmp_path: Path) -> None:
    build = tmp_path / "game.x86_64"
    play = f'cd {ROOT} && exec {sys.executable} -m tests.godot_game --quit-after=3 "$@"'
    build.write_text(f'#!/bin/sh\necho "$*" >> flags\n{play}\n')
    build.chmod(0o755)
    said: list[str] = []
    with bridge(service, tmp_path, "godot --command ./game.x86_64 --no-headless", said) as games:
        ended = "build 0 ended with status 3"
        until(lambda: games.failures or any(ended in line for line in said), "the build or the bridge has ended")
        until(lambda: games.failures or any(line.startswith(ended) for line in said), "the crash is counted")
    assert not games.failures, said
    assert service.sessions
    flags = (tmp_path / "flags").read_text().splitlines()[0]
    assert re.fullmatch(r"--port=\d+", flags), "all else is as exported"


@pytest.mark.parametrize("is_inner", [True, False], ids=["in this process", "a process"])
def test_a_build_that_ends_too_often_is_the_end_of_the_job(
    service: ContractService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_inner: bool
) -> None:
    monkeypatch.setattr("brayx.restarts._FIRST_S", 0.01)
    words = """unity --listen 0 --restarts 1 --num 2 --command "sh -c 'echo no screen; exit 5'" """
    failed: list[str] = []
    with bridge(service, tmp_path, words, failed, is_inner=is_inner) as games:
        until(lambda: games.failures, "it has failed")
        with pytest.raises(StartupError) as given_up:
            games.check()
    line = given_up.value.message
    assert failed.count(line) == 1
    match = re.fullmatch(
        r"build 0 ended 2 times within 60 s, the last time with status 5 after 0 s, and restarts is 1: start sh by "
        r"hand to see why, or allow more .*; it said: no screen; its whole output: (.*)",
        line,
    )
    assert match, line
    assert games.restarts == 0, "the bridge is not started again"
    assert "no screen" in Path(match[1]).read_text()
    shutil.rmtree(Path(match[1]).parent)


@pytest.mark.parametrize(
    ("words", "line", "is_inner"),
    [
        ("godot --listen 0 --no-such-option", "unrecognized arguments: --no-such-option", True),
        ("godot --listen 0 --max-ticks 3", "max_ticks is 3", True),
        ("godot --listen 0 --max-ticks 3", "max_ticks is 3", False),
        ("unity --command ./no-such-build", "'./no-such-build' cannot be started", True),
    ],
)
def test_what_ends_a_bridge_is_a_failure_with_its_reason(
    service: ContractService, tmp_path: Path, words: str, line: str, is_inner: bool
) -> None:
    failed: list[str] = []
    with bridge(service, tmp_path, words, failed, is_inner=is_inner) as games:
        until(lambda: games.failures, "it has failed")
        until(lambda: len(failed) > 1, "the reason is said")
    assert line in failed[0]
    assert "; next try in 1 s" in failed[0]
    assert failed[0] == failed[1], "the display's note, and the one line that is said"
