"""A child process: where it imports from, what it is asked and answers, how it ends, and when it may start again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from brayx import systems
from brayx.children import Channel, Child, ChildDied, RequestFailed, how_it_ended
from brayx.errors import ConfigError
from tests.waiting import until

SERVED = """
import os, sys, threading, time
from brayx.errors import ConfigError

def main(parent, *words):
    print("a print is no message")
    def answer(verb, *rest):
        if verb == "where":
            return {folder!r}, words, os.environ.get("ADDED")
        if verb == "refuse":
            raise ConfigError("lr is wrong", field="lr")
        if verb == "fail":
            raise ValueError("a secret")
        if verb == "lock":
            return threading.Lock()
        if verb == "die":
            os._exit(3)
        if verb == "hang":
            while not os.path.exists(rest[0]):
                time.sleep(0.01)
        return rest
    if "stubborn" in words:
        parent.receive()
        time.sleep(600)
    if "works" in words:
        time.sleep(600)
    parent.serve(answer)
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Child]]:
    """Starts the module ``said``, which is also in the folder where this process runs."""
    ours, here = tmp_path / "ours", tmp_path / "here"
    for folder in (ours, here):
        folder.mkdir()
        (folder / "said.py").write_text(SERVED.replace("{folder!r}", repr(folder.name)))
    monkeypatch.syspath_prepend(str(ours))
    monkeypatch.chdir(here)
    with contextlib.ExitStack() as children:

        def start(*words: str, **options: Any) -> Child:
            child = Child("said", *words, **options)
            children.callback(child.end)
            child.start()
            return child

        yield start


def test_a_child_imports_from_this_process_paths_and_not_from_its_folder(started: Callable[..., Child]) -> None:
    child = started(" a word", ADDED=" a variable")
    assert os.getpgid(child.pid) != os.getpgid(0), "Ctrl-C in a terminal does not reach it"
    assert child.ask("where") == ("ours", (" a word",), " a variable")
    pid = child.pid
    child.start()
    assert child.pid == pid, "it runs"
    child.end(60.0)
    assert child.death == "ended with exit code 0"
    assert not child.runs


def test_a_request_is_answered_refused_or_fails_alone(started: Callable[..., Child]) -> None:
    child = started()
    large = os.urandom(2**21)
    assert child.ask("echo", large, "é" * 2**19, bytearray(large)) == (large, "é" * 2**19, bytearray(large))
    rows = np.arange(2**17, dtype=np.float64).reshape(2**8, 2**9)
    for given, answer in zip((rows, rows.T, rows[::2]), child.ask("echo", rows, rows.T, rows[::2]), strict=True):
        np.testing.assert_array_equal(answer, given)
    with pytest.raises(ConfigError) as refused:
        child.ask("refuse")
    assert refused.value.details == {"field": "lr"}
    with pytest.raises(RequestFailed, match=r"^failed: ValueError"):
        child.ask("fail")
    with pytest.raises(RequestFailed, match=r"request: ValueError: .*no number"):
        child.ask(Unreadable())
    with pytest.raises(RequestFailed, match=r"cannot send its answer: .*lock"):
        child.ask("lock")
    with pytest.raises(Exception, match="pickle"):
        child.ask(lambda: None)
    assert child.ask("echo", 1) == (1,)


