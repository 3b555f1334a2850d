"""Draws followed sessions with the user's function, in a separate process that runs while somebody watches.

A thread pickles the newest state and waits for its picture, so that neither ticks nor viewers wait: viewers get the
newest finished picture. `LiveFrames` belongs to the process that has the sessions; `main` runs in the one that draws.
Knows nothing of the viewers.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import sys
import threading
import time
from typing import IO, Any

from brayx.actor.agent import State
from brayx.actor.live import NewTicks
from brayx.actor.live_ticks import LiveFrame, LiveTicks
from brayx.children import start_module
from brayx.recording.columns import ERROR
from brayx.recording.drawing import Drawer, Drawing
from brayx.recording.frames import is_image, png

_MIN_INTERVAL_S = 0.2
"""Minimum time between two pictures, for all sessions together."""
_DRAW_S = 5.0
"""Time limit for a picture; after it the process is killed."""
_START_S = 30.0
"""As `_DRAW_S`, for the first picture, for which the process has to load the user's module."""
_RESTART_S = 5.0
"""Minimum time between two starts of the process. Without it, one that dies would be restarted in a loop."""
_IDLE_S = 5.0
"""The process ends this long after the last state to draw."""
_MAX_KEPT = 64
"""Maximum sessions whose newest picture is kept: as many as can be followed."""
_NICE = 5


class LiveFrames:
    """The newest picture of each followed session. Thread safe.

    Args:
        drawing: the user's function; None: no pictures.
    """

    def __init__(self, drawing: Drawing | None) -> None:
        self._drawing = drawing
        self._change = threading.Condition()
        self._waiting: dict[str, State] = {}
        self._frames: dict[str, LiveFrame] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def shown(self, session: str, after: int, found: NewTicks) -> LiveTicks:
        """Ticks for another process, as `NewTicks.shown`, with the session's newest picture.

        The newest tick that did not fail is drawn next.

        Args:
            session: id of the session.
            after: as for `LiveTable.newer`; 0 means a new viewer, who gets no picture yet.
            found: the session's newest ticks.
        """
        ticks = found.shown()
        if self._drawing is None:
            return ticks
        newest = next((state for state, *_, event in reversed(found.kept) if ERROR not in event), None)
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
        if thread is not None:
            thread.join(_DRAW_S)

    def _work(self) -> None:
        with contextlib.closing(_Process(self._drawing, lambda: self._closed)) as process:
            while True:
                with self._change:
                    if not self._change.wait_for(lambda: self._waiting or self._closed, _IDLE_S) or self._closed:
                        self._thread = None
                        return
                    session = next(iter(self._waiting))
                    state = self._waiting.pop(session)
                began = time.monotonic()
                frame = process.draw(state)
                with self._change:
                    self._frames.pop(session, None)  # the most recently drawn comes last
                    self._frames[session] = frame
                    while len(self._frames) > _MAX_KEPT:
                        del self._frames[next(iter(self._frames))]
                    # A slow function runs at most half of the time.
                    took = time.monotonic() - began
                    self._change.wait_for(lambda: self._closed, max(_MIN_INTERVAL_S - took, took))


class _Process:
    """The process that draws. Belongs to the thread.

    Args:
        drawing: the user's function.
        is_closed: returns whether to stop waiting.
    """

    def __init__(self, drawing: Drawing | None, is_closed: Any) -> None:
        self._drawing, self._is_closed = json.dumps(drawing), is_closed
        self._child: Any = None
        self._started_at = -_RESTART_S
        self._failure = ""

    def draw(self, state: State) -> LiveFrame:
        """The picture of a tick, or why there is none."""
        try:
            pickled = pickle.dumps([state], protocol=5)
        except Exception as error:  # agents may set anything
            return LiveFrame(state.tick, b"", f"its state does not pickle: {type(error).__name__}: {error}"[:500])
        limit_s = _DRAW_S
        if self._child is None:
            if time.monotonic() - self._started_at < _RESTART_S:
                return LiveFrame(state.tick, b"", self._failure)
            self._started_at, limit_s = time.monotonic(), _START_S
            self._child = start_module("brayx.recording.live_frames", self._drawing)
        try:
            pickle.dump(pickled, self._child.stdin)
            self._child.stdin.flush()
            self._wait_for_reply(limit_s)
            return LiveFrame(state.tick, *pickle.load(self._child.stdout))
        except TimeoutError:
            self._failure = f"its drawing took more than {limit_s:g} s"
        except (OSError, EOFError, pickle.UnpicklingError):
            self._failure = "the process that draws it has died"
        self.close()
        return LiveFrame(state.tick, b"", self._failure)

    def _wait_for_reply(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        reply = select.poll()  # `select.select` fails beyond 1024 open files, and a door has one for each session
        reply.register(self._child.stdout, select.POLLIN)
        while not reply.poll(100):
            if time.monotonic() > until or self._is_closed():
                raise TimeoutError

    def close(self) -> None:
        """Kills the process, which has nothing to save."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(OSError):
                child.stdin.close()
            child.stdout.close()
            child.wait()


def main(drawing: str, requests: IO[bytes], replies: IO[bytes]) -> None:
    """Draws one state after the other until the pipe closes."""
    drawer = Drawer(Drawing(*json.loads(drawing)))
    while True:
        try:
            states = pickle.load(requests)
        except (EOFError, pickle.UnpicklingError):  # the sender ended, or was killed while it wrote
            return
        (image,) = drawer.drawn(states, 1) or [None]
        failure = drawer.failure
        if not failure and not is_image(image):
            failure = (
                f"{json.loads(drawing)[1]} returned no image: expected uint8 [height, width] or [height, width, 3]"
            )
        pickle.dump((b"" if failure else png(image), failure), replies)
        replies.flush()


if __name__ == "__main__":
    os.nice(_NICE)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of the user's function must not mix with the replies
    main(sys.argv[1], sys.stdin.buffer, out)
