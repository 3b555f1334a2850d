"""The trials of a tracking store, their curves, and the end of the one that is being trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, TypeVar

import numpy as np
from fastapi import APIRouter, Query

from brayx import tracking
from brayx.console.documents import MAX_POINTS, Document, DoneDocument, ResultDocument
from brayx.console.source import Source
from brayx.errors import ConfigError, JobNotRunning
from brayx.metrics import BEST_METRIC, ERROR_OF_BEST, GAMES_OF_BEST
from brayx.metrics.charts import CHARTS
from brayx.metrics.totals import SECONDS
from brayx.tracking.mlflow_page import MLFLOW_UI
from brayx.tracking.trial import flat
from brayx.tracking.trials import trials as newest_trials

_MAX_CURVES = 20
_Step = TypeVar("_Step", bound=float)


class TrialDocument(Document):
    """A trial of the tracking store."""

    run_id: str
    project: str
    name: str
    status: str
    """``running``, ``finished``, ``failed`` or ``interrupted``."""
    env_steps: float | None
    mean_return: float | None
    games: float | None
    """Number of games in the mean return."""
    error: float | None = None
    """Standard error of the mean return."""
    best_return: float | None = None
    """Mean return of its best checkpoint, which its end registers; null: no checkpoint has one."""
    best_games: float | None = None
    points: float | None = None
    """Points of a league's player, or of the league's leader."""
    seconds: float | None = None
    """How long it has trained, without interruptions."""
    champion: str
    note: str = ""
    """What it registered, or the error that ended it."""
    is_child: bool
    began_s: float = 0.0
    ended_s: float | None = None
    """Unix time; null: it has not ended."""
    page: str = ""
    """Its page in MLflow: at the tracking server, or at `mlflow ui` on this machine."""
    project_page: str = ""
    """Its project's page in MLflow, with the return as a column."""
    can_stop: bool = False
    """Whether this console can stop it: the console's job trains it or the league it belongs to, and can be
    interrupted."""


class BestDocument(Document):
    """The checkpoint that a training would register if it ended now."""

    step: int
    """Its env steps."""
    result: ResultDocument


class CurvesDocument(Document):
    """Curves of a trial."""

    run_id: str
    numbers: dict[str, float]
    """Newest value of every metric."""
    curves: dict[str, list[tuple[int, float]]]
    """``(step, value)`` by metric."""


def routes(source: Source) -> APIRouter:
    """The API's calls about trials."""
    router = APIRouter(prefix="/api/trials", tags=["trials"])

    @router.get("")
    def trials(project: str = "") -> list[TrialDocument]:
        """The newest trials."""
        try:
            rows = newest_trials(source.uri, project)
        except ConfigError:  # there is no store yet, or no such project
            return []
        job = source.job()
        stoppable = job.get("run_id") if job.get("can_stop") else None
        server = source.uri.rstrip("/") if source.uri.startswith("http") else MLFLOW_UI
        seconds = {job.get("run_id"): job.get("numbers", {}).get(SECONDS)}  # newer than MLflow's
        shown, can_stop = [], False
        for row in rows:
            can_stop = row.run_id == stoppable or (row.is_child and can_stop)  # children follow their parent
            links = {"page": server + row.page, "project_page": server + row.project_page}
            newest = links | {"seconds": seconds.get(row.run_id) or row.seconds, "can_stop": can_stop}
            shown.append(TrialDocument(**asdict(row) | newest))
        return shown

    @router.get("/{run_id}")
    def curves(run_id: str, metric: Annotated[list[str], Query(description="only these")] = []) -> CurvesDocument:  # noqa: B006
        """The newest numbers and the curves of a trial."""
        trial = tracking.Trial.attach(source.uri, run_id)
        numbers = trial.metrics()
        names = dict.fromkeys((*CHARTS.values(), *sorted(numbers)))  # the most important first
        shown = [name for name in metric or names if name in numbers]
        return CurvesDocument(
            run_id=run_id,
            numbers={name: value for name, value in numbers.items() if np.isfinite(value)},
            curves={name: thinned(trial.history(name)) for name in shown[:_MAX_CURVES]},
        )

    @router.get("/{run_id}/settings")
    def settings(run_id: str) -> dict[str, str]:
        """The options of a trial's job, by dotted names."""
        trial = tracking.Trial.attach(source.uri, run_id)
        return dict(flat(trial.options())) or trial.params()

    @router.get("/{run_id}/best")
    def best(run_id: str) -> BestDocument | None:
        """The trial's best checkpoint, which its end registers; null: none has a return of enough games."""
        checkpoint = tracking.Trial.attach(source.uri, run_id).best_checkpoint(BEST_METRIC)
        if checkpoint is None:
            return None
        mean, error, games = (checkpoint.metrics.get(name) for name in (BEST_METRIC, ERROR_OF_BEST, GAMES_OF_BEST))
        assert mean is not None  # it is the best by that
        result = ResultDocument(mean=mean, error=error, games=games, how="training")
        return BestDocument(step=checkpoint.env_steps, result=result)

    @router.post("/{run_id}/stop")
    def stop(run_id: str, register: bool = False) -> DoneDocument:
        """Interrupts the job's training as Ctrl-C does: it saves a last checkpoint; the same command resumes it.

        With ``register`` the training is finished instead, and its best version registered.
        """
        if run_id != source.job().get("run_id"):
            raise JobNotRunning(f"trial {run_id!r} is not the one that this console's job trains")
        if register:
            source.ask("finish")
            return DoneDocument(done="the trial is being finished, and its best version registered")
        source.ask("stop")
        return DoneDocument(
            done="the trial is being stopped: it saves a last checkpoint, and the same command resumes it"
        )

    return router


def thinned(points: Sequence[tuple[_Step, float]]) -> list[tuple[_Step, float]]:
    """Finite points of a curve, at most `MAX_POINTS`, evenly chosen; the last one is kept."""
    finite = [(step, value) for step, value in points if np.isfinite(value)]
    every = -(-len(finite) // MAX_POINTS) or 1
    return finite[::-every][::-1]
