"""`brayx.cluster.remote_buffer`: the shard of each push, and its outcome, with scripted actors."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from brayx.cluster import acting
from brayx.cluster.buffer import Taken
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.shards import Shard, Shards
from brayx.errors import BadFragment, ConfigError, DeadlineExceeded, ReplayError
from brayx.metrics import Recorder
from brayx.replay.packing import transitions
from tests.unit.replay.made import CONFIG, changed, columns, fragment
from tests.waiting import until


class Calls:
    """An actor's handle; the test decides when and how its calls end."""

    def __init__(self):
        self.push = self
        self.made = []

    def remote(self, replays, drop=True, timeout_s=0.0, places=()):
        future = Future()
        self.made.append((len(replays), future))
        self.waits, self.places, self.sizes = (drop, timeout_s), places, [*map(transitions, replays)]
        return SimpleNamespace(future=lambda: future, replays=replays)


def taken(whole=0, part=0, *, room=True, refused=0, why="", ended=False):
    return Taken(refused, why, whole, part, room, ended)


def buffer(*lanes, config=CONFIG, **arguments):
    """A buffer over actors, each with its node; "" is this node (it has an id if an earlier test started Ray)."""
    here = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    shards = Shards("buffer", config, [Shard(actor, node or here) for actor, node in lanes])
    return RemoteBuffer("buffer", shards=shards, **arguments)


@pytest.fixture
def calls():
    return Calls()


def test_fragments_lost_by_closing_are_counted(calls):
    recorder = Recorder()
    remote = buffer((calls, ""), recorder=recorder)
    remote.push(fragment(1))
    remote.push(fragment(2), fragment(3))
    remote.close(timeout_s=0.01)
    assert remote.dropped == {"closed": 5}
    remote.push(fragment(4))
    assert remote.dropped == {"closed": 9}
    assert recorder.summary() == {"replay_dropped.closed": 9}
    assert len(calls.made) == 1


def test_after_a_refusal_pushes_name_their_place(calls):
    remote = buffer((calls, ""))
    remote.push(fragment(1))
    assert calls.places == [""], "good pushes do not look up their place"
    calls.made[0][1].set_result(taken(1, refused=1, why="obs"))
    remote.push(fragment(1))
    line = inspect.currentframe().f_lineno - 1
    remote.push(fragment(1), fragment(2))
    calls.made[1][1].set_result(taken(1))
    assert calls.places == [f"{__file__}:{line + 2}"] * 2
    remote.close(0)


def test_fragments_behind_a_failed_call_are_sent_without_another_push(calls):
    remote = buffer((calls, ""))
    remote.push(fragment(1))
    remote.push(fragment(2))
    calls.made[0][1].set_exception(RuntimeError("the actor died"))
    until(lambda: len(calls.made) == 2, "the sending of waiting fragments")
    calls.made[1][1].set_result(taken(1))
    assert remote.flush(5)
    assert remote.dropped == {"buffer_lost": 1}
    remote.close()


def test_what_a_table_did_not_admit_yet_is_pushed_again_before_the_rest(calls):
    remote = buffer((calls, ""), max_pending=2)
    remote.push(fragment(3), fragment(4))
    remote.push(fragment(5))
    calls.made[0][1].set_result(taken(part=2, room=False))
    assert remote.dropped == {"full": 1}, "the oldest of three that wait"
    assert calls.sizes == [4, 5]
    calls.made[1][1].set_result(taken(1, 1, room=False))
    assert calls.sizes == [4]
    remote.close(0)
    assert remote.dropped == {"full": 1}
    calls.made[2][1].set_result(taken(room=False))
    assert remote.dropped == {"full": 1, "closed": 4}


@pytest.mark.parametrize("rate", [2.0, None])
async def test_a_game_waits_until_a_table_has_admitted_what_it_played(calls, rate):
    remote = buffer((calls, ""), config=changed(sampler="uniform", size=10, samples_per_insert=rate))
    remote.push(fragment(3))
    await remote.caught_up(60.0)
    remote.push(fragment(4))
    game = asyncio.create_task(remote.caught_up(600.0))
    await asyncio.sleep(0)
    assert game.done() is (rate is None)
    calls.made[0][1].set_result(taken(1))
    for _ in range(9):
        await asyncio.sleep(0)
    assert game.done(), "it is woken, and does not look from time to time"
    remote.close(0)


def test_a_call_has_a_part_of_a_long_queue(calls):
    remote = buffer((calls, ""))
    for _ in range(101):
        remote.push(fragment(1))
    for number in range(3):
        calls.made[number][1].set_result(taken(calls.made[number][0]))
    assert [count for count, _ in calls.made] == [1, 64, 36]
    assert remote.flush(5)
    remote.close(0)


