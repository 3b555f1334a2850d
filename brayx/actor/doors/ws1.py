"""WebSocket connections of the native port: uvicorn's protocol, one frame at a time.

uvicorn decodes all received data and queues the messages. Here a connection holds at most one decoded message that its
session has not taken. Further frames stay encoded, and the connection is not read. Each frame after the first waits for
a turn (`brayx.actor.doors.turns`). No frame is decoded while the client does not read, for example the replies to its
pings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence

import uvicorn
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import InvalidHeaderValue, InvalidMessage, SecurityError
from websockets.extensions import ServerExtensionFactory
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.streams import StreamReader

from brayx.actor.doors.answers import CLOSE, Refused, origin_form, response
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.native import DoorLimits, Listener
from brayx.actor.doors.turns import Turns
from brayx.errors import BrayxError, HeaderTooLarge, Overloaded, ProtocolError, ServiceFull
from brayx.gamecore.deflate import ServerDeflate
from brayx.logs import limit_others, limited

logger = limited(__name__)


class WebSockets:
    """Hands connections over to uvicorn's WebSocket protocol.

    Args:
        app: the ASGI application with the session door.
        limits: limits of the native port.
        window_bits: window of the compression, 9 to 15; None: none.
    """

    def __init__(self, app: DoorApp, limits: DoorLimits, window_bits: int | None = None) -> None:
        self._config = uvicorn.Config(
            app,
            log_config=None,  # uvicorn's own would close every handler of the process, Serve's too
            log_level="error",
            access_log=False,
            lifespan="off",
            ws_max_size=limits.max_body_bytes + 65536,
            ws_per_message_deflate=False,  # its window of 4 kB may not reach the message before
        )
        self._config.load()
        self._extensions = [] if window_bits is None else [ServerDeflate(window_bits)]
        limit_others()
        self._state = ServerState()

    def protocol(self, listener: Listener, gone: Callable[[], None], may_compress: Callable[[], bool]) -> WebSocket:
        """The protocol of one connection.

        Args:
            listener: the door that accepted the connection.
            gone: called when the connection has ended.
            may_compress: whether the client may send compressed messages, of which a few bytes may become megabytes.
        """
        extensions = self._extensions if self._extensions and may_compress() else []
        return WebSocket(self._config, self._state, listener.turns, gone, extensions)

    def close(self) -> None:
        """Closes all connections, as going away."""
        for connection in list(self._state.connections):
            try:
                connection.shutdown()
            except Exception:  # a half-open connection must not keep the others from closing
                logger.warning("a WebSocket connection did not close cleanly", exc_info=True)
                connection.transport.abort()


class _Frames(StreamReader):
    """The reader of websockets' parser; pauses the parser before each frame."""

    def at_eof(self) -> Generator[None, None, bool]:
        yield
        return (yield from super().at_eof())


class WebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol of one connection, with bounded input and better answers to clients that break the protocol.

    uvicorn fails on data that comes before it has answered the handshake: here that data waits. uvicorn also refuses an
    opening in its own words: here the opening is checked before uvicorn takes the connection over, and a refused client
    gets the error's document.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        turns: Turns,
        gone: Callable[[], None],
        extensions: Sequence[ServerExtensionFactory] = (),
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self.conn.available_extensions = extensions
        self.conn.reader = _Frames()
        self.conn.parser = self.conn.parse()  # a new parser, because the first one reads from the old reader
        next(self.conn.parser)
        self._fragments = bytearray()
        self._turns = turns
        self._gone = gone

    def read(self, opening: bytes) -> Request:
        """Parses ``opening``, a whole request for a WebSocket.

        Raises:
            Refused: the opening is not valid.
        """
        self.conn.receive_data(opening)
        status = 400
        for event in self.conn.events_received():
            if isinstance(event, Request):
                status = self.conn.accept(event).status_code
                if status == 101:
                    event.path = origin_form(event.path.encode()).decode()
                    return event
        wrong = self.conn.handshake_exc
        reason = wrong.__cause__ if isinstance(wrong, InvalidMessage) else wrong
        message = f"this is not a WebSocket handshake: {reason}"
        if isinstance(wrong, SecurityError):
            raise Refused(HeaderTooLarge(message))
        if isinstance(wrong, InvalidHeaderValue) and wrong.name == "Sec-WebSocket-Version":
            message, status = f"{message}, expected 13", 426
        raise Refused(ProtocolError(message), status)

    def begin(self, transport: asyncio.Transport, request: Request, early: bytes) -> None:
        """Takes over a connection.

        Args:
            transport: transport of the connection.
            request: the opening, as parsed by `read`.
            early: data that came after the opening.
        """
        self.conn.reader.feed_data(early)
        self.connection_made(transport)
        transport.pause_reading()
        self.handle_connect(request)

    def data_received(self, data: bytes) -> None:
        """Stores the data, and decodes one frame."""
        if self.transport.is_closing():
            return
        if self._may_decode():
            self._decode(data)
        else:
            self.conn.reader.feed_data(data)
            self.transport.pause_reading()

    def more(self) -> None:
        """Decodes one frame if possible."""
        if self._may_decode():
            self._decode(b"")

    def _may_decode(self) -> bool:
        """Whether the session has taken all messages, and the client reads what it gets."""
        return self.handshake_complete and not self.read_paused and self.writable.is_set()

    def _decode(self, data: bytes) -> None:
        buffer = self.conn.reader.buffer
        size = len(buffer) + len(data)
        try:
            super().data_received(data)
        except Exception as error:
            logger.info("a WebSocket connection was dropped: %s: %s", type(error).__name__, error)
            self.transport.abort()
        if self.read_paused or self.transport.is_closing():
            return  # `receive` continues
        if 0 < len(buffer) < size:
            self.transport.pause_reading()
            self._turns.wait(self)
        else:  # no whole frame is left
            self.transport.resume_reading()

    def handle_cont(self, event: Frame) -> None:
        self._fragments += event.data  # joined at once: a list of empty fragments would have no bound
        if event.fin:
            self.frames.append(bytes(self._fragments))
            self._fragments = bytearray()
            self.send_receive_event_to_app()

    async def receive(self) -> ASGIReceiveEvent:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self.conn.reader.buffer:
                self._turns.wait(self)
            else:
                self.transport.resume_reading()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        opening = not self.handshake_complete
        await super().send(message)
        if self.close_sent or (opening and self.handshake_complete):
            self._turns.wait(self)  # to decode the reply to a close, or data from before the handshake was complete

    def resume_writing(self) -> None:
        super().resume_writing()
        self._turns.wait(self)

    def shutdown(self) -> None:
        if not self.handshake_complete:
            self._refuse(ServiceFull("this replica is ending: connect again"))
        super().shutdown()

    def send_500_response(self) -> None:
        if not self.handshake_complete:
            self._refuse(BrayxError("the reply to a handshake could not be sent"))

    def _refuse(self, error: BrayxError) -> None:
        if not self.transport.is_closing():
            retry = isinstance(error, Overloaded)
            self.transport.write(response(error.http_status, error.to_wire(), CLOSE, retry=retry))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._gone()
