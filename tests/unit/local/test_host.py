"""The doors of the host of one machine: the compliance suite over each, and how they end."""

from __future__ import annotations

import functools
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from brayx.actor.config import ActorConfig
from brayx.errors import SessionLost, StartupError
from brayx.gamecore.client import Client
from brayx.gamecore.compliance import DoorCompliance
from brayx.local.host import LocalHost
from brayx.metrics import Recorder
from tests.unit.actor.doors.test_asgi import Echo
from tests.waiting import until

MAX_BODY_BYTES = 2 * 1024 * 1024
FREE = {"port": 0, "native_port": 0, "tcp_port": 0}


def config(**options: object) -> ActorConfig:
    return ActorConfig(agents=["agent"], max_body_bytes=MAX_BODY_BYTES, **{**FREE, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def host() -> Iterator[LocalHost]:
    host = LocalHost(config(), functools.partial(Echo, []), Recorder(), describe=lambda: {"mode": "train"})
    host.open()
    yield host
    host.close()


class TestLocalDoors(DoorCompliance):
    doors = ("http", "ws", "tcp")
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, host: LocalHost) -> None:
        cls.url, cls.urls = host.url, {"tcp": host.urls["tcp"]}


def status(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=10) as reply:
        found: dict[str, object] = json.load(reply)
    return found


def test_the_status_page_tells_of_the_native_doors_as_a_replica_does(host: LocalHost) -> None:
    facts = status(host.url)
    assert (facts["service"], facts["application"], facts["mode"]) == ("brayx", "actor", "train")
    doors = facts["doors"]
    assert isinstance(doors, dict)
    assert set(doors) == {"http", "ws", "tcp"}
    assert doors["http"] != host.url
    assert status(doors["http"]) == facts
    with Client(doors["ws"]) as client:
        client.start()
        assert client.tick(b"x") == b"x"


def test_an_end_tells_sessions_and_their_agents_and_leaves_nothing_behind() -> None:
    ends: list[tuple[str, str]] = []
    recorder = Recorder()
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    threads = threading.active_count()
    host = LocalHost(config(native_port=None, tcp_port=None), functools.partial(Echo, ends), recorder, close=[close])
    host.open()
    with Client(host.url.replace("http", "ws")) as client:
        client.start()
        client.tick(b"x")
        host.close()
        assert [reason for _, reason in ends] == ["drained"]
        with pytest.raises(SessionLost, match="drained"):
            client.tick(b"x")
    assert closed == [True]
    assert recorder.summary()["sessions_ended.drained"] == 1
    until(lambda: threading.active_count() == threads, "its threads have ended")
    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection(("127.0.0.1", int(host.url.rpartition(":")[2])), timeout=10)


def test_a_port_that_is_taken_is_told_and_those_opened_before_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = LocalHost(config(tcp_port=port), functools.partial(Echo, []), Recorder())
        with pytest.raises(StartupError, match=f"port {port} of 127.0.0.1 is taken"):
            host.open()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(host.url.rpartition(":")[2])), timeout=10)
