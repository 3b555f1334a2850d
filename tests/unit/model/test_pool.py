"""The pool, on a real MLflow: aliases that move, versions that are read, results that are written."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mlflow import MlflowClient

from brayx.cluster.pool import PoolClient, _PoolActor
from brayx.engines.base import save_weights
from brayx.errors import BadWeights, DeadlineExceeded, TrackingError, VersionUnknown
from brayx.metrics import Recorder
from brayx.model.arms import Followed
from brayx.model.pool import Pool
from brayx.tracking import Trial, promote, register
from tests.waiting import WAIT_S, until_awaited


@pytest.fixture
def versions(tracking_db, tmp_path):
    """Two versions of the model ``policy``; the URI."""
    trial = Trial.open("p", "t", tracking_db)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for step, alias in ((1, "champion"), (2, "candidate")):
        save_weights(folder / "weights.npz", {"factor": np.array([step], np.float32)})
        register(trial, trial.save_checkpoint(folder, step), "policy", alias=alias)
    return tracking_db


def test_a_different_configuration_of_a_pool_is_a_different_actor():
    followed = {"model": Followed("policy"), "other": Followed("rival")}

    def actor(uri="sqlite:///a.db", project="", followed=followed):
        return PoolClient("service/pool", uri, project, followed).actor

    assert actor().startswith("service/pool/")
    same = [
        actor(followed=dict(reversed(followed.items()))),
        actor(followed=followed | {"model": Followed("policy", share=0.5)}),
        pickle.loads(pickle.dumps(PoolClient("service/pool", "sqlite:///a.db", "", followed))).actor,
    ]
    assert {actor()} == set(same), "and a canary's share does not change the pool"
    others = [
        actor(uri="sqlite:///b.db"),
        actor(project="p"),
        actor(followed={"model": Followed("policy")}),
        *(
            actor(followed=followed | {"model": model})
            for model in (
                Followed("b"),
                Followed("policy", alias="staging"),
                Followed("policy", canary="candidate"),
                Followed("policy", every_s=1.0),
            )
        ),
    ]
    assert len({actor(), *others}) == 1 + len(others)


async def test_the_pool_reports_when_an_alias_moves(versions):
    pool = Pool(versions, "", {"model": Followed("policy", canary="candidate"), "other": Followed("none")})
    assert await pool.newer(None, 0.01) is None
    await pool.look()
    aliases = await pool.newer(None, 1)
    assert aliases == {"model": {"champion": 1, "candidate": 2}, "other": {}}
    await pool.look()
    assert await pool.newer(aliases, 0.01) is None, "no alias has moved"
    waiting = asyncio.create_task(pool.newer(aliases, 30))
    await asyncio.sleep(0)
    promote("models:/policy@candidate", versions)
    await pool.look()
    assert (await waiting)["model"] == {"champion": 2, "candidate": 2}
    assert (await pool.weights("model", 1))["factor"] == 1, "every version is available"
    with pytest.raises(VersionUnknown, match=r"7.* 2.* 1, 2") as raised:
        await pool.weights("model", 7)
    assert raised.value.details == {"version": 7, "nearest": 2, "known": [1, 2]}
    with pytest.raises(VersionUnknown, match="no model 'none'"):
        await pool.weights("other", 1)


async def test_a_version_with_nan_is_refused_and_read_once(versions, tmp_path):
    pool = Pool(versions, "", {"model": Followed("policy")})
    save_weights(tmp_path / "checkpoint" / "weights.npz", {"factor": np.array([np.nan], np.float32)})
    trial = Trial.open("p", "t", versions)
    register(trial, trial.save_checkpoint(tmp_path / "checkpoint", 3), "policy")
    with pytest.raises(BadWeights, match=r"version 3 of model 'policy'.*'factor'"):
        await pool.weights("model", 3)
    for file in tmp_path.rglob("weights.npz"):
        file.unlink()
    with pytest.raises(BadWeights, match=r"version 3 of model 'policy'.*'factor'"):
        await pool.weights("model", 3)


async def test_a_version_that_was_read_is_read_again_without_the_registry(versions, tmp_path):
    pool = Pool(versions, "", {"model": Followed("policy")})
    await pool.weights("model", 1)
    pool._uri = f"sqlite:///{tmp_path / 'text.db'}"
    (tmp_path / "text.db").write_text("no database")
    assert (await pool.weights("model", 1))["factor"] == 1
    with pytest.raises(TrackingError):
        await pool.weights("model", 2)
    pool._uri = versions
    pool._files["policy", 1] = tmp_path / "moved" / "weights.npz"
    assert (await pool.weights("model", 1))["factor"] == 1, "the registry knows where it is now"


async def test_reads_that_hang_take_two_threads_of_the_pools_actor(versions, monkeypatch):
    monkeypatch.setattr("brayx.cluster.pool.MARGIN_S", 0.05)
    actor = _PoolActor(versions, "", {"model": Followed("policy")}, 3600.0)
    answers, begun = threading.Event(), []

    def hangs():
        begun.append(threading.current_thread())
        answers.wait(WAIT_S)

    try:
        hanging = [asyncio.create_task(actor.run(hangs)) for _ in range(2)]
        await until_awaited(lambda: len(begun) == 2, "both have begun", WAIT_S)
        for _ in range(3):
            with pytest.raises(DeadlineExceeded, match="2 earlier reads"):
                await actor.run(hangs)
        assert (await actor._pool.weights("model", 1))["factor"] == 1
    finally:
        answers.set()
    await asyncio.gather(*hanging)
    assert len(begun) == 2
    assert await actor.run(lambda: 7) == 7
    actor._task.cancel()


async def test_an_unreadable_registry_leaves_the_aliases_unchanged(versions, tmp_path, caplog):
    pool = Pool(versions, "", {"model": Followed("policy")})
    await pool.look()
    pool._uri = f"sqlite:///{tmp_path / 'text.db'}"
    (tmp_path / "text.db").write_text("no database")
    await pool.look()
    await pool.look()
    assert await pool.newer(None, 1) == {"model": {"champion": 1}}
    assert caplog.text.count("stay as they are") == 1


def test_results_are_written_to_a_run_per_arm_and_to_the_version(versions):
    client = MlflowClient(versions)

    def serve(sessions):
        pool = Pool(versions, "p", {"model": Followed("policy", canary="candidate")})
        recorder = Recorder()
        for label, returned in (("model/champion/1", 10.0), ("model/candidate/2", 30.0)):
            recorder.add("arm_sessions", sessions, label=label)
            recorder.add("arm_return", returned, label=label)
        recorder.add("arm_refusals", 2, label="model/candidate/2")
        recorder.add("arm_sessions", 1, label="elsewhere/champion/1")
        pool.add(recorder.drain())
        pool.write()
        return pool

    def runs():
        [experiment] = [e for e in client.search_experiments() if e.name == "p"]
        recorded = client.search_runs([experiment.experiment_id], "attributes.run_name LIKE 'serving%'")
        return {run.info.run_name: run.data for run in recorded}

    serve(5)
    assert set(runs()) == {"serving policy 1 as champion", "serving policy 2 as candidate"}
    candidate = runs()["serving policy 2 as candidate"]
    assert {"session/sessions": 5, "tick/refused": 2, "return/mean": 30}.items() <= candidate.metrics.items()
    assert candidate.params["serving.alias"] == "candidate"
    # After a kill and a restart the same runs continue.
    pool = serve(3)
    assert len(runs()) == 2
    assert runs()["serving policy 1 as champion"].metrics["session/sessions"] == 8
    tags = client.get_model_version("policy", "2").tags
    assert (tags["serving.sessions"], tags["serving.episode_return"], tags["serving.refusals"]) == ("8", "30", "4")
    pool.add(counted(["model/champion/2"], 3.0))  # it is promoted: its results stay, and count on
    pool.write()
    tags = client.get_model_version("policy", "2").tags
    assert (tags["serving.sessions"], tags["serving.episode_return"]) == ("11", "30")
    restarted = Pool(versions, "p", {"model": Followed("policy", canary="candidate")})
    for arm, sessions in (("model/champion/2", "12"), ("model/candidate/2", "13")):
        restarted.add(counted([arm]))
        restarted.write()
        assert client.get_model_version("policy", "2").tags["serving.sessions"] == sessions
    assert runs()["serving policy 2 as candidate"].metrics["session/sessions"] == 9
    pool.finish()
    serve(1)
    [experiment] = [e for e in client.search_experiments() if e.name == "p"]
    assert len(client.search_runs([experiment.experiment_id], "attributes.run_name LIKE 'serving%'")) == 5


def counted(arms, sessions=1.0):
    """A replica's metrics of some arms."""
    recorder = Recorder()
    for label in arms:
        recorder.add("arm_sessions", sessions, label=label)
    return recorder.drain()


