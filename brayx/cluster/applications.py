"""A Serve application ended within a time: Serve's own way waits a minute, and for a controller that hangs without end.

Knows nothing of what is served. Tests: `tests/integration/test_remote_model_killed.py`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from brayx.errors import first_line

_log = logging.getLogger(__name__)


def delete_application(name: str, timeout_s: float) -> bool:
    """Deletes a Serve application so that its replicas end what they hold and hand it over.

    Returns:
        False when that took longer than ``timeout_s``, or Serve's controller failed, which is logged; there is nothing
        to end where Serve is not.
    """
    deadline = time.monotonic() + timeout_s
    controller: Any
    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return True
    try:
        # What `serve.delete` comes to: making its client asks the controller without a deadline.
        controller.delete_apps.remote([name])
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            told: Any = ray.get(controller.get_serve_instance_details.remote(), timeout=left_s)
            if name not in told["applications"]:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    except RayError as error:
        _log.warning("whether Serve has ended %r is not known: %s", name, first_line(error))
        return False
