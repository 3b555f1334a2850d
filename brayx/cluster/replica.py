"""The actor replica: a session table behind its doors, as a Serve deployment class.

The class is undecorated; `actor_deployment` makes a Serve deployment of it at the edge. What the actors do inside
(models, buffers, agents) comes as an `ActorRuntime` from a builder that runs in the replica, so this file knows
neither. It adds to the table what needs Ray: the session directory, and passing a request on to the replica that owns
its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import logging
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import ray
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.schema import ApplicationStatus, LoggingConfig

from brayx.actor.actor import Actor
from brayx.actor.config import ActorConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.grpc import GrpcDoor
from brayx.actor.doors.http1 import (
    ENDED_PREFIX,
    FORWARDED_PREFIX,
    LEFT_PREFIX,
    PEER,
    SECRET_HEADER,
    ForPeers,
    HttpConnection,
    WebSockets,
)
from brayx.actor.doors.native import HeldPort, Limits, Listener, check_shared_port
from brayx.actor.doors.tcp import TcpConnection
from brayx.actor.ends import BETWEEN, ending, may_be_repeat
from brayx.actor.holders import HOLDER_MARK, Holder
from brayx.actor.lease import Lease
from brayx.actor.moving import Snapshot
from brayx.actor.ownership import Ownership
from brayx.actor.service import Reply
from brayx.actor.table import SessionTable
from brayx.cluster.directory import (
    LEASE_S,
    MAX_SNAPSHOT_BYTES,
    RENEW_S,
    DirectoryRecovering,
    Location,
    Renewal,
    check_directory,
    create_directory,
)
from brayx.cluster.hub import HubClient
from brayx.cluster.prometheus import Exporter
from brayx.cluster.start import warn_if_open
from brayx.errors import (
    BrayxError,
    ConnectFailed,
    DeadlineExceeded,
    Overloaded,
    QueueFull,
    SessionLost,
    SessionUnknown,
    TransportError,
    Unauthorized,
)
from brayx.gamecore.auth import Keys
from brayx.gamecore.protocol import StepKind, StepRequest, game_of
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.http import AsyncHttpTransport
from brayx.logs import limit_others, limited
from brayx.ports import free_port, is_loopback

logger = limited(__name__)

_DIRECTORY_TIMEOUT_S = 5.0
_DIRECTORY_RETRY_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_DEAD = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED)
"""The other side's word that its listener is gone, and so its process. Silence is none: a peer that is stopped, or that
the network hides, may go on answering until its lease ends. Nor is what may be wrong with this node's own network.
"""
_IDLE_PEER_CONNECTIONS = 64
_PEERS_IDLE_S = 300.0
_MAX_ROUTING = 4096
_MAX_KNOWN = 16384
_DRAIN_CHECK_S = 0.2
_LAST_S = 4.0
"""After the drain: agents are told, and what they left is handed over."""
_LATE_S = 10.0
"""How late Serve's word to end may come: a proxy that is gone keeps Ray from any other call for a second for each reply
of a WebSocket that it cannot be given any more, and `serve.shutdown` ends the proxy first.
"""


@dataclass
class ActorRuntime:
    """What a replica's builder gives it.

    Attributes:
        make_actor: makes the actor of each session.
        recorder: of the process.
        versions: the policy version of each model.
        describe: JSON facts for the status page (the policy version, say).
        check: raises when something behind the actors is broken for good; called by Serve's health check.
        close: coroutines functions that end what the builder started, in order.
    """

    make_actor: Callable[[], Actor]
    recorder: HubClient = field(default_factory=lambda: HubClient(None))
    versions: Callable[[], Mapping[str, int]] = dict
    describe: Callable[[], dict[str, Any]] = dict
    check: Callable[[], None] = lambda: None
    close: list[Callable[[], Awaitable[None]]] = field(default_factory=list)


RuntimeBuilder = Callable[[Mapping[str, Any]], Awaitable[ActorRuntime]]
"""Makes the runtime from the Serve handles that were bound to the deployment."""


class ActorReplica(GrpcDoor):
    """One replica: sessions, doors and the way to other replicas' sessions.

    Args:
        build: makes the runtime, in the replica's own process and event loop.
        config: the actor component's options.
        directory: name of the session directory shared by the deployment's replicas.
        handles: Serve handles for the builder, by name.
        asks_for_keys: as of `actor_deployment`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it, so that the builder runs on the replica's loop
        self,
        build: RuntimeBuilder,
        config: ActorConfig,
        directory: str,
        handles: Mapping[str, Any],
        asks_for_keys: bool = True,
    ) -> None:
        self.max_body_bytes = config.max_body_bytes
        self.idle_timeout_s = config.idle_timeout_s
        self._config = config
        self._application = directory
        self._keys = Keys.configured(config.keys_file, config.key_window_s) if asks_for_keys else None
        self._owner = uuid.uuid4().hex
        self._together = config.share == "game"
        self._draining = False
        self._context = contextvars.copy_context()
        self._routing: set[asyncio.Task[None]] = set()
        self._known: OrderedDict[str, Location] = OrderedDict()
        self._runtime = await build(handles)
        self._directory = create_directory(directory)
        await check_directory(directory, self._directory)
        self._lease = Lease(0.0)
        self._table = SessionTable(
            self._runtime.make_actor, await _with_errors(config), self._runtime.recorder, Shared(self, self._lease)
        )
        self._app = DoorApp(self, max_body_bytes=config.max_body_bytes, idle_timeout_s=config.idle_timeout_s)
        self._secret = secrets.token_hex(32)
        self._peers = Peers(self.secret)
        await self._agree_on_secret(fresh=True)
        self._native = NativePorts(self, self._app, config, directory)
        try:
            self._address = await self._native.open_to_peers()  # first: connections' names contain it
            await self._native.open()
        except BaseException:
            await self._native.close()  # Serve may try again in this process
            raise
        asked = time.monotonic()
        self._renewed(await self._ask("renew", self._owner, self._address, []), asked)
        self._renewal = asyncio.create_task(self._renew())
        self._watching = asyncio.create_task(self._drain_when_told())
        here = serve.get_replica_context()
        self._serve_name = here.app_name
        shown = logging.getLogger("ray.serve")  # `serve run` prints its lines
        warn_if_open(shown)
        shown.info("ready: acting with %s", self._runtime.versions() or "no model")
        limit_others()
        tags = {"application": here.app_name, "deployment": here.deployment, "replica": here.replica_id.unique_id}
        self._runtime.recorder.listen(Exporter(self._levels, **tags).show)

    def __serve_build_asgi_app__(self) -> DoorApp:
        """The application that Serve's ingress runs."""
        return self._app

    def submit(self, request: StepRequest, reply: Reply, *, forwarded: bool = False, let_in: bool = False) -> None:
        """Answers a request here, or has the session's owner answer it."""
        table = self._table
        if self._keys is not None and not let_in:
            try:
                self._keys.check(request, time.time())
            except Unauthorized as error:
                reply(error)
                return
        if request.session in table or request.kind is StepKind.CALL:
            table.submit(request, reply)
        elif request.kind is StepKind.START:
            if self._draining:
                reply(ending())
            elif self._together and game_of(request.session):
                self._route(self._start_in_game, request, reply, forwarded)
            else:
                table.submit(request, reply)
        elif forwarded:
            table.submit(request, reply)
        else:
            self._route(self._elsewhere, request, reply)

    def _route(
        self, how: Callable[..., Coroutine[Any, Any, None]], request: StepRequest, reply: Reply, *args: Any
    ) -> None:
        """Answers a request in a task of its own."""
        if len(self._routing) >= _MAX_ROUTING:
            reply(QueueFull(f"{_MAX_ROUTING} requests wait for other replicas, at most as many may"))
            return
        self._run(how(request, reply, *args))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._routing.add(task)
        task.add_done_callback(self._routing.discard)

    def refused(self, error: BrayxError) -> None:
        """See `Service.refused`."""
        self._table.refused(error)

    async def _elsewhere(self, request: StepRequest, reply: Reply, *, again: bool = False) -> None:
        """Finds out who has a session that is not here, and has the request answered."""
        known = self._known.pop(request.session, None)
        try:
            found = await self._locate(request) if known is None else known
            if isinstance(found, Snapshot):
                self._table.resume(request.session, found, request, reply)
            elif found is None or found.owner == self._owner:
                self._table.submit(request, reply)
            else:
                began = time.perf_counter()
                answer = await self._forward(found, request)
                if not isinstance(answer, BrayxError):
                    self._runtime.recorder.add("ticks_forwarded", 1.0)
                    self._runtime.recorder.add("forwarded_seconds", time.perf_counter() - began)
                    if request.kind is StepKind.TICK and self._peers.knows(found.address):
                        self._remember(request.session, found)
                    reply(answer)
                elif again or not _has_left(answer):
                    reply(answer)
                else:
                    await self._elsewhere(request, reply, again=True)  # the directory knows where to, or why
        except BrayxError as error:
            reply(error)
        except Exception as error:
            logger.exception("session %s: the request could not be passed on", request.session)
            reply(Overloaded(f"the request could not be passed on: {type(error).__name__}"))

    def _hand_on(self, request: StepRequest, reply: Reply) -> None:
        """Has a request answered that came for a session while this replica still took it for its own."""
        self._route(self._elsewhere, request, reply)

    def _remember(self, session: str, location: Location) -> None:
        """Where a session's last tick was answered: the next one goes there without asking the directory."""
        self._known[session] = location
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _start_in_game(self, request: StepRequest, reply: Reply, forwarded: bool, again: bool = False) -> None:
        """Starts a session of a game here if no other replica has the game, else there.

        The claim decides, so that of sessions that start at the same time on several replicas one is the first. The
        table claims the session once more, as any; only if an end came between has it lost the game by then.
        """
        try:
            found: Location | None = await self._ask("claim", request.session, self._owner, True)
            if found is None:
                await self._start_here(request, reply)
            elif forwarded:
                reply(self._gone_elsewhere(request.session))
            else:
                answer = await self._forward(found, request)
                if again or not isinstance(answer, BrayxError) or answer.details.get("layer") != BETWEEN:
                    reply(answer)
                else:
                    await self._start_in_game(request, reply, forwarded, again=True)
        except BrayxError as error:
            reply(error)
        except Exception as error:
            logger.exception("session %s: its start could not be passed on", request.session)
            reply(Overloaded(f"the start could not be passed on: {type(error).__name__}"))

    async def _start_here(self, request: StepRequest, reply: Reply) -> None:
        """Starts a session whose id, and so whose game, is this replica's already."""
        if self._draining:
            reply(ending())
        else:
            self._table.submit(request, reply)
        if request.session not in self._table:
            await self._release(request.session, "stop")

    def _gone_elsewhere(self, session: str) -> BrayxError:
        return Overloaded(f"the game of session {session!r} has gone to another replica; try again", layer=BETWEEN)

    async def _locate(self, request: StepRequest) -> Location | Snapshot | None:
        """Where a request's session is; this replica takes a session whose replica is gone.

        This replica does not take it if it takes no more sessions, or has just ended that session itself.
        """
        taker = "" if self._draining or self._table.is_ending(request.session) else self._owner
        found: Location | Snapshot | None = await self._ask("locate", request.session, taker, may_be_repeat(request))
        return found

    def holder(self, on_end: Callable[[str], None]) -> Holder:
        """See `Service.holder`. The name begins with this replica's address, where peers report a session's end."""
        return self._table.holder(on_end, self._address)

    def _tell(self, holder: str, reason: str) -> None:
        """Reports a session's end to the replica that has its connection.

        A connection that the report does not reach gets the error with its next request.
        """
        address = holder.partition(HOLDER_MARK)[0]
        # After a move the connection goes on: its next request is forwarded to the session's new owner.
        if reason not in ("moved", "error") and address != self._address and len(self._routing) < _MAX_ROUTING:
            self._run(self._tell_peer(address, holder, reason))

    async def _tell_peer(self, address: str, holder: str, reason: str) -> None:
        try:
            await self._peers.tell(
                address, ENDED_PREFIX, StepRequest(StepKind.CALL, "", reason.encode(), holder=holder)
            )
        except BrayxError as error:
            logger.info("could not tell a connection of another replica that it lost its session: %s", error)

    async def disconnect(self, session: str, holder: str = "", *, for_good: bool = False) -> None:
        """Tells the session's owner that the session's connection is gone."""
        if session in self._table:
            await self._table.disconnect(session, holder, for_good=for_good)
            return
        try:
            found = await self._ask("locate", session, "", True)
            if isinstance(found, Location) and found.owner != self._owner:
                left = StepRequest(StepKind.STOP, session, b"1" if for_good else b"", holder=holder)
                await self._peers.tell(found.address, LEFT_PREFIX, left)
        except BrayxError as error:
            logger.info("session %s: could not tell its owner that the connection broke: %s", session, error)

    async def left(self, request: StepRequest) -> None:
        """A peer reports that the connection of a session on this replica is gone."""
        await self._table.disconnect(request.session, request.holder, for_good=bool(request.body))

    async def ended(self, request: StepRequest) -> None:
        """A peer reports why a connection of this replica has lost its session."""
        self._table.end_holder(request.holder, request.body.decode())

    def secret(self) -> str:
        """The secret by which the application's replicas recognise each other."""
        return self._secret

    async def _agree_on_secret(self, *, fresh: bool = False) -> None:
        agreed = await self._ask("secret", self._secret, fresh)
        if agreed != self._secret:
            self._secret = agreed
            await self._peers.close()  # their connections have the one before

    def status(self) -> dict[str, Any]:
        """Facts for the status page."""
        return {
            "service": "brayx",
            "application": self._application,
            "sessions": len(self._table),
            "draining": self._draining,
            "doors": self._native.urls,
            **self._runtime.describe(),
        }

    async def check_health(self) -> None:
        """Serve's health check: raises when this replica should be replaced."""
        if self._renewal.done():
            raise RuntimeError(f"the session directory's renewal ended: {self._renewal.exception()!r}")
        self._runtime.check()

    async def drain(self) -> None:
        """Takes no new sessions and connections, moves what can be moved, and lets the rest finish for a while.

        Of an application that is going no replica remains that would take a session: there all may finish.
        """
        if self._draining:
            return
        self._draining = True
        self._native.shut()
        deadline = time.monotonic() + self._config.drain_timeout_s
        while len(self._table) and time.monotonic() < deadline:
            if not await _is_going(self._serve_name):
                self._table.move(self._park)
            await asyncio.sleep(_DRAIN_CHECK_S)
        await self._table.close("drained")

    async def _drain_when_told(self) -> None:
        """Serve tells a replica only that it is over, once no request is under way: long after a WebSocket should know.

        So this looks for the mark that Serve sets first; without it (a later version of Ray) the end comes at once.
        """
        while not _is_told_to_end():  # noqa: ASYNC110 (Serve's mark, not an event)
            await asyncio.sleep(_DRAIN_CHECK_S)
        await self.drain()

    async def __del__(self) -> None:
        """Serve's shutdown hook: ends all sessions, then everything the replica started."""
        if not hasattr(self, "_watching"):
            return
        if self._draining:
            await asyncio.wait([self._watching], timeout=self._config.drain_timeout_s + _LAST_S)
        else:
            await self.drain()
        self._watching.cancel()
        await self._table.close("drained", _LAST_S / 2)
        self._renewal.cancel()
        await asyncio.to_thread(self._runtime.recorder.drain)
        # Side by side and each on its own: one that hangs or raises keeps no other from what it has to hand over.
        closing: list[Awaitable[Any]] = [self._native.close(), self._peers.close(), self._ask("leave", self._owner)]
        closing += [close() for close in self._runtime.close]
        for result in await asyncio.gather(*(_within(work, _LAST_S / 2) for work in closing), return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("a part of the replica did not end in order: %s: %s", type(result).__name__, result)

    def _levels(self) -> Iterator[tuple[str, str, float]]:
        """What the export looks at."""
        yield "sessions_active", "", len(self._table)
        for model, version in self._runtime.versions().items():
            yield "acting_version", model, version

    async def _claim(self, session: str) -> None:
        if await self._ask("claim", session, self._owner, self._together) is not None:
            raise self._gone_elsewhere(session)

    async def _release(self, session: str, reason: str) -> None:
        await self._ask("release", session, self._owner, reason)

    def _keep(self, session: str, snapshot: Snapshot) -> None:
        """Hands a snapshot to the directory without waiting: the next one replaces it anyway.

        One that the directory would refuse for its size is told and counted here, because its answer is not awaited.
        """
        size = len(snapshot.actor) + len(snapshot.kept or b"")
        if size > MAX_SNAPSHOT_BYTES:
            self._runtime.recorder.add("snapshots_failed", 1.0)
            logger.warning(
                "session %s: no snapshot: it has %d bytes, at most %d are kept", session, size, MAX_SNAPSHOT_BYTES
            )
            return
        self._directory.keep.remote(session, self._owner, snapshot)

    async def _park(self, session: str, snapshot: Snapshot) -> None:
        await self._ask("park", session, self._owner, snapshot)

    async def _ask(self, method: str, *args: Any) -> Any:
        """Calls the directory, again while it restarts, within a deadline; its typed errors come out as themselves."""
        try:
            async with asyncio.timeout(_DIRECTORY_TIMEOUT_S):
                while True:
                    try:
                        # Not as a child of the request that asks: Ray cancels those with it when its client leaves,
                        # and the directory may have done it.
                        return await self._context.run(getattr(self._directory, method).remote, *args)
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lease.wanted.wait(), RENEW_S)
            self._lease.wanted.clear()
            try:
                self._address = await self._native.open_to_peers()
                asked = time.monotonic()
                renewal = await self._ask("renew", self._owner, self._address)
                if renewal is None:
                    await self._agree_on_secret()
                    asked = time.monotonic()
                    renewal = await self._ask("renew", self._owner, self._address, self._table.sessions)
                self._renewed(renewal, asked)
            except (BrayxError, RayTaskError, OSError) as error:
                logger.warning("the session directory did not take the lease's renewal: %s", error)
                await asyncio.sleep(_DIRECTORY_RETRY_S)

    def _renewed(self, renewal: Renewal, asked: float) -> None:
        """Ends what is not this replica's any more, and counts the ends that no replica has heard of.

        Args:
            renewal: the directory's answer.
            asked: when it was asked, by `time.monotonic`: the directory counts from later on.
        """
        over_s = time.monotonic() - self._lease.ends
        if over_s > 0 and self._lease.ends > 0:
            told = "this replica's lease was over for %.1f s: it answered nobody, and lost %d of its sessions"
            logger.warning(told, over_s, len(renewal.lost))
        self._table.lose(renewal.lost)
        self._lease.renew(asked + LEASE_S)  # after that: who has waited for it finds what it has lost
        if renewal.forgotten:
            self._runtime.recorder.add("sessions_ended", float(renewal.forgotten), label="lost")

    async def _forward(self, location: Location, request: StepRequest) -> bytes | BrayxError:
        """What the owner answers. Raises only what went wrong on the way to it."""
        if self._keys is not None:
            request = self._keys.renewed(request, time.time())
        transport = self._peers.take(location.address)
        answer: bytes | BrayxError
        timeout_s = self._config.tick_timeout_s + 1.0
        try:
            try:
                answer = await transport.step(request, timeout_s)
            except DeadlineExceeded as error:
                if error.details.get("url") != f"{location.address}{FORWARDED_PREFIX}":
                    raise  # the owner's own
                late = TimeoutError(f"no answer within {timeout_s:g} s")
                raise (ConnectFailed if error.details["layer"] == "connect" else TransportError)(str(late)) from late
        except TransportError as error:
            await transport.close()
            sent = not isinstance(error, ConnectFailed)
            if _tells_of_death(await _cannot_connect(location.address) if sent else error.__cause__):
                await self._peers.drop(location.address)
                await self._ask("bury", location.owner)
                return await self._after_burial(request)
            # Not as it is: the codes of transports are those of the client's own connection.
            raise Overloaded(
                f"session {request.session!r}: its replica could not be asked ({error.__cause__ or error}); "
                f"the request {'may have been' if sent else 'was not'} applied; try again",
                layer=PEER,
                maybe_applied=sent,
            ) from error
        except BrayxError as error:
            answer = error
            if isinstance(error, Unauthorized) and error.details.get("layer") == PEER:
                await transport.close()
                raise Overloaded(
                    "this replica and its peer have not agreed on a secret yet; try again",
                    layer=PEER,
                    maybe_applied=False,
                ) from error
        except BaseException:
            await transport.close()
            raise
        await self._peers.put_back(location.address, transport)
        return answer

    async def _after_burial(self, request: StepRequest) -> bytes | BrayxError:
        """The owner is dead: the session resumes here from its snapshot, or its loss is told, once.

        A start takes over the game, and what is left of it.
        """
        answer: asyncio.Future[bytes | BrayxError] = asyncio.get_running_loop().create_future()

        def reply(result: bytes | BrayxError) -> None:
            if not answer.done():
                answer.set_result(result)

        if request.kind is StepKind.START:
            await self._start_in_game(request, reply, False)
        else:
            found = await self._locate(request)
            if isinstance(found, Location):
                return await self._forward(found, request)  # a third replica was quicker
            if found is None:
                self._table.submit(request, reply)
            else:
                self._table.resume(request.session, found, request, reply)
        return await answer


