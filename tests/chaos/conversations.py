"""Whole conversations made up by hypothesis, and the one right answer to each of their requests.

An oracle of a dozen lines says what a session must answer; the doors must say the same, however their requests are cut
into pieces, sent ahead, repeated, or mixed with those of other sessions.
"""

from __future__ import annotations

import json
import random
import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import httptools
from hypothesis import strategies as st

from brayx.gamecore.protocol import MAX_SEQ, WS_SUBPROTOCOL, StepKind, StepRequest, encode_numbered, request_headers
from brayx.gamecore.tcp import ReplyReader, encode_request
from tests.chaos.target import MAX_BODY_BYTES, WAIT_S
from tests.chaos.traffic import ws_frame

START, TICK, STOP, CALL = StepKind.START, StepKind.TICK, StepKind.STOP, StepKind.CALL


@dataclass(frozen=True)
class Ask:
    """A request, with the session as a number that each run of the conversation gives a name of its own."""

    kind: StepKind
    session: int
    body: bytes
    seq: int | None


def bodies() -> st.SearchStrategy[bytes]:
    """Short ones, and those around the limit."""
    at_limit = st.sampled_from([MAX_BODY_BYTES - 9, MAX_BODY_BYTES, MAX_BODY_BYTES + 1]).map(bytes)
    return st.one_of(*[st.binary(max_size=40)] * 20, at_limit)


def asks(sessions: int) -> st.SearchStrategy[Ask]:
    """One request: mostly ticks, the first few numbers mostly."""
    kinds = st.sampled_from([START] * 3 + [TICK] * 12 + [STOP] + [CALL])
    seqs = st.one_of(st.none(), st.integers(0, 4), st.integers(0, 4), st.just(MAX_SEQ))
    made = st.builds(Ask, kinds, st.integers(0, sessions - 1), bodies(), seqs)
    return made.map(lambda ask: ask if ask.kind is TICK else Ask(ask.kind, ask.session, ask.body, None))


def conversations(sessions: int = 3) -> st.SearchStrategy[list[Ask]]:
    """Requests of several sessions in any order, all of which have been started once."""
    begun = [Ask(START, number, b"", None) for number in range(sessions)]
    return st.lists(asks(sessions), max_size=40).map(lambda more: begun + more)


def cuts() -> st.SearchStrategy[list[int]]:
    """Sizes of the pieces that a stream is sent in, over and over."""
    return st.lists(st.sampled_from([1, 2, 7, 47, 48, 49, 300, 1 << 20]), min_size=1, max_size=6)


class Oracle:
    """What sessions answer: the body that was asked, or an error's code."""

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[int, bytes | None]] = {}

    def answer(self, ask: Ask) -> bytes | str:
        if len(ask.body) > MAX_BODY_BYTES:
            return "body_too_large"
        session = self._sessions.get(ask.session)
        if ask.kind is CALL:
            return ask.body
        if ask.kind is START:
            if session is not None:
                return "session_exists"
            self._sessions[ask.session] = (0, None)
            return ask.body
        if session is None:
            return "session_unknown"
        if ask.kind is STOP:
            del self._sessions[ask.session]
            return ask.body
        expected, kept = session
        if ask.seq is None:
            return ask.body
        if ask.seq == expected - 1 and kept is not None:
            return kept
        if ask.seq != expected:
            return "out_of_sequence"
        self._sessions[ask.session] = (expected + 1, ask.body)
        return ask.body


def send(connection: socket.socket, data: bytes, sizes: list[int]) -> None:
    """Sends a stream in pieces; many small ones only at its beginning, since each costs a call."""
    at = 0
    for number in range(200):
        size = sizes[number % len(sizes)]
        connection.sendall(data[at : at + size])
        at += size
        if at >= len(data):
            return
    connection.sendall(data[at:])


