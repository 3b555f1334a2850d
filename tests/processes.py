"""The processes of this test run: those with its mark, which `tests/conftest.py` sets; and whether one runs."""

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


def alive(pid: int) -> bool:
    """Whether a process runs: it has neither ended nor become a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
