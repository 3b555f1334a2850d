"""Scaling a running training from outside: a request finds its owner by MLflow, its Ray and its hub."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from brayx.cluster import NAMESPACE
from brayx.cluster.hub import create_hub, take_requests
from brayx.cluster.rollout import Workers
from brayx.cluster.rollout_worker import worker_spec
from brayx.cluster.scale import Scaled, answer_request, hub_name, scale, tell_where
from brayx.errors import BrayxError, ConfigError, DeadlineExceeded, JobNotRunning
from brayx.jobs.config import JobConfig
from brayx.metrics import Recorder
from brayx.tracking import Trial
from tests.waiting import until

pytestmark = pytest.mark.cluster

TEMPLATE = Path(__file__).parents[2] / "pipelines" / "templates" / "ppo_env.yaml"
WIDE = "wide={kind: rollout, env: CartPole-v1, model: model, buffer: buffer, num_workers: 2, cpus_per_worker: 0.5}"
PARTS = ("hub", "weights", "moments", "buffer/buffer")


@pytest.fixture(scope="module")
def trial(ray_cluster: str, new_tracking_db: Callable[[Path], str], tmp_path_factory: Any) -> Iterator[Trial]:
    """A running trial on this Ray, with its hub."""
    opened = Trial.open("games", "main", new_tracking_db(tmp_path_factory.mktemp("scale")))
    tell_where(opened)
    hub = create_hub(hub_name(opened), opened, interval_s=0.1)
    ray.get(hub.snapshot.remote(), timeout=60)
    yield opened
    ray.kill(hub)


def rollouts_of(trial: Trial, *overrides: str) -> dict[str, Workers]:
    """A job's rollouts of two workers each, not started yet."""
    names = {part: f"{trial.run_id}/{part}" for part in PARTS}
    job = JobConfig.load(TEMPLATE, overrides)
    return {name: Workers(worker_spec(job, name, names), Recorder()) for name in job.rollouts}


def answer_requests(hub: Any, rollouts: dict[str, Workers]) -> list[str]:
    """Answers as the job does; returns its lines."""
    return [line for key, asked in take_requests(hub) for line in answer_request(hub, key, asked, rollouts)]


def request_scale(trial: Trial, rollouts: dict[str, Workers], count: int, rollout: str | None = None) -> Any:
    """The answer to a request to scale, while the job reads its inbox."""
    got: list[Scaled | BrayxError] = []

    def ask() -> None:
        try:
            got.append(scale("main", count, rollout=rollout, tracking=trial.uri))
        except BrayxError as error:
            got.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    hub = ray.get_actor(hub_name(trial), namespace=NAMESPACE)
    until(lambda: answer_requests(hub, rollouts) or got, "the request", timeout_s=60)
    asking.join(60)
    (answer,) = got
    if isinstance(answer, BrayxError):
        raise answer
    return answer


def test_a_rollout_gets_the_requested_number_of_workers(trial: Trial) -> None:
    rollouts = rollouts_of(trial)
    assert request_scale(trial, rollouts, 1) == Scaled("rollout", 2, 1)
    assert rollouts["rollout"].num == 1
    assert request_scale(trial, rollouts, 2, "rollout") == Scaled("rollout", 1, 2)


@pytest.mark.parametrize(
    ("count", "rollout", "message"),
    [
        (4, None, "several rollouts, rollout, wide: say which"),
        (4, "wade", "no rollout 'wade'; nearest is 'wide'"),
        (3, "rollout", r"cannot have 3 workers, but 1, 2: mode is blocking, where 3 workers x 8 environments give 24"),
        (9, "wide", "cannot have 9 workers with cpus_per_worker 0.5: the cluster has 4 CPUs"),
        (20_000, "wide", "cannot have 20000 workers, expected 0 to 10000"),
        (0, "wide", "cannot go on with 0 workers"),
        (2.5, "wide", r"cannot go on with 2\.5 workers"),
        ("3", "wide", "cannot go on with '3' workers"),
    ],
)
def test_an_impossible_request_is_refused_and_changes_nothing(
    trial: Trial, count: Any, rollout: str | None, message: str
) -> None:
    rollouts = rollouts_of(trial, WIDE)
    with pytest.raises(ConfigError, match=message):
        request_scale(trial, rollouts, count, rollout)
    assert [workers.num for workers in rollouts.values()] == [2, 2]
    assert request_scale(trial, rollouts, 3, "wide") == Scaled("wide", 2, 3)


def test_a_job_that_steps_no_environments_says_so(trial: Trial) -> None:
    with pytest.raises(ConfigError, match="the job has no rollout"):
        request_scale(trial, {}, 2)


def test_a_busy_job_does_not_scale_later(trial: Trial) -> None:
    with pytest.raises(DeadlineExceeded, match=r"within 0\.1 s, and will not do so later"):
        scale("main", 1, tracking=trial.uri, timeout_s=0.1)
    hub = ray.get_actor(hub_name(trial), namespace=NAMESPACE)
    assert answer_requests(hub, rollouts_of(trial)) == []


def test_a_job_that_died_is_distinguished_from_a_busy_one(ray_cluster: str, tracking_db: str) -> None:
    tell_where(Trial.open("games", "main", tracking_db))  # its hub is gone
    with pytest.raises(JobNotRunning, match="its Ray has no such job any more"):
        scale("main", 1, tracking=tracking_db)
