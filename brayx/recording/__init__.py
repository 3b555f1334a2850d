"""Recordings: sessions tick by tick, in files. `open` reads them, `dataset` makes demonstrations of them.

Knows nothing of Ray, MLflow or doors.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brayx.recording.reader import open as open
    from brayx.recording.source import dataset as dataset

__all__ = ["dataset", "open"]

_HOME = {"dataset": "brayx.recording.source", "open": "brayx.recording.reader"}


def __getattr__(name: str) -> Any:
    """Imports the reader on first use: importing Arrow is slow, and recording does not need it."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
