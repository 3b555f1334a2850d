"""Plays games against a served job through its HTTP door, and draws a trial's curve.

The games run in separate processes, like any gamecores. Knows nothing of training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from brayx import systems
from brayx.errors import BrayxError, ConfigError, StartupError
from brayx.gamecore.auth import KEYS_FILE_VARIABLE, KEYS_VARIABLE, credentials
from brayx.gamecore.doors import ON_HTTP_PORT, SECURE
from brayx.gamecore.status import read_status
from brayx.gamecore.transports.base import Endpoint
from brayx.guard import GamecoreGuard
from brayx.jobs.gamecores import filled
from brayx.jobs.output import Output
from brayx.metrics import games_text, significant
from brayx.temporary import output_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

_CONNECT_S = 5.0


class Served(Protocol):
    """What is served at a URL: the result of `brayx.serve`."""

    @property
    def url(self) -> str:
        """Base URL of the main HTTP door."""


@dataclass(frozen=True)
class Evaluation:
    """Returns of finished games.

    Attributes:
        returns: undiscounted return of each game, in no order.
        missing: number of games that did not finish.
    """

    returns: Sequence[float]
    missing: int = 0

    @property
    def mean(self) -> float:
        """Mean return of the finished games."""
        return statistics.fmean(self.returns)

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN for a single game."""
        games = len(self.returns)
        return statistics.stdev(self.returns) / math.sqrt(games) if games > 1 else math.nan

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """The mean with its 95 % interval, the spread of single games, and how many did not end."""
        mean, spread = significant(self.mean), ""
        if len(self.returns) > 1:
            mean += f" ± {significant(1.96 * self.error, 2)}"
            spread = f"standard deviation {significant(statistics.stdev(self.returns))}, "
        return (
            f"{mean} over {games_text(len(self.returns))} ({spread}"
            f"lowest {significant(min(self.returns))}, highest {significant(max(self.returns))})"
            + (f"; {self.missing} more did not end and were given up" if self.missing else "")
        )


