"""Bray's TCP framing as bytes, for the door and the clients. Knows nothing of sockets.

A request is six big-endian int64 (sizes of session, step_kind, key, token and body; then ``time``) and the five
fields; a reply is three (sizes of session and body, ``time``) and the two fields. A reply repeats the request's
``time``, so that a client with several requests in flight can match them. Replies are in order within a session, but
not between sessions.

brayx adds three things, which Bray's clients tolerate. A numbered tick has its number in the step_kind (``tick#17``). A
start that asks for a recording says so there, too (``start+record``, ``start+record#0``). An error is a reply whose
``time`` is the bitwise complement of the request's (-1 - time, negative, since requests have times from 0), with the
error document as its body. An error that belongs to no readable request has the time `NO_REQUEST`, and the connection
ends after it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from brayx.errors import BodyTooLarge, BrayxError, ProtocolError
from brayx.gamecore.protocol import (
    DEFAULT_MAX_BODY_BYTES,
    MAX_SEQ,
    StepKind,
    StepRequest,
    check_session,
    parse_kind,
    parse_seq,
    text_of,
)

REQUEST_HEAD = struct.Struct(">6q")
REPLY_HEAD = struct.Struct(">3q")

NO_REQUEST = -1
"""Time of an error of the whole connection: the complement of 0, which clients do not use since they count from 1."""

MAX_FIELD_BYTES = 256
"""Limit on session, step_kind, key and token, each."""
MAX_SKIPPED_BYTES = 256 * 1024 * 1024
"""A body above the door's limit is skipped and the connection stays open; above this size the connection ends."""

_UNPACK_REQUEST = REQUEST_HEAD.unpack_from
_UNPACK_REPLY = REPLY_HEAD.unpack_from
_REQUEST_HEAD_BYTES = REQUEST_HEAD.size
_REPLY_HEAD_BYTES = REPLY_HEAD.size


class MalformedFrame(ProtocolError):
    """Bytes that are not a frame: the start of the next frame is unknown, so the connection ends."""


def encode_request(request: StepRequest, time: int) -> bytes:
    """A request's frame.

    Args:
        request: the request; its ``time`` field is not sent, since the frame's time takes its place.
        time: 0 to 2^63 - 1.

    Raises:
        ProtocolError: a field is not printable ASCII, or too long for any door; or the start asks for its opponent,
            which a frame cannot.
    """
    kind = request.kind.value + _RECORD if request.record else request.kind.value
    if request.seq is not None:
        kind = f"{kind}#{request.seq}"
    session, key, token, body = request.session, request.key, request.token, request.body
    head = session + kind + key + token
    if not (head.isascii() and head.isprintable()) or len(head) > MAX_FIELD_BYTES or len(body) > MAX_SKIPPED_BYTES:
        _check_fields(request)
    if request.opponent:
        raise ProtocolError(
            "a TCP frame has no place for 'opponent': put it into the start's JSON body", field="opponent"
        )
    sizes = (len(session), len(kind), len(key), len(token), len(body))
    return b"%s%s%s" % (REQUEST_HEAD.pack(*sizes, time), head.encode(), body)


def _check_fields(request: StepRequest) -> None:
    for name, value in (("session", request.session), ("key", request.key), ("token", request.token)):
        if not (value.isascii() and value.isprintable()) or len(value) > MAX_FIELD_BYTES:
            raise ProtocolError(
                f"field {name!r} is {value!r}, expected at most {MAX_FIELD_BYTES} characters of printable ASCII",
                field=name,
            )
    if len(request.body) > MAX_SKIPPED_BYTES:
        raise BodyTooLarge(
            f"body has {len(request.body)} bytes, no TCP door reads over more than {MAX_SKIPPED_BYTES}",
            limit=MAX_SKIPPED_BYTES,
        )


def parse_time(text: str) -> int:
    """The frame's time for the credentials' ``time``.

    Raises:
        ProtocolError: not a number from 0 to 2^63 - 1.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= MAX_SEQ):
        raise ProtocolError(f"'time' is {text[:40]!r}, over TCP it is Unix seconds, in digits", field="time")
    return int(text)


def encode_reply(session: bytes, body: bytes, time: int) -> bytes:
    """A reply's frame."""
    return REPLY_HEAD.pack(len(session), len(body), time) + session + body


def encode_error(session: bytes, error: BrayxError, time: int) -> bytes:
    """The frame of an error, in answer to the request with ``time``."""
    return encode_reply(session, error.to_wire(), ~time)


