"""TCP framing as literal bytes, whole, in pieces and as junk; and the TCP transports against servers that misbehave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.errors import (
    BodyTooLarge,
    ProtocolError,
    SessionUnknown,
)
from brayx.gamecore.protocol import MAX_SEQ, StepKind, StepRequest
from brayx.gamecore.tcp import (
    MAX_FIELD_BYTES,
    MAX_SKIPPED_BYTES,
    NO_REQUEST,
    REQUEST_HEAD,
    MalformedFrame,
    ReplyReader,
    RequestReader,
    encode_error,
    encode_reply,
    encode_request,
    parse_time,
)

TICK = StepRequest(StepKind.TICK, "abc", b"\x00\xff")


def _q(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big", signed=True) for number in numbers)


def test_request_bytes() -> None:
    assert encode_request(TICK, 5) == _q(3, 4, 0, 0, 2, 5) + b"abctick\x00\xff"
    numbered = StepRequest(StepKind.TICK, "s-1", b"", key="k", time="ignored", token="ab", seq=17)
    assert encode_request(numbered, 2**63 - 1) == _q(3, 7, 1, 2, 0, 2**63 - 1) + b"s-1tick#17kab"
    assert encode_request(StepRequest(StepKind.CALL, "", b"x"), 0) == _q(0, 0, 0, 0, 1, 0) + b"x"


def test_reply_bytes() -> None:
    assert encode_reply(b"abc", b"\x01", 5) == _q(3, 1, 5) + b"abc\x01"
    error = SessionUnknown("gone")
    assert encode_error(b"abc", error, 5) == _q(3, len(error.to_wire()), -6) + b"abc" + error.to_wire()
    assert encode_error(b"", error, ~NO_REQUEST)[16:24] == _q(-1)


def read(data: bytes, at_a_time: int = 1 << 20, max_body_bytes: int = 1 << 20) -> list[object]:
    """``(session, time, request or the type of its error)`` of every frame."""
    reader = RequestReader(max_body_bytes)
    requests: list[object] = []
    for start in range(0, len(data), at_a_time):
        for session, time_, request in reader.feed(data[start : start + at_a_time]):
            requests.append((session, time_, type(request) if isinstance(request, ProtocolError) else request))
    assert not reader.in_frame
    return requests


@pytest.mark.parametrize("at_a_time", [1, 2, 7, 47, 48, 49, 1000, 1 << 20])
def test_requests_in_pieces(at_a_time: int) -> None:
    requests = [
        TICK,
        TICK._replace(seq=0),
        TICK._replace(session="with-dash", seq=MAX_SEQ),
        StepRequest(StepKind.START, "abc", b"x" * 3000),
        StepRequest(StepKind.CALL, "", b""),
        StepRequest(StepKind.STOP, "x" * MAX_FIELD_BYTES, b""),
    ]
    data = b"".join(encode_request(request, number) for number, request in enumerate(requests))
    read_back = read(data, at_a_time)
    assert [(session, time_) for session, time_, _ in read_back] == [  # type: ignore[misc]
        (request.session.encode(), number) for number, request in enumerate(requests)
    ]
    for (_, time_, got), request in zip(read_back, requests, strict=True):  # type: ignore[misc]
        assert got._replace(time="") == request
        assert got.time in ("", str(time_))


def test_credentials_come_with_their_time() -> None:
    signed = TICK._replace(key="k", time="1700000000", token="ab" * 32, seq=3)
    assert read(encode_request(signed, 1_700_000_000)) == [(b"abc", 1_700_000_000, signed)]


@pytest.mark.parametrize("at_a_time", [1, 50, 1 << 20])
def test_a_body_above_the_limit_is_skipped(at_a_time: int) -> None:
    data = encode_request(TICK._replace(body=bytes(200)), 1) + encode_request(TICK, 2)
    assert read(data, at_a_time, max_body_bytes=100) == [(b"abc", 1, BodyTooLarge), (b"abc", 2, TICK)]


def test_a_refused_frame_leaves_the_stream_readable() -> None:
    bad = [
        (b"abc", b"jump"),
        (b"", b"tick"),
        (b"a b", b"tick"),
        (b"\xff", b"start"),
        (b"abc", b"tick#"),
        (b"abc", b"tick#x"),
        (b"abc", b"tick#-1"),
        (b"abc", b"tick#" + str(2**63).encode()),
        (b"abc", b"tick#\xb2"),
    ]
    data = b"".join(_q(len(s), len(k), 0, 0, 0, time_) + s + k for time_, (s, k) in enumerate(bad))
    data += encode_request(TICK, 99)
    *refused, last = read(data)
    assert refused == [(session, time_, ProtocolError) for time_, (session, _) in enumerate(bad)]
    assert last == (b"abc", 99, TICK)


@pytest.mark.parametrize(
    "head",
    [
        (-1, 4, 0, 0, 0, 0),
        (MAX_FIELD_BYTES + 1, 4, 0, 0, 0, 0),
        (3, MAX_FIELD_BYTES + 1, 0, 0, 0, 0),
        (3, 4, MAX_FIELD_BYTES + 1, 0, 0, 0),
        (3, 4, 0, MAX_FIELD_BYTES + 1, 0, 0),
        (3, 4, 0, 0, -1, 0),
        (3, 4, 0, 0, MAX_SKIPPED_BYTES + 1, 0),
        (3, 4, 0, 0, 0, -1),
    ],
)
def test_an_invalid_head_is_refused(head: tuple[int, ...]) -> None:
    with pytest.raises(MalformedFrame, match="big-endian int64"):
        list(RequestReader().feed(REQUEST_HEAD.pack(*head)))


def test_the_largest_valid_head_is_read() -> None:
    assert list(RequestReader().feed(REQUEST_HEAD.pack(*[MAX_FIELD_BYTES] * 4, MAX_SKIPPED_BYTES, 2**63 - 1))) == []


def test_a_large_body_in_tiny_pieces_does_not_take_more_memory_than_it_is_long() -> None:
    import tracemalloc

    frame = encode_request(TICK._replace(body=bytes(1 << 17)), 1)
    reader = RequestReader()
    pieces = [frame[start : start + 2] for start in range(0, len(frame) - 2, 2)]
    tracemalloc.start()
    try:
        for piece in pieces:
            assert not list(reader.feed(piece))
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert allocated < 2 * len(frame)


@given(st.lists(st.binary(max_size=60), max_size=12))
def test_any_bytes_give_requests_or_a_malformed_frame(pieces: list[bytes]) -> None:
    reader = RequestReader(100)
    try:
        for piece in pieces:
            for _, _, request in reader.feed(piece):
                assert isinstance(request, StepRequest | ProtocolError)
    except MalformedFrame:
        pass


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40),
            st.binary(max_size=200),
            st.one_of(st.none(), st.integers(0, MAX_SEQ)),
            st.integers(0, 2**63 - 1),
        ),
        max_size=8,
    ),
    st.integers(1, 300),
)
def test_written_frames_are_read_back(ticks: list[tuple[str, bytes, int | None, int]], at_a_time: int) -> None:
    requests = [(StepRequest(StepKind.TICK, session, body, seq=seq), time_) for session, body, seq, time_ in ticks]
    data = b"".join(encode_request(request, time_) for request, time_ in requests)
    came = [(got._replace(time=""), time_) for _, time_, got in read(data, at_a_time)]  # type: ignore[misc]
    assert came == requests


@pytest.mark.parametrize("at_a_time", [1, 23, 1 << 20])
def test_replies_in_pieces(at_a_time: int) -> None:
    replies = [(b"abc", b"x" * 2000, 1), (b"", b"", 2), (b"abc", b"{}", -3)]
    data = b"".join(encode_reply(*reply) for reply in replies)
    reader = ReplyReader(1 << 20)
    came = [reply for start in range(0, len(data), at_a_time) for reply in reader.feed(data[start : start + at_a_time])]
    assert came == replies
    assert not reader.in_frame


@pytest.mark.parametrize(
    ("field", "value"), [("session", "é"), ("key", "a\nb"), ("token", "x" * 257), ("session", "x" * 257)]
)
def test_invalid_fields_are_refused_before_sending(field: str, value: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        encode_request(TICK._replace(**{field: value}), 1)


def test_a_time_is_a_number() -> None:
    assert parse_time("1700000000") == 1_700_000_000
    for bad in ("", "now", "-1", "1.5", str(2**63), "²"):
        with pytest.raises(ProtocolError, match="Unix seconds"):
            parse_time(bad)


# The transports
