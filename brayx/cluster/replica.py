"""The actor replica: an `ActorService` as a Serve deployment class, and its place among the other replicas.

The class is undecorated; `actor_deployment` makes a Serve deployment of it. A builder that runs in the replica gives
the `ActorRuntime` with models, buffers and agents, so this file knows none of them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray import serve
from ray.serve.schema import ApplicationStatus, LoggingConfig

from brayx.actor.config import ActorConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.grpc import GrpcDoor
from brayx.actor.doors.ports import NATIVE_OPTIONS, on_loopback
from brayx.actor.ownership import Park
from brayx.actor.service import Holder, Reply
from brayx.actor.serving import ActorService, Runtime
from brayx.cluster import ray_private
from brayx.cluster.autoscaling import SESSIONS
from brayx.cluster.console import ConsoleAnswers
from brayx.cluster.hub import HubClient
from brayx.cluster.membership import Membership, check_directory, create_directory
from brayx.cluster.peers import ForPeers, PeerDoors
from brayx.cluster.prometheus import Exporter
from brayx.cluster.routing import Routing
from brayx.gamecore.auth import Keys
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.logs import limit_others, limited
from brayx.model.following import AliasFollower
from brayx.ports import free_port
from brayx.recording.drawing import Drawing
from brayx.recording.live_frames import LiveFrames

logger = limited(__name__)

_CHECK_S = 0.2
_STATUS_S = 2.0
_STEP_S = 0.05
_STEPS = 20
_LEAST_AT_ONCE = 8
"""Sessions move a few at a time. All at once would wait for each other: each needs the directory several times."""
_LAST_S = 4.0
"""Time after the drain for agents' last hooks, and to send the remaining data."""
_LATE_S = 10.0
"""Delay of Serve's shutdown call. `serve.shutdown` ends the proxy first, and each WebSocket reply to an ended proxy
blocks Ray's other calls for a second.
"""


