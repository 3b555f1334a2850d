"""One word, one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("brayx", "deployments", "pipelines")

SHARED: dict[str, str] = {
    "RemoteBuffer": "`brayx.RemoteBuffer` looks in the job first, and makes the cluster's: users see one class",
    "RemoteModel": "as `RemoteBuffer`",
}
"""Names that two classes may share, with the reason."""


def public_classes() -> dict[str, list[str]]:
    places = defaultdict[str, list[str]](list)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" in file.name:
                continue
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(file.relative_to(ROOT).as_posix())
    return places


def test_no_two_public_classes_share_a_name() -> None:
    assert {name: files for name, files in public_classes().items() if len(files) > 1 and name not in SHARED} == {}


def test_every_exception_is_needed() -> None:
    classes = public_classes()
    assert [name for name in SHARED if len(classes[name]) < 2] == []
