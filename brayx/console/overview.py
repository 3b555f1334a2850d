"""The job behind a console, and its health."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter

from brayx.console.documents import Document
from brayx.console.source import Source
from brayx.jobs.progress import dropped_line, losses_of_recordings

_REFUSED = "requests_refused."


class JobDocument(Document):
    """The job behind this console, and its health."""

    running: bool
    """False: the console shows a tracking store without a job."""
    mode: str = ""
    """``train`` or ``serve``."""
    project: str = ""
    trial: str = ""
    """The trial that is being trained."""
    num_steps: int | None = None
    """Env steps at which the training ends."""
    target_return: float | None = None
    """Return at which the training ends."""
    up_s: float = 0.0
    """Seconds since the job began."""
    waits_for: str = ""
    """The learner's state, in words."""
    doors: dict[str, str] = {}
    """URL of each door by its name."""
    sessions: int = 0
    """Number of running sessions."""
    numbers: dict[str, float] = {}
    """Newest value of each metric, as in the trial's ``numbers.json``."""
    refusals: dict[str, float] = {}
    """Number of refused requests by error code."""
    errors: list[str] = []
    """Losses, one line for each cause."""
    registered: dict[str, list[str]] = {}
    """Registered versions that new sessions use, by model component."""
    canaries: dict[str, CanaryDocument] = {}
    """Canaries by model component."""
    can_stop: bool = False
    """Whether the trial can be stopped from here."""
    tracking: str = ""
    """Tracking URI."""


class CanaryDocument(Document):
    """A model's canary."""

    name: str
    """Name of the registered model."""
    alias: str
    """Alias of the version that gets a share."""
    share: float
    """Share of the new sessions that use it, from 0 to 1."""


def routes(source: Source) -> APIRouter:
    """The API's calls about the job."""
    router = APIRouter(prefix="/api/job", tags=["job"])

    @router.get("")
    def job() -> JobDocument:
        """The job, its health and its refusals."""
        facts = source.job()
        if not facts:
            return JobDocument(running=False, tracking=source.uri)
        numbers = {name: float(value) for name, value in facts.pop("numbers", {}).items() if np.isfinite(value)}
        refusals = {name.removeprefix(_REFUSED): n for name, n in numbers.items() if name.startswith(_REFUSED)}
        losses = losses_of_recordings(numbers) if facts["mode"] == "serve" else [dropped_line(numbers)]
        facts["errors"] = [*facts.get("errors", []), *filter(None, losses)]
        return JobDocument(**facts, numbers=numbers, refusals=refusals, tracking=source.uri)

    return router
