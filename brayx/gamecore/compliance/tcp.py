"""Tests of the TCP door, by bare frames."""

from __future__ import annotations

import json
import socket
import struct
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from brayx.gamecore.compliance.base import Door, Doors
from brayx.gamecore.tcp import REQUEST_HEAD, ReplyReader
from brayx.gamecore.transports.base import MAX_REPLY_BYTES, Endpoint


class TcpTests(Doors):
    """The tests named ``test_tcp_*``."""

    def test_tcp_frames_are_these_bytes(self, door: Door) -> None:
        session = uuid.uuid4().hex.encode()
        with self.tcp() as peer:
            for kind, body, time_ in ((b"start", b"hello", 7), (b"tick", b"\x00\xff", 8), (b"stop", b"", 2**63 - 1)):
                head = struct.pack(">6q", len(session), len(kind), 0, 0, len(body), time_)
                peer.sock.sendall(head + session + kind + body)
                got_session, got_body, got_time = peer.receive()
                assert (got_session, got_time) == (session, time_)
                assert kind != b"tick" or got_body == body

    def test_tcp_frame_in_pieces(self, door: Door) -> None:
        with self.tcp() as peer:
            for byte in _frame("", "", b"piecemeal", 5):
                peer.sock.sendall(bytes([byte]))
            assert peer.receive() == (b"", b"piecemeal", 5)

    def test_tcp_several_sessions_on_one_connection(self, door: Door) -> None:
        sessions = [uuid.uuid4().hex for _ in range(8)]
        with self.tcp() as peer:
            peer.send(*(("start", session, b"", time_) for time_, session in enumerate(sessions)))
            assert {peer.receive()[::2] for _ in sessions} == {(s.encode(), index) for index, s in enumerate(sessions)}
            times = {
                100 * (number + 1) + index: (session, f"{session} {number}".encode())
                for number in range(5)
                for index, session in enumerate(sessions)
            }
            peer.send(*(("tick", session, body, time_) for time_, (session, body) in times.items()))
            came: dict[str, list[int]] = defaultdict(list)
            for _ in times:
                session_bytes, body, time_ = peer.receive()
                assert (session_bytes.decode(), body) == times[time_], "a reply belongs to the request of its time"
                came[session_bytes.decode()].append(time_)
            for session in sessions:
                assert came[session] == sorted(came[session]), "replies of a session come in order"
            peer.send(*(("stop", session, b"", time_) for time_, session in enumerate(sessions)))
            assert all(peer.receive()[2] >= 0 for _ in sessions)

    def test_tcp_session_survives_its_connection(self, door: Door) -> None:
        session = uuid.uuid4().hex
        for kind, body in (("start", b""), ("tick", b"a"), ("tick", b"b"), ("stop", b"")):
            with self.tcp() as peer:
                _, reply, time_ = peer.ask((kind, session, body, 3))
                assert time_ == 3
                assert kind != "tick" or reply == body

    def test_tcp_an_error_has_the_complement_of_the_requests_time(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.tcp() as peer:
            peer.send(("tick", session, b"", 41), ("stop", session, b"", 2**63 - 1))
            for time_ in (~41, -(2**63)):
                got_session, body, got_time = peer.receive()
                assert (got_session, got_time) == (session.encode(), time_)
                document = json.loads(body)
                assert document["error"] == "session_unknown"
                assert isinstance(document["message"], str)
                assert isinstance(document["details"], dict)

    def test_tcp_bad_fields_are_refused_and_the_connection_goes_on(self, door: Door) -> None:
        with self.tcp() as peer:
            for kind, session in (
                ("jump", "s"),
                ("start", ""),
                ("start", "with space"),
                ("start", "caf\xe9"),
                ("tick#", "s"),
                ("tick#x", "s"),
                ("tick#-1", "s"),
                (f"tick#{2**63}", "s"),
            ):
                _, body, time_ = peer.ask((kind, session, b"", 9))
                assert (time_, json.loads(body)["error"]) == (~9, "bad_request"), (kind, session)
            assert peer.ask(("", "", b"still here", 10)) == (b"", b"still here", 10)

    def test_tcp_body_above_the_limit_is_refused_and_the_connection_goes_on(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.tcp() as peer:
            peer.ask(("start", session, b"", 1))
            _, body, time_ = peer.ask(
                ("tick", session, bytes(self.max_body_bytes + 1), 2), ("tick", session, b"small", 3)
            )
            assert (time_, json.loads(body)["error"]) == (~2, "body_too_large")
            assert peer.receive() == (session.encode(), b"small", 3)
            assert peer.ask(("stop", session, b"", 4))[2] == 4

    def test_tcp_malformed_frame_ends_that_connection_only(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.tcp() as other:
            other.ask(("start", session, b"", 1))
            for bad in (
                REQUEST_HEAD.pack(-1, 0, 0, 0, 0, 1),
                REQUEST_HEAD.pack(2**40, 0, 0, 0, 0, 1),
                REQUEST_HEAD.pack(1, 4, 0, 0, 2**62, 1),
                REQUEST_HEAD.pack(1, 4, 0, 0, 0, -5),
                b"POST /step HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n",
                b"\xff" * 4096,
            ):
                with self.tcp() as peer:
                    peer.sock.sendall(bad)
                    peer.ends_with_errors()
                assert other.ask(("tick", session, b"fine", 2)) == (session.encode(), b"fine", 2)
            other.ask(("stop", session, b"", 3))

    def test_tcp_a_truncated_frame_leaves_other_connections_alone(self, door: Door) -> None:
        with self.client("tcp") as client:
            client.start()
            whole = _frame("tick", str(client.session), b"never whole", 1)
            for cut in (1, 47, 48, len(whole) - 1):
                with self.tcp() as peer:
                    peer.sock.sendall(whole[:cut])
                assert client.tick(b"fine") == b"fine"

    @contextmanager
    def tcp(self) -> Iterator[TcpPeer]:
        """A bare connection to the TCP door."""
        endpoint = Endpoint.parse(self.url_of("tcp"))
        with socket.create_connection((endpoint.host, endpoint.port), timeout=self.timeout_s) as sock:
            yield TcpPeer(sock)


class TcpPeer:
    """One connection to a TCP door, request by request and reply by reply."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = ReplyReader(MAX_REPLY_BYTES)
        self._replies: list[tuple[bytes, bytes, int]] = []

    def send(self, *requests: tuple[str, str, bytes, int]) -> None:
        """Send frames of ``(step_kind, session, body, time)``, all at once."""
        self.sock.sendall(b"".join(_frame(*request) for request in requests))

    def receive(self) -> tuple[bytes, bytes, int]:
        """The next reply, which must arrive in time: session, body, time."""
        while not self._replies:
            assert self._read(), "expected a reply, the connection was closed"
        return self._replies.pop(0)

    def ask(self, *requests: tuple[str, str, bytes, int]) -> tuple[bytes, bytes, int]:
        """As `send`; returns the next reply."""
        self.send(*requests)
        return self.receive()

    def ends_with_errors(self) -> None:
        """Asserts that the connection is closed, with only errors before that."""
        try:
            while self._read():
                pass
        except ConnectionError:
            pass  # a reset is a close
        for _, body, time_ in self._replies:
            assert (time_ < 0, json.loads(body)["error"]) == (True, "bad_request")

    def _read(self) -> bool:
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            raise AssertionError("expected a reply or a close, nothing came in time") from None
        self._replies += self._reader.feed(data)
        return bool(data)


def _frame(kind: str, session: str, body: bytes, time_: int) -> bytes:
    fields = (session.encode("latin-1"), kind.encode("latin-1"), b"", b"", body)
    return REQUEST_HEAD.pack(*map(len, fields), time_) + b"".join(fields)
