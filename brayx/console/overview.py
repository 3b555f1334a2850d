"""The job behind a console, its health, and the verdict on it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from fastapi import APIRouter

from brayx.console.documents import Document, ResultDocument, lead_of_version, number_of, result_of, served_result
from brayx.console.league import points_of as points_of_members
from brayx.console.models import member_of
from brayx.console.source import Source
from brayx.console.trials import thinned
from brayx.console.verdict import (
    NO_JOB,
    VerdictDocument,
    verdict_of_canary,
    verdict_of_end,
    verdict_of_service,
    verdict_of_training,
)
from brayx.errors import LeagueError
from brayx.jobs.progress import abandoned_line, dropped_line, losses_of_recordings
from brayx.league.files import PLAYER_TAG, POINTS_TAG
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.metrics.totals import ARM_GAMES, ARM_RETURNS, points_of
from brayx.model.arms import RESULTS, Results
from brayx.tracking import PoolEntry, Trial, aliases
from brayx.tracking.curves import curves
from brayx.tracking.registry import versions
from brayx.urls import missing_database

_REFUSED = "requests_refused."
_ARM_SUMS = {name: RESULTS[name] for name in RESULTS if name != "arm_return"}
_ARM_SUMS |= {ARM_GAMES: "games", ARM_RETURNS: "returns"}
"""Names in `Results.totals` of a service's sums by arm."""


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
    early_curve: list[tuple[float, float]] = []
    """Its learning curve as in `OverviewDocument`, until MLflow has it."""
    league: bool = False
    """Whether its players play each other, in a league or by self-play."""
    num_steps: int | None = None
    """Env steps at which the training ends."""
    target_return: float | None = None
    """Return at which the training ends."""
    target_games: int = 20
    """Number of games that it must be the mean of."""
    up_s: float = 0.0
    """Seconds since the job began."""
    began_s: float = 0.0
    """Unix time before which no session of the job began, by the clock of its machine."""
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
    end: EndDocument | None = None
    """How the training has ended; null: it has not."""
    tracking: str = ""
    """Tracking URI."""


class EndDocument(Document):
    """How a training has ended."""

    state: Literal["finished", "interrupted", "failed"]
    text: str
    """What it has registered and why it ended, or the error."""


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
    """Mean return of its games; null: none has ended."""
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
    lead: ResultDocument | None = None
    """How much higher that is than the champion's; null: not known, or they do not compare."""
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
        pool = functools.cache(functools.partial(_pool, source.uri))
        entries, newest_aliases = pool(source.project)
        crowned = next((entry for entry in entries if entry.version == newest_aliases.get("champion")), None)
        points = _points(source, [*entries[-1:], *([crowned] if crowned else [])])
        champion = None if crowned is None else _rated(crowned, points)
        newest = _rated(entries[-1], points, crowned) if entries else None
        if job.mode == "serve":
            verdict = verdict_of_service(job.numbers, job.errors, job.sessions, job.silent)
            arms, worse = _judged_arms(job, pool)
            if worse and verdict.state in ("serving", "idle"):
                verdict = worse[0]
            return OverviewDocument(verdict=verdict, arms=arms, champion=champion, newest=newest)
        returns, means = _curves(source, job.run_id, RETURN_CHART, CHARTS["episode_return"])
        returns = returns or job.early_curve
        verdict = verdict_of_training(
            job.numbers,
            job.errors,
            returns,
            up_s=job.up_s,
            sessions=job.sessions,
            num_steps=job.num_steps,
            target=job.target_return,
            target_games=job.target_games,
            league=job.league,
        )
        if job.end is not None:
            verdict = verdict_of_end(job.end.state, job.end.text, job.command, verdict.share)
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
    by_arm: dict[str, Results] = {}
    for name, number in numbers.items():
        metric, _, label = name.partition(".")
        if metric in _ARM_SUMS and label.count("/") >= 2:
            by_arm.setdefault(label, Results()).totals[_ARM_SUMS[metric]] = number
    arms = []
    for label, results in sorted(by_arm.items()):
        model, alias, version = label.rsplit("/", 2)
        totals = results.numbers()
        counts = {name: totals[name] for name in ("sessions", "ticks", "errors", "refusals")}
        seconds = {f"{part}_s": numbers.get(f"arm_seconds.{label}.{part}") for part in ("p50", "p99")}
        served = served_result({f"serving.{name}": value for name, value in totals.items()})
        arms.append(ArmDocument(model=model, alias=alias, version=int(version), **counts, **seconds, result=served))
    return arms


def with_results(
    arms: Sequence[ArmDocument], tags: Mapping[int, Mapping[str, str]], newest_aliases: Mapping[str, int]
) -> list[ArmDocument]:
    """Arms with what the registry says: the result of their versions' games, unless this service's are more than it has
    yet, and whether their alias moved."""
    seen = []
    for arm in arms:
        results = filter(None, (served_result(tags.get(arm.version, {})), arm.result))
        result = max(results, key=lambda result: result.games or 0.0, default=None)
        former = newest_aliases.get(arm.alias, arm.version) != arm.version
        seen.append(arm.model_copy(update={"result": result, "former": former}))
    return seen


def _pool(uri: str, name: str) -> tuple[list[PoolEntry], dict[str, int]]:
    """The versions of a registered model and its aliases; empty: there is no such model."""
    entries = [] if missing_database(uri) is not None else versions(name, uri)
    return entries, aliases(name, uri) if entries else {}


def _judged_arms(
    job: JobDocument, pool: Callable[[str], tuple[Sequence[PoolEntry], Mapping[str, int]]]
) -> tuple[list[ArmDocument], list[VerdictDocument]]:
    """The arms with what their own models' pools have, and a verdict on each canary that is worse and gets sessions.

    Args:
        job: a service.
        pool: reads a registered model, as `_pool`.
    """
    arms: list[ArmDocument] = []
    worse: list[VerdictDocument] = []
    for component in dict.fromkeys(arm.model for arm in job.arms):
        of_model = [arm for arm in job.arms if arm.model == component]
        if references := job.registered.get(component):
            entries, at = pool(references[0].removeprefix("models:/").rpartition("/")[0])
            of_model = with_results(of_model, {entry.version: entry.tags for entry in entries}, at)
            canary = job.canaries.get(component)
            judged = judged_canary(of_model, at, canary.alias) if canary is not None and canary.share else None
            worse += [judged] if judged is not None and judged.state == "worse" else []
        arms += of_model
    return arms, worse


def judged_canary(arms: Sequence[ArmDocument], newest_aliases: Mapping[str, int], alias: str) -> VerdictDocument | None:
    """The verdict on a model's canary, by the results of its arms; None: it is no other version than the champion."""
    champion, canary = newest_aliases.get("champion"), newest_aliases.get(alias)
    if not champion or not canary or champion == canary:
        return None
    results = [(arm.version, arm.result) for arm in arms if arm.result is not None]
    # Both aliases may have had a version: the one with more games says more.
    return verdict_of_canary(champion, canary, dict(sorted(results, key=lambda result: result[1].games or 0.0)))


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


def _rated(entry: PoolEntry, points: Mapping[str, float], champion: PoolEntry | None = None) -> RatedDocument:
    member = member_of(entry.version, entry.tags)
    lead = None if champion is None else lead_of_version(entry.tags, champion.tags)
    result = result_of(entry.tags)
    rated = RatedDocument(name=entry.name, version=entry.version, result=result, lead=lead, member=member)
    return rated.model_copy(update={"points": points.get(member, number_of(entry.tags, POINTS_TAG))})
