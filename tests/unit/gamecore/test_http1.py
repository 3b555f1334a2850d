"""The reply parser, fed whole and byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.errors import TransportError
from brayx.gamecore.transports.http import MAX_HEAD_BYTES, HttpReply

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nTrailer: t\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + PLAIN
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: Close\r\ncontent-length: 5\r\n\r\nhello"
OLD = b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello"
UNTIL_END = b"HTTP/1.1 200 OK\r\n\r\nhello"


@pytest.mark.parametrize(
    ("data", "keep_alive"), [(PLAIN, True), (CHUNKED, True), (INTERIM, True), (CLOSING, False), (OLD, False)]
)
@pytest.mark.parametrize("at_a_time", [1, 7, 10_000])
def test_whole_replies(data: bytes, keep_alive: bool, at_a_time: int) -> None:
    reply = HttpReply()
    pieces = [data[start : start + at_a_time] for start in range(0, len(data), at_a_time)]
    assert [reply.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (reply.status, reply.body, reply.keep_alive) == (200, b"hello", keep_alive)


def test_reply_that_ends_with_the_connection() -> None:
    reply = HttpReply()
    assert not reply.feed(UNTIL_END)
    assert reply.end()
    assert (reply.body, reply.keep_alive) == (b"hello", False)


@pytest.mark.parametrize("data", [PLAIN, CHUNKED, INTERIM])
def test_a_cut_reply_is_not_complete(data: bytes) -> None:
    for cut in range(len(data)):
        reply = HttpReply()
        reply.feed(data[:cut])
        assert not reply.end()


def test_empty_replies() -> None:
    for data in (b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"):
        reply = HttpReply()
        assert reply.feed(data)
        assert (reply.body, reply.keep_alive) == (b"", True)


def test_more_than_the_reply_makes_the_connection_unusable() -> None:
    reply = HttpReply()
    assert reply.feed(PLAIN + b"HTTP/1.1")
    assert (reply.body, reply.keep_alive) == (b"hello", False)


@pytest.mark.parametrize(
    "junk",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"\x16\x03\x01",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd\r\n",
    ],
)
def test_a_malformed_reply_is_refused(junk: bytes) -> None:
    with pytest.raises(TransportError):
        HttpReply().feed(junk)


@given(st.lists(st.binary(max_size=40), max_size=10), st.sampled_from([b"", PLAIN[:-2], CHUNKED[:-20]]))
def test_any_bytes_give_a_reply_or_a_transport_error(pieces: list[bytes], start: bytes) -> None:
    reply = HttpReply()
    try:
        for piece in [start, *pieces]:
            if reply.feed(piece):
                break
    except TransportError:
        pass
