"""The policy for Serve's autoscaler; tests/integration/test_autoscaling.py has Serve follow it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from brayx.cluster.autoscaling import SESSIONS, BySessions
from brayx.errors import ConfigError


@pytest.mark.parametrize(
    ("sessions", "replicas"), [([], 0), ([0.0], 0), ([128.0], 1), ([128.0, 1.0], 2), ([100.0, 100.0, 57.0], 3)]
)
def test_it_wants_as_many_replicas_as_the_sessions_of_all_need(sessions: list[float], replicas: int) -> None:
    """Replicas that have not reported yet are not among them."""
    reported = {SESSIONS: dict(enumerate(sessions))} if sessions else {}
    context: Any = SimpleNamespace(aggregated_metrics=reported)
    assert BySessions(sessions=128)(context) == (replicas, {})


def test_it_refuses_replicas_without_sessions() -> None:
    with pytest.raises(ConfigError, match="expected 1 session or more for each replica, got 0"):
        BySessions(sessions=0)
