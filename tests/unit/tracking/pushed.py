"""What a learner pushes to a trial's hub: metrics and distributions."""

from __future__ import annotations

from brayx.metrics import Bars, Recorder
from brayx.tracking import Trial
from brayx.tracking.hub import Hub

BARS = Bars((0.0, 1.0, 2.0, 4.0), (3.0, 0.0, 1.0))


def written(trial: Trial, steps: int = 3) -> None:
    """Pushes metrics and distributions as a learner does, and lets the hub write them."""
    recorder = Recorder()
    hub = Hub(trial, interval_s=600.0)
    for step in range(steps):
        recorder.add("env_steps", 100)
        recorder.add("loss", 0.5 - step)
        recorder.add_shapes("actions", {"": BARS})
        recorder.add_shapes("weights", {"a.weight": BARS, "b.weight": BARS})
        hub.push(recorder.drain())
        hub.flush()
    hub.close()
