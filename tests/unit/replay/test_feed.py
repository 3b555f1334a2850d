"""`brayx.replay.feed`: hung threads share one deadline and do nothing later."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from brayx.replay import feed as feed_module
from brayx.replay.feed import Feed
from tests.unit.replay.made import columns


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
