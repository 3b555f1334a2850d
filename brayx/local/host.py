"""The doors and sessions of one actor on an event loop in a thread of its own; started and ended from any other.

The same listeners and protocols as a replica's native ports, on the same numbers; the process owns every session, so
there is no session directory to ask. Knows nothing of agents, models or learning.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.http1 import HttpConnection, WebSockets
from brayx.actor.doors.native import Connection, Limits, Listener
from brayx.actor.doors.tcp import TcpConnection
from brayx.actor.ends import ending
from brayx.actor.service import Reply
from brayx.actor.table import SessionTable
from brayx.errors import DeadlineExceeded, Unauthorized
from brayx.gamecore.auth import Keys
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.metrics import Recorder
from brayx.ports import is_loopback

if TYPE_CHECKING:
    from brayx.local.grpc import GrpcListener

logger = logging.getLogger(__name__)

_OPEN_S = 30.0
_LOOP_END_S = 2.0
_DRAIN_CHECK_S = 0.05
_IDLE_S = 300.0
"""A connection without a request is kept for so long at least."""

T = TypeVar("T")


class LocalService(SessionTable):
    """The sessions of a process that owns them all.

    Args:
        make_actor, recorder: as of `SessionTable`.
        config: the actor component's options.
        name: of the actor.
        describe: further facts for the status page.
        keys: that requests are signed with; None: every client is let in.
    """

    def __init__(
        self,
        make_actor: Callable[[], Actor],
        config: ActorConfig,
        recorder: Recorder,
        *,
        name: str,
        describe: Callable[[], dict[str, Any]],
        keys: Keys | None = None,
    ) -> None:
        super().__init__(
            make_actor,
            config.model_copy(
                update={"show_errors": on_loopback(config) if config.show_errors is None else config.show_errors}
            ),
            recorder,
        )
        self._name = name
        self._describe = describe
        self._keys = keys
        self._draining = False
        self.urls: dict[str, str] = {}
        """URL of each door that is open beside the main one."""

    def submit(self, request: StepRequest, reply: Reply, *, forwarded: bool = False, let_in: bool = False) -> None:
        """See `Service.submit`."""
        if self._keys is not None and not let_in:
            try:
                self._keys.check(request, time.time())
            except Unauthorized as error:
                reply(error)
                return
        if self._draining and request.kind is StepKind.START and request.session not in self:
            reply(ending())
            return
        super().submit(request, reply, forwarded=forwarded, let_in=let_in)

    def drain(self) -> None:
        """Refuses new sessions from now on."""
        self._draining = True

    def status(self) -> dict[str, Any]:
        """Facts for the status page, as a replica has them."""
        return {
            "service": "brayx",
            "application": self._name,
            "sessions": len(self),
            "draining": self._draining or self._closed,
            "doors": self.urls,
            **self._describe(),
        }


class LocalHost:
    """An actor behind its doors, from `open` to `close`.

    Args:
        config: the actor component's options.
        make_actor: makes the actor of each session; called on the loop.
        recorder: where sessions and ticks are counted.
        name: of the actor.
        describe: facts for the status page.
        close: coroutine functions that end what the actors use, in order, once the sessions have ended.
        keys: that requests are signed with; None: every client is let in.

    Attributes:
        urls: URL of each door by name: ``http``, ``ws``, ``tcp``, ``grpc``.
    """

    def __init__(
        self,
        config: ActorConfig,
        make_actor: Callable[[], Actor],
        recorder: Recorder,
        *,
        name: str = "actor",
        describe: Callable[[], dict[str, Any]] = dict,
        close: Sequence[Callable[[], Awaitable[None]]] = (),
        keys: Keys | None = None,
    ) -> None:
        self._config = config
        self._make_service = functools.partial(
            LocalService, make_actor, config, recorder, name=name, describe=describe, keys=keys
        )
        self._close = close
        self._limits = Limits(
            max_body_bytes=config.max_body_bytes,
            max_connections=config.max_connections,
            idle_s=max(config.idle_timeout_s, _IDLE_S),
        )
        self._service: LocalService | None = None
        self._websockets: WebSockets | None = None
        self._listeners: list[Listener] = []
        self._grpc: GrpcListener | None = None
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="brayx-doors", daemon=True)
        self.urls: dict[str, str] = {}

    def open(self) -> None:
        """Opens the doors.

        Raises:
            StartupError: a port is taken.
        """
        self._thread.start()
        try:
            self.run(self._open(), _OPEN_S)
        except BaseException:
            self.close(0.0)
            raise

    @property
    def url(self) -> str:
        """Base URL of the main HTTP door."""
        return self.urls["http"]

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine on the loop and waits for it.

        Raises:
            DeadlineExceeded: it did not end in time; it is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"the event loop of the doors gave no answer within {timeout_s:g} s") from None

    def drain(self, timeout_s: float) -> bool:
        """Refuses new sessions and waits until the running ones have ended; whether they have, within this time."""
        service, until = self._service, time.monotonic() + timeout_s
        assert service is not None
        self._loop.call_soon_threadsafe(service.drain)
        while len(service):
            if time.monotonic() > until:
                return False
            time.sleep(_DRAIN_CHECK_S)
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends every session, the doors and the loop; what is late after ``timeout_s`` is left. May be called again."""
        if not self._thread.is_alive():
            return
        try:
            # What hands over and what closes have the time twice, in turn.
            self.run(self._shut(timeout_s), 2 * timeout_s + _LOOP_END_S)
        except DeadlineExceeded as error:
            logger.warning("the doors did not end in order: %s", error)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LOOP_END_S)

    async def _open(self) -> None:
        config = self._config
        service = self._service = self._make_service()
        app = DoorApp(service, max_body_bytes=config.max_body_bytes, idle_timeout_s=config.idle_timeout_s)
        websockets = self._websockets = WebSockets(app, self._limits)

        def http(listener: Listener) -> HttpConnection:
            return HttpConnection(listener, websockets)

        async def listen(make: Callable[[Listener], Connection], host: str, port: int) -> str:
            listener = Listener(service, make, self._limits)
            await listener.open(host, port)
            self._listeners.append(listener)
            return _shown(host, listener.address[1])

        at = await listen(http, config.host, config.port)
        self.urls.update(http=f"http://{at}", ws=f"ws://{at}")
        if config.native_port is not None:
            at = await listen(http, config.native_host, config.native_port)
            service.urls.update(http=f"http://{at}", ws=f"ws://{at}")
        if config.tcp_port is not None:
            at = await listen(TcpConnection, config.native_host, config.tcp_port)
            self.urls["tcp"] = service.urls["tcp"] = f"tcp://{at}"
        if config.grpc_port is not None:
            from brayx.local.grpc import GrpcListener

            self._grpc = GrpcListener(service, config)
            at = _shown(config.native_host, await self._grpc.open(config.native_host, config.grpc_port))
            self.urls["grpc"] = service.urls["grpc"] = f"grpc://{at}"

    async def _shut(self, timeout_s: float) -> None:
        for listener in self._listeners:
            listener.shut()
        if self._service is not None:
            await self._service.close("drained", timeout_s)
        if self._websockets is not None:
            self._websockets.close()
        listeners = [listener.close for listener in self._listeners]
        if self._grpc is not None:
            listeners.append(self._grpc.close)
        for closing in (*listeners, *self._close):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(closing(), max(timeout_s, 0.1))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            with contextlib.suppress(RuntimeError):
                self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()


def on_loopback(config: ActorConfig) -> bool:
    """Whether no other machine can reach a door."""
    native = any(port is not None for port in (config.native_port, config.tcp_port, config.grpc_port))
    return is_loopback(config.host) and (not native or is_loopback(config.native_host))


def _shown(host: str, port: int) -> str:
    """An address that a client on this machine can connect to."""
    return f"127.0.0.1:{port}" if host == "0.0.0.0" else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where that is installed, as Serve's replicas have it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
