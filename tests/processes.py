"""The processes of this test run: those with its mark, which `tests/conftest.py` sets."""

from __future__ import annotations

import os

import psutil

from brayx.shutdown import marked

SESSION_MARK = "BRAYX_TEST_SESSION"
RAY_IS_LATE = "timed out during startup"
"""Ray's words for a node that was not up in time, which happens on a busy machine."""

ray_trouble: list[str] = []
"""Failed starts of Ray that were tried again; the summary of the tests shows them."""


def ours(*words: str) -> list[psutil.Process]:
    """Living processes that this run has started, with all ``words`` in their command line."""
    return marked(SESSION_MARK, os.environ[SESSION_MARK], *words)