class RequestReader:
    """Reads requests from a stream of bytes.

    Args:
        max_body_bytes: a longer body is refused; reading continues with the next frame.

    Attributes:
        in_frame: a frame is incomplete.
    """

    def __init__(self, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._buffer = b""
        self._large = bytearray()
        self._missing = 0
        self._skip = 0
        self.in_frame = False

    def feed(self, data: bytes) -> Iterable[tuple[bytes, int, StepRequest | ProtocolError]]:
        """All requests that are complete now, as ``(session, time, request)``; a refused one as its error.

        Consume all of them before the next `feed`.

        Raises:
            MalformedFrame: the stream cannot be read any further.
        """
        if not self.in_frame and len(data) > _REQUEST_HEAD_BYTES:
            # Fast path for almost all data: one tick, without credentials or number.
            session_size, kind_size, key_size, token_size, body_size, time = _UNPACK_REQUEST(data)
            kind_at = _REQUEST_HEAD_BYTES + session_size
            if (
                kind_size == len(_TICK)
                and not key_size
                and not token_size
                and kind_at + kind_size + body_size == len(data)
                and 0 < session_size <= MAX_FIELD_BYTES
                and 0 <= body_size <= self._max_body_bytes
                and time >= 0
            ):
                session, body_at = data[_REQUEST_HEAD_BYTES:kind_at], kind_at + kind_size
                if data[kind_at:body_at] == _TICK and session.isalnum():
                    request = _new(
                        StepRequest,
                        (_KIND_TICK, str(session, "ascii"), data[body_at:], "", "", "", None, "", False, "", False, ""),
                    )
                    return ((session, time, request),)
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[tuple[bytes, int, StepRequest | ProtocolError]]:
        if self._large:  # collected in place, so that tiny pieces cost neither repeated copies nor memory
            self._large += data
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = bytes(self._large)
            self._large = bytearray()
            self._missing = 0
        elif self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        elif self._buffer:
            data = self._buffer + data
            self._buffer = b""
        start, size = 0, len(data)
        while size - start >= _REQUEST_HEAD_BYTES:
            session_size, kind_size, key_size, token_size, body_size, time = _UNPACK_REQUEST(data, start)
            # Few comparisons for a usual frame; all others are checked in full.
            if (
                (session_size | kind_size | key_size | token_size) >> 8
                or (body_size | time) < 0
                or body_size > MAX_SKIPPED_BYTES
            ):
                _check_head(session_size, kind_size, key_size, token_size, body_size, time)
            kind_at = start + _REQUEST_HEAD_BYTES + session_size
            key_at = kind_at + kind_size
            token_at = key_at + key_size
            body_at = token_at + token_size
            end = body_at + body_size
            if body_size > self._max_body_bytes:
                if size < body_at:
                    break
                session = data[start + _REQUEST_HEAD_BYTES : kind_at]
                error = BodyTooLarge(
                    f"body has {body_size} bytes, at most {self._max_body_bytes} are allowed",
                    limit=self._max_body_bytes,
                )
                yield session, time, error
                self._skip = max(0, end - size)
                start = min(end, size)
                continue
            if size < end:
                self._missing = end - size
                break
            session = data[start + _REQUEST_HEAD_BYTES : kind_at]
            request: StepRequest | ProtocolError
            try:
                request = _request(
                    session,
                    data[kind_at:key_at],
                    data[key_at:token_at],
                    data[token_at:body_at],
                    data[body_at:end],
                    time,
                )
            except ProtocolError as error:
                request = error
            start = end
            yield session, time, request
        if start < size:
            rest = data[start:] if start else data
            if self._missing > 0:
                self._large += rest
            else:
                self._buffer = rest
        self.in_frame = start < size or self._skip > 0


def _check_head(*head: int) -> None:
    *fields, body_size, time = head
    if not (all(0 <= size <= MAX_FIELD_BYTES for size in fields) and 0 <= body_size <= MAX_SKIPPED_BYTES and time >= 0):
        raise MalformedFrame(
            f"a frame begins with sizes of session, step_kind, key, token (each 0 to {MAX_FIELD_BYTES}), body "
            f"(0 to {MAX_SKIPPED_BYTES}) and a time from 0 as big-endian int64, got {head}",
            sizes=head,
        )


_RECORD = "+record"
_TICK = b"tick"
_NUMBERED = b"tick#"
_KIND_TICK = StepKind.TICK
_new = tuple.__new__  # a named tuple's own constructor takes three times as long


def _request(session: bytes, kind: bytes, key: bytes, token: bytes, body: bytes, time: int) -> StepRequest:
    if not key and session.isalnum():  # fast path for almost every frame
        if kind == _TICK:
            return _new(
                StepRequest, (_KIND_TICK, str(session, "ascii"), body, "", "", "", None, "", False, "", False, "")
            )
        if kind[:5] == _NUMBERED and kind[5:].isdigit() and len(kind) <= 23:
            return _new(
                StepRequest,
                (_KIND_TICK, str(session, "ascii"), body, "", "", "", int(kind[5:]), "", False, "", False, ""),
            )
    name, mark, number = text_of(kind).partition("#")
    if mark and not number:
        raise ProtocolError(f"step_kind is {name + mark!r}: a number comes after the #", header="step_kind")
    named, plus, _ = name.partition(_RECORD) if name.endswith(_RECORD) else (name, "", "")
    step_kind = parse_kind(named)
    if plus and step_kind is not StepKind.START:
        raise ProtocolError(f"step_kind is {name!r}: only a start asks for a recording", header="step_kind")
    text = text_of(session)
    return StepRequest(
        kind=step_kind,
        session=text if step_kind is StepKind.CALL else check_session(text),
        body=body,
        key=text_of(key),
        time=str(time),
        token=text_of(token),
        seq=parse_seq(number),
        record=bool(plus),
    )


class ReplyReader:
    """Reads replies from a stream of bytes.

    Args:
        max_bytes: a longer reply is refused.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def in_frame(self) -> bool:
        """Whether a frame is incomplete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes, int]]:
        """All replies that are complete now, as ``(session, body, time)``; an error's time is negative.

        Raises:
            MalformedFrame: the stream cannot be read any further.
        """
        self._buffer += data
        while len(self._buffer) >= _REPLY_HEAD_BYTES:
            session_size, body_size, time = _UNPACK_REPLY(self._buffer)
            if not (0 <= session_size <= MAX_FIELD_BYTES and 0 <= body_size <= self._max_bytes):
                raise MalformedFrame(
                    f"a reply begins with sizes of session (0 to {MAX_FIELD_BYTES}) and body (0 to {self._max_bytes}) "
                    f"as big-endian int64, got {session_size} and {body_size}",
                    sizes=(session_size, body_size),
                )
            body_at = _REPLY_HEAD_BYTES + session_size
            end = body_at + body_size
            if len(self._buffer) < end:
                return
            session, body = bytes(self._buffer[_REPLY_HEAD_BYTES:body_at]), bytes(self._buffer[body_at:end])
            del self._buffer[:end]
            yield session, body, time
