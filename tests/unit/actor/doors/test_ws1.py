"""Compressed WebSockets of the native port: the same protocol in fewer bytes, with the limits of plain ones."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as websocket

from brayx.errors import BodyTooLarge, ConfigError
from brayx.gamecore import deflate
from brayx.gamecore.client import AsyncClient, Client
from brayx.gamecore.compliance import DoorCompliance
from brayx.gamecore.transports import websocket as transport
from brayx.gamecore.transports.connection import ClientConnection
from brayx.gamecore.transports.local import ServiceThread
from tests.unit.actor.doors.native_doors import MAX_BODY_BYTES, Native, native

BITS = 15


@pytest.fixture(scope="module")
def service() -> Iterator[Native]:
    with native(window_bits=BITS) as made:
        yield made


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each write and read of the blocking client's connections."""
    sizes: list[int] = []

    class Counted(ClientConnection):
        def send(self, data: bytes, timeout_s: float) -> None:
            sizes.append(len(data))
            super().send(data, timeout_s)

        def recv(self, deadline: float) -> bytes:
            data = super().recv(deadline)
            sizes.append(len(data))
            return data

    monkeypatch.setattr(transport, "ClientConnection", Counted)
    return sizes


def ws(service: Native) -> str:
    return service.url.replace("http", "ws")


def bodies(count: int = 30) -> list[bytes]:
    """JSON of 8 kB that changes by 2 % from one to the next."""
    rng = random.Random(0)
    numbers = [rng.randrange(10**6) for _ in range(1000)]
    made = []
    for _ in range(count):
        for index in rng.sample(range(len(numbers)), 20):
            numbers[index] = rng.randrange(10**6)
        made.append(json.dumps(numbers).encode())
    return made


class TestCompressedDoor(DoorCompliance):
    """The suite's bare connections offer compression, as browsers do."""

    doors = ("ws",)
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, service: Native) -> None:
        cls.url, cls.urls = service.url, {}


@pytest.mark.parametrize("codec", ["isal.isal_zlib", "zlib"])
def test_bodies_that_change_little_take_a_fifth_of_the_bytes(
    service: Native, moved: list[int], monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(deflate, "CODEC", pytest.importorskip(codec))
    sent = bodies()
    with Client(ws(service), compress=True) as client:
        client.start()
        moved.clear()
        assert [client.tick(body) for body in sent] == sent
    assert sum(moved) < 2 * sum(map(len, sent)) / 5
    moved.clear()
    with Client(ws(service)) as client:
        client.start()
        assert [client.tick(body) for body in sent] == sent
    assert sum(moved) > 2 * sum(map(len, sent)), "who does not offer it gets plain messages"


async def test_messages_of_every_kind_come_as_they_were_sent(service: Native) -> None:
    rng = random.Random(0)
    sizes = (0, 1, deflate.LEAST_BYTES - 1, deflate.LEAST_BYTES, 5000, 70_000)
    sent = [rng.randbytes(size) for size in sizes] + [bytes(size) for size in sizes]
    async with AsyncClient(ws(service), compress=True) as client:
        await client.start()
        for body in sent * 2:
            assert await client.tick(body) == body


def test_a_door_without_compression_declines_the_offer(moved: list[int]) -> None:
    sent = bodies(3)
    with native() as plain:
        with Client(ws(plain), compress=True) as client:
            client.start()
            assert [client.tick(body) for body in sent] == sent
        assert sum(moved) > 2 * sum(map(len, sent))
        with websocket(f"{ws(plain)}/session", proxy=None) as connection:
            assert connection.protocol.extensions == []


def test_the_window_is_the_services(service: Native) -> None:
    with native(window_bits=10) as small, websocket(f"{ws(small)}/session", proxy=None) as connection:
        (agreed,) = connection.protocol.extensions
        assert (agreed.local_max_window_bits, agreed.remote_max_window_bits) == (10, 10)


def test_a_session_with_numbered_ticks_goes_on_over_another_compressed_connection(service: Native) -> None:
    sent = bodies(6)
    with Client(ws(service), compress=True, reconnect_s=10.0) as client:
        client.start()
        for number, body in enumerate(sent):
            if number == 3:
                client._transport._connection.close()  # type: ignore[attr-defined]
            assert client.tick(body) == body


def test_a_body_counts_as_it_was_before_compression(service: Native) -> None:
    with Client(ws(service), compress=True) as client:
        client.start()
        with pytest.raises(BodyTooLarge):
            client.tick(bytes(MAX_BODY_BYTES + 1))
        assert client.tick(bytes(MAX_BODY_BYTES)) == bytes(MAX_BODY_BYTES)


def frame(payload: bytes) -> bytes:
    """A compressed binary message, masked with zeros."""
    return b"\xc2\xff" + len(payload).to_bytes(8, "big") + bytes(4) + payload


@pytest.mark.parametrize(("kind", "code"), [("bomb", 1009), ("garbage", 1002)])
def test_a_bomb_and_garbage_end_their_own_connection_only(service: Native, kind: str, code: int) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, -BITS)
    bomb = packer.compress(bytes(10 * MAX_BODY_BYTES)) + packer.flush(zlib.Z_SYNC_FLUSH)
    assert len(bomb) < MAX_BODY_BYTES, "it would pass as a plain message"
    with Client(ws(service), compress=True) as other:
        other.start()
        with websocket(f"{ws(service)}/session", proxy=None) as connection:
            connection.socket.sendall(frame(bomb if kind == "bomb" else b"\xff" * 100))
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(timeout=30.0)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == code
        assert other.tick(b"still here") == b"still here"


def test_a_malformed_offer_is_refused(service: Native) -> None:
    with pytest.raises(InvalidStatus) as refused:
        websocket(
            f"{ws(service)}/session",
            proxy=None,
            compression=None,
            additional_headers={"Sec-WebSocket-Extensions": ";;"},
        )
    assert refused.value.response.status_code == 400
    assert "Sec-WebSocket-Extensions" in json.loads(refused.value.response.body or b"")["message"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "tcp://127.0.0.1:1", "grpc://127.0.0.1:1"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_only_websockets_are_compressed(url: str, kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"compress=True .*ws://.*'{url}'"):
        kind(url, compress=True)


def test_a_service_in_this_process_is_not_compressed() -> None:
    class Nothing:
        async def step(self, request: object) -> bytes:
            return b""

    with ServiceThread(Nothing()) as thread, pytest.raises(ConfigError, match="got ServiceThread"):
        Client(thread, compress=True)
