"""Requests wait for their owner until their deadline, and answers for their callers."""

from __future__ import annotations

from brayx.tracking.hub import Inbox
from tests.clocks import Clock


def test_a_request_and_its_answer_are_delivered_once() -> None:
    inbox = Inbox()
    first, second = inbox.ask("first", 10.0), inbox.ask("second", 10.0)
    assert inbox.take() == [(first, "first"), (second, "second")]
    assert inbox.take() == []
    assert inbox.answered(second) is None
    inbox.answer(second, 2)
    assert (inbox.answered(first), inbox.answered(second), inbox.answered(second)) == (None, 2, None)


def test_an_expired_request_is_not_delivered() -> None:
    clock = Clock(100.0)
    inbox = Inbox(clock)
    inbox.ask("soon", 5.0)
    patient = inbox.ask("later", 10.0)
    clock.now += 7.0
    assert inbox.take() == [(patient, "later")]


def test_requests_and_answers_do_not_accumulate() -> None:
    inbox = Inbox()
    keys = [inbox.ask(number, 10.0) for number in range(100)]
    assert [request for _, request in inbox.take()] == list(range(36, 100))
    for number, key in enumerate(keys):
        inbox.answer(key, number)
    assert [inbox.answered(key) for key in keys[:36]] == [None] * 36
    assert [inbox.answered(key) for key in keys[36:]] == list(range(36, 100))
