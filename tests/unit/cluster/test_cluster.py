"""Ports are checked before anything is started."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from brayx.cluster.cluster import Cluster, check_ingress
from brayx.cluster.job import cluster_for
from brayx.errors import StartupError
from brayx.jobs.config import JobConfig
from brayx.ports import check_ports, free_port

SERVING_ALONE = {"RAY_worker_niceness": "0"}
"""Settings that jobs lack: a training leaves the machine to whoever else uses it."""


def door(port: int) -> dict[str, tuple[str, int]]:
    return {"actor.port": ("127.0.0.1", port)}


def test_a_taken_port_is_reported_with_its_holder_and_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StartupError, match=rf"{port} .*pid {os.getpid()}.*--set"):
            check_ports(door(port))
        with pytest.raises(StartupError, match=r"is taken.*--set actor\.port=0$"):
            Cluster(port=port).__enter__()
    check_ports(door(port))


def test_all_taken_ports_of_a_job_are_reported_at_once_with_remedies(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        http, native, tcp = (listener.getsockname()[1] for listener in taken)
        actor = f"{{kind: actor, agents: [a], port: {http}, native_port: {native}, tcp_port: {tcp}}}"
        file.write_text(f"project: p\ntrial: t\na: {{kind: agent, module: json, class: A}}\nmine: {actor}\n")

        def job(*overrides: str) -> JobConfig:
            return JobConfig.load(file, overrides)

        with pytest.raises(StartupError) as raised:
            cluster_for(job(), "serve", "").__enter__()
        assert raised.value.details["ports"] == [http, native, tcp]
        advised = re.findall(r"--set (\S+)", raised.value.message)
        assert advised == ["mine.port=0", "mine.native_port=0", "mine.tcp_port=0"]
        check_ports(cluster_for(job(*advised), "serve", "").ports)
        with pytest.raises(StartupError, match=rf"^port {native} of") as raised:
            check_ports(cluster_for(job(advised[0], "mine.tcp_port=null"), "serve", "").ports)
        assert raised.value.message.endswith("with --set mine.native_port=0")


def test_a_cluster_that_does_not_answer_is_not_waited_for() -> None:
    port = free_port()
    with pytest.raises(StartupError, match=rf"at \S+:{port}: nothing listens"):
        Cluster(address=f"127.0.0.1:{port}").__enter__()


def test_free_ports_are_free() -> None:
    check_ports(door(free_port()))


def test_a_running_serve_is_used_only_at_the_jobs_address() -> None:
    check_ingress("127.0.0.1", 8000, "127.0.0.1", 8000)
    check_ingress("127.0.0.1", 0, "127.0.0.1", 9000)
    for host, port in (("127.0.0.1", 9000), ("0.0.0.0", 8000)):
        message = rf"127\.0\.0\.1:8000, .* listens at {host}:{port} .*--set actor.host={host} --set actor.port={port}"
        with pytest.raises(StartupError, match=message):
            check_ingress("127.0.0.1", 8000, host, port)
    with pytest.raises(StartupError, match="without an HTTP ingress"):
        check_ingress("127.0.0.1", 8000, None, 8000)


def test_the_image_and_the_guide_serve_with_the_settings_of_jobs() -> None:
    folder = Path(__file__).parents[3] / "docker"
    clean = {"PATH": os.environ["PATH"]}
    words = ["sh", str(folder / "serve.sh"), "env", "-0"]
    given = subprocess.run(words, env=clean, capture_output=True, text=True, check=True, timeout=240).stdout
    shipped = dict(entry.split("=", 1) for entry in given.split("\0") if entry.startswith("RAY_"))
    environment = {**Cluster(ingress="haproxy").environment(), **SERVING_ALONE}
    assert "hash-type consistent" in shipped["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"]
    assert shipped == {name: environment[name] for name in shipped}
    assert '"sh", "/brayx/docker/serve.sh", "serve", "run"' in (folder / "Dockerfile").read_text()
    assert "sh docker/serve.sh serve run" in (folder.parent / "docs" / "guide-serve.md").read_text()


def test_jobs_and_the_environment_file_have_the_same_settings() -> None:
    """The environment file has only the first line of HAProxy's balance setting."""
    shipped = dict(
        line.split("=", 1)
        for line in (Path(__file__).parents[3] / "docker" / "serve.env").read_text().splitlines()
        if line[:1] not in ("", "#")
    )
    environment = {**Cluster(ingress="haproxy").environment(), **SERVING_ALONE}
    environment = {name: value.splitlines()[0] for name, value in environment.items()}
    assert {name: value.strip('"') for name, value in shipped.items()} == {name: environment[name] for name in shipped}


def test_urls() -> None:
    assert Cluster(port=81).url == "http://127.0.0.1:81"
    assert Cluster(host="0.0.0.0", port=81).urls["ws"] == "ws://127.0.0.1:81"