class Draining:
    """The drain of one replica.

    Args:
        service: the replica's sessions and doors.
        park: as for `Session.move`.
        application: name of the application in Serve.
        timeout_s: deadline for sessions that cannot be moved.
    """

    def __init__(self, service: ActorService, park: Park, application: str, timeout_s: float) -> None:
        self._service = service
        self._park = park
        self._application = application
        self._timeout_s = timeout_s

    async def run(self) -> None:
        """Refuses new sessions and connections, moves the sessions that can be moved, and waits for the others.

        If the whole application is deleted, no replica is left to take a session, so all of them may finish.
        """
        table = self._service.table
        if table.is_shut:
            return
        table.is_shut = True
        self._service.doors.shut()
        deadline = time.monotonic() + self._timeout_s
        while len(table) and time.monotonic() < deadline:
            if await _is_going(self._application):
                await asyncio.sleep(_CHECK_S)
                continue
            again_at = time.monotonic() + _STATUS_S
            at_once = max(_LEAST_AT_ONCE, len(table) // _STEPS)
            while len(table) and time.monotonic() < min(again_at, deadline):
                table.move(self._park, at_once)
                await asyncio.sleep(_STEP_S)
        await table.close("drained")

    async def watch(self) -> None:
        """Drains as soon as Serve ends this replica.

        Serve calls a replica's shutdown hook only when no request is running, which is too late for WebSockets. So this
        polls the mark that Serve sets first; without the mark (in a later version of Ray) draining starts at once.
        """
        while not ray_private.replica_is_ending():  # noqa: ASYNC110 (Serve's mark, not an event)
            await asyncio.sleep(_CHECK_S)
        await self.run()


async def _is_going(application: str) -> bool:
    """Whether Serve is deleting the application with all its replicas; False if Serve does not answer."""
    try:
        async with asyncio.timeout(_STATUS_S):
            overview = (await asyncio.to_thread(serve.status)).applications.get(application)
    except Exception as error:  # the controller does not answer; Ray documents only some of its errors
        logger.warning(
            "Serve did not say whether the application is being deleted: %s: %s", type(error).__name__, error
        )
        return False
    return overview is None or overview.status == ApplicationStatus.DELETING


@dataclass
class ActorRuntime(Runtime):
    """The runtime that a replica's builder returns.

    Attributes:
        recorder: recorder of the process.
        versions: the policy version of each model.
        follower: the canaries; None: no alias is followed.
        drawing: draws the frames of sessions that a console follows; None: nothing does.
        check: raises if a part behind the actors is broken for good; called by Serve's health check.
    """

    recorder: HubClient = field(default_factory=lambda: HubClient(None))
    versions: Callable[[], Mapping[str, int]] = dict
    follower: AliasFollower | None = None
    drawing: Drawing | None = None
    check: Callable[[], None] = lambda: None


RuntimeBuilder = Callable[[Mapping[str, Any]], Awaitable[ActorRuntime]]
"""Makes the runtime from the Serve handles that were bound to the deployment."""


class ActorReplica(GrpcDoor, ActorService):
    """One replica: sessions, doors and routing to other replicas' sessions.

    Args:
        build: makes the runtime, in the replica's own process and event loop.
        config: the actor component's options.
        directory: name of the session directory shared by the deployment's replicas.
        handles: Serve handles for the builder, by name.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it, so that the builder runs on the replica's loop
        self,
        build: RuntimeBuilder,
        config: ActorConfig,
        directory: str,
        handles: Mapping[str, Any],
    ) -> None:
        keys = self._keys = Keys.configured(config.keys_file)
        directory_actor = create_directory(directory)  # first: its process starts meanwhile
        runtime = self._replica = await build(handles)
        await check_directory(directory, directory_actor)
        is_local = await _on_loopback(config)
        self._assemble(runtime, config, directory, directory_actor, keys, runtime.follower, runtime.drawing, is_local)
        await self._member.agree(fresh=True)
        try:
            self._member.address = await self._peer_doors.open()  # first: connections' names contain it
            await self.doors.open()
        except BaseException:
            await self._close_doors()  # Serve may retry in this process
            raise
        await self._member.join(self.table)
        self._renewal = asyncio.create_task(self._member.renew(self.table, self._peer_doors.open))
        here = serve.get_replica_context()
        self._console.application = here.app_name
        self._draining = Draining(self, self._routing.park, here.app_name, config.drain_timeout_s)
        self._watching = asyncio.create_task(self._draining.watch())
        shown = logging.getLogger("ray.serve")  # `serve run` prints its lines
        ray_private.warn_if_open(shown)
        shown.info("ready: acting with %s", runtime.versions() or "no model")
        limit_others()
        tags = {"application": here.app_name, "deployment": here.deployment, "replica": here.replica_id.unique_id}
        runtime.recorder.listen(Exporter(self._levels, **tags).show)

    def _assemble(
        self,
        runtime: Runtime,
        config: ActorConfig,
        application: str,
        directory: Any,
        keys: Keys | None,
        follower: AliasFollower | None = None,
        drawing: Drawing | None = None,
        is_local: bool = False,
    ) -> None:
        """Makes the replica's parts; ``directory`` is the session directory's handle."""
        self.max_body_bytes = config.max_body_bytes
        self.idle_timeout_s = config.idle_timeout_s
        self._member = Membership(directory, None if follower is None else follower.take_shares)
        self._routing = Routing(self._member, config, keys, runtime.recorder)
        ActorService.__init__(
            self, runtime, config, application, keys=keys, ownership=self._routing, shared=True, is_local=is_local
        )
        self._routing.table = self.table
        frames, set_share = LiveFrames(drawing), self._member.set_share
        runtime.close.append(functools.partial(asyncio.to_thread, frames.close))
        self._console = ConsoleAnswers(self.table, self.status, runtime.recorder, follower, set_share, frames)
        for_peers = ForPeers(self.answer_forwarded, self._left, self._ended, self._console.answer, self._member.secret)
        self._peer_doors = PeerDoors(self.doors, for_peers)

    def __serve_build_asgi_app__(self) -> DoorApp:
        """The application that Serve's ingress runs."""
        return self.door_app

    def status(self) -> dict[str, Any]:
        """See `ActorService.status`."""
        return {**super().status(), "console": self._console.url}

    def answer(self, request: StepRequest, reply: Reply) -> None:
        """See `ActorService.answer`; this replica answers, or forwards to the session's owner."""
        if request.session in self.table or request.kind is StepKind.CALL:
            self.table.submit(request, reply)
        else:
            self._routing.answer(request, reply, forwarded=False)

    def answer_forwarded(self, request: StepRequest, reply: Reply) -> None:
        """Answers a request of a peer that takes this replica for the session's owner; it is not forwarded again.

        The peer counts the errors.
        """
        if (refusal := self.refusal(request)) is not None:
            reply(refusal)
        elif request.session in self.table or request.kind is StepKind.CALL:
            self.table.submit_forwarded(request, reply)
        else:
            self._routing.answer(request, reply, forwarded=True)

    def holder(self, on_end: Callable[[str], None]) -> Holder:
        """See `Service.holder`. The name starts with this replica's address, where peers report a session's end."""
        return self.table.holder(on_end, self._member.address)

    async def disconnect(self, session: str, holder: str = "", *, for_good: bool = False) -> None:
        """See `Service.disconnect`; reports it to the session's owner."""
        if session in self.table:
            await self.table.disconnect(session, holder, for_good=for_good)
        else:
            await self._routing.disconnect(session, holder, for_good)

    async def _left(self, request: StepRequest) -> None:
        await self.table.disconnect(request.session, request.holder, for_good=bool(request.body))

    async def _ended(self, request: StepRequest) -> None:
        self.table.end_holder(request.holder, request.body.decode())

    async def check_health(self) -> None:
        """Serve's health check: raises when this replica should be replaced."""
        if self._renewal.done():
            raise RuntimeError(f"the session directory's renewal ended: {self._renewal.exception()!r}")
        self._replica.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook for its autoscaler, see `brayx.cluster.autoscaling`."""
        return {SESSIONS: float(len(self.table))}

    async def __del__(self) -> None:
        """Serve's shutdown hook: ends all sessions, then everything the replica started."""
        if not hasattr(self, "_watching"):
            return
        if self.table.is_shut:
            await asyncio.wait([self._watching], timeout=self._config.drain_timeout_s + _LAST_S)
        else:
            await self._draining.run()
        self._watching.cancel()
        await self.table.close("drained", _LAST_S / 2)
        self._renewal.cancel()
        await asyncio.to_thread(self._replica.recorder.drain)
        # Concurrently and independently, so that one that hangs or raises does not keep others from sending their data.
        closing: list[Awaitable[Any]] = [self._close_doors(), self._member.peers.close()]
        closing += [self._member.ask("leave", self._member.owner), *(close() for close in self._replica.close)]
        for result in await asyncio.gather(*(_within(work, _LAST_S / 2) for work in closing), return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("a part of the replica did not end in order: %s: %s", type(result).__name__, result)

    async def _close_doors(self) -> None:
        await self.doors.close()
        await self._peer_doors.close()

    def _levels(self) -> Iterator[tuple[str, str, float]]:
        """The current levels for the metrics export."""
        yield "sessions_active", "", len(self.table)
        for model, version in self._replica.versions().items():
            yield "acting_version", model, version


async def _within(work: Awaitable[Any], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        await work


async def _on_loopback(config: ActorConfig) -> bool:
    """Whether all doors of this application listen on loopback only."""
    opened = config.model_copy(update={"grpc_port": None})  # Serve's proxy has the gRPC door
    return on_loopback(opened, "localhost") and await ray_private.serve_is_on_loopback()


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
        name: name of the deployment.
        directory: name of the session directory's Ray actor.
        handles: applications whose handles the builder gets, by name.

    Raises:
        ConfigError: the file of keys cannot be read, is open to others or is malformed.
    """
    if config.keys_file is not None:
        Keys.load(config.keys_file)  # here, so that `serve run` ends with the error before it starts Ray
    chosen = {field: free_port(config.native_host) for field in NATIVE_OPTIONS if getattr(config, field) == 0}
    config = config.model_copy(update=chosen)  # here, so that all replicas open the same
    deployment: Any = serve.deployment(
        serve.ingress()(ActorReplica),
        name=name,
        num_replicas=config.num_workers,
        # Each open WebSocket counts as a running request: with a lower limit they would block ticks.
        max_ongoing_requests=2 * config.actors_per_worker + 256,
        max_queued_requests=2 * config.actors_per_worker + 256,
        ray_actor_options={"num_cpus": config.cpus_per_worker, "memory": config.memory_per_worker * 2**20},
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=_LATE_S + config.drain_timeout_s + _LAST_S,
        logging_config=LoggingConfig(enable_access_log=False),
    )
    application: serve.Application = deployment.bind(build, config, directory, dict(handles or {}))
    return application
