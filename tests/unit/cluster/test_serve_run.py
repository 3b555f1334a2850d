"""``serve run`` when its door's port is taken, the Ray to join has ended, or its job is wrong."""

from __future__ import annotations

import http.server
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.services import resolve_ip_for_localhost

from brayx.cluster.serve_run import check_port, serve_run
from brayx.cluster.serving import serving_application
from brayx.errors import ConfigError, StartupError
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.ports import free_port
from deployments import actor, echo, model

CARTPOLE = Path(actor.__file__).parents[1] / "pipelines" / "templates" / "cartpole.yaml"
SERVE_RUN = ["/usr/bin/serve", "run", "deployments.echo:app"]


def build(argv: list[str], port: int) -> None:
    """Builds an empty application with the command line ``argv``."""
    with serve_run(argv, "127.0.0.1", port):
        pass


@pytest.fixture(autouse=True)
def last_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file where Ray keeps the address of its last start; it does not exist yet."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # the tests before may share their Ray with this process
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def taken() -> Iterator[int]:
    """The port of a program other than an HTTP server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        yield listener.getsockname()[1]


def test_a_port_of_another_program_is_reported_in_one_line(taken: int) -> None:
    with pytest.raises(SystemExit, match=rf"^brayx: port {taken} of [^\n]*$"):
        build(SERVE_RUN, taken)


def test_only_serve_run_opens_that_port(taken: int) -> None:
    build(["/usr/bin/python", "run"], taken)
    build(["/usr/bin/serve", "build", "deployments.echo:app"], taken)


def test_a_ray_that_has_ended_is_reported_at_once_with_the_file_that_names_it(last_started: Path) -> None:
    with socket.socket() as taken_port:  # bound, so that nothing else can listen there
        taken_port.bind(("", 0))
        gone = taken_port.getsockname()[1]
        last_started.write_text(f"127.0.0.1:{gone}")
        with pytest.raises(
            SystemExit,
            match=rf"\S+:{gone}, .*{last_started}: remove",
        ):
            build(SERVE_RUN, free_port())
    build([*SERVE_RUN, "--address", "local"], free_port())
    node = resolve_ip_for_localhost("127.0.0.1")  # where Ray looks for a Ray started on this machine
    with socket.create_server((node, 0)) as listener:
        last_started.write_text(f"127.0.0.1:{listener.getsockname()[1]}")
        build(SERVE_RUN, free_port())


def test_a_wrong_job_is_one_line_before_ray_starts(tmp_path: Path) -> None:
    words = [str(Path(sys.executable).with_name("serve")), "run", "deployments.actor:app", f"config={tmp_path}/no.yaml"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert re.search(rf"^brayx: {tmp_path}/no.yaml: cannot be read: [^\n]*\n\Z", ended.stderr, re.M)
    assert "Traceback" not in ended.stdout + ended.stderr
    assert not (tmp_path / "ray" / "session_latest").exists()


@pytest.mark.parametrize("traceback", [False, True])
def test_each_application_of_a_job_reports_it_that_way(traceback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", SERVE_RUN)
    if traceback:
        monkeypatch.setenv("BRAYX_TRACEBACK", "1")
    expected = pytest.raises(ConfigError if traceback else SystemExit, match=r"^(brayx: )?no.yaml: cannot be read")
    with expected:
        actor.app(actor.ServeArgs(config="no.yaml"))
    with expected:
        model.app(model.ModelArgs(config="no.yaml"))


def test_a_missing_keys_file_is_one_line_before_ray_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", SERVE_RUN)
    expected = rf"^(brayx: )?the keys in {tmp_path}/no.txt cannot be read: No such file or directory$"
    with pytest.raises(SystemExit, match=expected):
        echo.app(echo.EchoArgs(keys_file=f"{tmp_path}/no.txt", native_port=0, tcp_port=0))
    job = JobConfig.load(CARTPOLE, [f"actor.keys_file={tmp_path}/no.txt"])
    with pytest.raises(ConfigError, match=expected):
        serving_application(job, f"sqlite:///{tmp_path}/mlflow.db")


def test_a_game_whose_contract_is_not_known_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contract is null, and no model that is served has one: train the job first"):
        serving_application(JobConfig.load(TEMPLATES / "game.yaml"), f"sqlite:///{tmp_path}/mlflow.db")


def test_a_free_port_is_accepted() -> None:
    check_port("127.0.0.1", free_port())


@pytest.mark.parametrize("healthy", [True, False])
def test_a_running_serve_is_joined(healthy: bool) -> None:
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
