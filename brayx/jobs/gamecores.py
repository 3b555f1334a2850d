"""Game processes of a training job: starts them, restarts those that die, and ends all with the job.

Any command that uses a door works; this file knows nothing of the game. It keeps the newest lines of all games for the
progress display, and the output files of games that fail.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx import clock, systems
from brayx.actor.config import GamecoreConfig
from brayx.errors import ConfigError, StartupError
from brayx.gamecore.auth import variables
from brayx.gamecore.doors import DOORS
from brayx.gamecore.games import GAVE_UP
from brayx.guard import GamecoreGuard
from brayx.jobs.inner_bridge import BRIDGES, InnerBridge, JobDoors, options_of
from brayx.jobs.output import Output, error_in
from brayx.restarts import RestartLimits, RestartTimes
from brayx.temporary import output_folder

if TYPE_CHECKING:
    from brayx.jobs.config import JobConfig

_LONGEST_LINE = 500
_LOOK_S = 0.2
_MOST_ERRORS = 100
"""Maximum number of different errors that are shown with the last lines of output."""
_AGAIN_S = 60.0
"""Time after which a line of brayx's own gamecores is shown again; lines that differ only in `_NUMBER` are the same."""
_OURS = re.compile(r"gamecore \d+: ")
"""Prefix of the lines of brayx's own gamecores and bridges (`brayx.gamecore.games.say`)."""
_SAYS_ALL = "brayx: "
"""Prefix of the error that ends a bridge. It says what to do."""
_NUMBER = re.compile(r"(?<!build )(?<![:\d])\d+")
"""A number other than that of a build and a port, which tell games apart."""
_ANOTHER = re.compile(r"press Play (again|to go on)")
"""Lines after which a person starts another game."""
_CRASHED = re.compile(r"build \d+ ended .*\bwith (?!status 0 ).*")
"""What a bridge says of a build that ended by itself and with an error."""
_MARK = re.compile(r"\{(\w+)\}")


@dataclass
class _GameProcess:
    argv: list[str]
    output: Output
    times: RestartTimes
    process: subprocess.Popen[bytes] | InnerBridge | None = None
    held_s: float = 0.0
    has_failed: bool = False

    @property
    def is_bridge(self) -> bool:
        """Whether it is brayx's own bridge to an engine."""
        return self.argv[:3] in BRIDGES

    @property
    def builds(self) -> int:
        """Number of builds that it starts as a bridge."""
        with contextlib.suppress(ConfigError):  # it ends with this error
            if self.is_bridge and (options := options_of(self.argv)).command:
                return int(options.num)
        return 0


