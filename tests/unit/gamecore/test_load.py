"""`brayx load` plays every session, and counts what the service answers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.commands import cli
from brayx.gamecore.auth import Keys
from brayx.gamecore.load import LoadResult
from tests.unit.actor.doors.test_asgi import Echo

SESSIONS = 4


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[LocalHost]:
    config = ActorConfig(agents=["agent"], port=0, native_port=None, tcp_port=0)
    host = LocalHost(config, Runtime(functools.partial(Echo, [])), keys=getattr(request, "param", None))
    host.open()
    yield host
    host.close()


def words(url: str, record: Path) -> list[str]:
    return ["load", url, "--sessions", str(SESSIONS), "--ramp", "0.1", "--seconds", "0.2", "--record", str(record)]


@pytest.mark.parametrize("door", ["http", "tcp"])
def test_every_session_is_played(
    host: LocalHost, door: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words(host.urls[door], tmp_path / "json"), "--limit-ms", "1000000"]) == 0
    result = json.loads((tmp_path / "json").read_text())
    phases = result["phases"]
    assert phases["start"]["answered"] == phases["stop"]["answered"] >= SESSIONS
    assert phases["tick"]["answered"] >= SESSIONS
    assert not any(phase["errors"] for phase in phases.values())
    assert sum(second["answered"] for second in result["by_second"]) == phases["tick"]["answered"]
    assert result["saturated_at"] is None
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:4]] == ["phase", "start", "tick", "stop"]


@pytest.mark.parametrize("host", [Keys({"studio": b"a secret that is long enough for one"})], indirect=True)
def test_errors_are_counted_by_code(host: LocalHost, tmp_path: Path) -> None:
    assert cli.main(words(host.url, tmp_path / "json")) == 1
    phases = json.loads((tmp_path / "json").read_text())["phases"]
    assert phases["start"]["errors"].keys() == {"unauthorized"}
    assert phases["start"]["errors"]["unauthorized"] >= SESSIONS
    assert phases["start"]["answered"] == phases["tick"]["answered"] == 0


def test_saturation_is_at_the_fewest_sessions_with_late_ticks() -> None:
    result = LoadResult()
    result.seconds |= {0: [10, 100, 0], 1: [20, 199, 1], 2: [30, 90, 10], 3: [40, 50, 50]}
    assert result.saturated_at == 30
