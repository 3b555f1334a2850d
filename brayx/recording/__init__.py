"""Recordings: sessions tick by tick, in files. `open` reads them.

Knows nothing of Ray, MLflow or doors.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brayx.recording.reader import open as open

__all__ = ["open"]


def __getattr__(name: str) -> Any:
    """Imports the reader on first use: importing Arrow is slow, and recording does not need it."""
    if name == "open":
        from brayx.recording import reader

        return reader.open
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
