"""Runs `brayx` commands in the tests' process: another process would spend seconds on imports."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from brayx.commands import cli

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``brayx WORDS``; returns its exit code and output."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = cli.main(words)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run