def evaluate(
    service: str | Served,
    env_id: str = "",
    *,
    gamecore: str = "",
    env_options: Mapping[str, Any] | None = None,
    games: int = 20,
    at_once: int = 4,
    door: str | None = None,
    seed: int = 0,
    timeout_s: float = 180.0,
    keys_file: str | None = None,
    key: str | None = None,
    on_game: Callable[[int, float], None] = lambda number, game_return: None,
) -> Evaluation:
    """Plays ``games`` games against a service.

    Every process plays an equal share of the games, so that short games do not count more than long ones.

    Args:
        service: base URL of its door, or the result of `brayx.serve`.
        env_id: Gymnasium id; empty: ``gamecore`` plays.
        gamecore: command of any game, with the placeholders of `brayx.jobs.gamecores.filled`. It writes the return of
            each finished game as a line of standard output, ``{"return": 1.0}`` or just the number. It may play one
            game or many: it is restarted until it has played its share, then stopped.
        env_options: keyword arguments of the environment, for ``env_id``.
        games: number of games, shared among the processes.
        at_once: number of gamecore processes, at most one per game.
        door: ``http`` or ``ws``, for ``env_id``; None: as in the URL.
        seed: seed of the first process's first game, for ``env_id``.
        timeout_s: deadline for the next game to end, restarted by each end.
        keys_file: file of the keys that the service requires; None: that of the environment variable, if set.
        key: name of the key to use; None: the first.
        on_game: called with the number of games ended so far, from 1, and the last one's return.

    Raises:
        ConfigError: the key does not exist, or the URL or the command cannot be used.
        StartupError: nothing listens at the URL, a gamecore failed (the message holds the last line it wrote), or no
            game ended in time. If some games ended in time, they are the result.
    """
    url = service if isinstance(service, str) else service.url
    client_key = credentials(keys_file, key)
    _check_listening(url)
    if bool(env_id) == bool(gamecore):
        raise ConfigError("expected either a Gymnasium id or the command of a gamecore")
    processes = min(at_once, games)
    shares = [games // processes + (index < games % processes) for index in range(processes)]
    variables: dict[str, str] = {}
    if client_key:
        variables = {KEYS_VARIABLE: f"{client_key['key']}: {client_key['secret'].decode()}", KEYS_FILE_VARIABLE: ""}
    if gamecore:
        urls = _doors(url)
        commands = [filled(gamecore, urls, door=urlsplit(url).scheme, index=index) for index in range(processes)]
    else:
        by_door = ["--door", door] if door is not None else []
        by_door += [f"--set=env_options.{name}={json.dumps(value)}" for name, value in (env_options or {}).items()]
        commands = [
            [
                *(sys.executable, "-m", "brayx.bridges.gym", env_id, "--url", url, *by_door),
                *("--games", str(share), "--seed", str(seed + 10_000 * index), "--json"),
            ]
            for index, share in enumerate(shares)
        ]
    returns = play(commands, shares, timeout_s=timeout_s, on_game=on_game, variables=variables)
    return Evaluation(returns, games - len(returns))


def _check_listening(url: str) -> None:
    """Reports a missing service at once; gamecores, which may start before their service, would retry for a minute."""
    parts = urlsplit(url)
    try:
        address = (parts.hostname or "", parts.port or (443 if parts.scheme in SECURE else 80))
    except ValueError as error:
        raise ConfigError(f"the URL {url!r} cannot be used: {error}") from error
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError as error:
        raise StartupError(
            f"nothing listens at {url}: {error.strerror or error}; is `brayx serve` or `serve run` up?"
        ) from error


def _doors(url: str) -> dict[str, str]:
    """URL of each door by name, as the service reports them."""
    endpoint = Endpoint.parse(url)
    doors = {name: endpoint.door_url(name) for name in ON_HTTP_PORT} if endpoint.door.has_status else {}
    page = read_status(endpoint, _CONNECT_S) or {}
    return {**page.get("doors", {}), **doors, endpoint.scheme: url}


def play(
    commands: Sequence[Sequence[str]],
    shares: Sequence[int] | None = None,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    on_game: Callable[[int, float], None] = lambda number, game_return: None,
    variables: Mapping[str, str] | None = None,
) -> list[float]:
    """Runs gamecores concurrently and collects the returns of their games, in the order of their ends.

    After the deadline it returns those of the games that have ended.

    Args:
        commands: commands that write a line with the return of each finished game, see `evaluate`.
        shares: number of games of each; None: it plays until it ends.
        timeout_s: deadline for the next such line, and for the end of a gamecore that has closed its output.
        clock: returns seconds, for tests.
        on_game: as for `evaluate`.
        variables: environment variables of the gamecores, in addition to this process's.

    Raises:
        StartupError: as for `evaluate`.
    """
    running: list[_GamecoreProcess] = []
    returns: list[float] = []
    deadline = clock() + timeout_s
    with selectors.DefaultSelector() as selector, output_folder() as folder, GamecoreGuard() as guard:
        try:
            for index, (command, share) in enumerate(zip(commands, shares or [0] * len(commands), strict=True)):
                output = Output(f"gamecore-{index}.txt")
                output.open(folder)
                running.append(_GamecoreProcess(command, share, output, guard, variables or {}))
                selector.register(running[-1].output, selectors.EVENT_READ, running[-1])
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - clock())):
                    player: _GamecoreProcess = key.data
                    ended = player.read()
                    if ended is None:
                        selector.unregister(player.output)
                        player.finish(max(0.0, deadline - clock()))
                        if player.begin_again():
                            selector.register(player.output, selectors.EVENT_READ, player)
                    elif ended:
                        for game_return in ended:
                            returns.append(game_return)
                            on_game(len(returns), game_return)
                        deadline = clock() + timeout_s
                        if player.is_done:
                            selector.unregister(player.output)
                            player.close()
                if selector.get_map() and clock() > deadline:
                    raise subprocess.TimeoutExpired("", timeout_s)
        except subprocess.TimeoutExpired:
            if not returns:
                raise StartupError(f"no game of the evaluation has ended for {timeout_s:g} s") from None
        finally:
            for player in running:
                player.close()
    return returns


