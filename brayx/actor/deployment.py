"""The actor replica: a session table behind its doors, as a Serve deployment class.

The class is undecorated; `actor_deployment` makes a Serve deployment of it at the edge. What the actors do inside
(models, buffers, agents) comes as an `ActorRuntime` from a builder that runs in the replica, so this file knows
neither. It adds to the table what needs Ray: the session directory, and passing a request on to the replica that owns
its session.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import ray
import uvicorn
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.schema import LoggingConfig

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig
from brayx.actor.directory import RENEW_S, DirectoryRecovering, Location, create_directory
from brayx.actor.doors.asgi import FORWARDED_PREFIX, DoorApp, Service
from brayx.actor.session import SessionTable
from brayx.errors import BrayxError, ConnectFailed, Overloaded, TransportError
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.http import AsyncHttpTransport
from brayx.metrics import Recorder, Sink

logger = logging.getLogger(__name__)

_DIRECTORY_TIMEOUT_S = 5.0
_DIRECTORY_RETRY_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_IDLE_PEER_CONNECTIONS = 64


@dataclass
class ActorRuntime:
    """What a replica's builder gives it.

    Attributes:
        make_actor: makes the actor of each session.
        recorder: where the replica counts.
        describe: JSON facts for the status page (the policy version, say).
        check: raises when something behind the actors is broken for good; called by Serve's health check.
        close: coroutines functions that end what the builder started, in order.
    """

    make_actor: Callable[[], Actor]
    recorder: Sink = field(default_factory=Recorder)
    describe: Callable[[], dict[str, Any]] = dict
    check: Callable[[], None] = lambda: None
    close: list[Callable[[], Awaitable[None]]] = field(default_factory=list)


RuntimeBuilder = Callable[[Mapping[str, Any]], Awaitable[ActorRuntime]]
"""Makes the runtime from the Serve handles that were bound to the deployment."""


class ActorReplica(Service):
    """One replica: sessions, doors and the way to other replicas' sessions.

    Args:
        build: makes the runtime, in the replica's own process and event loop.
        config: the actor component's options.
        directory: name of the session directory shared by the deployment's replicas.
        handles: Serve handles for the builder, by name.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it, so that the builder runs on the replica's loop
        self, build: RuntimeBuilder, config: ActorConfig, directory: str, handles: Mapping[str, Any]
    ) -> None:
        self._runtime = await build(handles)
        self._owner = uuid.uuid4().hex
        self._directory = create_directory(directory)
        self._table = SessionTable(
            self._runtime.make_actor,
            max_sessions=config.actors_per_worker,
            idle_timeout_s=config.idle_timeout_s,
            tick_timeout_s=config.tick_timeout_s,
            recorder=self._runtime.recorder,
            claim=self._claim,
            release=self._release,
        )
        self._app = DoorApp(self, max_body_bytes=config.max_body_bytes, idle_timeout_s=config.idle_timeout_s)
        self._peers = Peers()
        self._tick_timeout_s = config.tick_timeout_s
        self._peer_door = _PeerDoor(self._app)
        self._address = await self._peer_door.open()
        await self._ask("renew", self._owner, self._address, [])
        self._renewal = asyncio.create_task(self._renew())

    def __serve_build_asgi_app__(self) -> DoorApp:
        """The application that Serve's ingress runs."""
        return self._app

    async def step(self, request: StepRequest, *, forwarded: bool = False) -> bytes:
        """Answers a request here, or has the session's owner answer it."""
        if request.session in self._table or forwarded or request.kind in (StepKind.START, StepKind.CALL):
            return await self._table.step(request)
        location: Location | None = await self._ask("locate", request.session)
        if location is None or location.owner == self._owner:
            return await self._table.step(request)
        return await self._forward(location, request)

    def watch(self, session: str, on_end: Callable[[str], None]) -> None:
        """Calls ``on_end(reason)`` when the session ends here; at once if it has already."""
        entry = self._table.get(session)
        if entry is not None:
            entry.on_end.append(on_end)

    async def disconnect(self, session: str) -> None:
        """Ends a session whose connection broke."""
        entry = self._table.get(session)
        if entry is not None:
            self._table.end(entry, "disconnect")

    def status(self) -> dict[str, Any]:
        """Facts for the status page."""
        return {"service": "brayx", "sessions": len(self._table), **self._runtime.describe()}

    async def check_health(self) -> None:
        """Serve's health check: raises when this replica should be replaced."""
        if self._renewal.done():
            raise RuntimeError(f"the session directory's renewal ended: {self._renewal.exception()!r}")
        self._runtime.check()

    async def __del__(self) -> None:
        """Serve's shutdown hook: ends all sessions, then everything the replica started."""
        if not hasattr(self, "_renewal"):
            return
        await self._table.close("drained")
        self._renewal.cancel()
        await self._peer_door.close()
        await self._peers.close()
        for close in self._runtime.close:
            await close()

    async def _claim(self, session: str) -> None:
        await self._ask("claim", session, self._owner)

    async def _release(self, session: str) -> None:
        await self._ask("release", session, self._owner)

    async def _ask(self, method: str, *args: Any) -> Any:
        """Calls the directory, again while it restarts, within a deadline; its typed errors come out as themselves."""
        try:
            async with asyncio.timeout(_DIRECTORY_TIMEOUT_S):
                while True:
                    try:
                        return await getattr(self._directory, method).remote(*args)
                    except ActorUnavailableError:
                        await asyncio.sleep(_DIRECTORY_RETRY_S)
                    except RayTaskError as error:
                        if not isinstance(error.cause, DirectoryRecovering):
                            raise
                        await asyncio.sleep(_DIRECTORY_RETRY_S)
        except RayTaskError as error:
            if isinstance(error.cause, BrayxError):
                raise error.cause from None
            raise
        except (TimeoutError, RayActorError) as error:
            raise Overloaded(
                f"the session directory did not answer {method} within {_DIRECTORY_TIMEOUT_S} s; try again",
                layer="directory",
            ) from error

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                lost = await self._ask("renew", self._owner, self._address)
                if lost is None:
                    lost = await self._ask("renew", self._owner, self._address, self._table.sessions)
                self._table.lose(lost or [])
            except (BrayxError, RayTaskError) as error:
                logger.warning("the session directory did not take the lease's renewal: %s", error)

    async def _forward(self, location: Location, request: StepRequest) -> bytes:
        transport = self._peers.take(location.address)
        try:
            reply = await transport.step(request, self._tick_timeout_s + 1.0)
        except TransportError as error:
            await transport.close()
            if isinstance(error, ConnectFailed) or not await _is_reachable(location.address):
                await self._peers.drop(location.address)
                await self._ask("bury", location.owner)
                if await self._ask("locate", request.session) is None:  # raises SessionLost, once
                    return await self._table.step(request)
            raise
        except BrayxError:
            await self._peers.put_back(location.address, transport)
            raise
        except BaseException:
            await transport.close()
            raise
        await self._peers.put_back(location.address, transport)
        return reply


