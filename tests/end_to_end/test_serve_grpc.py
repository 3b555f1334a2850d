"""`serve run` of the Serve config that the guide shows for gRPC, behind HAProxy."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import yaml

from brayx.errors import BrayxError, TransportError
from brayx.gamecore.client import Client
from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub
from brayx.ports import free_port
from tests.end_to_end.jobs import Command, said_on_failure
from tests.end_to_end.test_serve_run import HAPROXY
from tests.integration.test_grpc import WAIT_S, free_again, guide, play, resume


def test_the_guide_s_config_behind_haproxy(tmp_path: Path) -> None:
    config = guide()
    config["http_options"]["port"] = free_port()
    config["grpc_options"]["port"] = port = free_port()
    config["applications"][0]["args"] = {"num_workers": 2, "native_port": None, "tcp_port": None}
    (tmp_path / "grpc.yaml").write_text(yaml.safe_dump(config))
    url = f"grpc://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with Client(url, timeout_s=5.0) as client:
                return client.call(b"x") == b"x"
        except BrayxError:
            return False

    with Command(["serve", "run", "grpc.yaml"], tmp_path, HAPROXY) as command, said_on_failure(command):
        command.until(answers, "the service answered")
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = GamecoreStub(channel)
            for what in (play, resume, free_again):
                what(stub)
        with (
            Client(f"{url}/other", timeout_s=WAIT_S) as client,
            pytest.raises(TransportError, match="'other'"),
        ):
            client.call(b"x")
        with Client(f"{url}/echo", timeout_s=WAIT_S) as client:
            client.start()
            for number in range(20):
                assert client.tick(b"%d" % number) == b"%d" % number
        command.control_c(group=False)
        command.gone(60.0)
