"""``serve run`` when its door's port is taken, or the Ray it would join is gone."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.services import resolve_ip_for_localhost

from brayx.errors import StartupError
from brayx.ports import free_port
from deployments.serve_run import check_door, check_port

SERVE_RUN = ["/usr/bin/serve", "run", "deployments.echo:app"]


@pytest.fixture(autouse=True)
def last_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file where Ray keeps the address of its last start; it does not exist yet."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def taken() -> Iterator[int]:
    """The port of a program that is no HTTP server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        yield listener.getsockname()[1]


def test_a_port_that_another_program_has_is_named_in_one_line(taken: int) -> None:
    with pytest.raises(SystemExit, match=rf"^startup_error: port {taken} of 127.0.0.1, .* is taken: [^\n]*$"):
        check_door(SERVE_RUN, "127.0.0.1", taken)


def test_only_serve_run_opens_that_port(taken: int) -> None:
    check_door(["/usr/bin/python", "run"], "127.0.0.1", taken)
    check_door(["/usr/bin/serve", "build", "deployments.echo:app"], "127.0.0.1", taken)


def test_a_ray_that_is_gone_is_reported_at_once_with_the_file_that_names_it(last_started: Path) -> None:
    gone = free_port()
    last_started.write_text(f"127.0.0.1:{gone}")
    with pytest.raises(
        SystemExit,
        match=rf"nothing listens at \S+:{gone}, where Ray was .* according to {last_started}: remove",
    ):
        check_door(SERVE_RUN, "127.0.0.1", free_port())
    check_door([*SERVE_RUN, "--address", "local"], "127.0.0.1", free_port())
    node = resolve_ip_for_localhost("127.0.0.1")  # where Ray looks for one that was started on this machine
    with socket.create_server((node, 0)) as listener:
        last_started.write_text(f"127.0.0.1:{listener.getsockname()[1]}")
        check_door(SERVE_RUN, "127.0.0.1", free_port())


def test_a_free_port_is_fine() -> None:
    check_port("127.0.0.1", free_port())


@pytest.mark.parametrize("healthy", [True, False])
def test_a_serve_that_runs_is_joined(healthy: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if healthy and self.path == "/-/healthz" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            if healthy:
                check_port("127.0.0.1", server.server_port)
            else:
                with pytest.raises(StartupError, match=str(server.server_port)):
                    check_port("127.0.0.1", server.server_port)
        finally:
            server.shutdown()
            thread.join()
