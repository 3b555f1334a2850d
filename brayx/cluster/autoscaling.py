"""Chooses a service's number of replicas by its running sessions, as a policy for Serve's autoscaler.

Serve's own policy counts running requests, of which a session has none between two ticks. Serve does the rest: bounds,
delays, and starting and ending replicas.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext

from brayx.errors import ConfigError

SESSIONS = "sessions"
"""Name of the metric that replicas report to Serve."""


class BySessions:
    """As many replicas as the sessions need.

    Args:
        sessions: wanted sessions of a replica, 1 or more.

    Raises:
        ConfigError: ``sessions`` is too small.
    """

    def __init__(self, sessions: int) -> None:
        if sessions < 1:
            raise ConfigError(f"expected 1 session or more for each replica, got {sessions!r}")
        self._sessions = sessions

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas, and no state."""
        running = (context.aggregated_metrics or {}).get(SESSIONS, {})
        return math.ceil(sum(running.values()) / self._sessions), {}
