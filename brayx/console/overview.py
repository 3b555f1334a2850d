"""The job behind a console, its health, and the verdict on it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter

from brayx.console.documents import Document, ResultDocument, number_of, result_of, served_result
from brayx.console.league import points_of as points_of_members
from brayx.console.models import member_of
from brayx.console.source import Source
from brayx.console.trials import thinned
from brayx.console.verdict import NO_JOB, VerdictDocument, verdict_of_service, verdict_of_training
from brayx.errors import LeagueError
from brayx.jobs.progress import abandoned_line, dropped_line, losses_of_recordings
from brayx.league.files import PLAYER_TAG, POINTS_TAG
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.metrics.totals import points_of
from brayx.tracking import PoolEntry, Trial, aliases
from brayx.tracking.curves import curves
from brayx.tracking.registry import versions
from brayx.urls import missing_database

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
    run_id: str = ""
    """MLflow's id of it; empty: MLflow does not have it yet."""
    league: bool = False
    """Whether its players play each other, in a league or by self-play."""
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
    silent: int = 0
    """How many of them have sent nothing for 10 s, so that nobody plays there now."""
    numbers: dict[str, float] = {}
    """Newest value of each metric, as in the trial's ``numbers.json``."""
    refusals: dict[str, float] = {}
    """Number of refused requests by error code."""
    errors: list[str] = []
    """Losses, one line for each cause."""
    registered: dict[str, list[str]] = {}
    """Registered versions that new sessions use, by model component."""
    arms: list[ArmDocument] = []
    """The versions that serve, with their results since the service began."""
    canaries: dict[str, CanaryDocument] = {}
    """Canaries by model component."""
    can_stop: bool = False
    """Whether the trial can be stopped from here."""
    command: str = ""
    """The command that started the job, and resumes it; empty: another program started it."""
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


class ArmDocument(Document):
    """A version that serves, see `brayx.model.arms.Arm`."""

    model: str
    """The model component."""
    alias: str
    version: int
    """0: the model as built."""
    sessions: float = 0.0
    ticks: float = 0.0
    errors: float = 0.0
    """Sessions that an error ended."""
    refusals: float = 0.0
    result: ResultDocument | None = None
    """Mean return of all its games as the registry has it, or of the newest ones; null: none has ended."""
    p50_s: float | None = None
    p99_s: float | None = None
    """Percentiles of the newest ticks' time; null: none is timed yet."""
    former: bool = False
    """Whether the alias points at another version by now."""

    @property
    def label(self) -> str:
        """Names the arm."""
        return f"{self.model}/{self.alias}/{self.version}"


class RatedDocument(Document):
    """A registered version and its return."""

    name: str
    version: int
    result: ResultDocument | None
    """Its return in training, or of an evaluation since; null: not known."""
    member: str = ""
    """Its name in its league, such as ``main:7``; empty: it is no player's."""
    points: float | None = None
    """Its points in its league; null: not known."""


class OverviewDocument(Document):
    """The verdict on the job, and what it is based on."""

    verdict: VerdictDocument
    arms: list[ArmDocument] = []
    """The versions that serve, with the results that the registry has of them."""
    curve: list[tuple[float, float]] = []
    """``(env steps, mean return of the last 100 games)`` of the trial that is being trained."""
    means: list[tuple[float, float]] = []
    """``(env steps, mean return of the games since the point before)``."""
    champion: RatedDocument | None = None
    newest: RatedDocument | None = None
    """The newest version of the project; null: it has none."""


