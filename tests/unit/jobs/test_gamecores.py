"""Game processes are real ones here: small Python programs that live, die or refuse to."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from brayx.actor.config import GamecoreConfig
from brayx.errors import ConfigError, StartupError
from brayx.jobs.checks import check_gamecores
from brayx.jobs.config import JobConfig
from brayx.jobs.gamecores import Gamecores, filled, gamecores_of
from tests.end_to_end.jobs import TEMPLATES
from tests.processes import alive
from tests.waiting import until

URLS = {"http": "http://127.0.0.1:1", "ws": "ws://127.0.0.1:1"}


def games(tmp_path: Path, program: str, *, num: int = 1, arguments: str = "") -> Gamecores:
    script = tmp_path / "game.py"
    script.write_text(program)
    return Gamecores([GamecoreConfig(command=f"{sys.executable} {script} {arguments}", num=num)], URLS, tmp_path)


def pids(running: Gamecores) -> list[int]:
    """Process ids of the games that run."""
    started = [game.process for game in running._games if game.process is not None]
    return [process.pid for process in started if process.poll() is None]


def test_commands_get_the_door_and_their_number(tmp_path: Path) -> None:
    program = "import sys, time; open(sys.argv[2], 'w').write(sys.argv[1]); time.sleep(60)"
    with games(tmp_path, program, num=2, arguments="{url} seen-{index}") as running:
        until(lambda: all((tmp_path / f"seen-{i}").exists() and (tmp_path / f"seen-{i}").read_text() for i in (0, 1)))
        assert (tmp_path / "seen-0").read_text() == "ws://127.0.0.1:1"
        assert running.running == 2


def test_a_job_adopts_the_games_that_were_started_to_learn_their_contract(tmp_path: Path) -> None:
    with games(tmp_path, "import time; time.sleep(600)", num=2) as running:
        before = pids(running)
        with running as adopted:
            assert adopted is running
            assert pids(adopted) == before != []
        assert running.running == 0, "they end with the job"


def test_a_game_that_dies_is_started_again_and_its_last_words_are_kept(tmp_path: Path) -> None:
    program = "import sys; print('the door is shut', file=sys.stderr); sys.exit(3)"
    with games(tmp_path, program) as running:
        until(lambda: running.restarts >= 1)
        until(lambda: any("status 3" in message for message in running.messages))
        assert "the door is shut" in running.messages


def test_lines_of_brayxs_own_gamecores_are_said_and_the_same_of_a_game_not_again(tmp_path: Path) -> None:
    lines = {
        "gamecore 7: the game was refused: agent 1": True,
        "gamecore 7: the game was refused: agent 23": False,
        "hello": False,
        "gamecore 7: build 0 plays with 8 agents": True,
        "gamecore 7: build 1 plays with 8 agents": True,
        "gamecore 7: build 1 plays with 9 agents": False,
        "gamecore 7: the game at 127.0.0.1:5001 plays": True,
        "gamecore 7: the game at 127.0.0.1:5002 plays": True,
        "gamecore 7: build 1 ended with status 3 after 4 s": True,
        "gamecore 7: build 0 ended with status 0 after 4 s": True,
        "gamecore 7: build 1 ended 2 times, the last time with SIGSEGV after 4 s": True,
        "gamecore 7: build 1 ended 3 times, the last time with SIGSEGV after 5 s": False,
        "gamecore 7: the game has left after 3 calls; press Play to go on": True,
        "gamecore 7: the game plays": True,
        "gamecore 7: the game has left after 5 calls; press Play to go on": True,
        "gamecore 8: the game plays": True,
    }
    said: list[str] = []
    failed: list[str] = []
    script = tmp_path / "game.py"
    script.write_text(f"import time\nprint({chr(10).join(lines)!r}, flush=True)\ntime.sleep(600)")
    config = GamecoreConfig(command=f"{sys.executable} {script}")
    with Gamecores([config], URLS, tmp_path, failed.append, said.append) as running:
        until(lambda: len(running.messages) == len(lines), "all lines have come")
        until(lambda: said[-1:] == [*lines][-1:], "those of brayx's own are said")
        assert running.failures == 0, "it runs"
    assert said == [line for line, is_said in lines.items() if is_said]
    crashes = [line.removeprefix("gamecore 7: ") for line in lines if "status 3" in line or "SIGSEGV" in line]
    assert failed == crashes, "all are counted"


def test_a_crashed_games_error_last_lines_and_output_file_are_shown_once(tmp_path: Path) -> None:
    program = """
