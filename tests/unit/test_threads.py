"""Native threads are stopped and joined when the interpreter exits, but not when a command leaves early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback

import pytest

from brayx.threads import NativeThread, _running
from tests.waiting import WAIT_S, until

STARTED = """
import threading
from brayx.threads import NativeThread

stopped, begun = threading.Event(), threading.Event()


def work():
    begun.set()
    {waits}
    print("ended by itself", flush=True)


NativeThread(work, "worker", stopped.set).start()
begun.wait()
"""


def test_a_script_stops_its_thread_and_waits_for_it_before_it_exits() -> None:
    script = STARTED.format(waits="stopped.wait()")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout) == (0, "ended by itself\n"), ended.stderr


def test_a_command_that_leaves_does_not_wait_for_threads() -> None:
    script = STARTED.format(waits="threading.Event().wait()") + "from brayx.shutdown import leave\nleave(3)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout) == (3, ""), ended.stderr


def test_a_thread_that_ended_is_forgotten() -> None:
    def fail() -> None:
        raise ValueError("expected by the test")

    for work in (lambda: None, fail):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("threading.excepthook", lambda args: None)
            thread = NativeThread(work, "worker")
            thread.start()
            thread.join(WAIT_S)
        assert not thread.is_alive()
        assert thread not in _running


def test_a_ctrl_c_during_a_join_leaves_it_alive() -> None:
    may_end, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def joins() -> bool:
        return any(frame.name == "join" for frame in traceback.extract_stack(sys._current_frames()[main]))

    def work() -> None:
        until(joins, "the main thread waits")
        os.kill(os.getpid(), signal.SIGINT)
        may_end.wait(WAIT_S)

    thread = NativeThread(work, "worker", may_end.set)

    def joined() -> None:
        thread.start()
        thread.join(WAIT_S)

    with pytest.raises(KeyboardInterrupt):
        joined()
    assert thread.is_alive()
    may_end.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
