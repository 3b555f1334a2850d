"""The console of a training on Ray. It runs beside the command, which asks the hub and the actor's replicas.

Knows nothing of what the console shows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from brayx.cluster.console import ReplicaSessions
from brayx.cluster.hub import numbers_of
from brayx.console.job import ConsoleJob, open_console
from brayx.jobs.progress import error_lines

if TYPE_CHECKING:
    from brayx.cluster.league_training import RayLeagueTraining
    from brayx.cluster.trainee import RayTrainee
    from brayx.jobs.config import JobConfig


@contextlib.contextmanager
def console_of(
    job: JobConfig,
    trainee: RayTrainee | RayLeagueTraining,
    doors: Mapping[str, str],
    *,
    has_actor: bool,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Opens the console while the context lasts; see `brayx.console.job.open_console`.

    Args:
        job: the job.
        trainee: the model or league in training.
        doors: URL of each door by name; the caller may add doors later.
        has_actor: whether the job has an actor, and so sessions.
        say: called with the console's URL.
    """
    trial, config = trainee.trial, trainee.config

    def facts() -> dict[str, Any]:
        numbers, notes = numbers_of(trainee.hub) or ({}, {})
        return {
            "mode": "train",
            "project": job.project,
            "trial": trial.name,
            "run_id": trial.run_id,
            "num_steps": config.num_steps,
            "target_return": config.target_return,
            "waits_for": f"the learner {trainee.learner.state()}",
            "doors": dict(doors),
            "numbers": numbers,
            "errors": error_lines(numbers, notes),
            **({} if live is None else counted(live)),
        }

    live = ReplicaSessions(trainee.names["sessions"]) if has_actor else None
    parts = ConsoleJob(facts, live, can_stop=threading.current_thread() is threading.main_thread())
    try:
        with open_console(job, trial.uri, parts, say):
            yield
    finally:
        if live is not None:
            live.close()


def counted(live: ReplicaSessions) -> dict[str, Any]:
    """The number of running sessions on the replicas that answer: 0 until the first one has started."""
    return {"sessions": live.facts().get("sessions", 0)}