def routes(source: Source) -> APIRouter:
    """The API's calls about the job."""
    router = APIRouter(prefix="/api/job", tags=["job"])

    @router.get("")
    def job() -> JobDocument:
        """The job, its health and its refusals."""
        return _job(source)

    @router.get("/overview")
    def overview() -> OverviewDocument:
        """The verdict on the job, its learning curve, and the versions of its project."""
        job = _job(source)
        if not job.running:
            return OverviewDocument(verdict=VerdictDocument(state="none", reason=NO_JOB))
        entries = [] if missing_database(source.uri) is not None else versions(source.project, source.uri)
        newest_aliases = aliases(source.project, source.uri) if entries else {}
        crowned = next((entry for entry in entries if entry.version == newest_aliases.get("champion")), None)
        points = _points(source, [*entries[-1:], *([crowned] if crowned else [])])
        champion = None if crowned is None else _rated(crowned, points)
        newest = _rated(entries[-1], points) if entries else None
        if job.mode == "serve":
            verdict = verdict_of_service(job.numbers, job.errors, job.sessions, job.silent)
            arms = with_results(job.arms, {entry.version: entry.tags for entry in entries}, newest_aliases)
            return OverviewDocument(verdict=verdict, arms=arms, champion=champion, newest=newest)
        returns, means = _curves(source, job.run_id, RETURN_CHART, CHARTS["episode_return"])
        verdict = verdict_of_training(
            job.numbers,
            job.errors,
            returns,
            up_s=job.up_s,
            sessions=job.sessions,
            num_steps=job.num_steps,
            target=job.target_return,
            league=job.league,
        )
        return OverviewDocument(verdict=verdict, curve=returns, means=means, champion=champion, newest=newest)

    return router


def _job(source: Source) -> JobDocument:
    facts = source.job()
    if not facts:
        return JobDocument(running=False, tracking=source.uri)
    numbers = {name: float(value) for name, value in facts.pop("numbers", {}).items() if np.isfinite(value)}
    refusals = {name.removeprefix(_REFUSED): n for name, n in numbers.items() if name.startswith(_REFUSED)}
    losses = losses_of_recordings(numbers) if facts["mode"] == "serve" else [dropped_line(numbers)]
    losses.append(abandoned_line(numbers))
    facts["league"] = facts.get("league", False) or bool(points_of(numbers))
    facts["errors"] = [*facts.get("errors", []), *filter(None, losses)]
    return JobDocument(**facts, numbers=numbers, refusals=refusals, arms=_arms(numbers), tracking=source.uri)


def _arms(numbers: Mapping[str, float]) -> list[ArmDocument]:
    """The arms in a service's numbers, such as ``arm_ticks.model/champion/3``."""
    fields = {f"arm_{field}": field for field in ("sessions", "ticks", "errors", "refusals")}
    by_arm: dict[str, dict[str, Any]] = {}
    for name, number in numbers.items():
        value: float | ResultDocument = number
        metric, _, label = name.partition(".")
        field = fields.get(metric)
        if metric == "arm_seconds":
            label, _, percentile = label.rpartition(".")
            field = f"{percentile}_s"
        if metric == "arm_return":
            field, value = "result", ResultDocument(mean=number)
        if field and label.count("/") >= 2 and not label.endswith(".run"):
            by_arm.setdefault(label, {})[field] = value
    arms = []
    for label, results in sorted(by_arm.items()):
        model, alias, version = label.rsplit("/", 2)
        arms.append(ArmDocument(model=model, alias=alias, version=int(version), **results))
    return arms


def with_results(
    arms: Sequence[ArmDocument], tags: Mapping[int, Mapping[str, str]], newest_aliases: Mapping[str, int]
) -> list[ArmDocument]:
    """Arms with what the registry says: the result of all games of their versions, and whether their alias moved."""
    seen = []
    for arm in arms:
        result = served_result(tags.get(arm.version, {})) or arm.result
        former = newest_aliases.get(arm.alias, arm.version) != arm.version
        seen.append(arm.model_copy(update={"result": result, "former": former}))
    return seen


def _curves(source: Source, run_id: str, *charts: str) -> list[list[tuple[float, float]]]:
    """Curves of the trial over env steps, whatever its ``x_axis``; empty ones if MLflow has none yet."""
    if not run_id:
        return [[] for _ in charts]
    return [thinned(points) for points in curves(Trial.attach(source.uri, run_id), charts, "env_steps").values()]


def _points(source: Source, entries: Sequence[PoolEntry]) -> Mapping[str, float]:
    """Points of members of the newest league, if one of the versions is a player's; the tags have older ones."""
    with contextlib.suppress(LeagueError):
        return points_of_members(source) if any(PLAYER_TAG in entry.tags for entry in entries) else {}
    return {}


def _rated(entry: PoolEntry, points: Mapping[str, float]) -> RatedDocument:
    member = member_of(entry.version, entry.tags)
    rated = RatedDocument(name=entry.name, version=entry.version, result=result_of(entry.tags), member=member)
    return rated.model_copy(update={"points": points.get(member, number_of(entry.tags, POINTS_TAG))})
