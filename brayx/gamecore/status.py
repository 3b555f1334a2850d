"""Reads a service's status page: ``GET /`` at its HTTP door, which needs no key."""

from __future__ import annotations

import http.client
import json
from typing import Any

from brayx.gamecore.transports.base import Endpoint

_MAX_BYTES = 64 * 1024


def read_status(endpoint: Endpoint, timeout_s: float) -> dict[str, Any] | None:
    """The status page at this address; None if there is none, or no answer."""
    if not endpoint.door.has_status:
        return None
    context = endpoint.tls()
    if context is None:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=context)
    try:
        connection.request("GET", endpoint.prefix + "/")
        page = json.loads(connection.getresponse().read(_MAX_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return page if isinstance(page, dict) else None
