"""The compliance suite over the echo server of these tests: both must agree on the protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from brayx.errors import BrayxError
from brayx.gamecore.compliance import Door, DoorCompliance
from brayx.gamecore.protocol import StepKind, StepRequest
from tests.unit.gamecore.echo_server import MAX_BODY_BYTES, EchoApp, serving, serving_tcp


class TestEchoServer(DoorCompliance):
    doors = ("http", "ws", "tcp")
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls) -> Iterator[None]:
        app = EchoApp()
        with serving(app) as address, serving_tcp(app.answered) as tcp_address:
            cls.url = f"http://{address}"
            cls.urls = {"tcp": f"tcp://{tcp_address}"}
            yield


class TestBelowAPath(DoorCompliance):
    doors = ("http", "ws")
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls) -> Iterator[None]:
        with serving(EchoApp(prefix="/games/one")) as address:
            cls.url = f"ws://{address}/games/one/"
            yield


def collected(suite: type[DoorCompliance]) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_") and getattr(suite, name) is not None}


def test_tests_of_doors_that_a_service_lacks_are_not_collected() -> None:
    class Tcp(DoorCompliance):
        doors = ("tcp",)

    class OnlyWs(DoorCompliance):
        doors = ("ws",)

    class AllTheSame(OnlyWs):
        doors = ("http", "ws", "tcp", "grpc")

    every = collected(DoorCompliance)
    assert collected(AllTheSame) == every
    assert {name.split("_")[1] for name in every - collected(Tcp)} == {"http", "ws", "grpc", "held"}
    assert {name.split("_")[1] for name in every - collected(OnlyWs)} == {"http", "tcp", "grpc", "stateless"}


class _MixesSessions(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        reply = super().step(request)
        if request.kind is StepKind.TICK:
            reply, self.kept = getattr(self, "kept", reply), reply
        return reply


class _RestartsSessions(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        if request.kind is StepKind.START:
            self.running.discard(request.session)
        return super().step(request)


class _ForgetsToFree(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        reply = super().step(request)
        if request.kind is StepKind.STOP:
            self.running.add(request.session)
        return reply


class _MakesSessionsUp(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        if request.kind is StepKind.TICK:
            self.running.add(request.session)
            self.hold(request.session, request.holder)
        return super().step(request)


class _KeepsOldConnections(EchoApp):
    def hold(self, session: str, holder: str) -> None:
        self.holders[session] = holder


class _TakesTicksOfAnyConnection(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        return super().step(request._replace(holder=""))


class _CutsAtZero(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        return super().step(request).partition(b"\x00")[0]


class _AppliesRepeats(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        if request.seq is not None and request.seq == self.kept.get(request.session, (-1, b""))[0]:
            return request.body
        return super().step(request)


class _TakesAnyNumber(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        return super().step(request._replace(seq=None))


class _CountsEveryTick(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        reply = super().step(request)
        if request.kind is StepKind.TICK and request.seq is None:
            self.kept[request.session] = (self.kept.get(request.session, (-1, b""))[0] + 1, reply)
        return reply


class _GoesOnCounting(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        previous = self.kept.get(request.session)
        reply = super().step(request)
        if previous is not None and request.kind is StepKind.START:
            self.kept[request.session] = previous
        return reply


@pytest.mark.parametrize(
    ("app", "test", "door"),
    [
        (_MixesSessions, "test_ticks_of_a_session_are_answered_in_order", "http"),
        (_MixesSessions, "test_sessions_interleaved_never_mix", "ws"),
        (_RestartsSessions, "test_start_of_a_running_session_is_refused_and_leaves_it_alone", "http"),
        (_RestartsSessions, "test_http_start_twice", "http"),
        (_RestartsSessions, "test_ws_same_session_twice_is_refused_and_closed", "ws"),
        (_ForgetsToFree, "test_id_is_free_after_stop", "http"),
        (_ForgetsToFree, "test_http_stop_twice_and_tick_after_stop", "http"),
        (_MakesSessionsUp, "test_http_tick_and_stop_without_start", "http"),
        (_MakesSessionsUp, "test_ws_envelope_tick_before_start", "ws"),
        (_KeepsOldConnections, "test_held_session_goes_on_after_another_takes_it_over", "http"),
        (_KeepsOldConnections, "test_held_session_goes_on_after_another_takes_it_over", "ws"),
        (
            _KeepsOldConnections,
            "test_held_session_is_untouched_by_an_old_connection_that_has_not_read_the_takeover",
            "http",
        ),
        (_TakesTicksOfAnyConnection, "test_ws_tick_without_a_number_touches_no_session_of_another_connection", "ws"),
        (_CutsAtZero, "test_body_of_all_byte_values", "ws"),
        (_CutsAtZero, "test_http_stateless_call", "http"),
        (_CutsAtZero, "test_tcp_frames_are_these_bytes", "tcp"),
        (_MixesSessions, "test_tcp_several_sessions_on_one_connection", "tcp"),
        (_MakesSessionsUp, "test_tcp_an_error_has_the_complement_of_the_requests_time", "tcp"),
        (_AppliesRepeats, "test_a_repeated_number_gets_the_kept_reply", "tcp"),
        (_AppliesRepeats, "test_an_empty_reply_is_kept_too", "ws"),
        (_AppliesRepeats, "test_ws_numbered_session_outlives_its_connection", "ws"),
        (_TakesAnyNumber, "test_a_number_out_of_sequence_is_refused_and_the_session_goes_on", "http"),
        (_CountsEveryTick, "test_ticks_without_a_number_do_not_touch_the_numbers", "tcp"),
        (_GoesOnCounting, "test_numbers_count_within_one_session", "tcp"),
    ],
)
def test_the_suite_finds_each_fault(app: type[EchoApp], test: str, door: Door) -> None:
    suite = DoorCompliance()
    suite.timeout_s = 2.0
    broken = app()
    with serving(broken) as address, serving_tcp(broken.answered) as tcp_address:
        suite.url = f"http://{address}"
        suite.urls = {"tcp": f"tcp://{tcp_address}"}
        with pytest.raises((AssertionError, BrayxError)):
            getattr(suite, test)(door)
