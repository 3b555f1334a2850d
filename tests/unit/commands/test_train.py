"""``brayx train``: overrides add up, ``--cluster`` may stand alone, and the end names the next command."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import brayx.front
from brayx.commands import cli
from brayx.jobs.result import TrainResult
from brayx.tracking import Trial
from tests.end_to_end.jobs import setting


def parsed(*words: str) -> dict[str, Any]:
    return vars(cli.parser(["train"]).parse_args(["train", "cartpole.yaml", *words]))


@pytest.mark.parametrize(
    ("words", "cluster"), [([], None), (["--cluster"], ""), (["--cluster", "auto"], "auto"), (["--cluster", ""], "")]
)
def test_a_cluster_is_joined_started_or_not_used(words: list[str], cluster: str | None) -> None:
    assert parsed(*words)["cluster"] == cluster


def test_overrides_add_up_in_their_order() -> None:
    assert parsed()["overrides"] == []
    assert parsed("--set", "a.b=1", "--set", "a.b=2")["overrides"] == ["a.b=1", "a.b=2"]


@pytest.mark.parametrize(
    ("words", "version", "following"),
    [
        (["cartpole.yaml"], 3, ["next: brayx serve cartpole.yaml"]),
        (
            ["cartpole.yaml", "--set", "project=my game", "--tracking", "a.db"], 3,
            ["next: brayx serve cartpole.yaml --set 'project=my game' --tracking a.db"],
        ),
        (
            ["unity.yaml", *setting("trainer.num_steps=8000", "game.num=2", "trainer.algorithm={name: sac}")], 1,
            ["next: brayx serve unity.yaml --set 'trainer.algorithm={name: sac}'"],
        ),
        (["cartpole.yaml"], None, []),
    ],
)  # fmt: skip
def test_the_end_of_a_training_with_a_version_names_the_command_that_serves_it(
    words: list[str],
    version: int | None,
    following: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trial = Trial("sqlite:///none.db", "id", "p", "t")
    result = TrainResult(trial, {}, True, "p", version, 1.0, [], "", ended="it ended")
    monkeypatch.setattr(brayx.front, "train_job", lambda job, **options: result)
    assert cli.main(["train", *words]) == 0
    assert capsys.readouterr().out.removeprefix(f"{result.summary()}\n").splitlines() == following


@pytest.mark.parametrize(
    ("words", "near"), [(["train", "gdot.yaml"], "; nearest is 'godot.yaml'"), (["mlagents-learn", "no.yaml"], "")]
)
def test_a_file_that_does_not_exist_is_said_before_the_slow_imports(words: list[str], near: str) -> None:
    code = (
        f"import sys\nfrom brayx.commands import cli\ncli.main({words})\nsys.exit('brayx.jobs.config' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert ended.stderr.endswith(f"\nbrayx: {words[1]}: cannot be read: No such file or directory{near}\n")
