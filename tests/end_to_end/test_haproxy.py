"""The config that the guide shows for gRPC through HAProxy in front of two replicas, as `docker/serve.sh` starts it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from brayx.errors import TransportError
from brayx.gamecore.client import Client
from brayx.gamecore.compliance import DoorCompliance
from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub
from brayx.ports import free_port
from tests.end_to_end.jobs import serve_run, tuned
from tests.end_to_end.test_serve_run import status
from tests.integration.test_grpc import WAIT_S, free_again, play, resume

pytestmark = pytest.mark.cluster
GUIDE = Path(__file__).parents[2] / "docs" / "guide-serve.md"
ORIGIN = "https://play.example.com"


def guide() -> dict[str, Any]:
    """The Serve config that the guide shows for gRPC."""
    (shown,) = [
        config
        for text in re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
        if "grpc_options" in (config := yaml.safe_load(text))
    ]
    return dict(shown)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """HTTP and gRPC port of `serve run` of the guide's config."""
    folder = tmp_path_factory.mktemp("haproxy")
    config = guide()
    http, grpc_port = free_port(), free_port()
    config["http_options"]["port"], config["grpc_options"]["port"] = http, grpc_port
    args = {"num_workers": 2, "native_port": None, "tcp_port": None, "cors_origins": [ORIGIN]}
    args["drain_timeout_s"] = 1.0  # the suite leaves sessions
    config["applications"][0]["args"] = args
    (folder / "echo.yaml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{http}"
    with serve_run(tuned("serve", "run", "echo.yaml"), folder, lambda: bool(status(url))) as command:
        command.until(lambda: bool(command.processes("haproxy", "-f")), "HAProxy ran")
        (haproxy, *_) = command.processes("haproxy", "-f")
        words = haproxy.cmdline()
        settings = Path(words[words.index("-f") + 1]).read_text()
        assert re.search(r"balance hdr\(session\)\s+hash-type consistent djb2 avalanche", settings), settings
        yield http, grpc_port


class TestEchoBehindHAProxy(DoorCompliance):
    """Every door that there is through the ingress."""

    doors = ("http", "ws", "grpc")
    cors_origin = ORIGIN

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, ports: tuple[int, int]) -> None:
        http, grpc = ports
        cls.url = f"http://127.0.0.1:{http}"
        cls.urls = {"grpc": f"grpc://127.0.0.1:{grpc}"}


@pytest.mark.parametrize("what", [play, resume, free_again])
def test_grpc_streams(ports: tuple[int, int], what: Callable[[GamecoreStub], None]) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
        what(GamecoreStub(channel))


def test_grpc_finds_an_application_by_its_name(ports: tuple[int, int]) -> None:
    url = f"grpc://127.0.0.1:{ports[1]}"
    with Client(f"{url}/other", timeout_s=WAIT_S) as client, pytest.raises(TransportError, match="'other'"):
        client.call(b"x")
    with Client(f"{url}/echo", timeout_s=WAIT_S) as client:
        client.start()
        for number in range(20):
            assert client.tick(b"%d" % number) == b"%d" % number
