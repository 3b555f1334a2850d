"""The table of trials."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from brayx.metrics import BEST_METRIC, GAMES_OF_BEST
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.metrics.totals import GAMES_IN_WINDOW
from brayx.tracking import Trial
from brayx.tracking.mlflow_page import NOTE_TAG
from brayx.tracking.trials import table, trials

ENDED = 2**22 + 1
"""A pid above Linux's highest."""


def test_a_trial_whose_process_was_killed_is_interrupted(tracking_db: str) -> None:
    host, running = socket.gethostname(), Trial.open("p", "mine", tracking_db)
    owners = {"killed": f"{host}:{ENDED}:1", "used again": f"{host}:{os.getpid()}:1", "elsewhere": f"not-{host}:1:1"}
    for name, owner in owners.items():
        Trial.open("p", name, tracking_db).set_tag("brayx.owner", owner)
    Trial.open("p", "done", tracking_db).finish()
    assert {row.name: row.status for row in trials(tracking_db)} == {
        running.name: "running",
        "killed": "interrupted",
        "used again": "interrupted",
        "elsewhere": "running",
        "done": "finished",
    }


def test_a_return_has_the_number_of_its_games(tracking_db: str) -> None:
    numbers = {"one": {RETURN_CHART: 0.0412, CHARTS[GAMES_IN_WINDOW]: 1.0}, "search": {CHARTS["episode_return"]: 21.5}}
    ids = {}
    for name, values in numbers.items():
        trial = Trial.open("p", name, tracking_db)
        trial.log_metrics(values, 10)
        ids[name] = trial.run_id
    lines = sorted(" ".join(line.split()) for line in table(trials(tracking_db)).splitlines()[1:])
    assert lines == [f"p one running - 0.0412 (1 game) - {ids['one']}", f"p search running - 21.5 - {ids['search']}"]


def test_the_best_return_is_its_best_checkpoints(tracking_db: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "weights.npz").write_bytes(b"")
    trial = Trial.open("p", "t", tracking_db)
    for step, mean in ((10, 500.0), (20, 180.0)):
        trial.save_checkpoint(made, step, {BEST_METRIC: mean, GAMES_OF_BEST: 100.0})
    trial.log_metrics({RETURN_CHART: 180.0}, 20)
    shown = " ".join(table(trials(tracking_db)).splitlines()[1].split())
    assert shown == f"p t running - 180 500 (100 games) {trial.run_id}"


def test_children_are_below_their_parent_by_name(tracking_db: str) -> None:
    league = Trial.open("p", "league", tracking_db)
    for player in ("main", "exploiter"):
        Trial.open("p", player, tracking_db, parent=league)
    league.log_metrics({"league/points.main": 1500.5, "league/points.random": 900.0, "learner/seconds": 61.5}, 10)
    later = Trial.open("p", "later", tracking_db)
    rows = trials(tracking_db)
    assert [(row.name, row.is_child) for row in rows] == [
        ("later", False), ("league", False), ("exploiter", True), ("main", True),
    ]  # fmt: skip
    assert [row.points for row in rows] == [None, 1500.5, None, 1500.5]
    assert [row.seconds for row in rows] == [None, 61.5, None, None]
    assert [row.note for row in rows] == [""] * 4
    later.set_tag(NOTE_TAG, "obs[2] is nan")
    for status, note in (("FAILED", "obs[2] is nan"), ("KILLED", "")):
        later.finish(status)
        assert trials(tracking_db)[0].note == note
    lines = [line.split("running")[0].rstrip() for line in table(rows).splitlines()[1:]]
    assert [line[len("project  ") :] for line in lines] == ["later", "league", "  exploiter", "  main"]
