"""A session table for tests, and an actor that does what each body says."""

import asyncio
from collections.abc import Awaitable, Callable

from brayx.actor.actor import Actor
from brayx.actor.config import SessionConfig
from brayx.actor.ownership import Lease, Ownership, SessionSnapshot
from brayx.actor.service import Holder, Reply, into
from brayx.actor.table import MAX_WAITING, SessionTable
from brayx.errors import (
    BadBody,
    BrayxError,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.metrics import Recorder


class Script(Actor):
    """Does what the body says, and keeps what it saw."""

    hold_end = False

    def __init__(self) -> None:
        self.session = ""
        self.seen: list[bytes] = []
        self.reasons: list[str] = []
        self.missed_after: list[bytes] = []
        self.gate = asyncio.Event()

    async def start(self, session: str, body: bytes) -> bytes:
        self.session = session
        await self._do(body)
        return b"started"

    async def tick(self, body: bytes) -> bytes:
        await self._do(body)
        return self.session.encode() + b":" + body

    async def stop(self, body: bytes) -> bytes:
        await self._do(body)
        return b"stopped"

    def fallback(self, tick: int, body: bytes) -> bytes:
        if body == b"unreadable":
            raise BadBody("not that")
        return b"own" if body == b"wait" else b"own %d:%s" % (tick, body)

    async def missed(self) -> None:
        self.missed_after.append(self.seen[-1])

    async def skipped(self, ticks: int) -> None:
        self.seen.append(b"skipped %d" % ticks)

    async def snapshot(self) -> bytes:
        return b"|".join(self.seen)

    async def restore(self, session: str, snapshot: bytes) -> None:
        if not snapshot.startswith(b"|"):
            raise ValueError("cannot read that")
        self.session, self.seen = session, snapshot.split(b"|")

    call = tick

    async def on_end(self, reason: str) -> None:
        if self.hold_end:
            await self.gate.wait()
        self.reasons.append(reason)

    async def _do(self, body: bytes) -> None:
        if body == b"raise":
            raise ValueError("agent's own")
        if body == b"bad":
            raise BadBody("not that")
        if body in (b"wait", b"wait and raise"):
            await self.gate.wait()
        if body == b"wait and raise":
            raise ValueError("agent's own")
        self.seen.append(body)


class Shared(Ownership):
    """Sessions that other processes share: keeps what they are given, and claims and frees ids as a test says.

    Attributes:
        kept: snapshots, each with its session.
        handed_on: requests for sessions that another process has taken over.
    """

    shared = True

    def __init__(
        self,
        *,
        claim: Callable[[str], Awaitable[None]] | None = None,
        release: Callable[[str, str], Awaitable[None]] | None = None,
        lease: Lease | None = None,
    ) -> None:
        super().__init__(lease)
        self._claim = claim
        self._release = release
        self.kept: list[tuple[str, SessionSnapshot]] = []
        self.handed_on: list[StepRequest] = []

    async def claim(self, session: str) -> None:
        if self._claim is not None:
            await self._claim(session)

    async def release(self, session: str, reason: str) -> None:
        if self._release is not None:
            await self._release(session, reason)

    def keep(self, session: str, snapshot: SessionSnapshot) -> None:
        self.kept.append((session, snapshot))

    def hand_on(self, request: StepRequest, reply: Reply) -> None:
        self.handed_on.append(request)
        reply(b"from elsewhere")


class Bench:
    """A table, the actors it made, and short words for requests."""

    from_callback = False
    """Requests come as from a native port, out of a callback of the loop; else as from Serve, out of a task."""

    def __init__(
        self,
        *,
        recorder: Recorder | None = None,
        ownership: Ownership | None = None,
        max_waiting: int = MAX_WAITING,
        **options: object,
    ) -> None:
        self.actors: list[Script] = []
        self.recorder = recorder if recorder is not None else Recorder()
        config = SessionConfig(**{"show_errors": True, **options})  # type: ignore[arg-type]
        self.table = SessionTable(self._make, config, self.recorder, ownership, max_waiting)

    def step(self, request: StepRequest) -> Awaitable[bytes]:
        if not self.from_callback:
            return self.table.step(request)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()

        def reply(result: bytes | BrayxError) -> None:
            if isinstance(result, BrayxError):
                self.table.refused(result)
            into(answer)(result)

        loop.call_soon(self.table.submit, request, reply)
        return answer

    def _make(self) -> Script:
        self.actors.append(Script())
        return self.actors[-1]

    def number(self, seq: int, body: bytes, holder: Holder | None = None) -> Awaitable[bytes]:
        name, attached = (holder.name, holder.attached) if holder is not None else ("", False)
        return self.step(StepRequest(StepKind.TICK, "s", body, seq=seq, holder=name, attached=attached))

    def ask(self, kind: str, session: str = "s", body: bytes = b"") -> Awaitable[bytes]:
        return self.step(StepRequest(StepKind(kind), session, body))
