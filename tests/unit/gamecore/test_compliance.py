"""The compliance suite over the echo server of these tests: both must agree on the protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from brayx.errors import BrayxError
from brayx.gamecore.compliance import Door, DoorCompliance
from brayx.gamecore.protocol import StepKind, StepRequest
from tests.unit.gamecore.echo_server import MAX_BODY_BYTES, EchoApp, serving


class TestEchoServer(DoorCompliance):
    doors = ("http", "ws")
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls) -> Iterator[None]:
        with serving(EchoApp()) as address:
            cls.url = f"http://{address}"
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
        return super().step(request)


class _CutsAtZero(EchoApp):
    def step(self, request: StepRequest) -> bytes:
        return super().step(request).partition(b"\x00")[0]


@pytest.mark.parametrize(
    ("app", "test", "door"),
    [
        (_MixesSessions, "test_ticks_of_a_session_are_answered_in_order", "http"),
        (_MixesSessions, "test_sessions_interleaved_never_mix", "ws"),
        (_RestartsSessions, "test_start_of_a_running_session_is_refused_and_leaves_it_alone", "http"),
        (_RestartsSessions, "test_http_start_twice", "http"),
        (_RestartsSessions, "test_ws_same_session_twice_is_told_and_closed", "ws"),
        (_ForgetsToFree, "test_id_is_free_after_stop", "http"),
        (_ForgetsToFree, "test_http_stop_twice_and_tick_after_stop", "http"),
        (_MakesSessionsUp, "test_http_tick_and_stop_without_start", "http"),
        (_MakesSessionsUp, "test_ws_envelope_tick_before_start", "ws"),
        (_CutsAtZero, "test_body_of_all_byte_values", "ws"),
        (_CutsAtZero, "test_http_stateless_call", "http"),
    ],
)
def test_the_suite_finds_what_is_wrong(app: type[EchoApp], test: str, door: Door) -> None:
    suite = DoorCompliance()
    suite.timeout_s = 2.0
    with serving(app()) as address:
        suite.url = f"http://{address}"
        with pytest.raises((AssertionError, BrayxError)):
            getattr(suite, test)(door)
