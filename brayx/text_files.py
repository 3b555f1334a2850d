"""Reads text files that users write, and writes files whole. The error for a file that is not UTF-8 names its encoding
or the bad line."""

from __future__ import annotations

import codecs
import errno
from pathlib import Path

from brayx.errors import ConfigError

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark is its beginning
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_text(path: Path) -> str:
    """Reads a UTF-8 file; drops a byte-order mark.

    Raises:
        OSError: the file cannot be read, or is not UTF-8; ``strerror`` says why.
    """
    data = path.read_bytes()
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            raise _not_utf8(f"it is {name}", path)
    if b"\0" in data:
        raise _not_utf8("it has NUL characters, as UTF-16 does", path)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_utf8(f"line {line} has the byte 0x{data[error.start]:02x}, which is not UTF-8", path) from None


def write_whole(path: Path, text: str) -> None:
    """Writes a UTF-8 file, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", file=str(path)) from None


def _not_utf8(what: str, path: Path) -> OSError:
    return OSError(errno.EILSEQ, f"{what}: save it as UTF-8", str(path))
