"""The gRPC door of the local host: a ``grpc.aio`` server on the host's event loop.

Imported only if a job opens that door. Knows nothing of sessions.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc

from brayx.actor.config import ActorConfig
from brayx.actor.doors.grpc import GrpcDoor
from brayx.actor.service import Holder, Reply, Service
from brayx.errors import BrayxError, StartupError
from brayx.gamecore.protocol import StepRequest
from brayx.gamecore.v1.gamecore_pb2_grpc import add_GamecoreServicer_to_server

_MORE_BYTES = 64 * 1024
"""Allowance for the other fields of a message than its body."""
_LAST_REPLY_S = 0.5
"""Time for streams to write their last reply: a call that is cancelled meanwhile loses it."""


class _Door(GrpcDoor):
    """The door's methods for a service that is not a `GrpcDoor` itself."""

    def __init__(self, service: Service, config: ActorConfig) -> None:
        self.max_body_bytes, self.idle_timeout_s = config.max_body_bytes, config.idle_timeout_s
        self._service = service

    def submit(self, request: StepRequest, reply: Reply, *, let_in: bool = False) -> None:
        self._service.submit(request, reply, let_in=let_in)

    def holder(self, on_end: Callable[[str], None]) -> Holder:
        return self._service.holder(on_end)

    async def disconnect(self, session: str, holder: str = "", *, for_good: bool = False) -> None:
        await self._service.disconnect(session, holder, for_good=for_good)

    def refused(self, error: BrayxError) -> None:
        self._service.refused(error)


class GrpcListener:
    """A gRPC server on the running event loop, from `open` to `close`.

    Args:
        service: answers the requests.
        config: the actor component's options. The server's own limit is twice the door's, because its refusals are not
            `brayx.errors`.
    """

    def __init__(self, service: Service, config: ActorConfig) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", 2 * config.max_body_bytes + _MORE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # otherwise two hosts could share a port
            ],
            maximum_concurrent_rpcs=config.max_connections,
        )
        add_GamecoreServicer_to_server(_Door(service, config), self._server)

    async def open(self, host: str, port: int) -> int:
        """Listens; 0 takes a free port. Returns the port.

        Raises:
            StartupError: the port is taken.
        """
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int = self._server.add_insecure_port(at)
        except RuntimeError as error:
            raise StartupError(f"port {port} of {host} is taken, or cannot be opened: {error}", port=port) from error
        await self._server.start()
        return bound

    async def close(self) -> None:
        """Refuses new calls, lets streams write their last reply, and cancels what takes longer."""
        await self._server.stop(_LAST_REPLY_S)
