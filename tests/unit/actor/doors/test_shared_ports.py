"""`brayx.actor.doors.shared_ports`: one application has a port, with all its replicas, until the last has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from brayx.actor.doors.shared_ports import HeldPort, check_shared_port
from brayx.errors import StartupError
from brayx.ports import free_port
from tests.unit.actor.doors.native_doors import Native

WAIT_S = 60.0


def test_a_port_of_another_application_is_refused(service: Native) -> None:
    host, port = service.http.address
    with pytest.raises(StartupError, match=rf"{port} of 127\.0\.0\.1") as refused:
        check_shared_port(host, port, "mine")
    assert refused.value.details == {"port": port}
    check_shared_port("127.0.0.1", free_port(), "mine")


def test_a_port_is_held_by_one_application_until_its_last_replica_releases_it(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    replicas = [HeldPort(8101, "a", folder) for _ in range(2)]
    with pytest.raises(StartupError, match=r"8101 .*'a'") as taken:
        HeldPort(8101, "b", folder)
    assert taken.value.details == {"port": 8101}
    HeldPort(8102, "b", folder).release()
    replicas[0].release()
    later = HeldPort(8101, "a", folder)  # as in a rolling redeploy
    replicas[1].release()
    with pytest.raises(StartupError, match="'a'"):
        HeldPort(8101, "b", folder)
    later.release()
    later.release()
    HeldPort(8101, "b", folder).release()


def test_a_port_is_free_once_the_process_that_held_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from brayx.actor.doors.shared_ports import HeldPort\n"
        "held = HeldPort(8101, 'a', pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StartupError, match="'a'"):
            HeldPort(8101, "b", tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(WAIT_S)
    HeldPort(8101, "b", tmp_path).release()


def test_one_of_two_applications_that_start_together_gets_the_port_for_all_its_replicas(tmp_path: Path) -> None:
    (tmp_path / "8101").write_text("of another time")
    begin, ports, refused = threading.Barrier(8), [], []

    def start(application: str) -> None:
        begin.wait(WAIT_S)
        try:
            ports.append((application, HeldPort(8101, application, tmp_path)))
        except StartupError:
            refused.append(application)

    threads = [threading.Thread(target=start, args=("ab"[number % 2],)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(ports) == len(refused) == 4
    assert {application for application, _ in ports} | {*refused} == {"a", "b"}
    for _, port in ports:
        port.release()