class Shared(Ownership):
    """The sessions of a replica, which it shares with others through the directory."""

    shared = True

    def __init__(self, replica: ActorReplica, lease: Lease) -> None:
        super().__init__(lease)
        self.claim = replica._claim  # type: ignore[method-assign]
        self.release = replica._release  # type: ignore[method-assign]
        self.keep = replica._keep  # type: ignore[method-assign]
        self.hand_on = replica._hand_on  # type: ignore[method-assign]
        self.notify = replica._tell  # type: ignore[method-assign]


def _has_left(error: BrayxError) -> bool:
    """Whether an owner says that a session is not its own, or not any more."""
    if isinstance(error, SessionLost):
        return error.details.get("reason") == "lost"
    return isinstance(error, SessionUnknown) or error.details.get("layer") == BETWEEN


async def _within(work: Awaitable[Any], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        await work


class Peers:
    """Idle connections to other replicas, by address.

    Args:
        secret: what to prove with that this is a replica.
        max_idle: connections kept open to each of them.
    """

    def __init__(self, secret: Callable[[], str], max_idle: int = _IDLE_PEER_CONNECTIONS) -> None:
        self._secret = secret
        self._max_idle = max_idle
        self._idle: dict[str, list[AsyncHttpTransport]] = {}

    def knows(self, address: str) -> bool:
        """Whether the replica there has answered, and not been found dead since."""
        return address in self._idle

    def take(self, address: str) -> AsyncHttpTransport:
        """An idle connection, or a new one."""
        idle = self._idle.get(address)
        return idle.pop() if idle else self._open(f"{address}{FORWARDED_PREFIX}")

    def _open(self, url: str) -> AsyncHttpTransport:
        return AsyncHttpTransport(Endpoint.parse(url), {SECRET_HEADER: self._secret()})

    async def put_back(self, address: str, transport: AsyncHttpTransport) -> None:
        """Keeps a connection for the next request, or closes it if enough are kept."""
        idle = self._idle.setdefault(address, [])
        if len(idle) < self._max_idle:
            idle.append(transport)
        else:
            await transport.close()

    async def tell(self, address: str, prefix: str, message: StepRequest) -> None:
        """Sends a message to a replica at ``prefix`` (`LEFT_PREFIX` or `ENDED_PREFIX`), over a new connection."""
        transport = self._open(f"{address}{prefix}")
        try:
            await transport.step(message, _PROBE_TIMEOUT_S)
        finally:
            await transport.close()

    async def drop(self, address: str) -> None:
        """Closes the connections to a replica that is gone."""
        for transport in self._idle.pop(address, ()):
            await transport.close()

    async def close(self) -> None:
        """Closes all connections."""
        for address in list(self._idle):
            await self.drop(address)


async def _cannot_connect(address: str) -> OSError | None:
    """Why a peer takes no connection; None: it does. One that broke says nothing of whether its process lives."""
    url = urlsplit(address)
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
    except OSError as error:
        return error
    writer.close()
    return None


def _tells_of_death(error: BaseException | None) -> bool:
    """Whether a connection failed because nobody listens there any more."""
    return isinstance(error, OSError) and error.errno in _DEAD


class NativePorts:
    """The listeners that a replica opens itself: HTTP and TCP for gamecores, HTTP for its peers.

    Args:
        replica: what answers.
        app: its ASGI application, for WebSocket connections.
        config: the actor's options.
        application: who may share the ports: replicas of the same directory.
    """

    def __init__(self, replica: ActorReplica, app: DoorApp, config: ActorConfig, application: str) -> None:
        self._config = config
        self._application = application
        self._limits = Limits(
            max_body_bytes=config.max_body_bytes,
            max_connections=config.max_connections,
            idle_s=max(config.idle_timeout_s, _PEERS_IDLE_S),
        )
        self._replica = replica
        self._websockets = WebSockets(app, self._limits)
        self._listeners: list[Listener] = []
        self._held: list[HeldPort] = []
        self._peers: dict[str, Listener] = {}
        self.urls: dict[str, str] = {}
        """URL of each native door that is open."""

    def _http(self, peers: ForPeers | None = None) -> Listener:
        def make(listener: Listener) -> HttpConnection:
            return HttpConnection(listener, self._websockets, peers)

        return Listener(self._replica, make, self._limits)

    async def open(self) -> None:
        """Opens the ports that are configured.

        Raises:
            StartupError: one is taken. Those opened before it stay open until `close`.
        """
        config = self._config
        for port in (config.native_port, config.tcp_port):
            if port is not None:
                self._held.append(await asyncio.to_thread(HeldPort, port, self._application))
        if config.native_port is not None:
            check = asyncio.to_thread(check_shared_port, config.native_host, config.native_port, self._application)
            await check
            listener = self._http()
            await listener.open(config.native_host, config.native_port, shared=True)
            self._listeners.append(listener)
            at = f"{config.native_host}:{config.native_port}"
            self.urls.update(http=f"http://{at}", ws=f"ws://{at}")
        if config.tcp_port is not None:
            listener = Listener(self._replica, TcpConnection, self._limits)
            await listener.open(config.native_host, config.tcp_port, shared=True)
            self._listeners.append(listener)
            self.urls["tcp"] = f"tcp://{config.native_host}:{config.tcp_port}"

    async def open_to_peers(self) -> str:
        """URL where other replicas reach this one: on loopback while the cluster is one node, else on the node's."""
        nodes = await asyncio.to_thread(ray.nodes)
        host = "127.0.0.1" if len(nodes) == 1 else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        if host not in self._peers:
            # On loopback the listener is a normal door too, like the native ports. On another interface it would be a
            # door that nobody configured, so there it refuses clients.
            replica = self._replica
            peers = ForPeers(replica.left, replica.ended, replica.secret, closed=host != "127.0.0.1")
            listener = self._http(peers)
            await listener.open(host, 0)
            self._peers[host] = listener
        return f"http://{host}:{self._peers[host].address[1]}"

    def shut(self) -> None:
        """Takes no more gamecores' connections."""
        for listener in self._listeners:
            listener.shut()
        for held in self._held:
            held.release()

    async def close(self) -> None:
        """Closes all listeners and connections."""
        self._websockets.close()
        self.shut()
        for listener in [*self._listeners, *self._peers.values()]:
            await listener.close()


def _is_told_to_end() -> bool:
    """Whether Serve has told this process's replica to end: it sets a mark of its own, which nothing public shows."""
    from ray._private.worker import global_worker

    for actor in list(getattr(global_worker, "actors", {}).values()):
        if getattr(getattr(actor, "_replica_impl", None), "_shutting_down", False):
            return True
    return False


async def _with_errors(config: ActorConfig) -> ActorConfig:
    """The options with `show_errors` chosen."""
    return config.model_copy(
        update={"show_errors": await _on_loopback(config) if config.show_errors is None else config.show_errors}
    )


async def _on_loopback(config: ActorConfig) -> bool:
    """Whether all doors of this application listen on loopback only; False if Serve does not answer.

    A client's address would not do: behind Serve's proxy every client has an address of this machine.
    """

    def serve_on_loopback() -> bool:
        client: Any = serve.context._get_global_client()
        # Serve's gRPC proxy listens on every address, and no option changes that.
        grpc = ray.get(client._controller.get_grpc_config.remote())
        return is_loopback(client.http_config.host) and not grpc.grpc_servicer_functions

    if not is_loopback(config.native_host) and not (config.native_port is None and config.tcp_port is None):
        return False
    try:
        async with asyncio.timeout(_DIRECTORY_TIMEOUT_S):
            return await asyncio.to_thread(serve_on_loopback)
    except Exception as error:
        logger.warning("could not find out where Serve listens: %s: %s", type(error).__name__, error)
        return False


async def _is_going(application: str) -> bool:
    """Whether Serve is deleting the application with all its replicas; False if Serve does not answer."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            of = (await asyncio.to_thread(serve.status)).applications.get(application)
    except Exception as error:  # the controller is away: it has more ways to say so than are documented
        logger.warning("Serve did not tell whether the application is going: %s: %s", type(error).__name__, error)
        return False
    return of is None or of.status == ApplicationStatus.DELETING


def actor_deployment(
    build: RuntimeBuilder,
    config: ActorConfig,
    *,
    name: str,
    directory: str,
    handles: Mapping[str, serve.Application] | None = None,
    asks_for_keys: bool = True,
) -> serve.Application:
    """The Serve application whose replicas answer sessions.

    Args:
        build: the runtime's builder; must pickle.
        config: the actor component's options.
        name: of the deployment.
        directory: name of the session directory's Ray actor.
        handles: applications whose handles the builder gets, by name.
        asks_for_keys: for those of ``config`` or the environment; False: everybody may come in, whatever they say.
    """
    chosen = {
        field: free_port(config.native_host) for field in ("native_port", "tcp_port") if getattr(config, field) == 0
    }
    config = config.model_copy(update=chosen)  # here, so that all replicas open the same
    deployment: Any = serve.deployment(
        serve.ingress()(ActorReplica),
        name=name,
        num_replicas=config.num_workers,
        # Each open WebSocket is a request under way: with fewer places they would keep ticks waiting.
        max_ongoing_requests=2 * config.actors_per_worker + 256,
        max_queued_requests=2 * config.actors_per_worker + 256,
        ray_actor_options={"num_cpus": config.cpus_per_worker, "memory": config.memory_per_worker * 2**20},
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=_LATE_S + config.drain_timeout_s + _LAST_S,
        logging_config=LoggingConfig(enable_access_log=False),
    )
    application: serve.Application = deployment.bind(build, config, directory, dict(handles or {}), asks_for_keys)
    return application
