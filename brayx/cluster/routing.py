"""Handles requests for sessions of other replicas.

A replica that gets a request for a session of another replica looks the session up in the session directory and
forwards the request. If the owner is dead, this replica resumes the session from its snapshot, or else reports its loss
to the client once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

from brayx.actor.config import ActorConfig
from brayx.actor.ends import BETWEEN, may_be_repeat
from brayx.actor.ownership import HOLDER_MARK, Ownership, SessionSnapshot
from brayx.actor.service import Reply, into
from brayx.actor.table import SessionTable
from brayx.cluster.directory import MAX_SNAPSHOT_BYTES, Location
from brayx.cluster.membership import NO_ANSWER, Membership
from brayx.cluster.peers import ENDED_PREFIX, LEFT_PREFIX, PeerDied
from brayx.errors import BrayxError, Overloaded, QueueFull, SessionLost, SessionUnknown
from brayx.gamecore.auth import Keys
from brayx.gamecore.protocol import StepKind, StepRequest, game_of
from brayx.logs import limited
from brayx.metrics import Recorder

logger = limited(__name__)

_MAX_WAITING = 4096
_MAX_KNOWN = 16384
_AGAIN_S = 0.1


class Routing(Ownership):
    """The sessions that a replica shares with others through the directory.

    Args:
        member: the replica's place in the directory.
        config: the actor's options.
        keys: keys to sign forwarded requests with; None: clients need no key.
        recorder: counts forwarded requests.

    Attributes:
        table: the replica's own sessions; set before the first request.
    """

    shared = True
    table: SessionTable

    def __init__(self, member: Membership, config: ActorConfig, keys: Keys | None, recorder: Recorder) -> None:
        super().__init__(member.lease)
        self._member = member
        self._keys = keys
        self._recorder = recorder
        self._together = config.share == "game"
        self._timeout_s = config.tick_timeout_s + 1.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: OrderedDict[str, Location] = OrderedDict()

    async def claim(self, session: str) -> None:
        """See `Ownership.claim`."""
        if await self._member.ask("claim", session, self._member.owner, self._together) is not None:
            raise _gone_elsewhere(session)

    async def release(self, session: str, reason: str) -> None:
        """See `Ownership.release`."""
        await self._member.ask("release", session, self._member.owner, reason)

    def keep(self, session: str, snapshot: SessionSnapshot) -> None:
        """See `Ownership.keep`. A snapshot too large for the directory is counted here: its answer is not awaited."""
        size = len(snapshot.actor) + len(snapshot.kept or b"")
        if size > MAX_SNAPSHOT_BYTES:
            self._recorder.add("snapshots_failed", 1.0)
            logger.warning(
                "session %s: no snapshot: it has %d bytes, at most %d are kept", session, size, MAX_SNAPSHOT_BYTES
            )
            return
        self._member.keep(session, snapshot)

    async def park(self, session: str, snapshot: SessionSnapshot) -> None:
        """Hands a session over, see `Session.move`.

        Repeated until the directory answers. After a call without an answer the session may be parked already, and
        another replica may own it by now.
        """
        while True:
            try:
                await self._member.ask("park", session, self._member.owner, snapshot)
                return
            except Overloaded as error:
                if error.details.get("layer") != NO_ANSWER:
                    raise
            await asyncio.sleep(_AGAIN_S)

    def hand_on(self, request: StepRequest, reply: Reply) -> None:
        """See `Ownership.hand_on`."""
        self._answer(self._elsewhere(request, reply), request, reply)

    def notify(self, holder: str, reason: str) -> None:
        """See `Ownership.notify`. A connection that this does not reach gets the error with its next request."""
        address = holder.partition(HOLDER_MARK)[0]
        # After a move the connection stays open: its next request is forwarded to the session's new owner.
        if reason not in ("moved", "error") and address != self._member.address and len(self._tasks) < _MAX_WAITING:
            self._run(self._notify(address, holder, reason))

    async def _notify(self, address: str, holder: str, reason: str) -> None:
        message = StepRequest(StepKind.CALL, "", reason.encode(), holder=holder)
        try:
            await self._member.peers.tell(address, ENDED_PREFIX, message)
        except BrayxError as error:
            logger.info("could not tell a connection of another replica that it lost its session: %s", error)

    async def disconnect(self, session: str, holder: str, for_good: bool) -> None:
        """Reports to a session's owner that the session's connection to this replica has ended."""
        try:
            location = await self._member.ask("locate", session)
            if isinstance(location, Location) and location.owner != self._member.owner:
                left = StepRequest(StepKind.STOP, session, b"1" if for_good else b"", holder=holder)
                await self._member.peers.tell(location.address, LEFT_PREFIX, left)
        except BrayxError as error:
            logger.info("session %s: could not tell its owner that the connection broke: %s", session, error)

    def answer(self, request: StepRequest, reply: Reply, *, forwarded: bool) -> None:
        """Answers a request for a session that is not on this replica; ``forwarded``: a peer sent it."""
        if request.kind is StepKind.START and self._together and game_of(request.session) and not self.table.is_shut:
            self._answer(self._start_in_game(request, reply, forwarded), request, reply)
        elif request.kind is StepKind.START:
            self.table.submit(request, reply)
        elif forwarded:
            self._answer(self._take_parked(request, reply), request, reply)
        else:
            self.hand_on(request, reply)

    def _answer(self, work: Coroutine[Any, Any, None], request: StepRequest, reply: Reply) -> None:
        """Answers a request in a separate task, also after an unexpected error."""
        if len(self._tasks) >= _MAX_WAITING:
            work.close()
            reply(QueueFull(f"{_MAX_WAITING} requests wait for other replicas, at most as many may"))
            return

        async def answer() -> None:
            try:
                await work
            except BrayxError as error:
                reply(error)
            except Exception as error:
                logger.exception("session %s: the %s could not be passed on", request.session, request.kind.value)
                reply(Overloaded(f"the {request.kind.value} could not be passed on: {type(error).__name__}"))

        self._run(answer())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _elsewhere(self, request: StepRequest, reply: Reply, *, again: bool = False) -> None:
        """Finds the replica of a session that is not here, and gets the request answered there."""
        known = self._known.pop(request.session, None)
        try:
            location = await self._locate(request) if known is None else known
        except Overloaded as error:
            if not self.table.is_shut or error.details.get("layer") != BETWEEN:
                raise
            reply(await self._give_to_peer(request, error))
            return
        if isinstance(location, SessionSnapshot):
            self.table.resume(request.session, location, request, reply)
        elif location is None or location.owner == self._member.owner:
            self.table.submit(request, reply)
        else:
            began = time.perf_counter()
            answer = await self._forward(location, request)
            if not isinstance(answer, BrayxError):
                self._recorder.add("ticks_forwarded", 1.0)
                self._recorder.add("forwarded_seconds", time.perf_counter() - began)
                if request.kind is StepKind.TICK and self._member.peers.knows(location.address):
                    self._remember(request.session, location)
            if not again and isinstance(answer, BrayxError) and _has_left(answer):
                await self._elsewhere(request, reply, again=True)  # the directory has the new owner, or the error
            else:
                reply(answer)

    async def _give_to_peer(self, request: StepRequest, moving: Overloaded) -> bytes | BrayxError:
        """Passes a request to a replica that stays, which takes over the session that this one has parked.

        Otherwise the client would repeat the request here until its connection ends. Sessions of a game go to the same
        replica.

        Args:
            request: a tick or stop.
            moving: the answer if no replica can be reached.
        """
        game = game_of(request.session) or request.session
        others = [address for address in await self._member.ask("addresses") if address != self._member.address]
        if not others:
            return moving
        address = max(others, key=lambda address: hashlib.blake2b(f"{address} {game}".encode()).digest())
        try:
            return await self._member.peers.forward(address, self._signed(request), self._timeout_s)
        except PeerDied:
            return moving

    async def _take_parked(self, request: StepRequest, reply: Reply) -> None:
        """Answers a peer that has parked the session, or takes this replica for its owner."""
        location = await self._locate(request)
        if isinstance(location, SessionSnapshot):
            self.table.resume(request.session, location, request, reply)
        else:
            self.table.submit(request, reply)

    def _remember(self, session: str, location: Location) -> None:
        """Remembers a session's owner, so that its next tick needs no call to the directory."""
        self._known[session] = location
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _locate(self, request: StepRequest) -> Location | SessionSnapshot | None:
        """Finds a request's session; this replica takes it over if its owner is dead.

        It does not take it over if it accepts no more sessions, or has just ended that session itself.
        """
        table = self.table
        taker = "" if table.is_shut or table.is_ending(request.session) else self._member.owner
        try:
            location: Location | SessionSnapshot | None = await self._member.ask("locate", request.session, taker)
        except SessionLost:
            if not may_be_repeat(request):
                with contextlib.suppress(Overloaded):  # the client gets the loss in any case
                    await self._member.ask("acknowledge", request.session)
            raise
        if isinstance(location, SessionSnapshot) and table.is_shut:  # it has begun to end meanwhile
            await self.park(request.session, location)
            raise Overloaded(f"session {request.session!r} is moving to another replica; try again", layer=BETWEEN)
        return location

    async def _start_in_game(self, request: StepRequest, reply: Reply, forwarded: bool, again: bool = False) -> None:
        """Starts a session of a game on the replica that has the game; here if none has it.

        The claim decides which of several concurrent starts is the first. The table claims the session again, as for
        any start; it can only have lost the game if the session ended in between.
        """
        owner: Location | None = await self._member.ask("claim", request.session, self._member.owner, True)
        if owner is None:
            await self._start_claimed(request, reply)
        elif forwarded:
            reply(_gone_elsewhere(request.session))
        else:
            answer = await self._forward(owner, request)
            if not again and isinstance(answer, BrayxError) and answer.details.get("layer") == BETWEEN:
                await self._start_in_game(request, reply, forwarded, again=True)
            else:
                reply(answer)

    async def _start_claimed(self, request: StepRequest, reply: Reply) -> None:
        """Starts a session whose id and game this replica has already claimed."""
        self.table.submit(request, reply)
        if request.session not in self.table:
            await self.release(request.session, "stop")

    async def _forward(self, location: Location, request: StepRequest) -> bytes | BrayxError:
        """Forwards a request and returns the owner's answer.

        Raises:
            Overloaded: the owner could not be reached.
        """
        request = self._signed(request)
        try:
            return await self._member.peers.forward(location.address, request, self._timeout_s)
        except PeerDied:
            await self._member.ask("bury", location.owner)
        return await self._after_burial(request)

    def _signed(self, request: StepRequest) -> StepRequest:
        return request if self._keys is None else self._keys.renewed(request, time.time())

    async def _after_burial(self, request: StepRequest) -> bytes | BrayxError:
        """Handles a request for a dead owner: resumes the session from its snapshot, or reports the loss once.

        A start takes over the game with its remaining sessions.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        reply = into(answer)
        if request.kind is StepKind.START:
            await self._start_in_game(request, reply, False)
        else:
            location = await self._locate(request)
            if isinstance(location, Location):
                return await self._forward(location, request)  # a third replica took the session first
            if location is None:
                self.table.submit(request, reply)
            else:
                self.table.resume(request.session, location, request, reply)
        try:
            return await answer
        except BrayxError as error:
            return error


def _gone_elsewhere(session: str) -> BrayxError:
    return Overloaded(f"the game of session {session!r} has gone to another replica; try again", layer=BETWEEN)


def _has_left(error: BrayxError) -> bool:
    """Whether an owner's answer means that the session is not, or no longer, its own."""
    if isinstance(error, SessionLost):
        return error.details.get("reason") == "lost"
    return isinstance(error, SessionUnknown) or error.details.get("layer") == BETWEEN
