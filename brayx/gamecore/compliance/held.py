"""Tests of sessions that a connection holds, a WebSocket or a gRPC stream, and that another door takes over."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from brayx.errors import BrayxError, SessionLost, SessionUnknown
from brayx.gamecore.compliance.base import Door, error_of
from brayx.gamecore.compliance.grpc import GrpcTests
from brayx.gamecore.compliance.websocket import WebSocketTests, as_bytes
from brayx.gamecore.protocol import SESSION_PATH, WS_SUBPROTOCOL, StepKind, encode_numbered
from brayx.gamecore.transports.base import Endpoint


class HeldSessions(WebSocketTests, GrpcTests):
    """The tests named ``test_held_*``."""

    def test_held_session_goes_on_after_another_takes_it_over(self, door: Door) -> None:
        for hold in self.holders():
            session = uuid.uuid4().hex
            with hold(session) as old, self.step(door) as step:
                assert step(StepKind.TICK, session, b"zero", 0) == b"zero"
                old.assert_taken_and_closed()
                assert step(StepKind.TICK, session, b"one", 1) == b"one"
                step(StepKind.STOP, session, b"", None)

    def test_held_session_is_untouched_by_an_old_connection_that_has_not_read_the_takeover(self, door: Door) -> None:
        for hold in self.unread_holders():
            session = uuid.uuid4().hex
            with hold(session) as tick_and_leave, self.step(door) as step:
                assert step(StepKind.TICK, session, b"zero", 0) == b"zero"
                tick_and_leave()
                assert step(StepKind.TICK, session, b"one", 1) == b"one"
                step(StepKind.STOP, session, b"", None)

    def test_held_session_stays_with_its_connection_if_ticks_have_no_number(self, door: Door) -> None:
        for hold in self.holders():
            session = uuid.uuid4().hex
            with hold(session) as connection:
                with self.step(door) as step:
                    error = error_of(lambda step=step, session=session: step(StepKind.TICK, session, b"beside", None))
                    assert error is None or isinstance(error, SessionUnknown), error
                assert connection.tick(b"mine") == b"mine"
                connection.leave()
            self.becomes_free(session, door)

    def holders(self) -> Iterator[Callable[[str], AbstractContextManager[HeldConnection]]]:
        """Ways to start a session held by its connection: a bare or enveloped WebSocket, a gRPC stream."""
        if "ws" in self.doors:
            yield partial(self.held_by_websocket, enveloped=False)
            yield partial(self.held_by_websocket, enveloped=True)
        if "grpc" in self.doors:
            yield self.held_by_stream

    def unread_holders(self) -> Iterator[Callable[[str], AbstractContextManager[Callable[[], None]]]]:
        """Like `holders`, but each connection reads nothing until it has sent a tick and closed in order."""
        if "ws" in self.doors:
            yield partial(self.unread_websocket, enveloped=False)
            yield partial(self.unread_websocket, enveloped=True)
        if "grpc" in self.doors:
            yield self.unread_stream

    @contextmanager
    def unread_websocket(self, session: str, *, enveloped: bool) -> Iterator[Callable[[], None]]:
        from websockets.client import ClientProtocol
        from websockets.frames import Opcode
        from websockets.typing import Subprotocol
        from websockets.uri import parse_uri

        url = self.url_of("ws") + SESSION_PATH
        protocol = ClientProtocol(
            parse_uri(f"{url}?session={session}"),
            subprotocols=[Subprotocol(WS_SUBPROTOCOL)] if enveloped else None,
        )
        endpoint, tls = Endpoint.parse(url), Endpoint.parse(url).tls()
        with ExitStack() as stack:
            sock = stack.enter_context(socket.create_connection((endpoint.host, endpoint.port), timeout=self.timeout_s))
            if tls is not None:
                sock = stack.enter_context(tls.wrap_socket(sock, server_hostname=endpoint.host))

            def send() -> None:
                sock.sendall(b"".join(protocol.data_to_send()))

            def receive() -> None:
                while not (events := protocol.events_received()):
                    data = sock.recv(1 << 16)
                    assert data, "the connection was closed"
                    protocol.receive_data(data)
                assert protocol.handshake_exc is None, protocol.handshake_exc
                assert getattr(events[0], "opcode", None) is not Opcode.CLOSE, events

            def tick_and_leave() -> None:
                protocol.send_binary(encode_numbered(1, b"not mine") if enveloped else b"not mine")
                protocol.send_close(1000)
                with suppress(ConnectionError):  # a reset is a close
                    send()
                    while sock.recv(1 << 16):
                        pass

            protocol.send_request(protocol.connect())
            send()
            receive()
            if enveloped:
                protocol.send_binary(b"S")
                send()
                receive()
            yield tick_and_leave

    @contextmanager
    def unread_stream(self, session: str) -> Iterator[Callable[[], None]]:
        with self.grpc() as stub:
            stream = stub.started(session)

            def tick_and_leave() -> None:
                stream.send("TICK", body=b"not mine", seq=1)
                stream.end()
                while stream.reply() is not None:
                    pass

            yield tick_and_leave

    @contextmanager
    def held_by_websocket(self, session: str, *, enveloped: bool) -> Iterator[HeldConnection]:
        start, tick, reply = (b"S", b"T", b"R") if enveloped else (b"", b"", b"")
        with self.websocket(session, enveloped=enveloped) as connection:
            if enveloped:
                connection.send(start)
                assert as_bytes(self.receive(connection))[:1] == reply

            def ask(body: bytes) -> bytes:
                connection.send(tick + body)
                return as_bytes(self.receive(connection)).removeprefix(reply)

            def assert_taken_and_closed() -> None:
                code, reason = self.close_of(connection)
                assert (code, "taken" in reason) == (4410, True), (code, reason)

            yield HeldConnection(ask, assert_taken_and_closed, connection.close)

    @contextmanager
    def held_by_stream(self, session: str) -> Iterator[HeldConnection]:
        with self.grpc() as stub:
            stream = stub.started(session)

            def assert_taken_and_closed() -> None:
                error = stream.reply()
                assert isinstance(error, SessionLost), error
                assert error.details["reason"] == "taken"
                assert stream.reply() is None

            yield HeldConnection(stream.tick, assert_taken_and_closed, stream.end)


@dataclass(frozen=True)
class HeldConnection:
    """A connection that holds a session.

    Attributes:
        tick: sends a tick; gives its reply.
        assert_taken_and_closed: asserts that the service reports the takeover and closes the connection.
        leave: closes the connection in order.
    """

    tick: Callable[[bytes], bytes | BrayxError | None]
    assert_taken_and_closed: Callable[[], None]
    leave: Callable[[], None]
