"""The weight store's rules, without Ray: versions grow, the newest wins, waits end."""

from __future__ import annotations

import asyncio

from brayx.cluster import weight_store
from brayx.cluster.weight_store import WeightStore


async def test_versions_start_at_one_and_grow():
    store: WeightStore[str] = WeightStore()
    assert store.newest() is None
    assert [store.publish(step, f"w{step}") for step in (10, 20)] == [1, 2]
    assert store.newest() == (2, 20, "w20")


async def test_an_emptied_store_continues_above_the_publishers_version():
    store: WeightStore[str] = WeightStore()
    assert store.publish(1, "w", at_least=41) == 41
    assert store.publish(2, "w", at_least=2) == 42


async def test_a_restarted_store_counts_on_from_the_version_it_remembers():
    store: WeightStore[str] = WeightStore(last=(41, 700))
    assert (store.newest(), store.standing()) == (None, (41, 700))
    assert store.restore(40, 650, "given back"), "the newest version of any subscriber"
    assert store.standing() == (40, 650)
    assert store.publish(-1, "w") == 42
    assert store.newest() == (42, 701, "w")


async def test_wait_newer_returns_at_once_when_there_is_one():
    store: WeightStore[str] = WeightStore()
    store.publish(1, "w")
    assert await store.wait_newer(0, timeout_s=0) == (1, 1, "w")
    assert await store.wait_newer(1, timeout_s=0) is None


async def test_every_waiter_gets_the_newest():
    store: WeightStore[str] = WeightStore()
    store.publish(0, "before")
    waiting = [asyncio.create_task(store.wait_newer(1, timeout_s=5)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    store.publish(2, "second")
    store.publish(3, "third")
    assert await asyncio.gather(*waiting) == [(3, 3, "third")] * 3


async def test_wait_newer_ends_without_a_newer_version():
    store: WeightStore[str] = WeightStore()
    assert await store.wait_newer(0, timeout_s=0.01) is None


async def test_the_last_few_are_kept():
    store: WeightStore[str] = WeightStore(keep=3)
    for step in range(10, 60, 10):
        store.publish(step, f"w{step}")
    assert store.steps() == {3: 30, 4: 40, 5: 50}
    assert store.get(4) == (4, 40, "w40")
    assert store.get(2) is None
    assert store.newest() == (5, 50, "w50")


async def test_an_emptied_store_asks_one_subscriber_at_a_time_for_the_weights():
    store: WeightStore[str] = WeightStore()
    assert await store.wait_newer(7, timeout_s=1) == 0
    others = [asyncio.create_task(store.wait_newer(than, timeout_s=5)) for than in (7, 6)]
    await asyncio.sleep(0)
    assert not any(other.done() for other in others)
    assert store.restore(7, 70, "w70")
    assert await others[1] == (7, 70, "w70")
    assert not store.restore(7, 70, "other"), "it already exists"
    assert not store.restore(6, 60, "older")
    assert store.newest() == (7, 70, "w70")
    assert store.publish(80, "w80", at_least=8) == 8
    assert await others[0] == (8, 80, "w80")


async def test_an_emptied_store_asks_another_subscriber_if_the_first_fails(monkeypatch):
    monkeypatch.setattr(weight_store, "MARGIN_S", 0.0)
    store: WeightStore[str] = WeightStore()
    assert await store.wait_newer(7, timeout_s=1) == 0
    assert await store.wait_newer(7, timeout_s=1) == 0
