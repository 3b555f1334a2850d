"""The wheel on a game's own machine: without its dependencies it is a client; with few of them it speaks contracts.

The environments have no packages but those that a test names, linked from the one that runs the tests.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies

ROOT = Path(__file__).parents[2]
GAME = """
import json, sys
from brayx import Client

contract = {"contract": 1, "observations": {"walk": {"shape": [2]}}, "actions": {"go": {"kind": "discrete", "size": 2}}}
with Client(sys.argv[1]) as client:
    client.start(json.dumps(contract).encode())
    print(client.tick(json.dumps({"obs": {"walk": [0, 1]}}).encode()).decode())
    client.stop(json.dumps({"terminated": True}).encode())
heavy = {"ray", "torch", "mlflow", "numpy", "pydantic"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
PACKED = """
import json, sys
from brayx import Client
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies

contract = Contract.parse(
    {
        "contract": 1,
        "observations": {"walk": {"shape": [2]}},
        "actions": {"go": {"kind": "discrete", "size": 2}},
        "encoding": "packed",
    }
)
bodies = ContractBodies(contract)
with Client(sys.argv[1]) as client:
    client.start(json.dumps(contract.as_dict()).encode())
    print(bodies.decode_reply(client.tick(bodies.encode_tick({"walk": [0, 1]}))))
    client.stop(bodies.encode_tick(terminated=True))
"""
COMMAND = "from brayx.commands.cli import run; run()"

WAIT_S = 120.0

pytestmark = pytest.mark.slow


class Walker(Actor):
    """Walks on."""

    async def start(self, session: str, body: bytes) -> bytes:
        self.bodies = ContractBodies(Contract.parse(json.loads(body)))
        return b"{}"

    async def tick(self, body: bytes) -> bytes:
        self.bodies.decode(body)
        return self.bodies.encode({"go": 1})

    async def stop(self, body: bytes) -> bytes:
        return b""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*pip, str(folder), str(ROOT)], check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    with ZipFile(file) as archive:
        archive.extractall(folder / "brayx")
    return folder / "brayx"


@pytest.fixture
def run(wheel: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs Python code with the wheel and the packages that are named, and no other; returns its output."""

    def run(packages: tuple[str, ...], code: str, *words: str) -> str:
        for package in packages:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            assert spec.origin is not None
            source = Path(spec.origin).parent
            for folder in (source, source.with_name(f"{package}.libs")):  # some wheels bring libraries beside them
                if folder.exists():
                    (tmp_path / folder.name).symlink_to(folder)
        start = f"import sys; sys.path[:0] = [{str(wheel)!r}, {str(tmp_path)!r}]\n"
        command = [sys.executable, "-IS", "-c", start + code, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
        return done.stdout + done.stderr

    return run


@pytest.fixture
def url() -> Iterator[str]:
    """URL of a service that walks on."""
    config = ActorConfig(agents=["walker"], port=0, native_port=0, tcp_port=0, serialize=None)
    host = LocalHost(config, Runtime(Walker))
    host.open()
    try:
        yield host.urls["http"]
    finally:
        host.close()


def test_a_client_needs_no_package_at_all(run: Callable[..., str], url: str) -> None:
    assert json.loads(run((), GAME, url)) == {"go": 1}


def test_with_numpy_and_msgpack_it_speaks_contracts(run: Callable[..., str], url: str) -> None:
    assert run(("numpy", "msgpack"), PACKED, url) == "{'go': 1}\n"


def test_with_numpy_and_msgpack_it_loads_a_service(run: Callable[..., str], url: str, tmp_path: Path) -> None:
    start, tick = tmp_path / "start.json", tmp_path / "tick.json"
    start.write_text(
        '{"contract": 1, "observations": {"walk": {"shape": [2]}}, "actions": {"go": {"kind": "discrete", "size": 2}}}'
    )
    tick.write_text('{"obs": {"walk": [0, 1]}}')
    plan = ["--sessions", "2", "--ramp", "0", "--seconds", "0.2", "--start", str(start), "--body", str(tick)]
    said = run(("numpy", "msgpack"), COMMAND, "load", url, *plan)
    assert [line.split()[0] for line in said.splitlines()[:4]] == ["phase", "start", "tick", "stop"], said
    assert said.splitlines()[1].endswith(" -"), said


def test_with_orjson_as_well_it_plays_for_godot(run: Callable[..., str]) -> None:
    assert "--game-timeout-s" in run(("numpy", "msgpack", "orjson"), COMMAND, "gamecore", "godot", "--help")


def test_the_help_needs_no_package_and_a_command_names_the_one_that_it_misses(run: Callable[..., str]) -> None:
    assert "gamecore" in run((), COMMAND, "--help")
    (line,) = run((), COMMAND, "trials").splitlines()
    assert line.startswith("brayx: No module named ")
    assert "pip install brayx" in line
