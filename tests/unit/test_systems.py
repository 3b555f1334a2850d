"""`brayx.systems` on this one, and that nothing else of the client and the local host asks which system it is."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from brayx import systems

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
POSIX_ONLY = re.compile(
    r"\b(fcntl|os\.(getuid|geteuid|killpg|nice|pread|pwrite|readv|sched_getaffinity|fork\w*)|select\.(poll|POLLIN)|"
    r"signal\.(SIGKILL|SIGHUP|SIGALRM|setitimer)|SO_REUSEPORT|O_DIRECTORY|O_NOFOLLOW)\b"
)


def test_nothing_else_calls_what_other_systems_lack() -> None:
    files = [path for path in (ROOT / "brayx").rglob("*.py") if "cluster" not in path.relative_to(ROOT).parts]
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path.name != "systems.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if POSIX_ONLY.search(line.partition("#")[0]) and "``" not in line
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.cluster  # mypy takes a minute for each
@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_the_client_and_the_local_host_have_the_types_of_other_systems(platform: str, tmp_path: Path) -> None:
    words = ["--platform", platform, "--cache-dir", str(tmp_path), "-p", "brayx.local", "-p", "brayx.bridges"]
    words += ["-p", "brayx.gamecore", "-p", "brayx.commands"]
    done = subprocess.run([sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line and not line.startswith("brayx/cluster/")]
    assert not errors, "\n".join(errors)


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), (None, 8)]
)
def test_cores_of_a_container(quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(systems, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert systems.cores() == cores


def test_a_pipe_is_readable_once_something_is_in_it_or_it_is_closed() -> None:
    incoming, outgoing = os.pipe()
    try:
        assert not systems.wait_readable(incoming, 0.0)
        os.write(outgoing, b"abc")
        assert systems.wait_readable(incoming, WAIT_S)
        buffer = bytearray(2)
        assert systems.read_into(incoming, memoryview(buffer)) == 2
        assert buffer == b"ab"
        os.read(incoming, 1)
        os.close(outgoing)
        systems.wait_closed(incoming)
        assert systems.wait_readable(incoming, WAIT_S)
    finally:
        os.close(incoming)


def test_one_has_a_lock_or_several_share_it(tmp_path: Path) -> None:
    first, second = (systems.open_folder(tmp_path) for _ in range(2))
    assert systems.lock(first)
    assert not systems.lock(second)
    assert not systems.lock(second, shared=True)
    systems.unlock(first)
    assert systems.lock(second, shared=True)
    assert systems.lock(first, shared=True)
    assert not systems.lock(first)
    systems.close(first)
    systems.close(second)


def test_a_link_to_a_folder_is_only_followed_if_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    systems.close(systems.open_folder(tmp_path / "link"))
    with pytest.raises(OSError, match="link"):
        systems.open_folder(tmp_path / "link", follow=False)


def test_a_file_is_read_at_an_offset(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with (tmp_path / "file").open("rb") as file:
        assert systems.read_at(file.fileno(), 3, 4) == b"456"
        assert systems.read_at(file.fileno(), 9, 8) == b"89"


def test_sockets_share_a_port() -> None:
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            systems.share_port(sock)
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())


def test_a_group_is_signalled_while_one_of_it_lives() -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('started', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes, start_new_session=True) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        assert systems.signal_group(process, 0)
        assert systems.signal_group(process, systems.KILL)
        process.wait(WAIT_S)


def wait_for_the_interrupt() -> None:
    systems.interrupt_after(0.01)
    threading.Event().wait(WAIT_S)


def test_an_interrupt_comes_after_a_while_unless_it_is_taken_back() -> None:
    before = signal.getsignal(signal.SIGALRM)
    try:
        systems.interrupt_after(3600.0)
        systems.interrupt_after(0)
        with pytest.raises(KeyboardInterrupt):
            wait_for_the_interrupt()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a priority is that of all threads")
def test_the_priority_is_lowered() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    before = niceness()
    with ThreadPoolExecutor(1) as thread:  # which ends with its priority: nothing raises it again
        for lowered in (before + 1, before):
            thread.submit(systems.lower_priority, lowered).result()
            assert thread.submit(niceness).result() == min(before + 1, 19)
    assert niceness() == before
