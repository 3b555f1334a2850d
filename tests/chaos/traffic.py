"""Nearly valid traffic: streams of bytes built from parts of real traffic, then damaged; and the allowed replies.

`storm` sends them to the doors of a `tests.chaos.target.Target` and checks every reply against the protocol.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httptools

from brayx.errors import TransportError, from_wire
from brayx.gamecore.protocol import WS_SUBPROTOCOL, StepKind, StepRequest, encode_numbered
from brayx.gamecore.tcp import REQUEST_HEAD, MalformedFrame, ReplyReader, encode_request
from tests.chaos.target import MAX_BODY_BYTES, WAIT_S, Door, Target

POOL = 64
"""Sessions that all hostile connections share, so that they collide."""
_QUIET_S = 0.1
_SLOW_S = 2.0
"""A busy service may take this long to answer a valid request."""


_LENGTHS = (-1, 0, 1, 7, 255, 256, 257, 65535, MAX_BODY_BYTES, MAX_BODY_BYTES + 1, 2**31, 2**62, 2**63 - 1, -(2**63))
_KINDS = (
    "tick",
    "start",
    "stop",
    "",
    "auto",
    "tick#0",
    "tick#1",
    "tick#2",
    "tick#",
    "start#1",
    "TICK",
    "\xff",
    "x" * 257,
)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """``data`` with a few of its bytes flipped, overwritten, left out, repeated, moved or cut off."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not data:
            return data
        start, size = rng.randrange(len(data)), rng.choice((1, 1, 2, 8, 50))
        match rng.randrange(7):
            case 0:
                data = data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
            case 1:
                data = data[:start] + rng.randbytes(size) + data[start + size :]
            case 2:
                data = data[:start] + data[start + size :]
            case 3:
                data = data[:start] + data[start : start + size] * rng.choice((2, 3, 20)) + data[start + size :]
            case 4:
                data = data[:start] + rng.randbytes(size) + data[start:]
            case 5:
                data = data[start:] + data[:start]
            case 6:
                data = data[:start]
    return data


def _body(rng: random.Random) -> bytes:
    size = rng.choice((0, 1, 8, 9, 32, 256)) if rng.random() < 0.995 else rng.choice((5000, MAX_BODY_BYTES + 1))
    return rng.randbytes(size)


def _session(rng: random.Random, wild: bool) -> str:
    if not wild or rng.random() < 0.9:
        return f"f{rng.randrange(POOL)}"
    return rng.choice(("", " ", "é", "a b", "x" * 256, "\x00", "\r\n", "'; --", "/../", "%00"))


# Each kind of traffic is either tame, and at most refused, or wild, and may end its connection.


def tcp_frame(rng: random.Random, wild: bool) -> bytes:
    """A request of the TCP framing."""
    if not wild or rng.random() < 0.5:
        kind = rng.choice((StepKind.START, StepKind.TICK, StepKind.TICK, StepKind.STOP, StepKind.CALL))
        seq = rng.choice((None, None, 0, 1, 2, 2**63 - 1)) if kind is StepKind.TICK else None
        request = StepRequest(kind, f"f{rng.randrange(POOL)}", _body(rng), seq=seq)
        return encode_request(request, rng.randrange(2**63))
    fields = [_session(rng, wild), rng.choice(_KINDS), rng.choice(("", "key", "\x7f")), rng.choice(("", "token"))]
    parts = [*(text.encode("latin-1", "replace") for text in fields), _body(rng)]
    head = [len(part) for part in parts] + [rng.choice((0, 1, 2**63 - 1, -1, rng.randrange(2**63)))]
    if rng.random() < 0.05:
        head[rng.randrange(6)] = rng.choice(_LENGTHS)
    return REQUEST_HEAD.pack(*head) + b"".join(parts)


