"""The wire protocol: requests and replies as headers and messages of HTTP and WebSocket.

Doors and clients both use this file, so that each fact about the protocol is written once. ``docs/protocol.md``
describes the protocol for authors of clients in other languages. Knows nothing of sockets, servers or agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from brayx.errors import HeaderTooLarge, ProtocolError

STEP_PATH = "/step"
SESSION_PATH = "/session"
WS_SUBPROTOCOL = "brayx.v1"
"""WebSocket subprotocol in which a message is one kind byte and the body; without it, a message is a bare tick body."""

PROBE = "brayx-probe-"
"""Prefix of the sessions by which `brayx.gamecore.probe` asks whether a service is there. Their refusal is no game's
fault."""
DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_SESSION_CHARS = 256
MAX_CREDENTIAL_CHARS = 256
"""Limit on key, time, token and opponent, each."""
MAX_HEADER_BYTES = 16 * 1024
"""Limit on an HTTP request's line and headers together."""
MAX_SEQ = 2**63 - 1
_ONCE = ("host", "transfer-encoding")
SINGLE = frozenset(
    {"session", "step_kind", "step-kind", "key", "time", "token", "seq", "opponent", "record", "origin", *_ONCE}
)
"""Headers that may have only one value."""
AGENT_MARK = "-agent-"
"""Separates game and agent in the session id ``GAME-agent-AGENT``."""


class StepKind(StrEnum):
    """The kind of a request; `CALL` is the absence of a ``step_kind``: a stateless call."""

    START = "start"
    TICK = "tick"
    STOP = "stop"
    CALL = ""


class FrameKind(StrEnum):
    """Kind byte of a WebSocket message under `WS_SUBPROTOCOL`.

    A ``NUMBERED`` message is a tick: its ``seq`` in eight bytes, big-endian, then its body.
    """

    START = "S"
    TICK = "T"
    NUMBERED = "N"
    STOP = "P"
    REPLY = "R"
    ERROR = "E"


FRAME_OF_KIND = {StepKind.START: FrameKind.START, StepKind.TICK: FrameKind.TICK, StepKind.STOP: FrameKind.STOP}
KIND_OF_FRAME = {frame.value: kind for kind, frame in FRAME_OF_KIND.items()} | {FrameKind.NUMBERED.value: StepKind.TICK}


class StepRequest(NamedTuple):
    """One request, from any door. A tuple for speed, since every tick makes one.

    Attributes:
        kind: start, tick, stop, or a stateless call.
        session: the session's id; empty only for a stateless call.
        body: opaque bytes; only the actor reads them.
        key, time, token: Bray's credentials, as sent.
        seq: number of a tick in its session, from 0, so that it is applied exactly once; 0 at a start announces
            numbered ticks; None: not given.
        holder: inside the service: name of the request's connection, at a door where one connection is one session.
        attached: that connection already held the session.
        opponent: the opponent that a start requests outside of its body, as ``KEY=VALUE``; empty: none.
        record: a start asks for its session to be recorded.
        traceparent: the client's span, as the header of W3C Trace Context; empty: not given.
    """

    kind: StepKind
    session: str
    body: bytes
    key: str = ""
    time: str = ""
    token: str = ""
    seq: int | None = None
    holder: str = ""
    attached: bool = False
    opponent: str = ""
    record: bool = False
    traceparent: str = ""


def game_of(session: str) -> str:
    """The game of a session with several agents; empty if the id has no `AGENT_MARK`."""
    return session.rpartition(AGENT_MARK)[0]


def agent_of(session: str) -> str:
    """The agent of a session of a game with several; empty if the id has no `AGENT_MARK`."""
    return session.rpartition(AGENT_MARK)[2] if AGENT_MARK in session else ""


