"""Typed errors over gRPC: written into a call's status by the service, and read from it by the client.

An error is set on the call, never raised: for a call that raises, Serve drops the trailing metadata and sends the
traceback to the client. Knows nothing of the methods called.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

import grpc

from brayx.errors import BodyTooLarge, BrayxError, Overloaded, TransportError, from_wire
from brayx.gamecore.transports.base import MAX_REPLY_BYTES, Endpoint
from brayx.gamecore.v1 import ERROR_METADATA

_MAX_ERROR_BYTES = 3072
_MAX_STATUS_BYTES = 512
"""Limit of an error's document, so that all metadata of an answer, encoded, fits into the 8 KiB that clients allow."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", -1),
    # As on the other doors: a separate connection, straight to the address, and no delay before reconnecting.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""Options of a client's channel."""


def refuse(context: Any, error: BrayxError) -> None:
    """Answers the call with ``error``."""
    document = error.to_wire()
    if len(document) > _MAX_ERROR_BYTES:
        document = type(error)(error.message[:200] + "…").to_wire()
    context.set_code(getattr(grpc.StatusCode, error.grpc_status))
    context.set_details(error.message.encode()[:_MAX_STATUS_BYTES].decode(errors="ignore"))
    context.set_trailing_metadata([(ERROR_METADATA, document)])


def target_of(endpoint: Endpoint) -> str:
    """The address in a channel's format."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"


def application_of(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    """Metadata with the Serve application in the URL's path, if there is one."""
    application = endpoint.prefix.strip("/")
    return (("application", application),) if application else ()


def failure(endpoint: Endpoint, request: str, timeout_s: float, error: Any) -> BrayxError:
    """The typed error for a failed call.

    Args:
        endpoint: the service's address.
        request: description of the request, for the message.
        timeout_s: the call's time limit.
        error: a `grpc.RpcError`.
    """
    for name, value in error.trailing_metadata() or ():
        if name == ERROR_METADATA:
            return from_wire(value)
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return endpoint.deadline_exceeded(f"reply to the {request}", timeout_s, layer="grpc")
    if code is grpc.StatusCode.UNAVAILABLE and (never_sent := _connect_error(details)):
        return endpoint.connect_failed(never_sent)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return endpoint.connection_lost(request, ConnectionError(details), started=False)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "CLIENT: Received message larger" not in details:
        # Serve's, or the server's own limit on a message.
        refused = BodyTooLarge if "message larger than max" in details else Overloaded
        return refused(f"{endpoint.url}: {details}")
    return TransportError(
        f"{endpoint.url}: the service answered {code.name} without a brayx error document: {details[:200]!r}",
        grpc_status=code.name,
    )


def _connect_error(details: str) -> OSError | None:
    """The error of a connection that was never made, from ``details``; None for one that broke.

    gRPC has one status for both, so only the text distinguishes them.
    """
    if "resolving" in details or "resolution" in details:
        return socket.gaierror(socket.EAI_NONAME, "name not found")
    if "failed to connect" not in details:
        return None
    if "Connection refused" in details:
        return ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return OSError(details[:200])
