"""A job served by an alias on a real Serve: a canary's share, results by arm, a promotion while sessions run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import urllib.request
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import yaml
from mlflow import MlflowClient
from ray import serve
from ray.util import list_named_actors

from brayx.cluster.directory import stop_directory
from brayx.cluster.pool import PoolClient
from brayx.cluster.serving import serving_application
from brayx.commands import cli
from brayx.engines.base import save_weights
from brayx.errors import BrayxError, VersionUnknown
from brayx.gamecore.client import Client
from brayx.jobs.config import JobConfig
from brayx.jobs.weights import pooled
from brayx.model.arms import Followed
from brayx.model.following import initial_version
from brayx.tracking import Trial, register
from tests.integration.conftest import Ingress
from tests.processes import ours
from tests.scale_job import AGENT, MODEL
from tests.waiting import until

pytestmark = pytest.mark.cluster

WAIT_S = 60.0
SHARE = 0.3


@pytest.fixture(scope="module")
def door(ingress: Ingress) -> str:
    """URL of Serve's proxy."""
    return ingress.http


def test_an_unused_pool_ends_and_starts_again_at_the_next_call(ray_cluster: str, tracking_db: str) -> None:
    client = PoolClient("pool-alone", tracking_db, "", {"model": Followed("none", every_s=0.1)}, alone_s=1)
    for _ in range(2):
        assert ray.get(client.handle().newer.remote(None, WAIT_S), timeout=WAIT_S) == {"model": {}}
        until(lambda: not there(client.actor), "it ended", WAIT_S)
    ray.get(client.handle().flush.remote(), timeout=WAIT_S)
    until(lambda: not there(client.actor), "a pool that only got results ends, too", WAIT_S)


def test_a_service_redeployed_with_another_model_gets_its_weights(
    ray_cluster: str, tracking_db: str, tmp_path: Path
) -> None:
    trial = Trial.open("anew", "t", tracking_db)
    for step, name in enumerate(("a", "b"), start=1):
        folder = tmp_path / name
        folder.mkdir()
        save_weights(folder / "weights.npz", {"factor": np.array([step], np.float32)})
        register(trial, trial.save_checkpoint(folder, step), name)

    def client(name: str) -> PoolClient:
        followed = {"model": Followed(name, every_s=0.1)}
        return PoolClient("pool-anew", tracking_db, "", followed, alone_s=2)

    before, after = client("a"), client("b")
    for pool_client, factor in ((before, 1), (after, 2)):
        assert ray.get(pool_client.handle().newer.remote(None, WAIT_S), timeout=WAIT_S) == {"model": {"champion": 1}}
        assert asyncio.run(pool_client.weights("model", 1, WAIT_S))["factor"] == factor
    for pool_client in (before, after):
        until(lambda actor=pool_client.actor: not there(actor), "each pool ends by itself", WAIT_S)


def test_concurrent_requests_for_a_version_share_one_copy(ray_cluster: str, tracking_db: str, tmp_path: Path) -> None:
    trial = Trial.open("asked", "t", tracking_db)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_weights(folder / "weights.npz", {"factor": np.ones(1, np.float32)})
    register(trial, trial.save_checkpoint(folder, 1), "asked")
    client = PoolClient("pool-asked", tracking_db, "", {"model": Followed("asked")})
    answers = ray.get([client.handle().weights.remote("model", 1) for _ in range(8)], timeout=WAIT_S)
    assert len({reference for [reference] in answers}) == 1
    with pytest.raises(VersionUnknown, match="nearest is 1"):
        asyncio.run(client.weights("model", 2))
    ray.kill(client.handle())


