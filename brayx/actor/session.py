"""The session table: which sessions run here, one owner each, their requests in order, their end told once.

Pure asyncio: no Ray, no HTTP. A door hands in a `StepRequest` and gets bytes or a typed error; the directory of other
replicas is reached through the two callables ``claim`` and ``release``. A session ends in exactly one place
(`SessionTable.end`), whatever ended it: a stop, an agent that raised, a client that went away, idleness, or the
replica's own end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

from brayx.actor.actor import Actor
from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
    DeadlineExceeded,
    QueueFull,
    ServiceFull,
    SessionExists,
    SessionLost,
    SessionUnknown,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.metrics import Recorder, Sink

logger = logging.getLogger(__name__)

_REMEMBERED_ENDS = 4096


async def _free(session: str) -> None:
    """The claim and release of a table that stands alone."""


class Session:
    """One running session. The table makes and ends it; doors see only `on_end`."""

    __slots__ = ("actor", "ended", "freed", "id", "last_seen", "lock", "on_end", "waiting")

    def __init__(self, session: str, actor: Actor, now: float) -> None:
        self.id = session
        self.actor = actor
        self.lock = asyncio.Lock()
        self.waiting = 0
        self.last_seen = now
        self.ended = False
        self.freed = asyncio.Event()
        self.on_end: list[Callable[[str], None]] = []


class SessionTable:
    """All sessions of one replica.

    Args:
        make_actor: makes the actor of a new session.
        max_sessions: further starts are refused with `ServiceFull`.
        max_waiting: requests of one session that may wait for their turn; further ones get `QueueFull`.
        idle_timeout_s: a session without a request for this long ends with reason ``idle``.
        tick_timeout_s: deadline of one start, tick or stop inside the actor; past it the session ends.
        recorder: where ticks, sessions and refusals are counted.
        claim: makes the session id this replica's, or raises `SessionExists`.
        release: frees the id.
    """

    def __init__(
        self,
        make_actor: Callable[[], Actor],
        *,
        max_sessions: int = 256,
        max_waiting: int = 16,
        idle_timeout_s: float = 60.0,
        tick_timeout_s: float = 10.0,
        recorder: Sink | None = None,
        claim: Callable[[str], Awaitable[None]] = _free,
        release: Callable[[str], Awaitable[None]] = _free,
    ) -> None:
        self.recorder: Sink = recorder if recorder is not None else Recorder()
        self._make_actor = make_actor
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self._idle_timeout_s = idle_timeout_s
        self._tick_timeout_s = tick_timeout_s
        self._claim = claim
        self._release = release
        self._sessions: dict[str, Session] = {}
        self._starting: set[str] = set()
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._endings: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._stateless: Actor | None = None
        self._closed = False

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

    async def step(self, request: StepRequest) -> bytes:
        """Answers a request.

        Raises:
            BrayxError: the typed error the client gets; it is counted, and the session has ended if it had to.
        """
        try:
            if request.kind is StepKind.TICK:
                began = time.perf_counter()
                reply = await self._tick(request.session, request.body)
                self.recorder.add("ticks", 1.0)
                self.recorder.add("tick_seconds", time.perf_counter() - began)
                return reply
            if request.kind is StepKind.START:
                return await self._start(request.session, request.body)
            if request.kind is StepKind.STOP:
                return await self._stop(request.session, request.body)
            return await self._call(request.body)
        except BrayxError as error:
            self.recorder.add("requests_refused", 1.0, label=error.code)
            raise

    async def _start(self, session: str, body: bytes) -> bytes:
        if session in self._sessions or session in self._starting:
            raise SessionExists(f"session {session!r} is already running: stop it first, or use another id")
        if self._closed or len(self._sessions) + len(self._starting) >= self._max_sessions:
            raise ServiceFull(f"this replica runs {len(self._sessions)} sessions, at most {self._max_sessions}")
        self._starting.add(session)
        try:
            await self._claim(session)
            try:
                actor = self._make_actor()
                reply = await self._guard(actor.start(session, body), session, "start")
            except BaseException:
                await self._give_back(session)
                raise
            self._sessions[session] = Session(session, actor, time.monotonic())
        finally:
            self._starting.discard(session)
        self._ended.pop(session, None)
        self.recorder.add("sessions_started", 1.0)
        self.recorder.add("sessions_active", len(self._sessions))
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        return reply

    async def _tick(self, session: str, body: bytes) -> bytes:
        entry = self._find(session, "tick")
        if entry.lock.locked() or entry.waiting:
            return await self._queue(entry, entry.actor.tick, body, "tick")
        async with entry.lock:
            if entry.ended:
                raise self._gone(session, "tick")
            return await self._run(entry, entry.actor.tick(body), "tick")

    async def _queue(self, entry: Session, work: Callable[[bytes], Awaitable[bytes]], body: bytes, kind: str) -> bytes:
        """A request that came while another of its session runs: waits its turn, in order of arrival."""
        if entry.waiting >= self._max_waiting:
            raise QueueFull(f"session {entry.id!r} has {entry.waiting} requests waiting, at most {self._max_waiting}")
        entry.waiting += 1
        try:
            async with entry.lock:
                if entry.ended:
                    raise self._gone(entry.id, kind)
                return await self._run(entry, work(body), kind)
        finally:
            entry.waiting -= 1

    async def _stop(self, session: str, body: bytes) -> bytes:
        entry = self._find(session, "stop")
        reply = await self._queue(entry, entry.actor.stop, body, "stop")
        self.end(entry, "stop")
        await entry.freed.wait()
        return reply

    async def _call(self, body: bytes) -> bytes:
        if self._stateless is None:
            self._stateless = self._make_actor()
        return await self._guard(self._stateless.call(body), "", "call")

    async def _run(self, entry: Session, work: Awaitable[bytes], kind: str) -> bytes:
        """Runs one request of a session; whatever leaves the agents in doubt ends the session."""
        try:
            reply = await self._guard(work, entry.id, kind)
        except BadBody:
            entry.last_seen = time.monotonic()
            raise
        except asyncio.CancelledError:
            self.end(entry, "disconnect")
            raise
        except BrayxError:
            self.end(entry, "error")
            raise
        entry.last_seen = time.monotonic()
        return reply

    async def _guard(self, work: Awaitable[bytes], session: str, kind: str) -> bytes:
        try:
            async with asyncio.timeout(self._tick_timeout_s):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(
                f"the actor took longer than {self._tick_timeout_s} s for {kind} of session {session!r}", layer="actor"
            ) from None
        except AgentError as error:
            logger.error("session %s: %s", session, error, exc_info=error.__cause__)
            raise
        except BrayxError:
            raise
        except Exception as error:
            logger.exception("session %s: the actor raised in %s", session, kind)
            raise AgentError(f"the actor raised in {kind}: {type(error).__name__}: {error}") from error

    def _find(self, session: str, kind: str) -> Session:
        entry = self._sessions.get(session)
        if entry is None:
            raise self._gone(session, kind)
        return entry

    def _gone(self, session: str, kind: str) -> BrayxError:
        """What a request for a session that does not run any more is told."""
        reason = self._ended.pop(session, "")
        if reason not in ("", "stop"):
            return SessionLost(f"session {session!r} was ended here: {reason}", reason=reason)
        return SessionUnknown(f"{kind} for session {session!r}, which is not running: send step_kind start first")

    def end(self, entry: Session, reason: str) -> None:
        """Ends a session once; its actor is told in a task of the table's own, after the request in flight."""
        if entry.ended:
            return
        entry.ended = True
        self._sessions.pop(entry.id, None)
        self._ended[entry.id] = reason
        while len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        self.recorder.add("sessions_ended", 1.0, label=reason)
        self.recorder.add("sessions_active", len(self._sessions))
        task = asyncio.create_task(self._finish(entry, reason))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    def lose(self, sessions: Iterable[str]) -> None:
        """Ends sessions that another replica has taken over, with reason ``lost``."""
        for entry in [self._sessions[session] for session in sessions if session in self._sessions]:
            self.end(entry, "lost")

    async def _finish(self, entry: Session, reason: str) -> None:
        try:
            await self._give_back(entry.id)
        finally:
            entry.freed.set()
        for callback in entry.on_end:
            try:
                callback(reason)
            except Exception:
                logger.exception("session %s: a watcher of its end raised", entry.id)
        try:
            async with asyncio.timeout(self._tick_timeout_s), entry.lock:
                await entry.actor.on_end(reason)
        except TimeoutError:
            logger.error("session %s: on_end(%s) took longer than %s s", entry.id, reason, self._tick_timeout_s)
        except Exception:
            logger.exception("session %s: on_end(%s) raised", entry.id, reason)

    async def _give_back(self, session: str) -> None:
        """Gives the id back; a session that ends is not held up by an id that cannot be freed."""
        try:
            async with asyncio.timeout(self._tick_timeout_s):
                await self._release(session)
        except Exception as error:
            logger.warning("session %s: its id could not be freed: %s: %s", session, type(error).__name__, error)

    async def _reap(self) -> None:
        """Ends idle sessions; looks often enough that none outlives its limit by more than a quarter."""
        while True:
            await asyncio.sleep(min(self._idle_timeout_s / 4, 5.0))
            limit = time.monotonic() - self._idle_timeout_s
            for entry in [e for e in self._sessions.values() if e.last_seen < limit and not e.lock.locked()]:
                self.end(entry, "idle")

    async def close(self, reason: str = "drained", timeout_s: float = 10.0) -> None:
        """Ends every session with ``reason``, waits for their agents to be told, and takes no more."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
        for entry in list(self._sessions.values()):
            self.end(entry, reason)
        if self._endings:
            await asyncio.wait(self._endings, timeout=timeout_s)
