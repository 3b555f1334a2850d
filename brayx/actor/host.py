"""One actor's sessions and doors on an event loop in a separate thread; other threads start and end them.

The process owns every session, so there is no session directory. Knows nothing of agents, models or learning.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from brayx.actor.config import ActorConfig
from brayx.actor.debugger import Breakpoints
from brayx.actor.doors.ports import on_loopback, shown
from brayx.actor.serving import ActorService, Runtime
from brayx.actor.table import SessionTable
from brayx.errors import DeadlineExceeded, StartupError
from brayx.gamecore.auth import Keys
from brayx.gamecore.doors import DOORS, http_urls
from brayx.gamecore.protocol import StepRequest
from brayx.metrics import Recorder
from brayx.metrics.openmetrics import OpenMetrics
from brayx.ports import check_ports
from brayx.threads import LOOP_END_S, NativeThread

if TYPE_CHECKING:
    from brayx.actor.doors.grpc import GrpcListener

logger = logging.getLogger(__name__)

_OPEN_S = 30.0
_DRAIN_CHECK_S = 0.05

T = TypeVar("T")

_freeze_once = functools.cache(gc.freeze)
"""Exempts all objects from collections; only once in a process, because their garbage is never collected either."""


class LocalHost:
    """An actor behind its doors, from `open` to `close`.

    Args:
        config: the actor component's options.
        runtime: makes the parts that sessions use; called on the loop.
        name: name of the actor.
        keys: keys that requests are signed with; None: every client may connect.
        on_hold: called before a debugger's prompt, see `brayx.actor.debugger.Breakpoints`.

    Attributes:
        urls: URL of each door by name: ``http``, ``ws``, ``tcp``, ``grpc``.
        loop: event loop that everything runs on.
    """

    def __init__(
        self,
        config: ActorConfig,
        runtime: Runtime,
        *,
        name: str = "actor",
        keys: Keys | None = None,
        on_hold: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._make_service = functools.partial(
            ActorService, runtime, config, name, keys=keys, is_local=on_loopback(config, config.host)
        )
        self._close = runtime.close
        self._ports = config.ports(name)
        self._exported = OpenMetrics(application=name, deployment=name, replica="local")
        self._breakpoints = Breakpoints(on_hold)
        self._service: ActorService | None = None
        self._grpc: GrpcListener | None = None
        self.loop = _new_loop()
        self._thread = NativeThread(self._run, "brayx-doors", self._stop)
        self.urls: dict[str, str] = {}

    def open(self) -> None:
        """Opens the doors.

        Raises:
            StartupError: a port is taken.
        """
        self._thread.start()
        self._breakpoints.__enter__()
        try:
            self.run(self._open(), _OPEN_S)
        except BaseException as error:
            self.close(0.0)
            if isinstance(error, StartupError):  # another job took the port since its check: the same words
                check_ports(self._ports)
            raise
        _freeze_once()  # full collections would look at all modules again and again: a tenth of a tick with a model

    @property
    def table(self) -> SessionTable:
        """The sessions, once the doors are open; only code on `loop` may use it."""
        assert self._service is not None
        return self._service.table

    @property
    def url(self) -> str:
        """Base URL of the main HTTP door."""
        return self.urls["http"]

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine on the loop and waits for it.

        Raises:
            DeadlineExceeded: it did not end in time; it is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"the event loop of the doors gave no answer within {timeout_s:g} s") from None

    async def step(self, request: StepRequest) -> bytes:
        """Answers a request of a game that plays on `loop`, without a door and without credentials; see
        `Service.step`."""
        assert self._service is not None
        return await self._service.step(request, let_in=True)

    def export(self, recorder: Recorder, **tags: str) -> None:
        """Shows the samples of ``recorder`` at ``/metrics`` from now on; arguments as for `OpenMetrics.follow`."""
        self._exported.follow(recorder, **tags)

    def drain(self, timeout_s: float) -> int:
        """Refuses new sessions, and waits until the running ones have ended, ``timeout_s`` have passed, or an interrupt
        comes; returns how many still run."""
        assert self._service is not None
        table, until = self._service.table, time.monotonic() + timeout_s
        table.is_shut = True
        with contextlib.suppress(KeyboardInterrupt):
            while len(table) and time.monotonic() <= until:
                time.sleep(_DRAIN_CHECK_S)
        return len(table)

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends every session, the doors and the loop; abandons what takes longer than ``timeout_s``. Idempotent."""
        self._breakpoints.__exit__()
        if not self._thread.is_alive():
            return
        try:
            # Handing over and closing each have the whole time.
            self.run(self._shut(timeout_s), 2 * timeout_s + LOOP_END_S)
        except DeadlineExceeded as error:
            logger.warning("the doors did not close cleanly: %s", error)
        self._stop()
        self._thread.join(LOOP_END_S)

    async def _open(self) -> None:
        config = self._config
        service = self._service = self._make_service()
        service.exported = self._exported
        self.urls = main = http_urls(await service.doors.open_http(config.host, config.port))
        await service.doors.open()
        if config.grpc_port is not None:
            from brayx.actor.doors.grpc import GrpcListener

            self._grpc = GrpcListener(service, config)
            port = await self._grpc.open(config.native_host, config.grpc_port)
            service.doors.urls["grpc"] = f"grpc://{shown(config.native_host, port)}"
        doors = service.doors.urls
        if "http" in doors:
            doors["native"] = doors["http"]  # on the status page, whose ``http`` is the main port
        doors |= main
        self.urls = {name: doors[name] for name in DOORS if name in doors}

    async def _shut(self, timeout_s: float) -> None:
        service, closing = self._service, []
        if service is not None:
            service.doors.shut()
            await service.table.close("drained", timeout_s)
            closing.append(service.doors.close)
        if self._grpc is not None:
            closing.append(self._grpc.close)
        for close in (*closing, *self._close):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(close(), max(timeout_s, 0.1))

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            with contextlib.suppress(RuntimeError):
                self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """An uvloop if that is installed, as in Serve's replicas."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
