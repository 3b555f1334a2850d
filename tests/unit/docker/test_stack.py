"""docker/compose.yaml runs what docker/stack.py runs, with the same files and flags; neither is started here.

The database's folder must be open to PostgreSQL's user.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from brayx.commands.cli import parser

DOCKER = Path(__file__).parents[3] / "docker"
STACK = (DOCKER / "stack.py").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def test_compose_has_the_programs_of_the_stack() -> None:
    started = re.findall(r'stack\.start\(\s*"(\w+)"', STACK)
    assert {name.replace("edge", "haproxy") for name in SERVICES} == set(started)


@pytest.mark.parametrize("service", ["mlflow", "brayx", "prometheus"])
def test_compose_uses_options_of_the_stack(service: str) -> None:
    options = [word.partition("=")[0] for word in SERVICES[service]["command"] if word.startswith("--")]
    assert options
    for option in options:
        assert option in STACK, option


def test_only_the_edge_is_reachable() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["edge"]
    assert {service.get("network_mode") for name, service in SERVICES.items() if name != "edge"} == {"service:edge"}
    (port,) = SERVICES["edge"]["ports"]
    assert f"bind :{port.partition(':')[2]} ssl" in (DOCKER / "haproxy.cfg").read_text()


def test_compose_s_files_are_there() -> None:
    for service in SERVICES.values():
        for source in (volume.partition(":")[0] for volume in service.get("volumes", ())):
            assert not source.startswith(".") or (DOCKER / source).exists(), source


def test_compose_s_service_is_a_command_of_ours() -> None:
    command, *words = SERVICES["brayx"]["command"]
    assert command == "brayx"
    assert parser([words[0]]).parse_args(words).tracking == "http://127.0.0.1:5000", shlex.join(words)


@pytest.mark.skipif(os.geteuid() != 0, reason="PostgreSQL runs as this user itself")
def test_root_is_told_that_postgres_cannot_open_a_folder(tmp_path: Path) -> None:
    if subprocess.run(["id", "postgres"], capture_output=True).returncode != 0:
        pytest.skip("PostgreSQL is not installed")
    tmp_path.chmod(0o700)
    code = "import stack, sys, pathlib; stack.make_database(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "database")]
    done = subprocess.run(command, cwd=DOCKER, capture_output=True, text=True)
    assert done.returncode == 1
    message = f"user postgres cannot open {tmp_path / 'database'}: open its parents to all (mode 0711), or name another"
    assert done.stderr == f"{message} by --data\n"
