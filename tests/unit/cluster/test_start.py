"""Starting Ray, with a `ray.init` that fails: tries, reasons, and the processes that a failed try leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from brayx.cluster.start import start_ray
from brayx.errors import StartupError

LATE = "The current node timed out during startup"


class Starts:
    """Stands in for `ray.init`: the first ``failures`` calls fail and leave a process of Ray's and another one."""

    def __init__(self, failures: int, log: str | None) -> None:
        self.failures, self.log = failures, log
        self.given: list[dict[str, Any]] = []
        self.of_ray: list[subprocess.Popen[bytes]] = []
        self.of_others: list[subprocess.Popen[bytes]] = []

    def init(self, **options: Any) -> None:
        self.given.append(options)
        if len(self.given) > self.failures:
            return
        assert all(process.poll() is not None for process in self.of_ray), "the last try's are ended first"
        self.of_ray.append(sleeping("/site-packages/ray/core/raylet"))
        self.of_others.append(sleeping("game.py"))
        if self.log is not None:
            logs = Path(os.environ["RAY_TMPDIR"], "ray", f"session_{len(self.given)}_{os.getpid()}", "logs")
            logs.mkdir(parents=True)
            (logs / "raylet.out").write_text(self.log)
        raise Exception(f"{LATE}\nand more")  # Ray raises the bare class, too


def sleeping(word: str) -> subprocess.Popen[bytes]:
    """A process with that word in its command line."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", word])


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Starts]:
    made = Starts(*request.param)
    monkeypatch.setattr(ray, "init", made.init)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    yield made
    for process in (*made.of_ray, *made.of_others):
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        ((5, "Check failed: port The metrics_agent_port file is late"), " Its node ended: The metrics_agent_port file"),
        ((5, "nothing of use"), r" See \S+/session_5_\d+/logs"),
        ((5, None), "$"),
    ],
    indirect=["starts"],
    ids=["the node's reason", "the node's log", "no node"],
)
def test_after_five_failed_tries_the_error_is_the_last_reason(starts: Starts, reason: str) -> None:
    lines: list[str] = []
    with pytest.raises(StartupError, match=f" 5 tries: {LATE}{reason}"):
        start_ray(lines.append, num_cpus=2)
    assert starts.given == [{"address": "local", "num_cpus": 2}] * 5
    assert [line.partition(": ")[0] for line in lines] == [
        f"Ray did not start, trying again ({tries} of 5 tries failed)" for tries in range(1, 5)
    ]
    assert all(LATE in line for line in lines)
    assert all(process.poll() is not None for process in starts.of_ray), "processes that a failed try left are ended"
    assert all(process.poll() is None for process in starts.of_others), "processes of another thread are not"


@pytest.mark.parametrize("starts", [(2, None)], indirect=True)
def test_a_ray_that_starts_too_late_is_started_again(starts: Starts) -> None:
    lines: list[str] = []
    start_ray(lines.append)
    assert (len(starts.given), len(lines)) == (3, 2)
