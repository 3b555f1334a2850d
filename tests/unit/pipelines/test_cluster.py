"""Ports are checked before anything is started."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from brayx.errors import StartupError
from brayx.ports import free_port
from pipelines.cluster import Cluster, check_ingress, check_port


def test_a_taken_port_names_its_holder_and_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StartupError, match=rf"port {port} of 127.0.0.1 is taken.*pid {os.getpid()}.*--set"):
            check_port("127.0.0.1", port)
        with pytest.raises(StartupError, match="is taken"):
            Cluster(port=port).__enter__()
    check_port("127.0.0.1", port)


def test_free_ports_are_free() -> None:
    check_port("127.0.0.1", free_port())


def test_a_serve_that_runs_already_is_taken_only_where_the_job_wants_its_door() -> None:
    check_ingress("127.0.0.1", 8000, "127.0.0.1", 8000)
    check_ingress("127.0.0.1", 0, "127.0.0.1", 9000)
    for host, port in (("127.0.0.1", 9000), ("0.0.0.0", 8000)):
        told = rf"127\.0\.0\.1:8000, .* listens at {host}:{port} .*--set actor.host={host} --set actor.port={port}"
        with pytest.raises(StartupError, match=told):
            check_ingress("127.0.0.1", 8000, host, port)
    with pytest.raises(StartupError, match="without an HTTP ingress"):
        check_ingress("127.0.0.1", 8000, None, 8000)


def test_jobs_and_the_environment_file_have_the_same_settings() -> None:
    """Of HAProxy's balance the file has the first line; the header is for Serve's own routers, which a job has not."""
    shipped = dict(
        line.split("=", 1)
        for line in (Path(__file__).parents[3] / "docker" / "serve.env").read_text().splitlines()
        if line[:1] not in ("", "#")
    )
    del shipped["RAY_SERVE_SESSION_ID_HEADER_KEY"]
    own = Cluster(ingress="haproxy").environment()
    own = {name: value.splitlines()[0] for name, value in own.items()}
    assert {name: value.strip('"') for name, value in shipped.items()} == {name: own[name] for name in shipped}


def test_urls() -> None:
    assert Cluster(port=81).url == "http://127.0.0.1:81"
    assert Cluster(host="0.0.0.0", port=81).door("ws") == "ws://127.0.0.1:81"
