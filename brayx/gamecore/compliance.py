"""The compliance suite: tests of a service by its doors alone, for brayx and for anybody who writes such a service.

The service under test must be an echo: a tick and a stateless call answer their own body; start and stop may answer
anything. Subclass in a pytest module, say where the service is and which doors it has, and pytest collects the rest:

    class TestMyServer(DoorCompliance):
        url = "http://127.0.0.1:8000"           # or set it from a fixture
        doors = ("http", "ws")

Knows nothing of how the service is made; speaks to it in bytes where the point is bytes, else through the clients.
The WebSocket tests need the package ``websockets``.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from brayx.errors import BodyTooLarge, BrayxError, SessionExists
from brayx.gamecore.client import AsyncClient, Client
from brayx.gamecore.protocol import (
    DEFAULT_MAX_BODY_BYTES,
    MAX_SESSION_CHARS,
    SESSION_PATH,
    STEP_PATH,
    WS_SUBPROTOCOL,
)
from brayx.gamecore.transports.base import Endpoint

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

Door = Literal["http", "ws"]

ALL_BYTES = bytes(range(256))
ONE_MIB = 1024 * 1024


class DoorCompliance:
    """The suite. Tests named ``test_http_*`` and ``test_ws_*`` are of that door only, all others of each in `doors`.

    Attributes:
        url: of the service, a path before ``/step`` included.
        doors: which of ``http`` and ``ws`` it has.
        max_body_bytes: its limit; a body of one byte more must be refused.
        timeout_s: for each wait of a test.
    """

    url: str
    doors: tuple[Door, ...] = ("http", "ws")
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    timeout_s: float = 10.0

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Run each test once for each door that it is about and the service has."""
        if "door" in metafunc.fixturenames:
            only = metafunc.function.__name__.split("_")[1]
            metafunc.parametrize("door", [door for door in self.doors if only not in ("http", "ws") or door == only])

    # Sessions, by every door

    def test_start_tick_stop(self, door: Door) -> None:
        with self.client(door) as client:
            client.start(b"hello")
            assert client.tick(b"one") == b"one"
            client.stop(b"bye")
            assert client.session is None

    def test_ticks_of_a_session_are_answered_in_order(self, door: Door) -> None:
        with self.client(door) as client:
            client.start()
            for number in range(50):
                assert client.tick(f"tick {number}") == f"tick {number}".encode()

    def test_empty_body(self, door: Door) -> None:
        with self.client(door) as client:
            client.start(b"")
            assert client.tick(b"") == b""
            client.stop(b"")

    def test_body_of_all_byte_values(self, door: Door) -> None:
        with self.client(door) as client:
            client.start(ALL_BYTES)
            assert client.tick(ALL_BYTES) == ALL_BYTES
            client.stop(ALL_BYTES)

    def test_large_body(self, door: Door) -> None:
        body = (ALL_BYTES * (ONE_MIB // len(ALL_BYTES)))[: self.max_body_bytes]
        with self.client(door) as client:
            client.start()
            assert client.tick(body) == body
            assert client.tick(b"after") == b"after"

    def test_body_above_the_limit_is_refused_and_nobody_else_harmed(self, door: Door) -> None:
        with self.client(door) as other, self.client(door) as client:
            other.start()
            client.start()
            error = _error_of(lambda: client.tick(bytes(self.max_body_bytes + 1)))
            assert isinstance(error, BodyTooLarge), error
            assert other.tick(b"fine") == b"fine"
            if client.session is None:  # the WebSocket may be closed for it
                client.start()
            assert client.tick(b"small again") == b"small again"

    def test_start_of_a_running_session_is_refused_and_leaves_it_alone(self, door: Door) -> None:
        with self.client(door) as first, self.client(door) as second:
            first.start()
            error = _error_of(lambda: second.start(session=first.session))
            assert isinstance(error, SessionExists), error
            assert first.tick(b"mine") == b"mine"

    def test_id_is_free_after_stop(self, door: Door) -> None:
        session = uuid.uuid4().hex
        for _ in range(3):
            with self.client(door) as client:
                client.start(session=session)
                assert client.tick(b"again") == b"again"

    def test_sessions_interleaved_never_mix(self, door: Door) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(self.client(door)) for _ in range(20)]
            for client in clients:
                client.start()
            for number in range(5):
                for client in clients:
                    body = f"{client.session} {number}".encode()
                    assert client.tick(body) == body

    def test_many_sessions_at_once(self, door: Door) -> None:
        async def play(index: int) -> None:
            async with AsyncClient(self.url_of(door), timeout_s=self.timeout_s) as client:
                await client.start()
                for number in range(20):
                    body = f"{index} {number}".encode()
                    assert await client.tick(body) == body

        async def play_all() -> None:
            await asyncio.gather(*(play(index) for index in range(32)))

        asyncio.run(play_all())

    def test_credentials_are_not_taken_for_anything_else(self, door: Door) -> None:
        with Client(self.url_of(door), timeout_s=self.timeout_s, key="k", time="0", token="t") as client:
            client.start()
            assert client.tick(b"body") == b"body"

    # HTTP

    def test_http_stateless_call(self, door: Door) -> None:
        assert self.post(b"\x00call") == (200, b"\x00call")
        assert self.post(b"", session="") == (200, b"")

    def test_http_stateless_call_touches_no_session(self, door: Door) -> None:
        with self.client(door) as client:
            client.start()
            assert client.call(b"beside") == b"beside"
            assert client.tick(b"tick") == b"tick"

    def test_http_unknown_step_kind(self, door: Door) -> None:
        self.refused(400, "bad_request", step_kind="jump", session="s")

    def test_http_missing_session(self, door: Door) -> None:
        for kind in ("start", "tick", "stop"):
            self.refused(400, "bad_request", step_kind=kind)

    def test_http_bad_session(self, door: Door) -> None:
        for session in ("with space", "caf\xe9", "x" * (MAX_SESSION_CHARS + 1), "tab\tinside"):
            self.refused(400, "bad_request", step_kind="start", session=session)

    def test_http_longest_session(self, door: Door) -> None:
        session = uuid.uuid4().hex.ljust(MAX_SESSION_CHARS, "~")
        for kind in ("start", "tick", "stop"):
            assert self.post(b"", step_kind=kind, session=session)[0] == 200

    def test_http_tick_and_stop_without_start(self, door: Door) -> None:
        for kind in ("tick", "stop"):
            self.refused(404, "session_unknown", step_kind=kind, session=uuid.uuid4().hex)

    def test_http_start_twice(self, door: Door) -> None:
        session = uuid.uuid4().hex
        assert self.post(b"", step_kind="start", session=session)[0] == 200
        self.refused(409, "session_exists", step_kind="start", session=session)
        assert self.post(b"on", step_kind="tick", session=session) == (200, b"on")
        assert self.post(b"", step_kind="stop", session=session)[0] == 200

    def test_http_stop_twice_and_tick_after_stop(self, door: Door) -> None:
        session = uuid.uuid4().hex
        for kind in ("start", "stop"):
            assert self.post(b"", step_kind=kind, session=session)[0] == 200
        self.refused(404, "session_unknown", step_kind="stop", session=session)
        self.refused(404, "session_unknown", step_kind="tick", session=session)

    def test_http_body_above_the_limit(self, door: Door) -> None:
        with self.client(door) as client:
            assert type(_error_of(lambda: client.call(bytes(self.max_body_bytes + 1)))) is BodyTooLarge
        assert self.post(bytes(16)) == (200, bytes(16))

    def test_http_session_survives_its_connection(self, door: Door) -> None:
        session = uuid.uuid4().hex
        for kind, body in (("start", b""), ("tick", b"a"), ("tick", b"b"), ("stop", b"")):
            status, reply = self.post(body, step_kind=kind, session=session)
            assert status == 200
            assert kind != "tick" or reply == body

    def test_http_unknown_path(self, door: Door) -> None:
        status, _ = self.request("POST", "/no-such-path", b"", {})
        assert status == 404

    def test_http_wrong_method(self, door: Door) -> None:
        for method in ("GET", "PUT", "DELETE"):
            status, _ = self.request(method, STEP_PATH, b"", {})
            assert status == 405, method

    # WebSocket

    def test_ws_bare_messages_are_ticks_answered_in_kind(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex) as connection:
            connection.send(b"\x00\xff")
            assert self.receive(connection) == b"\x00\xff"
            connection.send("text é")
            assert self.receive(connection) == "text é"

    def test_ws_bare_close_is_stop(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session) as connection:
            connection.send(b"x")
            assert self.receive(connection) == b"x"
        self.becomes_free(session)

    def test_ws_session_in_the_query(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session, in_query=True) as connection, self.client(door) as second:
            connection.send(b"x")
            assert self.receive(connection) == b"x"
            assert isinstance(_error_of(lambda: second.start(session=session)), SessionExists)

    def test_ws_same_session_twice_is_told_and_closed(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session) as first:
            for enveloped in (False, True):
                with self.websocket(session, enveloped=enveloped) as second:
                    if enveloped:
                        second.send(b"S")
                    message = self.receive(second)
                    document = json.loads(_bytes(message)[1 if enveloped else 0 :])
                    assert document["error"] == "session_exists"
                    code, reason = self.close_of(second)
                    assert code == 4409
                    assert reason.startswith('{"error": "session_exists"')
            first.send(b"mine still")
            assert self.receive(first) == b"mine still"

    def test_ws_envelope(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex, enveloped=True) as connection:
            for sent, kind, body in ((b"Shello", b"R", None), (b"T\x00\xff", b"R", b"\x00\xff"), (b"Pbye", b"R", None)):
                connection.send(sent)
                message = _bytes(self.receive(connection))
                assert message[:1] == kind
                assert body is None or message[1:] == body

    def test_ws_bad_kind_byte_is_refused_and_the_session_goes_on(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex, enveloped=True) as connection:
            connection.send(b"S")
            assert _bytes(self.receive(connection))[:1] == b"R"
            for bad in (b"Xbody", b"", b"\xff", b"Rreply"):
                connection.send(bad)
                self.is_error_frame(connection, "bad_request")
            connection.send(b"Tstill here")
            assert _bytes(self.receive(connection)) == b"Rstill here"

    def test_ws_envelope_tick_before_start(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex, enveloped=True) as connection:
            connection.send(b"Ttoo early")
            self.is_error_frame(connection, "session_unknown")

    def test_ws_bad_session(self, door: Door) -> None:
        with self.websocket("x" * (MAX_SESSION_CHARS + 1)) as connection:
            assert json.loads(self.receive(connection))["error"] == "bad_request"

    def test_ws_abrupt_disconnect_frees_the_session(self, door: Door) -> None:
        for enveloped in (False, True):
            session = uuid.uuid4().hex
            with self.websocket(session, enveloped=enveloped) as connection:
                connection.send(b"S" if enveloped else b"x")
                self.receive(connection)
                connection.socket.close()
            self.becomes_free(session)

    # What the tests stand on; override `url_of` for a service whose doors have URLs of their own

    def url_of(self, door: Door) -> str:
        """The URL of ``door``."""
        return Endpoint.parse(self.url).door_url(door)

    def client(self, door: Door) -> Client:
        return Client(self.url_of(door), timeout_s=self.timeout_s)

    def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """One plain HTTP request below the service's path: status and body."""
        endpoint = Endpoint.parse(self.url_of("http"))
        kind = http.client.HTTPSConnection if endpoint.scheme == "https" else http.client.HTTPConnection
        connection = kind(endpoint.host, endpoint.port, timeout=self.timeout_s)
        try:
            connection.request(method, endpoint.prefix + path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, body: bytes, **headers: str) -> tuple[int, bytes]:
        return self.request("POST", STEP_PATH, body, headers)

    def refused(self, status: int, code: str, **headers: str) -> None:
        """The request gets this status and an error document with this code."""
        got, body = self.post(b"{}", **headers)
        assert got == status, (got, body)
        document = json.loads(body)
        assert document["error"] == code, document
        assert isinstance(document["message"], str)
        assert document["message"]
        assert isinstance(document["details"], dict)

    @contextmanager
    def websocket(self, session: str, *, enveloped: bool = False, in_query: bool = False) -> Iterator[ClientConnection]:
        """A bare WebSocket connection to the session door."""
        from websockets.sync.client import connect
        from websockets.typing import Subprotocol

        with connect(
            self.url_of("ws") + SESSION_PATH + (f"?session={session}" if in_query else ""),
            subprotocols=[Subprotocol(WS_SUBPROTOCOL)] if enveloped else None,
            additional_headers={} if in_query else {"session": session},
            open_timeout=self.timeout_s,
            close_timeout=self.timeout_s,
            proxy=None,
        ) as connection:
            yield connection

    def receive(self, connection: ClientConnection) -> str | bytes:
        """The next message, which must come in time."""
        try:
            return connection.recv(self.timeout_s)
        except TimeoutError:
            raise AssertionError(f"expected a message, nothing came within {self.timeout_s:g} s") from None

    def close_of(self, connection: ClientConnection) -> tuple[int, str]:
        """Code and reason of the close that must come next."""
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

    def is_error_frame(self, connection: ClientConnection, code: str) -> None:
        message = _bytes(self.receive(connection))
        assert message[:1] == b"E", message
        assert json.loads(message[1:])["error"] == code

    def becomes_free(self, session: str) -> None:
        """Before the deadline, ``session`` can be started again."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            with Client(self.url_of("ws"), timeout_s=self.timeout_s) as client:
                try:
                    client.start(session=session)
                    return
                except SessionExists:
                    assert time.monotonic() < deadline, f"session {session} was not freed"
            time.sleep(0.02)


def _bytes(message: str | bytes) -> bytes:
    return message.encode() if isinstance(message, str) else message


def _error_of(request: Any) -> BrayxError | None:
    try:
        request()
    except BrayxError as error:
        return error
    return None
