"""The hub as a Ray actor, with clients in other processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from brayx.cluster.hub import HubClient, create_hub, get_hub
from brayx.errors import TrackingError
from brayx.tracking import Trial
from tests.waiting import until


def _pid(_: Any) -> int:
    return os.getpid()


def snapshot(handle: Any) -> dict[str, float]:
    numbers: dict[str, float] = ray.get(handle.snapshot.remote(), timeout=60)
    return numbers


@pytest.fixture
def hub(ray_cluster: str, tracking_db: str) -> Iterator[tuple[Any, Trial]]:
    trial = Trial.open("project", "trial", tracking_db)
    handle = create_hub("hub-under-test", ray_cluster, trial, interval_s=0.1)
    yield handle, trial
    ray.kill(handle)
    until(lambda: not _exists(ray_cluster))


def _exists(namespace: str) -> bool:
    try:
        get_hub("hub-under-test", namespace)
    except TrackingError:
        return False
    return True


@ray.remote(num_cpus=0)
def record(name: str, namespace: str, games: int) -> None:
    client = HubClient(get_hub(name, namespace), interval_s=0.05)
    for game in range(games):
        client.add("episode_return", float(game))
        client.add("env_steps", 10)
        time.sleep(0.002)
    client.close(timeout_s=60)


def test_samples_of_several_processes_meet_in_mlflow(hub: tuple[Any, Trial], ray_cluster: str) -> None:
    handle, trial = hub
    ray.get([record.remote("hub-under-test", ray_cluster, 50) for _ in range(2)], timeout=120)
    assert snapshot(handle)["env_steps"] == 1000
    last = ray.get(handle.close.remote(), timeout=60)
    assert (last["games"], last["episode_return.last100"]) == (100, 24.5)
    assert trial.metrics()["replay/env_steps"] == 1000
    assert trial.history("replay/env_steps")[-1] == (1000, 1000.0)


def test_flush_means_the_hub_has_it(hub: tuple[Any, Trial]) -> None:
    handle, _ = hub
    client = HubClient(handle, interval_s=60)
    client.add("ticks", 7)
    assert client.flush(timeout_s=60)
    assert snapshot(handle)["ticks"] == 7
    client.close()


def test_killed_hub_comes_back_with_the_totals(hub: tuple[Any, Trial]) -> None:
    handle, trial = hub
    client = HubClient(handle, interval_s=0.05)
    client.add("env_steps", 100)
    assert client.flush(timeout_s=60)
    until(lambda: trial.metrics().get("replay/env_steps") == 100)
    process = psutil.Process(ray.get(handle.__ray_call__.remote(_pid), timeout=60))
    process.kill()
    until(lambda: not process.is_running())
    client.add("env_steps", 11)
    until(lambda: client.flush(timeout_s=5), timeout_s=90)
    assert snapshot(handle)["env_steps"] == 111
    client.close()


def test_client_of_a_hub_that_is_gone_gives_up_in_time(ray_cluster: str) -> None:
    handle = create_hub("hub-that-goes", ray_cluster, None)
    client = HubClient(handle, interval_s=60)
    client.add("ticks", 1)
    assert client.flush(timeout_s=60)
    ray.kill(handle)
    client.add("ticks", 5)
    assert not client.flush(timeout_s=1)
    closing = threading.Thread(target=client.close, kwargs={"timeout_s": 1}, daemon=True)
    closing.start()
    until(lambda: not closing.is_alive())
    assert "brayx-hub-client" not in {thread.name for thread in threading.enumerate()}


def test_hub_that_is_not_there(ray_cluster: str) -> None:
    with pytest.raises(TrackingError, match="no hub 'nobody'"):
        get_hub("nobody", ray_cluster)
