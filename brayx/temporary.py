"""Temporary folders that are removed at their end: also those of a killed process, by the next one that makes some.

The process that makes a folder locks it for as long as it lives, and so do the children that it forks. Unlike process
ids, locks are never reused, and they hold across containers. Knows nothing of the files' content.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "brayx-temporary-"
_OUTPUT = "output"
_REMOVAL_S = 1.0
_KEPT_S = 7 * 24 * 3600.0
"""How long the output of failed games is kept."""
_folders: list[Path] = []
"""Folders of `temporary_files` that are in use."""
_outside: list[str] = []
"""For each of these, where the output of failed games goes."""
_swept: set[str] = set()
"""Folders that this process has swept."""


@contextlib.contextmanager
def temporary_files(*, output: bool = False) -> Iterator[str]:
    """A context in which this process and its children write temporary files to a folder, which is removed afterwards.

    Ray's files stay where they were: the paths of its sockets must be short, and other commands look for a running Ray
    there. Torch's compiled code stays too, for the next run.

    Args:
        output: whether this includes the output of failed games, see `output_folder`.

    Yields:
        Path of the folder.
    """
    variables = {
        "RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"),
    }
    found = tempfile.tempdir
    with temporary_folder("files") as folder:
        variables["TMPDIR"] = str(folder)
        before = {name: os.environ.get(name) for name in variables}
        _folders.append(folder)
        _outside.append(str(folder) if output else tempfile.gettempdir())
        os.environ.update(variables)
        tempfile.tempdir = str(folder)
        try:
            yield str(folder)
        finally:
            tempfile.tempdir = found
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            _folders.remove(folder)
            _outside.pop()


@contextlib.contextmanager
def temporary_folder(name: str, parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder, which is removed at the end of the context.

    Args:
        name: what is in it, as a part of its name.
        parent: where it is; None: with the other temporary files.
    """
    folder, owner = _made(parent or tempfile.gettempdir(), name)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(owner)


@contextlib.contextmanager
def output_folder() -> Iterator[Path]:
    """A new folder for output that outlives this process if files are left in it at the end; a later process removes
    them after a week."""
    folder, owner = _made(_outside[-1] if _outside else tempfile.gettempdir(), _OUTPUT)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
        os.close(owner)


def remove_temporary_files() -> None:
    """Removes the folders now, before this process is killed."""
    for folder in _folders[:]:  # another thread may remove one meanwhile
        _remove(folder)


def _made(parent: str | os.PathLike[str], name: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    parent = os.fspath(parent)
    if parent not in _swept:
        _swept.add(parent)
        with contextlib.suppress(OSError):  # not readable
            _sweep(parent)
    new = Path(tempfile.mkdtemp(prefix=".brayx-new-", dir=parent))
    owner = os.open(new, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks, where nobody sweeps either
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # It gets its name once it is locked, so that nobody takes it for one that is left.
    return new.rename(Path(parent, f"{_PREFIX}{name}-{new.name.rpartition('-')[2]}")), owner


def _sweep(parent: str) -> None:
    """Removes this user's folders whose owner has ended; never follows a link."""
    for name in os.listdir(parent):
        if not name.startswith(_PREFIX):
            continue
        folder = Path(parent, name)
        with contextlib.suppress(OSError):  # of another user, removed meanwhile, or in use
            owner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(owner)
                if found.st_uid != os.geteuid():
                    continue
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(found, os.lstat(folder)) and not _is_kept(folder):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(owner)


def _is_kept(folder: Path) -> bool:
    """Whether it holds output that was written lately."""
    if not folder.name.startswith(f"{_PREFIX}{_OUTPUT}-"):
        return False
    return any(time.time() - path.lstat().st_mtime < _KEPT_S for path in folder.iterdir())


def _remove(folder: Path) -> None:
    """Removes a folder; retries while a process that is just ending still writes into it."""
    deadline = time.monotonic() + _REMOVAL_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.05)
