"""The interface between a door and the replica behind it. Knows nothing of any door, nor of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from brayx.errors import BadBody, BrayxError, OutOfSequence
from brayx.gamecore.browser import Cors, Hosts
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import SESSION_KEEPING
from brayx.logs import limited

logger = limited(__name__)

Reply = Callable[[bytes | BrayxError], None]
"""Called once with a request's result or error, in the loop's thread. Must not raise."""


class Holder:
    """A connection that holds a session, at a door where one connection is one session.

    Attributes:
        name: unique among the connections of all processes.
        attached: this connection has held the session; its door sets it.
        ended: why it no longer holds the session; empty: it does, as far as this process knows.
    """

    def __init__(self, name: str, on_end: Callable[[str], None]) -> None:
        self.name = name
        self.attached = False
        self.ended = ""
        self._on_end = on_end

    def end(self, reason: str) -> None:
        """Notifies the connection that its session has ended, or that another connection has ``taken`` it."""
        self.ended = reason
        self._on_end(reason)


class Service:
    """Answers requests. With `submit`, a tick needs no task.

    Attributes:
        cors: origins whose scripts may call its HTTP doors.
        hosts: host names that its HTTP doors answer to.
    """

    cors = Cors()
    hosts = Hosts()

    def submit(self, request: StepRequest, reply: Reply, *, let_in: bool = False) -> None:
        """Takes a request; ``reply`` is called once with its result or error, perhaps before this returns.

        Args:
            request: the client's request.
            reply: gets the answer's body or the typed error.
            let_in: an earlier request of its connection had valid credentials.
        """
        raise NotImplementedError

    async def step(self, request: StepRequest, *, let_in: bool = False) -> bytes:
        """`submit` as a coroutine. Cancelling it cancels the wait, not the request, except for a start, see `withdraw`.

        Raises:
            BrayxError: the typed error that the client gets.
        """
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.submit(request, into(waiter), let_in=let_in)
        try:
            return await waiter
        except BrayxError as error:
            self.refused(error)
            raise
        except asyncio.CancelledError:
            if request.kind is StepKind.START and waiter.cancelled():
                self.withdraw(request.session, request.holder)
            raise

    def lets_in(self, request: StepRequest) -> bool:
        """Whether the credentials of ``request`` are valid, if this service requires any."""
        return True

    def holder(self, on_end: Callable[[str], None]) -> Holder:
        """Registers a connection that may hold a session; its requests carry the holder's name.

        Args:
            on_end: see `Holder.end`.
        """
        raise NotImplementedError

    async def disconnect(self, session: str, holder: str = "", *, for_good: bool = False) -> None:
        """The connection that held ``session`` is gone: ends it with reason ``disconnect``.

        A client that numbers its ticks has some seconds to reconnect, unless it closed the connection cleanly
        (``for_good``). Does nothing if ``holder`` no longer holds the session.
        """
        raise NotImplementedError

    def withdraw(self, session: str, holder: str = "") -> None:
        """The client of a start is gone before its reply: ends the session if its start still waits for admission."""

    def refused(self, error: BrayxError) -> None:
        """Counts an error that a client gets. The door that sends it calls this."""

    def metrics(self, authorization: str) -> str | None:
        """The metrics of this process as OpenMetrics text; None: its host exports them elsewhere.

        Args:
            authorization: Authorization header of the request; empty if it has none.

        Raises:
            Unauthorized: the service has keys, and the request lacks one that may read.
        """
        return None

    def status(self) -> dict[str, Any]:
        """Status of the replica, as JSON values."""
        raise NotImplementedError


def into(waiter: asyncio.Future[bytes]) -> Reply:
    """A reply that resolves a future, unless the future is done, for instance cancelled."""

    def reply(result: bytes | BrayxError) -> None:
        if waiter.done():
            return
        if isinstance(result, BrayxError):
            waiter.set_exception(result)
        else:
            waiter.set_result(result)

    return reply


def to_typed(error: Exception) -> BrayxError:
    """The typed error for an exception: a typed one unchanged, else one with its type; the log has the rest."""
    if isinstance(error, BrayxError):
        return error
    logger.error("a request failed", exc_info=error)
    return BrayxError(f"the service failed with {type(error).__name__}; its log says more")


def leaves_running(error: BrayxError) -> bool:
    """Whether the session still runs after the service gave this error for a tick or a stop."""
    return isinstance(error, (*SESSION_KEEPING, BadBody))


def attaches(error: BrayxError) -> bool:
    """Whether a connection whose first tick or stop got this error still holds the session."""
    return leaves_running(error) and not isinstance(error, OutOfSequence)
