"""A service on Serve that requires keys from a file: every door, two replicas, and the doctor's report.

The application is this file's alone: keys are an option of a whole application.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from brayx.cluster.directory import stop_directory
from brayx.errors import Unauthorized
from brayx.gamecore.auth import Keys, new_key
from brayx.gamecore.client import Client
from deployments.echo import EchoArgs
from deployments.echo import app as echo_app
from tests.integration.conftest import Ingress

WAIT_S = 60.0
DOORS = ("http", "ws", "grpc", "native http", "native ws", "tcp")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service's keys."""
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    new_key(path, "studio")
    return path


@pytest.fixture(scope="module")
def doors(grpc_ingress: Ingress, file: Path) -> Iterator[dict[str, str]]:
    """URL of each door of an echo on two replicas."""
    ingress = grpc_ingress
    args = EchoArgs(num_workers=2, native_port=0, tcp_port=0, keys_file=str(file))
    serve.run(echo_app(args), name="echo", route_prefix="/")
    with urllib.request.urlopen(f"{ingress.http}/", timeout=WAIT_S) as reply:
        native: dict[str, Any] = json.load(reply)["doors"]
    of_serve = {"http": ingress.http, "ws": ingress.http.replace("http", "ws", 1), "grpc": f"grpc://{ingress.grpc}"}
    yield of_serve | {"native http": native["http"], "native ws": native["ws"], "tcp": native["tcp"]}
    serve.delete("echo")
    stop_directory("echo/sessions")


@pytest.mark.parametrize("door", DOORS)
def test_a_client_with_a_key_plays_although_replicas_forward_its_ticks(
    doors: dict[str, str], file: Path, door: str
) -> None:
    secret = Keys.load(file).secret("studio").decode()
    for _ in range(8):  # either replica is hit
        with Client(doors[door], timeout_s=WAIT_S, key="studio", secret=secret) as client:
            client.start(b"hello")
            for number in range(5):
                assert client.tick(b"%d" % number) == b"%d" % number
            assert client.stop(b"bye") == b"bye"


@pytest.mark.parametrize(
    ("key", "says"),
    [({}, "requires keys"), ({"key": "studio", "secret": "x" * 32}, "token"), ({"key": "who", "secret": "x" * 32}, "")],
    ids=["none", "wrong secret", "unknown"],
)
@pytest.mark.parametrize("door", DOORS)
def test_a_client_without_a_valid_key_is_refused_by_every_door(
    doors: dict[str, str], file: Path, door: str, key: dict[str, str], says: str
) -> None:
    with Client(doors[door], timeout_s=WAIT_S, **key) as client, pytest.raises(Unauthorized) as refused:  # type: ignore[arg-type]
        client.start(b"hello")
    assert says in str(refused.value)
    assert Keys.load(file).secret("studio").decode() not in str(refused.value)


@pytest.mark.parametrize("with_keys", [True, False])
def test_the_doctor_says_which_layer_fails(doors: dict[str, str], file: Path, with_keys: bool) -> None:
    words = [str(Path(sys.executable).parent / "brayx"), "doctor", doors["http"]]
    if with_keys:
        words += ["--keys-file", str(file)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (said.returncode == 0) == with_keys, said.stdout + said.stderr
    if not with_keys:
        assert "auth failed" in said.stdout
