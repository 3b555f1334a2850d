"""`Builds`: an engine's games as processes, started by their bridge, and started again when they end.

They end with it, even if it is killed. Knows nothing of what they say to it.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from brayx import systems
from brayx.command_line import SWITCH, seconds, whole
from brayx.errors import ConfigError, StartupError
from brayx.guard import GamecoreGuard
from brayx.restarts import RestartLimits, RestartTimes, times

OPTIONS = ("listen", "command", "num", "headless", "restarts", "restarts_within_s", "lifetime_restarts")
"""The options that `add_options` adds."""
_END_S = 3.0


@dataclass(slots=True)
class _Build:
    words: list[str]
    times: RestartTimes
    process: subprocess.Popen[bytes] | None = None


def words_of(command: str) -> list[str]:
    """The words of a build's command in shell syntax.

    Raises:
        ConfigError: it has none, an open quote, or a backslash at its end.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the command {command!r} is not a valid command line: {error}") from None
    if not words:
        raise ConfigError("the command is empty, expected the path of a build, such as ./build.x86_64")
    return words


def after_fault(*, by_hand: bool) -> str:
    """What to do about a game that was closed because of its own fault: the end of the line that says so."""
    if by_hand:
        return "; press Play again once that is mended"
    return "; mend the project and export it again: a build that ends is started again by itself"


def say_unused(say: Callable[[str], None], **given: bool) -> None:
    """Says which options of builds are given although games are started by hand.

    Args:
        say: prints a line.
        **given: whether each option has another value than its default.
    """
    if names := [name for name, is_given in given.items() if is_given]:
        verb = "has" if len(names) == 1 else "have"
        say(
            f"{', '.join(names)} {verb} no effect on a game that is started by hand: give --command BUILD, too "
            "(of a job: --set game.command=BUILD)"
        )


def add_options(parser: argparse.ArgumentParser, *, listen: int | None, ports: str, headless: bool) -> None:
    """Adds the options of a bridge that listens for games, `OPTIONS`.

    Args:
        parser: the bridge's.
        listen: default of ``--listen``.
        ports: the rest of its help, with the default.
        headless: default of ``--headless``.
    """
    add = parser.add_argument
    add("--listen", type=int, default=listen, metavar="PORT", help=f"port for games that are started by hand{ports}")
    add(
        "--command", default="", metavar="BUILD",
        help="start this exported build, and again whenever it ends (default: you start the game)",
    )  # fmt: skip
    add("--num", type=int, default=1, help="number of builds (default: %(default)s)")
    draws = f"the builds draw nothing (default: {'on' if headless else 'off'}); not for agents that see"
    add("--headless", help=draws, **{**SWITCH, "default": headless})
    add(
        "--restarts", type=whole, metavar="N",
        help="most restarts of one build within --restarts-within-s, after which the bridge stops (default: no limit)",
    )  # fmt: skip
    add(
        "--restarts-within-s", type=seconds, default=60.0, metavar="SECONDS",
        help="time for which a restart counts (default: %(default)g)",
    )  # fmt: skip
    add("--lifetime-restarts", type=whole, metavar="N", help="most restarts of one build in all (default: no limit)")


class Builds:
    """Keeps builds running; an asynchronous context manager, at whose end they have ended.

    Args:
        commands: the words of each build's command.
        say: prints a line.
        options: how they are started, as for `brayx.guard.GamecoreGuard.start`; empty: in this folder, and with this
            process's output.
        limits: how often each may start again.

    Raises:
        ConfigError: a command cannot be started.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        say: Callable[[str], None],
        options: Mapping[str, Any],
        limits: RestartLimits = RestartLimits(),
    ) -> None:
        self._guard = GamecoreGuard()
        self._builds = [_Build(list(words), RestartTimes(limits)) for words in commands]
        self._say, self._options = say, options

    async def __aenter__(self) -> Self:
        try:
            for build in self._builds:
                self._start(build)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._guard.end([build.process for build in self._builds if build.process is not None], _END_S)
        self._guard.close()

    def watch(self) -> None:
        """Call several times a second: starts builds again that have ended, later each time one ends soon.

        Raises:
            StartupError: one has ended more often than it may start again.
        """
        now = time.monotonic()
        for index, build in enumerate(self._builds):
            if build.process is None:
                if now >= build.times.restart_at:
                    self._start(build)
            elif (status := build.process.poll()) is not None:
                # Its children must not keep the port of its successor.
                systems.signal_group(build.process, systems.KILL)
                self._guard.forget(build.process)
                build.process = None
                lived_s = build.times.ended(now)
                ended = f"with {_status(status)} after {lived_s:.0f} s"
                if exceeded := build.times.too_often(now):
                    raise _too_often(index, build, ended, *exceeded)
                often = f"{times(build.times.ends)}, the last time " if build.times.ends > 1 else ""
                self._say(f"build {index} ended {often}{ended}; it starts again in {build.times.pause_s:g} s")

    def _start(self, build: _Build) -> None:
        try:
            build.process = self._guard.start(build.words, **self._options)
        except StartupError:
            raise ConfigError(
                f"the build {build.words[0]!r} cannot be started: expected the path of an executable"
            ) from None
        build.times.started()


def _too_often(index: int, build: _Build, ended: str, often: str, limit: str) -> StartupError:
    allowed = getattr(build.times.limits, limit)
    return StartupError(
        f"build {index} ended {often}, the last time {ended}, and {limit} is {allowed}: start {build.words[0]} by hand "
        f"to see why, or allow more with --{limit.replace('_', '-')} N (of a job: --set game.{limit}=N)",
        build=index,
    )


def _status(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
