"""``brayx mlagents-learn``: what ``--resume``, ``--force``, ``--initialize-from`` and ``--inference`` start."""

from __future__ import annotations

from typing import Any

import pytest

from brayx.commands.mlagents_learn import _started
from brayx.errors import ConfigError
from brayx.jobs.mlagents import learn_options
from brayx.tracking import Trial

PROJECT, NAME = "unity", "ppo"
NO_RUN = "--resume: project 'unity' has no run 'ppo': see `brayx trials`"
TAKEN = "project 'unity' has a run 'ppo': --resume goes on with it, --force starts a new one, or name another"


def started(uri: str, **flags: Any) -> tuple[str | None, bool]:
    """The initial weights, and whether the run of that name is resumed."""
    learn = learn_options(None, {"checkpoint_settings": flags})
    job, resumed = _started(learn, learn.load(), uri)
    return job.trainers["trainer"].initial_weights, resumed


@pytest.mark.parametrize("has_other_runs", [False, True])
def test_without_a_run_of_that_name_a_new_one_starts(tracking_db: str, has_other_runs: bool) -> None:
    if has_other_runs:
        parent = Trial.open(PROJECT, "other", tracking_db)
        Trial.open(PROJECT, NAME, tracking_db, parent=parent).finish("KILLED")
        Trial.open("another project", NAME, tracking_db).finish("KILLED")
    assert started(tracking_db) == (None, False)
    assert started(tracking_db, force=True) == (None, False)
    assert started(tracking_db, initialize_from="x") == ("runs:/x", False)
    for flags in ({}, {"force": True}, {"initialize_from": "x"}):
        with pytest.raises(ConfigError, match=NO_RUN):
            started(tracking_db, resume=True, **flags)


def test_a_run_of_that_name_is_resumed_or_left(tracking_db: str, capsys: pytest.CaptureFixture[str]) -> None:
    def left() -> None:
        """What does not depend on how the newest run ended."""
        for flags in ({}, {"initialize_from": "x"}):
            with pytest.raises(ConfigError, match=TAKEN):
                started(tracking_db, **flags)
        assert started(tracking_db, force=True) == (None, False)
        assert started(tracking_db, force=True, initialize_from="x") == ("runs:/x", False)
        assert started(tracking_db, run_id="second") == (None, False)

    Trial.open(PROJECT, NAME, tracking_db).finish("KILLED")
    left()
    assert started(tracking_db, resume=True) == (None, True)
    assert started(tracking_db, resume=True, initialize_from="x") == (None, True), "the run has its own weights"
    assert not capsys.readouterr().err

    newest = Trial.open(PROJECT, NAME, tracking_db, resume=False)
    newest.finish("FINISHED")
    left()
    assert started(tracking_db, resume=True) == (f"runs:/{newest.run_id}", False)
    assert "run 'ppo' is finished: a new one of that name starts from its weights" in capsys.readouterr().err


@pytest.mark.parametrize("has_run", [False, True])
def test_inference_is_refused_with_the_commands_that_play(tracking_db: str, has_run: bool) -> None:
    if has_run:
        Trial.open(PROJECT, NAME, tracking_db).finish()
    with pytest.raises(ConfigError, match="--inference learns nothing") as refusal:
        started(tracking_db, inference=True, resume=True)
    assert "brayx serve " in refusal.value.message
    command = refusal.value.message.rpartition(" and run ")[2]
    assert command == "brayx bridge unity --url tcp://127.0.0.1:8101 --width=84 --height=84 --quality-level=5"
