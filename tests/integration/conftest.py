"""One Serve for all modules: starting it and ending it takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from ray import serve

from brayx.ports import free_port

SERVICERS = (
    "brayx.gamecore.v1.gamecore_pb2_grpc.add_GamecoreServicer_to_server",
    "brayx.model.v1.model_pb2_grpc.add_ModelServicer_to_server",
)


@dataclass(frozen=True)
class Ingress:
    """Serve's own proxy.

    Attributes:
        http: its URL.
        grpc: ``host:port`` of gRPC.
    """

    http: str
    grpc: str


@pytest.fixture(scope="session")
def start_serve(ray_cluster: str) -> Callable[[bool | None], Ingress]:
    """Starts Serve, unless it runs: with gRPC, without, or (None) either way."""
    http, grpc = free_port(), free_port()
    options = {"port": grpc, "grpc_servicer_functions": list(SERVICERS)}
    has_grpc: bool | None = None

    def start(with_grpc: bool | None) -> Ingress:
        nonlocal has_grpc
        if with_grpc not in (None, has_grpc):
            serve.shutdown()
        has_grpc = bool(has_grpc) if with_grpc is None else with_grpc
        http_options = {"host": "127.0.0.1", "port": http}
        serve.start(proxy_location="HeadOnly", http_options=http_options, grpc_options=options if has_grpc else None)
        return Ingress(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}")

    return start


@pytest.fixture(scope="module")
def ingress(start_serve: Callable[[bool | None], Ingress]) -> Iterator[Ingress]:
    """Serve, which has no applications after the module's tests."""
    yield from _until_empty(start_serve(None))


@pytest.fixture(scope="module")
def grpc_ingress(start_serve: Callable[[bool | None], Ingress]) -> Iterator[Ingress]:
    """The same with gRPC."""
    yield from _until_empty(start_serve(True))


@pytest.fixture(scope="module")
def loopback_ingress(start_serve: Callable[[bool | None], Ingress]) -> Iterator[Ingress]:
    """The same without gRPC, which listens on every address."""
    yield from _until_empty(start_serve(False))


def _until_empty(ingress: Ingress) -> Iterator[Ingress]:
    yield ingress
    for name in serve.status().applications:
        serve.delete(name)
