"""Tests of the HTTP door, by bare requests."""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager

from brayx.gamecore.compliance.base import Door, Doors
from brayx.gamecore.protocol import MAX_CREDENTIAL_CHARS, MAX_SESSION_CHARS, STEP_PATH
from brayx.gamecore.transports.base import Endpoint


class HttpTests(Doors):
    """The tests named ``test_http_*``."""

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

    def test_http_a_field_has_one_value(self, door: Door) -> None:
        """If a field had two values, a proxy might route by one, and the service play the other."""
        session = uuid.uuid4().hex
        assert self.post(b"", step_kind="start", session=session)[0] == 200
        for name, value in (("session", "other"), ("step_kind", "stop"), ("seq", "1")):
            headers = {"step_kind": "tick", "session": session, "seq": "0", name.upper(): value}
            assert name in self.refused(400, "bad_request", **headers)
        assert self.post(b"on", step_kind="tick", Session=session, session=session) == (200, b"on")

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
        for method in ("GET", "PUT", "DELETE") if self.cors_origin else ("GET", "PUT", "DELETE", "OPTIONS"):
            status, _ = self.request(method, STEP_PATH, b"", {})
            assert status == 405, method

    def test_http_scripts_of_other_origins_may_call_where_the_service_says_so(self, door: Door) -> None:
        origin, session = self.cors_origin or "https://play.example.com", uuid.uuid4().hex
        for came, allowed in ((origin, bool(self.cors_origin)), ("https://other.example.com", False)):
            preflight = {"origin": came, "access-control-request-method": "POST"}
            for method, path, body, headers in (
                ("OPTIONS", STEP_PATH, b"", {**preflight, "access-control-request-headers": "session,step_kind"}),
                ("POST", STEP_PATH, b"call", {"origin": came}),
                ("POST", STEP_PATH, b"", {"origin": came, "session": session, "step_kind": "tick"}),
                ("GET", "/no-such-path", b"", {"origin": came}),
            ):
                status, received, _ = self.exchange(method, path, body, headers)
                expected = came if allowed else None
                assert received.get("access-control-allow-origin") == expected, (method, path, received)
                if method == "OPTIONS" and allowed:
                    assert status == 200
                    assert "POST" in received["access-control-allow-methods"]
                    names = {name.strip() for name in received["access-control-allow-headers"].split(",")}
                    assert {"session", "step_kind", "seq", "key", "time", "token"} <= names
                if self.cors_origin:
                    assert received["vary"] == "origin"  # or a cache gives one origin the other's answer

    @contextmanager
    def http(self) -> Iterator[http.client.HTTPConnection]:
        """A bare connection to the HTTP door."""
        endpoint = Endpoint.parse(self.url_of("http"))
        kind = http.client.HTTPSConnection if endpoint.scheme == "https" else http.client.HTTPConnection
        with closing(kind(endpoint.host, endpoint.port, timeout=self.timeout_s)) as connection:
            yield connection

    def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """One plain HTTP request below the service's path: status and body."""
        status, _, reply = self.exchange(method, path, body, headers)
        return status, reply

    def exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """As `request`: status, the reply's headers by lower-case name, and its body."""
        with self.http() as connection:
            connection.request(method, Endpoint.parse(self.url_of("http")).prefix + path, body, headers)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()

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