class Gamecores:
    """Keeps a set of game processes running; a context manager.

    Args:
        configs: the commands to run.
        urls: URL of each door by name, for the placeholders of the commands, see `filled`.
        folder: working directory of the processes.
        failed: called with a line for each process that ended with a non-zero status, or could not be restarted, builds
            of bridges included.
        say: called once for each different error, with such a line and the last lines of the process's output; and for
            each line of brayx's own gamecores, which write only what a person must know.
        doors: doors of this process: bridges to engines that play there run in it. None: they are processes, too.
        keys_file: file of the keys that the doors require, which the processes find in their environment.

    Attributes:
        restarts: number of restarts of processes that had ended by themselves.
        failures: number of processes that ended with a non-zero status.
        messages: the newest lines: output of the processes, and their failures.
    """

    def __init__(
        self,
        configs: Sequence[GamecoreConfig],
        urls: Mapping[str, str],
        folder: str | Path,
        failed: Callable[[str], None] = lambda line: None,
        say: Callable[[str], None] = lambda text: None,
        doors: JobDoors | None = None,
        keys_file: str | None = None,
    ) -> None:
        self._folder, self._doors, self._variables = folder, doors, variables(keys_file)
        expanded = [config for config in configs for _ in range(config.num)]
        self._games = [
            _GameProcess(
                filled(config.command, urls, door=config.door, index=index),
                Output(f"gamecore-{index}.txt"),
                RestartTimes(RestartLimits(config.restarts, config.restarts_within_s)),
            )
            for index, config in enumerate(expanded)
        ]
        self._guard = GamecoreGuard()
        self._outputs = contextlib.ExitStack()
        self._seen: set[str] = set()
        self._said_at: dict[str, float] = {}
        self._urls = sorted(urls.values(), key=len, reverse=True)
        self._failed, self._say = failed, say
        self._error: StartupError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="brayx-gamecores", daemon=True)
        self.restarts = 0
        self.failures = 0
        self.messages: deque[str] = deque(maxlen=20)

    @property
    def num(self) -> int:
        """The wanted number of processes."""
        return len(self._games)

    def __str__(self) -> str:
        """The number of gamecores, or of the builds that they start, and their URLs."""
        given: Counter[tuple[str, str]] = Counter()
        for game in self._games:
            url = next((url for url in self._urls if url in " ".join(game.argv)), "")
            given["build" if game.builds else "gamecore", url] += game.builds or 1
        parts = []
        for (what, url), num in given.items():
            is_single = num == 1
            shown = f"play{'s' * is_single} at {url}" if url else f"{'was' if is_single else 'were'} given no URL"
            parts.append(f"{num} {what}{'' if is_single else 's'} {shown}")
        return "; ".join(parts) or "no gamecore is started here"

    @property
    def running(self) -> int:
        """Number of running processes."""
        return sum(1 for game in self._games if game.process is not None and game.process.poll() is None)

    def check(self) -> None:
        """Raises a `StartupError` if a game has ended more often than it may start again."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Gamecores:
        if self._thread.is_alive():  # a job adopts games that were started to learn their contract
            return self
        folder = self._outputs.enter_context(output_folder())
        try:
            for game in self._games:
                game.output.open(folder)
                self._start(game)
        except BaseException:
            self.stop()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 3.0) -> None:
        """Sends SIGTERM to every process and its children, and SIGKILL to those that still run after ``timeout_s``.

        A second call does nothing.
        """
        if self._stopping.is_set():
            return
        deadline = time.monotonic() + timeout_s
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=min(2.0, timeout_s))
        running = [game.process for game in self._games if game.process is not None]
        bridges = [process for process in running if isinstance(process, InnerBridge)]
        for bridge in bridges:
            bridge.end()
        self._guard.end(
            [process for process in running if not isinstance(process, InnerBridge)], deadline - time.monotonic()
        )
        for bridge in bridges:
            bridge.wait(deadline - time.monotonic())
        self._guard.close()
        for game in self._games:
            game.output.close(keep=game.has_failed)
        self._outputs.close()

    def _start(self, game: _GameProcess) -> None:
        output = game.output.begin()
        if self._doors is not None and game.is_bridge and any(url in game.argv for url in self._urls):
            game.process = InnerBridge(game.argv, self._doors, self._folder, output)
        else:
            given: dict[str, Any] = {"folder": self._folder, "stdout": output, "stderr": output, **self._variables}
            game.process = self._guard.start(game.argv, **given)
        game.times.started()
        game.held_s = clock.held_s()

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            now = time.monotonic()
            for game in self._games:
                self._read(game)
            for game in self._games if not clock.is_held() else ():
                if game.process is not None and game.process.poll() is not None:
                    self._ended(game, now)
                elif game.process is None and now >= game.times.restart_at and self._error is None:
                    self._restart(game, now)

    def _restart(self, game: _GameProcess, now: float) -> None:
        self.restarts += 1
        try:
            self._start(game)
        except StartupError as error:
            self._fail(error.message, error.message)
            game.times.not_started(now)

    def _read(self, game: _GameProcess) -> None:
        for line in game.output.newest():
            self.messages.append(line[:_LONGEST_LINE])
            if says_itself(line):
                self._say_again(line[:_LONGEST_LINE])
                if crash := _CRASHED.search(line):
                    self._failed(crash[0])

    def _say_again(self, line: str) -> None:
        """Says a line, unless it was said a short while ago of the same game."""
        if _ANOTHER.search(line):
            self._said_at.clear()
        same, now = _NUMBER.sub("", line), time.monotonic()
        if now - self._said_at.get(same, -_AGAIN_S) < _AGAIN_S:
            return
        if len(self._said_at) >= _MOST_ERRORS:
            self._said_at.clear()
        self._said_at[same] = now
        self._say(line)

    def _fail(self, line: str, error: str, last: Sequence[str] = ()) -> None:
        self._count(line)
        if error not in self._seen and len(self._seen) < _MOST_ERRORS:
            self._seen.add(error)
            self._say("\n".join([f"{line}; its last lines:", *last] if last else [line]))

    def _count(self, line: str) -> None:
        self.failures += 1
        self._failed(line)
        self.messages.append(line)

    def _ended(self, game: _GameProcess, now: float) -> None:
        """A game that gives up while a debugger's prompt stops the door does not count as a failure."""
        assert game.process is not None
        if not isinstance(game.process, InnerBridge):
            systems.signal_group(game.process, systems.KILL)  # its children must not keep playing next to its successor
            self._guard.forget(game.process)
        self._read(game)
        lived_s, counts = game.times.ended(now), game.held_s == clock.held_s()
        status, (error, last) = game.process.returncode, game.output.said()
        exceeded, reason = game.times.too_often(now) if counts else None, ""
        if game.is_bridge:
            reason, error = _reason_and_error(last, error)
        said = f"; it said: {error[:_LONGEST_LINE]}; its whole output: {game.output.path}" if error else ""
        line = f"a gamecore ended with status {status} after {lived_s:.0f} s{said}"
        game.process = None
        game.has_failed = game.has_failed or bool(status and counts and error)
        if status == GAVE_UP and reason and counts:
            self._give_up(f"{reason}{said}")
        elif exceeded is not None:
            said = f"; it said: {reason}" if reason else said
            self._give_up(f"{_too_often(game, *exceeded, status, lived_s)}{said}")
        elif status and counts and reason:
            self._fail(f"{reason}; next try in {game.times.pause_s:g} s", reason)
        elif status and counts:
            self._fail(line, error, last)
        else:
            self.messages.append(f"{line}; it starts again in {game.times.pause_s:g} s")

    def _give_up(self, line: str) -> None:
        self._error = StartupError(line)
        self._count(line)


