"""The compliance suite through HAProxy, with the settings that `docker/serve.env` has, in front of two replicas."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
import yaml

from brayx.gamecore.compliance import DoorCompliance
from brayx.ports import free_port
from tests.end_to_end.jobs import ROOT, Command, said_on_failure
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
    lines = [line for line in (ROOT / "docker" / "serve.env").read_text().splitlines() if line[:1] not in ("", "#")]
    environment: dict[str, str | None] = {name: value for name, _, value in (line.partition("=") for line in lines)}

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/", timeout=5) as reply:
                return bool(json.load(reply)["service"] == "brayx")
        except (OSError, ValueError):
            return False

    with Command(["serve", "run", "echo.yaml"], folder, environment) as command, said_on_failure(command):
        command.until(answers, "the service answered")
        assert command.pids("haproxy")
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
