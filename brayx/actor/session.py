"""The session table: which sessions run here, one owner each, their requests in order, their end told once.

Pure asyncio: no Ray, no HTTP. A session is a task with an inbox: a door puts a `StepRequest` in and is called back
with bytes or a typed error, so that the order of a session's requests is the order in which they came, and nothing
but the session's own task ever calls its actor. A tick that finds that task waiting is begun as the task's at once
(`brayx.actor.eager`). The directory of other replicas is reached through the callables
``claim`` and ``release``. A session ends in exactly one place (`SessionTable.end`), whatever ended it: a stop, an
agent that raised, a client that went away, idleness, or the replica's own end. While the owner's lease is over nothing
is answered (`brayx.actor.lease`): the directory may have given its sessions away.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, TypeVar

from brayx.actor.actor import Actor, is_cancelled
from brayx.actor.calls import Calls
from brayx.actor.eager import Rest, begin
from brayx.actor.entry import Position, Session, Snapshot, Waiting
from brayx.actor.lease import Lease
from brayx.actor.service import Holder, Reply, Service
from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
    DeadlineExceeded,
    OutOfSequence,
    Overloaded,
    ProtocolError,
    QueueFull,
    ServiceFull,
    SessionExists,
    SessionLost,
    SessionResumed,
    SessionUnknown,
)
from brayx.faults import report
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.logs import limited
from brayx.metrics import Recorder

logger = limited(__name__)

_REMEMBERED_ENDS = 4096
_LEAST_SWEEP_S = 0.01
_MOST_SWEEP_S = 0.25
_LAST_WORD_S = 1.5
_LEASE_CHECK_S = 0.05
_WAITS_TIMED = 8
"""The wait of one tick in as many is timed, and stands for all of them: timing each would be felt."""
_RECORDED_AT_ONCE = 256
"""Ticks are recorded in lots of as many, when a session ends, and at each sweep: one by one would be felt, too."""
_now = time.monotonic
_TICK, _STOP, _START, _CALL = StepKind.TICK, StepKind.STOP, StepKind.START, StepKind.CALL

BETWEEN = "between"
"""Layer of the error for a request that came while its session was moved: it was not applied."""

HOLDER_MARK = "#"
"""Separates the replica's address from the rest of a connection's name."""

T = TypeVar("T")


def _nobody(result: bytes | BrayxError) -> None:
    """The reply to a request that no client sent."""


async def _take(session: str) -> None:
    """Default ``claim`` of a table without peers."""


async def _free(session: str, reason: str) -> None:
    """Default ``release`` of a table without peers."""


def _tell_nobody(holder: str, reason: str) -> None:
    """Default ``tell`` of a table without peers: all connections are here."""


class SessionTable(Service):
    """All sessions of one replica.

    Args:
        make_actor: makes the actor of a new session.
        max_sessions: further starts are refused with `ServiceFull`; as many stateless calls run at once.
        max_waiting: requests of one session that may wait for their turn; further ones get `QueueFull`.
        idle_timeout_s: a session without a request for this long ends with reason ``idle``.
        tick_timeout_s: deadline of one start, tick or stop inside the actor; past it the session ends.
        recorder: where ticks, sessions and refusals are counted.
        claim: makes the session id this replica's, or raises `SessionExists`.
        release: frees the id of a session that ended for a reason, and then tells whoever asks for it why; a table that
            stands alone does so itself.
        reconnect_timeout_s: a numbered session whose connection broke is kept this long for another one.
        tick_deadline_s: a tick without an answer this long after it came is answered by ``fallback``, and run by the
            actor when its turn comes; None: it waits.
        fallback: what with: the session's ``last`` reply, these bytes as ``default``, or the ``agent``'s own choice.
        default: for ``fallback="default"``.
        snapshot_every: ticks between two snapshots of a session whose actor can give one; 0: none.
        keep: is given each snapshot.
        lease: nothing is answered while it is over, see `lose`.
        elsewhere: gets the ticks and stops of sessions that another replica has taken over.
        tell: tells a connection of another replica, by name, why it no longer holds its session.
        show_errors: clients get the text of an actor's exception; False: its type, and an id that is in the log.
    """

    def __init__(
        self,
        make_actor: Callable[[], Actor],
        *,
        max_sessions: int = 256,
        max_waiting: int = 16,
        idle_timeout_s: float = 60.0,
        tick_timeout_s: float = 10.0,
        recorder: Recorder | None = None,
        claim: Callable[[str], Awaitable[None]] = _take,
        release: Callable[[str, str], Awaitable[None]] = _free,
        reconnect_timeout_s: float = 10.0,
        tick_deadline_s: float | None = None,
        fallback: Literal["last", "default", "agent"] = "last",
        default: bytes = b"",
        snapshot_every: int = 0,
        keep: Callable[[str, Snapshot], None] | None = None,
        lease: Lease | None = None,
        elsewhere: Callable[[StepRequest, Reply], None] | None = None,
        tell: Callable[[str, str], None] = _tell_nobody,
        show_errors: bool = False,
    ) -> None:
        self.recorder: Recorder = recorder if recorder is not None else Recorder()
        self._make_actor = make_actor
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self._idle_timeout_s = idle_timeout_s
        self._tick_timeout_s = tick_timeout_s
        self._claim = claim
        self._release = release
        self._remembers = release is _free
        self._reconnect_timeout_s = reconnect_timeout_s
        self._tick_deadline_s = tick_deadline_s
        self._fallback = fallback
        self._default = default
        self._snapshot_every = snapshot_every if keep is not None else 0
        self._keep = keep
        self._lease = lease if lease is not None else Lease()
        self._elsewhere = elsewhere
        self._tell_elsewhere = tell
        self._holders: weakref.WeakValueDictionary[str, Holder] = weakref.WeakValueDictionary()
        self._sessions: dict[str, Session] = {}
        self._tasks: dict[asyncio.Task[None], Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._show_errors = show_errors
        self._calls = Calls(make_actor, max_sessions, tick_timeout_s, self._refuse, show_errors)
        self._sweeper: asyncio.Task[None] | None = None
        self._closed = False
        self._turn = 0
        self._loop_turn = 0
        self._loop_turn_ends = False
        self._tick_seconds: list[float] = []
        # No session runs in the context of the request that began it: what it asks of Ray would be that request's, and
        # be cancelled with it when its client leaves.
        self._context = contextvars.copy_context()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def get(self, session: str) -> Session | None:
        """The running session of that id."""
        return self._sessions.get(session)

    @property
    def sessions(self) -> list[str]:
        """Ids of the running sessions."""
        return list(self._sessions)

    def holder(self, on_end: Callable[[str], None], at: str = "") -> Holder:
        """See `Service.holder`; the name begins with ``at``."""
        holder = Holder(f"{at}{HOLDER_MARK}{uuid.uuid4().hex}", on_end)
        self._holders[holder.name] = holder
        return holder

    def tell(self, holder: str, reason: str) -> bool:
        """Tells a connection why it no longer holds its session; False: there is no such connection here."""
        connection = self._holders.get(holder)
        if connection is None:
            return False
        connection.end(reason)
        return True

    async def disconnect(self, session: str, holder: str = "", *, for_good: bool = False) -> None:
        """See `Service.disconnect`."""
        entry = self._sessions.get(session)
        if entry is None or entry.holder != holder:
            return
        entry.holder = ""
        if entry.numbered and not for_good and self._reconnect_timeout_s > 0:
            entry.left_at = _now()
        else:
            self.end(entry, "disconnect")

    def status(self) -> dict[str, Any]:
        """How many sessions run."""
        return {"sessions": len(self._sessions)}

    def submit(self, request: StepRequest, reply: Reply, *, forwarded: bool = False, let_in: bool = False) -> None:
        """Takes a request, see `Service.submit`; it is counted, and the session has ended if it had to."""
        kind = request.kind
        if kind is _TICK or kind is _STOP:
            if not self.take(request, reply):
                self._refuse(reply, self.gone(request))
        elif kind is _START:
            self._start(request, reply)
        else:
            self._calls.submit(request.body, reply)

    def take(self, request: StepRequest, reply: Reply) -> bool:
        """Takes a tick or a stop as `submit` does; False: no such session runs here, and nothing has been done."""
        session = self._sessions.get(request.session)
        if session is None:
            return False
        if request.holder != session.holder and (refusal := self._take_over(session, request)) is not None:
            self._refuse(reply, refusal)
        elif (
            session.wake is not None
            and request.kind is _TICK
            and asyncio.current_task(session.task.get_loop()) is None  # given the loop: to look it up costs time
            and self._may_begin(session)
        ):
            # The task waits, so no other request is ahead of this tick.
            rest = begin(session.task, session.context, self._tick(session, request, reply, _now()))
            if rest is not None:
                session.rest = rest
                session.rouse()
        elif len(session.inbox) < self._max_waiting or self._make_room(session):
            self._put(session, request, reply)
        else:
            self._refuse(reply, self._queue_full(session))
        return True

    def _take_over(self, session: Session, request: StepRequest) -> BrayxError | None:
        """Checks a request for a session that another connection holds; the error that refuses it, or None.

        The connection that came last becomes the holder. A numbered tick without a connection leaves the session
        without a holder: its client has changed to a door whose connections hold no sessions. A tick that is going to
        be refused takes nothing over.
        """
        if request.attached and session.holder is not None:
            message = f"this connection no longer holds session {session.id!r}: it was taken over"
            return SessionLost(message, reason="taken")
        if request.seq is None and request.holder and request.kind is _TICK:
            message = "a tick without a number came over a connection that has no session"
            return SessionUnknown(f"{message}: send a start first, or the tick's number")
        if self._in_sequence(session, request.seq) if request.seq is not None else request.holder:
            if len(session.inbox) >= self._max_waiting and not self._make_room(session):
                return self._queue_full(session)
            holder, session.holder = session.holder, request.holder
            self._tell_holder(session, holder, "taken")
        return None

    def _in_sequence(self, session: Session, seq: int) -> bool:
        """Whether a tick of that number is a repeat, or can be the next one after those under way and waiting."""
        following = session.seq + (session.began > 0)
        for entry in session.inbox:
            following += entry.request.seq == following
        return session.seq - 1 <= seq <= following

    def _queue_full(self, session: Session) -> QueueFull:
        waiting = f"{len(session.inbox)} requests waiting, at most {self._max_waiting}"
        return QueueFull(f"session {session.id!r} has {waiting}")

    def _tell_holder(self, session: Session, holder: str | None, reason: str) -> None:
        try:
            if holder and not self.tell(holder, reason):
                self._tell_elsewhere(holder, reason)
        except Exception:
            logger.exception("session %s: could not tell its connection that it ended or was taken over", session.id)

    def _put(self, session: Session, request: StepRequest, reply: Reply) -> None:
        session.put(request, reply)
        if self._tick_deadline_s is not None and session.timer is None:
            self._look_again(session, self._tick_deadline_s)

    def _make_room(self, session: Session) -> bool:
        """Has the actor skip the oldest tick that waits for nothing but to be run; False: there is none."""
        told = session.inbox[0].told
        if told is None:  # they are answered in their order
            return False
        session.inbox.popleft()
        session.skipped += 1
        session.skipped_to = told
        self.recorder.add("ticks_skipped", 1.0)
        return True

    def _may_begin(self, session: Session) -> bool:
        """Whether a session may have another tick begun at once in this turn of the loop: as many as may wait."""
        if session.eager_turn != self._loop_turn:
            session.eager_turn, session.eager = self._loop_turn, 1
            if not self._loop_turn_ends:
                self._loop_turn_ends = True
                asyncio.get_running_loop().call_soon(self._end_loop_turn)
            return True
        session.eager += 1
        return session.eager <= self._max_waiting

    def _end_loop_turn(self) -> None:
        self._loop_turn += 1
        self._loop_turn_ends = False

    def is_ending(self, session: str) -> bool:
        """Whether a session of that id is coming to its end here, and its id is not free yet."""
        return self._ended.get(session, "moved") != "moved"

    def resume(self, session: str, snapshot: Snapshot, request: StepRequest, reply: Reply) -> None:
        """Goes on with a session that ran elsewhere, whose id is this replica's already.

        Args:
            session: its id.
            snapshot: the last one taken of it.
            request: what came for it here: applied if the snapshot is exact, else answered with `SessionResumed`. One
                that may not touch the session brings it back all the same, for its holder.
            reply: as of `submit`; gets `SessionLost` if the actor cannot be restored.
        """
        if self.take(request, reply):
            return
        if self._closed:
            self._refuse(reply, _over(session, request.kind.value, "moved"))
            return
        holder = (request.holder or None) if snapshot.holder is None else snapshot.holder
        entered = Session(session, self._context.copy(), snapshot.announced, holder)
        entered.ticks, entered.seq, entered.kept = snapshot.tick, snapshot.seq, snapshot.kept
        first: StepRequest | None = request
        if request.holder != holder and (refusal := self._take_over(entered, request)) is not None:
            self._refuse(reply, refusal)
            first = None
        self._enter(entered, lambda entry: self._restore(entry, snapshot, first, reply))

    def _start(self, request: StepRequest, reply: Reply) -> None:
        name = request.session
        if name in self._sessions:
            error: BrayxError = SessionExists(f"session {name!r} is already running: stop it first, or use another id")
        elif request.seq not in (None, 0):
            error = ProtocolError(f"a start has seq {request.seq}, expected 0, or none where ticks are not numbered")
        elif self._closed:
            error = ending()
        elif len(self._sessions) >= self._max_sessions:
            error = ServiceFull(f"this replica runs {len(self._sessions)} sessions, at most {self._max_sessions}")
        elif len(self._tasks) >= 2 * self._max_sessions:
            late = len(self._tasks) - len(self._sessions)
            error = ServiceFull(f"{late} sessions of this replica are ending, at most {self._max_sessions} may")
        else:
            entered = Session(name, self._context.copy(), request.seq is not None, request.holder)
            self._enter(entered, lambda entry: self._open(entry, request, reply))
            return
        self._refuse(reply, error)

    def _enter(self, session: Session, how: Callable[[Session], Awaitable[bool]]) -> None:
        self._sessions[session.id] = session
        loop = asyncio.get_running_loop()
        session.task = loop.create_task(self._live(session, how), context=session.context)
        self._tasks[session.task] = session
        session.task.add_done_callback(self._tasks.pop)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())

    async def _live(self, session: Session, how: Callable[[Session], Awaitable[bool]]) -> None:
        """A session's task, from its start (``how``) to its last word."""
        try:
            if not await how(session):
                return
        except asyncio.CancelledError:
            return  # ended before it began
        finally:
            if not hasattr(session, "actor"):
                self._turn_away(session)
        session.unanswered = False
        try:
            await self._serve(session)
        except asyncio.CancelledError:
            self.end(session, "drained")
        except Exception:
            logger.exception("session %s: its task failed", session.id)
            self.end(session, "error")
        finally:
            self._turn_away(session)
        await self._finish(session)

    async def _open(self, session: Session, request: StepRequest, reply: Reply) -> bool:
        """Starts a session; False: that failed, and the client got the error."""
        try:
            await self._claim(session.id)
        except BaseException as error:
            self._forget(session)
            self._refuse(reply, self._client_error(session.id, error, "its id could not be claimed"))
            if not isinstance(error, Exception):
                raise
            return False
        try:
            actor = self._make_actor()
            answer = await self._guard(session, actor.start(session.id, request.body), "start")
        except BaseException as error:
            self._forget(session)
            await self._give_back(session.id, "stop")
            self._refuse(reply, self._client_error(session.id, error, "the actor could not be made"))
            if not isinstance(error, Exception):
                raise
            return False
        session.actor = actor
        self._begun(session)
        self.recorder.add("sessions_started", 1.0)
        if _now() <= self._lease.ends or await self._may_answer(session, request, reply):
            reply(answer)
        return True

    async def _restore(self, session: Session, snapshot: Snapshot, request: StepRequest | None, reply: Reply) -> bool:
        """Brings a session back; False: it could not be, and the request, if any, was answered so."""
        try:
            actor = self._make_actor()
            await self._guard(session, actor.restore(session.id, snapshot.actor), "restore")
        except BaseException as error:
            self._forget(session)
            if not session.ended:
                self.recorder.add("sessions_ended", 1.0, label="lost")
            await self._give_back(session.id, "owner_died" if request is None or may_be_repeat(request) else "stop")
            why = self._client_error(session.id, error, "the actor could not be restored")
            if request is not None:
                self._refuse(reply, SessionLost(f"session {session.id!r} was lost: {why}", reason="owner_died"))
            if not isinstance(error, Exception):
                raise
            return False
        session.actor = actor
        self._begun(session)
        self.recorder.add("sessions_resumed", 1.0)
        if request is None:
            return True
        if snapshot.exact or (snapshot.kept is not None and request.seq == snapshot.seq - 1):
            # Nothing is lost: at most its client has not heard of the last tick in the snapshot, and asks for it again.
            session.inbox.appendleft(Waiting(request, reply, _now()))
        else:
            following = snapshot.seq or snapshot.tick
            told = f"session {session.id!r} was resumed from a snapshot: tick {following} comes next"
            self._refuse(reply, SessionResumed(told, tick=following))
        return True

    def _begun(self, session: Session) -> None:
        if not session.ended:
            self._ended.pop(session.id, None)
        session.last_seen = _now()
        self.recorder.add("sessions_active", len(self._sessions))

    async def _serve(self, session: Session) -> None:
        """Answers a session's requests, one after the other, until it has ended."""
        inbox, loop = session.inbox, asyncio.get_running_loop()
        while True:
            rest, session.rest = session.rest, None
            if rest is not None:
                await rest
            while inbox and not session.ended:
                if session.skipped_to is not None:
                    await self._skip(session, session.skipped_to)
                    continue
                entry = inbox.popleft()
                if entry.told is not None:
                    await self._run_told(session, entry.request, entry.told)
                elif entry.request.kind is _TICK:
                    await self._tick(session, entry.request, entry.reply, entry.arrived)
                else:
                    session.unanswered = True
                    if entry.request.kind is _CALL:
                        await self._move(session)
                    else:
                        await self._stop(session, entry.request, entry.reply)
                    session.unanswered = False
            if session.ended:
                return
            session.wake = wake = loop.create_future()
            try:
                await wake
            except asyncio.CancelledError:
                begun: Rest | None = session.rest
                if begun is None:
                    raise
                begun.cancel()

    async def _tick(self, session: Session, request: StepRequest, reply: Reply, arrived: float) -> None:
        seq = request.seq
        if seq is not None and seq != session.seq:
            if _now() <= self._lease.ends or await self._may_answer(session, request, reply):
                self._out_of_turn(session, seq, reply)
            return
        self._turn += 1
        if self._turn == _WAITS_TIMED:
            self._turn = 0
            self.recorder.add("tick_wait_seconds", _now() - arrived, weight=_WAITS_TIMED)
        answer: bytes | None
        if self._tick_deadline_s is None:
            # What `_run` does, without its coroutines: they would be felt.
            session.began = _now()
            try:
                answer = await session.actor.tick(request.body)
            except BaseException as error:
                self._failed(session, self._typed(session, error, "tick"), reply)
                return
            finally:
                session.last_seen = _now()
                session.began = 0.0
                if session.timed_out:
                    self._in_time_again(session)
        else:
            answer = await self._in_time(session, request, reply, self._tick_deadline_s, arrived)
            if answer is None:
                return
        session.ticks += 1
        if seq is not None:
            session.seq, session.kept = seq + 1, answer
        self._tick_seconds.append(session.last_seen - arrived)
        if len(self._tick_seconds) >= _RECORDED_AT_ONCE:
            self._record()
        if session.last_seen > self._lease.ends and not await self._may_answer(session, request, reply):
            return
        reply(answer)
        if self._snapshot_every and session.ticks % self._snapshot_every == 0:
            at = Position(session.ticks, session.seq, session.kept)
            if session.inbox:
                self._overdue(session)
            await self._snapshot(session, at)

    async def _may_answer(self, session: Session, request: StepRequest, reply: Reply) -> bool:
        """Waits for the lease's renewal; False: the session is not this table's any more, or nobody renews the lease.

        What was asked is answered then: where the session is now, or by the error that tells why not.
        """
        unanswered, session.unanswered = session.unanswered, True  # nothing behind it goes first
        try:
            async with asyncio.timeout(self._tick_timeout_s):
                await self._lease.held()
        except TimeoutError:
            told = (
                f"session {session.id!r}: this replica's lease has not been renewed; the request may have been applied"
            )
            self._refuse(reply, Overloaded(f"{told}; try again", layer="directory", maybe_applied=True))
            return False
        except asyncio.CancelledError as error:
            self._failed(session, error, reply)
        finally:
            session.unanswered = unanswered
        if session.ended != "lost":
            return True
        if self._elsewhere is not None and request.kind is not _START:
            self._elsewhere(request, reply)
        else:
            self._refuse(reply, _over(session.id, request.kind.value, session.ended))
        return False

    def _out_of_turn(self, session: Session, seq: int, reply: Reply) -> None:
        """Answers a numbered tick that is not the next one: a repeat of the last gets what that got."""
        if seq == session.seq - 1 and session.kept is not None:
            session.last_seen = _now()
            self.recorder.add("ticks_repeated", 1.0)
            reply(session.kept)
        else:
            told = f"tick {seq} of session {session.id!r} is out of sequence, expected {session.seq}"
            self._refuse(reply, OutOfSequence(told, expected=session.seq, got=seq))

    def _record(self) -> None:
        """Hands the recorder the ticks answered since the last time."""
        seconds, self._tick_seconds = self._tick_seconds, []
        if seconds:
            self.recorder.add("ticks", float(len(seconds)))
            self.recorder.add_all("tick_seconds", seconds)

    async def _in_time(
        self, session: Session, request: StepRequest, reply: Reply, deadline_s: float, arrived: float
    ) -> bytes | None:
        """The actor's answer to a tick; None: there is none to send, it was refused or the fallback was faster."""
        loop = asyncio.get_running_loop()
        told: Position | None = None
        timer: asyncio.TimerHandle

        def fall_back() -> None:
            nonlocal told, timer
            if _now() > self._lease.ends:
                timer = loop.call_later(_LEASE_CHECK_S, fall_back)
                return
            with contextlib.suppress(BadBody):
                answer = self._fallen(session, request.body)
                if answer is not None:
                    told = self._tell(session, request.seq, arrived, answer)
                    session.unanswered = False
                    reply(answer)
                    self._overdue(session)

        def answered_once(result: bytes | BrayxError) -> None:
            if told is None:
                reply(result)

        timer = loop.call_later(max(0.0, deadline_s - (_now() - arrived)), fall_back)
        session.unanswered = True
        try:
            answer = await self._run(session, session.actor.tick(request.body), "tick", answered_once)
        finally:
            timer.cancel()
            session.unanswered = False
        if told is not None:
            await self._after_told(session, answer, told)
            return None
        if answer is not None:
            session.last_reply = answer
        return answer

    def _overdue(self, session: Session) -> None:
        """Answers the waiting ticks whose deadline has passed: in their order, and none before the one under way."""
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        if session.ended or session.unanswered or self._tick_deadline_s is None:
            return
        if _now() > self._lease.ends:
            self._look_again(session, _LEASE_CHECK_S)
            return
        for entry in list(session.inbox):
            if entry.told is not None:
                continue
            if entry.request.kind is not _TICK:
                return
            left_s = entry.arrived + self._tick_deadline_s - _now()
            if left_s > 0:
                self._look_again(session, left_s)
                return
            if not self._answer_waiting(session, entry):
                return

    def _look_again(self, session: Session, after_s: float) -> None:
        """Has `_overdue` look at a session's waiting ticks."""
        session.timer = session.task.get_loop().call_later(after_s, self._overdue, session, context=session.context)

    def _answer_waiting(self, session: Session, entry: Waiting) -> bool:
        """Answers a tick that waits in the inbox; False: there is no fallback, and it waits on."""
        seq = entry.request.seq
        if seq is not None and seq != session.seq:
            session.inbox.remove(entry)
            self._out_of_turn(session, seq, entry.reply)
            return True
        try:
            answer = self._fallen(session, entry.request.body)
        except BadBody as error:
            session.inbox.remove(entry)
            self._refuse(entry.reply, error)
            return True
        if answer is None:
            return False
        entry.told = self._tell(session, seq, entry.arrived, answer)
        entry.reply(answer)
        return True

    def _tell(self, session: Session, seq: int | None, arrived: float, answer: bytes) -> Position:
        """Counts a tick that the fallback answers: for its client it is done, whatever the actor makes of it."""
        session.ticks += 1
        if seq is not None:
            session.seq, session.kept = seq + 1, answer
        self.recorder.add("ticks_fallen_back", 1.0, label=self._fallback)
        self.recorder.add("ticks", 1.0)
        self.recorder.add("tick_seconds", _now() - arrived)
        return Position(session.ticks, session.seq, session.kept)

    async def _run_told(self, session: Session, request: StepRequest, told: Position) -> None:
        """Has the actor run a tick that was answered while it waited."""
        answer = await self._run(session, session.actor.tick(request.body), "tick", _nobody)
        await self._after_told(session, answer, told)

    async def _after_told(self, session: Session, answer: bytes | None, told: Position) -> None:
        """The actor is done with a tick that the fallback has answered: it hears that its own answer was not used."""
        if session.ended and answer is None:
            return
        if answer is not None:
            await self._guard(session, session.actor.missed(), "missed")
        else:  # it refused the body, but for its client the tick is done
            await self._guard(session, session.actor.skipped(1), "skipped")
        if self._snapshot_every and told.tick % self._snapshot_every == 0:
            await self._snapshot(session, told)

    async def _skip(self, session: Session, to: Position) -> None:
        """Tells the actor of the ticks that made room in the inbox; they were the next ones."""
        skipped, session.skipped, session.skipped_to = session.skipped, 0, None
        await self._guard(session, session.actor.skipped(skipped), "skipped")
        if self._snapshot_every and to.tick % self._snapshot_every < skipped:
            await self._snapshot(session, to)

    def _fallen(self, session: Session, body: bytes) -> bytes | None:
        """The fallback's answer to the next tick; None: there is none, and the tick is waited for.

        Raises:
            BadBody: the actor cannot read the body.
        """
        if self._fallback == "default":
            return self._default
        if self._fallback == "last":
            return session.last_reply
        try:
            return session.actor.fallback(session.ticks, body)
        except BadBody:
            raise
        except Exception:
            logger.exception("session %s: the actor's fallback raised", session.id)
            return None

    async def _stop(self, session: Session, request: StepRequest, reply: Reply) -> None:
        answer = await self._run(session, session.actor.stop(request.body), "stop", reply)
        if answer is None:
            return
        if _now() > self._lease.ends and not await self._may_answer(session, request, reply):
            self.end(session, "error")  # its agents have been told of the stop
            return
        self.end(session, "stop")
        await self._give_back(session.id, "stop")
        reply(answer)

    async def _run(self, session: Session, work: Awaitable[bytes], kind: str, reply: Reply) -> bytes | None:
        """Runs one request of a session; whatever leaves the agents in doubt ends the session. None: it was refused."""
        try:
            return await self._guard(session, work, kind)
        except (BrayxError, asyncio.CancelledError) as error:
            self._failed(session, error, reply)
            return None

    def _failed(self, session: Session, error: BaseException, reply: Reply) -> None:
        """Tells why a request came to nothing; ends the session, unless only the body was bad."""
        if not isinstance(error, BrayxError):
            self._refuse(reply, SessionLost(f"session {session.id!r} was ended here: drained", reason="drained"))
            raise error
        if not isinstance(error, BadBody):
            self.end(session, "error")
        self._refuse(reply, error)

    async def _guard(self, session: Session, work: Awaitable[T], kind: str) -> T:
        """What the actor answers; what it raises as a typed error, lateness included (`_sweep` looks for that)."""
        session.began = _now()
        try:
            return await work
        except BaseException as error:
            raise self._typed(session, error, kind) from error.__cause__
        finally:
            self._done(session)

    def _done(self, session: Session) -> None:
        """The actor is not working for the session any more."""
        session.last_seen = _now()
        session.began = 0.0
        if session.timed_out:
            self._in_time_again(session)

    def _in_time_again(self, session: Session) -> None:
        """What was late is over: the session's task is not being cancelled any more."""
        session.timed_out = False
        session.task.uncancel()

    def _typed(self, session: Session, error: BaseException, kind: str) -> BaseException:
        """The actor's exception as a typed error; the cancelling of the session's task stays as it is."""
        if isinstance(error, asyncio.CancelledError):
            if session.timed_out:
                late = f"the actor took longer than {self._tick_timeout_s} s for {kind} of session {session.id!r}"
                return DeadlineExceeded(late, layer="actor")
            return error if is_cancelled() else AgentError(f"the actor raised in {kind}: CancelledError")
        return self._client_error(session.id, error, f"the actor raised in {kind}")

    def _client_error(self, session: str, error: BaseException, what: str) -> BrayxError:
        """The error that a client gets for an exception in its session; ``what`` says what failed."""
        return report(error, what, f"session {session}", show_text=self._show_errors)

    async def _snapshot(self, session: Session, at: Position) -> None:
        """Keeps the actor's state after the tick before ``at``; an actor that cannot give one goes on without."""
        assert self._keep is not None
        try:
            data = await self._guard(session, session.actor.snapshot(), "snapshot")
        except BrayxError as error:
            self.recorder.add("snapshots_failed", 1.0)
            logger.warning("session %s: no snapshot: %s", session.id, error)
            return
        if data is not None:
            self._keep(session.id, Snapshot(at.tick, at.seq, at.kept, data, announced=session.announced))

    def refused(self, error: BrayxError) -> None:
        """See `Service.refused`."""
        self.recorder.add("requests_refused", 1.0, label=error.code)

    def _refuse(self, reply: Reply, error: BrayxError) -> None:
        self.refused(error)
        reply(error)

    def gone(self, request: StepRequest) -> BrayxError:
        """What a request for a session that does not run any more is told, once; each time if it may be a repeat."""
        session = request.session
        reason = self._ended.pop(session, "")
        if reason == "moved" or (reason and may_be_repeat(request)):
            self._ended[session] = reason
        return _over(session, request.kind.value, reason)

    def end(self, session: Session, reason: str, *, counted: bool = False) -> None:
        """Ends a session once; its own task tells the actor, after the request in flight.

        Args:
            session: which.
            reason: why.
            counted: its end is, or will be, counted elsewhere.
        """
        if session.ended:
            return
        session.ended = reason
        self._forget(session)
        self._ended[session.id] = reason
        while len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        self._record()
        if not counted:
            self.recorder.add("sessions_ended", 1.0, label=reason)
        self.recorder.add("sessions_active", len(self._sessions))
        session.rouse()

    def _forget(self, session: Session) -> None:
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]

    def lose(self, sessions: Iterable[str]) -> None:
        """Ends sessions that are this table's no more, with reason ``lost``: its lease was over, and somebody has asked
        for them. Another replica goes on with them, or their loss has been told; either has been counted.
        """
        for session in [self._sessions[name] for name in sessions if name in self._sessions]:
            self.end(session, "lost", counted=True)

    def _turn_away(self, session: Session) -> None:
        """Answers what still waits in the inbox of a session that is over."""
        self._forget(session)
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        while session.inbox:
            entry = session.inbox.popleft()
            request = entry.request
            if entry.told is not None or request.kind is _CALL:
                continue
            if session.ended == "lost" and self._elsewhere is not None:
                self._elsewhere(request, entry.reply)
                continue
            if session.ended != "moved" and not may_be_repeat(request):
                self._ended.pop(session.id, None)
            self._refuse(entry.reply, _over(session.id, request.kind.value, session.ended))

    async def _finish(self, session: Session) -> None:
        """Ends a session that had begun: frees its id, tells its connection, then the actor."""
        moved = session.ended == "moved"
        if session.ended != "stop" and not moved:  # a stop has freed it before it was answered
            # The next request gets the reason only if no request has got it yet.
            await self._give_back(session.id, session.ended if session.id in self._ended else "stop")
        # A session that another replica took over counts as moved for the doors: their clients shall ask again.
        told = "moved" if session.ended == "lost" else session.ended
        self._tell_holder(session, session.holder, told)
        if moved:
            session.actor.on_moved()
            return
        try:
            async with asyncio.timeout(self._tick_timeout_s):
                await session.actor.on_end(session.ended)
        except TimeoutError:
            logger.error(
                "session %s: on_end(%s) took longer than %s s", session.id, session.ended, self._tick_timeout_s
            )
        except Exception:
            logger.exception("session %s: on_end(%s) raised", session.id, session.ended)

    async def _give_back(self, session: str, reason: str) -> None:
        """Gives the id back, unless it has been started anew here; an id that cannot be freed holds up nobody."""
        if session in self._sessions:
            return
        try:
            async with asyncio.timeout(self._tick_timeout_s):
                await self._release(session, reason)
                if not self._remembers:
                    self._ended.pop(session, None)
        except Exception as error:
            logger.warning("session %s: its id could not be freed: %s: %s", session, type(error).__name__, error)

    async def _sweep(self) -> None:
        """Looks for ticks past their deadline and for idle sessions, often enough to be late by a quarter at most."""
        shortest_s = min(self._tick_timeout_s, self._idle_timeout_s, self._reconnect_timeout_s or _MOST_SWEEP_S * 4)
        every_s = min(max(_LEAST_SWEEP_S, shortest_s / 4), _MOST_SWEEP_S)
        while True:
            due = _now() + every_s
            await asyncio.sleep(every_s)
            self._record()
            now = _now()
            if now - due > every_s:
                self._forgive(now - due, now)
            late, idle, gone = (
                now - limit for limit in (self._tick_timeout_s, self._idle_timeout_s, self._reconnect_timeout_s)
            )
            for task, session in list(self._tasks.items()):
                if session.began:
                    if session.began < late and not session.timed_out:
                        session.timed_out = True
                        task.cancel()
                elif session.inbox or session.ended:
                    continue
                elif session.left_at and session.left_at < gone and session.last_seen <= session.left_at:
                    self.end(session, "disconnect")
                elif session.last_seen < idle:
                    self.end(session, "idle")

    def _forgive(self, away_s: float, now: float) -> None:
        """While this process had no turn it could not hear its clients, so that is no silence of theirs."""
        for session in self._sessions.values():
            session.last_seen = min(session.last_seen + away_s, now)
            session.left_at = session.left_at and min(session.left_at + away_s, now)

    async def move(self, park: Callable[[str, Snapshot], Awaitable[None]]) -> None:
        """Hands sessions over whose actors can give a snapshot and of which no request waits; they end as ``moved``.

        Args:
            park: keeps an exact snapshot for whoever goes on with the session, its id included.
        """
        for session in list(self._sessions.values()):
            if not session.moving and not session.inbox and not session.began:
                session.moving = True
                session.inbox.append(Waiting(StepRequest(StepKind.CALL, session.id, b""), _nobody, 0.0))
                session.park = park
                session.rouse()

    async def _move(self, session: Session) -> None:
        """Between two requests: the session's state goes to where it can be taken up, and its task ends."""
        try:
            data = await self._guard(session, session.actor.snapshot(), "snapshot")
        except BrayxError as error:
            logger.warning("session %s: it cannot be moved: %s", session.id, error)
            return
        if data is None or session.ended or session.park is None:
            return
        try:
            at = session.ticks, session.seq, session.kept
            told = Snapshot(*at, data, exact=True, announced=session.announced, holder=session.holder)
            await session.park(session.id, told)
        except BrayxError as error:
            logger.warning("session %s: it could not be moved: %s", session.id, error)
            return
        self.end(session, "moved")

    async def close(self, reason: str = "drained", timeout_s: float = 10.0) -> None:
        """Ends every session with ``reason``, waits for their agents to be told, and takes no more."""
        self._closed = True
        for session in list(self._sessions.values()):
            self.end(session, reason)
        pending = {*self._tasks, *self._calls.tasks}
        if pending:
            _, late = await asyncio.wait(pending, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=_LAST_WORD_S)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._calls.close(reason, _LAST_WORD_S)


def may_be_repeat(request: StepRequest) -> bool:
    """Whether it may have been sent before, and its answer lost: clients send numbered ticks again, and stops."""
    return request.seq is not None or request.kind is StepKind.STOP


def _over(session: str, kind: str, reason: str) -> BrayxError:
    """What a request is told for a session that ended for ``reason``; empty: nobody knows of it."""
    if reason == "moved":
        return Overloaded(f"session {session!r} is between two replicas; try again", layer=BETWEEN)
    if reason not in ("", "stop"):
        return SessionLost(f"session {session!r} was ended here: {reason}", reason=reason)
    return SessionUnknown(f"{kind} for session {session!r}, which is not running: send step_kind start first")


def ending() -> ServiceFull:
    """The error for a start at a replica that is ending."""
    return ServiceFull("this replica is ending and takes no new sessions; try again")
