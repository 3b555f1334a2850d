"""`brayx new`: each new project trains by its own test, on the local host: games, a learner, and its results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brayx.jobs.new import KINDS, new_project
from tests.end_to_end.jobs import without_ray

TIMEOUT_S = 400.0
TESTS = {"league": 18}
"""Number of a project's own tests, if not 3."""


@pytest.mark.parametrize(
    "template",
    [kind if kind == "rl" else pytest.param(kind, marks=pytest.mark.cluster) for kind in KINDS],
)
def test_a_new_project_passes_its_own_tests(tmp_path: Path, template: str) -> None:
    folder = new_project("mine", template, tmp_path)[0].parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    env = {**os.environ, **without_ray(tmp_path)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {TESTS.get(template, 3)} passed" in done.stdout
    assert "Warning" not in done.stdout + done.stderr, "a new user would see it first"