async def test_games_wait_for_all_buffers_at_once_and_for_those_of_an_evaluation_never():
    waits = []

    async def caught_up(longest_s):
        waits.append(longest_s)
        await asyncio.sleep(3600)

    game = asyncio.create_task(acting._caught_up([SimpleNamespace(caught_up=caught_up)] * 2, 5.0))
    for _ in range(9):
        await asyncio.sleep(0)
    assert waits == [5.0, 5.0]
    game.cancel()
    trainer = {"kind": "trainer", "buffers": ["b"], "eval_buffers": ["held"]}
    assert acting._learned_buffers({"project": "p", "trainer": trainer, "b": {"kind": "buffer"}}) == {"b"}


def test_a_malformed_fragment_is_counted_and_blocks_nothing(calls):
    """A reward that is one number has no length; the buffer reports that to the caller."""
    remote = buffer((calls, ""), max_pending=2)
    wrong = dataclasses.replace(fragment(3), reward=np.float32(1))
    remote.push(wrong)
    calls.made[0][1].set_exception(RuntimeError("the actor died"))
    assert remote.dropped == {"buffer_lost": 1}
    remote.push(wrong)
    remote.push(fragment(1), fragment(1))
    assert remote.dropped == {"buffer_lost": 1, "full": 1}, "but nothing because of those that come with it"
    until(lambda: len(calls.made) == 2, "the sending of the rest")
    remote.push(wrong)
    remote.close(0)
    assert remote.dropped == {"buffer_lost": 1, "full": 1, "closed": 1}
    waiting = buffer((calls, ""))
    waiting._answer = lambda call: taken(room=False)
    with pytest.raises(DeadlineExceeded, match="no room for 1 transitions"):
        waiting.push(wrong, drop=False, timeout_s=0.0)


def test_a_call_without_an_answer_does_not_block_for_ever(calls):
    remote = buffer((calls, ""), push_timeout_s=0.05)
    remote.push(fragment(3))
    time.sleep(0.06)
    remote.push(fragment(1))
    until(lambda: [count for count, _ in calls.made] == [1, 1], "the sending of the next fragment")
    assert remote.dropped == {"buffer_lost": 3}
    calls.made[0][1].set_result(taken(1))
    assert not remote.flush(0.01), "a late answer settles only its own call"
    calls.made[1][1].set_result(taken(1))
    assert remote.flush(1)
    remote.close()


def test_pushes_go_to_this_node_while_it_has_room_and_then_to_others():
    far, near = Calls(), Calls()
    remote = buffer((far, "far"), (near, ""), config=changed(num_workers=2))
    for _ in range(3):
        remote.push(fragment(1))
        near.made[-1][1].set_result(taken(1))
    assert (len(near.made), len(far.made)) == (3, 0)
    remote.push(fragment(1))
    near.made[-1][1].set_result(taken(1, room=False))
    remote.push(fragment(1))
    far.made[-1][1].set_result(taken(1, room=False))
    assert (len(near.made), len(far.made)) == (4, 1)
    remote.push(fragment(1))
    assert (len(near.made), len(far.made)) == (5, 1), "without room anywhere: the nearest"
    remote.close(0)


def test_a_dead_shard_is_skipped_for_a_moment():
    far, near = Calls(), Calls()
    remote = buffer((far, "far"), (near, ""), config=changed(num_workers=2))
    remote.push(fragment(2))
    remote.push(fragment(1))
    near.made[0][1].set_exception(RuntimeError("the actor died"))
    assert (len(near.made), len(far.made)) == (1, 1)
    assert remote.dropped == {"buffer_lost": 2}
    far.made[0][1].set_result(taken(1))
    time.sleep(0.25)
    remote.push(fragment(1))
    assert (len(near.made), len(far.made)) == (2, 1)
    remote.close(0)


def test_a_slow_shard_gets_help_before_something_is_dropped():
    far, near = Calls(), Calls()
    remote = buffer((far, "far"), (near, ""), config=changed(num_workers=2), max_pending=4)
    for _ in range(4):
        remote.push(fragment(1))
    assert [count for count, _ in near.made + far.made] == [1, 3]
    assert not remote.dropped
    remote.close(0)


def test_density_bounds_the_number_of_shards():
    lanes = [(Calls(), "far") for _ in range(5)]
    remote = buffer((near := Calls(), ""), *lanes, config=changed(num_workers=6, density=2), max_pending=1)
    for _ in range(9):
        remote.push(fragment(1))
    assert len(near.made) == 1
    assert sum(bool(calls.made) for calls, _ in lanes) == 1
    remote.close(0)


def offered(remote, replays, timeout_s, *answers):
    """Offers replays to shards that answer so; returns the sizes in each call, and the rest."""
    sent, script = [], list(answers)

    def answer(call):
        sent.append([len(replay) for replay in call.replays])
        if isinstance(script[0], Exception):
            raise script.pop(0)
        return script.pop(0)

    remote._answer = answer
    left = remote.offer(*replays, timeout_s=timeout_s)
    assert not script
    return sent, left