import sys
print("the game begins")
for line in range(20): print("at line", line, file=sys.stderr, flush=True)
raise RuntimeError("the board is gone")
"""
    said, failed, script = [], [], tmp_path / "game.py"
    script.write_text(program)
    config = GamecoreConfig(command=f"{sys.executable} {script}")
    with Gamecores([config], URLS, tmp_path, failed.append, said.append) as running:
        until(lambda: running.failures >= 2)
    (text,) = said
    first, *last = text.splitlines()
    match = re.fullmatch(
        r"a gamecore ended with status 1 after \d+ s; it said: RuntimeError: the board is gone; "
        r"its whole output: (\S+gamecore-0.txt); its last lines:",
        first,
    )
    assert match, first
    assert len(last) == 10
    assert last[-1] == "RuntimeError: the board is gone"
    assert all("the board is gone" in line for line in failed)
    output = Path(match[1])
    try:
        assert output.read_text().count("the game begins") >= 2, "it stays, with standard output, of each run"
    finally:
        shutil.rmtree(output.parent)


def test_a_game_that_quits_says_when_it_starts_again(tmp_path: Path) -> None:
    with games(tmp_path, "") as running:
        until(lambda: running.restarts >= 1)
        assert re.fullmatch(r"a gamecore ended with status 0 after \d+ s; it starts again in 1 s", running.messages[0])
    assert not running.failures


def test_a_game_that_ends_too_often_is_the_end_of_the_job(tmp_path: Path) -> None:
    config = GamecoreConfig(command="sh -c 'exit 3'", restarts=1)
    with Gamecores([config], URLS, tmp_path) as running:
        running.check()
        until(lambda: len(running.messages) >= 2)
        with pytest.raises(StartupError) as ended:
            running.check()
    assert running.restarts == 1
    assert re.fullmatch(
        r"gamecore \"sh -c 'exit 3'\" ended 2 times within 60 s, the last time with status 3 after \d+ s, and "
        r"gamecores.restarts is 1: start it by hand to see why, or allow more",
        ended.value.message,
    )


def test_a_killed_game_is_started_again(tmp_path: Path) -> None:
    with games(tmp_path, "import time; time.sleep(60)") as running:
        (first,) = pids(running)
        os.kill(first, 9)
        until(lambda: pids(running) not in ([], [first]))


def test_stop_leaves_no_process_not_even_one_that_will_not_go_or_a_child(tmp_path: Path) -> None:
    program = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("child", "w").write(str(child.pid))
time.sleep(60)
"""
    running = games(tmp_path, program)
    with running:
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
        left = [*pids(running), int((tmp_path / "child").read_text())]
        running.stop(timeout_s=0.3)
    until(lambda: not any(alive(pid) for pid in left))


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
open("child", "a").write(f"{{child.pid}}\\n")
{then}
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
ORDERLY = """
import signal, sys, time
def end(*_):
    time.sleep(0.3)
    open("orderly", "w").write("1")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print(flush=True)
time.sleep(60)
"""


def children(tmp_path: Path) -> list[int]:
    file = tmp_path / "child"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_stop_ends_a_child_that_outlives_its_parent(tmp_path: Path) -> None:
    running = games(tmp_path, PARENT.format(child=STUBBORN, then="time.sleep(60)"))
    with running:
        until(lambda: children(tmp_path) != [])
        (parent,), (child,) = pids(running), children(tmp_path)
        running.stop(timeout_s=0.5)
    until(lambda: not alive(parent) and not alive(child))


def test_stop_gives_a_child_the_time_that_its_parent_does_not_need(tmp_path: Path) -> None:
    running = games(tmp_path, PARENT.format(child=ORDERLY, then="time.sleep(60)"))
    with running:
        until(lambda: children(tmp_path) != [])
        running.stop(timeout_s=20.0)
    assert (tmp_path / "orderly").exists()


def test_a_game_that_ends_by_itself_takes_its_children_along(tmp_path: Path) -> None:
    with games(tmp_path, PARENT.format(child=STUBBORN, then="sys.exit(3)")) as running:
        until(lambda: running.failures >= 1)
        first = children(tmp_path)[0]
        until(lambda: not alive(first))


