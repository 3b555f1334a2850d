"""docker/Dockerfile is made of parts that are there. `make images` builds it; nothing here does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.test_lock import lock, project

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
TARGETS = ("serve", "train", "client")


def stage(name: str) -> str:
    """The instructions of a stage of the Dockerfile."""
    (text,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(text)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_the_runtime_with_packages_of_its_own(target: str) -> None:
    assert re.search(rf"^FROM runtime AS {target}$", DOCKERFILE, re.MULTILINE)
    assert f"COPY --from={target}-packages /opt/brayx /opt/brayx\n" in stage(target)
    assert "USER 1000\n" in stage("runtime")


def test_what_the_images_copy_is_there() -> None:
    sources = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    assert sources
    for source in " ".join(sources).split():
        assert (ROOT / source).exists(), source


@pytest.mark.parametrize("extras", [[], ["atari", "video"]])
def test_the_images_install_what_the_package_depends_on(extras: list[str]) -> None:
    words = [sys.executable, str(DOCKER / "dependencies.py"), *extras]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    meta = project()["project"]
    assert printed == meta["dependencies"] + [line for extra in extras for line in meta["optional-dependencies"][extra]]


def test_serving_does_without_packages_of_the_lock() -> None:
    (names,) = re.findall(r'unlink\(missing_ok=True\)" \\\n(.*\\\n.*)', (DOCKER / "trim.sh").read_text())
    assert set(names.replace("\\", "").split()) - {"pip"} <= set(lock())


def test_each_overlay_runs_an_image_of_ours() -> None:
    for file in (DOCKER / "kubernetes" / "overlays").glob("*/kustomization.yaml"):
        images = {image["name"] for image in yaml.safe_load(file.read_text())["images"]}
        assert images & {f"brayx-{target}" for target in TARGETS}, file
