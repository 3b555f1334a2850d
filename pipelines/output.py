"""The output of a game: a bounded file, and the line in it that says why the game failed.

Knows how the errors of Node, C#, Java, Go, Rust, C++ and Python look, and nothing of processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from brayx.logs import one_line

MAX_BYTES = 2**20
"""A file of more bytes is cut to the newest half, when it is next read."""
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
    """The first line that looks like an error, else the last line; empty if there is none.

    A header of an error gets its text from the next line: ``Unhandled Exception:`` of Mono, ``what()`` of C++.
    """
    lines = [line.rstrip() for line in lines if line.strip()]
    in_traceback = False
    for at, line in enumerate(lines):
        if _ERROR.match(line) or (in_traceback and not line[0].isspace()):
            is_header = line.endswith(":") or line.startswith("terminate called")
            return one_line(f"{line} {lines[at + 1].strip()}" if is_header and at + 1 < len(lines) else line)
        in_traceback = in_traceback or line.startswith(_TRACEBACK)
    said = [line for line in lines if not _FOOTER.match(line)] or lines
    return one_line(next(filter(_LIKE_AN_ERROR.match, said), said[-1] if said else ""))


class Output:
    """The file that gets all that a game writes, over all its restarts.

    The game writes the file itself: none of it is lost with this process, and it costs this process no time.

    Args:
        name: name of the file.

    Attributes:
        path: path of the file, once it is open.
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
        """The file, for a game that starts now and appends to it."""
        self._began = self._read = self._size
        return self._opened

    def newest(self) -> list[str]:
        """Lines since the last call, at most the newest 64 KiB. Cuts a file that has grown too large."""
        size = self._size
        data = self._bytes(max(self._read, size - _READ_BYTES), size)
        if len(data) < _READ_BYTES:
            data = data[: data.rfind(b"\n") + 1]  # the rest of the last line may follow
            self._read += len(data)
        else:
            self._read = size
        if size > MAX_BYTES:
            kept = self._bytes(size - MAX_BYTES // 2, size)
            self._opened.truncate(0)
            self._opened.write(kept)
            self._began, self._read = 0, len(kept)
        return _lines(data)

    def said(self) -> tuple[str, list[str]]:
        """Of the game that began last: its error, see `error_in`, and its last ten lines."""
        lines = _lines(self._bytes(self._began, self._size))
        return error_in(lines), lines[-_LAST:]

    def close(self, keep: bool) -> None:
        """Closes the file, and removes it unless it is to be kept."""
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
        return os.pread(self._opened.fileno(), end - start, start)


def _lines(data: bytes) -> list[str]:
    """The lines that are not empty, without control characters; a game controls no terminal."""
    lines = data.decode("utf-8", "replace").splitlines()
    return [" " * (len(line) - len(line.lstrip())) + one_line(line) for line in lines if line.strip()]
