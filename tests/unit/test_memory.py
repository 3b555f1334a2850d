"""The memory watch that soak tests trust: it sees a real process leak, and is not alarmed by one that does not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.memory import MIB, Course, MemoryWatch
from tests.waiting import WAIT_S, until

WORK = """
import time
held = [bytearray(b"x" * 2**20) for _ in range(30)]
print("holds it", flush=True)
while True:
    {work}
    time.sleep(0.02)
"""
LEAKING = "held.append(bytearray(b'x' * 2**18))"
FORGETTING = "held.append(open('/dev/null'))"
SAMPLES = 30
STEADY = "held[0] = bytearray(b'x' * 2**20)"


@contextlib.contextmanager
def process(work: str) -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, "-c", WORK.format(work=work)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()  # its start is growth, too
        yield psutil.Process(child.pid)
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)


def growing(watch: MemoryWatch) -> list[str]:
    """What grows; empty: there are few samples yet. Either process may pause at any time, so tests wait for growth."""
    if any(len(course.samples) < SAMPLES for course in (*watch.courses, watch.together)):
        return []
    return watch.growing(0.0, mib=2.0, share=0.02, descriptors=5.0)


def test_a_leaking_process_is_reported_and_a_steady_one_is_not() -> None:
    with process(LEAKING) as leaking, process(STEADY) as steady:
        with MemoryWatch(lambda: [leaking, steady], every_s=0.05) as watch:
            until(lambda: len(growing(watch)) >= 2, "the leak and the total are seen")
        lines = growing(watch)
    assert [line.split()[0] for line in lines] == [f"{leaking.pid}", "all"], watch.table(0.0)


def test_leaked_descriptors_are_reported() -> None:
    with process(FORGETTING) as forgetting:
        with MemoryWatch(lambda: [forgetting], every_s=0.05) as watch:
            until(lambda: growing(watch), "the leak is seen")
        lines = growing(watch)
    assert len(lines) == 1, watch.table(0.0)
    assert lines[0].startswith(f"{forgetting.pid} ")
    assert "descriptors" in lines[0]


@pytest.mark.parametrize(
    ("sizes", "grown_mib"),
    [
        ([100 * MIB + turn * MIB for turn in range(21)], 20.0),
        ([100 * MIB] * 21, 0.0),
        ([100 * MIB + (turn % 2) * 50 * MIB for turn in range(21)], 0.0),
    ],
)
def test_growth_is_the_rise_of_the_fitted_line(sizes: list[int], grown_mib: float) -> None:
    grown = Course("x", list(zip(map(float, range(21)), sizes, strict=True))).growth(0.0)
    assert grown is not None
    assert grown[0] / MIB == pytest.approx(grown_mib, abs=1.0)


def test_the_warm_up_does_not_count_and_few_samples_give_no_result() -> None:
    course = Course("x", [(float(turn), (500 if turn > 10 else turn * 50) * MIB) for turn in range(31)])
    grown = course.growth(11.0)
    assert grown is not None
    assert grown[0] == pytest.approx(0.0, abs=1.0)
    assert course.growth(25.0) is None
