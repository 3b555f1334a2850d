"""pyproject.toml and requirements.lock are one set of facts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(lines: list[str]) -> dict[str, str]:
    """Version by normalised name (PEP 503), of lines that each pin one."""
    versions = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(\[[a-z,]+\])?==([0-9][0-9a-z.]*)", line)
        assert match, f"{line!r} is not a plain pin"
        versions[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[3]
    return versions


def lock() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return pins([line for line in lines if line and not line.startswith("#")])


def test_every_direct_dependency_is_a_range_that_holds_its_lock() -> None:
    meta, locked = project()["project"], lock()
    for line in meta["dependencies"]:
        requirement = Requirement(line)
        assert locked[requirement.name] in requirement.specifier, line
        assert any(part.operator == ">=" for part in requirement.specifier), line


def test_the_packages_of_development_are_locked_to_their_pins() -> None:
    direct = pins(project()["project"]["optional-dependencies"]["dev"])
    assert direct == {name: lock().get(name) for name in direct}


def test_the_build_backend_is_the_locked_one() -> None:
    assert pins(project()["build-system"]["requires"]).items() <= lock().items()


def test_the_other_extras_are_pinned() -> None:
    extras = project()["project"]["optional-dependencies"]
    assert pins(extras["bench"] + extras["tensorrt"])


def test_the_lock_has_no_cuda() -> None:
    assert not [name for name in lock() if name.startswith(("nvidia", "cuda", "triton", "tensorrt"))]


def test_the_lock_has_no_package_that_slows_every_ray_process() -> None:
    assert "jsonschema" in lock(), "Ray imports them if they are installed"
    assert not {"rfc3987-syntax", "lark"} & lock().keys()