def http_request(rng: random.Random, wild: bool) -> bytes:
    """An HTTP request."""
    method = rng.choice(("POST",) * 12 + ("GET", "PUT", "OPTIONS") + ("post", "BREW") * wild)
    paths = ("/", "/session", "/-/peer/step", "/step?x=1", "//step", "/st%65p", *(("*", "/é") if wild else ()))
    path = rng.choice(("/step",) * 12 + paths)
    version = rng.choice(("HTTP/1.1",) * 15 + ("HTTP/1.0", "HTTP/2.0", "HTTP/1.2") * wild)
    headers = [("host", "x")]
    if rng.random() < 0.9:
        headers.append(("session", _session(rng, wild)))
    if rng.random() < 0.9:
        headers.append(("step_kind", rng.choice(("tick", "tick", "start", "stop", "", "auto", "x", "Tick"))))
    if rng.random() < 0.3:
        headers.append(("seq", rng.choice(("0", "1", "2", "-1", "", "²", "9" * 19, "9" * 400, "1_0", " 1"))))
    if wild and rng.random() < 0.2:
        odd = [
            ("expect", "100-continue"), ("upgrade", "websocket"), ("connection", "upgrade"), ("connection", "close"),
            ("x", "y" * 5000), ("X" * 300, "é"), ("content-length", "7"), ("transfer-encoding", "gzip, chunked"),
            ("key", "k"), ("token", "\xff"), ("cookie", "a=" + "b" * 900), ("x:y", "z"), ("", "nothing"), ("tab", "\t"),
        ]  # fmt: skip
        headers += rng.sample(odd, rng.randrange(1, 4))
    rng.shuffle(headers)
    body = _body(rng)
    if rng.random() < 0.15:
        pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        headers.append(("transfer-encoding", "chunked"))
    else:
        size = len(body) if not wild or rng.random() < 0.9 else rng.choice(_LENGTHS)
        headers.append(("content-length", str(size)))
    lines = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + body


