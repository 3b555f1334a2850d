"""Plays several games in one process, with all sessions on one TCP connection; ticks that are ready are sent together.

A game is a generator: it yields the requests of its session one by one and takes their replies. One process with eight
such games takes a third of the CPU of eight processes, and the service reads and answers eight ticks at a time. Knows
nothing of what the games are.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from brayx.errors import BrayxError, ConfigError, DeadlineExceeded
from brayx.gamecore.games import (
    MAX_RESUMED,
    RESUMED,
    RETRIED,
    START_S,
    AnyResult,
    Backoff,
    FinishedGame,
    GamesRun,
    seeds,
)
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.tcp import TcpSessions

Game = Generator[tuple[StepKind, bytes], bytes, AnyResult]
"""A generator that yields kind and body of each request, receives the reply's body, and returns the result."""

_LOOK_S = 1.0


@dataclass
class _RunningGame:
    """A running game: its place among the concurrent games, its last request, when it was sent and how often it was
    repeated."""

    index: int
    game: Game[FinishedGame]
    session: str
    request: tuple[StepKind, bytes]
    sent_at: float
    repeats: int = 0


def play_at_once(
    begin: Callable[[int, int | None], Game[AnyResult]],
    run: GamesRun[AnyResult],
    at_once: int,
) -> list[AnyResult]:
    """Plays ``at_once`` games side by side, as `GamesRun.play` plays them one after the other.

    Args:
        begin: makes a game, given its place (0 to ``at_once - 1``) and its seed. It has to end soon once
            ``should_stop`` is true, with ``stopped``.
        run: how to play; its door is TCP. The first place plays the games that one game at a time would be.
        at_once: number of games.

    Raises:
        ConfigError: the URL is not of a TCP door.
        BrayxError: what the service answered last, when it is given up, or when another game would get it too.
    """
    url, timeout_s, should_stop = run.endpoint, run.timeout_s, run.should_stop
    endpoint = Endpoint.parse(url)
    if endpoint.scheme != "tcp":
        raise ConfigError(f"several games at once share a TCP connection: {url} is not one, expected tcp://host:port")
    table = _Table(begin, [seeds(run.seed, index) for index in range(at_once)])
    patience = Backoff(run.give_up_after_s)
    results: list[AnyResult] = []
    done = 0

    def wanted() -> bool:
        return not should_stop() and (run.games is None or done + len(table.running) < run.games)

    while wanted():
        try:
            with TcpSessions(endpoint, timeout_s, run.key, run.secret) as sessions:
                for index in range(at_once):
                    if wanted():
                        table.start(sessions, index)
                while table.running:
                    try:
                        replies = sessions.exchange(min(_LOOK_S, timeout_s))
                    except DeadlineExceeded:  # `check_late` says which replies are too late
                        replies = []
                    for session, reply in replies:
                        running = table.running.get(session)
                        if running is None:
                            continue
                        try:
                            table.reply(sessions, running, reply)
                            continue
                        except StopIteration as end:
                            result: AnyResult = end.value
                            patience.reset()
                            if result.ended != "stopped":
                                done += 1
                                run.on_game(result)
                                if run.games is not None:
                                    results.append(result)
                        except RETRIED as error:
                            patience.after(error, should_stop)
                        if wanted():
                            table.start(sessions, running.index)
                    table.check_late(endpoint, timeout_s)
        except RETRIED as error:  # the connection's: all of its games are given up
            table.running.clear()
            patience.after(error, should_stop)
    return results


class _Table:
    """The running games by session."""

    def __init__(self, begin: Callable[[int, int | None], Game], seeds: list[Iterator[int | None]]) -> None:  # type: ignore[type-arg]
        self.running: dict[str, _RunningGame] = {}
        self._begin = begin
        self._seeds = seeds
        self._looked_at = 0.0

    def start(self, sessions: TcpSessions, index: int) -> None:
        """Begins a new game at a place."""
        game, session = self._begin(index, next(self._seeds[index])), uuid.uuid4().hex
        running = self.running[session] = _RunningGame(index, game, session, next(game), 0.0)
        self._send(sessions, running)

    def reply(self, sessions: TcpSessions, running: _RunningGame, reply: bytes | BrayxError) -> None:
        """Hands a reply to its game, and sends what the game wants next.

        Raises:
            StopIteration: the game is over, with its result as the value.
            BrayxError: the reply, where it ends the game.
        """
        try:
            if isinstance(reply, BrayxError):
                if not isinstance(reply, RESUMED) or running.repeats == MAX_RESUMED:
                    raise reply
                running.repeats += 1
            else:
                running.request, running.repeats = running.game.send(reply), 0
        except (StopIteration, BrayxError):
            del self.running[running.session]
            raise
        self._send(sessions, running)

    def check_late(self, endpoint: Endpoint, timeout_s: float) -> None:
        """Raises `DeadlineExceeded` for a request that waits too long."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        for running in self.running.values():
            kind, _ = running.request
            limit_s = max(timeout_s, START_S) if kind is StepKind.START else timeout_s
            if now - running.sent_at > limit_s:
                awaited = f"reply to {kind.value} of session {running.session}"
                raise endpoint.deadline_exceeded(awaited, limit_s, layer="tcp")

    def _send(self, sessions: TcpSessions, running: _RunningGame) -> None:
        kind, body = running.request
        running.sent_at = time.monotonic()
        sessions.submit(StepRequest(kind, running.session, body))
