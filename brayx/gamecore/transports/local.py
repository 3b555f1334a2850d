"""The in-process transport: requests go straight to a service in this process, for tests and Python environments.

The client code and the typed errors are the same as over a network. Any object that answers a `StepRequest` is a
service: a door's service, or a session table.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent import futures
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from brayx.errors import ConnectFailed, ConnectionLost, DeadlineExceeded
from brayx.gamecore.protocol import StepRequest
from brayx.gamecore.transports.base import AsyncTransport, Transport, describe

Result = TypeVar("Result")

LOCAL_URL = "local:"
"""Used in place of the URL in messages."""

_JOIN_S = 10.0


@runtime_checkable
class StepService(Protocol):
    """A service that answers requests."""

    async def step(self, request: StepRequest) -> bytes:
        """The reply's body, or a typed error."""


class ServiceThread:
    """Runs a service on an event loop in a separate thread, for blocking clients.

        with ServiceThread(service) as running, Client(running) as client:
            client.start()

    Any number of clients may share it: blocking ones in any thread, asyncio ones on any loop. Leaving the block cancels
    the service's tasks and stops the loop; use `run` for cleanup before that.
    """

    def __init__(self, service: StepService) -> None:
        self.service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        started = threading.Event()

        def serve() -> None:
            with asyncio.Runner() as runner:  # its exit cancels the remaining tasks
                self._loop = runner.get_loop()
                self._loop.call_soon(started.set)
                self._loop.run_forever()

        self._thread = threading.Thread(target=serve, name="brayx-service", daemon=True)
        self._thread.start()
        if not started.wait(_JOIN_S):
            raise ConnectFailed(f"the service's loop did not start within {_JOIN_S:g} s", url=LOCAL_URL)
        return self

    def __exit__(self, *_: object) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_JOIN_S)

    def submit(self, work: Coroutine[Any, Any, Result]) -> futures.Future[Result]:
        """Run ``work`` on the service's loop.

        Raises:
            ConnectFailed: the block was left, or never entered.
        """
        loop = self._loop
        if loop is None or loop.is_closed():
            work.close()
            raise ConnectFailed("the ServiceThread does not run: enter it with `with`", url=LOCAL_URL)
        return asyncio.run_coroutine_threadsafe(work, loop)

    def run(self, work: Coroutine[Any, Any, Result], timeout_s: float = 30.0) -> Result:
        """Runs ``work`` on the service's loop and returns its result: ``running.run(table.close())``."""
        return self.submit(work).result(timeout_s)

    async def step(self, request: StepRequest) -> bytes:
        """Answers a request from any loop."""
        try:
            return await asyncio.wrap_future(self.submit(self.service.step(request)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _stopped(request) from None


class LocalTransport(Transport):
    """The blocking in-process transport; see `Transport`. Concurrent steps do not wait for each other."""

    def __init__(self, running: ServiceThread) -> None:
        self._running = running

    def step(self, request: StepRequest, timeout_s: float) -> bytes:
        future = self._running.submit(self._running.service.step(request))
        try:
            return future.result(timeout_s)
        except futures.TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # it finished just now, or raised its own timeout
            future.cancel()
            raise _late(request, timeout_s) from None
        except futures.CancelledError:
            raise _stopped(request) from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        pass


class AsyncLocalTransport(AsyncTransport):
    """The asyncio in-process transport; see `AsyncTransport`. Awaits the service, on the loop of the caller."""

    def __init__(self, service: StepService) -> None:
        self._service = service

    async def step(self, request: StepRequest, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self._service.step(request)
        except TimeoutError:
            if not limit.expired():
                raise
            raise _late(request, timeout_s) from None

    async def close(self) -> None:
        pass


def _stopped(request: StepRequest) -> ConnectionLost:
    return ConnectionLost(f"the ServiceThread was left before the reply to the {describe(request)}", url=LOCAL_URL)


def _late(request: StepRequest, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{LOCAL_URL} no reply to the {describe(request)} within {timeout_s:g} s",
        url=LOCAL_URL,
        layer="local",
        timeout_s=timeout_s,
    )
