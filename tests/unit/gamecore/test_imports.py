"""A game client must not load an engine, nor anything it could do without."""

from __future__ import annotations

import subprocess
import sys

import pytest

import brayx.gamecore

HEAVY = ("ray", "torch", "mlflow", "onnxruntime", "onnx", "pydantic", "fastapi", "pytest")


@pytest.mark.parametrize(
    ("module", "also_absent"),
    [
        ("brayx.gamecore", ("numpy", "gymnasium", "websockets")),
        ("brayx.gamecore.client", ("numpy", "gymnasium", "websockets")),
        ("brayx.gamecore.compliance", ("numpy", "gymnasium", "websockets")),
        ("brayx.gamecore.transports.websocket", ("numpy", "gymnasium")),
        ("brayx.gamecore.gym", ("websockets",)),
    ],
)
def test_what_an_import_loads(module: str, also_absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY + also_absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_a_websocket_url_without_the_package_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['websockets'] = None\n"
        "from brayx.errors import ConfigError\n"
        "from brayx.gamecore import Client\n"
        "Client('http://127.0.0.1:1').close()\n"
        "try:\n    Client('ws://127.0.0.1:1')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install websockets" in done.stdout


def test_public_names_are_there() -> None:
    assert sorted(brayx.gamecore.__all__) == ["AsyncClient", "Client", "StepKind", "StepRequest"]
    for name in brayx.gamecore.__all__:
        assert hasattr(brayx.gamecore, name)
