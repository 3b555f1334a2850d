"""The trials of a console's store, and the one that its job trains."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import httpx
import pytest

from brayx.children import Channel
from brayx.console.api import create_app
from brayx.console.job import ConsoleJob
from brayx.console.source import Source
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
    facts = {"mode": "train", "project": "p", "trial": "running", "run_id": running.run_id}
    with linked(ConsoleJob(lambda: facts, can_stop=can_stop)) as channel:
        transport = httpx.ASGITransport(create_app(Source(tracking_db, "p", channel=channel)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            trials = (await client.get("/api/trials", params={"project": "p"})).json()
    assert {trial["run_id"]: trial["can_stop"] for trial in trials} == {before.run_id: False, running.run_id: can_stop}