def serving_runs(client, project):
    [experiment] = [e for e in client.search_experiments() if e.name == project]
    return client.search_runs([experiment.experiment_id], "attributes.run_name LIKE 'serving%'")


def test_results_are_written_for_model_names_that_are_invalid_as_run_names(tracking_db, tmp_path):
    trial = Trial.open("p", "t", tracking_db)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_weights(folder / "weights.npz", {"factor": np.zeros(1, np.float32)})
    for name in ("policy (v2)", "policy [v2]"):
        register(trial, trial.save_checkpoint(folder, 1), name)
    pool = Pool(tracking_db, "p", {"one": Followed("policy (v2)"), "other": Followed("policy [v2]")})
    for _ in range(2):
        pool.add(counted(["one/champion/1", "other/champion/1"]))
        pool.write()
    assert pool.failures == 0
    client = MlflowClient(tracking_db)
    sessions = {
        run.data.params["serving.model"]: run.data.metrics["session/sessions"] for run in serving_runs(client, "p")
    }
    assert sessions == {"policy (v2)": 2, "policy [v2]": 2}
    assert client.get_model_version("policy (v2)", "1").tags["serving.sessions"] == "2"


def test_unwritable_results_are_logged_counted_and_do_not_block_others(versions, caplog, monkeypatch):
    """After any error the writing task continues, and adds the earlier results exactly once."""
    followed = {"model": Followed("policy", canary="candidate")}
    first = Pool(versions, "p", followed)
    first.add(counted(["model/champion/1"], 5))
    first.write()
    pool = Pool(versions, "p", followed)
    pool.add(counted(["model/champion/1", "model/candidate/2"]))
    whole = Trial.log_params

    def fails(trial, params):
        if params["serving"]["alias"] == "champion":
            raise RuntimeError("an unforeseen error")
        whole(trial, params)

    monkeypatch.setattr(Trial, "log_params", fails)
    pool.write()
    pool.write()
    assert pool.failures == 2
    assert "model/champion/1 are not written for now: RuntimeError: an unforeseen error" in caplog.text
    monkeypatch.undo()
    pool.write()
    sessions = {run.data.params["serving.alias"]: run.data.metrics["session/sessions"]
             for run in serving_runs(MlflowClient(versions), "p")}  # fmt: skip
    assert sessions == {"champion": 6, "candidate": 1}


def test_results_may_be_added_while_others_are_written(versions):
    """Two writers and one adder, like the actor's tasks and a replica that flushes."""
    pool = Pool(versions, "p", {"model": Followed("policy", canary="candidate")})
    labels = ["model/champion/1", "model/candidate/2"]
    pool.add(counted(labels))
    with ThreadPoolExecutor(2) as threads:
        writing = [threads.submit(lambda: [pool.write() for _ in range(5)]) for _ in range(2)]
        added = 1
        while not all(future.done() for future in writing):
            pool.add(counted(labels))
            added += 1
        for future in writing:
            future.result()
    pool.write()
    runs = serving_runs(MlflowClient(versions), "p")
    assert sorted(run.data.metrics["session/sessions"] for run in runs) == [added, added], (
        "a run of each, and nothing lost"
    )
    assert pool.failures == 0
