"""Native threads are stopped and joined when the interpreter exits, but not when a command leaves early."""

from __future__ import annotations

import subprocess
import sys

import pytest

from brayx.threads import NativeThread, _running
from tests.waiting import WAIT_S

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
