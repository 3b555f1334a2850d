"""A module that draws boards, for the tests of drawing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

RENDERS = """
import time
import numpy as np

class Board:  # unpickles only once this module is loaded
    def __init__(self, shade):
        self.shade = shade

def render(episode):
    return [np.full((20, 30, 3), state.board.shade, np.uint8) for state in episode]

def single(episode):
    return np.full((20, 30, 3), episode[-1].board.shade, np.uint8)

def slow(episode):
    time.sleep(0.3)
    return render(episode)

def hang(episode):
    time.sleep(1000.0)

def wrong(episode):
    return [7]
"""


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of a module beside the job's YAML, which other processes find only by its folder."""
    (tmp_path / "own_renders.py").write_text(RENDERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    board_class = importlib.import_module("own_renders").Board
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    yield board_class
    del sys.modules["own_renders"]
