"""Draws frames of ticks with the user's function. Runs outside the job's process; knows nothing of video."""

from __future__ import annotations

import math
import pickle
import time
from typing import Any, NamedTuple

import numpy as np

from brayx.components import load
from brayx.errors import ConfigError

_AT_ONCE = 8
"""Maximum states in one call."""


class Drawing(NamedTuple):
    """A function that draws ticks.

    Attributes:
        module, function: name of the module, and of the function in it. The function takes a ``list[State]``,
            consecutive ticks of a session, and returns an image for each. One that returns a single image gets the
            ticks one by one.
        folder: where the module is looked up first.
    """

    module: str
    function: str
    folder: str


class Drawer:
    """Draws ticks.

    Attributes:
        left_s: remaining time for drawing; once it is spent, ticks are not drawn.
        slow: number of ticks that were not drawn for lack of time.
        lost: number of ticks that could not be drawn.
        failure: why the last ticks could not be drawn; empty: they were drawn.
    """

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self.left_s = math.inf
        self.slow = self.lost = 0
        self.failure = ""
        self._at_once = _AT_ONCE

    def drawn(self, states: bytes, ticks: int) -> list[Any]:
        """The images of some ticks.

        Args:
            states: pickled list of states, with None for a tick that is not to be drawn.
            ticks: number of states.
        """
        module, name, folder = self._drawing
        try:
            function = load(module, name, folder)  # first: it may bring modules of the classes in states
            loaded = pickle.loads(states)
        except Exception as error:
            self._failed(error, ticks)
            return []
        images: list[Any] = [None] * len(loaded)
        drawable = [index for index, state in enumerate(loaded) if state is not None]
        while drawable:
            if self.left_s <= 0:
                self.slow += len(drawable)
                break
            some, later = drawable[: self._at_once], drawable[self._at_once :]
            began = time.monotonic()
            try:
                drawing = function([loaded[index] for index in some])
                if len(some) > 1 and _is_single(drawing):  # one picture of all states, as Bray's functions draw games
                    self._at_once = 1
                    continue
                drawn = _checked(drawing, len(some), name)
            except Exception as error:  # a user's function may raise anything
                self._failed(error, len(some))
            else:
                self.failure = ""
                for index, image in zip(some, drawn, strict=True):
                    images[index] = image
            finally:
                self.left_s -= time.monotonic() - began
            drawable = later
        return images

    def _failed(self, error: Exception, ticks: int) -> None:
        self.lost += ticks
        self.failure = f"{type(error).__name__}: {error}"[:500]


def _is_single(drawing: Any) -> bool:
    """Whether a function returned an image, not several."""
    return isinstance(drawing, np.ndarray) and drawing.ndim < 4


def _checked(drawing: Any, count: int, name: str) -> list[Any]:
    """The function's result as an image for each of ``count`` states."""
    images = [drawing] if _is_single(drawing) else list(drawing)
    if len(images) != count:
        raise ConfigError(f"{name} returned {len(images)} images for {count} states, expected one for each")
    return images
