"""The status page of a service, which its HTTP door shows at ``GET /`` without asking for a key."""

from __future__ import annotations

import http.client
import json
from typing import Any

from brayx.gamecore.transports.base import Endpoint

HAS_STATUS = ("http", "https", "ws", "wss")
"""Schemes of the doors that share their port with that page."""

_MOST_BYTES = 64 * 1024


def read_status(endpoint: Endpoint, timeout_s: float) -> dict[str, Any] | None:
    """The page of the HTTP door at this address; None if there is none, or it does not answer."""
    if endpoint.scheme not in HAS_STATUS:
        return None
    context = endpoint.tls()
    if context is None:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=context)
    try:
        connection.request("GET", endpoint.prefix + "/")
        page = json.loads(connection.getresponse().read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return page if isinstance(page, dict) else None
