"""Recordings: sessions stored tick by tick in files.

`open` reads them, `dataset` turns them into training data, `compare` feeds them to versions of a model, `log` copies
them to a trial. Knows nothing of Ray or doors; only `open` and `log` know MLflow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brayx.recording.comparison import Comparison as Comparison
    from brayx.recording.comparison import NotCompared as NotCompared
    from brayx.recording.comparison import compare as compare
    from brayx.recording.source import dataset as dataset
    from brayx.recording.trials import log as log
    from brayx.recording.trials import open as open
    from brayx.recording.version import Version as Version

__all__ = ["Comparison", "NotCompared", "Version", "compare", "dataset", "log", "open"]

_HOME = {
    "Comparison": "brayx.recording.comparison",
    "NotCompared": "brayx.recording.comparison",
    "Version": "brayx.recording.version",
    "compare": "brayx.recording.comparison",
    "dataset": "brayx.recording.source",
    "log": "brayx.recording.trials",
    "open": "brayx.recording.trials",
}


def __getattr__(name: str) -> Any:
    """Imports a module on first use: importing Arrow is slow, and recording does not need it."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
