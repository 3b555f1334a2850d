"""Workers join and leave a training that runs: asked for from any process of its cluster, done by the job itself.

The trial's books say where its Ray is (`tell_where`), the trial's hub takes the request (`brayx.inbox`), and the
process that runs the job answers it between two looks at its progress. Knows nothing of what workers do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from brayx.cluster.directory import NAMESPACE
from brayx.cluster.hub import get_hub
from brayx.cluster.start import answers
from brayx.errors import (
    BrayxError,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    JobNotRunning,
    TrackingError,
    first_line,
)
from brayx.tracking import Trial, tracking_uri
from brayx.tracking.store import client_of, telling
from pipelines.visualize import find_trial

_RAY_TAG = "brayx.ray"
"""Of a trial: where the Ray is that it runs on, as ``address=…&auth=…&host=…``."""
_LOOK_S = 0.1
_ANSWER_S = 5.0
"""Beyond the time in which a request must be taken: for what was asked for to be done."""


class Scaled(NamedTuple):
    """What became of a request.

    Attributes:
        rollout: name of the component.
        before, now: workers that it is to have.
    """

    rollout: str
    before: int
    now: int


def hub_name(trial: Trial) -> str:
    """Of the trial's hub, in namespace ``brayx``."""
    return f"{trial.run_id}/hub"


def tell_where(trial: Trial) -> None:
    """Writes into a trial's books which Ray it runs on: the one that this process is connected to."""
    import ray

    where = {
        "address": ray.get_runtime_context().gcs_address,
        "auth": os.environ.get("RAY_AUTH_MODE", ""),
        "host": socket.gethostname(),
    }
    trial.set_tag(_RAY_TAG, urlencode(where))


def scale(
    trial: str,
    num_workers: int,
    *,
    rollout: str | None = None,
    tracking: str | None = None,
    timeout_s: float = 30.0,
) -> Scaled:
    """Has a training that runs go on with ``num_workers`` rollout workers, until it ends or is asked again.

    New ones start at once; those that are too many end after the fragment that they are at. A trial that is resumed
    begins with as many as its YAML says.

    Args:
        trial: its id, or its name where only one of that name runs.
        num_workers: how many; 1 or more.
        rollout: name of the component; None: the only one.
        tracking: MLflow URI or path of the trial's books; None: as `brayx.tracking.tracking_uri`.
        timeout_s: for the job to take the request: one that is still starting takes none.

    Raises:
        JobNotRunning: no trial of that id or name runs.
        ConnectFailed: its Ray cannot be joined from here.
        ConfigError: several are meant; or the job has no such rollout, cannot place so many workers, or its mode is
            ``blocking`` and so many would wait for each other.
        DeadlineExceeded: the job did not take the request in time, and will not do so later.
    """
    found, where = _running(trial, tracking_uri(tracking))
    request = {"rollout": rollout, "num_workers": num_workers}
    with _connected(found, where):
        return _asked(found, request, timeout_s)


def _running(reference: str, uri: str) -> tuple[Trial, dict[str, Any]]:
    """The one trial that runs and has that id or name, and where its Ray is."""
    newest = find_trial(reference, uri)
    with telling(f"cannot look for trial {reference!r} in {uri}"):
        client = client_of(uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        field = "run_id" if newest.run_id == reference else "run_name"
        which = f"attributes.{field} = '{reference}' and attributes.status = 'RUNNING'"
        runs = client.search_runs(experiments, which, order_by=["attributes.start_time DESC"], max_results=50)
    if not runs:
        raise _not_running(newest, f"its books say {newest.status}")
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
        trial, f"nothing answers at {where['address']}, where its Ray was: ask from the cluster of {where['host']}"
    )


def _not_running(trial: Trial, why: str) -> JobNotRunning:
    said = f"trial {trial.name!r} of project {trial.project!r} does not run here: {why}"
    return JobNotRunning(said, trial=trial.name, run_id=trial.run_id)


@contextlib.contextmanager
def _connected(trial: Trial, where: Mapping[str, Any]) -> Iterator[None]:
    """A context: this process is connected to the trial's Ray, by a connection of its own if there is none."""
    if where["auth"]:
        os.environ.setdefault("RAY_AUTH_MODE", where["auth"])  # read when Ray is imported
    import ray

    address = where["address"]
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if here != address:
            raise ConnectFailed(f"this process is connected to Ray at {here}, trial {trial.name!r} runs at {address}")
        yield
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises bare classes here, and its own for a token that is not right
        raise ConnectFailed(f"cannot join Ray at {address} for trial {trial.name!r}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _asked(trial: Trial, request: Mapping[str, Any], timeout_s: float) -> Scaled:
    import ray

    deadline, key = time.monotonic() + timeout_s + _ANSWER_S, ""
    while time.monotonic() < deadline:
        try:
            hub: Any = get_hub(hub_name(trial), NAMESPACE)
        except TrackingError as error:
            raise _not_running(trial, "its Ray has no such job any more") from error
        with contextlib.suppress(ray.exceptions.RayError):  # the hub is slow, or being restarted
            if not key:
                key = ray.get(hub.ask.remote(request, deadline - _ANSWER_S - time.monotonic()), timeout=_ANSWER_S)
            answer = ray.get(hub.answered.remote(key), timeout=_ANSWER_S)
            if isinstance(answer, BrayxError):
                raise answer
            if answer is not None:
                return Scaled(*answer)
        time.sleep(_LOOK_S)
    raise DeadlineExceeded(
        f"trial {trial.name!r} of project {trial.project!r} did not take the request within {timeout_s:g} s, and will "
        "not do so later: it is starting, ending, or hangs",
        trial=trial.name,
    )
