"""Pictures of episodes: a user's render functions over a game that was just played, into the trial's artifacts.

Drawing takes place in a Ray task, away from the replica that answers ticks. One is drawn at a time; a game that ends
while another is drawn is skipped. Knows nothing of what is drawn.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import ray

from brayx.actor.agent import State
from brayx.components import load
from brayx.errors import ConfigError
from brayx.tracking import Trial

logger = logging.getLogger("ray.serve")

ARTIFACTS = "episodes"
"""Folder of the pictures among a trial's artifacts."""
_FRAME_MS = 50


class EpisodeRenderer:
    """Chooses every ``every``-th session and has its game drawn when it ends.

    Args:
        renders: ``(module, function)`` by component name; a function takes ``list[State]`` and returns an image
            ``[height, width, 3]`` uint8, or a list of images, which becomes an animation.
        folder: where modules are looked up first.
        trial: where the pictures go.
        every: sessions from one drawing to the next.
    """

    def __init__(self, renders: Mapping[str, tuple[str, str]], folder: str, trial: Trial, *, every: int) -> None:
        self._renders, self._folder, self._trial = dict(renders), folder, trial
        self._every = every
        self._sessions = 0
        self._drawing: Future[Any] | None = None

    def __call__(self) -> Callable[[list[State]], None] | None:
        """Asked at a session's start: what to do with its states, or None."""
        self._sessions += 1
        return self._draw if (self._sessions - 1) % self._every == 0 else None

    def _draw(self, episode: list[State]) -> None:
        if self._drawing is not None and not self._drawing.done():
            return
        self._drawing = _remote_draw().remote(episode, self._renders, self._folder, self._trial).future()
        self._drawing.add_done_callback(log_failure)


@functools.cache
def _remote_draw() -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(draw_episode)


def log_failure(drawing: Future[Any]) -> None:
    """Says in the log that a drawing failed as a whole: its process died, or the trial took no file."""
    error = drawing.exception()
    if error is not None:
        logger.error("an episode could not be drawn: %s: %s", type(error).__name__, error)


def draw_episode(episode: list[State], renders: Mapping[str, tuple[str, str]], folder: str, trial: Trial) -> list[str]:
    """Draws one episode with every render function, and gives the names of the files it saved in the trial."""
    saved = []
    with tempfile.TemporaryDirectory(prefix="brayx-render-") as temporary:
        for name, (module, function) in renders.items():
            try:
                picture = load(module, function, folder)(episode)
                path = save_picture(picture, f"{temporary}/{name}-{quote(episode[0].session, safe='')[:100]}")
            except Exception:
                logger.exception("render %s failed", name)
                continue
            trial.log_file(path, ARTIFACTS)
            saved.append(path.name)
    return saved


def save_picture(picture: np.ndarray | Sequence[np.ndarray], stem: str) -> Path:
    """Writes an image as PNG, or a list of them as an animated GIF.

    Args:
        picture: ``[height, width, 3]`` uint8, or a non-empty list of such.
        stem: path without its ending.

    Raises:
        ConfigError: it is neither.
    """
    from PIL import Image

    frames = [picture] if isinstance(picture, np.ndarray) else list(picture)
    for frame in frames:
        if not (isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3):
            got = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
            raise ConfigError(f"a render function must return images [height, width, 3] uint8, got {got}")
    if not frames:
        raise ConfigError("a render function returned an empty list, expected images [height, width, 3] uint8")
    images = [Image.fromarray(frame) for frame in frames]
    if isinstance(picture, np.ndarray):
        path = Path(f"{stem}.png")
        images[0].save(path)
    else:
        path = Path(f"{stem}.gif")
        images[0].save(path, save_all=True, append_images=images[1:], duration=_FRAME_MS, loop=0)
    return path
