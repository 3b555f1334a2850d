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
    assert result["plan"]["sessions"] == SESSIONS
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:4]] == ["phase", "start", "tick", "stop"]


@pytest.mark.parametrize("host", [Keys({"studio": b"a secret that is long enough for one"})], indirect=True)
def test_errors_are_counted_by_code(host: LocalHost, tmp_path: Path) -> None:
    assert cli.main(words(host.url, tmp_path / "json")) == 1
    phases = json.loads((tmp_path / "json").read_text())["phases"]
    assert phases["start"]["errors"].keys() == {"unauthorized"}
    assert phases["start"]["errors"]["unauthorized"] >= SESSIONS
    assert phases["start"]["answered"] == phases["tick"]["answered"] == 0


def test_saturation_is_where_ticks_are_late_for_three_seconds() -> None:
    result = LoadResult()
    good, bad = [100, 0], [90, 10]
    result.seconds |= {second: [10 * second, *counts] for second, counts in enumerate((good, bad, bad, good, [199, 1]))}
    assert result.saturated_at is None
    result.seconds |= {second: [10 * second, *bad] for second in range(5, 9)}
    assert result.saturated_at == 50
    result.seconds |= {second: [30, *bad] for second in range(9, 14)}
    assert result.saturated_at == 50, "it is not lower because sessions were lost"
