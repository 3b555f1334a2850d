"""The session table: starts, resumes and ends the sessions of this process.

A door submits a request and is called back with bytes or a typed error. `brayx.actor.session` handles requests within
a session. A session ends in exactly one place (`Session.end`), for any cause: a stop, an exception of an agent, a
client that left, idleness, or the end of the process. Pure asyncio: no Ray, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import brayx.clock as clock
from brayx.actor.actor import Actor
from brayx.actor.config import SessionConfig
from brayx.actor.deadlines import Sweeper, TimedSession
from brayx.actor.ends import Ends, may_be_repeat, over, start_refused
from brayx.actor.ownership import Holders, Ownership, Park, SessionSnapshot
from brayx.actor.service import Holder, Reply, Service
from brayx.actor.session import Session, SessionServices
from brayx.actor.tick_times import TickTimes
from brayx.errors import (
    BrayxError,
    DeadlineExceeded,
    ProtocolError,
    QueueFull,
    ServiceFull,
    SessionExists,
    SessionLost,
    SessionUnknown,
)
from brayx.faults import report
from brayx.gamecore.protocol import PROBE, StepKind, StepRequest
from brayx.logs import limited, one_line
from brayx.metrics import MAX_NOTE, Recorder

logger = limited(__name__)

MAX_WAITING = 16
"""Requests of one session that may wait for their turn."""
_LAST_WORD_S = 1.5
_TICK, _STOP, _START = StepKind.TICK, StepKind.STOP, StepKind.START


class SessionTable(Service):
    """All sessions of one process.

    Args:
        make_actor: makes the actor of a new session.
        config: the actor's options.
        recorder: counts ticks, sessions and refusals.
        ownership: ownership of sessions; None: this process owns all.
        max_waiting: requests of one session that may wait for their turn; further ones get `QueueFull`.
        admit: as for `brayx.actor.serving.Runtime`.
    """

    def __init__(
        self,
        make_actor: Callable[[], Actor],
        config: SessionConfig | None = None,
        recorder: Recorder | None = None,
        ownership: Ownership | None = None,
        max_waiting: int = MAX_WAITING,
        admit: Callable[[StepRequest], Awaitable[None]] | None = None,
    ) -> None:
        self.recorder: Recorder = recorder if recorder is not None else Recorder()
        self._make_actor = make_actor
        self._admit = admit
        self._ownership = ownership if ownership is not None else Ownership()
        self._services = SessionServices(
            config=config if config is not None else SessionConfig(),
            max_waiting=max_waiting,
            recorder=self.recorder,
            times=TickTimes(self.recorder),
            ownership=self._ownership,
            holders=Holders(self._ownership),
            on_end=self._on_end,
            free_id=self._free_id,
        )
        self._sessions: dict[str, Session] = {}
        self._living: dict[Session, asyncio.Task[None]] = {}
        self._ends = Ends()
        self._calls = _StatelessCalls(make_actor, self._services.config)
        self._sweeper = Sweeper(self._living, self._services)
        self._sweeping: asyncio.Task[None] | None = None
        self.is_shut = False
        """No new session starts."""
        self._closed = False
        # A session does not run in the context of the request that started it: Ray would attribute its calls to that
        # request, and cancel them when the client leaves.
        self._context = contextvars.copy_context()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def get(self, session: str) -> Session | None:
        """The session of that id, if it runs: one that is about to start is not open yet."""
        entered = self._sessions.get(session)
        return entered if entered is not None and entered.is_open else None

    @property
    def sessions(self) -> list[str]:
        """Ids of the running sessions."""
        return list(self._sessions)

    def status(self) -> dict[str, Any]:
        """Number of running sessions."""
        return {"sessions": len(self._sessions)}

    def refused(self, error: BrayxError) -> None:
        """See `Service.refused`."""
        if isinstance(error, SessionUnknown) and PROBE in error.message:
            return
        note = ""
        if isinstance(error, ProtocolError):  # others are counted where they come
            where = "".join(f" ({line})" for line in getattr(error, "__notes__", []))
            note = one_line(error.message + where)
        self.recorder.add("requests_refused", 1.0, label=error.code, note=note[:MAX_NOTE])

    def holder(self, on_end: Callable[[str], None], address: str = "") -> Holder:
        """See `Service.holder`; the name starts with ``address``."""
        return self._services.holders.add(on_end, address)

    def end_holder(self, holder: str, reason: str) -> None:
        """Notifies a connection of this process that it lost its session, if it still exists."""
        self._services.holders.end(holder, reason)

    async def disconnect(self, session: str, holder: str = "", *, for_good: bool = False) -> None:
        """See `Service.disconnect`."""
        left = self._sessions.get(session)
        if left is None or left.holder != holder:
            return
        left.holder = ""
        if left.numbered and not for_good and self._services.config.reconnect_timeout_s > 0:
            left.left_at = clock.now()
        else:
            left.end("disconnect")

    def withdraw(self, session: str, holder: str = "") -> None:
        """See `Service.withdraw`."""
        held = self._sessions.get(session)
        if held is not None and held.is_held and held.holder == holder:
            held.ended = "disconnect"
            self._forget(held)  # now, so that the client's next start may have the id
            self._living[held].cancel()

    def submit(self, request: StepRequest, reply: Reply, *, let_in: bool = False) -> None:
        """See `Service.submit`."""
        kind = request.kind
        if kind is _TICK or kind is _STOP:
            session = self._sessions.get(request.session)
            if session is not None:
                session.take(request, reply)
            else:
                reply(self._ends.error(request))
        elif kind is _START:
            self._start(request, reply)
        else:
            self._calls.submit(request.body, reply)

    def submit_forwarded(self, request: StepRequest, reply: Reply) -> None:
        """Submits a request that another process forwarded; tells the session's actor if it is a tick."""
        session = self.get(request.session)
        if session is not None and request.kind is _TICK:
            session.actor.forwarded()
        self.submit(request, reply)

    def is_ending(self, session: str) -> bool:
        """Whether a session of that id is ending here and its id is not free yet."""
        return self._ends.is_ending(session)

    def _start(self, request: StepRequest, reply: Reply) -> None:
        name, most = request.session, self._services.config.actors_per_worker
        if name in self._sessions:
            reply(SessionExists(f"session {name!r} is already running: stop it first, or use another id"))
        elif request.seq not in (None, 0):
            reply(ProtocolError(f"a start has seq {request.seq}, expected 0, or none if ticks are not numbered"))
        elif self.is_shut:
            reply(start_refused())
        elif len(self._sessions) >= most:
            reply(ServiceFull(self._full()))
        elif len(self._living) >= 2 * most:
            reply(ServiceFull(f"{len(self._living) - len(self)} sessions are ending here, at most {most} may"))
        else:
            session = self._make_session(name, announced=request.seq is not None, holder=request.holder)
            self._enter(session, partial(self._open, session, request, reply))

    def _full(self) -> str:
        most = self._services.config.actors_per_worker
        full = f"{len(self)} sessions run here, at most {most} may (actor.actors_per_worker)"
        return "; ".join(filter(None, (full, self._sweeper.silence)))

    def resume(self, name: str, snapshot: SessionSnapshot, request: StepRequest, reply: Reply) -> None:
        """Resumes a session that ran in another process; this process has claimed its id.

        Args:
            name: id of the session.
            snapshot: newest snapshot of the session.
            request: first request here: applied if the snapshot is exact, else answered with `SessionResumed`. A
                refused request still resumes the session, for its holder.
            reply: as for `submit`; gets `SessionLost` if the actor cannot be restored.
        """
        if name in self._sessions:
            self.submit(request, reply)
            return
        if self._closed:
            reply(over(name, request.kind.value, "moved"))
            return
        holder = (request.holder or None) if snapshot.holder is None else snapshot.holder
        session = self._make_session(name, announced=snapshot.announced, holder=holder)
        session.ticks, session.seq, session.kept = snapshot.tick, snapshot.seq, snapshot.kept
        refusal = session.take_over(request) if request.holder != holder else None
        if refusal is not None:
            reply(refusal)
        first = request if refusal is None else None
        self._enter(session, partial(self._restore, session, snapshot, first, reply))

    def _make_session(self, name: str, *, announced: bool, holder: str | None) -> Session:
        kind = Session if self._services.config.tick_deadline_ms is None else TimedSession
        return kind(name, self._services, self._context.copy(), announced=announced, holder=holder)

    def _enter(self, session: Session, opening: Callable[[], Awaitable[bool]]) -> None:
        """Runs a session in a task.

        Args:
            session: the session.
            opening: makes its actor and answers the request that opened it; False: it failed, and the client has the
                error.
        """
        self._sessions[session.id] = session
        live = self._live(session, opening)
        self._living[session] = asyncio.get_running_loop().create_task(live, context=session.context)
        self._living[session].add_done_callback(lambda _: self._living.pop(session))
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweeper.run())

    async def _live(self, session: Session, opening: Callable[[], Awaitable[bool]]) -> None:
        """A session's task, from its opening to its end."""
        try:
            if not await opening():
                return
        except asyncio.CancelledError:
            return  # ended before it began
        finally:
            if not session.is_open:
                self._forget(session)
                session.turn_away(self._ends)
        try:
            await session.serve()
        except asyncio.CancelledError:
            session.end("drained")
        except Exception:
            logger.exception("session %s: its task failed", session.id)
            session.end("error")
        finally:
            session.turn_away(self._ends)
        await self._finish(session)

    async def _open(self, session: Session, request: StepRequest, reply: Reply) -> bool:
        """Starts a session."""
        try:
            await self._ownership.claim(session.id)
        except BaseException as error:
            self._forget(session)
            reply(session.client_error(error, "its id could not be claimed"))
            if not isinstance(error, Exception):
                raise
            return False
        try:
            if self._admit is not None:
                session.is_held = True
                await self._admit(request)
                session.is_held = False
            actor = self._make_actor()
            if request.opponent:
                actor.ask(request.opponent)
            if request.record:
                actor.record()
            if request.traceparent:
                actor.trace(request.traceparent)
            answer = await session.guard(actor.start(session.id, request.body), "start")
        except BaseException as error:
            self._forget(session)
            await self._free_id(session.id, "stop")
            reply(session.client_error(error, "the actor could not be made"))
            if not isinstance(error, Exception):
                raise
            return False
        self._opened(session, actor)
        self.recorder.add("sessions_started", 1.0)
        if not session.lease.is_over or await session.may_answer(request, reply):
            reply(answer)
        return True

    async def _restore(
        self, session: Session, snapshot: SessionSnapshot, request: StepRequest | None, reply: Reply
    ) -> bool:
        """Resumes a session; a ``request`` of None was refused."""
        try:
            actor = self._make_actor()
            await session.guard(actor.restore(session.id, snapshot.actor), "restore")
        except BaseException as error:
            self._forget(session)
            if not session.ended:
                self.recorder.add("sessions_ended", 1.0, label="lost")
            await self._free_id(session.id, "owner_died" if request is None or may_be_repeat(request) else "stop")
            why = session.client_error(error, "the actor could not be restored")
            if request is not None:
                reply(SessionLost(f"session {session.id!r} was lost: {why}", reason="owner_died"))
            if not isinstance(error, Exception):
                raise
            return False
        self._opened(session, actor)
        self.recorder.add("sessions_resumed", 1.0)
        if request is not None:
            session.after_resume(snapshot, request, reply)
        return True

    def _opened(self, session: Session, actor: Actor) -> None:
        session.actor = actor
        session.last_seen = clock.now()
        if not session.ended:
            self._ends.forget(session.id)
        self.recorder.add("sessions_active", len(self._sessions))

    def _on_end(self, session: Session) -> None:
        self._forget(session)
        self._ends.add(session.id, session.ended)
        self._services.times.flush()
        if session.ended != "lost":  # another process has counted it
            self.recorder.add("sessions_ended", 1.0, label=session.ended)
        self.recorder.add("sessions_active", len(self._sessions))

    def _forget(self, session: Session) -> None:
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]

    async def _finish(self, session: Session) -> None:
        """Ends a session: frees its id, notifies its connection, then the actor."""
        moved = session.ended == "moved"
        if session.ended != "stop" and not moved:  # a stop frees it before its reply
            # The next request gets the reason only if no request has got it yet.
            await self._free_id(session.id, session.ended if session.id in self._ends else "stop")
        # For doors a session that another process took over has moved, so that their clients try again.
        self._services.holders.notify(session.holder, "moved" if session.ended == "lost" else session.ended)
        if moved:
            session.actor.on_moved()
            return
        timeout_s = self._services.config.tick_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await session.actor.on_end(session.ended)
        except TimeoutError:
            logger.error("session %s: on_end(%s) took longer than %s s", session.id, session.ended, timeout_s)
        except Exception:
            logger.exception("session %s: on_end(%s) raised", session.id, session.ended)

    async def _free_id(self, session: str, reason: str) -> None:
        """Frees an id, unless it was started again here; a failure is logged only."""
        if session in self._sessions:
            return
        try:
            async with asyncio.timeout(self._services.config.tick_timeout_s):
                await self._ownership.release(session, reason)
                if self._ownership.shared:
                    self._ends.forget(session)
        except Exception as error:
            logger.warning("session %s: its id could not be released: %s: %s", session, type(error).__name__, error)

    def end(self, session: str, reason: str) -> bool:
        """Ends a session; False: there is none of that id."""
        if session not in self._sessions:
            return False
        self._sessions[session].end(reason)
        return True

    def lose(self, sessions: Iterable[str]) -> None:
        """Ends sessions with reason ``lost``: the lease expired, and other processes may have them."""
        for session in [self._sessions[name] for name in sessions if name in self._sessions]:
            session.end("lost")

    def move(self, park: Park, most: int | None = None) -> None:
        """Begins to hand over idle sessions whose actors support snapshots; they end as ``moved``.

        Args:
            park: as for `Session.move`.
            most: how many; None: all.
        """
        idle = (session for session in list(self._sessions.values()) if session.move(park))
        for _ in itertools.islice(idle, most):
            pass

    async def close(self, reason: str = "drained", timeout_s: float = 10.0) -> None:
        """Ends every session with ``reason``, waits for their agents, and takes no more."""
        self._closed = self.is_shut = True
        for session in list(self._sessions.values()):
            session.end(reason)
        pending = {*self._living.values(), *self._calls.tasks}
        if pending:
            _, late = await asyncio.wait(pending, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=_LAST_WORD_S)
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self._calls.close(reason, _LAST_WORD_S)