async def test_a_starting_replica_gets_the_version_of_its_alias_if_available_in_time(
    ray_cluster: str, tracking_db: str, tmp_path: Path
) -> None:
    trial = Trial.open("begins", "t", tracking_db)
    for step in (1, 2):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        save_weights(folder / "weights.npz", {"factor": np.array([step], np.float32)})
        register(trial, trial.save_checkpoint(folder, step), "begins")
    client = PoolClient("pool-begins", tracking_db, "", {"model": Followed("begins", every_s=0.1)})
    aliases = await client.look(WAIT_S)
    assert aliases == {"model": {"champion": 2}}
    named = await initial_version(client, "model", "champion", aliases, 1)
    assert named is not None
    assert (named[0], named[1]["factor"].tolist()) == (2, [2])
    for deployed in (
        initial_version(client, "model", "champion", aliases, 2),
        initial_version(client, "model", "candidate", aliases, 1),
        initial_version(client, "model", "champion", {"model": {"champion": 9}}, 1),
    ):
        assert await deployed is None, "it is deployed already, or the alias or the version does not exist"
    ray.kill(client.handle())

    away = PoolClient("pool-away", "http://127.0.0.1:1", "", {"model": Followed("begins", every_s=0.1)})
    aliases = await away.look(1.0)
    assert aliases is None, "the registry does not answer"
    assert await initial_version(away, "model", "champion", aliases, 1) is None
    ray.kill(away.handle())


