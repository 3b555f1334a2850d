"""Runs `brayx` commands in the tests' process: another process would spend seconds on imports."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from pipelines import cli

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``brayx WORDS``; returns its exit code and output, and restores signal handlers."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        capsys.readouterr()
        try:
            code = cli.main(words)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run