def test_a_flood_of_output_is_bounded(tmp_path: Path) -> None:
    program = """
import sys, time
for _ in range(2000): print("x" * 3000, file=sys.stderr)
open("done", "w").write("1")
time.sleep(60)
"""
    with games(tmp_path, program) as running:
        until(lambda: (tmp_path / "done").exists() and running.messages)
        assert len(running.messages) <= 20
        assert max(map(len, running.messages)) <= 500


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(StartupError, match=r"no-such-game --url ws://127.0.0.1:1' did"),
        Gamecores([GamecoreConfig(command="no-such-game --url {url}")], URLS, tmp_path),
    ):
        pass


def test_each_door_has_a_placeholder_and_the_summary_has_each_gamecores_url(tmp_path: Path) -> None:
    assert filled("game {http_url}/step {ws_url} {index}", URLS, door="ws", index=3) == [
        "game",
        "http://127.0.0.1:1/step",
        "ws://127.0.0.1:1",
        "3",
    ]
    assert (
        filled("game {grpc_url}", {**URLS, "grpc": "grpc://127.0.0.1:2"}, door="ws", index=0)[1] == "grpc://127.0.0.1:2"
    )
    with pytest.raises(StartupError, match=r"tcp, .* not open; .*: http, ws"):
        filled("game {tcp_url}", URLS, door="ws", index=0)
    configs = [GamecoreConfig(command="game {url}", num=4), GamecoreConfig(command="game {http_url}", num=2)]
    assert str(Gamecores(configs, URLS, tmp_path)) == (
        "4 gamecores play at ws://127.0.0.1:1; 2 gamecores play at http://127.0.0.1:1"
    )
    assert str(Gamecores([GamecoreConfig(command="game")], URLS, tmp_path)) == "1 gamecore was given no URL"
    bridge = "brayx gamecore godot --url {http_url}"
    by_hand, builds = GamecoreConfig(command=bridge), GamecoreConfig(command=f"{bridge} --command ./game --num 2")
    assert str(Gamecores([by_hand], URLS, tmp_path)) == "1 gamecore plays at http://127.0.0.1:1"
    assert str(Gamecores([builds], URLS, tmp_path)) == "2 builds play at http://127.0.0.1:1"


def test_a_component_gives_flags_to_a_command() -> None:
    options = [
        "game.command='./my game {other}'",
        "game.headless=false",
        "game.speedup=8",
        "game.listen=null",
        "game.more=[1, a]",
        "other={kind: config, depth: 1}",
    ]
    job = JobConfig.load(TEMPLATES / "godot.yaml", options)
    (gamecore,) = gamecores_of(job, "actor")
    flags = "--num=1 --no-headless --speedup=8 --more=1 --more=a"
    assert gamecore.command == f"brayx gamecore godot --url {{tcp_url}} --quiet '--command=./my game {{other}}' {flags}"
    assert gamecores_of(job, "") == []


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (
            "game.comand=./game",
            "game.comand: brayx gamecore godot: unrecognized arguments: --comand=./game; "
            "the nearest option is --command",
        ),
        (
            "game.headless=maybe",
            "game.headless: brayx gamecore godot: argument --headless/--no-headless: ignored explicit argument 'maybe'",
        ),
        ("game.command=./no-such-game", "game.command: there is no program './no-such-game'"),
        (
            "actor.gamecores.0.command='brayx gamecore godot --url {tcp_url} --command ./none'",
            "actor.gamecores.0.command: there is no program './none'",
        ),
    ],
)
def test_a_bridges_options_are_checked_before_the_training(option: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_gamecores(JobConfig.load(TEMPLATES / "godot.yaml", [option]))
    assert refused.value.details["errors"] == [line]


def test_a_shipped_jobs_games_are_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    game = tmp_path / "game.x86_64"
    game.write_text("#!/bin/sh\nexit 3")
    job = JobConfig.load(TEMPLATES / "godot.yaml", ["game.command=./game.x86_64"])
    with pytest.raises(ConfigError, match=r"there is no program '\./game\.x86_64'"):
        check_gamecores(job)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"game\.command: \./game\.x86_64 is not executable: chmod \+x \./game\.x86_64$"
    ):
        check_gamecores(job)
    game.chmod(0o755)
    check_gamecores(job)
    own = tmp_path / "own" / "godot.yaml"
    own.parent.mkdir()
    own.write_text((TEMPLATES / "godot.yaml").read_text())
    with pytest.raises(ConfigError, match=r"there is no program '\./game\.x86_64'"):
        check_gamecores(JobConfig.load(own, ["game.command=./game.x86_64"]))
