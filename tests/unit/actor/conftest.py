"""Where the requests of a `Bench` come from."""

import pytest

from tests.unit.actor.bench import Bench


@pytest.fixture(params=["task", "callback"])
def whence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come as from Serve, out of a task, or as from a native port, out of a callback of the event loop."""
    monkeypatch.setattr(Bench, "from_callback", request.param == "callback")
