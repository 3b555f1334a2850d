"""`ClientSessions`: an engine's sessions as the sessions of a client, over any door, whose service `reach` finds first.

Each session has its own connection. So it also plays over doors that have one session for each connection, and
with numbered ticks. Knows no engine.
"""

from __future__ import annotations

from typing import Any

from brayx.errors import BrayxError, Overloaded, SessionError, SessionUnknown
from brayx.gamecore.client import AsyncClient
from brayx.gamecore.games import RESUMED, RETRIED, START_S, Backoff, GamesRun
from brayx.gamecore.probe import probe
from brayx.gamecore.protocol import StepKind, StepRequest

_PROBE_S = 5.0
"""Time limit of one try to reach the service, so that a person soon sees that it does not answer."""


class ClientSessions:
    """Sessions, each with one request under way. A context; for one event loop.

    Args:
        run: the service, and how its clients connect. ``timeout_s`` does not limit a start, which is held while the
            training prepares.
    """

    def __init__(self, run: GamesRun[Any]) -> None:
        self._run = run
        self._clients: dict[str, AsyncClient] = {}
        self._idle: list[AsyncClient] = []

    async def __aenter__(self) -> ClientSessions:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in (*self._clients.values(), *self._idle):
            await client.close()

    async def ask(self, request: StepRequest) -> bytes:
        """Sends a request and returns the reply.

        Raises:
            BrayxError: the service's error, or that of the connection. The session is over, unless it was resumed.
        """
        session = request.session
        if request.kind is StepKind.START:
            self._clients[session] = self._idle.pop() if self._idle else self._client()
        client = self._clients.get(session)
        if client is None:
            raise SessionUnknown(f"session {session} has lost its connection", session=session)
        try:
            if request.kind is StepKind.START:
                return await client.start(request.body, session, timeout_s=START_S)
            if request.kind is StepKind.TICK:
                return await client.tick(request.body)
            reply = await client.stop(request.body)
        except RESUMED:
            raise
        except BrayxError:
            await self._clients.pop(session).close()
            raise
        self._idle.append(self._clients.pop(session))
        return reply

    def _client(self) -> AsyncClient:
        return AsyncClient(self._run.endpoint, **self._run.connection)


def reach(run: GamesRun[Any]) -> bool:
    """Waits until the service answers and accepts the key; false: the run must stop.

    Raises:
        BrayxError: the service's last error, after the time limit, or one that every game would get.
        ConfigError: the URL cannot be used.
    """
    patience = Backoff(run.give_up_after_s, waits_for=run.url)
    while not run.should_stop():
        answer = probe(run.endpoint, key=run.key, secret=run.secret, timeout_s=min(run.timeout_s, _PROBE_S))
        if isinstance(answer, SessionError | Overloaded):
            return True
        if not isinstance(answer, RETRIED):
            raise answer
        patience.after(answer, run.should_stop)
    return False
