"""The code beside each .proto file is that of the file, and asks for no newer package than pyproject.toml does."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from tests.unit.test_lock import project

ROOT = Path(__file__).parents[2]
PROTOS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("brayx/**/*.proto"))


@pytest.mark.parametrize("proto", PROTOS)
def test_the_generated_code_matches_the_proto(proto: str, tmp_path: Path) -> None:
    text = (ROOT / proto).read_text()
    options = "-I. --python_out=. --pyi_out=." + " --grpc_python_out=." * ("\nservice " in text)
    assert f"{options} {proto}\n" in text, "its first comment says how to write the code"
    compiled = tmp_path / "set"
    words = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={compiled}", proto]
    subprocess.run(words, cwd=ROOT, check=True, timeout=120)
    (file,) = FileDescriptorSet.FromString(compiled.read_bytes()).file
    for message in file.message_type:
        _clear_json_names(message)
    generated = FileDescriptorProto()
    importlib.import_module(proto.removesuffix(".proto").replace("/", ".") + "_pb2").DESCRIPTOR.CopyToProto(generated)
    assert generated == file, f"run the command of {proto}"


def test_the_generated_code_asks_for_no_newer_package_than_we_do() -> None:
    code = "".join(path.read_text() for path in ROOT.glob("brayx/**/*_pb2*.py"))
    needed = {
        "protobuf": set(re.findall(r"^# Protobuf Python Version: (\S+)$", code, re.M)),
        "grpcio": set(re.findall(r"^GRPC_GENERATED_VERSION = '(\S+)'$", code, re.M)),
    }
    for name, versions in needed.items():
        (requirement,) = [line for line in project()["project"]["dependencies"] if re.match(rf"{name}>=", line)]
        lowest = [int(part) for part in requirement.split(">=")[1].split(",")[0].split(".")]
        assert versions
        for version in versions:
            assert [int(part) for part in version.split(".")][: len(lowest)] <= lowest, f"{name}: {requirement}"


def _clear_json_names(message: DescriptorProto) -> None:
    """Removes what only descriptor sets have."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _clear_json_names(nested)
