"""One MLflow process for the clerks of a module, since each takes two seconds of CPU time to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from brayx.tracking.clerk_process import ClerkProcess


@pytest.fixture(scope="module")
def _process() -> Iterator[ClerkProcess]:
    process = ClerkProcess()
    yield process
    process.end()


@pytest.fixture
def shared_mlflow(_process: ClerkProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's clerks share the module's process, and do not end it. Not for tests of its start or its end."""
    monkeypatch.setattr("brayx.tracking.clerk.ClerkProcess", lambda: _process)
    monkeypatch.setattr(_process, "end", lambda: None)
