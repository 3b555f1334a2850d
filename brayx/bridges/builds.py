"""`Builds`: an engine's games as processes, started by their bridge, and started again when they end.

Their output is the bridge's own. Knows nothing of what they say to the bridge.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from brayx.errors import ConfigError
from brayx.restarts import RestartTimes

_END_S = 3.0


@dataclass(slots=True)
class _Build:
    words: list[str]
    process: subprocess.Popen[bytes] | None = None
    times: RestartTimes = field(default_factory=RestartTimes)


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


class Builds:
    """Keeps builds running; a context manager, at whose end they have ended.

    Args:
        commands: the words of each build's command.
        say: prints a line.

    Raises:
        ConfigError: a command cannot be started.
    """

    def __init__(self, commands: Sequence[Sequence[str]], say: Callable[[str], None]) -> None:
        self._builds = [_Build(list(words)) for words in commands]
        self._say = say

    def __enter__(self) -> Self:
        try:
            for build in self._builds:
                self._start(build)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        running = [build.process for build in self._builds if build.process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _END_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def watch(self) -> None:
        """Call several times a second: starts builds again that have ended, later each time one ends soon."""
        now = time.monotonic()
        for index, build in enumerate(self._builds):
            if build.process is None:
                if now >= build.times.restart_at:
                    self._start(build)
            elif (status := build.process.poll()) is not None:
                build.process = None
                lived_s = build.times.ended(now)
                self._say(
                    f"build {index} ended with {_status(status)} after {lived_s:.0f} s; it starts again in "
                    f"{build.times.pause_s:g} s"
                )

    def _start(self, build: _Build) -> None:
        try:
            build.process = subprocess.Popen(build.words, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise ConfigError(
                f"the build {build.words[0]!r} cannot be started: {error.strerror}; expected the path of an executable"
            ) from None
        build.times.started()


def _status(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
