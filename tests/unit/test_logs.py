"""Lines that clients can cause: one line each, and a limited number."""

from __future__ import annotations

import io
import logging
import uuid
from collections.abc import Iterator

import pytest

from brayx.logs import LINES, PERIOD_S, Limit


class Log:
    """A logger with the limit, its lines, and the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.logger = logging.getLogger(uuid.uuid4().hex)
        self.logger.propagate = False
        self.logger.addHandler(logging.StreamHandler(self.stream))
        self.logger.addFilter(Limit(lambda: self.now))

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def log() -> Iterator[Log]:
    return Log()


def raised(text: str) -> Exception:
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise ValueError(text) from first
    except ValueError as error:
        return error


def test_a_place_logs_a_limited_number_of_lines_and_counts_the_rest(log: Log) -> None:
    def say(number: int) -> None:
        log.logger.warning("number %d", number)

    for number in range(LINES + 5):
        say(number)
    assert log.lines() == [f"number {number}" for number in range(LINES)]
    log.logger.warning("another place")
    assert log.lines()[LINES:] == ["another place"]
    log.now = PERIOD_S
    say(100)
    say(101)
    assert log.lines()[LINES + 1 :] == ["number 100 (5 more of these were not logged)", "number 101"]


def test_each_fault_of_a_place_has_its_own_limit(log: Log) -> None:
    for fault in ("a", "b"):
        for _ in range(2 * LINES):
            log.logger.error("fault %s", fault, extra={"fault": fault})
    assert log.lines() == ["fault a"] * LINES + ["fault b"] * LINES


def test_an_exception_is_one_line_with_its_place_and_its_cause(log: Log) -> None:
    log.logger.error("a request failed", exc_info=raised("50 %\nof it"))
    (line,) = log.lines()
    assert line.startswith("a request failed: ValueError: 50 %\\nof it [")
    assert "caused by KeyError: 'first' [" in line
    assert line.count(f"{__file__}:") == 2


@pytest.mark.parametrize("text", ["a\nb", "a\r\nforged line", "\x1b[2J", "a\u2028b", "\x9b31m"])
def test_client_text_cannot_start_a_line_or_control_a_terminal(log: Log, text: str) -> None:
    log.logger.warning("it said %s", text)
    (line,) = log.lines()
    assert line.isprintable()


def test_a_long_line_is_cut(log: Log) -> None:
    log.logger.warning("it said %s", "x" * 10_000_000)
    (line,) = log.lines()
    assert len(line) < 10_000
