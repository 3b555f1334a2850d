"""A real gRPC server of a door, on a loop in a separate thread, for tests of the door and of the clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator

import grpc

from brayx.actor.doors.grpc import GrpcDoor
from brayx.gamecore.v1.gamecore_pb2_grpc import add_GamecoreServicer_to_server
from brayx.model.grpc import ModelDoor
from brayx.model.v1.model_pb2_grpc import add_ModelServicer_to_server

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


@contextlib.contextmanager
def serving(
    door: GrpcDoor,
    close: Callable[[], Awaitable[None]],
    *,
    port: int = 0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    model: ModelDoor | None = None,
) -> Iterator[str]:
    """Serve ``door``, and ``model`` beside it; gives ``127.0.0.1:port``.

    Calls under way at the end are cut off, then ``close`` is called.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", max_message_bytes)])
        add_GamecoreServicer_to_server(door, server)
        if model is not None:
            add_ModelServicer_to_server(model, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, bound

    async def stop() -> None:
        await server.stop(None)
        await close()

    server, bound = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
