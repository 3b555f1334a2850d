"""The doors of the host of one machine: the compliance suite over each, and how they end."""

from __future__ import annotations

import functools
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from queue import SimpleQueue

import grpc
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from brayx.actor.config import ActorConfig
from brayx.actor.host import LocalHost
from brayx.actor.serving import Runtime
from brayx.console.guard import basic
from brayx.errors import SessionLost, StartupError, Unauthorized, from_wire
from brayx.gamecore.auth import Keys, new_key, sign
from brayx.gamecore.client import Client
from brayx.gamecore.compliance import DoorCompliance
from brayx.gamecore.v1 import gamecore_pb2 as pb
from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub
from brayx.metrics import Recorder
from brayx.metrics.openmetrics import CONTENT_TYPE
from tests.unit.actor.doors.test_asgi import Echo
from tests.waiting import until

MAX_BODY_BYTES = 2 * 1024 * 1024
FREE = {"port": 0, "native_port": 0, "tcp_port": 0, "grpc_port": 0}
NATIVE_OFF = {"native_port": None, "tcp_port": None, "grpc_port": None}
DOORS = ("http", "ws", "tcp", "grpc")


def config(**options: object) -> ActorConfig:
    return ActorConfig(agents=["agent"], max_body_bytes=MAX_BODY_BYTES, **{**FREE, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def host() -> Iterator[LocalHost]:
    host = LocalHost(config(), Runtime(functools.partial(Echo, []), describe=lambda: {"mode": "train"}))
    host.open()
    yield host
    host.close()


class TestLocalDoors(DoorCompliance):
    doors = DOORS
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, host: LocalHost) -> None:
        cls.url, cls.urls = host.url, {door: host.urls[door] for door in ("tcp", "grpc")}


class TestLocalDoorsThatAllowAnOrigin(DoorCompliance):
    doors = ("http",)
    max_body_bytes = MAX_BODY_BYTES
    cors_origin = "https://play.example.com"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls) -> Iterator[None]:
        options = {**NATIVE_OFF, "cors_origins": [cls.cors_origin]}
        host = LocalHost(config(**options), Runtime(functools.partial(Echo, [])))
        host.open()
        cls.url = host.url
        yield
        host.close()


def answered(host: LocalHost, name: str, *headers: str) -> int:
    """The HTTP status of a request with the header line ``name``."""
    _, _, port = host.url.rpartition(":")
    with socket.create_connection(("127.0.0.1", int(port)), 10.0) as connection:
        lines = "".join(f"{line}\r\n" for line in headers)
        connection.sendall(f"GET /{'session' if headers else ''} HTTP/1.1\r\n{name}{lines}\r\n".encode())
        return int(connection.recv(65536).split()[1])


OPENING = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
)
EVIL = "rebound.example.com"


@pytest.mark.parametrize(
    ("options", "keys", "lets_in"),
    [
        ({}, None, False),
        ({"allowed_hosts": ["game.example.com"]}, None, False),
        ({"allowed_hosts": [EVIL.upper()]}, None, True),
        ({"allowed_hosts": ["*"]}, None, True),
        ({}, Keys({"studio": b"s" * 32}), True),
        ({"host": "0.0.0.0"}, None, True),
    ],
)
def test_a_door_on_loopback_without_keys_answers_to_names_of_this_machine(
    options: dict[str, object], keys: Keys | None, lets_in: bool
) -> None:
    host = LocalHost(config(**{**NATIVE_OFF, **options}), Runtime(functools.partial(Echo, [])), keys=keys)
    host.open()
    try:
        for name in ("localhost", "LocalHost:80", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000"):
            assert answered(host, f"Host: {name}\r\n") == 200, name
            assert answered(host, f"Host: {name}\r\n", *OPENING) == 101, name
        assert answered(host, "") == 200, "no browser leaves it out"
        for name in (EVIL, f"{EVIL}:8000"):
            assert answered(host, f"Host: {name}\r\n") == (200 if lets_in else 403), name
            assert answered(host, f"Host: {name}\r\n", *OPENING) == (101 if lets_in else 403), name
        if not lets_in:
            for name in ("localhost.example.com", "127.0.0.1.example.com", "[::1", "0.0.0.0"):
                assert answered(host, f"Host: {name}\r\n") in (400, 403), name
    finally:
        host.close()


@pytest.mark.parametrize("right", [True, False])
def test_a_client_without_valid_credentials_may_not_compress(right: bool) -> None:
    """The service decompresses nothing from unknown clients."""
    secret = b"s" * 32
    options = {**NATIVE_OFF, "websocket_window_bits": 15}
    host = LocalHost(config(**options), Runtime(functools.partial(Echo, [])), keys=Keys({"studio": secret}))
    host.open()
    try:
        now = str(int(time.time()))
        token = sign(secret if right else b"x" * 32, "studio", "game", now)
        port = int(host.url.rpartition(":")[2])
        for fields in (f"?session=game&key=studio&time={now}&token={token}", ""):
            lines = "" if fields else f"session: game\r\nkey: studio\r\ntime: {now}\r\ntoken: {token}\r\n"
            more = ("Sec-WebSocket-Protocol: brayx.v1", "Sec-WebSocket-Extensions: permessage-deflate")
            head = "\r\n".join((f"GET /session{fields} HTTP/1.1", "Host: localhost", *OPENING, *more, lines))
            with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
                connection.sendall(f"{head}\r\n".encode())
                said = connection.recv(65536)
            assert said.startswith(b"HTTP/1.1 101 ")
            assert (b"permessage-deflate" in said) == right
    finally:
        host.close()


def status(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=10) as reply:
        document: dict[str, object] = json.load(reply)
    return document


def test_the_status_page_lists_the_doors_and_which_is_native(host: LocalHost) -> None:
    facts = status(host.url)
    assert (facts["service"], facts["application"], facts["mode"]) == ("brayx", "actor", "train")
    doors = facts["doors"]
    assert isinstance(doors, dict)
    assert doors == {**host.urls, "native": doors["native"]}
    assert doors["http"] == host.url != doors["native"]
    assert status(doors["native"]) == facts
    for url in doors.values():
        with Client(url) as client:
            client.start()
            assert client.tick(b"x") == b"x", url


def test_an_end_tells_sessions_and_their_agents_and_leaves_nothing_behind() -> None:
    ends: list[tuple[str, str]] = []
    recorder = Recorder()
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    threads = threading.active_count()
    host = LocalHost(config(**NATIVE_OFF), Runtime(functools.partial(Echo, ends), recorder, close=[close]))
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


def test_an_end_tells_a_session_on_a_grpc_stream() -> None:
    host = LocalHost(config(), Runtime(functools.partial(Echo, [])))
    host.open()
    requests: SimpleQueue[pb.StepRequest | None] = SimpleQueue()
    with grpc.insecure_channel(host.urls["grpc"].removeprefix("grpc://")) as channel:
        replies = GamecoreStub(channel).Play(iter(requests.get, None), timeout=10)
        requests.put(pb.StepRequest(session="s", kind=pb.STEP_KIND_START, body=b"hello"))
        assert next(replies).body == b"hello"
        host.close()
        lost = from_wire(next(replies).error)
        requests.put(None)
    assert isinstance(lost, SessionLost)
    assert lost.details == {"reason": "drained"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalHost, str]]:
    """A host that requires keys, and the one secret."""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    new_key(file, "studio")
    keys = Keys.load(file)
    host = LocalHost(config(), Runtime(functools.partial(Echo, [])), keys=keys)
    host.open()
    yield host, keys.secret("studio").decode()
    host.close()


