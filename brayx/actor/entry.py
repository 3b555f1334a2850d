"""One session as its table keeps it: its inbox, where it stands, and what it takes along when it moves.

Data and the waking up of its task, no more: what becomes of a session is the table's affair (`brayx.actor.session`).
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from brayx.actor.actor import Actor
from brayx.actor.eager import Rest
from brayx.actor.service import Reply
from brayx.gamecore.protocol import StepRequest

_now = time.monotonic


@dataclass(frozen=True)
class Snapshot:
    """What a session needs to go on elsewhere.

    Attributes:
        tick: how many ticks have been answered, which is the number of the next one if all are numbered.
        seq: number of the next numbered tick.
        kept: reply to the numbered tick before that; a repeat gets it.
        actor: what `Actor.snapshot` gave.
        exact: nothing has happened since it was taken: the session was moved, not lost.
        announced: its client had said at the start that it numbers its ticks.
        holder: name of the connection that held it; empty: none did. None: unknown, since it may have been taken over
            after the snapshot.
    """

    tick: int
    seq: int
    kept: bytes | None
    actor: bytes
    exact: bool = False
    announced: bool = False
    holder: str | None = None


class Position(NamedTuple):
    """Where a session stands after a tick; as in `Snapshot`."""

    tick: int
    seq: int
    kept: bytes | None


class Waiting:
    """A request in a session's inbox."""

    __slots__ = ("arrived", "reply", "request", "told")

    def __init__(self, request: StepRequest, reply: Reply, arrived: float) -> None:
        self.request = request
        self.reply = reply
        self.arrived = arrived
        self.told: Position | None = None
        """Of a tick that the fallback has answered meanwhile, and that the actor has yet to run."""


class Session:
    """One session. The table creates and ends it; doors never see it.

    Args:
        session: its id.
        context: context variables of its task.
        announced: its client has said that it numbers its ticks.
        holder: name of the connection that holds it; empty: none. None: unknown, the first that asks for it.
    """

    __slots__ = (
        "actor",
        "announced",
        "began",
        "context",
        "eager",
        "eager_turn",
        "ended",
        "holder",
        "id",
        "inbox",
        "kept",
        "last_reply",
        "last_seen",
        "left_at",
        "moving",
        "park",
        "rest",
        "seq",
        "skipped",
        "skipped_to",
        "task",
        "ticks",
        "timed_out",
        "timer",
        "unanswered",
        "wake",
    )

    actor: Actor
    task: asyncio.Task[None]

    def __init__(self, session: str, context: contextvars.Context, announced: bool, holder: str | None) -> None:
        self.id = session
        self.holder = holder
        self.announced = announced
        self.inbox: deque[Waiting] = deque()
        self.wake: asyncio.Future[None] | None = None
        self.context = context
        self.rest: Rest | None = None
        self.eager = 0
        self.eager_turn = -1
        self.began = 0.0
        self.timed_out = False
        self.last_seen = _now()
        self.left_at = 0.0
        self.moving = False
        self.park: Callable[[str, Snapshot], Awaitable[None]] | None = None
        self.ended = ""
        self.ticks = 0
        self.seq = 0
        self.kept: bytes | None = None
        self.last_reply: bytes | None = None
        self.unanswered = True
        self.skipped = 0
        self.skipped_to: Position | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def numbered(self) -> bool:
        """Whether its client numbers its ticks, and so can find it again over another connection."""
        return self.seq > 0 or self.announced

    def put(self, request: StepRequest, reply: Reply) -> None:
        """Adds to the inbox and wakes the task up."""
        self.inbox.append(Waiting(request, reply, _now()))
        self.rouse()

    def rouse(self) -> None:
        """Wakes the task up."""
        wake = self.wake
        if wake is not None:
            self.wake = None
            if not wake.done():
                wake.set_result(None)
