"""`brayx.replay.buffer`: the logic, and the waiting of the actor on an event loop of its own, without Ray."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from brayx.errors import BadFragment
from brayx.replay.buffer import BufferActor, Next, RemoteBuffer, ReplayBuffer
from brayx.replay.config import BufferConfig
from brayx.types import Fragment
from tests.waiting import until


def fragment(length: int, number: float = 0.0) -> Fragment:
    return Fragment(
        obs=np.full((length + 1, 2), number, np.float32),
        action=np.zeros(length, np.int64),
        log_prob=np.zeros(length, np.float32),
        reward=np.full(length, number, np.float32),
        terminated=True,
        truncated=False,
        policy_version=np.zeros(length, np.int64),
    )


CONFIG = BufferConfig(size=3, batch_size=2, unroll_length=4, max_in_flight=1)
WHOLE = 8
"""Transitions of one batch."""


def test_first_in_first_out_each_once():
    buffer = ReplayBuffer(CONFIG)
    for number in range(3):
        buffer.push(fragment(WHOLE, number))
    assert [buffer.pop()["reward"][0, 0] for _ in range(3)] == [0, 1, 2]
    assert buffer.pop() is None


def test_the_oldest_goes_and_is_counted():
    buffer = ReplayBuffer(CONFIG)
    for number in range(5):
        buffer.push(fragment(WHOLE, number))
    assert len(buffer) == 3
    assert buffer.pop()["reward"][0, 0] == 2
    assert buffer.stats() == {"pushed": 40, "waiting": 0, "batches": 2, "dropped.full": 16}


def test_a_bad_fragment_is_counted_and_the_next_is_taken():
    buffer = ReplayBuffer(CONFIG)
    with pytest.raises(BadFragment, match="NaN"):
        buffer.push(fragment(WHOLE, float("nan")))
    buffer.push(fragment(WHOLE))
    assert buffer.stats()["dropped.bad_fragment"] == WHOLE
    assert "NaN" in buffer.last_refusal
    assert len(buffer) == 1


def test_flush_makes_a_whole_batch_of_what_is_there():
    buffer = ReplayBuffer(CONFIG)
    buffer.push(fragment(3, 1))
    assert buffer.pop() is None
    buffer.flush()
    assert buffer.pop()["mask"].tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    buffer.flush()
    assert buffer.pop() is None


async def test_a_reader_waits_for_a_batch_and_a_credit():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    waiting = asyncio.create_task(actor.next_batch(reader, 5.0))
    await asyncio.sleep(0.01)
    assert await actor.push([fragment(WHOLE, number) for number in range(2)]) == 0
    assert (await waiting).batch["reward"][0, 0] == 0
    assert await actor.next_batch(reader, 0.01) == Next(None)
    waiting = asyncio.create_task(actor.next_batch(reader, 5.0))
    await asyncio.sleep(0.01)
    await actor.ack()
    assert (await waiting).batch["reward"][0, 0] == 1


async def test_end_tells_a_waiting_reader_and_refuses_pushes():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    waiting = asyncio.create_task(actor.next_batch(reader, 5.0))
    await asyncio.sleep(0.01)
    await actor.end()
    assert (await asyncio.wait_for(waiting, 1.0)).ended
    await actor.push([fragment(WHOLE)])
    assert (await actor.stats())["dropped.ended"] == WHOLE


async def test_end_may_drain_first():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    await actor.push([fragment(WHOLE + 1)])
    await actor.end(drain=True)
    whole = await actor.next_batch(reader, 0.1)
    assert await actor.next_batch(reader, 0.01) == Next(None), "no credit: the rest is not lost"
    await actor.ack()
    rest = await actor.next_batch(reader, 0.1)
    await actor.ack()
    assert [int(answer.batch["mask"].sum()) for answer in (whole, rest)] == [WHOLE, 1]
    assert (await actor.next_batch(reader, 0.1)).ended


async def test_end_without_draining_drops_what_waits():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    await actor.push([fragment(WHOLE)])
    await actor.end()
    assert (await actor.next_batch(reader, 0.1)).ended


async def test_a_new_reader_takes_over_and_the_credits_of_the_old_one_are_free():
    actor = BufferActor(CONFIG)
    old = await actor.attach()
    await actor.push([fragment(WHOLE, number) for number in range(2)])
    assert (await actor.next_batch(old, 0.1)).batch is not None
    new = await actor.attach()
    assert (await actor.next_batch(old, 5.0)).ended
    assert (await actor.next_batch(new, 0.1)).batch["reward"][0, 0] == 1


async def test_a_bad_fragment_does_not_take_its_neighbours_along():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    assert await actor.push([fragment(WHOLE, 1), fragment(WHOLE, float("nan")), fragment(WHOLE, 2)]) == 1
    assert (await actor.next_batch(reader, 0.1)).batch["reward"][0, 0] == 1
    await actor.ack()
    assert (await actor.next_batch(reader, 0.1)).batch["reward"][0, 0] == 2
    assert "NaN" in await actor.refusal()


async def test_a_reader_of_a_process_that_died_is_told_to_attach_again():
    before, after = BufferActor(CONFIG), BufferActor(CONFIG)
    assert (await after.next_batch(await before.attach(), 0.1)).unknown


class Calls:
    """An actor's handle whose calls end when and as the test says."""

    def __init__(self):
        self.push = self
        self.made = []

    def remote(self, fragments):
        future = Future()
        self.made.append((len(fragments), future))
        return SimpleNamespace(future=lambda: future)


@pytest.fixture
def calls(monkeypatch):
    handle = Calls()
    monkeypatch.setattr("brayx.replay.buffer.get_buffer", lambda name, namespace=None: handle)
    return handle


def test_what_closing_loses_is_counted(calls):
    told = []
    remote = RemoteBuffer("buffer", on_dropped=lambda *drop: told.append(drop))
    remote.push(fragment(1))
    remote.push(fragment(2), fragment(3))
    remote.close(timeout_s=0.01)
    assert remote.dropped == {"closed": 5}
    remote.push(fragment(4))
    assert remote.dropped == {"closed": 9}
    assert told == [("closed", 5), ("closed", 4)]
    assert len(calls.made) == 1


def test_what_waits_behind_a_failed_call_is_sent_without_another_push(calls):
    remote = RemoteBuffer("buffer")
    remote.push(fragment(1))
    remote.push(fragment(2))
    calls.made[0][1].set_exception(RuntimeError("the actor died"))
    until(lambda: len(calls.made) == 2, "what waited being sent")
    calls.made[1][1].set_result(0)
    assert remote.flush(5)
    assert remote.dropped == {"buffer_lost": 1}
    remote.close()


def test_a_call_without_an_answer_does_not_block_for_ever(calls):
    remote = RemoteBuffer("buffer", push_timeout_s=0.05)
    remote.push(fragment(3))
    time.sleep(0.06)
    remote.push(fragment(1))
    assert [count for count, _ in calls.made] == [1, 1]
    assert remote.dropped == {"buffer_lost": 3}
    calls.made[0][1].set_result(0)
    assert not remote.flush(0.01), "an answer that comes late settles its own call only"
    calls.made[1][1].set_result(0)
    assert remote.flush(1)
    remote.close()
