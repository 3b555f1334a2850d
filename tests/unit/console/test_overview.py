"""The overview: its learning curve, who leads a league, and the versions that serve."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from nicegui import Client, ui

from brayx.console import verdict
from brayx.console.documents import ResultDocument, result_of, served_result
from brayx.console.league import StandingDocument
from brayx.console.overview import (
    ArmDocument,
    CanaryDocument,
    JobDocument,
    _arms,
    _curves,
    _judged_arms,
    _pool,
    with_results,
)
from brayx.console.page.caller import ApiCaller
from brayx.console.page.overview import _Loader, _ran, _Seen, led
from brayx.console.source import Source
from brayx.engines.base import save_weights
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.metrics.totals import SECONDS
from brayx.tracking import Trial, register, tag

THIRTY = {"elo": 0.0, "games": 30, "champion": False, "env_steps": None}


def test_the_curve_is_over_env_steps_whatever_the_trial_is_written_over(tracking_db: str) -> None:
    trial = Trial.open("project", "by updates", tracking_db)
    source = Source(tracking_db)
    assert _curves(source, trial.run_id, RETURN_CHART) == _curves(source, "", RETURN_CHART) == [[]]
    for update in (1, 2):
        trial.log_metrics({RETURN_CHART: 10.0 * update, CHARTS["env_steps"]: 500 * update}, update)
    assert _curves(source, trial.run_id, RETURN_CHART) == [[(500, 10.0), (1000, 20.0)]]


async def test_a_recording_is_of_the_running_job_however_late_the_page_asks() -> None:
    facts = {"result": None, "player": "", "version": 0, "why": "every", "events": 0, "lost": 0}
    rows = [
        facts | {"id": str(at), "session": "a", "began_s": at, "ticks": 2, "end": "stop", "frames": 0}
        for at in (99, 101)
    ]
    answers: dict[str, Any] = {
        "/api/job": {"running": True, "mode": "serve", "up_s": 3.0, "began_s": 100.0},
        "/api/job/overview": {"verdict": {"state": "idle", "reason": verdict.IDLE}},
        "/api/recordings": {"folder": "f", "total": 2, "selected": 2, "recordings": rows, "unreadable": {}},
    }
    app = FastAPI()
    app.get("/api/{path:path}")(lambda path: answers.get(f"/api/{path}"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        seen = await _Loader(ApiCaller(client, Client(ui.page(""), request=None))).load()
    assert isinstance(seen, _Seen)
    assert seen.picture is not None
    assert seen.picture.recording.id == "101"


def test_a_league_is_led_by_the_strongest_member_if_its_interval_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    leading = verdict.VerdictDocument(state="leading", reason=verdict.LEADS)
    first = StandingDocument(member="main:7", points=1310.0, low=1290.0, high=1330.0, **THIRTY)
    for points, reason in ((1200.0, verdict.AHEAD), (1280.0, verdict.CLOSE)):
        second = StandingDocument(member="main", points=points, low=points - 20.0, high=points + 20.0, **THIRTY)
        judged = led(leading, [first, second])
        assert judged.reason == reason
        values = judged.values
        assert (values["leader"], values["second"], values["lead"]) == ("main:7", "main", f"{1310.0 - points:.0f}")
    monkeypatch.setattr("brayx.console.page.words.is_chinese", lambda: False)
    script = first.model_copy(update={"member": "tactical", "script": True})
    assert led(leading, [script, first]).values["leader"] == "tactical (script)"
    starting = verdict.VerdictDocument(state="starting", reason=verdict.BEGINS)
    assert led(starting, [first, first]) is starting


def test_a_training_that_fails_before_it_learns_says_when_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brayx.console.page.words.is_chinese", lambda: False)
    job = JobDocument(running=True, mode="train", up_s=31.0, numbers={SECONDS: 0.0})
    assert _ran(job) == "started 31 s ago"
    assert _ran(job.model_copy(update={"numbers": {SECONDS: 7.0}})) == "training for 7 s"


def test_the_arms_of_a_service_have_their_latency_beside_their_counts() -> None:
    champion = "model/champion/3"
    (arm,) = _arms(
        {
            f"arm_ticks.{champion}": 8.0,
            f"arm_games.{champion}": 4.0,
            f"arm_returns.{champion}": 8.0,
            f"arm_return.{champion}": 3.0,
            f"arm_seconds.{champion}.p50": 0.001,
            f"arm_seconds.{champion}.p99": 0.002,
            f"arm_seconds.{champion}.run.p99": 0.5,
            f"arm_return_squared.{champion}": 28.0,
        }
    )
    assert (arm.label, arm.ticks, arm.p50_s, arm.p99_s) == (champion, 8.0, 0.001, 0.002)
    assert arm.result == ResultDocument(mean=2.0, error=1.0, games=4.0, how="service")
    (registered,) = with_results([arm], {3: {"serving.episode_return": "9", "serving.games": "3"}}, {})
    assert registered.result == arm.result, "the registry gets them every ten seconds"


def test_a_result_says_how_its_games_were_played() -> None:
    trained = {"return": "7.5", "return_games": "100", "rating": "7.5"}
    assert result_of(trained) == ResultDocument(mean=7.5, games=100.0, how="training")
    rated = trained | {"rating": "9", "rating_games": "20"}
    assert result_of(rated) == ResultDocument(mean=9.0, games=20.0, how="evaluation")
    served = served_result(rated | {"serving.episode_return": "8.9"})
    assert served == ResultDocument(mean=8.9, how="service")


def test_an_arm_has_the_results_of_its_own_models_pool(tracking_db: str, tmp_path: Path) -> None:
    trial = Trial.open("project", "t", tracking_db)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_weights(folder / "weights.npz", {"factor": np.zeros(1, np.float32)})
    for name, mean in (("project", 0.0), ("project-model", 9.0)):
        for version, alias in ((1, "champion"), (2, "candidate")):
            register(trial, trial.save_checkpoint(folder, version), name, alias=alias)
            served = {"episode_return": mean / version, "return_error": 0.1, "games": 50}
            tag(name, version, {f"serving.{key}": str(value) for key, value in served.items()}, tracking_db)
    job = JobDocument(
        running=True,
        registered={"model": ["models:/project-model/1", "models:/project-model/2"], "other": []},
        arms=[
            ArmDocument(model="model", alias="champion", version=1),
            ArmDocument(model="model", alias="candidate", version=2),
            ArmDocument(model="other", alias="champion", version=0),
        ],
        canaries={"model": CanaryDocument(name="project-model", alias="candidate", share=0.5)},
    )
    arms, worse = _judged_arms(job, partial(_pool, tracking_db))
    assert [arm.result and arm.result.mean for arm in arms] == [9.0, 4.5, None]
    assert [judged.reason for judged in worse] == [verdict.WORSE]
