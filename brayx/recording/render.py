"""Pictures of episodes: a user's render functions over a game that was just played, into the trial's artifacts.

Drawing takes place in another process than the one that answers ticks: on Ray in a task. One is drawn at a time; a
game that ends while another is drawn is skipped. Knows nothing of the pictures' content.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from brayx.actor.agent import State
from brayx.actor.logs import SessionLog
from brayx.components import load, load_module
from brayx.errors import ConfigError
from brayx.metrics import significant
from brayx.metrics.charts import CHARTS
from brayx.temporary import temporary_folder
from brayx.tracking import Trial
from brayx.tracking.pictures import poster
from brayx.tracking.tensorboard import Events, writing_events

logger = logging.getLogger("ray.serve")

ARTIFACTS = "episodes"
"""Folder of the pictures among a trial's artifacts."""
_FRAME_MS = 50
_SHOWN_FRAMES = 200
_MAX_STATES = 10_000


class Render(NamedTuple):
    """A function that draws episodes.

    Attributes:
        module, function: where it is. It takes ``list[State]`` and returns an image ``[height, width, 3]`` uint8, or a
            list of images, which becomes an animation.
        video: format of an animation.
    """

    module: str
    function: str
    video: Literal["gif", "mp4"] = "gif"


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

    def open(self, session: str, start: bytes, player: str, why: str, reply: bytes) -> _Drawn | None:
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
        self._states: deque[State] = deque(maxlen=_MAX_STATES)
        self._failed = False

    def tick(self, state: State, body: bytes, reply: bytes, began: float, arrived: float) -> None:
        if not self._failed:  # a failed tick's state may be incomplete
            self._states.append(state)

    def event(self, what: str, *, last: bool = False) -> None:
        self._failed = what.startswith("error:")

    def end(self, reason: str, result: float | None) -> None:
        if self._states:
            self._draw(list(self._states), result)


def log_failure(drawing: Future[Any]) -> None:
    """Logs that a drawing failed as a whole: its process died, or the trial did not accept the file."""
    error = drawing.exception()
    if error is not None:
        logger.error("an episode could not be drawn: %s: %s", type(error).__name__, error)


def draw_episode(
    episode: list[State], returned: float | None, renders: Mapping[str, Render], folder: str, trial: Trial
) -> list[str]:
    """Draws one episode with every render function; returns the paths of the saved files below `ARTIFACTS`.

    A file is ``NAME/step-0068331-return-500.png``: the function's component, the trial's env steps, the game's return.
    A poster of it joins the series ``episodes/NAME``, over whose steps MLflow's page has a slider; the trial's event
    files get the picture or the animation, too.

    Args:
        episode: the states of a game.
        returned: return of the game, if an agent recorded one.
        renders: render functions by component name.
        folder: where modules are looked up first.
        trial: trial that gets the pictures.
    """
    saved = []
    steps = int(trial.metrics().get(CHARTS["env_steps"], 0.0))
    file = f"step-{steps:07}" + ("" if returned is None else f"-return-{significant(returned)}")
    with temporary_folder("render") as temporary:
        for name, render in renders.items():
            try:
                frames = frames_of(load(render.module, render.function, folder)(episode))
                path = save_frames(frames, f"{temporary}/{file}", render.video)
            except Exception:
                logger.exception("render %s failed", name)
                continue
            trial.log_file(path, f"{ARTIFACTS}/{name}")
            saved.append(f"{name}/{path.name}")
            trial.log_image(poster(frames), f"{ARTIFACTS}/{name}", steps)
            if trial.tensorboard:
                _show(trial, name, frames, steps)
    return saved


def draw_pickled(
    trial: Trial, episode: bytes, returned: float | None, renders: Mapping[str, Render], folder: str
) -> list[str]:
    """As `draw_episode`, for a pickled episode; its classes may be in modules in ``folder``."""
    for render in renders.values():
        load_module(render.module, folder)  # which reads that folder from then on
    return draw_episode(pickle.loads(episode), returned, renders, folder, trial)


def frames_of(picture: Any) -> list[np.ndarray]:
    """The frames that a render function returned: one image, or a list of them.

    Raises:
        ConfigError: it is neither; an image is ``[height, width, 3]`` uint8.
    """
    frames = [picture] if isinstance(picture, np.ndarray) else list(picture)
    for frame in frames:
        if not (isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3):
            got = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
            raise ConfigError(f"a render function must return images [height, width, 3] uint8, got {got}")
    if not frames:
        raise ConfigError("a render function returned an empty list, expected images [height, width, 3] uint8")
    return frames


def save_frames(frames: Sequence[np.ndarray], stem: str, video: Literal["gif", "mp4"] = "gif") -> Path:
    """Writes one frame as PNG, and several as an animation.

    Args:
        frames: at least one, as from `frames_of`.
        stem: path without its ending.
        video: format of an animation.
    """
    path = Path(f"{stem}.{'png' if len(frames) == 1 else video}")
    if path.suffix == ".mp4":
        _write_mp4(frames, path)
    else:
        path.write_bytes(_encoded(frames))
    return path


def _encoded(frames: Sequence[np.ndarray]) -> bytes:
    """One frame as a PNG file, several as an animated GIF."""
    from PIL import Image

    first, *others = [Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    if others:
        first.save(file, "GIF", save_all=True, append_images=others, duration=_FRAME_MS, loop=0)
    else:
        first.save(file, "PNG")
    return file.getvalue()


def _write_mp4(frames: Sequence[np.ndarray], path: Path) -> None:
    """H.264 in the form that every browser plays: sides are even, so an odd one repeats its last line."""
    import av

    height, width = (side + side % 2 for side in frames[0].shape[:2])
    with av.open(path, "w", options={"movflags": "faststart"}) as file:
        stream = file.add_stream("libx264", rate=1000 // _FRAME_MS, width=width, height=height, pix_fmt="yuv420p")
        for frame in frames:
            odd = [(0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)]
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.pad(frame, odd, "edge"), format="rgb24")))
        file.mux(stream.encode())


def _show(trial: Trial, name: str, frames: Sequence[np.ndarray], step: int) -> None:
    """Writes a picture, or an animation of at most `_SHOWN_FRAMES` frames, to an event file that has only it."""
    at = np.unique(np.linspace(0, len(frames) - 1, _SHOWN_FRAMES).round().astype(int))
    height, width = frames[0].shape[:2]
    with writing_events(trial), Events(Path(trial.tensorboard, ARTIFACTS)) as events:
        events.image(name, _encoded([frames[index] for index in at]), (width, height), step)
