"""``POST /step`` over a kept-alive HTTP/1.1 connection. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from brayx.gamecore.protocol import StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.http1 import Reply, RequestEncoder
from brayx.gamecore.transports.stream import AsyncStreamTransport, StreamTransport


class HttpTransport(StreamTransport):
    """The blocking HTTP transport; see `Transport`."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, _Http(endpoint))


class AsyncHttpTransport(AsyncStreamTransport):
    """The asyncio HTTP transport; see `AsyncTransport`. Belongs to one event loop. ``headers``: of every request."""

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(endpoint, _Http(endpoint, headers))


class _Http:
    layer = "http"

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str] | None = None) -> None:
        self._encoder = RequestEncoder(endpoint, headers)

    def begin(self, request: StepRequest) -> tuple[bytes, Reply]:
        return self._encoder.encode(request), Reply()
