"""What a directory's memory does when Ray's store fails. That it survives a restart is tested on Ray."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from brayx.cluster import directory_memory as memory
from brayx.cluster.directory_memory import ClusterMemory
from tests.waiting import until


def test_a_store_that_hangs_or_fails_holds_up_nobody_and_gets_the_newest_later(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, fails, kept = threading.Event(), [True], dict[str, list[str]]()

    class Flaky(ClusterMemory):
        def _put(self, owner: str, sessions: list[str]) -> None:
            hangs.wait(30)
            if fails.pop() if fails else False:
                raise RuntimeError("the control service is away")
            kept[owner] = sessions

    monkeypatch.setattr(memory, "_RETRY_S", 0.01)
    flaky: Any = Flaky("it/sessions", "brayx")
    flaky.write("a", ["old"])
    until(lambda: not flaky._waiting, "the writer having begun")
    flaky.write("a", ["new"])
    flaky.write("b", ["s"])
    hangs.set()
    until(lambda: kept == {"a": ["new"], "b": ["s"]}, "what came last being written")
