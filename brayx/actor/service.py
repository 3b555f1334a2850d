"""The interface between a door and the replica behind it. Knows nothing of any door, nor of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from brayx.actor.doors.browser import Cors
from brayx.errors import BadBody, BrayxError, OutOfSequence
from brayx.gamecore.protocol import StepRequest
from brayx.gamecore.transports.base import SESSION_KEEPING
from brayx.logs import limited

if TYPE_CHECKING:
    from brayx.actor.holders import Holder

logger = limited(__name__)

Reply = Callable[[bytes | BrayxError], None]
"""Called once with a request's result or error, in the loop's thread. Must not raise."""


class Service:
    """Answers requests. A service implements `step` or `submit`; with `submit` a tick needs no task of its own.

    Attributes:
        cors: which origins' scripts may call its HTTP doors.
    """

    cors = Cors()

    def submit(self, request: StepRequest, reply: Reply, *, forwarded: bool = False, let_in: bool = False) -> None:
        """Takes a request; ``reply`` is called once with its result or error, perhaps before this returns.

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
        try:
            return await waiter
        except BrayxError as error:
            if not forwarded:
                self.refused(error)
            raise

    def holder(self, on_end: Callable[[str], None]) -> Holder:
        """Registers a connection that is going to hold a session; its requests carry the holder's name.

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
        """Counts an error that a client gets. Whoever gives it to the client calls this: a door, and `step`.

        An error that a peer gets for one of its clients is counted there.
        """

    def status(self) -> dict[str, Any]:
        """JSON facts about the replica."""
        raise NotImplementedError


def into(waiter: asyncio.Future[bytes]) -> Reply:
    """A reply that fulfils a future; it does nothing if the future is done already, as when it was cancelled."""

    def reply(result: bytes | BrayxError) -> None:
        if waiter.done():
            return
        if isinstance(result, BrayxError):
            waiter.set_exception(result)
        else:
            waiter.set_result(result)

    return reply


def told(error: Exception) -> BrayxError:
    """The error that a client gets for an exception: a typed one unchanged, else one with its type; the log has it."""
    if isinstance(error, BrayxError):
        return error
    logger.error("a request failed", exc_info=error)
    return BrayxError(f"the service failed with {type(error).__name__}; its log says more")


def leaves_running(error: BrayxError) -> bool:
    """Whether the session still runs after the service gave this error for a tick or a stop."""
    return isinstance(error, (*SESSION_KEEPING, BadBody))


def attaches(error: BrayxError) -> bool:
    """Whether a connection whose first tick or stop got this error holds the session all the same."""
    return leaves_running(error) and not isinstance(error, OutOfSequence)


def _result(task: asyncio.Task[bytes]) -> bytes | BrayxError:
    if task.cancelled():
        return BrayxError("the request was cancelled: this replica is ending")
    error = task.exception()
    if error is None:
        return task.result()
    return told(error) if isinstance(error, Exception) else BrayxError("the request was cancelled")
