"""Temporary folders that are always removed: if a process is killed, the next one that makes a folder removes its own.

A process locks its folders as long as it lives; so do the children that it forks. Unlike a process id, a lock is never
reused, and it holds across containers. Knows nothing of the files' content.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from brayx import systems

_PREFIX, _NEW = "brayx-temporary-", ".brayx-new-"
_OUTPUT = "output"
_REMOVAL_S = 1.0
_LOCKING_S = 60.0
"""Longest time until a new folder is locked."""
_KEPT_S = 7 * 24 * 3600.0
"""How long the output of failed games is kept."""
_folders: list[Path] = []
"""Folders of `temporary_files` that are in use."""
_output_parents: list[str] = []
"""For each of these folders, where the output of failed games goes."""
_swept: set[str] = set()
"""Folders in which this process has removed what killed processes left."""


@contextlib.contextmanager
def temporary_files(*, output: bool = False) -> Iterator[str]:
    """A context in which this process and its children write temporary files to a folder, which is removed afterwards.

    Ray's files stay where they were: the paths of its sockets must be short, and other commands look for a running Ray
    there. Torch's compiled code stays too, for the next run.

    Args:
        output: also put `output_folder` into this folder, so that it is removed, too.

    Yields:
        Path of the folder.
    """
    variables = {
        "RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or os.path.join(tempfile.gettempdir(), f"torchinductor_{systems.user()}"),
    }
    previous = tempfile.tempdir
    with temporary_folder("files") as folder:
        variables["TMPDIR"] = str(folder)
        before = {name: os.environ.get(name) for name in variables}
        _folders.append(folder)
        _output_parents.append(str(folder) if output else _output_parent())
        os.environ.update(variables)
        tempfile.tempdir = str(folder)
        try:
            yield str(folder)
        finally:
            tempfile.tempdir = previous
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            _folders.remove(folder)
            _output_parents.pop()


@contextlib.contextmanager
def temporary_folder(name: str, parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder, which is removed at the end of the context.

    Args:
        name: what the folder holds, as a part of its name.
        parent: folder that gets it; None: the one for temporary files.
    """
    folder, lock = _new_folder(parent or tempfile.gettempdir(), name)
    try:
        yield folder
    finally:
        _remove(folder)
        systems.close(lock)


@contextlib.contextmanager
def output_folder() -> Iterator[Path]:
    """A new folder for the output of games. Files that are left in it outlive this process; a later process removes
    them after a week."""
    folder, lock = _new_folder(_output_parent(), _OUTPUT)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
        systems.close(lock)


def _output_parent() -> str:
    """Where the output of failed games goes."""
    return _output_parents[-1] if _output_parents else tempfile.gettempdir()


def remove_temporary_files() -> None:
    """Removes the folders now, before this process is killed."""
    for folder in _folders[:]:  # another thread may remove one meanwhile
        _remove(folder)


def _new_folder(parent: str | os.PathLike[str], name: str) -> tuple[Path, int]:
    """Makes a folder; returns it and the descriptor that holds its lock."""
    parent = os.fspath(parent)
    if parent not in _swept:
        _swept.add(parent)
        with contextlib.suppress(OSError):  # not readable
            _sweep(parent)
    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock = systems.open_folder(new)
    with contextlib.suppress(OSError):  # a file system without locks, where no process sweeps either
        systems.lock(lock)
    # Rename it only now that it is locked: another process would take an unlocked one for abandoned.
    return new.rename(Path(parent, f"{_PREFIX}{name}-{new.name.rpartition('-')[2]}")), lock


def _sweep(parent: str) -> None:
    """Removes this user's folders whose process has ended; never follows a link."""
    if not systems.can_lock():
        return
    for name in os.listdir(parent):
        if not name.startswith((_PREFIX, _NEW)):
            continue
        folder = Path(parent, name)
        with contextlib.suppress(OSError):  # of another user, removed meanwhile, or in use
            lock = systems.open_folder(folder, follow=False)
            try:
                opened = os.fstat(lock)
                is_new = name.startswith(_NEW) and time.time() - opened.st_mtime < _LOCKING_S
                if opened.st_uid != systems.user() or is_new:  # a lock here would keep its process from locking it
                    continue
                if systems.lock(lock) and os.path.samestat(opened, os.lstat(folder)) and not _is_kept(folder):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                systems.close(lock)


def _is_kept(folder: Path) -> bool:
    """Whether a folder holds output of games from the last week."""
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
