"""The benchmarks run: what they measure on a machine that does other things is nobody's claim.

Here because it takes minutes and all the CPUs there are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.jobs import ROOT, Command, said_on_failure

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["benchmarks.ticks", "--quick", "--rounds", "1", "--markdown"], "| cartpole | tcp "),
        (["benchmarks.layers", "--inside", "--markdown"], "| HTTP door around the table (ASGI) "),
        (["benchmarks.forward", "--rounds", "1", "--seconds", "0.3", "--markdown"], "| ... during a swap, to that "),
    ],
    ids=["ticks", "layers", "forward"],
)
def test_it_runs(tmp_path: Path, words: list[str], row: str) -> None:
    with Command(["python", "-m", *words], tmp_path, runs_in=ROOT) as command, said_on_failure(command):
        assert command.ended(600.0) == 0, command.err
        assert row in command.out
        command.gone(60.0)
