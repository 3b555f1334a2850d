"""Where the requests of a `Bench` come from, and a clock that stands still."""

import pytest

import brayx.clock as clock
from tests.clocks import Clock
from tests.unit.actor.bench import Bench


@pytest.fixture(params=["task", "callback"])
def whence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come as from Serve, out of a task, or as from a native port, out of a callback of the event loop."""
    monkeypatch.setattr(Bench, "from_callback", request.param == "callback")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(100.0)
    monkeypatch.setattr(clock, "monotonic", made)
    return made
