"""What pages make of the API's answers: of late and failed ones, and of recordings that still run."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from nicegui import Client, ui

from brayx.console.overview import JobDocument
from brayx.console.page import models, stopping
from brayx.console.page.caller import ApiCaller
from brayx.console.page.chinese import CHINESE
from brayx.console.page.recordings import NOT_RECORDED
from tests.waiting import WAIT_S

RUNS = {"id": "a", "session": "a", "began_s": 1.0, "ticks": 2, "end": "", "frames": 0, "result": None, "player": "",
        "version": 0, "why": "every", "events": 0, "lost": 0}  # fmt: skip


@pytest.mark.parametrize("fails", [True, False])
async def test_a_store_that_fails_or_hangs_does_not_keep_a_training_from_being_stopped(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brayx.console.page.words.is_chinese", lambda: False)
    monkeypatch.setattr(stopping, "_STORE_S", 60.0 if fails else 0.01)
    app, viewer = FastAPI(), Client(ui.page(""), request=None)

    @app.get("/api/trials/r/best")
    async def best() -> None:
        if fails:
            raise HTTPException(503)
        await asyncio.Event().wait()

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        with viewer:
            button = stopping.StopButton(ApiCaller(client, viewer))
        async with asyncio.timeout(WAIT_S):
            assert await button._registers(JobDocument(running=True, run_id="r")) == ""


@pytest.mark.parametrize(("league", "registers"), [(True, "a last snapshot of each player"), (False, "")])
async def test_a_league_that_is_finished_registers_snapshots_instead_of_its_best_version(
    league: bool, registers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def confirmed(*texts: str) -> str:
        asked.extend(texts)
        return ""

    monkeypatch.setattr("brayx.console.page.words.is_chinese", lambda: False)
    monkeypatch.setattr(stopping, "confirmed", confirmed)
    app, viewer = FastAPI(), Client(ui.page(""), request=None)
    numbers = {"behaviour_return.a": 1.0, "behaviour_return.b": 1.0}
    app.get("/api/job")(lambda: {"running": True, "league": league, "numbers": numbers})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        with viewer:
            await stopping.StopButton(ApiCaller(client, viewer))._stop()
    question, stop, finish = asked
    assert stop == "Stop it"
    assert finish == ("Finish: register last snapshots" if league else "Finish: register the best version")
    stops, finishes = question.split("\n")
    assert "the same command resumes it" in stops
    assert registers in finishes
    assert bool(finishes) == league


@pytest.mark.parametrize(
    ("recordings", "recording", "why_not"),
    [([], "", NOT_RECORDED), ([RUNS], "", models._NOT_ENDED), ([RUNS, RUNS | {"id": "b", "end": "stop"}], "b", None)],
)
async def test_compare_says_why_there_is_no_recording(
    recordings: list[dict[str, Any]], recording: str, why_not: str | None
) -> None:
    count = len(recordings)
    answers: dict[str, Any] = {
        "/api/models": [],
        "/api/job": {"running": True},
        "/api/recordings": {
            "folder": "f", "total": count, "selected": count, "recordings": recordings, "unreadable": {}
        },
        "/api/opponents": {"opponents": {}, "why_not": ""},
    }  # fmt: skip
    app = FastAPI()
    app.get("/api/{path:path}")(lambda path: answers[f"/api/{path}"])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        seen = await models._load(ApiCaller(client, Client(ui.page(""), request=None)))
    assert seen.recording == recording
    assert seen.why_not in CHINESE
    assert why_not in (None, seen.why_not)
