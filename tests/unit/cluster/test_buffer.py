"""`brayx.cluster.buffer`: pushes and readers that wait, on an event loop, without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from brayx.cluster.buffer import BufferActor, Next
from brayx.replay.packing import READY_KEY
from brayx.types import Columns, Fragment
from tests.unit.replay.made import CONFIG, WHOLE, changed, columns, fragment


async def test_a_reader_waits_for_a_batch_and_a_credit():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    waiting = asyncio.create_task(actor.next_batch(reader, 5.0))
    await asyncio.sleep(0.01)
    assert (await actor.push([fragment(WHOLE, number) for number in range(2)])).refused == 0
    assert (await waiting).batch["reward"][0, 0] == 0
    assert await actor.next_batch(reader, 0.01) == Next(None)
    waiting = asyncio.create_task(actor.next_batch(reader, 5.0))
    await asyncio.sleep(0.01)
    await actor.ack()
    assert (await waiting).batch["reward"][0, 0] == 1


async def test_end_wakes_a_waiting_reader_and_refuses_pushes():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    waiting = asyncio.create_task(actor.next_batch(reader, 5.0))
    await asyncio.sleep(0.01)
    await actor.end()
    assert (await asyncio.wait_for(waiting, 60)).ended
    await actor.push([fragment(WHOLE)])
    assert (await actor.stats())["dropped.ended"] == WHOLE


@pytest.mark.parametrize("wait_s", [60.0, 0.0])
async def test_a_fragment_waits_until_a_table_admits_all_of_it(monkeypatch, wait_s):
    """What was not admitted within the time of one call is not dropped: the caller pushes it again."""
    monkeypatch.setattr("brayx.cluster.buffer.MAX_WAIT_S", wait_s)
    actor = BufferActor(changed(size=10, sampler="uniform", unroll_length=1, batch_size=2, samples_per_insert=2.0))
    reader, left, calls = await actor.attach(), [fragment(4), fragment(5)], 0
    while left:
        pushing = asyncio.create_task(actor.push(left))
        while not pushing.done():
            if (await actor.next_batch(reader, 0.0)).batch is not None:
                await actor.ack()
            await asyncio.sleep(0)
        left, calls = pushing.result().rest_of(left), calls + 1
    stats = await actor.stats()
    assert (stats["pushed"], stats["inserts"]) == (9, 9)
    assert "dropped.rate_limited" not in stats
    assert (calls == 1) == (wait_s > 0)


async def test_end_may_drain_first():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    await actor.push([fragment(WHOLE + 1)])
    await actor.end(drain=True)
    whole = await actor.next_batch(reader, 0.1)
    assert await actor.next_batch(reader, 0.01) == Next(None), "without a credit the rest stays"
    await actor.ack()
    rest = await actor.next_batch(reader, 0.1)
    await actor.ack()
    assert [int(answer.batch["mask"].sum()) for answer in (whole, rest)] == [WHOLE, 1]
    assert (await actor.next_batch(reader, 0.1)).ended


async def test_end_without_draining_drops_waiting_batches():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    await actor.push([fragment(WHOLE)])
    await actor.end()
    assert (await actor.next_batch(reader, 0.1)).ended


async def test_a_new_reader_takes_over_and_frees_the_credits_of_the_old_one():
    actor = BufferActor(CONFIG)
    old = await actor.attach()
    await actor.push([fragment(WHOLE, number) for number in range(2)])
    assert (await actor.next_batch(old, 0.1)).batch is not None
    new = await actor.attach()
    assert (await actor.next_batch(old, 5.0)).ended
    assert (await actor.next_batch(new, 0.1)).batch["reward"][0, 0] == 1


@pytest.mark.parametrize(("sampler", "lost"), [("fifo", 2 * WHOLE), ("uniform", 0)])
async def test_a_predecessors_batches_in_flight_count_as_lost_unless_given_again(sampler, lost):
    actor = BufferActor(changed(max_in_flight=3, sampler=sampler))
    reader = await actor.attach()
    await actor.push([columns(2, number) for number in range(3)])
    for _ in range(3):
        assert (await actor.next_batch(reader, 0.1)).batch is not None
    await actor.ack()
    await actor.attach()
    assert (await actor.stats()).get("dropped.reader_lost", 0) == lost
    assert actor._hub.summary().get("replay_dropped.reader_lost", 0) == lost, "no further push may come to report it"


async def test_expired_data_is_reported_without_another_push():
    actor = BufferActor(changed(max_policy_lag=0))
    reader = await actor.attach()
    await actor.push([columns(2)])
    await actor.expire(5)
    dropped = (await actor.stats())["dropped.policy_lag"]
    assert dropped > 0
    assert (await actor.next_batch(reader, 0.0)).batch is None
    assert actor._hub.summary()["replay_dropped.policy_lag"] == dropped


async def test_an_acknowledgement_before_its_publish_call_lets_nothing_older_leave():
    """Ray does not keep the order of an asyncio actor's calls."""
    actor = BufferActor(changed(max_policy_lag=0))
    reader = await actor.attach()
    await actor.push([columns(2, version=1), columns(2, version=1)])
    assert (await actor.next_batch(reader, 0.1)).batch is not None
    waiting = asyncio.create_task(actor.next_batch(reader, 5.0))
    await asyncio.sleep(0.01)
    await actor.ack(1, reader, newest=2)
    await actor.push([columns(2, version=2)])
    assert ((await waiting).batch["policy_version"] == 2).all()
    await actor.expire(2)
    assert (await actor.stats())["dropped.policy_lag"] == WHOLE


