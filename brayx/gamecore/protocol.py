"""The wire, as bytes and headers: what a request and a reply are on HTTP and on WebSocket.

Knows nothing of sockets, servers or agents; the doors and the clients both stand on this file, so that a fact about
the wire is written once. ``docs/protocol.md`` tells the same in prose, for authors of clients in other languages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from brayx.errors import ProtocolError

STEP_PATH = "/step"
SESSION_PATH = "/session"
WS_SUBPROTOCOL = "brayx.v1"
"""With it, a WebSocket message is one kind byte and the body; without it, a message is a bare tick body."""

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_SESSION_CHARS = 256


class StepKind(StrEnum):
    """What a request asks for; `CALL` is the absence of a ``step_kind``: one stateless call."""

    START = "start"
    TICK = "tick"
    STOP = "stop"
    CALL = ""


class Frame(StrEnum):
    """Kind byte of a WebSocket message under `WS_SUBPROTOCOL`."""

    START = "S"
    TICK = "T"
    STOP = "P"
    REPLY = "R"
    ERROR = "E"


FRAME_OF_KIND = {StepKind.START: Frame.START, StepKind.TICK: Frame.TICK, StepKind.STOP: Frame.STOP}
KIND_OF_FRAME = {frame.value: kind for kind, frame in FRAME_OF_KIND.items()}


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request, whatever door it came in by.

    Attributes:
        kind: start, tick, stop, or a stateless call.
        session: the session's id; empty only for a stateless call.
        body: opaque bytes, read by the actor alone.
        key, time, token: Bray's credentials, as sent.
    """

    kind: StepKind
    session: str
    body: bytes
    key: str = ""
    time: str = ""
    token: str = ""


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


def parse_request(headers: Mapping[str, str], body: bytes) -> StepRequest:
    """The request that HTTP ``headers`` (lower-case names) and ``body`` make.

    Raises:
        ProtocolError: a header is missing or malformed.
    """
    kind = parse_kind(headers.get("step_kind", ""))
    session = headers.get("session", "")
    return StepRequest(
        kind=kind,
        session=session if kind is StepKind.CALL else check_session(session),
        body=body,
        key=headers.get("key", ""),
        time=headers.get("time", ""),
        token=headers.get("token", ""),
    )


def request_headers(request: StepRequest) -> dict[str, str]:
    """The HTTP headers that carry ``request``; empty fields are left out."""
    fields = {
        "session": request.session,
        "step_kind": request.kind.value,
        "key": request.key,
        "time": request.time,
        "token": request.token,
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


def close_code(http_status: int) -> int:
    """The WebSocket close code for an error that ends the connection: 4000 + its HTTP status."""
    return 4000 + http_status
