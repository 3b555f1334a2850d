"""The parts of a named model, over a weight store in this process: what is done when one was lost or is left over."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from ray.serve.exceptions import RayServeException

from brayx.cluster import named_model as named
from brayx.cluster.weights import WeightStore
from brayx.errors import StartupError
from brayx.model.checkpoints import Checkpoints
from brayx.tracking import Trial


class Asked:
    """A weight store as its handle is, whose actor was restarted after version 5."""

    def __init__(self, last=(5, 50)):
        self.store = WeightStore(last=last)

    def restore(self, version, step, weights):
        return self.store.restore(version, step, [weights])

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    loop = asyncio.new_event_loop()

    def call(method, *args, timeout_s=0):
        answer = method(*args)
        return loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer

    monkeypatch.setattr(named, "call_with_retry", call)
    monkeypatch.setattr(named, "taken", lambda reference, timeout_s: reference)
    monkeypatch.setattr(named, "_GIVEN_BACK_S", 0.05)
    yield
    loop.close()


def weights(value):
    return {"factor": np.array([value], np.float32)}


@pytest.fixture
def trial(tracking_db):
    made = Trial.open("brayx-models", "m", tracking_db)
    checkpoints = Checkpoints(made, 1)
    assert checkpoints.offer(weights(4), version=4, step=40)
    checkpoints.close()
    return made


def test_a_store_that_lost_its_weights_has_the_newest_checkpoint_s(trial):
    store = Asked()
    version, found = named.first_weights("m", store, trial)
    assert (version, found["factor"]) == (4, 4)
    assert store.newest()[:2] == (4, 40)
    assert store.publish(41, [weights(6)]) == 6, "it counts on from what it had"


def test_what_is_there_is_taken_before_a_checkpoint(trial):
    store = Asked()
    store.store.publish(60, [weights(6)])
    version, found = named.first_weights("m", store, trial)
    assert (version, found["factor"]) == (6, 6)


@pytest.mark.parametrize("last", [(0, 0), (5, 50)], ids=["never published", "no checkpoint"])
def test_where_there_is_nothing_to_begin_with_the_way_out_is_told(trial, tracking_db, monkeypatch, last):
    monkeypatch.setattr(named, "ANSWER_S", 0.1)
    of = trial if last == (0, 0) else Trial.open("brayx-models", "empty", tracking_db)
    with pytest.raises(StartupError, match=r"store of model 'm' holds nothing; .*`override_model=True`"):
        named.first_weights("m", Asked(last), of)


def test_replicas_that_nobody_starts_are_told_of_with_the_way_out(monkeypatch):
    def nowhere(name):
        raise RayServeException("no application")

    monkeypatch.setattr(named.serve, "get_app_handle", nowhere)
    with pytest.raises(StartupError, match=r"did not start within 0 s: no application; .*`override_model=True`"):
        named.deployed("m", 0)


@pytest.mark.parametrize(("token", "removed"), [("mine", ["m"]), ("another's", [])])
def test_only_what_a_start_itself_made_is_withdrawn(monkeypatch, token, removed):
    ended = []
    monkeypatch.setattr(named, "find", lambda name: Asked())
    monkeypatch.setattr(named, "recipe_of", lambda store, timeout_s: SimpleNamespace(token=token))
    monkeypatch.setattr(named, "remove", lambda name, of: ended.append(name))
    named.withdraw("m", "mine", None)
    assert ended == removed


def test_a_model_ends_though_its_replicas_do_not(monkeypatch, caplog, trial):
    """Else its name would be taken, and its trial at work, for ever."""
    there = [Asked()]
    monkeypatch.setattr(named, "find", lambda name: there[0] if there else None)
    monkeypatch.setattr(named, "recipe_of", lambda store, timeout_s: SimpleNamespace(token="mine", trial=trial))
    monkeypatch.setattr(named, "delete_application", lambda name, timeout_s: False)
    monkeypatch.setattr(named, "end_weight_store", there.remove)
    named.withdraw("m", "mine", None)
    assert not there
    assert trial.status == "KILLED"
    assert "model 'm' has ended, and" in caplog.text