async def test_evaluation_buffers_report_only_drops_under_another_name():
    for learned in (True, False):
        actor = BufferActor(changed(size=1), learned=learned)
        assert (await actor.push([columns(2), columns(2), columns(1, float("nan"))])).refused == 1
        summary = actor._hub.summary()
        dropped = "replay_dropped" if learned else "eval_dropped"
        assert (summary[f"{dropped}.full"], summary[f"{dropped}.bad_fragment"]) == (WHOLE, WHOLE // 2)
        assert ("env_steps" in summary) is learned, "only learned steps count as the trial's"
        assert len(summary) == (6 if learned else 2)


async def test_a_repeated_batch_is_not_lost_with_its_reader():
    actor = BufferActor(changed(max_reuse=1))
    reader = await actor.attach()
    await actor.push([columns(2)])
    assert (await actor.next_batch(reader, 0.1)).batch is not None
    await actor.ack()
    assert (await actor.next_batch(reader, 0.1)).batch is not None
    assert (await actor.stats())["reused"] == 1
    await actor.attach()
    assert "dropped.reader_lost" not in await actor.stats()


async def test_a_late_acknowledgement_of_a_predecessor_gives_no_credit():
    actor = BufferActor(CONFIG)
    old = await actor.attach()
    await actor.push([fragment(WHOLE, number) for number in range(3)])
    await actor.next_batch(old, 0.1)
    new = await actor.attach()
    assert (await actor.next_batch(new, 0.1)).batch is not None
    await actor.ack(reader=old)
    assert await actor.next_batch(new, 0.01) == Next(None)
    await actor.ack(reader=new)
    assert (await actor.next_batch(new, 0.1)).batch is not None


async def test_a_bad_fragment_does_not_affect_its_neighbours():
    actor = BufferActor(CONFIG)
    reader = await actor.attach()
    assert (await actor.push([fragment(WHOLE, 1), fragment(WHOLE, float("nan")), fragment(WHOLE, 2)])).refused == 1
    assert (await actor.next_batch(reader, 0.1)).batch["reward"][0, 0] == 1
    await actor.ack()
    assert (await actor.next_batch(reader, 0.1)).batch["reward"][0, 0] == 2
    assert "NaN" in actor._hub.notes()["fragments_dropped.refused"]
    assert actor._hub.summary()["fragments_dropped.refused"] == 1
    await actor.push([fragment(WHOLE, 1), fragment(WHOLE, float("nan"))], places=["agent.py:1", "agent.py:2"])
    note = actor._hub.notes()["fragments_dropped.refused"]
    assert note.startswith("BadFragment: ")
    assert note.endswith("(agent.py:2)")


async def test_a_reader_of_a_restarted_buffer_must_attach_again():
    before, after = BufferActor(CONFIG), BufferActor(CONFIG)
    assert (await after.next_batch(await before.attach(), 0.1)).unknown


async def test_a_push_that_may_not_drop_waits_until_a_batch_is_taken():
    actor = BufferActor(changed(size=1))
    reader = await actor.attach()
    assert (await actor.push([columns(2, 1)], False)).room is False
    assert (await actor.push([columns(2, 2)], False))[2:4] == (0, 0)
    waiting = asyncio.create_task(actor.push([columns(1, 2), columns(3, 3)], False, 1.0))
    await asyncio.sleep(0.01)
    assert (await actor.next_batch(reader, 0.1)).batch["reward"][0, 0] == 1
    taken = await asyncio.wait_for(waiting, 60)
    assert (taken.whole, taken.part, taken.refused) == (1, 2, 0), "another one would complete a second batch"
    assert "dropped.full" not in await actor.stats()


@pytest.mark.parametrize("replay", [columns(6), fragment(3 * WHOLE)])
async def test_a_waiting_reader_makes_room_for_a_waiting_push(replay):
    actor = BufferActor(changed(size=1))
    reader = await actor.attach()

    async def read() -> list[float]:
        answers = []
        for _ in range(3):
            answers.append(await actor.next_batch(reader, 2.0))
            await actor.ack()
        return [answer.batch["mask"].sum() for answer in answers]

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    assert (await actor.push([replay], False, 2.0)).whole == 1
    assert await reading == [WHOLE] * 3


async def test_end_wakes_a_waiting_push():
    actor = BufferActor(changed(size=1))
    await actor.push([columns(2)])
    waiting = asyncio.create_task(actor.push([columns(2)], False, 5.0))
    await asyncio.sleep(0.01)
    await actor.end()
    taken = await asyncio.wait_for(waiting, 60)
    assert taken.ended
    assert (await actor.stats())["dropped.ended"] == WHOLE


async def test_a_batch_is_repeated_only_if_the_learner_has_none():
    actor = BufferActor(changed(max_reuse=3, max_in_flight=2))
    reader = await actor.attach()
    await actor.push([columns(2, 1)])
    assert (await actor.next_batch(reader, 0.01)).batch is not None
    assert await actor.next_batch(reader, 0.01) == Next(None)
    await actor.ack()
    assert (await actor.next_batch(reader, 0.01)).batch["reward"][0, 0] == 1
    await actor.ack()
    await actor.end(drain=True)
    assert (await actor.next_batch(reader, 0.01)).ended


async def test_a_sampled_buffer_without_new_data_gives_batches_until_it_is_stopped():
    actor = BufferActor(changed(sampler="prioritised", max_in_flight=8))
    reader = await actor.attach()
    await actor.push([columns(3)])
    await actor.end(drain=True)
    for _ in range(5):
        batch = (await actor.next_batch(reader, 0.1)).batch
        assert await actor.update_priorities(batch["index"], np.ones(2)) == 2
    await actor.end()
    assert (await actor.next_batch(reader, 0.1)).ended


class Store:
    """A weight store as the buffer sees it."""

    def __init__(self, version):
        self.version, self.lookups = version, 0
        self.newest = SimpleNamespace(remote=self.ask)

    async def ask(self):
        self.lookups += 1
        return None if self.version is None else (self.version, 0, [])


async def test_an_unknown_policy_version_is_looked_up_and_refused():
    actor = BufferActor(CONFIG, weights="store")
    actor._store = store = Store(4)
    assert (await actor.push([columns(2, version=3)])).refused == 0
    assert (await actor.push([columns(2, version=4)])).refused == 0
    assert store.lookups == 1
    taken = await actor.push([columns(2, version=5)])
    assert taken.refused == 1
    assert "policy_version: 5 is unknown, the newest published is 4" in taken.why
    store.version = 5
    assert (await actor.push([columns(2, version=5)])).refused == 0


async def test_an_empty_store_refuses_no_version():
    actor = BufferActor(CONFIG, weights="store")
    actor._store = Store(None)
    assert (await actor.push([columns(2, version=3)])).refused == 0


async def test_objects_of_other_types_are_refused_too():
    actor = BufferActor(CONFIG, weights="store")
    actor._store = Store(4)
    assert (await actor.push([{"reward": 1}, columns(2)])).refused == 1
    await actor.end()
    assert (await actor.push([{"reward": 1}, columns(2)])).whole == 2
    assert (await actor.stats())["dropped.ended"] == 1 + WHOLE


async def test_a_stream_reports_since_when_a_batch_was_ready() -> None:
    actor = BufferActor(changed(size=4, batch_size=1, max_reuse=1))
    reader = await actor.attach()

    async def since() -> float:
        batch = (await actor.next_batch(reader, 0.0)).batch
        assert batch is not None
        await actor.ack()
        return float(batch[READY_KEY])

    before = time.time()
    await actor.push([fragment(8)])
    after = time.time()
    first = await since()
    assert before <= first <= after
    assert await since() == first, "a batch was ready all the time"
    assert math.isnan(await since()), "a repeated batch does not count as ready"
    await actor.push([fragment(4)])
    assert await since() >= after


async def test_concurrent_waiting_pushes_are_counted_once_each():
    actor = BufferActor(changed(size=1))
    reader = await actor.attach()
    assert (await actor.push([columns(2, 1)], False)).refused == 0
    waiting = [asyncio.create_task(actor.push([columns(1, number)], False, 5.0)) for number in (2, 3)]
    await asyncio.sleep(0.01)
    assert (await actor.next_batch(reader, 0.1)).batch is not None
    await asyncio.gather(*waiting)
    assert actor._hub.summary()["env_steps"] == (await actor.stats())["pushed"] == 2 * WHOLE


ODD = [
    None, 3, "x", b"x", [[1], [2, 3]], [[None]], {}, {"a": np.zeros(3)}, np.zeros(()), np.zeros(0), np.zeros((2, 5, 2)),
    np.array(["a"]), np.array([object()]), np.zeros((2, 5), complex), np.zeros((2, 5), "M8[s]"),
    np.full((2, 5), np.nan), np.full((2, 5), np.inf),
]  # fmt: skip
"""Values that a caller may push in place of an array."""


def bad_pushes() -> list[object]:
    good, whole = dict(columns(2).arrays), fragment(4)
    pushes: list[object] = [*ODD, *(Columns(odd) for odd in ODD)]
    for key in (*good, "priority", "weight"):
        pushes += [Columns({**good, key: odd}) for odd in ODD]
    for name in (field.name for field in dataclasses.fields(Fragment)):
        pushes += [dataclasses.replace(whole, **{name: odd}) for odd in ODD]
    return [*pushes, *(dataclasses.replace(whole, extras={"priority": odd}) for odd in ODD)]


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("options", [{}, {"max_policy_lag": 0}, {"sampler": "uniform"}, {"sampler": "prioritised"}])
async def test_a_refused_push_neither_affects_its_neighbours_nor_sets_the_layout(options, drop):
    refusals = 0
    for bad in bad_pushes():
        actor = BufferActor(changed(**options), weights="store")
        actor._store = Store(0)
        taken = await actor.push([bad], drop)
        assert (taken.whole, taken.refused) in ((1, 0), (1, 1)), bad
        if not taken.refused:  # an empty mapping of extras, and the like
            continue
        refusals += 1
        taken = await actor.push([columns(1), bad, columns(1)], drop)
        assert (taken.whole, taken.refused) == (3, 1), bad
        assert (await actor.stats())["pushed"] == WHOLE, bad
    assert refusals > 300


async def test_a_bad_push_that_does_not_fit_is_refused_like_one_that_fits():
    for bad in (Columns({**columns(9).arrays, "action": 5}), Columns({**columns(9).arrays, "mask": [[1], [1, 1]]})):
        actor = BufferActor(CONFIG)
        taken = await actor.push([columns(2), bad, columns(2)], drop=False)
        assert (taken.whole, taken.refused) == (3, 1)


@pytest.mark.parametrize("shape", [(1, 5, 2), (1, 5, 1), (1,)])
async def test_a_refused_priority_does_not_require_priorities_later(shape):
    actor = BufferActor(changed(sampler="prioritised"))
    bad = Columns({**columns(1).arrays, "priority": np.ones(shape, np.float32)})
    assert "priority: expected a number for each step" in (await actor.push([bad])).why
    good = Columns({**columns(2).arrays, "priority": np.ones((2, 5), np.float32)})
    assert (await actor.push([good])).refused == 0
