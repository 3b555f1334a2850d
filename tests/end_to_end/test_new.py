"""`brayx new`: each new project trains by its own test: a cluster, games, a learner, and its results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.new import KINDS, new_project

TIMEOUT_S = 400.0


@pytest.mark.parametrize("template", KINDS)
def test_a_new_project_passes_its_own_tests(tmp_path: Path, template: str) -> None:
    folder = new_project("mine", template, tmp_path)[0].parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    # Its own cluster: an address of this session's would lead there.
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert "Warning" not in done.stdout + done.stderr, "it greets whoever begins"
