"""The common part of the gamecore commands: the loop over games, JSON bodies, actions, signals and the command line.

A kind of gamecore provides a function that plays one game, and a result type. The loop here calls it, also after
failures, until the number of games is reached or a stop is requested. Knows nothing of what the games are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from brayx import systems
from brayx.command_line import SWITCH, Parser, seconds
from brayx.errors import (
    AgentError,
    BrayxError,
    ConfigError,
    DeadlineExceeded,
    OutOfSequence,
    Overloaded,
    SessionLost,
    SessionResumed,
    SessionUnknown,
    StartupError,
    TransportError,
)
from brayx.gamecore.auth import add_options, credentials
from brayx.gamecore.doors import ON_HTTP_PORT
from brayx.gamecore.transports import Endpoint

Ended = Literal["terminated", "truncated", "stopped"]

RESUMED = (SessionResumed, OutOfSequence)
"""Errors that mean: the session continues from an earlier tick, and this request was not applied. The second one comes
if the first was lost with its connection."""

MAX_RESUMED = 3
"""Maximum number of such errors in a row for one request before its game is given up."""

RETRIED = (*RESUMED, SessionLost, SessionUnknown, AgentError, Overloaded, DeadlineExceeded, TransportError)
"""Errors that end one game only, since another session may not get them."""

START_S = 300.0
"""Time limit of a start: a door may hold it until the training's first weights act."""

GAVE_UP = 3
"""Exit code of a bridge whose builds end more often than they may start again."""

