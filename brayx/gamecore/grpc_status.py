"""Writes typed errors into a gRPC call's status; `brayx.gamecore.transports.grpc` reads them.

An error is set on the call, never raised: for a call that raises, Serve drops the trailing metadata and sends the
traceback to the client. Knows nothing of the methods called.
"""

from __future__ import annotations

from typing import Any

import grpc

from brayx.errors import BrayxError
from brayx.gamecore.v1 import ERROR_METADATA

_MAX_ERROR_BYTES = 3072
_MAX_STATUS_BYTES = 512
"""Limit of an error's document, so that all metadata of an answer, encoded, fits into the 8 KiB that clients allow."""


def refuse(context: Any, error: BrayxError) -> None:
    """Answers the call with ``error``."""
    document = error.to_wire()
    if len(document) > _MAX_ERROR_BYTES:
        document = type(error)(error.message[:200] + "…").to_wire()
    context.set_code(getattr(grpc.StatusCode, error.grpc_status))
    context.set_details(error.message.encode()[:_MAX_STATUS_BYTES].decode(errors="ignore"))
    context.set_trailing_metadata([(ERROR_METADATA, document)])