def there(name: str) -> bool:
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "placement", [pytest.param("local", marks=pytest.mark.cluster), pytest.param("remote", marks=pytest.mark.chaos)]
)
def test_a_canary_its_promotion_and_a_replica_that_is_killed(
    door: str, tracking_db: str, tmp_path: Path, placement: str
) -> None:
    project = f"canary-{placement}"
    (tmp_path / f"told_model_{placement}.py").write_text(MODEL)
    (tmp_path / f"told_agent_{placement}.py").write_text(AGENT)
    job = {
        "project": project,
        "trial": "t",
        "model": {
            "kind": "model", "module": f"told_model_{placement}", "placement": placement, "follow_s": 0.2,
            "engine": "torch",
            "canary": {"alias": "candidate", "share": SHARE},
        },
        "agent": {"kind": "agent", "module": f"told_agent_{placement}", "class": "VersionAgent"},
        "actor": {"kind": "actor", "agents": ["agent"], "num_workers": 2, "idle_timeout_s": 600},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    trial = Trial.open(project, "t", tracking_db)

    def version(factor: float, alias: str) -> None:
        save_weights(tmp_path / "weights.npz", {"factor": np.array([factor], np.float32)})
        folder = tmp_path / f"checkpoint-{factor:g}"
        folder.mkdir()
        (tmp_path / "weights.npz").rename(folder / "weights.npz")
        register(trial, trial.save_checkpoint(folder, int(factor)), project, alias=alias)

    version(1, "champion")
    spec = JobConfig.load(tmp_path / "job.yaml")
    serve.run(serving_application(spec, tracking_db), name=project, route_prefix=f"/{project}")
    url = f"{door}/{project}"
    clients: list[Client] = []

    def begin(session: str) -> Client:
        clients.append(Client(url, timeout_s=WAIT_S))
        clients[-1].start(session=session)
        return clients[-1]

    def ask(client: Client) -> int:
        value, made_by = json.loads(client.tick(b"{}"))
        assert value == made_by, "the reported version is the one that answered"
        return int(made_by)

    def new() -> int:
        client = begin(uuid.uuid4().hex)
        try:
            return ask(client)
        finally:
            client.stop()

    def from_now_on(expected: set[int]) -> None:
        """Waits until both replicas know: twenty new sessions in a row get ``expected``."""
        until(lambda: {new() for _ in range(20)} <= expected, f"new sessions get {expected}", WAIT_S)

    def registered() -> list[str]:
        with urllib.request.urlopen(f"{url}/", timeout=WAIT_S) as page:
            return json.load(page)["registered"]["model"]

    assert {new() for _ in range(5)} == {1}, "no session gets a candidate that does not exist"
    assert registered() == [f"models:/{project}/1"]
    old = begin("old")
    assert ask(old) == 1
    version(2, "candidate")
    until(lambda: 2 in {new() for _ in range(20)}, "the candidate is taken", WAIT_S)
    until(lambda: sum(new() == 2 for _ in range(40)) >= 4, "on both replicas", WAIT_S)
    assert registered() == [f"models:/{project}/1", f"models:/{project}/2"], "the versions that a session may get"

    followed = Followed(project, canary="candidate", share=SHARE)
    names = [f"session-{i}" for i in range(60)]
    expected = {
        name: 2 if followed.choose(name, {"champion": 1, "candidate": 2}) == "candidate" else 1 for name in names
    }
    running = {name: begin(name) for name in names}
    assert {name: ask(client) for name, client in running.items()} == expected, "the session's id alone decides"
    assert Counter(expected.values())[2] > 5

    assert cli.main(["promote", f"models:/{project}@candidate", "--tracking", tracking_db]) == 0
    from_now_on({2})
    assert {name: ask(client) for name, client in running.items()} == expected, "running sessions keep their version"
    assert ask(old) == 1
    for client in (*running.values(), old):
        client.stop()

    booked = MlflowClient(tracking_db)

    def runs() -> dict[str, Any]:
        experiment = booked.get_experiment_by_name(project)
        logged_runs = booked.search_runs([experiment.experiment_id], "attributes.run_name LIKE 'serving%'")
        return {run.info.run_name: run.data.metrics for run in logged_runs}

    def sessions() -> dict[str, float]:
        return {name: metrics.get("session/sessions", 0.0) for name, metrics in runs().items()}

    until(lambda: len(runs()) >= 3, "results are booked", WAIT_S)
    until(lambda: sum(sessions().values()) == len(clients), "of all sessions", WAIT_S)
    until(
        lambda: all(m.get("session/games") == m["session/sessions"] for m in runs().values()), "and their games", WAIT_S
    )
    for name, metrics in runs().items():
        made_by = int(name.split()[2])
        assert metrics["return/mean"] == pytest.approx(10.0 * made_by)
        assert metrics["tick/count"] >= metrics["session/sessions"]
    assert float(booked.get_model_version(project, "2").tags["serving.sessions"]) > 0

    # The champion is rolled back, with MLflow's own call.
    booked.set_registered_model_alias(project, "champion", "1")
    booked.delete_registered_model_alias(project, "candidate")
    from_now_on({1})

    def policy_versions() -> Any:
        with urllib.request.urlopen(url, timeout=WAIT_S) as page:
            return json.loads(page.read())["policy_versions"]

    until(
        lambda: all(policy_versions() == {"model": 1} for _ in range(5)),
        "both replicas report the acting version",
        WAIT_S,
    )

    # Replicas die after their deployed checkpoint is gone: new ones start with what the aliases name by then.
    version(3, "candidate")
    booked.set_registered_model_alias(project, "champion", "2")
    deployed = Path(pooled(spec, "model", tracking_db, f"models:/{project}/1").checkpoint)
    booked.delete_model_version(project, "1")
    shutil.rmtree(deployed)

    def replicas() -> set[int]:
        return {process.pid for process in ours(f"ray::ServeReplica:{project}:")}

    def acting() -> dict[str, int]:
        """The versions of some new sessions by name, as far as a replica answers."""
        versions = {}
        with contextlib.suppress(BrayxError):
            for name in (uuid.uuid4().hex for _ in range(10)):
                with Client(url, timeout_s=10.0) as client:
                    client.start(session=name)
                    versions[name] = ask(client)
                    client.stop()
        return versions

    until(lambda: set(acting().values()) == {2, 3}, "both aliases are followed", WAIT_S)
    killed = replicas()
    assert len(killed) == (2 if placement == "local" else 3)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    first: dict[str, int] = {}
    until(lambda: first.update(acting()) or first, "new replicas answer", WAIT_S)
    aliases = {"champion": 2, "candidate": 3}
    assert first == {name: aliases[followed.choose(name, aliases)] for name in first}, "from the first session on"
    until(lambda: len(replicas()) == len(killed), "as many as before", WAIT_S)
    assert not replicas() & killed
    end(project)


def end(project: str) -> None:
    """Deletes an application, and the actors that outlive it."""
    serve.delete(project)
    directory = f"{project}/actor/sessions"
    stop_directory(directory)
    [pool] = [actor["name"] for actor in list_named_actors(True) if actor["name"].startswith(f"{directory}/pool/")]
    stop_directory(pool)
