"""The hub as a Ray actor, with clients in other processes."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from mlflow import MlflowClient
from ray import serve
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from brayx.cluster.actor_app import actor_spec, application
from brayx.cluster.directory import stop_directory
from brayx.cluster.hub import HubClient, create_hub, numbers_of
from brayx.cluster.learner import TrialNumbers
from brayx.cluster.named import find_actor, is_done
from brayx.errors import AgentError, StartupError
from brayx.gamecore.client import Client
from brayx.jobs.config import JobConfig
from brayx.jobs.progress import Progress
from brayx.jobs.watching import Watch
from brayx.metrics import Bars
from brayx.tracking import Trial
from tests.integration.conftest import Ingress
from tests.waiting import until

BARS = Bars((0.0, 1.0, 2.0), (3.0, 4.0))
JOB = """
project: raising
trial: main
agent: {kind: agent, module: raising_agent, class: RaisingAgent}
actor: {kind: actor, agents: [agent], native_port: null, tcp_port: null}
"""
AGENT = """
from brayx import Agent, record


class RaisingAgent(Agent):
    async def on_tick(self, state):
        if state.input["bad"]:
            raise KeyError("velocity")

    async def on_episode(self, episode, done):
        record("episode_return", 1.0)
"""


def _pid(_: Any) -> int:
    return os.getpid()


def snapshot(handle: Any) -> dict[str, float]:
    return ray.get(handle.snapshot.remote(), timeout=60)


@pytest.fixture
def hub(ray_cluster: str, tracking_db: str, tmp_path: Path) -> Iterator[tuple[Any, Trial]]:
    trial = Trial.open("project", "trial", tracking_db, tensorboard=str(tmp_path / "board"))
    handle = create_hub("hub-under-test", trial, interval_s=0.1)
    yield handle, trial
    ray.kill(handle)
    until(lambda: find_actor("hub-under-test") is None)


def test_the_learner_and_the_progress_read_the_newest_numbers_at_once(
    hub: tuple[Any, Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress takes the answer while the learner looks whether it is there."""
    numbers, taken = TrialNumbers(hub[0], every_s=100.0), list[Any]()  # so that there is one request

    def look(call: Any) -> bool:
        done = is_done(call)
        if done and not taken:
            taken.append(call)
            numbers.newest()
        return done

    monkeypatch.setattr("brayx.cluster.learner.is_done", look)
    until(lambda: (numbers.newest(), bool(taken))[1], "an answer")
    numbers.close()


@ray.remote(num_cpus=0)
def record(name: str, games: int) -> None:
    client = HubClient(find_actor(name), interval_s=0.05)
    for game in range(games):
        client.add("episode_return", float(game))
        client.add("env_steps", 10)
        client.add_shapes("weights", {"layer": BARS})
        time.sleep(0.002)
    client.close(timeout_s=60)


def test_samples_of_several_processes_meet_in_mlflow(hub: tuple[Any, Trial], ray_cluster: str) -> None:
    handle, trial = hub
    ray.get([record.remote("hub-under-test", 50) for _ in range(2)], timeout=120)
    assert snapshot(handle)["env_steps"] == 1000
    last = ray.get(handle.close.remote(), timeout=60)
    assert (last["games"], last["episode_return.last100"]) == (100, 24.5)
    assert trial.metrics()["replay/env_steps"] == 1000
    assert trial.history("replay/env_steps")[-1] == (1000, 1000.0)
    assert [file for file in MlflowClient(trial.uri).list_artifacts(trial.run_id, "images") if "~weights+" in file.path]
    read = EventAccumulator(trial.tensorboard).Reload()
    assert read.Scalars("replay/env_steps")[-1].value == 1000
    assert read.Histograms("weights/layer")[-1].histogram_value.num == sum(BARS.counts)


def test_after_a_flush_the_hub_has_the_numbers(hub: tuple[Any, Trial]) -> None:
    handle, _ = hub
    client = HubClient(handle, interval_s=60)
    client.add("ticks", 7)
    assert client.flush(timeout_s=60)
    assert snapshot(handle)["ticks"] == 7
    client.close()


@pytest.mark.cluster
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


@pytest.mark.cluster
def test_client_of_a_hub_that_is_gone_gives_up_in_time(ray_cluster: str) -> None:
    handle = create_hub("hub-that-goes", None)
    client = HubClient(handle, interval_s=60)
    client.add("ticks", 1)
    assert client.flush(timeout_s=60)
    process = psutil.Process(ray.get(handle.__ray_call__.remote(_pid), timeout=60))
    ray.kill(handle)
    until(lambda: not process.is_running())
    client.add("ticks", 5)
    assert not client.flush(timeout_s=1)
    closing = threading.Thread(target=client.close, kwargs={"timeout_s": 1}, daemon=True)
    closing.start()
    until(lambda: not closing.is_alive())
    assert "brayx-hub-client" not in {thread.name for thread in threading.enumerate()}


def test_a_missing_hub(ray_cluster: str) -> None:
    with pytest.raises(StartupError, match="'missing'"):
        HubClient.of("missing")


@pytest.fixture
def raising(ingress: Ingress, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """URL of an agent that raises, in a replica, and the hub that it records to."""
    handle = create_hub("raising/hub", None)
    (tmp_path / "raising_agent.py").write_text(AGENT)
    (tmp_path / "job.yaml").write_text(JOB)
    job = JobConfig.load(tmp_path / "job.yaml")
    spec = actor_spec(job, "actor", mode="train", weights={}, hub="raising/hub")
    app = application(spec, name="actor", directory="raising/sessions")
    serve.run(app, name="raising", route_prefix="/raising")
    yield f"{ingress.http}/raising", handle
    serve.delete("raising")
    stop_directory("raising/sessions")
    ray.kill(handle)


def test_exceptions_of_agents_in_a_replica_are_shown_by_the_job_and_end_it(
    raising: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, hub = raising
    for game in range(10):
        with Client(url, timeout_s=60.0) as client:
            client.start()
            if game < 2:
                client.tick(b'{"bad": false}')
                client.stop()
            else:
                with pytest.raises(AgentError, match=r"'agent' .*on_tick at tick 0: KeyError"):
                    client.tick(b'{"bad": true}')

    def numbers() -> dict[str, float]:
        return (numbers_of(hub) or ({}, {}))[0]

    until(lambda: numbers().get("games_in_window", 0) + numbers().get("games_failed_in_window", 0) == 10)
    lines = [
        f"8 errors in on_tick; the newest: agent 'agent': KeyError: 'velocity' ({tmp_path / 'raising_agent.py'}:8)",
        "lost: 8 of the last 10 games (80%)",
    ]
    monkeypatch.setattr("brayx.jobs.watching._LOST_S", 0.0)
    out = io.StringIO()
    progress = Progress("t", num_steps=1, console=Console(file=out))
    games = SimpleNamespace(num=1, running=1, failures=0, messages=[])
    latest = numbers_of(hub)
    assert latest is not None
    Watch(progress, SimpleNamespace(), games, [], 8, 0.8).look(*latest)  # type: ignore[arg-type]
    assert [line.strip() for line in out.getvalue().splitlines()[1:]] == lines
    with pytest.raises(AgentError) as raised:
        Watch(progress, SimpleNamespace(), games, [], 8, 0.79).look(*latest)  # type: ignore[arg-type]
    advice = "mend that, and run the same command again: the training continues"
    assert raised.value.message == "; ".join(
        [f"errors take more than trainer.max_lost_share 0.79 allows: {lines[0]}", lines[1], advice]
    )
