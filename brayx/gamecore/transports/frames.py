"""The client's side of one WebSocket session as bytes, on the Sans-I/O core of the package ``websockets``.

Uses the envelope of `WS_SUBPROTOCOL`: a kind byte and the body. No sockets: the transports feed it received bytes and
send the bytes it returns.
"""

from __future__ import annotations

import re
from collections import deque

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Close, CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from brayx.errors import (
    BY_CODE,
    BodyTooLarge,
    BrayxError,
    ConnectionLost,
    ProtocolError,
    SessionLost,
    TransportError,
    from_wire,
)
from brayx.gamecore import protocol
from brayx.gamecore.deflate import ClientDeflate
from brayx.gamecore.protocol import SESSION_PATH, WS_SUBPROTOCOL, StepRequest
from brayx.gamecore.transports.base import MAX_REPLY_BYTES, Endpoint
from brayx.gamecore.transports.http import header_value


class SessionFrames:
    """One WebSocket connection, from the handshake to the close.

    Attributes:
        is_open: the handshake is done and neither side has closed.
        failure: why the connection is closed, or was never opened; None while nothing is wrong.
    """

    def __init__(self, endpoint: Endpoint, request: StepRequest) -> None:
        self.is_open = False
        self.failure: BrayxError | None = None
        self._url = endpoint.url
        self._replies: deque[bytes | BrayxError] = deque()
        self._fragments: list[bytes] = []
        self._protocol = ClientProtocol(
            WebSocketURI(
                endpoint.is_secure, endpoint.host, endpoint.port, endpoint.prefix + SESSION_PATH, "", None, None
            ),
            extensions=[ClientDeflate()] if endpoint.compress else None,
            subprotocols=[Subprotocol(WS_SUBPROTOCOL)],
            max_size=MAX_REPLY_BYTES,
        )
        handshake = self._protocol.connect()
        for name in ("session", "key", "time", "token", "opponent", "traceparent"):
            value = header_value(name, getattr(request, name))
            if value:
                handshake.headers[name] = value
        if request.kind is protocol.StepKind.START and request.seq is not None:
            handshake.headers["seq"] = str(request.seq)
        if request.record:
            handshake.headers["record"] = "1"
        self._protocol.send_request(handshake)

    def to_send(self) -> bytes:
        """The bytes to send now."""
        return b"".join(self._protocol.data_to_send())

    def request(self, request: StepRequest) -> bytes:
        """The bytes of ``request``."""
        if request.seq is None or request.kind is not protocol.StepKind.TICK:
            message = protocol.encode_frame(protocol.FRAME_OF_KIND[request.kind], request.body)
        else:
            message = protocol.encode_numbered(request.seq, request.body)
        self._protocol.send_binary(message)
        return b"".join(self._protocol.data_to_send())

    def close(self) -> bytes:
        """The bytes of an orderly close; empty if there is nothing to close."""
        if self._protocol.state is not State.OPEN:
            return b""
        self.is_open = False
        self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
        return self.to_send()

    def feed(self, data: bytes) -> bytes:
        """Processes ``data``; returns bytes to send in response, such as a pong."""
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._on_frame(event)
            elif isinstance(event, Response):
                self._on_handshake(event)
        if self._protocol.handshake_exc is not None and self.failure is None:
            self._on_refused(self._protocol.handshake_exc)
        if self._protocol.parser_exc is not None and self.failure is None:
            self._fail(TransportError(f"{self._url}: not a valid WebSocket stream: {self._protocol.parser_exc}"))
        return self.to_send()

    def end(self, error: Exception | None = None) -> None:
        """Handles the end of the stream."""
        if self._protocol.state is State.CONNECTING and self.failure is None:
            self._protocol.receive_eof()  # completes a refusal whose body ends with the connection
            for event in self._protocol.events_received():
                if isinstance(event, Response):
                    self._on_handshake(event)
        cause = error or "closed by the service"
        message = f"{self._url}: the session's connection broke ({cause}); a request on its way may have been applied"
        self._fail(ConnectionLost(message, url=self._url))

    def take(self) -> bytes | None:
        """The next reply's body, or None if it has not arrived yet.

        Raises:
            BrayxError: the service answered with an error, or the connection has ended without a further reply.
        """
        if self._replies:
            reply = self._replies.popleft()
            if isinstance(reply, BrayxError):
                raise reply
            return reply
        if self.failure is not None:
            raise self.failure
        return None

    def _on_handshake(self, response: Response) -> None:
        error = self._protocol.handshake_exc
        if error is not None:
            self._on_refused(error)
        elif self._protocol.subprotocol != WS_SUBPROTOCOL:
            self._fail(
                ProtocolError(
                    f"{self._url}: the service accepted the WebSocket without the subprotocol {WS_SUBPROTOCOL!r}: "
                    "is this a brayx service?"
                )
            )
        else:
            self.is_open = True

    def _on_refused(self, error: Exception) -> None:
        if isinstance(error, InvalidStatus):
            self._fail(from_wire(bytes(error.response.body or b""), http_status=error.response.status_code))
        else:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            self._fail(TransportError(f"{self._url}: the service does not answer as a WebSocket: {error}{cause}"))

    def _on_frame(self, frame: Frame) -> None:
        opcode = frame.opcode
        if opcode is Opcode.CLOSE:
            assert self._protocol.close_rcvd is not None
            self._fail(closed(self._url, self._protocol.close_rcvd))
        elif opcode is Opcode.BINARY or opcode is Opcode.TEXT or opcode is Opcode.CONT:
            if frame.fin and not self._fragments:
                self._on_message(bytes(frame.data))
                return
            self._fragments.append(bytes(frame.data))
            if frame.fin:
                message = b"".join(self._fragments)
                self._fragments.clear()
                self._on_message(message)

    def _on_message(self, message: bytes) -> None:
        kind = message[:1]
        if kind == b"R":
            self._replies.append(message[1:])
        elif kind == b"E":
            self._replies.append(from_wire(message[1:]))
        else:
            self._fail(ProtocolError(f"{self._url}: the service sent a message that starts with {kind!r}, not R or E"))

    def _fail(self, error: BrayxError) -> None:
        self.is_open = False
        if self.failure is None:
            self.failure = error


def closed(url: str, close: Close) -> BrayxError:
    """The error for a close frame.

    The reason of code 4000 + status is an error document, perhaps truncated to 123 bytes; its code and the start of its
    message survive that. The reason of 4410 may instead say why the session ended. WebSocket libraries refuse a large
    message with code 1009.
    """
    if close.code == CloseCode.MESSAGE_TOO_BIG:
        return BodyTooLarge(
            f"{url}: the message is larger than the service takes ({close.reason or 'close code 1009'})"
        )
    if close.code < 4000:
        said = f"code {close.code}" + (f", {close.reason!r}" if close.reason else "")
        return ConnectionLost(f"{url}: the service closed the session's connection ({said})", url=url, code=close.code)
    if close.code == protocol.close_code(SessionLost.http_status) and not close.reason.startswith("{"):
        reason = close.reason.rpartition(": ")[2]
        return SessionLost(f"{url}: the service closed the connection: {close.reason}", reason=reason)
    error = from_wire(close.reason.encode(), http_status=close.code - 4000)
    if type(error) is TransportError:
        cut = re.match(r'\{"error":\s*"(\w+)"(?:,\s*"message":\s*"(.*))?', close.reason)
        if cut and cut[1] in BY_CODE:
            return BY_CODE[cut[1]]((cut[2] or cut[1]) + "…")
    return error
