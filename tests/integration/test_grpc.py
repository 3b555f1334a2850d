"""gRPC through Serve's own proxy: compliance, and streams over two replicas.

The application is this file's alone: the compliance suite needs an echo without keys.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from ray import serve

from brayx.cluster.directory import stop_directory
from brayx.errors import BrayxError, SessionLost, from_wire
from brayx.gamecore.compliance import DoorCompliance
from brayx.gamecore.v1 import gamecore_pb2 as pb
from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub
from deployments.echo import EchoArgs
from deployments.echo import app as echo_app
from tests.integration.conftest import Ingress
from tests.waiting import until

WAIT_S = 60.0
START, TICK, STOP = pb.STEP_KIND_START, pb.STEP_KIND_TICK, pb.STEP_KIND_STOP


@pytest.fixture(scope="module")
def echo(grpc_ingress: Ingress) -> Iterator[str]:
    """The echo application on two replicas behind Serve's own proxy; the value is ``127.0.0.1:port`` of gRPC."""
    args = EchoArgs(num_workers=2, native_port=None, tcp_port=None)
    serve.run(echo_app(args), name="echo", route_prefix="/echo")
    yield grpc_ingress.grpc
    serve.delete("echo")
    stop_directory("echo/sessions")


class TestGrpcOnServe(DoorCompliance):
    """The suite over two replicas, so that half of all ticks are passed on to the owner."""

    doors = ("grpc",)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, echo: str) -> None:
        cls.urls = {"grpc": f"grpc://{echo}"}


@pytest.fixture
def stub(echo: str) -> Iterator[GamecoreStub]:
    with grpc.insecure_channel(echo) as channel:
        yield GamecoreStub(channel)


def game(session: str, *bodies: bytes) -> Iterator[pb.StepRequest]:
    """The requests of a whole session."""
    yield pb.StepRequest(session=session, kind=START)
    for body in bodies:
        yield pb.StepRequest(kind=TICK, body=body)
    yield pb.StepRequest(kind=STOP, body=b"bye")


def replies(call: Any) -> list[bytes | str]:
    """All replies of a stream: bodies, and the codes of errors."""
    return [from_wire(reply.error).code if reply.error else reply.body for reply in call]


def play(stub: GamecoreStub) -> None:
    """A session on one stream, with one request that is refused."""
    session = uuid.uuid4().hex
    too_large = bytes(5 * 2**20)
    received = replies(stub.Play(game(session, b"one", too_large, b"two"), timeout=WAIT_S))
    assert received == [b"", b"one", "body_too_large", b"two", b"bye"]


def resume(stub: GamecoreStub) -> None:
    """A numbered session continues on another stream after its own is cut, at any replica."""
    session = uuid.uuid4().hex
    stream = Held(stub)
    assert stream.ask(session=session, kind=START, body=b"a") == b"a"
    assert stream.ask(kind=TICK, seq=0, body=b"zero") == b"zero"
    stream.call.cancel()
    for seq, body, reply in ((0, b"was it lost?", b"zero"), (1, b"one", b"one"), (2, b"two", b"two"), (2, b"", b"two")):
        stream = Held(stub)  # at either replica
        assert stream.ask(session=session, kind=TICK, seq=seq, body=body) == reply
        stream.call.cancel()
    assert replies(stub.Play(iter([pb.StepRequest(session=session, kind=STOP)]), timeout=WAIT_S)) == [b""]


def free_again(stub: GamecoreStub) -> None:
    """A stream that is cut off ends its session."""
    session = uuid.uuid4().hex
    stream = Held(stub)
    assert stream.ask(session=session, kind=START, body=b"a") == b"a"
    stream.call.cancel()
    until(lambda: replies(stub.Play(game(session), timeout=WAIT_S)) == [b"", b"bye"], "a free session", WAIT_S)


class Held:
    """A stream that stays open between its requests."""

    def __init__(self, stub: GamecoreStub) -> None:
        self._requests: SimpleQueue[pb.StepRequest | None] = SimpleQueue()
        self.call = stub.Play(iter(self._requests.get, None), timeout=WAIT_S)
        self.call.add_callback(lambda: self._requests.put(None))

    def ask(self, **fields: Any) -> bytes | BrayxError:
        self._requests.put(pb.StepRequest(**fields))
        return self.next()

    def next(self) -> bytes | BrayxError:
        reply = next(self.call)
        return from_wire(reply.error) if reply.error else bytes(reply.body)


@pytest.mark.parametrize("what", [play, resume, free_again])
def test_streams(stub: GamecoreStub, what: Callable[[GamecoreStub], None]) -> None:
    what(stub)


def test_a_session_stopped_at_another_replica_ends_its_stream(stub: GamecoreStub) -> None:
    stream = Held(stub)
    session = uuid.uuid4().hex
    assert stream.ask(session=session, kind=START, body=b"a") == b"a"
    stub.Step(pb.StepRequest(session=session, kind=STOP), timeout=WAIT_S)
    reply = stream.next()
    assert isinstance(reply, SessionLost)
    assert reply.details == {"reason": "stop"}
    assert next(stream.call, None) is None
