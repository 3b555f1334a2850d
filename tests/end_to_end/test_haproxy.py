"""The compliance suite through HAProxy in front of two replicas, as `docker/serve.sh` starts it for users."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from brayx.gamecore.compliance import DoorCompliance
from brayx.ports import free_port
from tests.end_to_end.jobs import Command, said_on_failure, tuned
from tests.integration.test_grpc import guide


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """HTTP and gRPC port of `serve run` of the guide's config."""
    folder = tmp_path_factory.mktemp("haproxy")
    config = guide()
    http, grpc = free_port(), free_port()
    config["http_options"]["port"], config["grpc_options"]["port"] = http, grpc
    config["applications"][0]["args"] = {"num_workers": 2, "native_port": None, "tcp_port": None}
    (folder / "echo.yaml").write_text(yaml.safe_dump(config))

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/", timeout=5) as reply:
                return bool(json.load(reply)["service"] == "brayx")
        except (OSError, ValueError):
            return False

    with Command(tuned("serve", "run", "echo.yaml"), folder) as command, said_on_failure(command):
        command.until(answers, "the service answered")
        (haproxy, *_) = command.processes("haproxy", "-f")
        words = haproxy.cmdline()
        settings = Path(words[words.index("-f") + 1]).read_text()
        assert re.search(r"balance hdr\(session\)\s+hash-type consistent djb2 avalanche", settings), settings
        yield http, grpc
        command.control_c(group=False)
        command.gone(60.0)


class TestEchoBehindHAProxy(DoorCompliance):
    """Every door that there is through the ingress."""

    doors = ("http", "ws", "grpc")

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, ports: tuple[int, int]) -> None:
        http, grpc = ports
        cls.url = f"http://127.0.0.1:{http}"
        cls.urls = {"grpc": f"grpc://127.0.0.1:{grpc}"}
