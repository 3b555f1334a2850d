"""Tests of the gRPC door's ``Play``; ``Step`` is what the clients use. They need the package ``grpcio``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from brayx.errors import BrayxError, HeaderTooLarge, ProtocolError, SessionUnknown, from_wire
from brayx.gamecore.compliance.base import ALL_BYTES, ONE_MIB, Door, Doors, error_of
from brayx.gamecore.protocol import MAX_CREDENTIAL_CHARS, StepKind
from brayx.gamecore.transports.base import Endpoint


class GrpcTests(Doors):
    """The tests named ``test_grpc_*``."""

    def test_grpc_session_without_a_kind(self, door: Door) -> None:
        with self.step(door) as step:
            error = error_of(lambda: step(StepKind.CALL, uuid.uuid4().hex, b"", None))
            assert type(error) is ProtocolError, error

    def test_grpc_credentials_have_a_limit(self, door: Door) -> None:
        with self.grpc() as stub:
            for name in ("key", "time", "token"):
                call = stub.stream(session=uuid.uuid4().hex, **{name: "x" * (MAX_CREDENTIAL_CHARS + 1)})
                assert isinstance(call.reply(), HeaderTooLarge)

    def test_grpc_a_stream_is_a_session_and_ends_with_it(self, door: Door) -> None:
        with self.grpc() as stub:
            stream = stub.started(uuid.uuid4().hex)
            for body in (ALL_BYTES, b"", bytes(ONE_MIB)):
                assert stream.tick(body) == body
            stream.stop()
            assert isinstance(stream.reply(), bytes)
            assert stream.reply() is None

    def test_grpc_requests_sent_at_once_are_answered_in_order(self, door: Door) -> None:
        with self.grpc() as stub:
            stream = stub.stream(session=uuid.uuid4().hex)
            bodies = [b"%d" % number for number in range(100)]
            for body in bodies:
                stream.send(kind="TICK", body=body)
            stream.stop()
            assert isinstance(stream.reply(), bytes)
            assert [stream.reply() for _ in bodies] == bodies

    def test_grpc_an_invalid_request_is_refused_and_the_stream_goes_on(self, door: Door) -> None:
        with self.grpc() as stub:
            stream = stub.started(uuid.uuid4().hex)
            too_large = bytes(self.max_body_bytes + 1)
            for code, fields in (
                ("bad_request", {"kind": "START"}),
                ("bad_request", {"kind": "CALL"}),
                ("bad_request", {"kind": "TICK", "session": uuid.uuid4().hex}),
                ("out_of_sequence", {"kind": "TICK", "seq": 3}),
                ("body_too_large", {"kind": "TICK", "body": too_large}),
            ):
                stream.send(**fields)
                refused = stream.reply()
                assert isinstance(refused, BrayxError), refused
                assert refused.code == code, refused
            assert stream.tick(b"on") == b"on"

    def test_grpc_a_stream_without_a_session_is_refused_and_ends(self, door: Door) -> None:
        with self.grpc() as stub:
            stream = stub.stream(kind="TICK", session=uuid.uuid4().hex)
            assert isinstance(stream.reply(), SessionUnknown)
            assert stream.reply() is None

    def test_grpc_a_stream_that_breaks_frees_its_session(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.grpc() as stub:
            stub.started(session)
        self.becomes_free(session, "grpc")

    def test_grpc_a_numbered_session_goes_on_with_another_stream(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.grpc() as stub:
            stream = stub.started(session)
            assert stream.tick(b"zero", 0) == b"zero"
        with self.grpc() as stub:
            stream = stub.stream(kind="TICK", session=session, seq=0, body=b"was it lost?")
            assert stream.reply() == b"zero"
            assert stream.tick(b"one", 1) == b"one"
            stream.stop()
            assert isinstance(stream.reply(), bytes)
        self.becomes_free(session, "grpc")

    @contextmanager
    def grpc(self) -> Iterator[GrpcPeer]:
        """A bare channel to the gRPC door; its calls are cancelled at the end."""
        with GrpcPeer(Endpoint.parse(self.url_of("grpc")), self.timeout_s) as peer:
            yield peer


class GrpcPeer:
    """A channel to a gRPC door, as a context that opens streams."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        import grpc

        from brayx.gamecore.transports.grpc import CHANNEL_OPTIONS, application_of, target_of
        from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub

        self._channel = grpc.insecure_channel(target_of(endpoint), CHANNEL_OPTIONS)
        self._stub = GamecoreStub(self._channel)
        self._options = {"timeout": timeout_s, "metadata": application_of(endpoint)}
        self._streams: list[GrpcStream] = []

    def __enter__(self) -> GrpcPeer:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams:
            stream.cut()
        self._channel.close()

    def stream(self, kind: str = "START", **fields: Any) -> GrpcStream:
        """Calls ``Play`` and sends the first request."""
        stream = GrpcStream(self._stub, self._options)
        self._streams.append(stream)
        stream.send(kind, **fields)
        return stream

    def started(self, session: str) -> GrpcStream:
        """A stream whose session has started."""
        stream = self.stream(session=session)
        assert isinstance(stream.reply(), bytes)
        return stream


class GrpcStream:
    """One call of ``Play``, request by request and reply by reply."""

    def __init__(self, stub: Any, options: Mapping[str, Any]) -> None:
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._call = stub.Play(iter(self._requests.get, None), **options)

    def send(self, kind: str, **fields: Any) -> None:
        from brayx.gamecore.v1 import gamecore_pb2 as pb

        self._requests.put(pb.StepRequest(kind=f"STEP_KIND_{kind}", **fields))

    def tick(self, body: bytes, seq: int | None = None) -> bytes | BrayxError | None:
        self.send("TICK", body=body, seq=seq)
        return self.reply()

    def stop(self) -> None:
        self.send("STOP")

    def reply(self) -> bytes | BrayxError | None:
        """The next reply's body or error; None if the call has ended without an error."""
        reply = next(self._call, None)
        if reply is None:
            return None
        return from_wire(reply.error) if reply.WhichOneof("reply") == "error" else bytes(reply.body)

    def end(self) -> None:
        """Half-closes the stream: no more requests."""
        self._requests.put(None)

    def cut(self) -> None:
        self._call.cancel()
        self._requests.put(None)
