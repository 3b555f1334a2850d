"""A batcher over an engine that a test blocks, and the event loop's clock."""

from __future__ import annotations

import asyncio

import pytest

from brayx.model.batcher import Batcher
from tests.unit.model.calls import Engine, LoopClock


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.gate.set()


@pytest.fixture
async def make(engine):
    made = []

    def build(run=engine, **options):
        made.append(Batcher(run, **options))
        return made[-1]

    yield build
    engine.gate.set()
    for batcher in made:
        await batcher.close()


@pytest.fixture
async def clock(monkeypatch):
    loop = asyncio.get_running_loop()
    clock = LoopClock(loop.time())
    monkeypatch.setattr(loop, "time", clock)
    return clock
