"""Draws recorded ticks after the fact, by the job's `render` or board, from what their recording keeps.

Knows nothing of pages.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from brayx.actor.agent import State
from brayx.components import load
from brayx.console.games import BoardDocument, checked_board
from brayx.console.source import Source
from brayx.console.ticks import body_of
from brayx.errors import AgentError, BadBody, BrayxError
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.recording.columns import TickColumns, texts
from brayx.recording.drawing import Drawing
from brayx.recording.live_frames import DrawingProcess
from brayx.recording.reader import Recording
from brayx.types import Step

_IDLE_S = 10.0
"""The process ends this long after its last picture."""
_LOOK_S = 0.5
_OF_STEP = ("obs", "action", "log_prob", "policy_version")
_OWN = ("session", "game", "agent", "tick", "kind", "input", "output", "end")
"""Attributes of a state that no array replaces."""


class RecordedDrawing:
    """Draws recorded ticks. Thread safe. Its process runs while somebody looks at recordings.

    Args:
        source: what the console shows.

    Attributes:
        has_frames: the job has a `render`.
        has_boards: the job has a board that draws.
    """

    def __init__(self, source: Source) -> None:
        self._process = None if source.render is None else DrawingProcess(Drawing(*source.render))
        self._board = source.drawn_board
        self._lock = threading.Lock()
        self._drawn_at = 0.0
        self._runs = False
        self.has_frames, self.has_boards = source.render is not None, source.drawn_board is not None

    def frame(self, episode: Recording, tick: int) -> bytes | None:
        """The picture of a recorded tick, as a PNG; None: the job draws none.

        Raises:
            BadRecording: it cannot be read, or there is no such tick.
            AgentError: the job's function failed, for example because the recording lacks what it needs.
        """
        process = self._process
        if process is None:
            return None
        state = state_of(episode, tick)
        with self._lock:
            image, failure = process.draw(state)
            self._drawn_at = time.monotonic()
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._end_unused, args=(process,), name="brayx-drawn", daemon=True).start()
        if failure:
            raise AgentError(failure)
        return image

    def _end_unused(self, process: DrawingProcess) -> None:
        """Ends the process once no viewer has looked at a picture for a while."""
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                if time.monotonic() - self._drawn_at > _IDLE_S:
                    process.end()
                    self._runs = False
                    return

    def board(self, episode: Recording, tick: int) -> BoardDocument | None:
        """The board of a recorded tick, or of the stop at the index after the last; None: the job draws none. Errors
        as for `frame`.
        """
        if self._board is None:
            return None
        state = (stop_of(episode) if tick == len(episode) else None) or state_of(episode, tick)
        try:
            return checked_board(load(*self._board)(state))
        except BrayxError:
            raise
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise AgentError(f"`{self._board[1]}` failed: {why}") from error


def state_of(episode: Recording, tick: int) -> State:
    """The state of a recorded tick: its body, its reply, and the arrays that the recording keeps of it.

    Args:
        episode: the recorded session.
        tick: index of the tick in the recording.
    """
    columns = episode.read(tick, 1)
    if not len(columns.number):
        episode.image(tick)  # raises the error for a tick that it does not have
    (body,), (reply,) = texts(columns.input), texts(columns.output)
    state = State(
        episode.session, tick=int(columns.number[0]), input=_parsed(episode.start, body), output=body_of(reply)
    )
    arrays = _nested(columns)
    for name, value in arrays.items():
        if name not in _OWN:
            setattr(state, name, value)
    if "obs" in arrays and "action" in arrays:
        log_prob, version = arrays.get("log_prob", 0.0), arrays.get("policy_version", 0)
        others = {name: value for name, value in arrays.items() if name not in _OF_STEP}
        state.step = Step(arrays["obs"], arrays["action"], log_prob, version, others)
    return state


def stop_of(episode: Recording) -> State | None:
    """The state of a recorded session's stop; None: it had no body."""
    last = episode.read(len(episode) - 1, names=[])
    if not (body := last.stop[-1]):
        return None
    return State(
        episode.session, tick=int(last.number[-1]) + 1, kind="stop", input=_parsed(episode.start, body, "stop")
    )


def _parsed(start: str, body: bytes, kind: str = "tick") -> Any:
    """A tick's or stop's body as agents see it: by the contract in the session's start, or else as JSON or text."""
    try:
        bodies = ContractBodies(Contract.parse(body_of(start.encode(errors="surrogateescape"))))
        return bodies.decode_stop(body) if kind == "stop" else bodies.decode(body)
    except BadBody:
        return body_of(body)


def _nested(columns: TickColumns) -> dict[str, Any]:
    """The arrays of the only tick by name; those with paths in dictionaries."""
    nested: dict[str, Any] = {}
    for path, array in columns.arrays.items():
        *above, name = path.split("/")
        place = nested
        for part in above:
            inner = place.get(part)
            place[part] = place = inner if isinstance(inner, dict) else {}
        place[name] = np.asarray(array[0])
    return nested
