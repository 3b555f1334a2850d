"""`brayx.cluster.housekeeping`: streams continue if Ray's private parts change. Ray itself: `test_shards.py`."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from brayx.cluster import housekeeping
from brayx.cluster.housekeeping import Housekeeping, keep_house


class Executor:
    """The parts of Ray Data's executor that the housekeeping uses."""

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
def test_an_executor_without_a_needed_attribute_is_reported_once_and_runs(lacks, forgotten, caplog):
    executor = Executor()
    for name in lacks:
        delattr(executor, name)
    run(executor)
    assert executor.statistics["blocks"] == ([1, 2] if "_topology" in lacks else [])
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert f"no attribute '{lacks[0]}'" in warning.getMessage()


def test_unexpected_arguments_are_passed_on_unchanged(forgotten, caplog):
    executor = Executor()
    run(executor)
    executor.produce("block", "node", print)
    executor.produce("block", "node")
    assert executor.callbacks == [("block", "node", print), ("block", "node")]
    assert len(caplog.records) == 1


def test_an_invalid_reference_name_does_not_stop_rays_own_callback(monkeypatch, caplog):
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


def test_a_context_without_callbacks_is_reported(caplog):
    keep_house(SimpleNamespace())
    assert "it takes no callbacks" in caplog.text
