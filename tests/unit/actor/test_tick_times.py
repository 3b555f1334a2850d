"""Tick times are recorded in batches, and none is left out."""

from __future__ import annotations

from brayx.actor.tick_times import TickTimes
from brayx.metrics import Recorder


class Kept(Recorder):
    """Keeps what is recorded, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, float]] = []

    def add(self, name, value, **more):
        self.calls.append((name, value))
        super().add(name, value, **more)


def test_every_tick_is_counted_and_one_wait_in_eight_is_sampled() -> None:
    recorder = Kept()
    times = TickTimes(recorder)
    for number in range(600):
        times.add(arrived=float(number), began=number + 0.25, ended=number + 0.5)
    assert [call for call in recorder.calls if call[0] == "ticks"] == [("ticks", 256.0)] * 2
    times.flush()
    times.flush()
    assert [value for name, value in recorder.calls if name == "ticks"] == [256.0, 256.0, 88.0]
    assert [value for name, value in recorder.calls if name == "tick_wait_seconds"] == [0.25] * (600 // 8)