def ws_handshake(rng: random.Random) -> bytes:
    """The opening of a WebSocket connection: mostly a right one."""
    session = f"f{rng.randrange(POOL)}" if rng.random() < 0.3 else ""
    key = base64.b64encode(rng.randbytes(16)).decode()
    lines = [
        f"GET /session{rng.choice(('', f'?session={session}', '?session=%ff', '?key=k&time=1'))} HTTP/1.1",
        "host: x", "upgrade: websocket", "connection: Upgrade",
        f"sec-websocket-key: {key}", "sec-websocket-version: 13",
    ]  # fmt: skip
    if rng.random() < 0.7:
        lines.append(
            f"sec-websocket-protocol: {rng.choice((WS_SUBPROTOCOL, WS_SUBPROTOCOL, 'other, ' + WS_SUBPROTOCOL))}"
        )
    if session:
        lines.append(f"session: {session}")
    if rng.random() < 0.2:
        lines.append("sec-websocket-extensions: permessage-deflate; client_max_window_bits")
    if rng.random() < 0.05:
        lines += rng.sample(("x: " + "y" * 9000, *(f"h{i}: v" for i in range(200)), "content-length: 3", "é: é"), 150)
    if rng.random() < 0.05:
        del lines[rng.randrange(len(lines))]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def ws_frame(
    opcode: int, payload: bytes, *, fin: bool = True, mask: bytes | None = b"\x01\x02\x03\x04", reserved: int = 0
) -> bytes:
    """A frame as a client sends it."""
    size = len(payload)
    flag = 0x80 if mask is not None else 0
    head = bytes([(0x80 if fin else 0) | reserved << 4 | opcode])
    if size < 126:
        head += bytes([flag | size])
    elif size < 65536:
        head += bytes([flag | 126]) + struct.pack(">H", size)
    else:
        head += bytes([flag | 127]) + struct.pack(">Q", size)
    if mask is None:
        return head + payload
    key = int.from_bytes(mask * (size // 4 + 1), "big") >> (8 * (4 - size % 4))
    return head + mask + (int.from_bytes(payload, "big") ^ key).to_bytes(size, "big")


def ws_message(rng: random.Random, wild: bool) -> bytes:
    """One or a few frames of a WebSocket client."""
    mask = rng.randbytes(4)
    body = rng.choice((b"T",) * 12 + (b"S",) + (b"P", b"R", b"") * wild) + _body(rng)[: MAX_BODY_BYTES - 1]
    if rng.random() < 0.3:
        body = encode_numbered(rng.choice((0, 1, 2, 3, 2**63 - 1)), body)[: rng.choice((5, 8, 9, 100, 1000))]
    dice = rng.random() * (1.0 if wild else 0.93)
    if dice < 0.75:
        return ws_frame(2, body, mask=mask)
    if dice < 0.85:
        return ws_frame(1, body.hex().encode(), mask=mask)
    if dice < 0.90:
        cut = rng.randrange(len(body) + 1)
        between = ws_frame(9, b"ping", mask=mask) if rng.random() < 0.5 else b""
        return ws_frame(2, body[:cut], fin=False, mask=mask) + between + ws_frame(0, body[cut:], mask=mask)
    if dice < 0.93:
        return ws_frame(rng.choice((9, 10)), body[:125], mask=mask)
    if dice < 0.95:
        return ws_frame(
            8, rng.choice((b"", struct.pack(">H", rng.choice((1000, 1001, 1005, 4000, 99))), body[:100])), mask=mask
        )
    if dice < 0.97:
        return ws_frame(1, body, mask=mask)  # hardly ever UTF-8
    return ws_frame(rng.randrange(16), body, fin=rng.random() < 0.5, mask=mask, reserved=rng.choice((0, 4, 7)))


def grpc_message(rng: random.Random, wild: bool) -> bytes:
    """A ``StepRequest`` message."""
    from brayx.gamecore.v1 import gamecore_pb2 as pb

    session = _session(rng, wild)
    message = pb.StepRequest(session=session, kind=rng.choice((0, 1, 2, 2, 3, 9)), body=_body(rng))
    if rng.random() < 0.4:
        message.seq = rng.choice((0, 1, 2, 2**64 - 1))
    return bytes(message.SerializeToString())


# What comes back


class Replies(Protocol):
    """Reads a connection's replies; anything outside the protocol is an `AssertionError`."""

    count: int

    def feed(self, data: bytes) -> None: ...


def check_error(document: bytes) -> None:
    """Checks an error document of the service, which must not report a fault of its own."""
    error = from_wire(document)
    assert not isinstance(error, TransportError), f"no error document: {document[:200]!r}"
    assert error.code not in ("internal", "agent_error"), f"the service failed: {document[:300]!r}"


class TcpReplies:
    """Replies of the TCP framing."""

    def __init__(self) -> None:
        self.count = 0
        self._reader = ReplyReader(2 * MAX_BODY_BYTES)

    def feed(self, data: bytes) -> None:
        try:
            for _, body, time in self._reader.feed(data):
                self.count += 1
                if time < 0:
                    # Of a request with a negative time nothing comes back but the end of the connection.
                    check_error(body)
        except MalformedFrame as error:
            raise AssertionError(f"what came is no reply: {error}") from None


_STATUSES = (100, 200, 400, 404, 405, 408, 409, 410, 413, 426, 431, 503)


_OF_UVICORN = (b"Invalid HTTP request received.", b"Failed to open a WebSocket connection")
"""Its own answers to requests that never reach the ASGI application."""


class HttpReplies:
    """HTTP responses; after an upgrade, WebSocket frames."""

    def __init__(self) -> None:
        self.count = 0
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._frames: WsFrames | None = None

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        assert status in _STATUSES, f"status {status}: {self._body[:200]!r}"
        if status >= 400 and not self._body.startswith(_OF_UVICORN):
            check_error(self._body)
        self._body = b""
        self.count += status != 100

    def feed(self, data: bytes) -> None:
        if self._frames is not None:
            self._frames.feed(data)
            self.count = self._frames.count
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._frames = WsFrames()
            self.feed(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise AssertionError(f"what came is no HTTP response: {error}: {data[:200]!r}") from None


class WsReplies(HttpReplies):
    """What comes after a WebSocket's opening, the answer to which may be any."""

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        assert status in (*_STATUSES, 101, 403), f"status {status}: {self._body[:200]!r}"
        self._body = b""


class WsFrames:
    """Frames of a server."""

    def __init__(self) -> None:
        self.count = 0
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 2:
            opcode, size, start = self._buffer[0] & 0x0F, self._buffer[1], 2
            assert opcode in (0, 1, 2, 8, 9, 10), f"no frame of a server: {self._buffer[:20]!r}"
            assert size < 128, f"a masked frame from the server: {self._buffer[:20]!r}"
            if size >= 126:
                start = 4 if size == 126 else 10
                size = int.from_bytes(self._buffer[2:start], "big")
                assert size <= 2 * MAX_BODY_BYTES, f"a frame of {size} bytes"
            if len(self._buffer) < start + size:
                return
            payload, self._buffer = self._buffer[start : start + size], self._buffer[start + size :]
            if opcode == 8 and payload:
                code = int.from_bytes(payload[:2], "big")  # from 3000: ours, or the client's own come back
                assert code in (1000, 1001, 1002, 1003, 1007, 1009, 1012) or code in range(
                    3000, 5000
                ), (  # those above are ours, or the client's own come back
                    f"closed with {code}"
                )
            self.count += opcode in (1, 2)


@dataclass(frozen=True)
class Traffic:
    """The frames for a door, and the reader of its replies."""

    frame: Callable[[random.Random, bool], bytes]
    replies: Callable[[], Replies]
    opening: Callable[[random.Random], bytes] = field(default=lambda rng: b"")
    lengths: tuple[int, ...] = (1, 4, 16, 64)
    """Frames of one connection."""


TRAFFIC: dict[Door, Traffic] = {
    "tcp": Traffic(tcp_frame, TcpReplies, lengths=(1, 4, 256, 1024)),
    "http": Traffic(http_request, HttpReplies),
    "asgi http": Traffic(http_request, HttpReplies, lengths=(1, 4, 16)),
    "ws": Traffic(ws_message, WsReplies, ws_handshake),
    "asgi ws": Traffic(ws_message, WsReplies, ws_handshake),
}


# The storm


@dataclass
class Tally:
    """The result of a storm.

    Attributes:
        sent: number of frames, by door.
        answered: number of replies, by door.
        wrong: replies that are not allowed.
    """

    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def storm(target: Target, frames: dict[Door, int], seed: int, tally: Tally, connections: int = 12) -> None:
    """Sends a number of frames to all doors concurrently, over several connections to each."""
    async with asyncio.TaskGroup() as group:
        for door, count in frames.items():
            goal = tally.sent[door] + count
            if door == "grpc":
                group.create_task(_grpc_storm(target.address(door), goal, random.Random(f"{seed} {door}"), tally))
                continue
            rng = random.Random(f"{seed} {door}")
            corpora = [[TRAFFIC[door].frame(rng, wild) for _ in range(min(count, 2000))] for wild in (False, True)]
            for number in range(connections):
                rng = random.Random(f"{seed} {door} {number}")
                group.create_task(_hostile(door, target.address(door), corpora, goal, rng, tally))


async def _hostile(
    door: Door, address: tuple[str, int], corpora: list[list[bytes]], goal: int, rng: random.Random, tally: Tally
) -> None:
    """One connection after the other."""
    traffic = TRAFFIC[door]
    while tally.sent[door] < goal and not tally.wrong:
        count = rng.choice(traffic.lengths)
        wild = rng.random() < 0.4
        data = b"".join(rng.choices(corpora[wild], k=count))
        opening = traffic.opening(rng)
        if opening and rng.random() < 0.9:
            data = ws_frame(2, b"S") + data
        answered = not wild and not opening  # each frame, unless it is damaged
        if rng.random() < (0.5 if wild else 0.1):
            data, answered = damaged(data, rng), False
        if opening and rng.random() < 0.1:
            opening = damaged(opening, rng)
        replies = traffic.replies()
        tally.sent[door] += count
        try:
            # uvicorn by itself drops all data that arrives before it answers the opening.
            hasty = door != "asgi ws" and rng.random() < 0.3
            await _exchange(address, opening, data, count, replies, rng, hasty=hasty, answered=answered)
        except OSError:
            pass  # it was closed while it was written to
        except AssertionError as error:
            tally.wrong.append(f"{door}: {error}; sent {(opening + data)[:2000]!r}")
        tally.answered[door] += replies.count


async def _exchange(
    address: tuple[str, int],
    opening: bytes,
    data: bytes,
    count: int,
    replies: Replies,
    rng: random.Random,
    *,
    hasty: bool = False,
    answered: bool = False,
) -> None:
    """Sends a stream in pieces and reads what comes; then leaves in one way or another.

    Args:
        address, opening, data, count, replies, rng: the stream, and what it is read with.
        hasty: without waiting for the answer to the opening.
        answered: all ``count`` frames get replies.
    """
    reader, writer = await asyncio.open_connection(*address)
    received = 0

    async def receive() -> None:
        nonlocal received
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                received += 1
                replies.feed(piece)

    receiving = asyncio.create_task(receive())
    try:
        if opening:
            writer.write(opening)
            patience_s = 0.0 if hasty else 5 * _QUIET_S
            while not received and patience_s > 0 and not receiving.done():
                await asyncio.wait((receiving,), timeout=_QUIET_S / 20)
                patience_s -= _QUIET_S / 20
        most = rng.choice((1 << 20,) * 8 + (1500, max(7, len(data) // 100)))
        sent = 0
        while sent < len(data) and not receiving.done():
            size = rng.randint(1, most)
            writer.write(data[sent : sent + size])
            sent += size
            if most > 4096 or rng.random() < 0.02:
                await asyncio.wait_for(writer.drain(), WAIT_S)
                await asyncio.sleep(0)
        patience = rng.random()
        while patience > 0.1 and replies.count < count:
            before = received
            deadline = time.monotonic() + (_SLOW_S if answered else _QUIET_S)
            while received == before and not receiving.done() and time.monotonic() < deadline:
                await asyncio.wait((receiving,), timeout=_QUIET_S)
            if receiving.done() or received == before:
                break
        if patience > 0.9 and not receiving.done():
            writer.write_eof()
            await asyncio.wait((receiving,), timeout=_QUIET_S)
        if receiving.done():
            receiving.result()
    finally:
        receiving.cancel()
        if rng.random() < 0.3:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), WAIT_S)
        await asyncio.wait((receiving,))


async def _grpc_storm(address: tuple[str, int], goal: int, rng: random.Random, tally: Tally) -> None:
    import grpc

    corpus = [grpc_message(rng, wild) for wild in (False, True) for _ in range(500)]

    async def unary(step: Any) -> None:
        with contextlib.suppress(grpc.RpcError):
            await step(_message(), timeout=WAIT_S)
            tally.answered["grpc"] += 1

    async def stream(play: Any) -> None:
        with contextlib.suppress(grpc.RpcError):
            async for _ in play(iter([_message() for _ in range(rng.randrange(1, 8))]), timeout=WAIT_S):
                tally.answered["grpc"] += 1

    def _message() -> bytes:
        tally.sent["grpc"] += 1
        message = rng.choice(corpus)
        return damaged(message, rng) if rng.random() < 0.4 else message

    while tally.sent["grpc"] < goal and not tally.wrong:
        async with grpc.aio.insecure_channel(f"{address[0]}:{address[1]}") as channel:
            step = channel.unary_unary("/brayx.gamecore.v1.Gamecore/Step")
            play = channel.stream_stream("/brayx.gamecore.v1.Gamecore/Play")
            for _ in range(20):
                await asyncio.gather(*(unary(step) for _ in range(10)), *(stream(play) for _ in range(3)))
        # What is no gRPC at all.
        data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(rng.randrange(200))
        with contextlib.suppress(OSError):
            await _exchange(address, b"", damaged(data, rng), 1, _Anything(), rng)


class _Anything:
    count = 0

    def feed(self, data: bytes) -> None:
        pass
