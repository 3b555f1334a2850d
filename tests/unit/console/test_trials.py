"""The trials of a console's store, and the one that its job trains."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import TypeAdapter

from brayx.children import Channel
from brayx.console.api import create_app
from brayx.console.job import ConsoleJob
from brayx.console.page.home import running
from brayx.console.page.trials import differing, is_straight, key_charts
from brayx.console.source import Source
from brayx.console.trials import TrialDocument
from brayx.jobs.result import Ending
from brayx.tracking import Trial


@contextlib.contextmanager
def linked(job: ConsoleJob) -> Iterator[Channel]:
    """A channel to a job in this process, over real pipes."""
    (for_job, to_job), (for_console, to_console) = os.pipe(), os.pipe()
    answering = threading.Thread(target=Channel(for_job, to_console).serve, args=(job.answer,))
    answering.start()
    yield Channel(for_console, to_job)
    os.close(to_job)
    answering.join(30.0)
    assert not answering.is_alive()
    for descriptor in (for_job, to_console, for_console):
        os.close(descriptor)


@pytest.mark.parametrize("can_stop", [True, False])
async def test_only_the_trial_of_a_job_that_can_be_interrupted_can_be_stopped(tracking_db: str, can_stop: bool) -> None:
    before, running = (Trial.open("p", name, tracking_db) for name in ("before", "running"))
    child = Trial.open("p", "player", tracking_db, parent=running)
    facts = {"mode": "train", "project": "p", "trial": "running", "run_id": running.run_id}
    with linked(ConsoleJob(lambda: facts, can_stop=can_stop)) as channel:
        transport = httpx.ASGITransport(create_app(Source(tracking_db, "p", channel=channel)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            trials = (await client.get("/api/trials", params={"project": "p"})).json()
    stoppable = {trial["run_id"]: trial["can_stop"] for trial in trials}
    assert stoppable == {before.run_id: False, running.run_id: can_stop, child.run_id: can_stop}
    for trial in trials:
        run = f"/runs/{trial['run_id']}?workflowType=machine_learning"
        assert trial["page"].startswith("http://127.0.0.1:5000/#/experiments/")
        assert trial["page"].endswith(run), "of this trial, not of the list"
        assert (
            trial["project_page"]
            == f"{trial['page'].removesuffix(run)}/runs?{run.partition('?')[2]}&viewStateShareKey=brayx"
        )


async def test_a_training_has_a_curve_and_a_verdict_before_mlflow_has_its_points(tracking_db: str) -> None:
    run_id = Trial.open("p", "t", tracking_db).run_id
    numbers = {"env_steps": 3000.0, "env_steps_per_s": 900.0, "games": 60.0, "games_in_window": 60.0}
    early = [[1000.0, 20.0], [2000.0, 40.0], [3000.0, 70.0]]
    facts = {"mode": "train", "project": "p", "trial": "t", "run_id": run_id, "numbers": numbers, "early_curve": early}
    with linked(ConsoleJob(lambda: dict(facts))) as channel:
        transport = httpx.ASGITransport(create_app(Source(tracking_db, "p", channel=channel)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            overview = (await client.get("/api/job/overview")).json()
    assert (overview["verdict"]["state"], overview["curve"]) == ("learning", early)


async def test_a_training_that_has_ended_keeps_its_facts_and_says_how(tracking_db: str) -> None:
    ending = Ending({"mode": "train", "project": "p", "num_steps": 10, "numbers": {"env_steps": 5.0}})
    with linked(ConsoleJob(dict, can_stop=True, ending=ending)) as channel:
        transport = httpx.ASGITransport(create_app(Source(tracking_db, "p", channel=channel)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            before = (await client.get("/api/job")).json()
            assert (before["end"], channel.ask("ending")) == (None, None)
            ending.say("failed", "KeyError: 'velocity'")
            job, overview = [(await client.get(f"/api/job{part}")).json() for part in ("", "/overview")]
        assert not ending.shown.is_set()
        channel.ask("shown")
    assert ending.shown.is_set()
    assert (before["can_stop"], job["can_stop"]) == (True, False)
    assert job["end"] == {"state": "failed", "text": "KeyError: 'velocity'"}
    verdict = overview["verdict"]
    assert (verdict["state"], verdict["cause"], verdict["share"]) == ("failed", "KeyError: 'velocity'", 0.5)


async def test_the_home_page_names_the_trials_that_other_processes_train(tracking_db: str) -> None:
    ended, trained = (Trial.open("p", name, tracking_db) for name in ("ended", "trained"))
    Trial.open("p", "player", tracking_db, parent=trained)
    ended.finish()
    transport = httpx.ASGITransport(create_app(Source(tracking_db)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = (await client.get("/api/trials")).content
    assert running(TypeAdapter(list[TrialDocument]).validate_json(reply)) == "p / trained"


def test_settings_that_differ_and_curves_that_show_nothing() -> None:
    settings = {"a": {"seed": "0", "lr": "0.1", "model.engine": "onnx"}, "b": {"seed": "1", "lr": "0.1"}}
    assert [tuple(setting) for setting in differing(settings)] == [
        ("model.engine", ("onnx", "-")),
        ("seed", ("0", "1")),
    ]
    assert is_straight([(0, 1.0), (5, 1.0)])
    assert is_straight([])
    assert not is_straight([(0, 1.0), (5, 1.5)])
    assert key_charts({"learner/loss": 0, "return/last_100_games": 0, "tick/per_s": 0, "session/games": 0}) == [
        "return/last_100_games",
        "learner/loss",
        "tick/per_s",
    ]


async def test_a_trial_has_its_dates_and_settings_and_what_its_end_registers(tracking_db: str, tmp_path: Path) -> None:
    trial = Trial.open("p", "t", tracking_db)
    trial.log_params({"trainer": {"learning_rate": 0.1}})
    transport = httpx.ASGITransport(create_app(Source(tracking_db)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        (running,) = (await client.get("/api/trials")).json()
        assert (await client.get(f"/api/trials/{trial.run_id}/settings")).json() == {"trainer.learning_rate": "0.1"}
        assert (await client.get(f"/api/trials/{trial.run_id}/best")).json() is None
        (folder := tmp_path / "checkpoint").mkdir()
        for step, mean in ((100, 2.0), (200, 5.0), (300, 4.0)):
            trial.save_checkpoint(folder, step, {"episode_return": mean, "error": 0.5, "games": 20.0})
        best = (await client.get(f"/api/trials/{trial.run_id}/best")).json()
        assert best == {"step": 200, "result": {"mean": 5.0, "error": 0.5, "games": 20.0, "how": "training"}}
        trial.finish()
        (finished,) = (await client.get("/api/trials")).json()
    assert running["ended_s"] is None
    assert finished["ended_s"] >= finished["began_s"] == running["began_s"] > 0


def test_ports_are_the_last_settings_that_differ() -> None:
    settings = {"a": {"console_port": "1", "seed": "0", "same": "x"}, "b": {"console_port": "2", "same": "x"}}
    assert differing(settings) == [("seed", ("0", "-")), ("console_port", ("1", "2"))]
