"""Changes the number of workers of a running training, from any process of its cluster.

A tag of the trial holds the address of its Ray cluster (`tell_where`). The trial's hub queues the request
(`brayx.tracking.hub.Inbox`), and the job's process carries it out and answers (`answer_request`). Knows nothing of
what workers do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from brayx.cluster import NAMESPACE
from brayx.cluster.hub import ask_job
from brayx.cluster.rollout import Workers
from brayx.cluster.start import answers, connected, where_ray_is
from brayx.errors import BrayxError, ConfigError, DeadlineExceeded, JobNotRunning, StartupError
from brayx.jobs.document import nearest
from brayx.tracking import Trial, find_trial, tracking_uri
from brayx.tracking.store import client_of, telling

_RAY_TAG = "brayx.ray"
"""Tag of a trial with the location of its Ray cluster, as ``address=…&auth=…&host=…``."""


class Scaled(NamedTuple):
    """Result of a request.

    Attributes:
        rollout: name of the component.
        before, now: its number of workers before and after the request.
    """

    rollout: str
    before: int
    now: int


def hub_name(trial: Trial) -> str:
    """Name of the trial's hub."""
    return f"{trial.run_id}/hub"


def tell_where(trial: Trial) -> None:
    """Tags a trial with its Ray cluster, the one that this process is connected to."""
    trial.set_tag(_RAY_TAG, urlencode(where_ray_is()))


def scale(
    trial: str,
    num_workers: int,
    *,
    rollout: str | None = None,
    tracking: str | None = None,
    timeout_s: float = 30.0,
) -> Scaled:
    """Sets the number of rollout workers of a running training, until it ends or this is called again.

    New workers start at once; surplus ones end after their current fragment. A resumed trial starts with the number in
    its YAML.

    Args:
        trial: its id, or its name if only one trial of that name runs.
        num_workers: number of workers, at least 1.
        rollout: name of the component; None: the only one.
        tracking: MLflow URI or path of the tracking store; None: as for `brayx.tracking.tracking_uri`.
        timeout_s: deadline for the job to accept the request; a job that is still starting does not accept any.

    Raises:
        JobNotRunning: no trial of that id or name runs.
        ConnectFailed: its Ray cluster cannot be joined from here.
        ConfigError: several trials match; or the job has no such rollout, cannot place so many workers, or its mode is
            ``blocking`` and so many would wait for each other.
        DeadlineExceeded: the job did not accept the request in time; the request is withdrawn.
    """
    target, where = _running(trial, tracking_uri(tracking))
    request = {"rollout": rollout, "num_workers": num_workers}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    with connected(where["address"], where["auth"], namespace=NAMESPACE, **quiet):
        try:
            return Scaled(*ask_job(hub_name(target), request, timeout_s))
        except StartupError as error:
            raise _not_running(target, "its Ray has no such job any more") from error
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"trial {target.name!r} of project {target.project!r} did not take the request within {timeout_s:g} s, "
                "and will not do so later: it is starting, ending, or hangs",
                trial=target.name,
            ) from error


def answer_request(hub: Any, key: str, request: Mapping[str, Any], rollouts: Mapping[str, Workers]) -> list[str]:
    """Carries out a request that has reached a job; returns lines for the user about the changes.

    Args:
        hub: the trial's hub.
        key, request: from `take_requests`.
        rollouts: the job's workers by component.
    """
    try:
        scaled = _scale(rollouts, request["rollout"], request["num_workers"])
    except BrayxError as error:
        hub.answer.remote(key, error)
        return []
    hub.answer.remote(key, tuple(scaled))
    return [f"rollout {scaled.rollout!r} gets {scaled.now} workers; it had {scaled.before}"]


def _scale(rollouts: Mapping[str, Workers], name: str | None, count: int) -> Scaled:
    """Changes the number of a rollout's workers; an error changes nothing.

    Args:
        rollouts: as for `answer_request`.
        name: name of the component; None: the only one.
        count: at least 1, because without workers the learner would wait forever.

    Raises:
        ConfigError: the rollout does not exist, or cannot have so many workers, see `Workers.scale`.
    """
    if not rollouts:
        raise ConfigError("the job has no rollout: no worker steps environments for it", key="rollout")
    if name is None and len(rollouts) > 1:
        raise ConfigError(f"the job has several rollouts, {', '.join(rollouts)}: say which", key="rollout")
    name = next(iter(rollouts)) if name is None else name
    if name not in rollouts:
        raise ConfigError(f"the job has no rollout {name!r}{nearest(name, rollouts)}", key="rollout")
    if type(count) is not int or count < 1:
        said = f"rollout {name!r} cannot go on with {count!r} workers: end the job, and the same command resumes it"
        raise ConfigError(said, key="num_workers")
    before = rollouts[name].num
    rollouts[name].scale(count)
    return Scaled(name, before, count)


def _running(reference: str, uri: str) -> tuple[Trial, dict[str, str]]:
    """Finds the running trial with that id or name, and the location of its Ray cluster."""
    newest = find_trial(reference, uri)
    with telling(f"cannot look for trial {reference!r} in {uri}"):
        client = client_of(uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        field = "run_id" if newest.run_id == reference else "run_name"
        which = f"attributes.{field} = '{reference}' and attributes.status = 'RUNNING'"
        runs = client.search_runs(experiments, which, order_by=["attributes.start_time DESC"], max_results=50)
    if not runs:
        raise _not_running(newest, f"MLflow says {newest.status}")
    places = {run.info.run_id: dict(parse_qsl(run.data.tags.get(_RAY_TAG, ""), keep_blank_values=True)) for run in runs}
    reached = [run_id for run_id, where in places.items() if where and answers(where["address"])]
    if len(reached) > 1:
        named = ", ".join(f"{run_id} of project {Trial.attach(uri, run_id).project!r}" for run_id in reached)
        raise ConfigError(
            f"{len(reached)} trials named {reference!r} run: name one by its id, {named}", trial=reference
        )
    if reached:
        return Trial.attach(uri, reached[0]), places[reached[0]]
    trial = Trial.attach(uri, runs[0].info.run_id)
    where = places[trial.run_id]
    if not where:
        raise ConfigError(
            f"trial {trial.name!r} of project {trial.project!r} has no cluster: it trains in one process, or is only "
            "starting",
            trial=trial.name,
        )
    raise _not_running(
        trial, f"nothing answers at {where['address']}, where its Ray was: run this on the cluster of {where['host']}"
    )


def _not_running(trial: Trial, why: str) -> JobNotRunning:
    said = f"trial {trial.name!r} of project {trial.project!r} does not run here: {why}"
    return JobNotRunning(said, trial=trial.name, run_id=trial.run_id)
