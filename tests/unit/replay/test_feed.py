"""`brayx.replay.feed`: it waits for room, skips refused fragments, and leaves hung threads behind."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from brayx.errors import BadFragment, ReplayError
from brayx.replay import feed as feed_module
from brayx.replay.buffer import ReplayBuffer
from brayx.replay.feed import Feed
from brayx.replay.files import Dataset
from tests.unit.replay.data_files import save_npz, steps
from tests.unit.replay.made import changed, columns, fragment


class Hung:
    """A thread that does not end; joining it advances the clock."""

    now = 100.0

    def join(self, timeout: float) -> None:
        Hung.now += timeout

    def is_alive(self) -> bool:
        return True


class Full:
    def offer(self, *replays: object, timeout_s: float) -> list[object]:
        return list(replays)


def test_closing_threads_share_one_deadline(monkeypatch):
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(monotonic=lambda: Hung.now))
    feed = Feed(Full(), [list] * 5)
    feed._threads = [Hung() for _ in range(5)]
    start = Hung.now
    feed.stop(2.0)
    assert Hung.now == start + 2.0
    assert not feed.join(3.0)
    assert Hung.now == start + 5.0


def test_an_abandoned_thread_pushes_nothing_more():
    pushed, goes_on, read = [], threading.Event(), threading.Event()

    class Buffer:
        def offer(self, *replays: object, timeout_s: float) -> list[object]:
            pushed.extend(replays)
            return []

    def part():
        read.set()
        goes_on.wait(60)
        yield columns(1)

    with Feed(Buffer(), [part]) as feed:
        read.wait(60)
        feed.stop(0.0)
        goes_on.set()
    assert feed.join(60)
    assert not pushed


class GatedBuffer:
    """A buffer that has room only when the test allows it."""

    def __init__(self):
        self.room = threading.Event()
        self.waits = threading.Event()
        self.taken = []

    def offer(self, *replays, timeout_s):
        if not self.room.is_set():
            self.waits.set()
            self.room.wait(min(timeout_s, 0.05))
            return list(replays)
        for replay in replays:
            if np.isnan(replay.reward).any():
                raise BadFragment("reward: holds NaN")
            self.taken.append(float(replay.reward[0]))
        return []


def test_a_feed_waits_for_room_and_reads_each_part_once_per_epoch():
    gated = GatedBuffer()
    parts = [lambda first=first: (fragment(2, first + number) for number in range(3)) for first in (0, 10)]
    with Feed(gated, parts, epochs=2) as feed:
        assert gated.waits.wait(60)
        assert not feed.join(0.05)
        gated.room.set()
        assert feed.join(60)
    assert sorted(gated.taken) == sorted(2 * [0, 1, 2, 10, 11, 12])
    assert (feed.fed, feed.refused, feed.error) == (12, 0, None)


def test_a_feed_skips_refused_fragments_and_ends_at_an_error():
    gated = GatedBuffer()
    gated.room.set()

    def breaks():
        yield fragment(2, float("nan"))
        yield fragment(2, 1)
        raise OSError("disk gone")

    with Feed(gated, [breaks], name="data") as feed:
        assert feed.join(60)
    assert (feed.fed, feed.refused) == (1, 1)
    assert feed.error.message == "source 'data' raised OSError: disk gone"


@pytest.mark.parametrize("published", [None, 1])
def test_fed_fragments_are_accepted_with_any_version_of_another_trial(tmp_path, published):
    save_npz(tmp_path / "data.npz", {**steps("-----T"), "policy_version": np.full(6, 800)})
    buffer = ReplayBuffer(changed(max_policy_lag=1))
    if published is not None:
        buffer.published(published)

    class AcceptingBuffer:
        def offer(self, *replays, timeout_s):
            for replay in replays:
                buffer.push(replay)
            return []

    row = columns(2, version=800)
    with Feed(AcceptingBuffer(), [*Dataset(tmp_path / "data.npz").parts(1), lambda: [row]]) as feed:
        assert feed.join(60)
    assert (feed.fed, feed.refused, feed.error) == (2, 0, None)
    buffer.push(columns(2, version=1))  # the agent's own fragment, which they must not make too old
    buffer.flush()
    batches = list(iter(buffer.pop, None))
    assert sum(int(batch["mask"].sum()) for batch in batches) == 6 + 8 + 8
    assert {int(version) for batch in batches for version in np.unique(batch["policy_version"])} == {0, 1}


@pytest.mark.parametrize(("part", "message"), [(lambda: 3, "expected an iterator"), (lambda: [1], "yielded int")])
def test_a_feed_of_an_invalid_part_is_an_error(part, message):
    gated = GatedBuffer()
    gated.room.set()
    with Feed(gated, [part]) as feed:
        assert feed.join(60)
    assert message in feed.error.message


def test_a_feed_ends_with_its_context_and_reports_a_lost_buffer():
    gated = GatedBuffer()
    with Feed(gated, [lambda: iter(lambda: fragment(2), None)]) as feed:
        assert gated.waits.wait(60)
    assert feed.done
    assert feed.error is None

    class LostBuffer:
        def offer(self, *replays, timeout_s):
            raise ReplayError("buffer 'b' was lost")

    with Feed(LostBuffer(), [lambda: [fragment(2)]], name="data") as feed:
        assert feed.join(60)
    assert feed.error.message == "source 'data': buffer 'b' was lost"


def test_a_feed_ends_without_error_once_its_buffer_has_ended():
    class EndedBuffer:
        def offer(self, *replays, timeout_s):
            raise ReplayError("buffer 'b' takes no more: its stream has ended", ended=True)

    with Feed(EndedBuffer(), [lambda: iter(lambda: fragment(2), None)], name="data") as feed:
        assert feed.join(60)
    assert (feed.fed, feed.error) == (0, None)
