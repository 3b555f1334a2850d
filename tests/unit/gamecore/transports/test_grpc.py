"""The gRPC transports against real servers, good and bad; the generated code against what it is generated from."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from brayx.actor.doors.grpc import GrpcDoor
from brayx.errors import (
    BodyTooLarge,
    BrayxError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    OutOfSequence,
    Overloaded,
    ProtocolError,
    SessionUnknown,
    TransportError,
)
from brayx.gamecore import AsyncClient, Client
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports import connect
from brayx.gamecore.transports.base import MAX_REPLY_BYTES
from brayx.gamecore.v1 import gamecore_pb2 as pb
from brayx.ports import free_port
from tests.unit.gamecore.grpc_server import serving

ROOT = Path(__file__).parents[4]
GENERATED = ("gamecore_pb2.py", "gamecore_pb2.pyi", "gamecore_pb2_grpc.py")
TIMEOUT_S = 10.0

Do = Callable[..., bytes | BrayxError]


class ScriptedDoor(GrpcDoor):
    """Answers a call as its body says, and keeps what came."""

    def __init__(self) -> None:
        self.requests: list[StepRequest] = []
        self.metadata: dict[str, str] = {}
        self.asked = threading.Event()

    async def Step(self, request: pb.StepRequest, grpc_context: Any) -> pb.StepReply:
        self.metadata = dict(grpc_context.invocation_metadata())
        if request.body == b"too many":
            await grpc_context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Request dropped due to backpressure")
        if request.body == b"fail":
            await grpc_context.abort(grpc.StatusCode.INTERNAL, "something in front of brayx failed")
        return await super().Step(request, grpc_context)

    async def step(self, request: StepRequest, *, let_in: bool = False) -> bytes:
        self.requests.append(request)
        self.asked.set()
        if request.body == b"slow":
            await asyncio.sleep(30)
        if request.body == b"number":
            raise OutOfSequence("the next tick is 3, got 7", expected=3, got=7)
        return bytes(MAX_REPLY_BYTES + 1) if request.body == b"huge" else request.body


async def nothing() -> None:
    """The close of a door with nothing to close."""


@pytest.fixture
def door() -> ScriptedDoor:
    return ScriptedDoor()


@pytest.fixture
def address(door: ScriptedDoor) -> Iterator[str]:
    with serving(door, nothing) as address:
        yield address


def outcome(act: Callable[[], bytes]) -> bytes | BrayxError:
    try:
        return act()
    except BrayxError as error:
        return error


@pytest.fixture(params=["blocking", "asyncio"])
def call(request: pytest.FixtureRequest) -> Do:
    """One stateless call by either client: its reply, or the error that it raised."""

    def blocking(url: str, body: bytes = b"", timeout_s: float = TIMEOUT_S) -> bytes | BrayxError:
        with Client(url, timeout_s=timeout_s) as client:
            return outcome(lambda: client.call(body))

    def in_asyncio(url: str, body: bytes = b"", timeout_s: float = TIMEOUT_S) -> bytes | BrayxError:
        async def play() -> bytes:
            async with AsyncClient(url, timeout_s=timeout_s) as client:
                return await client.call(body)

        return outcome(lambda: asyncio.run(play()))

    return blocking if request.param == "blocking" else in_asyncio


def test_typed_errors_come_out_as_themselves(address: str, call: Do) -> None:
    error = call(f"grpc://{address}", b"number")
    assert isinstance(error, OutOfSequence)
    assert error.message == "the next tick is 3, got 7"
    assert error.details == {"expected": 3, "got": 7}


def test_a_client_works_after_an_error(address: str) -> None:
    with Client(f"grpc://{address}", timeout_s=TIMEOUT_S) as client:
        assert isinstance(outcome(lambda: client.call(b"number")), OutOfSequence)
        assert client.call(b"on") == b"on"
        client.close()
        assert client.call(b"after a close, anew") == b"after a close, anew"


def test_all_fields_travel(address: str, door: ScriptedDoor) -> None:
    transport = connect(f"grpc://{address}")
    requests = [
        StepRequest(StepKind.START, "s", b"\x00\xff", "key", "1700000000", "token"),
        StepRequest(StepKind.TICK, "s", b"", seq=0),
        StepRequest(StepKind.TICK, "s", b"x", seq=2**63 - 1),
        StepRequest(StepKind.STOP, "s", b"bye"),
        StepRequest(StepKind.CALL, "", b"call"),
    ]
    for request in requests:
        assert transport.step(request, TIMEOUT_S) == request.body
    transport.close()
    transport.close()
    assert door.requests == requests


def test_the_session_is_named_where_a_balancer_sees_it(address: str, door: ScriptedDoor) -> None:
    with Client(f"grpc://{address}", timeout_s=TIMEOUT_S) as client:
        client.call(b"")
        assert "session" not in door.metadata
        client.start(session="game-1")
        assert door.metadata["session"] == "game-1"


def test_the_path_names_the_application(address: str, door: ScriptedDoor, call: Do) -> None:
    assert call(f"grpc://{address}/", b"x") == b"x"
    assert "application" not in door.metadata
    assert call(f"grpc://{address}/echo", b"x") == b"x"
    assert door.metadata["application"] == "echo"


@pytest.mark.parametrize(
    "request_", [StepRequest(StepKind.TICK, "\ud800", b""), StepRequest(StepKind.TICK, "s", b"", seq=-1)]
)
def test_an_invalid_request_is_refused_by_the_client(address: str, door: ScriptedDoor, request_: StepRequest) -> None:
    transport = connect(f"grpc://{address}")
    with pytest.raises(ProtocolError, match="cannot be sent"):
        transport.step(request_, TIMEOUT_S)
    transport.close()
    assert door.requests == []


def test_nothing_listens_at_the_address(call: Do) -> None:
    port = free_port()
    error = call(f"grpc://127.0.0.1:{port}")
    assert isinstance(error, ConnectFailed)
    assert "nothing listens there" in error.message
    assert str(port) in error.message


def test_no_such_host(call: Do) -> None:
    error = call("grpc://no-such-host.invalid:9000")
    assert isinstance(error, ConnectFailed)
    assert "does not resolve" in error.message


def test_a_peer_with_another_protocol(call: Do) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1024)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert isinstance(call(f"grpc://127.0.0.1:{listener.getsockname()[1]}"), ConnectFailed)
        thread.join(TIMEOUT_S)


def test_a_reply_that_comes_too_late(address: str, call: Do) -> None:
    error = call(f"grpc://{address}", b"slow", timeout_s=0.3)
    assert isinstance(error, DeadlineExceeded)
    assert error.details["layer"] == "grpc"
    assert "stateless call" in error.message


def test_a_service_that_ends_during_a_request(door: ScriptedDoor, call: Do) -> None:
    answers: list[bytes | BrayxError] = []
    with serving(door, nothing) as address:
        asking = threading.Thread(target=lambda: answers.append(call(f"grpc://{address}", b"slow")))
        asking.start()
        assert door.asked.wait(TIMEOUT_S)
    asking.join(TIMEOUT_S)
    (error,) = answers
    assert isinstance(error, ConnectionLost)
    assert "may have been applied" in error.message


def test_a_client_reconnects_to_a_service_that_comes_back(door: ScriptedDoor) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        with serving(door, nothing, port=port) as address:
            client = stack.enter_context(Client(f"grpc://{address}", timeout_s=TIMEOUT_S, reconnect_s=TIMEOUT_S))
            client.start(session="s")
            assert client.tick(b"before") == b"before"
        assert isinstance(outcome(lambda: client.call(b"")), ConnectFailed)
        with serving(door, nothing, port=port):
            assert client.tick(b"after") == b"after"
            client.stop()
    assert [request.seq for request in door.requests] == [0, 0, 1, None]


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b"too many", Overloaded, "backpressure"),
        (b"fail", TransportError, "something in front of brayx failed"),
        (bytes(5 * 2**20), BodyTooLarge, "larger than max"),
        (b"huge", TransportError, "larger than max"),
    ],
)
def test_answers_of_another_server(
    door: ScriptedDoor, call: Do, body: bytes, kind: type[BrayxError], says: str
) -> None:
    with serving(door, nothing, max_message_bytes=4 * 2**20) as address:
        error = call(f"grpc://{address}", body)
        assert type(error) is kind, error
        assert says in str(error)
        assert call(f"grpc://{address}", b"unharmed") == b"unharmed"


def test_a_server_of_other_services(call: Do) -> None:
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        error = call(f"grpc://127.0.0.1:{port}")
        assert type(error) is TransportError
        assert "UNIMPLEMENTED" in error.message
    finally:
        server.stop(None).wait()


def test_concurrent_requests_of_one_client_wait_for_each_other(address: str) -> None:
    async def play() -> list[bytes]:
        async with AsyncClient(f"grpc://{address}", timeout_s=TIMEOUT_S) as client:
            return await asyncio.gather(*(client.call(b"%d" % number) for number in range(20)))

    assert asyncio.run(play()) == [b"%d" % number for number in range(20)]


def test_a_client_works_after_a_cancelled_request(address: str, door: ScriptedDoor) -> None:
    async def play() -> None:
        async with AsyncClient(f"grpc://{address}", timeout_s=TIMEOUT_S) as client:
            asking = asyncio.create_task(client.call(b"slow"))
            await asyncio.to_thread(door.asked.wait, TIMEOUT_S)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert await client.call(b"on") == b"on"
            with pytest.raises(SessionUnknown):
                await client.tick(b"")

    asyncio.run(play())


# The generated code


def test_the_wire_is_literally_this() -> None:
    request = pb.StepRequest(session="s", kind=pb.STEP_KIND_TICK, body=b"b", key="k", time="1", token="t", seq=0)
    assert request.SerializeToString() == b'\n\x01s\x10\x02\x1a\x01b"\x01k*\x011\x32\x01t8\x00'
    assert pb.StepRequest(body=b"call").SerializeToString() == b"\x1a\x04call"
    assert pb.StepReply(body=b"b").SerializeToString() == b"\n\x01b"
    assert pb.PlayReply(body=b"").SerializeToString() == b"\n\x00"
    assert pb.PlayReply(error=b"{}").SerializeToString() == b"\x12\x02{}"


@pytest.mark.parametrize(
    ("imports", "unwanted"),
    [
        ("sys.modules['grpc_tools'] = None\nimport brayx.gamecore.transports.grpc", "ray torch numpy pydantic"),
        ("import brayx.gamecore.client, brayx.gamecore.compliance", "grpc google.protobuf"),
    ],
    ids=["the transport, which needs no compiler", "other clients"],
)
def test_no_client_loads_what_it_does_not_need(imports: str, unwanted: str) -> None:
    code = f"import sys\n{imports}\nprint(*sorted(set('{unwanted}'.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == ""
