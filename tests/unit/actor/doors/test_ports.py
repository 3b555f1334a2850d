"""The native ports of an application's replica: two applications cannot have one, and idle connections end."""

from __future__ import annotations

from pathlib import Path

import pytest

from brayx.actor.config import ActorConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.ports import NativeDoors
from brayx.errors import StartupError
from brayx.ports import free_port
from tests.unit.actor.doors.native_doors import (
    Native,
)


def test_two_applications_with_the_same_tcp_port_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Native
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = ActorConfig(agents=["a"], native_port=None, tcp_port=free_port())

    def ports(application: str) -> NativeDoors:
        return NativeDoors(service.table, DoorApp(service.table), config, application)

    first, second, other = ports("mine"), ports("mine"), ports("another")
    service.run(first.open())
    service.run(second.open())
    with pytest.raises(StartupError, match=f"{config.tcp_port} .*'mine'"):
        service.run(other.open())
    first.shut()
    service.run(second.close())
    service.run(other.open())
    for opened in (first, other):
        service.run(opened.close())


@pytest.mark.parametrize(("idle_timeout_s", "closed_after_s"), [(60.0, 300.0), (600.0, 600.0)])
def test_an_idle_connection_is_closed_when_the_protocol_says(
    service: Native, idle_timeout_s: float, closed_after_s: float
) -> None:
    config = ActorConfig(agents=["a"], idle_timeout_s=idle_timeout_s)
    ports = NativeDoors(service.table, DoorApp(service.table), config, "mine")
    assert ports._limits.idle_s == closed_after_s
    protocol = Path(__file__).parents[4] / "docs/protocol.md"
    assert "without a request for 300 s, or for `idle_timeout_s` if that is longer, is closed" in protocol.read_text()
