"""A `KeyValueStore` when Ray's control service fails. The integration tests check that values survive a restart."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from brayx.cluster import ray_private
from brayx.cluster.ray_private import KeyValueStore
from tests.waiting import until


def test_a_store_that_hangs_or_fails_blocks_nothing_and_gets_the_newest_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs, fails, written = threading.Event(), [True], dict[str, list[str]]()

    class Flaky(KeyValueStore):
        def put(self, owner: str, sessions: list[str]) -> None:
            hangs.wait(30)
            if fails.pop() if fails else False:
                raise RuntimeError("the control service is away")
            written[owner] = sessions

    monkeypatch.setattr(ray_private, "_RETRY_S", 0.01)
    flaky: Any = Flaky("brayx", "it/sessions/")
    flaky.write("a", ["old"])
    until(lambda: not flaky._waiting, "the start of the writer")
    flaky.write("a", ["new"])
    flaky.write("b", ["s"])
    assert not flaky.flush(0.01)
    hangs.set()
    until(lambda: written == {"a": ["new"], "b": ["s"]}, "the write of the last value")
    assert flaky.flush(30)
