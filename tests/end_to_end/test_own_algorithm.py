"""The guide's own algorithm as a job of the local host: checked, interrupted, resumed, and it learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.jobs import FREE_PORTS, ROOT, Command, brayx, said_on_failure, setting, trials, without_ray
from tests.unit.test_docs import snippets_of

pytestmark = pytest.mark.cluster

RANDOM = 22.0
"""Mean return of CartPole's random policy."""


def example(folder: Path) -> None:
    """The files that the guide shows."""
    for snippet in snippets_of(ROOT / "docs" / "guide-algorithms.md"):
        if name := snippet.is_("file"):
            (folder / Path(name).name).write_text(snippet.text + "\n")


def train(folder: Path, target: float) -> Command:
    options = (*FREE_PORTS, "trainer.checkpoint_interval=4", f"trainer.target_return={target}")
    return brayx(folder, "train", "awr.yaml", *setting(*options), environment=without_ray(folder))


def test_an_algorithm_beside_the_yaml_trains_is_resumed_and_learns(tmp_path: Path) -> None:
    example(tmp_path)
    with brayx(tmp_path, "check", "awr.yaml") as checked:
        assert checked.ended() == 0
        assert "module: awr" in checked.out

    with train(tmp_path, 450) as interrupted, said_on_failure(interrupted):
        interrupted.until(lambda: any(tmp_path.glob("mlartifacts/**/weights.npz")), "it is saved")
        interrupted.control_c()
        assert interrupted.ended() == 130
    (trial,) = trials(tmp_path, "awr")["first"]
    steps = max(checkpoint.step for checkpoint in trial.checkpoints())

    with train(tmp_path, 3 * RANDOM) as finished, said_on_failure(finished):
        assert finished.ended() == 0
        assert "awr / first (resumed)" in finished.err
        assert f"target_return {3 * RANDOM:g} reached" in finished.out
    (trial,) = trials(tmp_path, "awr")["first"]
    assert trial.status == "FINISHED"
    assert max(checkpoint.step for checkpoint in trial.checkpoints()) > steps