GRACE_S = 5.0
"""Time for the current game to stop after a signal, before it is interrupted."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class FinishedGame(Protocol):
    """The result of one game; each kind of gamecore has its own type.

    Attributes:
        returns: sum of rewards by agent; the only agent's name is empty.
        length: ticks of all agents together.
        ended: how the game ended.
    """

    @property
    def returns(self) -> Mapping[str, float]: ...

    @property
    def length(self) -> int: ...

    @property
    def ended(self) -> Ended: ...


@dataclass(frozen=True, slots=True)
class GameResult:
    """Result of one game: the sum of rewards, the number of ticks, and how it ended."""

    total_reward: float
    length: int
    ended: Ended

    @property
    def returns(self) -> Mapping[str, float]:
        return {"": self.total_reward}


AnyResult = TypeVar("AnyResult", bound=FinishedGame)
AnyBody = TypeVar("AnyBody")


@dataclass(frozen=True, kw_only=True)
class GamesRun(Generic[AnyResult]):
    """How a gamecore plays its games; every bridge's ``run_games`` takes these arguments.

    Attributes:
        url: URL of the service.
        door: scheme to use instead of the URL's.
        games: number of games; None: until ``should_stop``.
        seed: makes the games repeatable; each game's seed is drawn from it.
        max_ticks: truncate a game once an agent has had this many ticks.
        on_game: called after each game.
        timeout_s: time limit of one request.
        reconnect_s, key, secret: as for `brayx.gamecore.client.Client`.
        give_up_after_s: time limit for consecutive errors without a complete game between them.
        should_stop: true ends the current game with a ``stopped`` result, which is not among the results.
    """

    url: str
    door: str | None = None
    games: int | None
    seed: int | None = None
    max_ticks: int | None = None
    on_game: Callable[[AnyResult], None] = lambda result: None
    timeout_s: float = 30.0
    reconnect_s: float | None = None
    give_up_after_s: float = 60.0
    should_stop: Callable[[], bool] = lambda: False
    key: str = ""
    secret: bytes = field(default=b"", repr=False)

    @property
    def endpoint(self) -> str:
        """The URL of the door.

        Raises:
            ConfigError: the URL's door does not share its port with ``door``.
        """
        endpoint = Endpoint.parse(self.url)
        if self.door is None:
            return self.url
        if not endpoint.door.has_status:
            raise ConfigError(f"{self.url} has no door {self.door}: give that door's URL, {self.door}://host:port")
        return endpoint.door_url(self.door)

    @property
    def connection(self) -> dict[str, Any]:
        """Arguments of a client besides the URL."""
        return {name: getattr(self, name) for name in ("timeout_s", "reconnect_s", "key", "secret")}

    def play(self, play: Callable[[int | None], AnyResult], give_up: Callable[[], None]) -> list[AnyResult]:
        """Plays games until there are enough results, or until ``should_stop``.

        Args:
            play: plays one game with the given seed.
            give_up: cleans up after a game that an error of the service ended; the next game follows.

        Returns:
            The results; none if the number of games is unlimited, since there may be millions: use ``on_game``.

        Raises:
            BrayxError: the service's last error, after the time limit, or one that every game would get.
        """
        results: list[AnyResult] = []
        game_seeds = seeds(self.seed)
        patience = Backoff(self.give_up_after_s)
        while (self.games is None or len(results) < self.games) and not self.should_stop():
            try:
                result = play(next(game_seeds))
            except RETRIED as error:
                give_up()
                patience.after(error, self.should_stop)
                continue
            patience.reset()
            if result.ended == "stopped":
                break
            self.on_game(result)
            if self.games is not None:
                results.append(result)
        return results


def send(request: Callable[[bytes], bytes], body: bytes) -> bytes:
    """Sends a tick or a stop and returns the reply; sends it again if the session was resumed from a snapshot.

    Raises:
        BrayxError: any error of ``request``.
    """
    for _ in range(MAX_RESUMED):
        try:
            return request(body)
        except RESUMED:
            pass
    return request(body)


async def send_async(request: Callable[[AnyBody], Awaitable[bytes]], body: AnyBody) -> bytes:
    """`send`, awaited. ``body`` may also be a whole request, if ``request`` takes one."""
    for _ in range(MAX_RESUMED):
        try:
            return await request(body)
        except RESUMED:
            pass
    return await request(body)


def say(text: str) -> None:
    """Prints a line on standard error, which names this gamecore."""
    print(f"gamecore {os.getpid()}: {text}", file=sys.stderr, flush=True)


class Backoff:
    """Pauses between failed games: doubling, with jitter, up to a time limit for consecutive errors.

    An error that time does not mend, such as a certificate that is not trusted, is raised at once. Each kind of
    consecutive error is printed once, and their number at the end.

    Args:
        give_up_after_s: the time limit.
        say: prints a line.
        waits_for: URL of a service that no game has reached yet; empty: games fail.
    """

    def __init__(self, give_up_after_s: float, say: Callable[[str], None] = say, *, waits_for: str = "") -> None:
        self._give_up_after_s, self._say, self._waits_for = give_up_after_s, say, waits_for
        self._forget()

    def _forget(self) -> None:
        self._since: float | None = None
        self._until = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._failed = 0
        self._printed: set[str] = set()

    def after(self, error: BrayxError, should_stop: Callable[[], bool]) -> None:
        """Waits after a failed game; raises its error once the time limit has passed."""
        for nap_s in self._naps(error, should_stop):
            time.sleep(nap_s)

    async def pause_after(self, error: BrayxError, should_stop: Callable[[], bool]) -> None:
        """As `after`, on an event loop."""
        for nap_s in self._naps(error, should_stop):
            await asyncio.sleep(nap_s)

    def _naps(self, error: BrayxError, should_stop: Callable[[], bool]) -> Iterator[float]:
        if error.details.get("may_pass") is False:
            raise error
        now = time.monotonic()
        if self._since is None:
            self._since = now
        self._failed += 1
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        if now + pause_s - self._since > self._give_up_after_s:
            self._say(f"given up after {self._spell(now)}; --give-up-after-s changes when")
            raise error
        if error.code not in self._printed:
            self._printed.add(error.code)
            begins, ends = f"game ended by {error.code}", f"; next game in {pause_s:.1f} s, giving up after "
            ends += f"{self._give_up_after_s:g} s without a complete game"
            if self._waits_for:
                begins, ends = f"waiting for {self._waits_for}", f"; giving up after {self._give_up_after_s:g} s"
            self._say(f"{begins}: {error}{ends}")
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        while (left := now + pause_s - time.monotonic()) > 0 and not should_stop():
            yield min(left, 0.05)
        self._until = time.monotonic()

    def reset(self) -> None:
        """Call after a complete game."""
        if self._since is not None and self._failed > len(self._printed):
            self._say(f"games go on after {self._spell(self._until)}")
        self._forget()

    def _spell(self, until: float) -> str:
        assert self._since is not None
        failed = "tries" if self._waits_for else "games"
        return f"{until - self._since:.1f} s (failed {failed}: {self._failed})"


def seeds(seed: int | None, place: int = 0) -> Iterator[int | None]:
    """A seed for each game, unrelated for neighbouring ``seed`` values, since the next gamecore may use seed + 1.

    Args:
        seed: the gamecore's seed; None: no seeds, so each game is random.
        place: place of the game among the gamecore's concurrent games.
    """
    game = 0
    while True:
        yield None if seed is None else int(np.random.SeedSequence([seed, game, place]).generate_state(1)[0])
        game += 1


# The command


def _run_options(options: argparse.Namespace) -> dict[str, Any]:
    """The common options of the commands as arguments of `GamesRun`.

    Raises:
        ConfigError: the key cannot be read from its file.
    """
    same = ("url", "games", "door", "seed", "max_ticks", "timeout_s", "give_up_after_s")
    return {
        **{name: getattr(options, name) for name in same},
        "reconnect_s": options.reconnect or None,
        **credentials(options.keys_file, options.key),
    }


def run_command(
    parser: argparse.ArgumentParser, argv: list[str] | None, run_games: Callable[..., object], *more: str
) -> int:
    """Runs ``brayx gamecore KIND``; returns its exit code, see `exit_code`; 0: done or stopped.

    Args:
        parser: a `command_parser`, with the options of this kind.
        argv: command-line arguments; None: those of the process.
        run_games: plays games; takes the arguments of `GamesRun`.
        more: options of this kind that it takes, too.
    """
    options = parser.parse_args(argv)
    count, ticks = 0, 0
    totals: dict[str, float] = {}
    began = time.monotonic()

    def on_game(result: FinishedGame) -> None:
        nonlocal count, ticks
        count, ticks = count + 1, ticks + result.length
        for agent, total in result.returns.items():
            totals[agent] = totals.get(agent, 0.0) + total
        if options.json:
            returned = result.returns.get("", result.returns)
            line = {"return": returned, "length": result.length, "ended": result.ended}
            print(json.dumps(line, separators=(",", ":")), flush=True)
        elif not options.quiet:
            print(f"game {count}: return {_words(result.returns)}, {result.length} ticks, {result.ended}", flush=True)

    stop = _Stop()
    code = 0
    with _signals(stop):
        try:
            extra = {name: getattr(options, name) for name in more}
            run_games(on_game=on_game, should_stop=stop, **extra, **_run_options(options))
        except KeyboardInterrupt:
            pass  # a second signal, or the service took too long to end the game
        except BrayxError as error:
            if not stop.requested:
                print(f"brayx: {error}", file=sys.stderr)
                code = exit_code(error)
    if options.json or (code and not count):  # an error and no game: nothing to sum up
        return code
    rate = ticks / max(time.monotonic() - began, 1e-9)
    mean = _words({agent: total / count for agent, total in totals.items()}) if count else "none"
    print(f"{count} games, mean return {mean}, {ticks} ticks, {rate:.0f} ticks/s", flush=True)
    return code


def exit_code(error: BrayxError) -> int:
    """Exit code of a gamecore that an error ends: 1 the service failed, 2 bad usage, or `GAVE_UP`."""
    return 2 if isinstance(error, ConfigError) else GAVE_UP if isinstance(error, StartupError) else 1


def command_parser(kind: str, description: str, *, is_engine: bool = False) -> argparse.ArgumentParser:
    """The command line of ``brayx gamecore KIND`` with the options that all kinds have; ``brayx bridge KIND`` of an
    engine, whose games are episodes of agents."""
    parser = Parser(prog=f"brayx {'bridge' if is_engine else 'gamecore'} {kind}", description=description)
    games = "episodes of agents" if is_engine else "games"
    truncates = argparse.SUPPRESS if is_engine else "truncate games after this many ticks of an agent"
    parser.add_argument(
        "--url", required=True,
        help="URL of the training or service: http://, ws://, tcp:// or grpc://host:port; with TLS https:// or wss://",
    )  # fmt: skip
    parser.add_argument("--games", type=int, default=None, help=f"number of {games} to play (default: until stopped)")
    parser.add_argument("--door", choices=ON_HTTP_PORT, default=None, help="protocol to use (default: the URL's)")
    parser.add_argument("--seed", type=int, default=None, help="makes the games repeatable")
    parser.add_argument("--max-ticks", type=int, default=None, help=truncates)
    parser.add_argument(
        "--timeout-s", type=float, default=30.0, help="time limit of one request (default: %(default)g)"
    )
    parser.add_argument(
        "--reconnect", type=seconds, default=0.0, metavar="SECONDS",
        help="number the ticks, and try for this long to continue a game whose connection broke or whose session moved "
        "(default: 0, the game ends)",
    )  # fmt: skip
    parser.add_argument(
        "--give-up-after-s", type=float, default=60.0,
        help="time limit to reach the service, and for consecutive errors without a complete game (default: "
        "%(default)g)",
    )  # fmt: skip
    add_options(parser)
    parser.add_argument("--quiet", help="print the summary only", **SWITCH)
    parser.add_argument("--json", help="print each game as a line of JSON, and no summary", **SWITCH)
    # Earlier jobs pass it. It has no effect: every game ends with its job.
    parser.add_argument("--die-with-parent", **{**SWITCH, "help": argparse.SUPPRESS})
    return parser


def _words(returns: Mapping[str, float]) -> str:
    return ", ".join(f"{agent} {total:g}" if agent else f"{total:g}" for agent, total in returns.items())


class _Stop:
    """Whether SIGTERM or SIGINT has come."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> bool:
        return self.requested

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        systems.interrupt_after(GRACE_S)


@contextmanager
def _signals(stop: _Stop) -> Iterator[None]:
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        signal.SIGTERM: stop.on_signal,
        signal.SIGINT: stop.on_signal,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        systems.interrupt_after(0)
        for number, handler in before.items():
            signal.signal(number, handler)