def text_of(value: bytes) -> str:
    """Decodes a header or field: as UTF-8, or as Latin-1 if it is not UTF-8. Every known client sends ASCII."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def check_session(session: str) -> str:
    """Returns a valid session id unchanged: 1 to 256 printable ASCII characters without spaces.

    Raises:
        ProtocolError: the id is invalid.
    """
    if not session:
        raise ProtocolError("header 'session' is missing: start, tick and stop need it", header="session")
    if len(session) > MAX_SESSION_CHARS:
        raise ProtocolError(
            f"header 'session' has {len(session)} characters, at most {MAX_SESSION_CHARS} are allowed",
            header="session",
        )
    if not (session.isascii() and session.isprintable() and " " not in session):
        raise ProtocolError(
            f"header 'session' is {session!r}, expected printable ASCII without spaces", header="session"
        )
    return session


def check_credentials(key: str, time: str, token: str, opponent: str = "") -> None:
    """Checks the lengths of credentials, and of what a start asks for.

    Raises:
        HeaderTooLarge: one is too long.
    """
    for name, value in (("key", key), ("time", time), ("token", token), ("opponent", opponent)):
        if len(value) > MAX_CREDENTIAL_CHARS:
            raise HeaderTooLarge(
                f"{name} has {len(value)} characters, at most {MAX_CREDENTIAL_CHARS} are allowed",
                field=name,
                limit=MAX_CREDENTIAL_CHARS,
            )


def parse_kind(text: str) -> StepKind:
    """The step kind in a header; an absent (empty) one and Bray's ``auto`` mean a stateless call.

    Raises:
        ProtocolError: unknown kind.
    """
    try:
        return StepKind.CALL if text == "auto" else StepKind(text)
    except ValueError:
        raise ProtocolError(
            f"header 'step_kind' is {text!r}, expected start, tick, stop or no header at all", header="step_kind"
        ) from None


def parse_seq(text: str) -> int | None:
    """The number in a ``seq`` header; None if it is empty.

    Raises:
        ProtocolError: not a number from 0 to `MAX_SEQ`.
    """
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= MAX_SEQ):
        raise ProtocolError(f"header 'seq' is {text[:40]!r}, expected a number from 0 to 2^63 - 1", header="seq")
    return int(text)


def parse_record(text: str) -> bool:
    """Whether a ``record`` header asks for a recording: ``1`` or ``true``; ``0``, ``false`` and empty do not.

    Raises:
        ProtocolError: it is none of these.
    """
    if text in ("1", "true"):
        return True
    if text in ("", "0", "false"):
        return False
    raise ProtocolError(f"header 'record' is {text[:40]!r}, expected 1 or 0", header="record")


def add_header(headers: dict[str, str], name: str, value: str) -> None:
    """Adds a header to the headers of a request.

    Refuses a second value, because a proxy might use one and the service the other.

    Args:
        headers: the headers so far, by lower-case name.
        name: lower-case name.
        value: value, stripped of spaces.

    Raises:
        ProtocolError: a header of `SINGLE` has a second, different value; ``host`` or ``transfer-encoding`` comes
            twice; or the transfer coding is not ``chunked``.
    """
    if name in headers and name in SINGLE and (value != headers[name] or name in _ONCE):
        raise ProtocolError(
            f"header {name!r} is {headers[name][:40]!r} and {value[:40]!r}, expected one value", header=name
        )
    if name == "transfer-encoding" and value.lower() != "chunked":
        raise ProtocolError(f"header 'transfer-encoding' is {value[:40]!r}, expected 'chunked'", header=name)
    headers[name] = value


def parse_request(headers: Mapping[str, str], body: bytes) -> StepRequest:
    """The request from HTTP ``headers`` (lower-case names) and ``body``.

    Some proxies drop headers with an underscore, so ``step-kind`` means the same as ``step_kind``. A request with a
    session but neither header probably lost it in a proxy, and is refused.

    Raises:
        ProtocolError: a header is missing or malformed.
    """
    text, hyphenated = headers.get("step_kind", ""), headers.get("step-kind", "")
    if hyphenated and hyphenated != text:
        if text:
            raise ProtocolError(
                f"header 'step_kind' is {text!r} and header 'step-kind' is {hyphenated!r}: they mean the same, send "
                "only one",
                header="step_kind",
            )
        text = hyphenated
    kind = parse_kind(text)
    session = headers.get("session", "")
    if session and not text:
        raise ProtocolError(
            "header 'session' came without 'step_kind': send start, tick or stop in 'step_kind', or in 'step-kind' "
            "where a proxy drops headers with an underscore, as nginx does; a stateless call has no session",
            header="step_kind",
        )
    key, time, token = headers.get("key", ""), headers.get("time", ""), headers.get("token", "")
    opponent = headers.get("opponent", "") if kind is StepKind.START else ""
    if key or time or token or opponent:
        check_credentials(key, time, token, opponent)
    return StepRequest(
        kind=kind,
        session=session if kind is StepKind.CALL else check_session(session),
        body=body,
        key=key,
        time=time,
        token=token,
        seq=parse_seq(headers.get("seq", "")),
        opponent=opponent,
        record=kind is StepKind.START and parse_record(headers.get("record", "")),
        traceparent=headers.get("traceparent", ""),
    )


def request_headers(request: StepRequest) -> dict[str, str]:
    """The HTTP headers of ``request``; empty fields are left out."""
    fields = {
        "session": request.session,
        "step_kind": request.kind.value,
        "key": request.key,
        "time": request.time,
        "token": request.token,
        "seq": "" if request.seq is None else str(request.seq),
        "holder": request.holder,
        "attached": "1" if request.attached else "",
        "opponent": request.opponent,
        "record": "1" if request.record else "",
        "traceparent": request.traceparent,
    }
    return {name: value for name, value in fields.items() if value}


def encode_frame(frame: FrameKind, body: bytes) -> bytes:
    """A message under `WS_SUBPROTOCOL`."""
    return frame.value.encode() + body


def decode_frame(message: bytes) -> tuple[FrameKind, bytes]:
    """Kind and body of a message under `WS_SUBPROTOCOL`.

    Raises:
        ProtocolError: the message is empty, or its first byte is not a kind.
    """
    kind = message[:1].decode("latin-1")
    try:
        return FrameKind(kind), message[1:]
    except ValueError:
        raise ProtocolError(
            f"WebSocket message starts with {kind!r}, expected one of {', '.join(f.value for f in FrameKind)}"
        ) from None


def encode_numbered(seq: int, body: bytes) -> bytes:
    """A numbered tick under `WS_SUBPROTOCOL`."""
    return FrameKind.NUMBERED.value.encode() + seq.to_bytes(8, "big") + body


def decode_numbered(body: bytes) -> tuple[int, bytes]:
    """``seq`` and body of a numbered tick, from the body that `decode_frame` returns.

    Raises:
        ProtocolError: the body is too short, or the number is above `MAX_SEQ`.
    """
    if len(body) < 8 or body[0] & 0x80:
        raise ProtocolError(
            f"a numbered tick starts with its seq in eight bytes, from 0 to 2^63 - 1, got {body[:8]!r}", field="seq"
        )
    return int.from_bytes(body[:8], "big"), body[8:]


def close_code(http_status: int) -> int:
    """The WebSocket close code for an error that ends the connection: 4000 + its HTTP status."""
    return 4000 + http_status