@pytest.mark.parametrize("door", DOORS)
def test_a_client_with_a_key_plays_at_every_door(guarded: tuple[LocalHost, str], door: str) -> None:
    host, secret = guarded
    with Client(host.urls[door], key="studio", secret=secret) as client:
        client.start(b"hello")
        assert client.tick(b"x") == b"x"
        assert client.stop(b"bye") == b"bye"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ({}, "requires keys"),
        ({"key": "studio", "secret": "x" * 32}, "token"),
        ({"key": "who", "secret": "x" * 32}, "token"),
    ],
    ids=["none", "wrong secret", "unknown"],
)
def test_a_client_without_a_key_is_refused_at_every_door(
    guarded: tuple[LocalHost, str], door: str, key: dict[str, str], says: str
) -> None:
    with Client(guarded[0].urls[door], **key) as client, pytest.raises(Unauthorized, match=says):  # type: ignore[arg-type]
        client.start(b"hello")


@pytest.mark.parametrize("option", ["port", "tcp_port", "grpc_port"])
def test_a_port_that_is_taken_is_reported_and_earlier_doors_are_closed(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = LocalHost(config(**{option: port}), Runtime(functools.partial(Echo, [])))
        with pytest.raises(StartupError, match=f"^port {port} of 127.0.0.1 is taken.* --set actor.{option}=0$"):
            host.open()
    earlier = [] if option == "port" else [int(host.url.rpartition(":")[2])]
    for number in earlier:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", number), timeout=10)


def scraped(host: LocalHost, **headers: str) -> dict[str, float]:
    """The totals and levels at ``/metrics``, by name without the prefix and by label."""
    with urllib.request.urlopen(urllib.request.Request(f"{host.url}/metrics", headers=headers), timeout=10.0) as reply:
        assert reply.headers["content-type"] == CONTENT_TYPE
        text = reply.read().decode()
    return {
        f"{sample.name.removeprefix('ray_brayx_')} {sample.labels['label']}".strip(): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_metrics_are_those_of_what_was_played_and_a_host_s_own_drains_lose_none() -> None:
    recorder = Recorder()
    runtime = Runtime(functools.partial(Echo, []), recorder, lambda: {"policy_versions": {"policy": 7}})
    host = LocalHost(config(), runtime)
    host.export(recorder)
    host.open()
    try:
        with Client(host.url) as client:
            client.start(session="one")
            client.tick(b"1")
            recorder.drain()
            client.tick(b"2")
            read = scraped(host)
            assert (read["sessions_active"], read["acting_version policy"]) == (1, 7)
            client.stop()
        until(lambda: "sessions_ended_total stop" in scraped(host))
        read = scraped(host)
        assert (read["ticks_total"], read["tick_seconds_count"], read["sessions_started_total"]) == (2, 2, 1)
        assert (read["sessions_ended_total stop"], read["sessions_active"]) == (1, 0)
    finally:
        host.close()


def test_with_keys_only_a_key_that_may_read_gets_the_metrics() -> None:
    secret = b"a secret that is long enough for one"
    keys = Keys({"studio": secret, "read/prometheus": secret})
    host = LocalHost(config(), Runtime(functools.partial(Echo, [])), keys=keys)
    host.open()
    try:
        for headers in ({}, {"authorization": basic("studio", secret)}, {"authorization": basic("read/other", secret)}):
            with pytest.raises(urllib.error.HTTPError) as refused:
                scraped(host, **headers)
            assert refused.value.code == 401
            refused.value.close()
        assert scraped(host, authorization=basic("read/prometheus", secret))["sessions_active"] == 0
    finally:
        host.close()
