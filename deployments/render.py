"""Pictures of episodes: a user's render functions over a game that was just played, into the trial's artifacts.

Drawing takes place in another process than the one that answers ticks: on Ray in a task. One is drawn at a time; a
game that ends while another is drawn is skipped. Knows nothing of the pictures' content.
"""

from __future__ import annotations

import logging
import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from brayx.actor.agent import State
from brayx.actor.logs import SessionLog
from brayx.charts import CHARTS
from brayx.components import load, load_module
from brayx.errors import ConfigError
from brayx.metrics import significant
from brayx.tracking import Trial

logger = logging.getLogger("ray.serve")

ARTIFACTS = "episodes"
"""Folder of the pictures among a trial's artifacts."""
_FRAME_MS = 50
_MOST_STATES = 10_000


class EpisodeRenderer:
    """Draws the game of every ``every``-th session when it ends.

    Args:
        draw: starts to draw a game with its return in another thread or process; returns the future.
        every: number of sessions from one drawing to the next.
    """

    on_request = False

    def __init__(self, draw: Callable[[list[State], float | None], Future[Any]], *, every: int) -> None:
        self._begin = draw
        self._every = every
        self._sessions = 0
        self._drawing: Future[Any] | None = None

    def open(self, session: str, start: bytes, player: str, why: str) -> _Drawn | None:
        """See `brayx.actor.logs.SessionRecorder.open`."""
        self._sessions += 1
        return _Drawn(self.draw) if (self._sessions - 1) % self._every == 0 else None

    def draw(self, episode: list[State], returned: float | None) -> None:
        """Draws a game; skips it while another one is being drawn."""
        if self._drawing is not None and not self._drawing.done():
            return
        self._drawing = self._begin(episode, returned)
        self._drawing.add_done_callback(log_failure)


class _Drawn(SessionLog):
    """The newest states of a session that is drawn when it ends."""

    def __init__(self, draw: Callable[[list[State], float | None], None]) -> None:
        self._draw = draw
        self._states: deque[State] = deque(maxlen=_MOST_STATES)
        self._failed = False

    def tick(self, state: State, body: bytes, reply: bytes, began: float, arrived: float) -> None:
        if not self._failed:  # a failed tick's state may be incomplete
            self._states.append(state)

    def event(self, what: str, *, last: bool = False) -> None:
        self._failed = what == "error"

    def end(self, reason: str, result: float | None) -> None:
        if self._states:
            self._draw(list(self._states), result)


def drawing_in_ray(
    renders: Mapping[str, tuple[str, str]], folder: str, trial: Trial
) -> Callable[[list[State], float | None], Future[Any]]:
    """Draws games in Ray tasks; arguments as for `draw_episode`."""
    import ray

    task: Any = ray.remote(num_cpus=0, max_retries=0)(draw_episode)
    return lambda episode, returned: task.remote(episode, returned, dict(renders), folder, trial).future()


def log_failure(drawing: Future[Any]) -> None:
    """Logs that a drawing failed as a whole: its process died, or the trial did not accept the file."""
    error = drawing.exception()
    if error is not None:
        logger.error("an episode could not be drawn: %s: %s", type(error).__name__, error)


def draw_episode(
    episode: list[State], returned: float | None, renders: Mapping[str, tuple[str, str]], folder: str, trial: Trial
) -> list[str]:
    """Draws one episode with every render function; returns the paths of the saved files below `ARTIFACTS`.

    A file is ``NAME/step-0068331-return-500.png``: the function's component, the trial's env steps, the game's return.

    Args:
        episode: the states of a game.
        returned: return of the game, if an agent recorded one.
        renders: ``(module, function)`` by component name; a function takes ``list[State]`` and returns an image
            ``[height, width, 3]`` uint8, or a list of images, which becomes an animation.
        folder: where modules are looked up first.
        trial: trial that gets the pictures.
    """
    saved = []
    steps = trial.metrics().get(CHARTS["env_steps"], 0.0)
    file = f"step-{steps:07.0f}" + ("" if returned is None else f"-return-{significant(returned)}")
    with tempfile.TemporaryDirectory(prefix="brayx-render-") as temporary:
        for name, (module, function) in renders.items():
            try:
                picture = load(module, function, folder)(episode)
                path = save_picture(picture, f"{temporary}/{file}")
            except Exception:
                logger.exception("render %s failed", name)
                continue
            trial.log_file(path, f"{ARTIFACTS}/{name}")
            saved.append(f"{name}/{path.name}")
    return saved


def draw_pickled(
    trial: Trial, episode: bytes, returned: float | None, renders: Mapping[str, tuple[str, str]], folder: str
) -> list[str]:
    """As `draw_episode`, for a pickled episode; its classes may be in modules in ``folder``."""
    for module, _ in renders.values():
        load_module(module, folder)  # which looks there from then on
    return draw_episode(pickle.loads(episode), returned, renders, folder, trial)


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