class Peers:
    """Idle connections to other replicas, by address.

    Args:
        max_idle: connections kept open to each of them.
    """

    def __init__(self, max_idle: int = _IDLE_PEER_CONNECTIONS) -> None:
        self._max_idle = max_idle
        self._idle: dict[str, list[AsyncHttpTransport]] = {}

    def take(self, address: str) -> AsyncHttpTransport:
        """An idle connection, or a new one."""
        idle = self._idle.get(address)
        return idle.pop() if idle else AsyncHttpTransport(Endpoint.parse(f"{address}{FORWARDED_PREFIX}"))

    async def put_back(self, address: str, transport: AsyncHttpTransport) -> None:
        """Keeps a connection for the next request, or closes it if enough are kept."""
        idle = self._idle.setdefault(address, [])
        if len(idle) < self._max_idle:
            idle.append(transport)
        else:
            await transport.close()

    async def drop(self, address: str) -> None:
        """Closes the connections to a replica that is gone."""
        for transport in self._idle.pop(address, ()):
            await transport.close()

    async def close(self) -> None:
        """Closes all connections."""
        for address in list(self._idle):
            await self.drop(address)


async def _is_reachable(address: str) -> bool:
    """Whether a peer takes connections: one that broke says nothing of whether the process behind it lives."""
    url = urlsplit(address)
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


class _PeerDoor:
    """The HTTP door on a free port of this node, for the other replicas of the deployment."""

    def __init__(self, app: DoorApp) -> None:
        self._app = app
        self._serving: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None

    async def open(self) -> str:
        nodes = await asyncio.to_thread(ray.nodes)
        host = "127.0.0.1" if len(nodes) == 1 else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        listener = socket.create_server((host, 0), backlog=256)
        config = uvicorn.Config(self._app, log_level="error", access_log=False, lifespan="off", timeout_keep_alive=300)
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        return f"http://{host}:{listener.getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await asyncio.wait([self._serving], timeout=2.0)
            self._serving.cancel()


def actor_deployment(
    build: RuntimeBuilder,
    config: ActorConfig,
    *,
    name: str,
    directory: str,
    handles: Mapping[str, serve.Application] | None = None,
) -> serve.Application:
    """The Serve application whose replicas answer sessions.

    Args:
        build: the runtime's builder; must pickle.
        config: the actor component's options.
        name: of the deployment.
        directory: name of the session directory's Ray actor.
        handles: applications whose handles the builder gets, by name.
    """
    deployment: Any = serve.deployment(
        serve.ingress()(ActorReplica),
        name=name,
        num_replicas=config.num_workers,
        max_ongoing_requests=max(100, 2 * config.actors_per_worker),
        ray_actor_options={"num_cpus": config.cpus_per_worker, "memory": config.memory_per_worker * 2**20},
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=5.0,
        logging_config=LoggingConfig(enable_access_log=False),
    )
    application: serve.Application = deployment.bind(build, config, directory, dict(handles or {}))
    return application
