"""Tests of the WebSocket door, by bare connections. They need the package ``websockets``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from brayx.errors import SessionExists
from brayx.gamecore.compliance.base import Door, Doors, error_of
from brayx.gamecore.protocol import (
    MAX_CREDENTIAL_CHARS,
    MAX_SESSION_CHARS,
    SESSION_PATH,
    WS_SUBPROTOCOL,
    encode_numbered,
)

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection


class WebSocketTests(Doors):
    """The tests named ``test_ws_*``."""

    def test_ws_bare_messages_are_ticks_answered_in_kind(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex) as connection:
            assert self.ask(connection, b"\x00\xff") == b"\x00\xff"
            assert self.ask(connection, "text é") == "text é"

    def test_ws_bare_body_limit(self, door: Door) -> None:
        body = bytes(self.max_body_bytes)
        with self.websocket(uuid.uuid4().hex) as connection:
            connection.send(body + b"x")
            assert json.loads(self.receive(connection))["error"] == "body_too_large"
            assert self.ask(connection, body) == body

    def test_ws_unknown_path(self, door: Door) -> None:
        from websockets.exceptions import InvalidStatus
        from websockets.sync.client import connect

        refusal = None
        try:
            connect(self.url_of("ws") + "/no-such-path", open_timeout=self.timeout_s, proxy=None).close()
        except InvalidStatus as error:
            refusal = error.response
        assert refusal is not None, "expected a refusal, the connection was opened"
        assert 400 <= refusal.status_code < 500
        assert json.loads(refusal.body or b"")["error"] == "bad_request"

    def test_ws_bare_close_is_stop(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session) as connection:
            assert self.ask(connection, b"x") == b"x"
        self.becomes_free(session)

    def test_ws_session_in_the_query(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session, in_query=True) as connection, self.client(door) as second:
            assert self.ask(connection, b"x") == b"x"
            assert isinstance(error_of(lambda: second.start(session=session)), SessionExists)

    def test_ws_same_session_twice_is_refused_and_closed(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session) as first:
            for enveloped in (False, True):
                with self.websocket(session, enveloped=enveloped) as second:
                    if enveloped:
                        second.send(b"S")
                    message = self.receive(second)
                    document = json.loads(as_bytes(message)[1 if enveloped else 0 :])
                    assert document["error"] == "session_exists"
                    code, reason = self.close_of(second)
                    assert code == 4409
                    assert reason.startswith('{"error": "session_exists"')
            assert self.ask(first, b"mine still") == b"mine still"

    def test_ws_envelope(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex, enveloped=True) as connection:
            for sent, kind, body in ((b"Shello", b"R", None), (b"T\x00\xff", b"R", b"\x00\xff"), (b"Pbye", b"R", None)):
                connection.send(sent)
                message = as_bytes(self.receive(connection))
                assert message[:1] == kind
                assert body is None or message[1:] == body

    def test_ws_bad_kind_byte_is_refused_and_the_session_goes_on(self, door: Door) -> None:
        with self.enveloped(uuid.uuid4().hex) as connection:
            for bad in (b"Xbody", b"", b"\xff", b"Rreply"):
                self.is_refused(connection, bad, "bad_request")
            assert as_bytes(self.ask(connection, b"Tstill here")) == b"Rstill here"

    def test_ws_envelope_tick_before_start(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex, enveloped=True) as connection:
            self.is_refused(connection, b"Ttoo early", "session_unknown")

    def test_ws_bad_session(self, door: Door) -> None:
        with self.websocket("x" * (MAX_SESSION_CHARS + 1)) as connection:
            assert json.loads(self.receive(connection))["error"] == "bad_request"

    def test_ws_a_field_has_one_value(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex, in_query=True, fields={"session": "other"}) as connection:
            assert json.loads(self.receive(connection))["error"] == "bad_request"

    def test_ws_credentials_have_a_limit(self, door: Door) -> None:
        for name in ("key", "time", "token"):
            with self.websocket(uuid.uuid4().hex, fields={name: "x" * (MAX_CREDENTIAL_CHARS + 1)}) as connection:
                assert json.loads(self.receive(connection))["error"] == "header_too_large"
                assert self.close_of(connection)[0] == 4431

    def test_ws_abrupt_disconnect_frees_the_session(self, door: Door) -> None:
        for enveloped in (False, True):
            session = uuid.uuid4().hex
            with self.websocket(session, enveloped=enveloped) as connection:
                connection.send(b"S" if enveloped else b"x")
                self.receive(connection)
                connection.socket.close()
            self.becomes_free(session)

    def test_ws_numbered_session_outlives_its_connection(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.enveloped(session) as connection:
            assert self.ask(connection, encode_numbered(0, b"zero")) == b"Rzero"
            connection.socket.close()
        with self.websocket(session, enveloped=True) as connection:
            assert self.ask(connection, encode_numbered(0, b"was it lost?")) == b"Rzero"
            assert self.ask(connection, encode_numbered(1, b"one")) == b"Rone"
            connection.socket.close()
        with self.websocket(session, enveloped=True) as connection:  # a stop takes it up again too
            assert as_bytes(self.ask(connection, b"P"))[:1] == b"R"
        self.becomes_free(session)

    def test_ws_announced_session_outlives_its_connection_from_the_start(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.enveloped(session, announced=True) as connection:
            connection.socket.close()
        with self.websocket(session, enveloped=True) as connection:
            assert self.ask(connection, encode_numbered(0, b"zero")) == b"Rzero"
            assert as_bytes(self.ask(connection, b"P"))[:1] == b"R"

    def test_ws_numbered_session_ends_with_an_orderly_close(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.enveloped(session) as connection:
            assert self.ask(connection, encode_numbered(0, b"zero")) == b"Rzero"
        self.becomes_free(session)

    def test_ws_malformed_number_is_refused_and_the_session_goes_on(self, door: Door) -> None:
        with self.enveloped(uuid.uuid4().hex) as connection:
            for bad in (b"N", b"N\x00\x00\x00", b"N" + b"\xff" * 8):
                self.is_refused(connection, bad, "bad_request")
            assert self.ask(connection, encode_numbered(0, b"")) == b"R"
            assert as_bytes(self.ask(connection, b"P"))[:1] == b"R"

    def test_ws_numbered_tick_of_no_session(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex, enveloped=True) as connection:
            self.is_refused(connection, encode_numbered(0, b"x"), "session_unknown")

    def test_ws_tick_without_a_number_touches_no_session_of_another_connection(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session) as holder, self.websocket(session, enveloped=True) as other:
            self.is_refused(other, b"Tnot mine", "session_unknown")
            assert self.ask(holder, b"mine") == b"mine"

    @contextmanager
    def websocket(
        self,
        session: str,
        *,
        enveloped: bool = False,
        in_query: bool = False,
        announced: bool = False,
        fields: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator[ClientConnection]:
        """A bare WebSocket connection to the session door; ``announced``: it announces numbered ticks."""
        headers = {**fields, **({} if in_query else {"session": session}), **({"seq": "0"} if announced else {})}
        from websockets.sync.client import connect
        from websockets.typing import Subprotocol

        with connect(
            self.url_of("ws") + SESSION_PATH + (f"?session={session}" if in_query else ""),
            subprotocols=[Subprotocol(WS_SUBPROTOCOL)] if enveloped else None,
            additional_headers=headers,
            open_timeout=self.timeout_s,
            close_timeout=self.timeout_s,
            max_size=None,
            proxy=None,
        ) as connection:
            yield connection

    @contextmanager
    def enveloped(self, session: str, *, announced: bool = False) -> Iterator[ClientConnection]:
        """An enveloped connection whose session has started; see `websocket`."""
        with self.websocket(session, enveloped=True, announced=announced) as connection:
            assert as_bytes(self.ask(connection, b"S"))[:1] == b"R"
            yield connection

    def receive(self, connection: ClientConnection) -> str | bytes:
        """The next message, which must arrive in time."""
        try:
            return connection.recv(self.timeout_s)
        except TimeoutError:
            raise AssertionError(f"expected a message, nothing came within {self.timeout_s:g} s") from None

    def ask(self, connection: ClientConnection, message: str | bytes) -> str | bytes:
        """Sends a message; returns the next one."""
        connection.send(message)
        return self.receive(connection)

    def close_of(self, connection: ClientConnection) -> tuple[int, str]:
        """Code and reason of the close, which must come next."""
        from websockets.exceptions import ConnectionClosed

        try:
            message = connection.recv(self.timeout_s)
        except TimeoutError:
            raise AssertionError(f"expected a close, nothing came within {self.timeout_s:g} s") from None
        except ConnectionClosed as closed:
            if closed.rcvd is None:
                raise AssertionError("the connection broke without a close frame") from None
            return closed.rcvd.code, closed.rcvd.reason
        raise AssertionError(f"expected a close, got the message {message!r}")

    def is_refused(self, connection: ClientConnection, message: bytes, code: str) -> None:
        """Asserts that an enveloped message gets an error of this code."""
        refusal = as_bytes(self.ask(connection, message))
        assert refusal[:1] == b"E", refusal
        assert json.loads(refusal[1:])["error"] == code


def as_bytes(message: str | bytes) -> bytes:
    return message.encode() if isinstance(message, str) else message
