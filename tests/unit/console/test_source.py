"""What a console asks its job, and what it says if there is none."""

from __future__ import annotations

import pytest

from brayx.console.source import Source
from brayx.errors import JobNotRunning


def test_a_console_without_a_job_says_so_and_reports_nothing_of_one() -> None:
    source = Source("sqlite:///mlflow.db")
    assert source.job() == {}
    with pytest.raises(JobNotRunning):
        source.ask("sessions")
