"""A game client loads no engine, and nothing else that it does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

import brayx.gamecore

HEAVY = ("ray", "torch", "mlflow", "onnxruntime", "onnx", "pydantic", "fastapi", "pytest")


@pytest.mark.parametrize(
    ("module", "also_absent"),
    [
        ("brayx.gamecore", ("numpy", "gymnasium", "websockets", "grpc")),
        ("brayx.gamecore.client", ("numpy", "gymnasium", "websockets", "grpc")),
        ("brayx.gamecore.compliance", ("numpy", "gymnasium", "websockets", "grpc")),
        ("brayx.gamecore.transports.websocket", ("numpy", "gymnasium", "grpc")),
        ("brayx.gamecore.transports.grpc", ("numpy", "gymnasium", "websockets")),
        ("brayx.gamecore.auth", ("numpy", "gymnasium", "websockets", "grpc")),
        ("brayx.gamecore.doctor", ("numpy", "gymnasium", "websockets", "grpc")),
        ("brayx.bridges.gym", ("websockets", "grpc")),
        ("brayx.bridges.pettingzoo", ("websockets", "grpc", "pettingzoo")),
    ],
)
def test_what_an_import_loads(module: str, also_absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY + also_absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("scheme", "module", "package"), [("ws", "websockets", "websockets"), ("grpc", "grpc", "grpcio")]
)
@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
def test_a_url_without_its_package_says_what_to_install(scheme: str, module: str, package: str, client: str) -> None:
    code = (
        f"import sys; sys.modules['{module}'] = None\n"
        "from brayx.errors import ConfigError\n"
        f"from brayx.gamecore import Client, {client}\n"
        "Client('http://127.0.0.1:1').close()\n"
        "Client('tcp://127.0.0.1:1').close()\n"
        f"try:\n    {client}('{scheme}://127.0.0.1:1')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert f"pip install {package}," in done.stdout


def test_public_names_are_there() -> None:
    assert sorted(brayx.gamecore.__all__) == ["AsyncClient", "Client", "ServiceThread", "StepKind", "StepRequest"]
    for name in brayx.gamecore.__all__:
        assert hasattr(brayx.gamecore, name)
