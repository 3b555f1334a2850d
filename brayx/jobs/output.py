"""Keeps a game's output in a bounded file, and finds the line that says why the game failed.

Knows what errors of Node, C#, Java, Go, Rust, C++ and Python look like; knows nothing of processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from brayx import systems
from brayx.logs import one_line

MAX_BYTES = 2**20
"""A larger file is cut to its newest half mebibyte when it is next read."""
_READ_BYTES = 2**16
_LAST = 10
_ERROR = re.compile(
    r"(Unhandled [Ee]xception|\[ERROR\] FATAL UNHANDLED|Exception in thread|panic: |fatal error: |brayx: "
    r"|terminate called|thread '.*' panicked|==\d+==ERROR|(Uncaught )?[\w.$]*(Error|Exception)( \[\w+\])?(:|$))"
)
_TRACEBACK = "Traceback (most recent call last)"
_LIKE_AN_ERROR = re.compile(r"(?=\S).*\b(error|exception|fatal|failed|assertion|not found)\b", re.IGNORECASE)
_FOOTER = re.compile(r"Node\.js v|exit status \d|note: run with|goroutine \d")


def error_in(lines: Sequence[str]) -> str:
    """The first line that looks like an error; otherwise the last line; empty if there is no line.

    If that line is only a header, such as Mono's ``Unhandled Exception:``, the next line is appended.
    """
    lines = [line.rstrip() for line in lines if line.strip()]
    in_traceback = False
    for number, line in enumerate(lines, start=1):
        if _ERROR.match(line) or (in_traceback and not line[0].isspace()):
            is_header = line.endswith(":") or line.startswith("terminate called")
            return one_line(f"{line} {lines[number].strip()}" if is_header and number < len(lines) else line)
        in_traceback = in_traceback or line.startswith(_TRACEBACK)
    said = [line for line in lines if not _FOOTER.match(line)] or lines
    return one_line(next(filter(_LIKE_AN_ERROR.match, said), said[-1] if said else ""))


class Output:
    """The file that a game writes its output to, over all its restarts.

    The game itself writes the file. So the output outlives this process, and costs it no time.

    Args:
        name: name of the file.

    Attributes:
        path: path of the file after `open`; before, its name.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(name)
        self._file: IO[bytes] | None = None
        self._began = self._read = 0

    def open(self, folder: Path) -> None:
        """Makes the file."""
        self.path = folder / self.path.name
        self._file = self.path.open("ab+", buffering=0)

    def begin(self) -> IO[bytes]:
        """Returns the file, for a game that starts now and appends to it."""
        self._began = self._read = self._size
        return self._opened

    def newest(self) -> list[str]:
        """Lines since the last call, at most the newest 64 KiB. Cuts a file that is too large."""
        size = self._size
        data = self._bytes(max(self._read, size - _READ_BYTES), size)
        if len(data) < _READ_BYTES:
            data = data[: data.rfind(b"\n") + 1]  # the game may still be writing the last line
            self._read += len(data)
        else:
            self._read = size
        if size > MAX_BYTES:
            newest = self._bytes(size - MAX_BYTES // 2, size)
            self._opened.truncate(0)
            self._opened.write(newest)
            self._began, self._read = 0, len(newest)
        return _lines(data)

    def said(self) -> tuple[str, list[str]]:
        """The error and the last ten lines of the game that began last; see `error_in`."""
        lines = _lines(self._bytes(self._began, self._size))
        return error_in(lines), lines[-_LAST:]

    def close(self, keep: bool) -> None:
        """Closes the file, and removes it unless ``keep``."""
        if self._file is not None:
            self._file.close()
            if not keep:
                self.path.unlink(missing_ok=True)

    @property
    def _opened(self) -> IO[bytes]:
        assert self._file is not None
        return self._file

    @property
    def _size(self) -> int:
        return os.fstat(self._opened.fileno()).st_size

    def _bytes(self, start: int, end: int) -> bytes:
        return systems.read_at(self._opened.fileno(), end - start, start)


def _lines(data: bytes) -> list[str]:
    """The lines that are not empty, without control characters: a game must not control the terminal."""
    lines = data.decode("utf-8", "replace").splitlines()
    return [" " * (len(line) - len(line.lstrip())) + one_line(line) for line in lines if line.strip()]
