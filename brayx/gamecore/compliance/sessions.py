"""Tests that run for every door: sessions, numbered ticks and stateless calls, through the clients."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import ExitStack

from brayx.errors import BodyTooLarge, OutOfSequence, SessionExists, SessionUnknown
from brayx.gamecore.client import AsyncClient, Client
from brayx.gamecore.compliance.base import ALL_BYTES, ONE_MIB, Door, Doors, Tick, error_of
from brayx.gamecore.protocol import StepKind


class EveryDoor(Doors):
    """The tests of sessions, numbered ticks and stateless calls."""

    def test_start_tick_stop(self, door: Door) -> None:
        with self.client(door) as client:
            client.start(b"hello")
            assert client.tick(b"one") == b"one"
            client.stop(b"bye")
            assert client.session is None

    def test_ticks_of_a_session_are_answered_in_order(self, door: Door) -> None:
        with self.client(door) as client:
            client.start()
            for number in range(50):
                assert client.tick(f"tick {number}") == f"tick {number}".encode()

    def test_empty_body(self, door: Door) -> None:
        with self.client(door) as client:
            client.start(b"")
            assert client.tick(b"") == b""
            client.stop(b"")

    def test_body_of_all_byte_values(self, door: Door) -> None:
        with self.client(door) as client:
            client.start(ALL_BYTES)
            assert client.tick(ALL_BYTES) == ALL_BYTES
            client.stop(ALL_BYTES)

    def test_large_body(self, door: Door) -> None:
        body = (ALL_BYTES * (ONE_MIB // len(ALL_BYTES)))[: self.max_body_bytes]
        with self.client(door) as client:
            client.start()
            assert client.tick(body) == body
            assert client.tick(b"after") == b"after"

    def test_body_of_as_many_bytes_as_the_limit(self, door: Door) -> None:
        body = bytes(self.max_body_bytes)
        with self.numbered(door) as tick:
            assert tick(None, body) == body
            assert tick(0, body) == body
            for seq in (None, 1):
                error = error_of(lambda seq=seq: tick(seq, body + b"x"))
                assert isinstance(error, BodyTooLarge), error
            assert tick(1, b"small again") == b"small again"

    def test_body_above_the_limit_is_refused_and_other_sessions_go_on(self, door: Door) -> None:
        with self.client(door) as other, self.client(door) as client:
            other.start()
            client.start()
            error = error_of(lambda: client.tick(bytes(self.max_body_bytes + 1)))
            assert isinstance(error, BodyTooLarge), error
            assert other.tick(b"fine") == b"fine"
            if client.session is None:  # the WebSocket may be closed for it
                client.start()
            assert client.tick(b"small again") == b"small again"

    def test_start_of_a_running_session_is_refused_and_leaves_it_alone(self, door: Door) -> None:
        with self.client(door) as first, self.client(door) as second:
            first.start()
            error = error_of(lambda: second.start(session=first.session))
            assert isinstance(error, SessionExists), error
            assert first.tick(b"mine") == b"mine"

    def test_id_is_free_after_stop(self, door: Door) -> None:
        session = uuid.uuid4().hex
        for _ in range(3):
            with self.client(door) as client:
                client.start(session=session)
                assert client.tick(b"again") == b"again"

    def test_sessions_interleaved_never_mix(self, door: Door) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(self.client(door)) for _ in range(20)]
            for client in clients:
                client.start()
            for number in range(5):
                for client in clients:
                    body = f"{client.session} {number}".encode()
                    assert client.tick(body) == body

    def test_many_sessions_at_once(self, door: Door) -> None:
        async def play(index: int) -> None:
            async with AsyncClient(self.url_of(door), timeout_s=self.timeout_s) as client:
                await client.start()
                for number in range(20):
                    body = f"{index} {number}".encode()
                    assert await client.tick(body) == body

        async def play_all() -> None:
            await asyncio.gather(*(play(index) for index in range(32)))

        asyncio.run(play_all())

    def test_credentials_do_not_change_the_answer(self, door: Door) -> None:
        with Client(self.url_of(door), timeout_s=self.timeout_s, key="k", time="0", token="t") as client:
            client.start()
            assert client.tick(b"body") == b"body"

    def test_tick_and_stop_without_start(self, door: Door) -> None:
        for kind in (StepKind.TICK, StepKind.STOP):
            with self.step(door) as step:
                error = error_of(lambda kind=kind, step=step: step(kind, uuid.uuid4().hex, b"", None))
                assert isinstance(error, SessionUnknown), error

    # Numbered ticks, by every door

    def test_numbered_ticks_are_answered_each_by_its_own_reply(self, door: Door) -> None:
        with self.numbered(door) as tick:
            for number in range(20):
                assert tick(number, f"tick {number}".encode()) == f"tick {number}".encode()

    def test_a_repeated_number_gets_the_kept_reply(self, door: Door) -> None:
        with self.numbered(door) as tick:
            assert tick(0, b"first") == b"first"
            for _ in range(2):
                assert tick(0, b"another body, which is ignored") == b"first"
            assert tick(1, b"second") == b"second"
            assert tick(1, b"") == b"second"

    def test_an_empty_reply_is_kept_too(self, door: Door) -> None:
        with self.numbered(door) as tick:
            assert tick(0, b"") == b""
            assert tick(0, b"another") == b""

    def test_a_number_out_of_sequence_is_refused_and_the_session_goes_on(self, door: Door) -> None:
        with self.numbered(door) as tick:
            self.out_of_sequence(tick, expected=0, got=1)
            assert tick(0, b"zero") == b"zero"
            assert tick(1, b"one") == b"one"
            for got in (0, 3, 2**63 - 1):
                self.out_of_sequence(tick, expected=2, got=got)
            assert tick(1, b"") == b"one"
            assert tick(2, b"two") == b"two"

    def test_ticks_without_a_number_do_not_touch_the_numbers(self, door: Door) -> None:
        with self.numbered(door) as tick:
            assert tick(None, b"before") == b"before"
            assert tick(0, b"zero") == b"zero"
            assert tick(None, b"between") == b"between"
            assert tick(0, b"again") == b"zero"
            assert tick(1, b"one") == b"one"

    def test_numbers_count_within_one_session(self, door: Door) -> None:
        session = uuid.uuid4().hex
        with self.numbered(door) as other:
            assert other(0, b"other") == b"other"
            for _ in range(2):  # and of one life of it
                with self.numbered(door, session) as tick:
                    assert tick(0, b"mine") == b"mine"
                    assert tick(1, b"mine too") == b"mine too"
            assert other(0, b"") == b"other"
            assert other(1, b"on") == b"on"

    def test_a_numbering_client_plays_as_any_other(self, door: Door) -> None:
        with Client(self.url_of(door), timeout_s=self.timeout_s, reconnect_s=self.timeout_s) as client:
            for _ in range(2):
                client.start()
                for number in range(20):
                    assert client.tick(f"tick {number}") == f"tick {number}".encode()
                client.stop()

    # Stateless calls, by every door but WebSocket's

    def test_stateless_call(self, door: Door) -> None:
        with self.client(door) as client:
            for body in (b"\x00call", b"", ALL_BYTES):
                assert client.call(body) == body

    def test_stateless_call_touches_no_session(self, door: Door) -> None:
        with self.client(door) as client:
            client.start()
            assert client.call(b"beside") == b"beside"
            assert client.tick(b"tick") == b"tick"

    def test_stateless_body_above_the_limit(self, door: Door) -> None:
        with self.client(door) as client:
            error = error_of(lambda: client.call(bytes(self.max_body_bytes + 1)))
            assert type(error) is BodyTooLarge, error
            assert client.call(bytes(16)) == bytes(16)

    def out_of_sequence(self, tick: Tick, *, expected: int, got: int) -> None:
        """Asserts that a tick numbered ``got`` is refused, and that the error names both numbers."""
        error = error_of(lambda: tick(got, b""))
        assert isinstance(error, OutOfSequence), error
        assert (error.details["expected"], error.details["got"]) == (expected, got)
        assert str(expected) in error.message
        assert str(got) in error.message
