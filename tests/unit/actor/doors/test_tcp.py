"""TCP connections of the native port: many sessions each, and frames that come in pieces."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid

from brayx.actor.config import SessionConfig
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.tcp import ReplyReader, encode_request
from tests.clocks import Clock
from tests.unit.actor.doors.native_doors import (
    MAX_BODY_BYTES,
    WAIT_S,
    Native,
    connect,
    native,
)


def test_a_connection_whose_reads_all_end_in_mid_frame_is_not_stalled(seconds: Clock) -> None:
    frames = [encode_request(StepRequest(StepKind.CALL, "", b"x" * 100), time_) for time_ in range(20)]
    with native(stall_s=0.2) as service, connect(service.tcp) as busy:
        reader, got, unsent = ReplyReader(MAX_BODY_BYTES), 0, b""
        for number, frame in enumerate([*frames, b""]):
            busy.sendall(unsent + frame[:60])
            unsent = frame[60:]
            while got < number:  # so the next frame's first bytes have been read
                for _, body, _ in reader.feed(busy.recv(65536)):
                    assert body == b"x" * 100
                    got += 1
            seconds.now += 0.15
            time.sleep(0.02)  # for the door to look


def test_a_connection_is_not_stalled_while_a_running_tick_delays_its_next_frame(seconds: Clock) -> None:
    large = encode_request(StepRequest(StepKind.CALL, "", bytes(1024 * 1024)), 9)
    with native(stall_s=0.2, max_in_flight=1) as service, connect(service.tcp) as busy:
        service.table._services.config = SessionConfig(tick_timeout_s=1.0)
        session = StepRequest(StepKind.START, "busy", b"")
        busy.sendall(encode_request(session, 1))
        reader, got = ReplyReader(MAX_BODY_BYTES), []
        while not got:
            got += reader.feed(busy.recv(65536))
        busy.sendall(encode_request(session._replace(kind=StepKind.TICK, body=b"slow"), 2) + large[:100])
        sending = threading.Thread(target=busy.sendall, args=(large[100:],))
        sending.start()
        busy.settimeout(0.02)
        while len(got) < 2:
            with contextlib.suppress(TimeoutError):
                got += reader.feed(busy.recv(65536))
                continue
            seconds.now += 0.05  # a larger step is forgiven, as that of a process that was suspended
        busy.settimeout(WAIT_S)
        while len(got) < 3:
            got += reader.feed(busy.recv(65536))
        sending.join(WAIT_S)
        assert [time_ for _, _, time_ in got] == [1, ~2, 9], "the late tick gets an error, the frame after it a reply"


def test_a_tcp_connection_carries_many_sessions_and_slow_ones_hold_up_no_others(service: Native) -> None:
    names = [uuid.uuid4().hex for _ in range(4)]
    with connect(service.tcp) as connection:
        for time_, name in enumerate(names):
            connection.sendall(encode_request(StepRequest(StepKind.START, name, b""), time_))
        reader, got = ReplyReader(MAX_BODY_BYTES), []
        while len(got) < len(names):
            got += reader.feed(connection.recv(65536))
        connection.sendall(encode_request(StepRequest(StepKind.TICK, names[0], b"slow"), 10))
        ticks = [encode_request(StepRequest(StepKind.TICK, name, b"x"), 11) for name in names[1:]]
        connection.sendall(b"".join(ticks))
        got.clear()
        while len(got) < 3:
            got += reader.feed(connection.recv(65536))
        assert sorted(session.decode() for session, _, _ in got) == sorted(names[1:])
        assert {(body, time_) for _, body, time_ in got} == {(b"x", 11)}
