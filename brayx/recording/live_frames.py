"""Draws followed sessions with the user's function, in a separate process that runs while somebody watches.

A thread pickles the newest state and waits for its picture, so that neither ticks nor viewers wait: viewers get the
newest finished picture. `LiveFrames` belongs to the process that has the sessions; `main` runs in the one that draws.
Knows nothing of the viewers.
"""

from __future__ import annotations

import json
import pickle
import threading
import time

from brayx import systems
from brayx.actor.agent import State
from brayx.actor.live import NewTicks
from brayx.actor.live_ticks import LiveFrame, LiveTicks
from brayx.children import Channel, Child, RequestFailed
from brayx.recording.columns import ERROR
from brayx.recording.drawing import Drawer, Drawing
from brayx.recording.frames import is_image, png

_MIN_INTERVAL_S = 0.2
"""Minimum time between two pictures, for all sessions together."""
_DRAW_S = 5.0
"""Time limit for a picture; after it the process is killed."""
_START_S = 120.0
"""As `_DRAW_S`, for the first picture, for which the process has to load the user's module beside a busy job."""
_RESTART_S = 5.0
_IDLE_S = 5.0
"""The process ends this long after the last state to draw."""
_MAX_KEPT = 64
"""Maximum sessions whose newest picture is kept: as many as can be followed."""


class LiveFrames:
    """The newest picture of each followed session. Thread safe.

    Args:
        drawing: the user's function; None: no pictures.
    """

    def __init__(self, drawing: Drawing | None) -> None:
        self._process = None if drawing is None else DrawingProcess(drawing)
        self._change = threading.Condition()
        self._waiting: dict[str, State] = {}
        self._frames: dict[str, LiveFrame] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def shown(self, session: str, after: int, news: NewTicks) -> LiveTicks:
        """Ticks for another process, as `NewTicks.shown`, with the session's newest picture.

        The newest tick that did not fail is drawn next.

        Args:
            session: id of the session.
            after: as for `LiveTable.newer`; 0 means a new viewer, who gets no picture yet.
            found: the session's newest ticks.
        """
        ticks = news.shown()
        if self._process is None:
            return ticks
        newest = next((state for state, *_, event in reversed(news.kept) if ERROR not in event), None)
        with self._change:
            if not after:  # a new session may have this id
                self._frames.pop(session, None)
            if newest is not None and not self._closed:
                self._waiting[session] = newest  # keeps the place of an older state, so that each session has its turn
                while len(self._waiting) > _MAX_KEPT:
                    del self._waiting[next(iter(self._waiting))]
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="brayx-live-frames", daemon=True)
                    self._thread.start()
                self._change.notify()
            return ticks._replace(frame=self._frames.get(session))

    def close(self) -> None:
        """Ends the process, also while it draws. Idempotent."""
        with self._change:
            self._closed = True
            thread = self._thread
            self._change.notify()
        if self._process is not None:
            self._process.close()
        if thread is not None:
            thread.join(_DRAW_S)

    def _work(self) -> None:
        process = self._process
        assert process is not None
        while True:
            with self._change:
                if not self._change.wait_for(lambda: self._waiting or self._closed, _IDLE_S) or self._closed:
                    process.end()
                    self._thread = None
                    return
                session = next(iter(self._waiting))
                state = self._waiting.pop(session)
            began = time.monotonic()
            frame = LiveFrame(state.tick, *process.draw(state))
            with self._change:
                self._frames.pop(session, None)  # the most recently drawn comes last
                self._frames[session] = frame
                while len(self._frames) > _MAX_KEPT:
                    del self._frames[next(iter(self._frames))]
                # A slow function runs at most half of the time.
                took = time.monotonic() - began
                self._change.wait_for(lambda: self._closed, max(_MIN_INTERVAL_S - took, took))


class DrawingProcess:
    """Draws states in a separate process. Only one thread at a time may use it.

    Args:
        drawing: the user's function.
    """

    def __init__(self, drawing: Drawing) -> None:
        self._child = Child("brayx.recording.live_frames", json.dumps(drawing), restart_s=_RESTART_S)
        self._failure = ""

    def draw(self, state: State) -> tuple[bytes, str]:
        """The picture of a tick as a PNG, and why there is none. Starts the process if it does not run."""
        try:
            pickled = pickle.dumps([state], protocol=5)
        except Exception as error:  # agents may set anything
            return b"", f"its state does not pickle: {type(error).__name__}: {error}"[:500]
        limit_s = _DRAW_S
        if not self._child.runs:
            if self._child.wait_s:
                return b"", self._failure
            limit_s = _START_S
        try:
            self._child.start()
            image, failure = self._child.ask(pickled, timeout_s=limit_s)
            return image, failure
        except TimeoutError:
            self._child.end()
            self._failure = f"its drawing took more than {limit_s:g} s"
        except (OSError, RequestFailed) as error:
            self._failure = f"the process that draws it {error}"
        return b"", self._failure

    def end(self) -> None:
        """Ends the process; the next picture starts another."""
        self._child.end()

    def close(self) -> None:
        """Ends the process for good, also while it draws. Idempotent."""
        self._child.close()


def main(parent: Channel, drawing: str) -> None:
    """Draws states until the pipe closes."""
    systems.lower_priority(5)  # sessions and learners have priority
    drawer = Drawer(Drawing(*json.loads(drawing)))

    def draw(states: bytes) -> tuple[bytes, str]:
        (image,) = drawer.drawn(states, 1) or [None]
        if not drawer.failure and not is_image(image):
            function = json.loads(drawing)[1]
            return b"", f"{function} returned no image: expected uint8 [height, width] or [height, width, 3]"
        return (b"", drawer.failure) if drawer.failure else (png(image), "")

    parent.serve(draw)
