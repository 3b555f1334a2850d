"""The benchmarks run. Their numbers are not checked, since the machine also does other work.

They are among the chaos tests because they take minutes and all CPUs.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS
from tests.end_to_end.jobs import ROOT, Command, said_on_failure

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["benchmarks.ticks", "--quick", "--rounds", "1", "--markdown"], "| cartpole | tcp "),
        (["benchmarks.layers", "--inside", "--markdown"], "| HTTP door around the table (ASGI) "),
        (["benchmarks.forward", "--rounds", "1", "--seconds", "0.3", "--markdown"], "| ... during a swap, to that "),
        (
            ["benchmarks.ticks", "--many", "100", "--rounds", "1", "--seconds", "0.3", "--markdown"],
            "| a tick that is passed on, p50 ms ",
        ),
        (["benchmarks.train", "--quick", "--markdown"], "| brayx, local host "),
        (["benchmarks.bridges", "--quick", "--markdown"], "| CartPole, one process of eight games "),
        (["benchmarks.first_agent", "--rounds", "1", "--markdown"], "| it is learning "),
        (["benchmarks.ticks", "--images", "--rounds", "1", "--seconds", "0.3", "--markdown"], "| small | ws "),
        (["benchmarks.scaling", "--quick", "--markdown"], "| environment "),
        (["benchmarks.train", "--parts", "--quick", "--markdown"], "| SAC "),
        (["benchmarks.replay", "--quick", "--markdown"], "| learner idle, % "),
        (
            ["benchmarks.league", "--pool", "50", "--games", "500", "--rounds", "1", "--seconds", "0.1", "--markdown"],
            "| a snapshot not in memory: ms of a forward ",
        ),
        (["benchmarks.recording", "--rounds", "1", "--seconds", "0.3", "--many", "1000", "--markdown"], "| 1280x720 "),
        (
            ["benchmarks.peers", "serve", "--rounds", "1", "--seconds", "0.3", "--markdown"],
            "| an echo over HTTP, ticks/s ",
        ),
        (["benchmarks.console", "--rounds", "1", "--seconds", "0.3", "--markdown"], "| 3 viewers "),
        pytest.param(
            ["benchmarks.wire", "--rounds", "1", "--seconds", "0.1", "--markdown"],
            "| noise, 84 x 84 ",
            marks=pytest.mark.skipif(find_spec("isal") is None, reason="isal is in the extra deflate"),
        ),
    ],
    ids=[
        "ticks",
        "layers",
        "forward",
        "ticks, many",
        "train",
        "bridges",
        "first agent",
        "ticks, images",
        "scaling",
        "train, parts",
        "replay",
        "league",
        "recording",
        "peers",
        "console",
        "wire",
    ],
)
def test_it_runs(tmp_path: Path, words: list[str], row: str) -> None:
    with Command(["python", "-m", *words], tmp_path, runs_in=ROOT) as command, said_on_failure(command):
        assert command.ended(600.0) == 0, command.err
        assert row in command.out
        command.gone(60.0)


def test_all_that_needs_a_gpu_runs_to_its_end_without_one(tmp_path: Path) -> None:
    words = ["python", "-m", "benchmarks.gpu", "--all", "--quick", "--json", str(tmp_path / "gpu.json")]
    with Command(words, tmp_path, runs_in=ROOT) as command, said_on_failure(command):
        assert command.ended(600.0) == 0, command.out
        assert "All parts passed." in command.out
        command.gone(60.0)
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results.keys() == PARTS.keys()
    if "gpu" not in results["about"]["facts"]:
        assert all(part["skipped"] for part in results.values())
