"""What a door needs of the replica behind it. Knows nothing of any door, nor of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from brayx.errors import BadBody, BrayxError
from brayx.gamecore.protocol import StepRequest
from brayx.gamecore.transports.base import SESSION_KEEPING
from brayx.logs import limited

logger = limited(__name__)

Reply = Callable[[bytes | BrayxError], None]
"""Told once what a request came to, in the loop's thread. Must not raise."""


class Holder:
    """A connection that holds a session, of the doors where one connection is one session.

    Attributes:
        name: unique among the connections of all replicas.
        attached: the session has been this connection's; its door sets it.
        ended: why it is not any more; empty: it is, as far as is known here.
    """

    def __init__(self, name: str, on_end: Callable[[str], None]) -> None:
        self.name = name
        self.attached = False
        self.ended = ""
        self._on_end = on_end

    def end(self, reason: str) -> None:
        """Tells the connection that the session is its own no more: it has ended, or another has ``taken`` it."""
        self.ended = reason
        self._on_end(reason)


class Service:
    """What answers. A service implements one of `step` and `submit`; `submit` spares a tick a task of its own."""

    def submit(self, request: StepRequest, reply: Reply, *, forwarded: bool = False, let_in: bool = False) -> None:
        """Takes a request; ``reply`` is called once with what it came to, perhaps before this returns.

        Args:
            request: what a client asks.
            reply: gets the answer's body or the typed error.
            forwarded: it comes from a peer that took this replica for the session's owner: it is not passed on again.
            let_in: it comes over a connection whose first request has shown its credentials.
        """
        task = asyncio.get_running_loop().create_task(self.step(request, forwarded=forwarded, let_in=let_in))
        task.add_done_callback(lambda done: reply(_result(done)))

    async def step(self, request: StepRequest, *, forwarded: bool = False, let_in: bool = False) -> bytes:
        """As `submit`, for who waits. Being cancelled cancels the waiting, not the request.

        Raises:
            BrayxError: the typed error that the client gets.
        """
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.submit(request, into(waiter), forwarded=forwarded, let_in=let_in)
        return await waiter

    def holder(self, on_end: Callable[[str], None]) -> Holder:
        """A connection that is going to hold a session; its requests carry the holder's name.

        Args:
            on_end: see `Holder.end`.
        """
        raise NotImplementedError

    async def disconnect(self, session: str, holder: str = "", *, for_good: bool = False) -> None:
        """The connection that held ``session`` is gone: ends it with reason ``disconnect``.

        One whose ticks are numbered has some seconds to come back over another connection, unless its client has
        closed the connection in order (``for_good``). Nothing happens if ``holder`` does not hold the session any more.
        """
        raise NotImplementedError

    def refused(self, error: BrayxError) -> None:
        """Counts an error that a door has answered with itself; what `submit` refuses, the service has counted."""

    def status(self) -> dict[str, Any]:
        """JSON facts about the replica."""
        raise NotImplementedError


def into(waiter: asyncio.Future[bytes]) -> Reply:
    """The reply that fulfils a future; one that nobody waits for any more is let go."""

    def reply(result: bytes | BrayxError) -> None:
        if waiter.done():
            return
        if isinstance(result, BrayxError):
            waiter.set_exception(result)
        else:
            waiter.set_result(result)

    return reply


def told(error: Exception) -> BrayxError:
    """What a client is told of an exception: a typed one as it is, of any other that there was one; the log has it."""
    if isinstance(error, BrayxError):
        return error
    logger.error("a request failed", exc_info=error)
    return BrayxError(f"the service failed with {type(error).__name__}; its log says more")


def leaves_running(error: BrayxError) -> bool:
    """Whether an error that the service gave for a tick or a stop says that the session runs, and goes on."""
    return isinstance(error, (*SESSION_KEEPING, BadBody))


def _result(task: asyncio.Task[bytes]) -> bytes | BrayxError:
    if task.cancelled():
        return BrayxError("the request was cancelled: this replica is ending")
    error = task.exception()
    if error is None:
        return task.result()
    return told(error) if isinstance(error, Exception) else BrayxError("the request was cancelled")