class _GamecoreProcess:
    """A gamecore process.

    Args:
        command: words of its command line.
        share: number of games to play; 0: it plays until it ends.
        errors: file for its standard error.
        guard: starts it.
        variables: as for `play`.
    """

    def __init__(
        self, command: Sequence[str], share: int, errors: Output, guard: GamecoreGuard, variables: Mapping[str, str]
    ) -> None:
        self._command, self._share, self._variables = command, share, variables
        self._errors, self._guard = errors, guard
        self._games = 0
        self._has_failed = False
        self._start()

    def _start(self) -> None:
        self._process = self._guard.start(
            self._command,
            stdout=subprocess.PIPE,
            stderr=self._errors.begin(),
            **{"PYTHONUNBUFFERED": "1", **self._variables},
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self._rest = b""
        self._games_before = self._games

    @property
    def is_done(self) -> bool:
        """Whether it has played its share."""
        return 0 < self._share <= self._games

    def begin_again(self) -> bool:
        """Restarts the command if it ended cleanly before it had played its share; returns whether it did.

        Raises:
            StartupError: it has not written any return.
        """
        if not self._share or self.is_done:
            return False
        if self._games == self._games_before:
            raise StartupError(
                f"gamecore {shlex.join(self._command)!r} ended without the return of a game, expected as a line of its "
                'standard output: {"return": 1.0}, or the number'
            )
        self._end()
        self._start()
        return True

    def read(self) -> list[float] | None:
        """Returns of the games that have ended since the last call; None if it has closed its output."""
        data = os.read(self.output.fileno(), 65536)
        self._errors.newest()  # keeps the file small
        *lines, self._rest = (self._rest + data).split(b"\n")
        returns = [value for value in map(_return_in, lines) if value is not None]
        returns = returns[: self._share - self._games] if self._share else returns
        self._games += len(returns)
        return returns if data else None

    def finish(self, timeout_s: float) -> None:
        """Waits for its end; raises `StartupError` if that was a failure."""
        code = self._process.wait(timeout_s)
        if code != 0:
            error, last = self._errors.said()
            self._has_failed = bool(error)
            where = f"; all of its standard error: {self._errors.path}" if error else ""
            log.error("%s", "\n".join(["last lines of a gamecore that failed:", *last]))
            raise StartupError(f"a gamecore ended with status {code} and said: {error or 'nothing'}{where}")

    def close(self) -> None:
        """Ends it and its children, if it still runs."""
        self._end()
        self._errors.close(keep=self._has_failed)

    def _end(self) -> None:
        systems.signal_group(self._process, systems.KILL)
        self._process.wait()
        self._guard.forget(self._process)
        self.output.close()


def _return_in(line: bytes) -> float | None:
    """The return in a line of a gamecore's output; None if it has none."""
    try:
        document = json.loads(line)
        return float(document["return"] if isinstance(document, dict) else document)
    except (ValueError, KeyError, TypeError):
        return None


def draw_curve(
    points: Sequence[tuple[int, float]], *, title: str, target: float | None = None, x_axis: str = "env_steps"
) -> Figure:
    """Draws the curve of a trial.

    Args:
        points: ``(env steps, mean return of the last 100 games)``.
        title: title of the picture.
        target: return, drawn as a dashed line.
        x_axis: x axis of the points, if not env steps.

    Raises:
        BrayxError: there are no points.
    """
    from brayx.figures import Figure

    if not points:
        raise BrayxError("the trial has no finished game yet: nothing to draw")
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([step for step, _ in points], [value for _, value in points], color="#1f77b4", linewidth=2)
    if target is not None:
        axes.axhline(target, color="#888888", linestyle="--", linewidth=1, label=f"target {target:g}")
        axes.legend(frameon=False)
    axes.set_xlabel(x_axis.replace("_", " "))
    axes.set_ylabel("return, mean of the last 100 games")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure
