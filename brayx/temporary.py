"""Temporary files of a command, in one folder that is removed at its end.

A killed process cannot remove its own files, so the process that started it does. Knows nothing of the files' content.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator

_REMOVAL_S = 1.0
_folders: list[str] = []
"""Folders of `temporary_files` that are in use."""


@contextlib.contextmanager
def temporary_files() -> Iterator[str]:
    """A context in which this process and its children write temporary files to a folder, which is removed afterwards.

    Ray's files stay where they were: the paths of its sockets must be short, and other commands look for a running Ray
    there. Torch's compiled code stays too, for the next run.

    Yields:
        Path of the folder.
    """
    variables = {
        "RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"),
    }
    folder, found = tempfile.mkdtemp(prefix="brayx-"), tempfile.tempdir
    variables["TMPDIR"] = folder
    before = {name: os.environ.get(name) for name in variables}
    _folders.append(folder)
    os.environ.update(variables)
    tempfile.tempdir = folder
    try:
        yield folder
    finally:
        tempfile.tempdir = found
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _remove(folder)
        _folders.remove(folder)


def _remove(folder: str) -> None:
    """Removes a folder; retries while a process that is just ending still writes into it."""
    deadline = time.monotonic() + _REMOVAL_S
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.exists(folder):
            time.sleep(0.05)


def remove_temporary_files() -> None:
    """Removes the folders now, before this process is killed."""
    for folder in _folders[:]:  # another thread may remove one meanwhile
        _remove(folder)
