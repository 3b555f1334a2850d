"""The compliance suite: tests any service that speaks brayx's protocol, through its doors alone.

The service under test must be an echo: a tick and a stateless call answer with their own body; start and stop may
answer anything. Subclass it in a pytest module, name the service's address and doors, and pytest collects the tests:

    class TestMyServer(DoorCompliance):
        url = "http://127.0.0.1:8000"           # or set it from a fixture
        doors = ("http", "ws")                  # and "tcp" and "grpc", with their addresses in `urls`

Knows nothing of the service's implementation. Tests of the byte format use bare connections, all others the clients.
The WebSocket tests need the package ``websockets``, the gRPC tests ``grpcio``.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from brayx.errors import (
    BodyTooLarge,
    BrayxError,
    HeaderTooLarge,
    OutOfSequence,
    ProtocolError,
    SessionExists,
    SessionLost,
    SessionUnknown,
    from_wire,
)
from brayx.gamecore.client import AsyncClient, Client
from brayx.gamecore.protocol import (
    DEFAULT_MAX_BODY_BYTES,
    MAX_CREDENTIAL_CHARS,
    MAX_SESSION_CHARS,
    SESSION_PATH,
    STEP_PATH,
    WS_SUBPROTOCOL,
    StepKind,
    StepRequest,
    encode_numbered,
)
from brayx.gamecore.tcp import REQUEST_HEAD, ReplyReader
from brayx.gamecore.transports import connect
from brayx.gamecore.transports.base import MAX_REPLY_BYTES, Endpoint

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

Door = Literal["http", "ws", "tcp", "grpc"]

Tick = Callable[[int | None, bytes], bytes]
"""Sends a tick with a number (None: not numbered) and a body; returns its reply."""

ALL_BYTES = bytes(range(256))
ONE_MIB = 1024 * 1024


class DoorCompliance:
    """The suite.

    Tests named ``test_http_*``, ``test_ws_*``, … run for that door only. ``test_stateless_*`` run for each of `doors`
    except WebSocket, which has no stateless call. ``test_held_*`` run for each door if the service has one whose
    connections hold sessions (``ws``, ``grpc``). All others run for each door. In a subclass, tests of absent doors are
    None, so that pytest does not collect them.

    Attributes:
        url: URL of the HTTP and WebSocket doors, including any path before ``/step``.
        urls: URLs of doors with another address, by door: ``{"tcp": "tcp://127.0.0.1:8101"}``.
        doors: which of ``http``, ``ws``, ``tcp`` and ``grpc`` the service has.
        max_body_bytes: the service's limit; a body of one byte more must be refused.
        timeout_s: time limit of each wait.
    """

    url: str
    urls: Mapping[Door, str] = {}
    doors: tuple[Door, ...] = ("http", "ws")
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    timeout_s: float = 10.0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, test in vars(DoorCompliance).items():
            if not name.startswith("test_"):
                continue
            if not cls._doors_of(name):
                setattr(cls, name, None)
            elif getattr(cls, name) is None:  # a base has fewer doors
                setattr(cls, name, test)

    @classmethod
    def _doors_of(cls, test: str) -> list[Door]:
        """The service's doors that a test runs for."""
        only = test.split("_")[1]
        if only in get_args(Door):
            return [door for door in cls.doors if door == only]
        if only == "held" and not {"ws", "grpc"} & set(cls.doors):
            return []
        return [door for door in cls.doors if only != "stateless" or door != "ws"]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrises each test by its doors."""
        if "door" in metafunc.fixturenames:
            metafunc.parametrize("door", self._doors_of(metafunc.function.__name__))

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

    def test_body_of_as_many_bytes_as_the_limit(self, door: Door) -> None:
        body = bytes(self.max_body_bytes)
        with self.numbered(door) as tick:
            assert tick(None, body) == body
            assert tick(0, body) == body
            for seq in (None, 1):
                error = _error_of(lambda seq=seq: tick(seq, body + b"x"))
                assert isinstance(error, BodyTooLarge), error
            assert tick(1, b"small again") == b"small again"

    def test_body_above_the_limit_is_refused_and_other_sessions_go_on(self, door: Door) -> None:
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

    def test_credentials_do_not_change_the_answer(self, door: Door) -> None:
        with Client(self.url_of(door), timeout_s=self.timeout_s, key="k", time="0", token="t") as client:
            client.start()
            assert client.tick(b"body") == b"body"

    def test_tick_and_stop_without_start(self, door: Door) -> None:
        for kind in (StepKind.TICK, StepKind.STOP):
            with self.step(door) as step:
                error = _error_of(lambda kind=kind, step=step: step(kind, uuid.uuid4().hex, b"", None))
                assert isinstance(error, SessionUnknown), error

    # Numbered ticks, by every door

    def test_numbered_ticks_are_answered_each_by_its_own_reply(self, door: Door) -> None:
        with self.numbered(door) as tick:
            for number in range(20):
                assert tick(number, f"tick {number}".encode()) == f"tick {number}".encode()

    def test_a_repeated_number_gets_the_kept_reply(self, door: Door) -> None:
        with self.numbered(door) as tick:
            assert tick(0, b"first") == b"first"
            for _ in range(2):
                assert tick(0, b"another body, which is ignored") == b"first"
            assert tick(1, b"second") == b"second"
            assert tick(1, b"") == b"second"

    def test_an_empty_reply_is_kept_too(self, door: Door) -> None:
        with self.numbered(door) as tick:
            assert tick(0, b"") == b""
            assert tick(0, b"another") == b""

    def test_a_number_out_of_sequence_is_refused_and_the_session_goes_on(self, door: Door) -> None:
        with self.numbered(door) as tick:
            self.out_of_sequence(tick, expected=0, got=1)
            assert tick(0, b"zero") == b"zero"
            assert tick(1, b"one") == b"one"
            for got in (0, 3, 2**63 - 1):
                self.out_of_sequence(tick, expected=2, got=got)
            assert tick(1, b"") == b"one"
            assert tick(2, b"two") == b"two"

    def test_ticks_without_a_number_do_not_touch_the_numbers(self, door: Door) -> None:
        with self.numbered(door) as tick:
            assert tick(None, b"before") == b"before"
            assert tick(0, b"zero") == b"zero"
            assert tick(None, b"between") == b"between"
            assert tick(0, b"again") == b"zero"
            assert tick(1, b"one") == b"one"

    def test_numbers_count_within_one_session(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.numbered(door) as other:
            assert other(0, b"other") == b"other"
            for _ in range(2):  # and of one life of it
                with self.numbered(door, session) as tick:
                    assert tick(0, b"mine") == b"mine"
                    assert tick(1, b"mine too") == b"mine too"
            assert other(0, b"") == b"other"
            assert other(1, b"on") == b"on"

    def test_a_numbering_client_plays_as_any_other(self, door: Door) -> None:
        with Client(self.url_of(door), timeout_s=self.timeout_s, reconnect_s=self.timeout_s) as client:
            for _ in range(2):
                client.start()
                for number in range(20):
                    assert client.tick(f"tick {number}") == f"tick {number}".encode()
                client.stop()

    # Stateless calls, by every door but WebSocket's

    def test_stateless_call(self, door: Door) -> None:
        with self.client(door) as client:
            for body in (b"\x00call", b"", ALL_BYTES):
                assert client.call(body) == body

    def test_stateless_call_touches_no_session(self, door: Door) -> None:
        with self.client(door) as client:
            client.start()
            assert client.call(b"beside") == b"beside"
            assert client.tick(b"tick") == b"tick"

    def test_stateless_body_above_the_limit(self, door: Door) -> None:
        with self.client(door) as client:
            error = _error_of(lambda: client.call(bytes(self.max_body_bytes + 1)))
            assert type(error) is BodyTooLarge, error
            assert client.call(bytes(16)) == bytes(16)

    # Sessions that a connection holds, taken over by every door

    def test_held_session_goes_on_after_another_takes_it_over(self, door: Door) -> None:
        for held in self.holders():
            session = uuid.uuid4().hex
            with held(session) as old, self.step(door) as step:
                assert step(StepKind.TICK, session, b"zero", 0) == b"zero"
                old.assert_taken_and_closed()
                assert step(StepKind.TICK, session, b"one", 1) == b"one"
                step(StepKind.STOP, session, b"", None)

    def test_held_session_is_untouched_by_an_old_connection_that_has_not_read_the_takeover(self, door: Door) -> None:
        for held in self.unread_holders():
            session = uuid.uuid4().hex
            with held(session) as tick_and_leave, self.step(door) as step:
                assert step(StepKind.TICK, session, b"zero", 0) == b"zero"
                tick_and_leave()
                assert step(StepKind.TICK, session, b"one", 1) == b"one"
                step(StepKind.STOP, session, b"", None)

    def test_held_session_stays_with_its_connection_if_ticks_have_no_number(self, door: Door) -> None:
        for held in self.holders():
            session = uuid.uuid4().hex
            with held(session) as connection:
                with self.step(door) as step:
                    error = _error_of(lambda step=step, session=session: step(StepKind.TICK, session, b"beside", None))
                    assert error is None or isinstance(error, SessionUnknown), error
                assert connection.tick(b"mine") == b"mine"
                connection.leave()
            self.becomes_free(session, door)

    # HTTP

    def test_http_stateless_call(self, door: Door) -> None:
        assert self.post(b"\x00call") == (200, b"\x00call")
        assert self.post(b"", session="") == (200, b"")

    def test_http_unknown_step_kind(self, door: Door) -> None:
        self.refused(400, "bad_request", step_kind="jump", session="s")

    def test_http_step_kind_with_a_hyphen(self, door: Door) -> None:
        session = uuid.uuid4().hex
        for kind in ("start", "tick", "stop"):
            status, reply = self.post(b"on", **{"step-kind": kind, "session": session})
            assert status == 200
            assert kind != "tick" or reply == b"on"
        self.refused(404, "session_unknown", **{"step-kind": "tick", "step_kind": "tick", "session": session})
        self.refused(400, "bad_request", **{"step-kind": "start", "step_kind": "tick", "session": session})
        self.refused(400, "bad_request", **{"step-kind": "jump", "session": session})

    def test_http_session_without_a_step_kind(self, door: Door) -> None:
        session = uuid.uuid4().hex
        assert self.post(b"", step_kind="start", session=session)[0] == 200
        assert "step-kind" in self.refused(400, "bad_request", session=session)
        assert self.post(b"call", step_kind="auto", session=session) == (200, b"call")
        assert self.post(b"on", step_kind="tick", session=session) == (200, b"on")
        assert self.post(b"", step_kind="stop", session=session)[0] == 200

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

    def test_http_credentials_have_a_limit(self, door: Door) -> None:
        longest = dict.fromkeys(("key", "time", "token"), "x" * MAX_CREDENTIAL_CHARS)
        assert self.post(b"call", **longest) == (200, b"call")
        for name, value in longest.items():
            self.refused(431, "header_too_large", **{name: value + "x"})

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

    def test_http_spaces_around_a_header(self, door: Door) -> None:
        session = uuid.uuid4().hex
        for kind in ("start", "tick", "stop"):
            assert self.post(b"", step_kind=f" {kind}\t ", session=f"\t{session} ")[0] == 200, kind

    def test_http_absolute_uri(self, door: Door) -> None:
        endpoint = Endpoint.parse(self.url_of("http"))
        with self.http() as connection:
            connection.request("POST", f"http://{endpoint.authority}{endpoint.prefix}{STEP_PATH}?a=1", b"call")
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b"call")

    def test_http_head_has_no_body(self, door: Door) -> None:
        endpoint = Endpoint.parse(self.url_of("http"))
        head = f"HEAD {endpoint.prefix}{STEP_PATH} HTTP/1.1\r\nhost: {endpoint.authority}\r\nconnection: close\r\n\r\n"
        with self.http() as connection:
            connection.connect()
            connection.sock.sendall(head.encode())
            said = b"".join(iter(lambda: connection.sock.recv(65536), b""))
        assert said.startswith(b"HTTP/1.1 405 "), said
        assert said.endswith(b"\r\n\r\n"), said

    def test_http_seq_is_a_number(self, door: Door) -> None:
        session = uuid.uuid4().hex
        assert self.post(b"", step_kind="start", session=session)[0] == 200
        for seq in ("-1", "x", "1.5", "0x1", str(2**63)):
            self.refused(400, "bad_request", step_kind="tick", session=session, seq=seq)
        assert self.post(b"zero", step_kind="tick", session=session, seq="0") == (200, b"zero")
        assert self.post(b"", step_kind="stop", session=session)[0] == 200

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

    def test_ws_bare_body_limit(self, door: Door) -> None:
        body = bytes(self.max_body_bytes)
        with self.websocket(uuid.uuid4().hex) as connection:
            connection.send(body + b"x")
            assert json.loads(self.receive(connection))["error"] == "body_too_large"
            connection.send(body)
            assert self.receive(connection) == body

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
            connection.send(b"x")
            assert self.receive(connection) == b"x"
        self.becomes_free(session)

    def test_ws_session_in_the_query(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session, in_query=True) as connection, self.client(door) as second:
            connection.send(b"x")
            assert self.receive(connection) == b"x"
            assert isinstance(_error_of(lambda: second.start(session=session)), SessionExists)

    def test_ws_same_session_twice_is_refused_and_closed(self, door: Door) -> None:
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
        with self.websocket(session, enveloped=True) as connection:
            connection.send(b"S")
            assert _bytes(self.receive(connection))[:1] == b"R"
            connection.send(encode_numbered(0, b"zero"))
            assert self.receive(connection) == b"Rzero"
            connection.socket.close()
        with self.websocket(session, enveloped=True) as connection:
            connection.send(encode_numbered(0, b"was it lost?"))
            assert self.receive(connection) == b"Rzero"
            connection.send(encode_numbered(1, b"one"))
            assert self.receive(connection) == b"Rone"
            connection.socket.close()
        with self.websocket(session, enveloped=True) as connection:  # a stop takes it up again too
            connection.send(b"P")
            assert _bytes(self.receive(connection))[:1] == b"R"
        self.becomes_free(session)

    def test_ws_announced_session_outlives_its_connection_from_the_start(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session, enveloped=True, announced=True) as connection:
            connection.send(b"S")
            assert _bytes(self.receive(connection))[:1] == b"R"
            connection.socket.close()
        with self.websocket(session, enveloped=True) as connection:
            connection.send(encode_numbered(0, b"zero"))
            assert self.receive(connection) == b"Rzero"
            connection.send(b"P")
            assert _bytes(self.receive(connection))[:1] == b"R"

    def test_ws_numbered_session_ends_with_an_orderly_close(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session, enveloped=True) as connection:
            connection.send(b"S")
            assert _bytes(self.receive(connection))[:1] == b"R"
            connection.send(encode_numbered(0, b"zero"))
            assert self.receive(connection) == b"Rzero"
        self.becomes_free(session)

    def test_ws_malformed_number_is_refused_and_the_session_goes_on(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex, enveloped=True) as connection:
            connection.send(b"S")
            assert _bytes(self.receive(connection))[:1] == b"R"
            for bad in (b"N", b"N\x00\x00\x00", b"N" + b"\xff" * 8):
                connection.send(bad)
                self.is_error_frame(connection, "bad_request")
            connection.send(encode_numbered(0, b""))
            assert self.receive(connection) == b"R"
            connection.send(b"P")
            assert _bytes(self.receive(connection))[:1] == b"R"

    def test_ws_numbered_tick_of_no_session(self, door: Door) -> None:
        with self.websocket(uuid.uuid4().hex, enveloped=True) as connection:
            connection.send(encode_numbered(0, b"x"))
            self.is_error_frame(connection, "session_unknown")

    def test_ws_tick_without_a_number_touches_no_session_of_another_connection(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.websocket(session) as holder, self.websocket(session, enveloped=True) as other:
            other.send(b"Tnot mine")
            self.is_error_frame(other, "session_unknown")
            holder.send(b"mine")
            assert self.receive(holder) == b"mine"

    # TCP

    def test_tcp_frames_are_these_bytes(self, door: Door) -> None:
        session = uuid.uuid4().hex.encode()
        with self.tcp() as peer:
            for kind, body, time_ in ((b"start", b"hello", 7), (b"tick", b"\x00\xff", 8), (b"stop", b"", 2**63 - 1)):
                head = struct.pack(">6q", len(session), len(kind), 0, 0, len(body), time_)
                peer.sock.sendall(head + session + kind + body)
                got_session, got_body, got_time = peer.receive()
                assert (got_session, got_time) == (session, time_)
                assert kind != b"tick" or got_body == body

    def test_tcp_frame_in_pieces(self, door: Door) -> None:
        with self.tcp() as peer:
            for byte in _frame("", "", b"piecemeal", 5):
                peer.sock.sendall(bytes([byte]))
            assert peer.receive() == (b"", b"piecemeal", 5)

    def test_tcp_several_sessions_on_one_connection(self, door: Door) -> None:
        sessions = [uuid.uuid4().hex for _ in range(8)]
        with self.tcp() as peer:
            peer.send(*(("start", session, b"", time_) for time_, session in enumerate(sessions)))
            assert {peer.receive()[::2] for _ in sessions} == {(s.encode(), at) for at, s in enumerate(sessions)}
            times = {
                100 * (number + 1) + at: (session, f"{session} {number}".encode())
                for number in range(5)
                for at, session in enumerate(sessions)
            }
            peer.send(*(("tick", session, body, time_) for time_, (session, body) in times.items()))
            came: dict[str, list[int]] = defaultdict(list)
            for _ in times:
                session_bytes, body, time_ = peer.receive()
                assert (session_bytes.decode(), body) == times[time_], "a reply belongs to the request of its time"
                came[session_bytes.decode()].append(time_)
            for session in sessions:
                assert came[session] == sorted(came[session]), "replies of a session come in order"
            peer.send(*(("stop", session, b"", time_) for time_, session in enumerate(sessions)))
            assert all(peer.receive()[2] >= 0 for _ in sessions)

    def test_tcp_session_survives_its_connection(self, door: Door) -> None:
        session = uuid.uuid4().hex
        for kind, body in (("start", b""), ("tick", b"a"), ("tick", b"b"), ("stop", b"")):
            with self.tcp() as peer:
                peer.send((kind, session, body, 3))
                _, reply, time_ = peer.receive()
                assert time_ == 3
                assert kind != "tick" or reply == body

    def test_tcp_an_error_has_the_complement_of_the_requests_time(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.tcp() as peer:
            peer.send(("tick", session, b"", 41), ("stop", session, b"", 2**63 - 1))
            for time_ in (~41, -(2**63)):
                got_session, body, got_time = peer.receive()
                assert (got_session, got_time) == (session.encode(), time_)
                document = json.loads(body)
                assert document["error"] == "session_unknown"
                assert isinstance(document["message"], str)
                assert isinstance(document["details"], dict)

    def test_tcp_bad_fields_are_refused_and_the_connection_goes_on(self, door: Door) -> None:
        with self.tcp() as peer:
            for kind, session in (
                ("jump", "s"),
                ("start", ""),
                ("start", "with space"),
                ("start", "caf\xe9"),
                ("tick#", "s"),
                ("tick#x", "s"),
                ("tick#-1", "s"),
                (f"tick#{2**63}", "s"),
            ):
                peer.send((kind, session, b"", 9))
                _, body, time_ = peer.receive()
                assert (time_, json.loads(body)["error"]) == (~9, "bad_request"), (kind, session)
            peer.send(("", "", b"still here", 10))
            assert peer.receive() == (b"", b"still here", 10)

    def test_tcp_body_above_the_limit_is_refused_and_the_connection_goes_on(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.tcp() as peer:
            peer.send(("start", session, b"", 1))
            peer.receive()
            peer.send(("tick", session, bytes(self.max_body_bytes + 1), 2), ("tick", session, b"small", 3))
            _, body, time_ = peer.receive()
            assert (time_, json.loads(body)["error"]) == (~2, "body_too_large")
            assert peer.receive() == (session.encode(), b"small", 3)
            peer.send(("stop", session, b"", 4))
            assert peer.receive()[2] == 4

    def test_tcp_malformed_frame_ends_that_connection_only(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.tcp() as other:
            other.send(("start", session, b"", 1))
            other.receive()
            for bad in (
                REQUEST_HEAD.pack(-1, 0, 0, 0, 0, 1),
                REQUEST_HEAD.pack(2**40, 0, 0, 0, 0, 1),
                REQUEST_HEAD.pack(1, 4, 0, 0, 2**62, 1),
                REQUEST_HEAD.pack(1, 4, 0, 0, 0, -5),
                b"POST /step HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n",
                b"\xff" * 4096,
            ):
                with self.tcp() as peer:
                    peer.sock.sendall(bad)
                    peer.ends_with_errors()
                other.send(("tick", session, b"fine", 2))
                assert other.receive() == (session.encode(), b"fine", 2)
            other.send(("stop", session, b"", 3))
            other.receive()

    def test_tcp_a_truncated_frame_leaves_other_connections_alone(self, door: Door) -> None:
        with self.client("tcp") as client:
            client.start()
            whole = _frame("tick", str(client.session), b"never whole", 1)
            for cut in (1, 47, 48, len(whole) - 1):
                with self.tcp() as peer:
                    peer.sock.sendall(whole[:cut])
                assert client.tick(b"fine") == b"fine"

    # gRPC: ``Play``; ``Step`` is what the clients use

    def test_grpc_session_without_a_kind(self, door: Door) -> None:
        with self.step(door) as step:
            error = _error_of(lambda: step(StepKind.CALL, uuid.uuid4().hex, b"", None))
            assert type(error) is ProtocolError, error

    def test_grpc_credentials_have_a_limit(self, door: Door) -> None:
        with self.grpc() as stub:
            for name in ("key", "time", "token"):
                call = stub.stream(session=uuid.uuid4().hex, **{name: "x" * (MAX_CREDENTIAL_CHARS + 1)})
                assert isinstance(call.reply(), HeaderTooLarge)

    def test_grpc_a_stream_is_a_session_and_ends_with_it(self, door: Door) -> None:
        with self.grpc() as stub:
            stream = stub.stream(session=uuid.uuid4().hex)
            assert isinstance(stream.reply(), bytes)
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
            stream = stub.stream(session=uuid.uuid4().hex)
            assert isinstance(stream.reply(), bytes)
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
            stream = stub.stream(session=session)
            assert isinstance(stream.reply(), bytes)
        self.becomes_free(session, "grpc")

    def test_grpc_a_numbered_session_goes_on_with_another_stream(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.grpc() as stub:
            stream = stub.stream(session=session)
            assert isinstance(stream.reply(), bytes)
            assert stream.tick(b"zero", 0) == b"zero"
        with self.grpc() as stub:
            stream = stub.stream(kind="TICK", session=session, seq=0, body=b"was it lost?")
            assert stream.reply() == b"zero"
            assert stream.tick(b"one", 1) == b"one"
            stream.stop()
            assert isinstance(stream.reply(), bytes)
        self.becomes_free(session, "grpc")

    # Helpers

    def url_of(self, door: Door) -> str:
        """The URL of ``door``."""
        if door in self.urls:
            return self.urls[door]
        assert door in ("http", "ws"), f"urls has no {door!r}"
        return Endpoint.parse(self.url).door_url(door)

    def client(self, door: Door) -> Client:
        return Client(self.url_of(door), timeout_s=self.timeout_s)

    @contextmanager
    def step(self, door: Door) -> Iterator[Callable[[StepKind, str, bytes, int | None], bytes]]:
        """Bare requests over one connection: kind, session, body, number."""
        transport = connect(self.url_of(door))
        try:
            yield lambda kind, session, body, seq: transport.step(
                StepRequest(kind, session, body, seq=seq), self.timeout_s
            )
        finally:
            transport.close()

    @contextmanager
    def numbered(self, door: Door, session: str = "") -> Iterator[Tick]:
        """A session whose test chooses the tick numbers."""
        session = session or uuid.uuid4().hex
        with self.step(door) as step:
            step(StepKind.START, session, b"", None)
            yield lambda seq, body: step(StepKind.TICK, session, body, seq)
            step(StepKind.STOP, session, b"", None)

    def out_of_sequence(self, tick: Tick, *, expected: int, got: int) -> None:
        """Asserts that a tick numbered ``got`` is refused, and that the error names both numbers."""
        error = _error_of(lambda: tick(got, b""))
        assert isinstance(error, OutOfSequence), error
        assert (error.details["expected"], error.details["got"]) == (expected, got)
        assert str(expected) in error.message
        assert str(got) in error.message

    def holders(self) -> Iterator[Callable[[str], AbstractContextManager[Holder]]]:
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
            stream = stub.stream(session=session)
            assert isinstance(stream.reply(), bytes)

            def tick_and_leave() -> None:
                stream.send("TICK", body=b"not mine", seq=1)
                stream.end()
                while stream.reply() is not None:
                    pass

            yield tick_and_leave

    @contextmanager
    def held_by_websocket(self, session: str, *, enveloped: bool) -> Iterator[Holder]:
        start, tick, reply = (b"S", b"T", b"R") if enveloped else (b"", b"", b"")
        with self.websocket(session, enveloped=enveloped) as connection:
            if enveloped:
                connection.send(start)
                assert _bytes(self.receive(connection))[:1] == reply

            def ask(body: bytes) -> bytes:
                connection.send(tick + body)
                return _bytes(self.receive(connection)).removeprefix(reply)

            def assert_taken_and_closed() -> None:
                code, reason = self.close_of(connection)
                assert (code, "taken" in reason) == (4410, True), (code, reason)

            yield Holder(ask, assert_taken_and_closed, connection.close)

    @contextmanager
    def held_by_stream(self, session: str) -> Iterator[Holder]:
        with self.grpc() as stub:
            stream = stub.stream(session=session)
            assert isinstance(stream.reply(), bytes)

            def assert_taken_and_closed() -> None:
                error = stream.reply()
                assert isinstance(error, SessionLost), error
                assert error.details["reason"] == "taken"
                assert stream.reply() is None

            yield Holder(stream.tick, assert_taken_and_closed, stream.end)

    @contextmanager
    def tcp(self) -> Iterator[TcpPeer]:
        """A bare connection to the TCP door."""
        endpoint = Endpoint.parse(self.url_of("tcp"))
        with socket.create_connection((endpoint.host, endpoint.port), timeout=self.timeout_s) as sock:
            yield TcpPeer(sock)

    @contextmanager
    def grpc(self) -> Iterator[GrpcPeer]:
        """A bare channel to the gRPC door; its calls are cancelled at the end."""
        with GrpcPeer(Endpoint.parse(self.url_of("grpc")), self.timeout_s) as peer:
            yield peer

    @contextmanager
    def http(self) -> Iterator[http.client.HTTPConnection]:
        """A bare connection to the HTTP door."""
        endpoint = Endpoint.parse(self.url_of("http"))
        kind = http.client.HTTPSConnection if endpoint.scheme == "https" else http.client.HTTPConnection
        with closing(kind(endpoint.host, endpoint.port, timeout=self.timeout_s)) as connection:
            yield connection

    def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """One plain HTTP request below the service's path: status and body."""
        with self.http() as connection:
            connection.request(method, Endpoint.parse(self.url_of("http")).prefix + path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def post(self, body: bytes, **headers: str) -> tuple[int, bytes]:
        return self.request("POST", STEP_PATH, body, headers)

    def refused(self, status: int, code: str, **headers: str) -> str:
        """Asserts that the request gets this status and an error document with this code; returns its message."""
        got, body = self.post(b"{}", **headers)
        assert got == status, (got, body)
        document = json.loads(body)
        assert document["error"] == code, document
        message = document["message"]
        assert isinstance(message, str)
        assert message
        assert isinstance(document["details"], dict)
        return message

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

    def receive(self, connection: ClientConnection) -> str | bytes:
        """The next message, which must arrive in time."""
        try:
            return connection.recv(self.timeout_s)
        except TimeoutError:
            raise AssertionError(f"expected a message, nothing came within {self.timeout_s:g} s") from None

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

    def is_error_frame(self, connection: ClientConnection, code: str) -> None:
        message = _bytes(self.receive(connection))
        assert message[:1] == b"E", message
        assert json.loads(message[1:])["error"] == code

    def becomes_free(self, session: str, door: Door = "ws") -> None:
        """Asserts that ``session`` can be started again before the deadline."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            with self.client(door) as client:
                try:
                    client.start(session=session)
                    return
                except SessionExists:
                    assert time.monotonic() < deadline, f"session {session} was not freed"
            time.sleep(0.02)


@dataclass(frozen=True)
class Holder:
    """A connection that holds a session.

    Attributes:
        tick: sends a tick; gives its reply.
        assert_taken_and_closed: asserts that the service reports the takeover and closes the connection.
        leave: closes the connection in order.
    """

    tick: Callable[[bytes], bytes | BrayxError | None]
    assert_taken_and_closed: Callable[[], None]
    leave: Callable[[], None]


class TcpPeer:
    """One connection to a TCP door, request by request and reply by reply."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = ReplyReader(MAX_REPLY_BYTES)
        self._replies: list[tuple[bytes, bytes, int]] = []

    def send(self, *requests: tuple[str, str, bytes, int]) -> None:
        """Send frames of ``(step_kind, session, body, time)``, all at once."""
        self.sock.sendall(b"".join(_frame(*request) for request in requests))

    def receive(self) -> tuple[bytes, bytes, int]:
        """The next reply, which must arrive in time: session, body, time."""
        while not self._replies:
            assert self._read(), "expected a reply, the connection was closed"
        return self._replies.pop(0)

    def ends_with_errors(self) -> None:
        """Asserts that the connection is closed, with only errors before that."""
        try:
            while self._read():
                pass
        except ConnectionError:
            pass  # a reset is a close
        for _, body, time_ in self._replies:
            assert (time_ < 0, json.loads(body)["error"]) == (True, "bad_request")

    def _read(self) -> bool:
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            raise AssertionError("expected a reply or a close, nothing came in time") from None
        self._replies += self._reader.feed(data)
        return bool(data)


class GrpcPeer:
    """A channel to a gRPC door, as a context that opens streams."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        import grpc

        from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub

        self._channel = grpc.insecure_channel(f"{endpoint.host}:{endpoint.port}", [("grpc.enable_http_proxy", 0)])
        self._stub = GamecoreStub(self._channel)
        application = endpoint.prefix.strip("/")
        self._options = {"timeout": timeout_s, "metadata": (("application", application),) if application else ()}
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


def _frame(kind: str, session: str, body: bytes, time_: int) -> bytes:
    fields = (session.encode("latin-1"), kind.encode("latin-1"), b"", b"", body)
    return REQUEST_HEAD.pack(*map(len, fields), time_) + b"".join(fields)


def _bytes(message: str | bytes) -> bytes:
    return message.encode() if isinstance(message, str) else message


def _error_of(request: Any) -> BrayxError | None:
    try:
        request()
    except BrayxError as error:
        return error
    return None
