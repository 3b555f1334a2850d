"""The TCP door: Bray's framing, many sessions on one connection, replies as they come.

The fastest door: a tick is one frame read and one frame written, without a task. The bytes are
`brayx.gamecore.tcp`; sessions are the `Service`'s. A connection holds no session: one that breaks ends none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import brayx.clock as clock
from brayx.actor.doors.native import Connection, Listener
from brayx.errors import BrayxError, ProtocolError, TooManyConnections
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.tcp import NO_REQUEST, MalformedFrame, RequestReader, encode_error, encode_reply

_REQUESTS_OF_A_TURN = 64
"""Maximum number of requests that a connection hands over at once; further ones wait for a turn."""
_BYTES_OF_ONE = 16 * 1024
"""A longer body counts as several requests in progress, whose number bounds the memory of a connection."""
_START = StepKind.START


class TcpConnection(Connection):
    """One client's connection."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener)
        self._reader = RequestReader(self.limits.max_body_bytes)
        self._submit = self.service.submit
        self._requests: Iterator[tuple[bytes, int, StepRequest | ProtocolError]] = iter(())

    def data_received(self, data: bytes) -> None:
        """Hands over complete requests."""
        self._requests = iter(self._reader.feed(data))
        self.more()

    def more(self) -> None:
        """Hands over up to `_REQUESTS_OF_A_TURN` requests, while there is room."""
        submit, most = self._submit, self.limits.max_in_flight
        request: StepRequest | ProtocolError | None = None
        left = _REQUESTS_OF_A_TURN
        try:
            for session, sent_at, request in self._requests:
                if type(request) is StepRequest:
                    weight = 1 + len(request.body) // _BYTES_OF_ONE
                    self.in_flight += weight
                    reply = partial(self._reply, session, sent_at, weight)
                    if request.kind is _START:
                        self.start(request, reply)
                    else:
                        submit(request, reply)
                else:
                    assert isinstance(request, ProtocolError)
                    self.in_flight += 1
                    self._reply(session, sent_at, 1, request)
                left -= 1
                if not left or self.in_flight >= most or not self._writable:
                    self.has_more = True
                    break
            else:
                self.has_more = False
        except MalformedFrame as error:
            self._fail(error)
            self.close()
            return
        if self.has_more:
            self.stalled_since = None
        elif self._reader.in_frame:
            if self.stalled_since is None or request is not None:  # a complete request resets the stall
                self.stalled_since = clock.now()
        else:
            self.stalled_since = None
        if self.in_flight:
            self.waiting_since = None
        if self.has_more or not self._reading:
            self.regulate()

    def _reply(self, session: bytes, sent_at: int, weight: int, result: bytes | BrayxError) -> None:
        self.in_flight -= weight
        if not self.in_flight:
            self.waiting_since = clock.now()
        if isinstance(result, bytes):
            self.write(encode_reply(session, result, sent_at))
        else:
            self.service.refused(result)
            self.write(encode_error(session, result, sent_at))
        if not self._reading:
            self.regulate()

    def _fail(self, error: BrayxError) -> None:
        """Sends an error of the connection."""
        self.service.refused(error)
        self.write(encode_error(b"", error, ~NO_REQUEST))

    def refuse(self) -> None:
        self._fail(TooManyConnections(f"this door holds {self.limits.max_connections} connections"))

    def expire(self, what: str) -> None:
        if self.stalled_since is not None:
            self._fail(ProtocolError(what))
        self.close()
