"""The learner's stream over buffers: how they share it, what ends it, and importance weights that go on."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from brayx.local.stream import Batches
from tests.unit.local.batches import T, fragment, made, values
from tests.waiting import WAIT_S, until_awaited


@pytest.mark.parametrize("drain", [True, False])
def test_an_end_gives_what_waits_or_nothing(drain):
    buffer, sink = made()
    batches = Batches({"b": buffer}, {"b": 1.0})
    buffer.push(fragment(1.0), fragment(2.0), fragment(3.0))
    buffer.end(drain=drain)
    buffer.push(fragment(4.0))
    assert [values(batch) for batch in batches] == ([[1.0, 2.0], [3.0, 0.0]] if drain else [])
    assert sink.summary()["replay_dropped.ended"] == T


def test_buffers_share_the_learner_by_their_weights():
    left, right = made(size=100)[0], made(size=100)[0]
    batches = Batches({"left": left, "right": right}, {"left": 3.0, "right": 1.0})
    left.push(*(fragment(1.0) for _ in range(24)))
    right.push(*(fragment(2.0) for _ in range(24)))
    first = Counter(values(next(batches))[0] for _ in range(8))
    assert first == {1.0: 6, 2.0: 2}
    rest = (values(next(batches))[0] for _ in range(16))
    assert Counter(rest) == {1.0: 6, 2.0: 10}, "one that has nothing is not waited for"


def test_importance_weights_go_on_where_an_interrupted_training_was():
    buffer, _ = made(sampler="prioritised", importance_exponent=0.0, importance_batches=10, batch_size=4, size=10)
    batches = Batches({"b": buffer}, {"b": 1.0})
    buffer.push(*(fragment(float(value)) for value in range(8)))
    first = next(batches)
    np.testing.assert_array_equal(first["weight"], np.ones(4))
    batches.update_priorities(first["index"], np.array([1.0, 10.0, 100.0, 1000.0], np.float32))
    batches.skip(10)
    assert any(next(batches)["weight"].min() < 1 for _ in range(20))


def test_the_last_batch_is_given_again_while_there_is_no_other_and_counted():
    buffer, sink = made(max_reuse=1)
    buffer.push(fragment(1.0), fragment(2.0))
    assert values(buffer.pop()) == values(buffer.pop()) == [1.0, 2.0]
    assert buffer.pop() is None
    assert sink.summary()["replay_reused"] == 1


@pytest.mark.parametrize("way", ["taken", "ended"])
async def test_a_game_that_is_ahead_waits_until_its_batch_is_taken_or_the_stream_ends(way):
    buffer, _ = made()
    batches = Batches({"b": buffer}, {"b": 1.0})
    await batches.caught_up(WAIT_S)
    buffer.push(fragment(1.0))
    await batches.caught_up(WAIT_S)
    buffer.push(fragment(2.0))
    games = [asyncio.create_task(batches.caught_up(100 * WAIT_S)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(game.done() for game in games)
    await asyncio.to_thread(batches.end if way == "ended" else batches.__next__)
    await until_awaited(lambda: all(game.done() for game in games), "the games play on")
    await batches.caught_up(WAIT_S)


async def test_a_game_plays_on_after_a_time_though_the_learner_is_behind():
    buffer, _ = made()
    batches = Batches({"b": buffer}, {"b": 1.0})
    buffer.push(fragment(1.0), fragment(2.0))
    await batches.caught_up(0.01)
    assert values(next(batches)) == [1.0, 2.0]


async def test_no_game_waits_for_a_table_without_a_rate_limit():
    buffer, _ = made(sampler="uniform", size=10)
    batches = Batches({"b": buffer}, {"b": 1.0})
    buffer.push(*(fragment(float(value)) for value in range(8)))
    await asyncio.wait_for(batches.caught_up(100 * WAIT_S), WAIT_S)


async def test_a_game_waits_until_a_table_has_room_for_what_it_played():
    buffer, sink = made(sampler="uniform", size=10, unroll_length=1, samples_per_insert=2.0)
    batches = Batches({"b": buffer}, {"b": 1.0})
    buffer.push(fragment(steps=9))
    game = asyncio.create_task(batches.caught_up(100 * WAIT_S))
    await asyncio.sleep(0)
    assert not game.done()
    while buffer.is_ahead:
        await asyncio.to_thread(batches.__next__)
    await until_awaited(game.done, "the game plays on")
    assert (sink.summary()["env_steps"], sink.summary().get("replay_dropped.rate_limited")) == (9, None)
    buffer.push(fragment(steps=9))
    batches.end()
    assert sink.summary()["env_steps"] + sink.summary()["replay_dropped.ended"] == 18, "each is stored or counted"
