"""`brayx.cluster.housekeeping`: streams continue if Ray's private parts change. Ray itself: `test_shards.py`."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from brayx.cluster import housekeeping
from brayx.cluster.housekeeping import Housekeeping, keep_house


class Executor:
    """As much of Ray Data's as is looked at."""

    def __init__(self):
        self.freed = []
        self.callbacks = []
        self.statistics = {"blocks": [1, 2], "rows": 3}
        self._block_ref_counter = SimpleNamespace(_add_callback_fn=lambda *args: self.callbacks.append(args))
        self._topology = [SimpleNamespace(get_stats=lambda: self.statistics)]

    def produce(self, block, *callback, **named):
        self._block_ref_counter._add_callback_fn(block, *(callback or (self.freed.append,)), **named)


@pytest.fixture
def forgotten(monkeypatch):
    names = []
    monkeypatch.setattr(housekeeping.ray, "ObjectRef", names.append)
    return names


def run(executor, steps=3):
    house = Housekeeping()
    house.before_execution_starts(executor)
    for _ in range(steps):
        house.on_execution_step(executor)


def test_blocks_are_forgotten_and_their_statistics_dropped(forgotten, caplog):
    executor = Executor()
    run(executor)
    executor.produce("block")
    ((block, callback),) = executor.callbacks
    callback(b"name")
    assert (block, executor.freed, forgotten) == ("block", [b"name"], [b"name"])
    assert executor.statistics == {"blocks": [], "rows": 3}
    assert not caplog.records


@pytest.mark.parametrize("lacks", [["_block_ref_counter"], ["_topology"], ["_block_ref_counter", "_topology"]])
def test_an_executor_without_what_is_looked_at_is_told_once_and_runs_with_the_rest(lacks, forgotten, caplog):
    executor = Executor()
    for name in lacks:
        delattr(executor, name)
    run(executor)
    assert executor.statistics["blocks"] == ([1, 2] if "_topology" in lacks else [])
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert f"no attribute '{lacks[0]}'" in said.getMessage()


def test_a_counter_that_is_given_something_else_gets_it_as_it_is(forgotten, caplog):
    executor = Executor()
    run(executor)
    executor.produce("block", "node", print)
    executor.produce("block", "node")
    assert executor.callbacks == [("block", "node", print), ("block", "node")]
    assert len(caplog.records) == 1


def test_a_name_that_is_none_does_not_keep_ray_from_its_own(monkeypatch, caplog):
    def refused(name):
        raise ValueError("no such reference")

    monkeypatch.setattr(housekeeping.ray, "ObjectRef", refused)
    executor = Executor()
    run(executor)
    for name in (b"one", b"two"):
        executor.produce(name)
        executor.callbacks[-1][1](name)
    assert executor.freed == [b"one", b"two"]
    assert len(caplog.records) == 1


def test_a_context_that_takes_no_callbacks_is_told(caplog):
    keep_house(SimpleNamespace())
    assert "it takes no callbacks" in caplog.text