def connect(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address, timeout=WAIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    assert data, "the connection was closed in a conversation that is in order"
    return data


def requests(talk: Iterable[Ask]) -> list[StepRequest]:
    """The requests of a conversation, whose sessions nobody else has."""
    name = uuid.uuid4().hex
    return [
        StepRequest(ask.kind, "" if ask.kind is CALL else f"{name}-{ask.session}", ask.body, seq=ask.seq)
        for ask in talk
    ]


def stops(made: list[StepRequest]) -> list[StepRequest]:
    """What ends the sessions of a conversation."""
    return [StepRequest(STOP, name, b"") for name in sorted({request.session for request in made} - {""})]


def talk_tcp(address: tuple[str, int], talk: list[Ask], sizes: list[int]) -> None:
    """Sends all requests ahead; each gets its answer, those of a session in their order."""
    stopped: set[int] = set()
    kept = []
    for ask in talk:
        if ask.kind is START and ask.session in stopped:
            continue  # sent ahead, it comes before the stop has ended its session: its answer is a matter of time
        if ask.kind is STOP:
            stopped.add(ask.session)
        kept.append(ask)
    oracle, reader = Oracle(), ReplyReader(2 * MAX_BODY_BYTES)
    expected = dict(enumerate(oracle.answer(ask) for ask in kept))
    made = requests(kept)
    got: dict[int, bytes | str] = {}
    order: dict[bytes, list[int]] = {}
    with connect(address) as connection:
        send(connection, b"".join(encode_request(request, number) for number, request in enumerate(made)), sizes)
        while len(got) < len(expected):
            for session, body, time in reader.feed(receive(connection)):
                number = time if time >= 0 else ~time
                assert number not in got, f"request {number} was answered twice"
                assert session.decode() == made[number].session
                got[number] = body if time >= 0 else str(json.loads(body)["error"])
                if time >= 0 and session:
                    order.setdefault(session, []).append(number)
        connection.sendall(b"".join(encode_request(stop, 0) for stop in stops(made)))
    assert got == expected
    assert all(numbers == sorted(numbers) for numbers in order.values()), "a session's replies changed places"


class _Responses:
    """Reads HTTP responses."""

    def __init__(self) -> None:
        self.got: list[bytes | str] = []
        self._body = b""
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        ok = self.parser.get_status_code() == 200
        self.got.append(self._body if ok else str(json.loads(self._body)["error"]))
        self._body = b""


def talk_http(address: tuple[str, int], talk: list[Ask], sizes: list[int], chunked: bool) -> None:
    """Sends all requests ahead; they are answered in their order."""
    oracle, responses = Oracle(), _Responses()
    expected = [oracle.answer(ask) for ask in talk]
    stream = b""
    made = requests(talk)
    last = stops(made)
    for request in made + last:
        headers = [f"{name}: {text}" for name, text in request_headers(request).items()]
        lines = ["POST /step HTTP/1.1", "host: x", *headers]
        body = request.body
        if chunked:
            lines.append("transfer-encoding: chunked")
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
        else:
            lines.append(f"content-length: {len(body)}")
        stream += "\r\n".join([*lines, "", ""]).encode() + body
    with connect(address) as connection:
        send(connection, stream, sizes)
        while len(responses.got) < len(made) + len(last):
            responses.parser.feed_data(receive(connection))
    assert responses.got[: len(made)] == expected


@dataclass(frozen=True)
class Message:
    """A message of a WebSocket client.

    Attributes:
        data: under the envelope.
        cut: where it is cut into two fragments; 0: it is not.
        ping: a ping comes before it, or between the two.
    """

    data: bytes
    cut: int
    ping: bool


def messages() -> st.SearchStrategy[Message]:
    """Envelopes of all kinds, the client's mostly."""
    ticks = bodies().map(lambda body: b"T" + body)
    numbered = st.builds(encode_numbered, st.integers(0, 4), bodies())
    short = st.binary(max_size=7).map(lambda body: b"N" + body)
    others = st.sampled_from([b"S", b"S", b"Sbody", b"P", b"R", b"E", b"", b"x", b"Sx"])
    data = st.one_of(ticks, ticks, numbered, numbered, numbered, short, others)
    return st.builds(Message, data, st.integers(0, 20), st.booleans())


class WsOracle:
    """What a connection under the envelope says, and whether it is open."""

    def __init__(self) -> None:
        self._sessions = Oracle()
        self.running = False
        self.closed = 0

    def answer(self, data: bytes) -> bytes | str:
        kind, body, seq = data[:1], data[1:], None
        if kind == b"N":
            if len(body) < 8 or body[0] & 0x80:
                return "bad_request"
            seq, body = int.from_bytes(body[:8], "big"), body[8:]
        if kind not in (b"S", b"T", b"N", b"P"):
            return "bad_request"
        if len(body) > MAX_BODY_BYTES:
            return "body_too_large"
        if kind == b"S" and self.running:
            return "session_error"
        answer = self._sessions.answer(Ask({b"S": START, b"P": STOP}.get(kind, TICK), 0, body, seq))
        if answer == "session_unknown":
            self.closed = 4404
        elif kind in (b"S", b"P"):
            self.running = kind == b"S"
        return answer


def talk_ws(address: tuple[str, int], talk: list[Message], sizes: list[int], *, wait: bool) -> None:
    """Sends all messages ahead, those of the opening with it unless it is to ``wait``; they are answered in order."""
    oracle = WsOracle()
    expected: list[bytes | str | int] = []
    stream = b""
    rng = random.Random(len(talk))
    for message in talk:
        mask = rng.randbytes(4)
        ping = ws_frame(9, b"?", mask=mask) if message.ping else b""
        if message.cut:
            data = message.data
            stream += ws_frame(2, data[: message.cut], fin=False, mask=mask) + ping
            stream += ws_frame(0, data[message.cut :], mask=mask)
        else:
            stream += ping + ws_frame(2, message.data, mask=mask)
        if not oracle.closed:
            expected.append(oracle.answer(message.data))
            if oracle.closed:
                expected.append(oracle.closed)
    lines = [
        "GET /session HTTP/1.1", "host: x", "upgrade: websocket", "connection: Upgrade", "sec-websocket-version: 13",
        "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==", f"sec-websocket-protocol: {WS_SUBPROTOCOL}",
        f"session: {uuid.uuid4().hex}",
    ]  # fmt: skip
    opening = "\r\n".join([*lines, "", ""]).encode()
    got: list[bytes | str | int] = []
    with connect(address) as connection:
        if wait:
            connection.sendall(opening)
            buffer = _past_opening(connection)
            send(connection, stream, sizes)
        else:
            send(connection, opening + stream, sizes)
            buffer = _past_opening(connection)
        while len(got) < len(expected):
            frame, buffer = _frame(buffer)
            if frame is None:
                buffer += receive(connection)
            elif frame[0] in (1, 2):
                kind, body = frame[1][:1], frame[1][1:]
                got.append(body if kind == b"R" else str(json.loads(body)["error"]))
            elif frame[0] == 8:
                got.append(int.from_bytes(frame[1][:2], "big"))
        if not oracle.closed:
            connection.sendall(ws_frame(8, (1000).to_bytes(2, "big")))
    assert got == expected


def _past_opening(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += receive(connection)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 "), head
    return rest


def _frame(buffer: bytes) -> tuple[tuple[int, bytes] | None, bytes]:
    """The first frame of a server, opcode and payload, if it is whole; and what comes after it."""
    if len(buffer) < 2:
        return None, buffer
    size, at = buffer[1], 2
    if size >= 126:
        at = 4 if size == 126 else 10
        size = int.from_bytes(buffer[2:at], "big")
    if len(buffer) < at + size:
        return None, buffer
    return (buffer[0] & 0x0F, buffer[at : at + size]), buffer[at + size :]
