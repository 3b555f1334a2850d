"""`ClientSessions`: many sessions over any door, with the calls of `brayx.gamecore.transports.tcp.TcpSessions`.

Each session has a connection of its own. So it also plays over doors that have one session for each connection, and
with numbered ticks. Knows no engine.
"""

from __future__ import annotations

import asyncio
from typing import Any

from brayx.errors import BrayxError, DeadlineExceeded, SessionUnknown
from brayx.gamecore.client import AsyncClient
from brayx.gamecore.games import RESUMED, GamesRun
from brayx.gamecore.protocol import StepKind, StepRequest


class ClientSessions:
    """Many sessions, each with one request under way. A context; for one thread.

    Args:
        run: the service, and how its clients connect.
        timeout_s: deadline of a request.
    """

    def __init__(self, run: GamesRun[Any], timeout_s: float) -> None:
        self._run, self._timeout_s = run, timeout_s
        self._runner = asyncio.Runner()
        self._clients: dict[str, AsyncClient] = {}
        self._idle: list[AsyncClient] = []
        self._unsent: list[StepRequest] = []
        self._tasks: dict[asyncio.Task[bytes | BrayxError], str] = {}

    def __enter__(self) -> ClientSessions:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        self._runner.run(self._close())
        self._runner.close()

    def submit(self, request: StepRequest) -> None:
        """Takes a request; the next `exchange` sends it with the others."""
        self._unsent.append(request)

    def exchange(self, wait_s: float | None = None) -> list[tuple[str, bytes | BrayxError]]:
        """Sends the taken requests and waits for at least one reply; returns each one's session, and its body or error.

        Args:
            wait_s: deadline for a reply, after which the wait may go on; None: those of the requests.

        Raises:
            DeadlineExceeded: no reply came in time.
        """
        return self._runner.run(self._exchange(wait_s))

    async def _exchange(self, wait_s: float | None) -> list[tuple[str, bytes | BrayxError]]:
        for request in self._unsent:
            self._tasks[asyncio.create_task(self._send(request))] = request.session
        self._unsent.clear()
        done, _ = await asyncio.wait(self._tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise DeadlineExceeded(f"{self._run.url} gave no reply within {wait_s:g} s", timeout_s=wait_s)
        return [(self._tasks.pop(task), task.result()) for task in done]

    async def _send(self, request: StepRequest) -> bytes | BrayxError:
        session = request.session
        if request.kind is StepKind.START:
            self._clients[session] = self._idle.pop() if self._idle else self._client()
        client = self._clients.get(session)
        if client is None:
            return SessionUnknown(f"session {session} has lost its connection", session=session)
        try:
            if request.kind is StepKind.START:
                return await client.start(request.body, session)
            if request.kind is StepKind.TICK:
                return await client.tick(request.body)
            reply = await client.stop(request.body)
        except RESUMED as error:
            return error  # the session goes on
        except BrayxError as error:
            await self._clients.pop(session).close()
            return error
        self._idle.append(self._clients.pop(session))
        return reply

    def _client(self) -> AsyncClient:
        return AsyncClient(self._run.endpoint, **{**self._run.connection, "timeout_s": self._timeout_s})

    async def _close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in (*self._clients.values(), *self._idle):
            await client.close()
