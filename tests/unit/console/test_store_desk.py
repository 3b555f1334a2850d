"""The console's view of a store and of the job behind it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from brayx.console.api import create_app
from brayx.console.job import ConsoleJob
from brayx.console.link import Link, answer_requests
from brayx.console.page.recordings import listed
from brayx.console.store_desk import StoreDesk
from brayx.console.ticks import tick_of
from brayx.recording.columns import Tick, columns_of
from brayx.recording.part import Part
from brayx.recording.writer import Folder
from brayx.tracking import Trial


@contextlib.contextmanager
def linked(job: ConsoleJob) -> Iterator[Link]:
    """A link to a job in this process, over real pipes."""
    for_job, to_job = os.pipe()
    for_desk, to_desk = os.pipe()
    # Closed last: the link reads it until the job has closed its end.
    with open(for_desk, "rb") as answers, open(for_job, "rb") as asked, open(to_desk, "wb") as answered:
        answering = threading.Thread(target=answer_requests, args=(asked, answered, job.answer))
        answering.start()
        with open(to_job, "wb") as requests:
            yield Link(requests, answers, lambda: None)
        answering.join(30.0)
        assert not answering.is_alive()


@pytest.mark.parametrize("can_stop", [True, False])
def test_only_the_trial_of_a_job_that_can_be_interrupted_can_be_stopped(tracking_db: str, can_stop: bool) -> None:
    before, running = (Trial.open("p", name, tracking_db) for name in ("before", "running"))
    facts = {"mode": "train", "project": "p", "trial": "running", "run_id": running.run_id}
    with linked(ConsoleJob(lambda: facts, can_stop=can_stop)) as link:
        found = {trial.run_id: trial.can_stop for trial in StoreDesk(tracking_db, project="p", link=link).trials("p")}
    assert found == {before.run_id: False, running.run_id: can_stop}


def test_a_list_of_recordings_says_how_many_there_are(tmp_path: Path, tracking_db: str) -> None:
    folder = Folder(str(tmp_path), 10**9)
    for name, count in (("bot", 30), ("other", 20)):
        parts = [Part(f"{name}-{number}", f"{name}-{number}", 0.0, 0, 1, player="main:3") for number in range(count)]
        folder.write(parts, columns_of([Tick(0, 0.0, 0.0, b"", b"", {})] * count))
    desk = StoreDesk(tracking_db, recordings=str(tmp_path))
    for session, limit, text in (
        ("", 50, f"50 in {tmp_path}"),
        ("", 7, f"50 in {tmp_path}; the newest 7 are listed"),
        ("bot-*", 50, f"30 of 50 in {tmp_path}"),
        ("bot-*", 7, f"30 of 50 in {tmp_path}; the newest 7 are listed"),
    ):
        assert listed(desk.recordings(limit, session)) == text


@pytest.mark.parametrize("text", [r'{"x": "\ud800"}', "[" * 300 + "]" * 300, "9" * 5000, "NaN", "1e999", "no json"])
def test_any_body_of_a_game_can_be_shown(text: str) -> None:
    tick = tick_of(0, 0.0, 0.0, "", text.encode(), text.encode(), {"logits": np.array([np.inf, 0.0], np.float32)})
    shown = json.loads(tick.model_dump_json())
    assert shown["input"] == shown["output"] == (None if text in ("NaN", "1e999") else text)
    assert shown["probabilities"] is None


async def test_a_body_that_is_too_large_or_nested_is_refused(tracking_db: str) -> None:
    transport = httpx.ASGITransport(create_app(StoreDesk(tracking_db)))

    async def in_chunks() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b" " * 2**20

    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for body, refused in (
            (b" " * 2**21, (413, "body_too_large")),
            (in_chunks(), (413, "body_too_large")),
            (b"[" * 100_000, (400, "bad_request")),
            (b"{", (400, "bad_request")),
        ):
            reply = await client.post("/api/games", content=body, headers={"content-type": "application/json"})
            assert (reply.status_code, reply.json()["error"]) == refused


async def test_an_unexpected_error_is_an_answer_of_the_api(tracking_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreDesk, "models", lambda self: 1 / 0)
    transport = httpx.ASGITransport(create_app(StoreDesk(tracking_db)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.get("/api/models")
    assert (reply.status_code, reply.json()["error"]) == (500, "internal")
    assert reply.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert reply.json()["message"] == "the console failed: ZeroDivisionError: division by zero"
