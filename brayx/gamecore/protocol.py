"""The wire, as bytes and headers: what a request and a reply are on HTTP, on WebSocket and on TCP.

Knows nothing of sockets, servers or agents; the doors and the clients both stand on this file, so that a fact about
the wire is written once. ``docs/protocol.md`` tells the same in prose, for authors of clients in other languages.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from brayx.errors import HeaderTooLarge, ProtocolError

STEP_PATH = "/step"
SESSION_PATH = "/session"
WS_SUBPROTOCOL = "brayx.v1"
"""With it, a WebSocket message is one kind byte and the body; without it, a message is a bare tick body."""

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_SESSION_CHARS = 256
MAX_CREDENTIAL_CHARS = 256
"""Limit on key, time and token, each."""
MAX_HEADER_BYTES = 16 * 1024
"""Limit on an HTTP request's line and headers together."""
MAX_SEQ = 2**63 - 1
AGENT_MARK = "-agent-"
"""Stands in the id ``GAME-agent-AGENT`` of a session that is one agent of a game."""


class StepKind(StrEnum):
    """What a request asks for; `CALL` is the absence of a ``step_kind``: one stateless call."""

    START = "start"
    TICK = "tick"
    STOP = "stop"
    CALL = ""


class Frame(StrEnum):
    """Kind byte of a WebSocket message under `WS_SUBPROTOCOL`.

    A ``NUMBERED`` message is a tick whose body comes after its ``seq``, eight bytes, big-endian.
    """

    START = "S"
    TICK = "T"
    NUMBERED = "N"
    STOP = "P"
    REPLY = "R"
    ERROR = "E"


FRAME_OF_KIND = {StepKind.START: Frame.START, StepKind.TICK: Frame.TICK, StepKind.STOP: Frame.STOP}
KIND_OF_FRAME = {frame.value: kind for kind, frame in FRAME_OF_KIND.items()} | {Frame.NUMBERED.value: StepKind.TICK}


class StepRequest(NamedTuple):
    """One request, whatever door it came in by. A tuple, because one is made for every tick.

    Attributes:
        kind: start, tick, stop, or a stateless call.
        session: the session's id; empty only for a stateless call.
        body: opaque bytes, read by the actor alone.
        key, time, token: Bray's credentials, as sent.
        seq: number of a tick in its session, from 0, of a client that wants it applied exactly once; 0 at a start says
            that its ticks will have one; None: not given.
        holder: inside the service: name of the connection it came over, at a door where one connection is one session.
        attached: that connection held the session before this request.
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


def game_of(session: str) -> str:
    """The game that a session is one agent of; empty if its id has no `AGENT_MARK`: it is a game of its own."""
    return session.rpartition(AGENT_MARK)[0]


def check_session(session: str) -> str:
    """The id itself, if it can be one: 1 to 256 printable ASCII characters without space.

    Raises:
        ProtocolError: it cannot.
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


def check_credentials(key: str, time: str, token: str) -> None:
    """Makes sure that none of them is longer than it can be.

    Raises:
        HeaderTooLarge: one is.
    """
    for name, value in (("key", key), ("time", time), ("token", token)):
        if len(value) > MAX_CREDENTIAL_CHARS:
            raise HeaderTooLarge(
                f"{name} has {len(value)} characters, at most {MAX_CREDENTIAL_CHARS} are allowed",
                field=name,
                limit=MAX_CREDENTIAL_CHARS,
            )


def parse_kind(text: str) -> StepKind:
    """The step kind a header names; absent (empty) or Bray's ``auto`` is a stateless call.

    Raises:
        ProtocolError: it names none.
    """
    try:
        return StepKind.CALL if text == "auto" else StepKind(text)
    except ValueError:
        raise ProtocolError(
            f"header 'step_kind' is {text!r}, expected start, tick, stop or no header at all", header="step_kind"
        ) from None


def parse_seq(text: str) -> int | None:
    """The number a ``seq`` header holds; None when it is empty.

    Raises:
        ProtocolError: it is no number from 0 to `MAX_SEQ`.
    """
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= MAX_SEQ):
        raise ProtocolError(f"header 'seq' is {text[:40]!r}, expected a number from 0 to 2^63 - 1", header="seq")
    return int(text)


def parse_request(headers: Mapping[str, str], body: bytes) -> StepRequest:
    """The request that HTTP ``headers`` (lower-case names) and ``body`` make.

    Some proxies drop headers with an underscore, so ``step-kind`` means the same as ``step_kind``. A request with a
    session and neither header has lost its step kind on the way, and is refused.

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
    if key or time or token:
        check_credentials(key, time, token)
    return StepRequest(
        kind=kind,
        session=session if kind is StepKind.CALL else check_session(session),
        body=body,
        key=key,
        time=time,
        token=token,
        seq=parse_seq(headers.get("seq", "")),
    )


def request_headers(request: StepRequest) -> dict[str, str]:
    """The HTTP headers that carry ``request``; empty fields are left out."""
    fields = {
        "session": request.session,
        "step_kind": request.kind.value,
        "key": request.key,
        "time": request.time,
        "token": request.token,
        "seq": "" if request.seq is None else str(request.seq),
        "holder": request.holder,
        "attached": "1" if request.attached else "",
    }
    return {name: value for name, value in fields.items() if value}


def encode_frame(frame: Frame, body: bytes) -> bytes:
    """A message under `WS_SUBPROTOCOL`."""
    return frame.value.encode() + body


def decode_frame(message: bytes) -> tuple[Frame, bytes]:
    """Kind and body of a message under `WS_SUBPROTOCOL`.

    Raises:
        ProtocolError: the message is empty or its first byte is no kind.
    """
    kind = message[:1].decode("latin-1")
    try:
        return Frame(kind), message[1:]
    except ValueError:
        raise ProtocolError(
            f"WebSocket message starts with {kind!r}, expected one of {', '.join(f.value for f in Frame)}"
        ) from None


def encode_numbered(seq: int, body: bytes) -> bytes:
    """A numbered tick under `WS_SUBPROTOCOL`."""
    return Frame.NUMBERED.value.encode() + seq.to_bytes(8, "big") + body


def decode_numbered(body: bytes) -> tuple[int, bytes]:
    """``seq`` and body of what `decode_frame` gave of a numbered tick.

    Raises:
        ProtocolError: it is too short, or the number is above `MAX_SEQ`.
    """
    if len(body) < 8 or body[0] & 0x80:
        raise ProtocolError(
            f"a numbered tick starts with its seq in eight bytes, from 0 to 2^63 - 1, got {body[:8]!r}", field="seq"
        )
    return int.from_bytes(body[:8], "big"), body[8:]


def close_code(http_status: int) -> int:
    """The WebSocket close code for an error that ends the connection: 4000 + its HTTP status."""
    return 4000 + http_status
