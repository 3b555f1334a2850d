"""Starts games so that neither they nor their children outlive this process. They may be in any language.

A separate shell reads the games' process groups from a pipe. When the pipe closes, for example because of
``kill -9``, the shell ends the remaining groups. Linux' parent-death signal would not work: it comes when the *thread*
that started a game ends, it does not reach children, and other systems lack it. Knows nothing of what the games do.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Self

from brayx import systems
from brayx.errors import StartupError

_WATCH = """
groups=
while read -r what group; do
  left=
  for each in $groups; do [ "$each" = "$group" ] || left="$left $each"; done
  groups=$left
  [ "$what" = - ] || groups="$groups $group"
done
[ -n "$groups" ] || exit 0
for each in $groups; do kill -s TERM -- "-$each"; done
sleep 2
for each in $groups; do kill -s KILL -- "-$each"; done
"""
_BEGIN = 'echo "+ $$" >&0 && exec "$@" </dev/null'
"""Each game starts as a shell, which reports its group and then becomes the game. So every running game is reported,
even if this process is killed at that moment."""
_SHELL = "/bin/sh"
_END_S = 5.0


class GamecoreGuard:
    """Starts games, and ends them when this process ends. A context manager; not thread-safe."""

    def __init__(self) -> None:
        self._watch: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        words: Sequence[str],
        *,
        folder: str | Path = "",
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        **variables: str,
    ) -> subprocess.Popen[bytes]:
        """Starts a game, which leads a process group; its standard input is empty.

        Args:
            words: the game's command line.
            folder: working directory; empty: that of this process.
            stdout, stderr: as for `subprocess.Popen`.
            **variables: environment variables, in addition to `environment`.

        Raises:
            StartupError: there is no such program.
        """
        if sys.platform == "win32":
            raise StartupError("gamecores that a job starts need a POSIX shell: start the game yourself")
        if program(words[0], folder) is None:
            raise StartupError(f"gamecore {shlex.join(words)!r} did not start: No such file or directory")
        process = subprocess.Popen(
            [_SHELL, "-c", _BEGIN, _SHELL, *words],
            cwd=folder or None,
            env={**environment(), **variables},
            stdin=self._pipe(),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._groups.add(process.pid)
        return process

    def end(self, processes: Iterable[subprocess.Popen[bytes]], timeout_s: float) -> None:
        """Ends games: SIGTERM to them and their children, and SIGKILL to those that still run after ``timeout_s``."""
        deadline, processes = time.monotonic() + timeout_s, list(processes)
        for process in processes:
            systems.signal_group(process, signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            while systems.signal_group(process, 0) and time.monotonic() < deadline:
                time.sleep(0.02)
            systems.signal_group(process, systems.KILL)
            process.wait(timeout=_END_S)
            self.forget(process)

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Call it when a game and its children have ended, because the system may reuse its process id."""
        self._groups.discard(process.pid)
        self._write(f"- {process.pid}\n")

    def close(self) -> None:
        """Ends the shell, which ends the games that still run."""
        if self._watch is not None:
            with contextlib.suppress(BrokenPipeError):
                self._stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watch.wait(_END_S)
            self._watch = None

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._watch is not None
        assert self._watch.stdin is not None
        return self._watch.stdin

    def _pipe(self) -> IO[bytes]:
        """The shell's standard input. Starts the shell, also if it was killed."""
        if self._watch is None or self._watch.poll() is not None:
            self._watch = subprocess.Popen(
                [_SHELL, "-c", _WATCH],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # a terminal's Ctrl-C must not end it
            )
            self._write("".join(f"+ {group}\n" for group in self._groups))
        return self._stdin

    def _write(self, text: str) -> None:
        if self._watch is not None:
            with contextlib.suppress(BrokenPipeError):  # the shell was killed; `_pipe` replaces it
                self._stdin.write(text.encode())


def program(word: str, folder: str | Path) -> str | None:
    """Path of a command's program, None if it does not exist; ``folder`` is the command's working directory."""
    return shutil.which(word if os.sep not in word else os.path.join(folder, word), path=environment()["PATH"])


def environment() -> dict[str, str]:
    """Environment variables of a game. This interpreter's scripts, such as ``brayx``, come first on the path; libraries
    use one thread."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
