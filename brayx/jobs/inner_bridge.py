"""`InnerBridge`: a bridge to an engine in the job's own process, with what `brayx.jobs.gamecores` uses of a process.

It plays on the event loop of the job's doors, and sends its requests to the sessions behind them: no process or
connection is between the game and its agents. Knows nothing of the engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from brayx.bridges.engine import EngineRun
from brayx.errors import BrayxError, ConfigError
from brayx.gamecore.games import GamesRun, exit_code
from brayx.gamecore.protocol import StepRequest

BRIDGES = [["brayx", command, engine] for command in ("bridge", "gamecore") for engine in ("godot", "unity")]
"""The first words of a bridge's command."""


def bridge_of(words: Sequence[str]) -> Any:
    """The module of the bridge that a command starts."""
    return importlib.import_module(f"brayx.bridges.{words[2]}")


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """The options of a bridge's command.

    Raises:
        ConfigError: the bridge does not take them.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{' '.join(words[:3])}: {message}")

    parser = bridge_of(words).parser()
    parser.error = refuse
    options: argparse.Namespace = parser.parse_args(words[3:])
    return options


class JobDoors(Protocol):
    """What a bridge needs of the job's doors."""

    loop: asyncio.AbstractEventLoop

    async def step(self, request: StepRequest) -> bytes:
        """Answers a request; raises the typed error instead."""


class InnerBridge:
    """Plays from its construction to `end`.

    Args:
        words: the bridge's command line, as of ``brayx gamecore``.
        doors: the doors whose sessions answer.
        folder: working directory of builds.
        output: gets the bridge's lines, and the output of its builds.

    Attributes:
        returncode: exit code of the command, once it has ended: 0 done, or as `brayx.gamecore.games.exit_code`.
    """

    def __init__(self, words: Sequence[str], doors: JobDoors, folder: str | Path, output: IO[bytes]) -> None:
        self.returncode: int | None = None
        self._output, self._doors, self._folder = output, doors, folder
        self._bridge = bridge_of(words)  # not on the loop, which the import would block
        self._run: EngineRun | None = None
        self._ended = asyncio.run_coroutine_threadsafe(self._play(words), doors.loop)

    def poll(self) -> int | None:
        """As that of `subprocess.Popen`."""
        return self.returncode

    def end(self) -> None:
        """Lets it end its games and builds; does not wait."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            # `_play`, which may not have begun yet, makes the run in its first step.
            self._doors.loop.call_soon_threadsafe(self._doors.loop.call_soon, self._end)

    def wait(self, timeout_s: float) -> None:
        """Waits until it has ended; cancels it after ``timeout_s``."""
        try:
            self._ended.result(max(0.0, timeout_s))
        except TimeoutError:
            self._ended.cancel()

    def _end(self) -> None:
        if self._run is not None:
            self._run.end()

    def _say(self, line: str) -> None:
        self._output.write(f"gamecore {os.getpid()}: {line}\n".encode())

    def _started(self, words: Sequence[str]) -> Mapping[str, Any]:
        """Makes the run; returns the options of the bridge's ``play``."""
        options = options_of(words)
        run: GamesRun[Any] = GamesRun(
            url=options.url,
            games=options.games,
            seed=options.seed,
            max_ticks=options.max_ticks,
            give_up_after_s=options.give_up_after_s,
        )
        builds = {"folder": self._folder, "stdout": self._output, "stderr": self._output}
        self._run = EngineRun(run, self._doors.step, say=self._say, builds=builds, is_inner=True)
        return {name: getattr(options, name) for name in self._bridge.OPTIONS}

    async def _play(self, words: Sequence[str]) -> None:
        code = 0
        try:
            options = self._started(words)
            assert self._run is not None
            await self._bridge.play(self._run, **options)
            self._run.results()
        except BrayxError as error:
            self._output.write(f"brayx: {error}\n".encode())
            code = exit_code(error)
        except (Exception, SystemExit):  # argparse's, of --help
            self._output.write(traceback.format_exc().encode())
            code = 1
        self.returncode = code
