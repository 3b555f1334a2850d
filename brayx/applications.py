"""A Serve application ended within a time: Serve's own way waits a minute, and for a controller that hangs without end.

Knows nothing of what is served. Tests: `tests/integration/test_remote_model_killed.py`.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError


def delete_application(name: str, timeout_s: float) -> bool:
    """Deletes a Serve application so that its replicas end what they hold and hand it over.

    Returns:
        False when that took longer than ``timeout_s``; there is nothing to end where Serve is not.

    Raises:
        RayError: Serve's controller has ended.
    """
    deadline = time.monotonic() + timeout_s
    controller: Any
    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return True
    serve.delete(name, _blocking=False)
    while True:
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            told: Any = ray.get(controller.get_serve_instance_details.remote(), timeout=left_s)
            if name not in told["applications"]:
                return True
        except GetTimeoutError:
            return False
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