def test_a_waiting_push_continues_where_the_buffer_stopped(calls):
    remote = buffer((calls, ""))
    replays = [fragment(3), columns(6), fragment(5)]
    answers = taken(1, 4, room=False), taken(room=False), taken(1, 2, room=False), taken(1)
    sent, left = offered(remote, replays, 9.0, *answers)
    assert sent == [[3, 24, 5], [8, 5], [8, 5], [3]]
    assert left == []
    assert calls.waits[0] is False


def test_all_shards_are_tried_before_waiting_for_one():
    far, near = Calls(), Calls()
    remote = buffer((far, "far"), (near, ""), config=changed(num_workers=2))
    full = taken(room=False)
    offered(remote, [fragment(3)], 9.0, full, full, full, taken(1))
    assert (len(near.made), len(far.made)) == (2, 2)
    assert far.waits[1] > 0


def test_fragments_without_room_in_time_are_returned(calls):
    remote = buffer((calls, ""))
    _, left = offered(remote, [fragment(3), columns(4)], 0.0, taken(1, 1, room=False))
    assert [len(replay) for replay in left] == [12]
    remote._answer = lambda call: taken(1, 1, room=False)
    with pytest.raises(DeadlineExceeded, match="no room for 12 transitions within 0 s"):
        remote.push(fragment(3), columns(4), drop=False, timeout_s=0.0)


async def test_a_cancelled_push_sends_no_more(calls):
    remote, answered = buffer((calls, "")), threading.Event()

    def full(call):
        assert answered.wait(60)
        return taken(room=False)

    remote._answer = full
    push = asyncio.create_task(remote.push_async(fragment(3), drop=False, timeout_s=0.5))
    await asyncio.to_thread(until, lambda: calls.made, "the first call")
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    answered.set()
    await asyncio.to_thread(remote._waiting.shutdown)
    assert len(calls.made) == 1


async def test_the_wait_for_a_thread_counts_as_waiting(calls, monkeypatch):
    now, answered = [0.0], threading.Event()
    monkeypatch.setattr("brayx.cluster.remote_buffer._MAX_WAITING", 1)
    monkeypatch.setattr("brayx.cluster.remote_buffer.time", SimpleNamespace(monotonic=lambda: now[0]))
    remote = buffer((calls, ""))

    def first_full(call):
        assert answered.wait(60)
        return taken(room=False) if len(calls.made) == 1 else taken(1)

    remote._answer = first_full
    first, second = (asyncio.create_task(remote.push_async(fragment(3), drop=False, timeout_s=60.0)) for _ in range(2))
    await asyncio.to_thread(until, lambda: calls.made, "the first call")
    now[0] = 100.0
    answered.set()
    with pytest.raises(DeadlineExceeded, match="no room for 3 transitions within 60 s"):
        await first
    await second
    assert calls.waits == (False, 0.0), "its time was over, so it waits no longer"


def test_fragments_for_a_restarting_buffer_are_returned(calls, monkeypatch):
    remote = buffer((calls, ""))
    monkeypatch.setattr(remote.shards, "gone", lambda: False)
    monkeypatch.setattr("brayx.cluster.remote_buffer.RETRY_S", 0.0)
    died = ray.exceptions.ActorDiedError()
    _, left = offered(remote, [fragment(3), columns(4)], 0.0, died)
    assert [len(replay) for replay in left] == [3, 16]
    assert offered(remote, [fragment(3)], 9.0, died, taken(1)) == ([[3], [3]], [])
    assert not remote.dropped
    monkeypatch.setattr(remote.shards, "gone", lambda: True)
    with pytest.raises(ReplayError, match="was lost during a push"):
        offered(remote, [fragment(3)], 9.0, died)
    assert remote.dropped == {"buffer_lost": 3}


def test_a_waiting_push_reports_refusals_at_its_end(calls):
    refused = taken(1, room=False, refused=1, why="obs: holds NaN")
    with pytest.raises(BadFragment, match="NaN"):
        offered(buffer((calls, "")), [fragment(3), fragment(1)], 9.0, refused, taken(1))


def test_a_buffer_that_has_ended_accepts_nothing(calls):
    with pytest.raises(ReplayError, match="its stream has ended"):
        offered(buffer((calls, "")), [fragment(3)], 9.0, taken(1, ended=True))


def test_options_other_than_the_running_buffers_are_refused(calls):
    with pytest.raises(ConfigError, match="running with batch_size 2, not 3"):
        buffer((calls, ""), batch_size=3)
    assert buffer((calls, ""), batch_size=2).config == CONFIG


def test_pushes_to_a_silent_buffer_are_sent(calls, monkeypatch):
    """The buffer is being restarted, and then it is empty."""
    remote = buffer((calls, ""))
    monkeypatch.setattr(remote.shards, "has_room", lambda timeout_s: timeout_s == 3.0)
    assert remote.has_room(3.0)
    assert not remote.has_room(2.0)

    def silent(timeout_s):
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(remote.shards, "has_room", silent)
    assert remote.has_room(2.0)
