"""Python's garbage collector, which rests while modules are imported. Knows nothing of the modules."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing(module: str) -> Iterator[None]:
    """Collects nothing inside, and afterwards nothing that exists by then; without effect if ``module`` is imported.

    torch and MLflow make hundreds of thousands of objects that stay. Looking for garbage among them again and again
    takes a fifth of the time of their import.
    """
    if module in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
