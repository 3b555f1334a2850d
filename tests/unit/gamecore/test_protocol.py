"""The wire as literal bytes: a change here breaks every client in the field."""

from __future__ import annotations

import pytest

from brayx.errors import ConfigError, ProtocolError, SessionLost, TransportError, from_wire
from brayx.gamecore.doors import DOORS
from brayx.gamecore.protocol import (
    FrameKind,
    StepKind,
    StepRequest,
    close_code,
    decode_frame,
    decode_numbered,
    encode_frame,
    encode_numbered,
    parse_request,
    request_headers,
)
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.http import RequestEncoder


def test_http_request_bytes() -> None:
    encoder = RequestEncoder(Endpoint.parse("http://game.example:8000/arena/"))
    tick = StepRequest(StepKind.TICK, "s-1", b"\x00{}", key="k", time="12", token="ab")
    expected = (
        b"POST /arena/step HTTP/1.1\r\nhost: game.example:8000\r\nsession: s-1\r\nstep_kind: tick\r\n"
        b"key: k\r\ntime: 12\r\ntoken: ab\r\ncontent-length: 3\r\n\r\n\x00{}"
    )
    assert encoder.encode(tick) == expected
    assert encoder.encode(tick) == expected
    numbered = expected.replace(b"token: ab\r\n", b"token: ab\r\nseq: 17\r\n")
    assert encoder.encode(tick._replace(seq=17)) == numbered
    assert encoder.encode(tick._replace(seq=18)) == numbered.replace(b"17", b"18")
    assert encoder.encode(tick) == expected
    assert encoder.encode(StepRequest(StepKind.CALL, "", b"")) == (
        b"POST /arena/step HTTP/1.1\r\nhost: game.example:8000\r\ncontent-length: 0\r\n\r\n"
    )


@pytest.mark.parametrize("field", ["session", "key", "time", "token"])
@pytest.mark.parametrize("value", ["a\r\nstep_kind: stop", "a\n", "é", "\x00"])
def test_a_field_cannot_forge_headers(field: str, value: str) -> None:
    encoder = RequestEncoder(Endpoint.parse("http://h"))
    fields = {"session": "s", field: value}
    with pytest.raises(ProtocolError, match=field):
        encoder.encode(StepRequest(kind=StepKind.TICK, body=b"", **fields))


def test_headers_and_request_are_inverse() -> None:
    request = StepRequest(StepKind.STOP, "id", b"body", "k", "1", "t")
    assert request_headers(request) == {"session": "id", "step_kind": "stop", "key": "k", "time": "1", "token": "t"}
    assert parse_request(request_headers(request), b"body") == request
    numbered = StepRequest(StepKind.TICK, "id", b"body", seq=0)
    assert request_headers(numbered) == {"session": "id", "step_kind": "tick", "seq": "0"}
    assert parse_request(request_headers(numbered), b"body") == numbered
    assert parse_request({}, b"x") == StepRequest(StepKind.CALL, "", b"x")
    assert parse_request({"step_kind": "auto"}, b"x").kind is StepKind.CALL


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"step_kind": "tick"}, "missing"),
        ({"step_kind": "jump", "session": "s"}, "jump"),
        ({"step_kind": "start", "session": "a b"}, "a b"),
        ({"step_kind": "start", "session": "x" * 257}, "257"),
        ({"step_kind": "start", "session": "caf\xe9"}, "printable ASCII"),
        ({"step_kind": "tick", "session": "s", "seq": "-1"}, "'seq' is '-1'"),
        ({"step_kind": "tick", "session": "s", "seq": "1e3"}, "'seq' is '1e3'"),
        ({"step_kind": "tick", "session": "s", "seq": "²"}, "'seq' is"),
        ({"step_kind": "tick", "session": "s", "seq": str(2**63)}, "2\\^63"),
    ],
)
def test_malformed_headers_are_named(headers: dict[str, str], named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        parse_request(headers, b"")


def test_websocket_frames() -> None:
    assert encode_frame(FrameKind.START, b"") == b"S"
    assert encode_frame(FrameKind.TICK, b"\xff\x00") == b"T\xff\x00"
    assert encode_frame(FrameKind.STOP, b"x") == b"Px"
    assert encode_frame(FrameKind.REPLY, b"r") == b"Rr"
    assert encode_frame(FrameKind.ERROR, b"{}") == b"E{}"
    assert decode_frame(b"T\xff\x00") == (FrameKind.TICK, b"\xff\x00")
    assert encode_numbered(258, b"x") == b"N\x00\x00\x00\x00\x00\x00\x01\x02x"
    assert decode_frame(encode_numbered(258, b"x")) == (FrameKind.NUMBERED, b"\x00\x00\x00\x00\x00\x00\x01\x02x")
    assert decode_numbered(b"\x00\x00\x00\x00\x00\x00\x01\x02x") == (258, b"x")
    for bad in (b"", b"\x00" * 7, b"\x80" + b"\x00" * 7):
        with pytest.raises(ProtocolError, match="eight bytes"):
            decode_numbered(bad)
    assert close_code(409) == 4409
    for bad in (b"", b"t", b"\xff"):
        with pytest.raises(ProtocolError, match="expected one of S, T, N, P, R, E"):
            decode_frame(bad)


def test_error_document() -> None:
    error = SessionLost("gone", reason="idle")
    assert error.to_wire() == b'{"error": "session_lost", "message": "gone", "details": {"reason": "idle"}}'
    back = from_wire(error.to_wire(), http_status=410)
    assert (type(back), back.message, back.details) == (SessionLost, "gone", {"reason": "idle"})


@pytest.mark.parametrize(
    "page", [b"<html>502 Bad Gateway</html>", b"", b"[1]", b'{"error": "unheard_of"}', b"\xff\xfe"]
)
def test_an_invalid_error_document_is_quoted(page: bytes) -> None:
    error = from_wire(page, http_status=502)
    assert type(error) is TransportError
    assert "502" in error.message


@pytest.mark.parametrize(
    "url", ["ftp://h", "localhost:8000", "http://", "http://h:99999", "http://h/?x=1", "http://h/a b", "http://h/\r\n"]
)
def test_an_invalid_url(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        Endpoint.parse(url)


def test_endpoint() -> None:
    endpoint = Endpoint.parse("ws://[::1]:8000/p/q/")
    assert (endpoint.host, endpoint.port, endpoint.authority, endpoint.prefix) == ("::1", 8000, "[::1]:8000", "/p/q")
    assert endpoint.door is DOORS["ws"]
    assert endpoint.door_url("http") == "http://[::1]:8000/p/q"
    assert Endpoint.parse("https://h").door_url("ws") == "wss://h"
    ports = {scheme: Endpoint.parse(f"{scheme}://h").port for scheme in ("http", "https", "ws", "wss", "tcp", "grpc")}
    assert ports == {"http": 80, "https": 443, "ws": 80, "wss": 443, "tcp": 8101, "grpc": 9000}
