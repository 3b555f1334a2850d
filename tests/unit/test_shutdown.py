"""Which processes and temporary files belong to a command, and that both go with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from brayx.shutdown import Deadline, marked, side_by_side
from brayx.temporary import temporary_files
from tests.clocks import Clock
from tests.waiting import WAIT_S, until

MARK = "BRAYX_TEST_SHUTDOWN"


@contextlib.contextmanager
def started(program: str, mark: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", program]
    environment = {**os.environ, MARK: mark}
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_parts_that_hang_do_not_add_up() -> None:
    clock = Clock(100.0)
    end = Deadline(10.0, clock)
    clock.now += 1000.0  # the work, before anything is to end
    waits = []
    for at_most in (3.0, 5.0, 5.0, 5.0):
        waits.append(end.left(at_most))
        clock.now += waits[-1]
    assert waits == [3.0, 5.0, 2.0, 0.0]
    assert clock.now == 1110.0


def test_what_has_a_deadline_of_its_own_does_not_count_and_an_interrupt_leaves_less() -> None:
    clock = Clock(100.0)
    end = Deadline(10.0, clock)
    with contextlib.suppress(KeyboardInterrupt), end.paused():
        clock.now += 600.0
        raise KeyboardInterrupt
    assert end.left() == 10.0
    end.shorten(7.0)
    clock.now += 4.0
    end.shorten(7.0)
    assert end.left() == 3.0


def test_parts_end_side_by_side_and_an_error_is_raised_when_all_have_ended() -> None:
    met, ended = threading.Barrier(8), []

    def stop(timeout_s: float) -> None:
        met.wait(WAIT_S)
        ended.append(timeout_s)
        if len(ended) == 1:
            raise OSError("one of them")

    with pytest.raises(OSError, match="one of them"):
        side_by_side([stop] * 8, 3.0)
    assert ended == [3.0] * 8


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


def test_an_ended_process_is_not_found_even_before_its_exit_code_is_read() -> None:
    mark = secrets.token_hex(8)
    with started("pass", mark) as process:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert marked(MARK, mark) == []


def test_this_process_is_left_out_and_an_empty_mark_finds_nothing() -> None:
    name, value = next((name, value) for name, value in psutil.Process().environ().items() if value)
    assert os.getpid() not in {process.pid for process in marked(name, value)}
    assert marked(MARK, "") == []


def test_temporary_files_of_a_command_and_of_what_it_starts_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("RAY_TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    program = "import tempfile; print(tempfile.mkdtemp())"
    with temporary_files() as folder:
        assert Path(folder).parent == tmp_path
        mine = tempfile.mkdtemp()
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert Path(mine).parent == Path(other.strip()).parent == Path(folder)
        assert os.environ["RAY_TMPDIR"] == str(tmp_path), "Ray's files are not among them"
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path, "nor what torch keeps for the next time"
    assert not list(tmp_path.iterdir())
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path)
    assert "RAY_TMPDIR" not in os.environ


def test_the_exit_code_of_a_killed_command_is_that_of_an_interrupt() -> None:
    """Its main thread sees a killed process's end as an error."""
    program = r"""
import subprocess, sys
from brayx.shutdown import end_within, leave, mark
mark()
with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
    end_within(0.1)
    child.wait()
    leave(2)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=WAIT_S).returncode == 130


def test_a_command_that_hangs_is_killed_with_its_temporary_files(tmp_path: Path) -> None:
    program = r"""
import subprocess, sys, tempfile, time
from brayx.temporary import temporary_files
from brayx.shutdown import end_within, mark
mark()
with temporary_files():
    other = "import tempfile, time\nwith tempfile.TemporaryDirectory(): print(flush=True); time.sleep(600)"
    words = [sys.executable, "-c", other]
    with tempfile.TemporaryDirectory(), subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        end_within(0.1)
        time.sleep(600)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, timeout=WAIT_S)
    assert ended.returncode == 130
    assert "1 processes were killed" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_another_interrupt_ends_the_wait_for_the_last_checkpoint() -> None:
    program = r"""
import signal, threading
from brayx.shutdown import end_within, wait_to_save
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as after the first one
end_within(60.0)


def opened(timeout_s):
    if timeout_s:
        print("waits", flush=True)
        threading.Event().wait(timeout_s)
    return False


print(wait_to_save(opened, print), signal.getsignal(signal.SIGINT).name, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith("waiting up to 120 s for MLflow to start, to save")
        assert waiting.stdout.readline() == "waits\n"
        waiting.send_signal(signal.SIGINT)
        assert waiting.communicate(timeout=WAIT_S)[0] == "False SIG_IGN\n"
