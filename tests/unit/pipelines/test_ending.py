"""Which processes belong to a command: those that carry its mark."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from pipelines.ending import marked
from tests.waiting import until

MARK = "BRAYX_TEST_ENDING"


@contextmanager
def started(program: str, mark: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", program]
    environment = {**os.environ, MARK: mark}
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_marked_processes_are_found_by_mark_and_words() -> None:
    mine, other = secrets.token_hex(8), secrets.token_hex(8)
    program = "print(flush=True); input()  # {}"
    with (
        started(program.format("a b"), mine) as first,
        started(program.format("b"), mine) as second,
        started(program.format("a"), other) as third,
    ):
        for process in (first, second, third):
            assert process.stdout is not None
            process.stdout.readline()
        assert {process.pid for process in marked(MARK, mine)} == {first.pid, second.pid}
        assert {process.pid for process in marked(MARK, mine, "# a", "b")} == {first.pid}
        assert {process.pid for process in marked(MARK, other)} == {third.pid}


def test_a_process_that_is_over_is_not_found_though_nobody_has_asked_for_its_exit_code() -> None:
    mark = secrets.token_hex(8)
    with started("pass", mark) as process:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert marked(MARK, mark) == []


def test_this_process_is_left_out_and_no_mark_is_nobodys() -> None:
    name, value = next((name, value) for name, value in psutil.Process().environ().items() if value)
    assert os.getpid() not in {process.pid for process in marked(name, value)}
    assert marked(MARK, "") == []