def _reason_and_error(last: Sequence[str], error: str) -> tuple[str, str]:
    """Why a bridge ended, and the error among the other lines, which are its builds'; the given one without a reason.

    Args:
        last: its last lines.
        error: the error in all its lines.
    """
    reason = next((line for line in reversed(last) if line.startswith(_SAYS_ALL)), "")
    if not reason:
        return "", error
    return reason.removeprefix(_SAYS_ALL), error_in([line for line in last if line != reason and not says_itself(line)])


def _too_often(game: _GameProcess, often: str, limit: str, status: int | None, lived_s: float) -> str:
    return (
        f"gamecore {shlex.join(game.argv)!r} ended {often}, the last time with status {status} after {lived_s:.0f} s, "
        f"and gamecores.{limit} is {game.times.limits.restarts}: start it by hand to see why, or allow more"
    )


def says_itself(line: str) -> bool:
    """Whether a line of a gamecore's output is on the screen without its reader's doing."""
    return _OURS.match(line) is not None


def gamecores_of(job: JobConfig, actor: str) -> list[GamecoreConfig]:
    """The gamecores of an actor, or of none if ``actor`` is empty. In their commands ``{NAME}`` of a component of
    ``kind: config`` is replaced by its values as flags."""

    def flags(mark: re.Match[str]) -> str:
        return job.configs[mark[1]].flags if mark[1] in job.configs else mark[0]

    configs = job.actors[actor].gamecores if actor else ()
    return [config.model_copy(update={"command": _MARK.sub(flags, config.command)}) for config in configs]


def given_by(job: JobConfig, config: GamecoreConfig) -> dict[str, str]:
    """The job's options whose values `gamecores_of` puts into a gamecore's command, by flag: ``game.fixed_fps`` by
    ``fixed-fps``."""
    marks = [mark for mark in _MARK.findall(config.command) if mark in job.configs]
    return {key.replace("_", "-"): f"{mark}.{key}" for mark in marks for key in job.configs[mark].model_extra or {}}


def filled(command: str, urls: Mapping[str, str], *, door: str, index: int) -> list[str]:
    """Splits a gamecore's command into words and fills in its placeholders.

    Args:
        command: a command in shell syntax. ``{url}`` becomes the URL of ``door``; ``{http_url}``, ``{ws_url}``,
            ``{tcp_url}`` and ``{grpc_url}`` that of the named door; ``{index}`` the gamecore's number. URLs need no
            quotes.
        urls: URL of each open door by name.
        door: the door of ``{url}``.
        index: number of the gamecore.

    Raises:
        ConfigError: the command has an open quote, or a backslash at its end.
        StartupError: the command names a door that is not open.
    """
    try:
        words = [word.replace("{index}", str(index)) for word in shlex.split(command)]
    except ValueError as error:
        raise ConfigError(f"gamecore {command!r} is not a valid command line: {error}") from None
    for mark, name in (("{url}", door), *((f"{{{name}_url}}", name) for name in DOORS)):
        if mark not in command:
            continue
        if name not in urls:
            raise StartupError(
                f"gamecore {command!r} plays by {name}, which is not open; open doors: {', '.join(urls) or 'no doors'}"
            )
        words = [word.replace(mark, urls[name]) for word in words]
    return words
