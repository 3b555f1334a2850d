"""The MLflow store of a URI: opens and checks it, and reports its failures in one line.

Knows nothing of trials or models.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from brayx import systems
from brayx.errors import BrayxError, TrackingError, first_line
from brayx.urls import SQLITE, sqlite_path, sqlite_url

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

T = TypeVar("T")

DEFAULT_FILE = "mlflow.db"

_CREATED_S = 60.0
_LOOK_S = 0.05


def tracking_uri(where: str | os.PathLike[str] | None = None) -> str:
    """The absolute tracking URI that ``where`` means.

    Args:
        where: a URI of MLflow's; or the path of a sqlite file, or of the folder that holds ``mlflow.db``; None takes
            the environment's ``MLFLOW_TRACKING_URI``, and without one ``mlflow.db`` in the current folder.
    """
    text = os.fspath(where) if where is not None else os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_FILE
    if "://" in text and not text.startswith(SQLITE):
        return text
    path = (sqlite_path(text) or Path(text)).expanduser().absolute()
    if path.is_dir() or not path.suffix:
        path = path / DEFAULT_FILE
    _, mark, query = text.partition("?") if text.startswith(SQLITE) else ("", "", "")
    return f"{sqlite_url(path)}{mark}{query}"


def check_writable(uri: str) -> str:
    """Makes the folder of a database, and checks that folder and file are writable, without MLflow; ignores servers.

    Args:
        uri: as from `tracking_uri`.

    Returns:
        ``uri``.

    Raises:
        TrackingError: the folder or the file cannot be written.
    """
    path = sqlite_path(uri)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.exists() and not os.access(path, os.W_OK):
                # Not by opening it: closing any descriptor of the file drops the locks that this process's connections
                # hold, and then another process deletes the log that they still write to.
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise TrackingError(
                f"MLflow database {path} is not writable ({error.strerror}): name another with `tracking`",
                file=str(path),
            ) from error
    return uri


def initialise(uri: str) -> str:
    """Creates or opens the store, once, in the process that starts the job.

    Args:
        uri: as from `tracking_uri`.

    Returns:
        ``uri``.

    Raises:
        TrackingError: the folder cannot be written, the file is no database or of another MLflow's schema, or the
            server does not answer.
    """
    path = sqlite_path(check_writable(uri))
    if path is not None:
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=20)) as connection:
                # Readers (`mlflow ui`, the progress display) then never hold up the writer, nor it them.
                connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.Error as error:
            raise TrackingError(f"{path} cannot be used as an MLflow database: {error}", file=str(path)) from error
    with telling(f"cannot open the MLflow store {uri}"):
        client_of(uri).search_experiments(max_results=1)
    return uri


_importing = threading.Lock()
"""Two threads that import parts of MLflow at once may each see the other's half."""


def import_mlflow() -> None:
    """Imports MLflow without its telemetry. It takes a second; call it in advance where possible."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    with _importing:
        import mlflow.tracking  # noqa: F401


@functools.lru_cache(maxsize=8)
def client_of(uri: str) -> MlflowClient:
    """MLflow's client of a store, made once in a process."""
    import_mlflow()
    from mlflow.tracking import MlflowClient

    atexit.register(_close_connections)
    logging.getLogger("mlflow.store").setLevel(logging.WARNING)
    # MLflow logs the traceback of each failure here, and also raises it.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    path = sqlite_path(uri)
    if path is None or not path.parent.exists():
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    with _alone(path):
        escaped = Path(uri.removeprefix(SQLITE)).parent
        existed = escaped.exists()
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        if not existed:  # MLflow makes a folder with the escaped name, once for trials and once for models
            client.search_registered_models(max_results=1)
            with contextlib.suppress(OSError):
                os.removedirs(escaped)
        return client


def _close_connections() -> None:
    """Closes the connections that MLflow's stores keep open; sqlite then removes its log, ``mlflow.db-wal``.

    `brayx.shutdown.leave` ends a process without the clean-up of objects that would close them.
    """
    for name in ("tracking", "model_registry"):
        store = sys.modules.get(f"mlflow.store.{name}.sqlalchemy_store")
        for engine in list(getattr(getattr(store, "SqlAlchemyStore", None), "_engine_map", {}).values()):
            engine.dispose()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds other processes back from opening a database: if two create it, MLflow's migrations race."""
    folder = systems.open_folder(path.parent)
    try:
        until = time.monotonic() + _CREATED_S
        while not systems.lock(folder) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        yield
    finally:
        systems.close(folder)


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Converts exceptions of MLflow, its database or its files to a `TrackingError` that begins with ``what``."""
    try:
        yield
    except BrayxError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, sqlite3.Error):  # MLflow's message begins with SQLAlchemy's
            cause = cause.__cause__ or cause.__context__
        raise TrackingError(f"{what}: {first_line(cause or error)}") from error


def get_or_none(get: Callable[[str], T], key: str) -> T | None:
    """What a getter of MLflow's client returns for ``key``; None: MLflow has nothing of this id or name.

    MLflow refuses some ids and names as invalid. Nothing can have them, so they are treated like missing ones.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST, ErrorCode

    try:
        return get(key)
    except MlflowException as error:
        if error.error_code in map(ErrorCode.Name, (RESOURCE_DOES_NOT_EXIST, INVALID_PARAMETER_VALUE)):
            return None
        raise
