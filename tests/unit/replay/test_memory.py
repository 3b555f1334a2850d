"""A buffer's memory is that of its contents: hundreds of thousands of pieces pass through without a leak."""

from __future__ import annotations

import psutil
import pytest

from brayx.errors import BadFragment
from brayx.replay.buffer import ReplayBuffer
from tests.memory import MIB
from tests.unit.replay.made import changed, columns, fragment

ROWS = 64
PUSHES = 4_000
"""Of so many columns each."""
ROUNDS = 4


def used() -> int:
    return psutil.Process().memory_full_info().uss


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "fifo", "max_policy_lag": 0},
        {"sampler": "uniform"},
        {"sampler": "prioritised", "remover": "lowest_priority"},
        {"sampler": "uniform", "remover": "reservoir", "samples_per_insert": 1.0},
    ],
    ids=["fifo", "uniform", "prioritised", "reservoir"],
)
def test_memory_is_freed_after_data_has_passed_through(options):
    buffer = ReplayBuffer(changed(size=64, **options), seed=0)
    many, single, bad = columns(ROWS), fragment(5), columns(1, float("nan"))

    def work(pushes):
        for number in range(pushes):
            buffer.push(many)
            if number % 8 == 0:
                buffer.push(single)
                with pytest.raises(BadFragment):
                    buffer.push(bad)
            batch = buffer.pop()
            if batch is not None and "index" in batch:
                buffer.update_priorities(batch["index"], batch["index"] % 7 + 1.0)

    work(PUSHES // 4)  # until the buffer is full and the allocator has settled
    grown = []
    for _ in range(ROUNDS):
        before = used()
        work(PUSHES // ROUNDS)
        grown.append(used() - before)
    stats = buffer.stats()
    removed = sum(value for name, value in stats.items() if name.startswith("dropped.")) / 4 + stats.get("replaced", 0)
    assert removed > 200_000
    assert min(grown) < MIB / 4, "memory grew each time; a single growth may come from earlier tests"