class Unreadable:
    """It pickles, and cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_late_answer_is_not_that_of_the_next_request(started: Callable[..., Child], tmp_path: Path) -> None:
    child = started()
    with pytest.raises(TimeoutError):
        child.ask("hang", str(tmp_path / "go on"), timeout_s=0.05)
    (tmp_path / "go on").touch()
    assert child.ask("echo", "next", timeout_s=60.0) == ("next",)


def test_threads_share_a_channel(started: Callable[..., Child]) -> None:
    child, answers = started(), {}

    def ask(number: int) -> None:
        answers[number] = [child.ask("echo", number) for _ in range(50)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert answers == {number: [(number,)] * 50 for number in range(4)}


def test_a_death_is_told_and_the_child_starts_again(started: Callable[..., Child]) -> None:
    child = started(restart_s=600.0)
    with pytest.raises(ChildDied, match=r"^ended with exit code 3$"):
        child.ask("die")
    assert not child.runs
    assert child.wait_s == 0.0, "it starts again at once"
    child.start()
    with pytest.raises(ChildDied, match=r"^ended with exit code 3$"):
        child.ask("die")
    assert 0.0 < child.wait_s <= 600.0, "but not in a loop"
    child.restart_s = 0.0
    child.start()
    assert child.ask("echo", 1) == (1,)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match=r"^was killed by SIGKILL"):
        child.ask("echo", 2)
    with pytest.raises(ChildDied, match="was killed by SIGKILL"):
        child.ask("echo", 3, timeout_s=60.0)


def test_close_ends_a_child_from_another_thread_and_for_good(started: Callable[..., Child]) -> None:
    child = started()
    child.ask("echo")
    threading.Timer(0.1, child.close).start()
    with pytest.raises(ChildDied, match="was killed"):
        child.ask("hang", "for ever")
    with pytest.raises(ChildDied, match="was ended"):
        child.start()
    child.close()


def test_a_child_that_does_not_end_is_killed(started: Callable[..., Child]) -> None:
    child = started("stubborn", finishes=True)
    assert child.send("go on")
    child.end(0.1)
    child.end()
    assert child.death.startswith("was killed by SIGKILL")
    assert not child.send("it is gone")


@pytest.mark.parametrize("number", systems.ENDING)
def test_a_child_that_finishes_survives_a_signal_at_its_start_and_later(
    started: Callable[..., Child], number: int
) -> None:
    child = started(finishes=True)
    os.kill(child.pid, number)
    assert child.ask("echo", "there") == ("there",)
    os.kill(child.pid, number)
    assert child.ask("echo", "still there") == ("still there",)
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "this process gets its own"


def test_a_child_that_works_ends_with_its_parent(started: Callable[..., Child]) -> None:
    child = started("works")
    process = psutil.Process(child.pid)
    child._popen.stdin.close()  # type: ignore[union-attr]  # as at the parent's death
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "it ends", 30.0)


def test_a_process_without_children_talks_over_any_pipes() -> None:
    (for_one, to_one), (for_other, to_other) = os.pipe(), os.pipe()
    near, far = Channel(for_one, to_other), Channel(for_other, to_one)
    thread = threading.Thread(target=far.serve, args=(lambda *request: sum(request),))
    thread.start()
    assert near.ask(1, 2, 3) == 6
    os.close(to_other)
    thread.join(60)
    os.close(to_one)
    with pytest.raises(EOFError):
        near.receive()
    for number in (for_one, for_other):
        os.close(number)


FORKS = """
import atexit, os, signal, sys, time
import psutil
from brayx.children import Child, ChildDied

imported = "here"
sys.modules["said"] = sys.modules["__main__"]

def main(parent, *words):
    parent.serve(lambda verb: os._exit(3) if verb == "die" else (imported, words, os.getpgid(0) == os.getpid()))

def raised(function):
    try:
        function()
    except ChildDied as error:
        return str(error)

imported = "before the fork"
atexit.register(lambda: print("the end", file=sys.stderr, flush=True))
child = Child("said", "a word", forks=True)
child.start()
assert child.ask("where") == ("before the fork", ("a word",), True)
assert raised(lambda: child.ask("die")) == "ended with exit code 3"
child.start()
os.kill(child.pid, signal.SIGTERM)
assert raised(lambda: child.ask("where")) == "was killed by SIGTERM"
sys.path.append(sys.argv[1])
other = Child("waits")
other.start()
child.start()
other.end(60.0)
assert other.death == "ended with exit code 0", "the fork does not keep its pipe open"
child.end(60.0)
assert child.death == "ended with exit code 0", child.death
child.start()
child.end(0.0)
assert not child.runs
child.start()
print(child.pid, flush=True)
os._exit(0)  # its child ends with it
"""


def test_a_fork_shares_what_is_imported_and_ends_as_other_children_do(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("def main(parent):\n    parent.serve(print)\n")
    ran = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, ""), "a fork does not end what its parent began"
    until(lambda: is_gone(int(ran.stdout)), "it ends", 30.0)


COMPUTES = """
import sys, torch
from brayx.children import Child

sys.modules["computes"] = sys.modules["__main__"]

def main(parent):
    parent.serve(lambda: compute())

def compute():
    torch.set_num_threads(2)
    images = torch.ones(8, 3, 64, 64)
    return torch.conv2d(images, torch.ones(4, 3, 8, 8)).sum().item()

here = compute()
child = Child("computes", forks=True)
child.start()
assert child.ask() == here
child.end(60.0)
assert child.death == "ended with exit code 0", child.death
"""


def test_a_fork_computes_with_several_threads_as_its_parent_did() -> None:
    ran = subprocess.run([sys.executable, "-c", COMPUTES], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_how_a_process_ended() -> None:
    assert how_it_ended(0) == "ended with exit code 0"
    assert how_it_ended(-signal.SIGTERM) == "was killed by SIGTERM"
    assert how_it_ended(-100) == "was killed by signal 100"