class _StatelessCalls:
    """A replica's stateless calls: one actor answers all of them, a bounded number at once, each with a deadline.

    Args:
        make_actor: makes the actor that answers the calls, at the first call.
        config: the actor's options: as many calls run at once as sessions may; further ones get `QueueFull`.

    Attributes:
        tasks: the running calls.
    """

    def __init__(self, make_actor: Callable[[], Actor], config: SessionConfig) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._make_actor = make_actor
        self._most = config.actors_per_worker
        self._timeout_s = config.tick_timeout_s
        self._show_errors = bool(config.show_errors)
        self._actor: Actor | None = None

    def submit(self, body: bytes, reply: Reply) -> None:
        """Starts a call; ``reply`` gets its result or error."""
        if len(self.tasks) >= self._most:
            reply(QueueFull(f"this replica answers {len(self.tasks)} stateless calls, at most {self._most} at once"))
            return
        task = asyncio.get_running_loop().create_task(self._answer(body, reply))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, body: bytes, reply: Reply) -> None:
        try:
            if self._actor is None:
                self._actor = self._make_actor()
            async with asyncio.timeout(self._timeout_s):
                reply(await self._actor.call(body))
        except TimeoutError:
            message = f"the actor took longer than {self._timeout_s} s for a stateless call"
            reply(DeadlineExceeded(message, layer="actor"))
        except Exception as error:
            reply(report(error, "the actor raised in call", "stateless call", show_text=self._show_errors))

    async def close(self, reason: str, timeout_s: float) -> None:
        """Tells the actor, after the last call."""
        if self._actor is not None:
            actor, self._actor = self._actor, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await actor.on_end(reason)
